"""Where a parameter meets the batch: the one place that decides its gradient per sample.

A forward pass computes some tensors from parameters and constants alone (a position table that is
interpolated, a relative position bias read from its table, a standardised weight); call them
*derived*. Sooner or later one function takes a parameter, or a derived tensor, together with
activations: a linear map, a convolution, a norm, an addition. What reaches the parameter through
that call, per row of the batch, is all there is to know, whichever module made the call.

`ParameterInterception` watches the functions of torch during a forward pass. Such a call computes
its output from *detached* parameters, so that autograd computes no weight gradient, and its output
passes a `_Tap`, which in the backward pass hands over the output's gradient and the inputs that the
rule of that function needs.

An activation is known by where it came from, never by its shape: the inputs of the model are
activations, and so is whatever a function makes of one. Where that is lost (in a function that
nobody sees), the tensor passes for a constant, and what a parameter makes of it for derived: that
is exact as well, or ends in a ``p.grad``.

Shape letters: R rows (leading dimension of activations, k to a sample, sample by sample, as in
windowed attention), B samples, T positions, C channels.

Guarantees:
    * A parameter that meets the batch where this module does not look (an ``autograd.Function``, a
      compiled function that holds the parameter itself) gets a ``p.grad``, which the engine reports
      as an error.
    * A parameter is refused by name when it meets a tensor made of the batch whose leading
      dimension is no multiple of the batch size; whose rows were picked by value (a mask, an index
      made of the batch, ``nonzero``), or computed with any that were; or whose leading dimension,
      known to be the batch, was reduced, reordered, cut or concatenated, or is elsewhere now.

    "Known" means: since the input, or since the last function with a parameter, no permutation
    moved it. Where one did and the samples are then mixed, where values leave torch and come back
    (``item``, numpy), and where samples mix inside one function (``einsum``, a product with x.T),
    only the check before a run finds it (`verify_per_sample_gradients`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from hf_dpmuon.grad_sample.contributions import Contribution, OuterProducts, UnitGradients
from hf_dpmuon.grad_sample.engine import at_least_float32
from hf_dpmuon.grad_sample.rows import Order, Rows, order_after

__all__ = ["ParameterInterception"]

logger = logging.getLogger(__name__)

Parameters = tuple[nn.Parameter, ...]
Receive = Callable[..., None]
Signature = tuple[torch.Size, bool]  # the shape of an operand, and whether it requires a gradient
Origin = Tensor | Rows | None  # a derived tensor, or the rows of one made of the batch

# Functions in which each row of the output depends on the same row of every operand, once operands
# of fewer dimensions are broadcast: a derived tensor may be expanded along the rows before them.
ROW_BY_ROW = frozenset(
    ["where", "maximum", "minimum", "rsub", "__pow__", "copy_", "bmm", "baddbmm"]
    + ["cat", "concat", "concatenate", "hstack", "stack", "scaled_dot_product_attention"]
    + [f"__{r}{name}__" for name in ("add", "sub", "mul", "truediv") for r in ("", "r", "i")]
    + [f"{name}{in_place}" for name in ("add", "sub", "mul", "div") for in_place in ("", "_")]
    + [f"{name}{in_place}" for name in ("subtract", "multiply", "divide") for in_place in ("", "_")]
    + [f"{name}{in_place}" for name in ("true_divide", "pow", "lerp") for in_place in ("", "_")]
    + [f"{name}{in_place}" for name in ("addcmul", "addcdiv", "clamp") for in_place in ("", "_")]
)
CONCATENATIONS = frozenset({"cat", "concat", "concatenate", "stack"})
EXPANSIONS = frozenset({"expand", "expand_as", "broadcast_to"})
# Functions that read only the type, device or shape of all tensors but the first.
LIKE_ANOTHER = frozenset({"to", "type_as", "view_as", "reshape_as", "expand_as"})
INDEXING = frozenset({"__getitem__", "index_select", "gather", "take"})
IN_PLACE_OPERATORS = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod")
)
WRITES = frozenset({"__setitem__", "__set__"})  # into their first operand, and return nothing


class _Tap(torch.autograd.Function):
    """The identity; in the backward pass, ``receive(gradient, *saved)``."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, anchor: Tensor | None, receive: Receive, *saved: Tensor
    ) -> Tensor:
        ctx.receive = receive
        ctx.save_for_backward(*saved)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "create_graph=True: a gradient of the model is part of the model or its loss, and "
                "what reaches a parameter through it is not known per sample."
            )
        saved = ctx.saved_tensors  # once: activation checkpointing gives them only once
        with torch.autocast(gradient.device.type, enabled=False):  # also where backward is within
            ctx.receive(gradient, *saved)
        return gradient, None, None, *(None for _ in saved)


def _tap(output: Tensor, receive: Receive, *saved: Tensor) -> Tensor:
    # Without a leaf that asks for gradients, autograd would not call the tap of the first layer.
    anchor = None if output.requires_grad else output.new_zeros((), requires_grad=True)
    tapped: Tensor = _Tap.apply(output, anchor, receive, *(x.detach() for x in saved))
    return tapped


class ParameterInterception(TorchFunctionMode):
    """Reports the gradient of every use of a trainable parameter, per unit.

    Args:
        model: Its parameters that are trainable now are watched.
        report: Called in the backward pass with a parameter and one use's gradients.
        to_units: Sums gradients (B, ...) over the rows of each unit, by what each row counts.
        unit_tokens: Lays (B, T, ...) out as (U, tokens of the unit, ...).
        weighted_rows: Multiplies gradients (B, ...) by what each row counts in its unit.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        report: Callable[[nn.Parameter, Contribution], None],
        to_units: Callable[[Tensor], Tensor],
        unit_tokens: Callable[[Tensor], Tensor],
        weighted_rows: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.batch_size = 0
        self._names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._report = report
        self._to_units = to_units
        self._unit_tokens = unit_tokens
        self._weighted_rows = weighted_rows
        self._sources: MutableMapping[Tensor, Parameters] = WeakIdKeyDictionary()  # of derived ones
        self._expanded_from: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()  # rows were new
        self._aliases: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()  # of derived ones
        self._of_batch: MutableMapping[Tensor, Rows] = WeakIdKeyDictionary()
        self._calls: dict[nn.Module, list[list[tuple[Signature, Origin]]]] = {}
        self._warned: set[tuple[str, str]] = set()
        self._rules: Mapping[Any, Callable[..., Tensor]] = {
            F.linear: self._linear,
            torch.matmul: self._matmul,
            Tensor.matmul: self._matmul,
            Tensor.__matmul__: self._matmul,
            F.conv1d: self._convolution,
            F.conv2d: self._convolution,
            F.conv3d: self._convolution,
            F.embedding: self._embedding,
            F.embedding_bag: self._embedding_bag,
            F.layer_norm: self._norm,
            F.rms_norm: self._norm,
            F.group_norm: self._norm,
            F.instance_norm: self._norm,
        }

    def begin(self, inputs: Sequence[Tensor]) -> None:
        """Prepare for a forward pass of which these are all inputs; their rows are the batch."""
        self.forget()
        self.batch_size = len(inputs[0])
        self._mark(inputs, Rows(Order.SAMPLES))

    def forget(self) -> None:
        """Drop what is known of tensors of the batch, and calls that would be repeated."""
        self._calls.clear()
        self._of_batch = WeakIdKeyDictionary()  # a buffer that was written to is a constant again

    def remember_call(self, module: nn.Module, operands: Iterable[Any]) -> None:
        """Note what a module is called with, in case activation checkpointing calls it again."""
        self._calls.setdefault(module, []).append(
            [
                (_signature(t), t if self._is_shared(t) else self._rows_of(t))
                for t in _tensors(operands)
            ]
        )

    def recall_call(self, module: nn.Module, operands: Iterable[Any]) -> None:
        """Know the operands of a repeated call, where they are new tensors, as those of the first.

        Raises:
            NotImplementedError: If the module was called several times, and which call is repeated
                would decide what an operand is.
        """
        for i, t in enumerate(_tensors(operands)):
            if isinstance(t, nn.Parameter) or t in self._sources or t in self._of_batch:
                continue
            origins: list[Origin] = [
                call[i][1]
                for call in self._calls.get(module, [])
                if i < len(call) and call[i][0] == _signature(t)
            ]
            derived = [origin for origin in origins if isinstance(origin, Tensor)]
            rows = [origin for origin in origins if isinstance(origin, Rows)]
            if derived and any(origin is not derived[0] for origin in origins):
                raise NotImplementedError(
                    f"{self._all_named(derived)}: activation checkpointing repeats a module that "
                    "is called several times with operands that differ in what they are made of; "
                    "checkpoint it with use_reentrant=False, or not at all."
                )
            if derived:
                self._sources[t] = self._parameters_of(derived[0])
                self._aliases[t] = derived[0]
            elif rows:
                self._mark([t], max(rows))

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        operands = list(_tensors((*args, *kwargs.values())))
        if func.__name__ in LIKE_ANOTHER:
            operands = operands[:1]
        shared = [t for t in operands if self._is_shared(t)]
        if shared and torch.is_grad_enabled():
            result = self._meet(func, args, kwargs, operands, shared)
        else:
            result = func(*args, **kwargs)
        self._follow(func, args, kwargs, operands, result)
        return result

    def _meet(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        operands: Sequence[Tensor],
        shared: Sequence[Tensor],
    ) -> Any:
        """Call a function of which some operand is shared by all rows."""
        if func is F.multi_head_attention_forward:
            raise self._no_rule(func, shared)
        if func is F.embedding and kwargs.get("sparse", args[6:7] == (True,)):
            raise NotImplementedError(
                f"{self._all_named(shared)}: an embedding with sparse=True has gradients of a "
                "layout that nothing here reads; do not set it."
            )
        name = func.__name__
        if name in INDEXING | LIKE_ANOTHER | EXPANSIONS:
            return self._derive(func, args, kwargs, shared)
        batched = [t for t in operands if self._is_batched(t)]
        self._check_rows(batched, shared)
        if not batched:
            return self._derive(func, args, kwargs, shared)
        if _is_in_place(name) and not self._is_batched(operands[0]):
            raise self._no_rule(func, shared)  # a derived tensor would become an activation
        if func in self._rules:
            return self._rules[func](func, *args, **kwargs)
        if name in ROW_BY_ROW or self.batch_size == 1:
            return self._row_by_row(func, args, kwargs, batched)
        return self._functorch(func, args, kwargs, shared, batched)

    def _check_rows(self, batched: Sequence[Tensor], shared: Sequence[Tensor]) -> None:
        for t in (*batched, *shared) if self.batch_size > 1 else ():
            rows = self._rows_of(t)
            if rows is None or (t in self._sources and rows.order is not Order.MIXED):
                continue
            if (
                rows.order >= Order.MOVED
                or t.dim() == 0
                or (t not in self._sources and t.shape[0] % self.batch_size)
            ):
                by = f" by {rows.by}" if rows.order >= Order.MOVED else ""
                raise NotImplementedError(
                    f"{self._all_named(shared)} meets a tensor of shape {tuple(t.shape)} that was "
                    f"made of a batch of {self.batch_size}{by}, so its rows are not those of the "
                    "samples; keep the batch in the first dimension, complete and in order, and do "
                    "not reduce over it, or freeze the parameter with requires_grad_(False)."
                )

    # ---- what a tensor is ----

    def _is_shared(self, t: Tensor) -> bool:
        return t.requires_grad and (
            (isinstance(t, nn.Parameter) and t in self._names) or t in self._sources
        )

    def _is_batched(self, t: Tensor) -> bool:
        return t not in self._sources and self._rows_of(t) is not None

    def _rows_of(self, t: Tensor) -> Rows | None:
        """What is known of the rows of a tensor made of the batch; None for any other."""
        if isinstance(t, nn.Parameter):
            return None
        rows = self._of_batch.get(t)
        if rows is None and t._base is not None and t._base in self._of_batch:
            rows = max(self._of_batch[t._base], Rows(Order.UNSURE))
        if rows is None and t.requires_grad and t not in self._sources:
            rows = Rows(Order.UNSURE)
        return rows

    def _mark(self, tensors: Iterable[Tensor], rows: Rows) -> None:
        for t in tensors:
            self._of_batch[t] = rows

    def _follow(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        operands: Sequence[Tensor],
        result: Any,
    ) -> None:
        """Mark what a call made of the batch."""
        if torch.compiler.is_compiling():
            return  # tracing tells nothing of the batch; outputs pass for what they require
        name = func.__name__
        written = name in WRITES or (bool(operands) and result is operands[0])
        if not (written or isinstance(result, (Tensor, list, tuple))) or name.startswith("new_"):
            return
        of_batch = [t for t in operands if self._rows_of(t) is not None]
        if not of_batch:
            return
        rows = max(row for t in of_batch if (row := self._rows_of(t)) is not None)
        if written:
            target = operands[0]
            known = self._rows_of(target) or Rows(Order.UNSURE)
            rows = rows if rows.order is Order.MIXED else known
            self._mark([target] if target._base is None else [target, target._base], rows)
        elif any(self._is_shared(t) for t in operands) and any(map(self._is_batched, of_batch)):
            self._mark(_tensors((result,)), Rows(Order.SAMPLES))  # they met, so it was checked
        else:
            order = order_after(
                func,
                args,
                kwargs,
                result,
                before=rows.order,
                batch_size=self.batch_size,
                of_batch=of_batch,
            )
            rows = rows if order is rows.order is Order.MIXED else Rows(order, name)
            self._mark(_tensors((result,)), rows)

    def _parameters_of(self, t: Tensor) -> Parameters:
        return (t,) if isinstance(t, nn.Parameter) else self._sources[t]

    def _derive(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], shared: Sequence[Tensor]
    ) -> Any:
        # Kept from activation checkpointing, which would forget these small graphs.
        with saved_tensors_hooks(lambda x: x, lambda x: x):
            result = func(*args, **kwargs)
        sources = tuple({p: None for t in shared for p in self._parameters_of(t)})
        results = list(_tensors((args[0] if func.__name__ == "__setitem__" else result,)))
        for t in results:
            if t.requires_grad and not isinstance(t, nn.Parameter):
                self._sources[t] = sources
        if func.__name__ in EXPANSIONS:
            (origin,), (expanded,) = shared, results
            if expanded.dim() > origin.dim() or expanded.shape[0] > origin.shape[0]:
                self._expanded_from[expanded] = origin
        if func is Tensor.repeat:
            (origin,), (repeated,) = shared, results
            sizes = args[1:] if isinstance(args[1], int) else args[1]
            if sizes[0] > 1 and (len(sizes) > origin.dim() or len(origin) == 1):
                once = (origin, *(1, *sizes[1:]))
                self._expanded_from[repeated] = self._derive(func, once, {}, [origin])
        return result

    # ---- from rows to parameters ----

    def _samples(self, x_R: Tensor) -> Tensor:
        """(R, ...) to (B, k, ...)."""
        return x_R.view(self.batch_size, -1, *x_R.shape[1:])

    def _report_rows(self, shared: Tensor, gradient_B: Tensor) -> None:
        """Report a gradient (B, *shape) of a parameter, or through a derived tensor."""
        self._report_units(shared, self._to_units(at_least_float32(gradient_B)))

    def _report_units(self, shared: Tensor, gradient_U: Tensor) -> None:
        if isinstance(shared, nn.Parameter):
            self._report(shared, UnitGradients(gradient_U))
            return
        parameters = self._sources[shared]
        shared = self._aliases.get(shared, shared)
        if isinstance(shared, nn.Parameter):
            self._report(shared, UnitGradients(gradient_U))
            return
        gradients = torch.autograd.grad(
            shared,
            parameters,
            gradient_U.to(shared.dtype),
            retain_graph=True,
            is_grads_batched=True,
            allow_unused=True,
        )
        for p, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                self._report(p, UnitGradients(at_least_float32(gradient)))

    def _report_outer_products(self, weight: Tensor, a_BTD: Tensor, g_BTP: Tensor) -> None:
        a_UTD, g_UTP = self._unit_tokens(a_BTD), self._unit_tokens(self._weighted_rows(g_BTP))
        use = OuterProducts(a_UTD, g_UTP, weight.shape)
        if isinstance(weight, nn.Parameter):
            self._report(weight, use)
        else:
            self._report_units(weight, use.gradients())

    # ---- one rule a function ----

    def _linear(
        self, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Gradients of y_t = W a_t + b: W's gradient is sum_t g_t a_t^T, b's is sum_t g_t."""
        weighs, shifts = self._is_shared(weight), bias is not None and self._is_shared(bias)
        if weight.dim() != 2:
            raise self._no_rule(func, [t for t in (weight, bias) if t is not None])

        def receive(g_R: Tensor, *saved: Tensor) -> None:
            g_BTP = g_R.reshape(self.batch_size, -1, g_R.shape[-1])
            if bias is not None and shifts:
                self._report_rows(bias, at_least_float32(g_BTP).sum(1))
            for a_R in saved:
                a_BTD = a_R.reshape(self.batch_size, -1, a_R.shape[-1])
                self._report_outer_products(weight, a_BTD, g_BTP)

        output = func(input, _detached(weight, weighs), _detached(bias, shifts))
        return _tap(output, receive, *([input] if weighs else []))

    def _matmul(self, func: Any, input: Tensor, other: Tensor) -> Tensor:
        """Activations times a shared matrix are a linear map."""
        if self._is_batched(input) and self._is_shared(other) and other.dim() == 2:
            transposed = self._derive(Tensor.t, (other,), {}, [other])
            return self._linear(F.linear, input, transposed)
        operands = (input, other)
        batched = [t for t in operands if self._is_batched(t)]
        shared = [t for t in operands if self._is_shared(t)]
        if input.dim() == other.dim() > 2 and len(input) == len(other):
            return self._row_by_row(func, operands, {}, batched)  # type: ignore[no-any-return]
        return self._functorch(func, operands, {}, shared, batched)

    def _convolution(
        self,
        func: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: str | int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Tensor:
        """Cut into patches, a convolution is a linear map; if they overlap, one group a sample."""
        weighs, shifts = self._is_shared(weight), bias is not None and self._is_shared(bias)
        kernel = weight.shape[2:]
        stride, dilation = _each(stride, kernel), _each(dilation, kernel)
        if padding == "same":
            input = F.pad(input, _same_padding(kernel, dilation))
        padding = _each(0 if isinstance(padding, str) else padding, kernel)
        tiles = (
            stride == tuple(kernel) and groups == 1 and not any(padding) and set(dilation) == {1}
        )

        def receive(g_R: Tensor, *saved: Tensor) -> None:
            if bias is not None and shifts:
                self._report_rows(
                    bias, self._samples(at_least_float32(g_R).flatten(2).sum(2)).sum(1)
                )
            for x_R in saved:
                if tiles:
                    a_BTD = self._samples(_tiles(x_R, kernel)).flatten(1, 2)
                    g_BTP = self._samples(g_R.flatten(2).mT).flatten(1, 2)
                    self._report_outer_products(weight, a_BTD, g_BTP)
                else:
                    gradient_R = _convolution_weight_gradients(
                        x_R, g_R, weight.shape, stride, padding, dilation, groups
                    )
                    self._report_rows(weight, self._samples(gradient_R).sum(1))

        output = func(
            input,
            _detached(weight, weighs),
            _detached(bias, shifts),
            stride,
            padding,
            dilation,
            groups,
        )
        return _tap(output, receive, *([input] if weighs else []))

    def _embedding(
        self,
        func: Any,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        """Row v of the table collects the gradients of the tokens whose index is v."""
        if max_norm is not None or scale_grad_by_freq:
            raise NotImplementedError(
                f"{self._named(weight)}: an embedding with max_norm or scale_grad_by_freq looks at "
                "the whole batch; set neither."
            )

        def receive(g_R: Tensor, index_R: Tensor) -> None:
            index_BT = index_R.reshape(self.batch_size, -1)
            g_BTC = at_least_float32(g_R).reshape(*index_BT.shape, -1)
            if padding_idx is not None:
                padded = index_BT == padding_idx % len(weight)
                g_BTC = g_BTC.masked_fill(padded[..., None], 0.0)
            gradient = g_BTC.new_zeros(self.batch_size, *weight.shape)
            target = index_BT[..., None].expand_as(g_BTC)
            self._report_rows(weight, gradient.scatter_add_(1, target, g_BTC))

        return _tap(func(input, weight.detach()), receive, input)

    def _embedding_bag(self, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Bags of one length, a row each; in one dimension, only offsets tell whose they are."""
        operands = list(_tensors((input, *args, *kwargs.values())))
        shared = [t for t in operands if self._is_shared(t)]
        if input.dim() == 1:
            raise self._no_rule(func, shared)
        batched = [t for t in operands if self._is_batched(t)]
        return self._functorch(func, (input, *args), kwargs, shared, batched)

    def _norm(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Scale times normalised x, plus shift: g * normalised x, and g, over positions."""
        call = dict(zip(_NORM_ARGUMENTS[func], args), **kwargs)  # noqa: B905 # the rest is default
        scale, shift = call.pop("weight", None), call.pop("bias", None)
        input = call.pop("input")
        scales = scale is not None and self._is_shared(scale)
        shifts = shift is not None and self._is_shared(shift)
        parameter_dims = scale.dim() if scale is not None else shift.dim()
        channels_last = func in (F.layer_norm, F.rms_norm)

        def per_sample(g_R: Tensor) -> Tensor:
            if channels_last:
                shape = g_R.shape[g_R.dim() - parameter_dims :]
                return g_R.reshape(self.batch_size, -1, *shape).sum(1)
            return self._samples(g_R.reshape(*g_R.shape[:2], -1).sum(2)).sum(1)

        def receive(g_R: Tensor, *saved: Tensor) -> None:
            g_R = at_least_float32(g_R)
            if shifts:
                self._report_rows(shift, per_sample(g_R))
            for x_R in saved:
                normalised = func(x_R.to(g_R.dtype), **call)
                self._report_rows(scale, per_sample(normalised.mul_(g_R)))

        affine = {
            name: _detached(p, is_shared)
            for name, p, is_shared in (("weight", scale, scales), ("bias", shift, shifts))
            if p is not None
        }
        return _tap(func(input, **call, **affine), receive, *([input] if scales else []))

    def _row_by_row(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], batched: Sequence[Tensor]
    ) -> Any:
        """Expanded along the rows, a shared tensor gets one gradient a row from autograd."""
        name = func.__name__
        if name in CONCATENATIONS:
            dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
        else:
            dim = 0 if name == "hstack" and batched[0].dim() < 2 else 1
        if dim % (batched[0].dim() + (name == "stack")) == 0:
            raise self._no_rule(func, [t for t in _tensors(args) if self._is_shared(t)])
        widest = max(batched, key=Tensor.dim)
        return _call(func, args, kwargs, partial(self._expanded, like=widest.shape))

    def _expanded(self, t: Tensor, *, like: torch.Size) -> Tensor:
        if not self._is_shared(t):
            return t
        if self.batch_size == 1:
            return _tap(t.detach(), lambda g_R: self._report_rows(t, g_R[None]))
        if t.dim() == len(like) and t.shape[0] == like[0]:
            return self._with_rows(t)
        aligned = t.detach()[(None,) * (len(like) - t.dim())]
        if aligned.dim() != len(like) or aligned.shape[0] != 1:
            raise NotImplementedError(
                f"{self._named(t)} of shape {tuple(t.shape)} meets activations of shape "
                f"{tuple(like)} along the batch; freeze it with requires_grad_(False)."
            )

        def receive(g_R: Tensor) -> None:
            gradient_B = self._samples(at_least_float32(g_R)).sum(1)
            self._report_rows(t, gradient_B.reshape(self.batch_size, *t.shape))

        return _tap(aligned.expand(like[0], *aligned.shape[1:]), receive)

    def _with_rows(self, t: Tensor) -> Tensor:
        """A shared tensor that has the rows of the batch itself: each sample reads its own."""
        origin = self._expanded_from.get(t)

        def receive(g_R: Tensor) -> None:
            g_Bk = self._samples(at_least_float32(g_R))
            if origin is None:
                gradient_BB = g_Bk.new_zeros(self.batch_size, *g_Bk.shape)
                gradient_BB.diagonal(dim1=0, dim2=1).copy_(g_Bk.movedim(0, -1))
                self._report_rows(t, gradient_BB.reshape(self.batch_size, *t.shape))
            else:  # all rows are the same
                aligned = (1,) * (t.dim() - origin.dim()) + tuple(origin.shape)
                gradient_B = g_Bk.sum(1).sum_to_size(self.batch_size, *aligned[1:])
                self._report_rows(origin, gradient_B.reshape(self.batch_size, *origin.shape))

        return _tap(t.detach(), receive)

    def _functorch(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        shared: Sequence[Tensor],
        batched: Sequence[Tensor],
    ) -> Tensor:
        """Whatever else: the call again in the backward pass, one sample at a time, by vmap."""
        own_rows = [t for t in shared if t in self._expanded_from or t in self._of_batch]
        if own_rows or _is_in_place(func.__name__):
            raise self._no_rule(func, own_rows or shared)
        names = self._all_named(shared)
        if (func.__name__, names) not in self._warned:
            self._warned.add((func.__name__, names))
            logger.warning(
                "%s has no rule in %s: its per-sample gradients come from torch.func, slowly.",
                names,
                func.__name__,
            )
        position = {id(t): i for i, t in enumerate(batched)}
        detached = {id(t): t.detach() for t in shared}

        def receive(g_R: Tensor, *saved_R: Tensor) -> None:
            def of_sample(g_k: Tensor, *rows_k: Tensor) -> tuple[Tensor, ...]:
                def call(*parameters: Tensor) -> Tensor:
                    values = dict(zip(detached, parameters, strict=True))
                    values |= {key: rows_k[i] for key, i in position.items()}
                    output: Tensor = _call(func, args, kwargs, lambda t: values.get(id(t), t))
                    return output

                gradients: tuple[Tensor, ...] = torch.func.vjp(call, *detached.values())[1](g_k)
                return gradients

            rows = (self._samples(x_R) for x_R in (g_R, *saved_R))
            try:
                gradients = torch.func.vmap(of_sample)(*rows)
            except (RuntimeError, ValueError) as error:  # the call is none of one sample
                raise self._no_rule(func, shared) from error
            for t, gradient in zip(shared, gradients, strict=True):
                self._report_rows(t, gradient)

        output = _call(func, args, kwargs, lambda t: detached.get(id(t), t))
        if not isinstance(output, Tensor):
            raise self._no_rule(func, shared)
        return _tap(output, receive, *batched)

    def _no_rule(self, func: Any, shared: Sequence[Tensor]) -> NotImplementedError:
        return NotImplementedError(
            f"{self._all_named(shared)}: no per-sample rule for {func.__name__}; "
            "freeze them with requires_grad_(False), or use a model that does without."
        )

    def _named(self, t: Tensor) -> str:
        return ", ".join(self._names[p] for p in self._parameters_of(t))

    def _all_named(self, shared: Sequence[Tensor]) -> str:
        return ", ".join(map(self._named, shared))


_NORM_ARGUMENTS: Mapping[Any, Sequence[str]] = {
    F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
    F.rms_norm: ("input", "normalized_shape", "weight", "eps"),
    F.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
    F.instance_norm: (
        "input",
        "running_mean",
        "running_var",
        "weight",
        "bias",
        "use_input_stats",
        "momentum",
        "eps",
    ),
}


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _call(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], replace: Callable[[Tensor], Tensor]
) -> Any:
    """Call ``func`` with its tensors replaced, also those in lists."""

    def replaced(value: Any) -> Any:
        if isinstance(value, Tensor):
            return replace(value)
        return [replaced(v) for v in value] if isinstance(value, (list, tuple)) else value

    return func(*map(replaced, args), **{name: replaced(v) for name, v in kwargs.items()})


def _signature(t: Tensor) -> Signature:
    return t.shape, t.requires_grad


def _is_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE_OPERATORS


def _detached(t: Tensor | None, detach: bool) -> Tensor | None:
    return t.detach() if t is not None and detach else t


# Convolutions


def _each(value: int | Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
    """One value for each spatial dimension."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * len(kernel) if len(values) == 1 else values


def _same_padding(kernel: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Widths of padding="same", as ``F.pad`` has them: last dimension first, left before right."""
    totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]


def _tiles(x_R: Tensor, kernel: Sequence[int]) -> Tensor:
    """(R, C, *sizes) cut into patches that do not overlap: (R, T, C * prod(kernel))."""
    n = len(kernel)
    for dim, k in enumerate(kernel, start=2):
        x_R = x_R.unfold(dim, k, k)  # patches along dim; the last dimension is inside the patch
    # (R, C, *patches, *kernel) -> (R, *patches, C, *kernel)
    x_R = x_R.movedim(1, 1 + n)
    return x_R.reshape(len(x_R), math.prod(x_R.shape[1 : 1 + n]), -1)


def _convolution_weight_gradients(
    x_R: Tensor,
    g_R: Tensor,
    shape: torch.Size,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """(R, *shape): one convolution in which every row is a group of its own."""
    x_R, g_R = at_least_float32(x_R), at_least_float32(g_R)
    rows = len(x_R)
    weight = x_R.new_empty(1).expand(rows * shape[0], *shape[1:])  # only its shape is read
    gradient: Tensor = torch.ops.aten.convolution_backward(
        g_R.reshape(1, -1, *g_R.shape[2:]),
        x_R.reshape(1, -1, *x_R.shape[2:]),
        weight,
        None,
        stride,
        padding,
        dilation,
        False,
        [0] * len(stride),
        rows * groups,
        [False, True, False],
    )[1]
    return gradient.view(rows, *shape)

"""The fast engine and the lean one: norms and clipped sums without a gradient per sample.

Both wrap the model in `ParameterInterception`; they differ in what they keep until the mechanism
has chosen the weights.

============ ======================================================== ======================
bookkeeping  one backward pass; every use of a parameter is kept      time close to plain
ghost        two backward passes over one forward; nothing is kept    memory close to plain
============ ======================================================== ======================
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from hf_dpmuon.grad_sample.contributions import Contribution, combine, exceed_float32
from hf_dpmuon.grad_sample.engine import PerSampleEngine, any_zero
from hf_dpmuon.grad_sample.interception import ParameterInterception

__all__ = ["BookKeepingGradSampleModule", "GhostGradSampleModule"]


class _InterceptingEngine(PerSampleEngine):
    """An engine that learns of every use of a parameter, whatever module makes it.

    Raises:
        NotImplementedError: If a layer mixes the samples of a batch.
    """

    def __init__(self, model: nn.Module, *, passes: int = 1) -> None:
        self._interception = ParameterInterception(
            model,
            report=self._take,
            to_units=self._sum_rows,
            unit_tokens=self._unit_tokens,
            weighted_rows=self._weighted_rows,
        )
        self._recomputing: list[nn.Module] = []  # the module that activation checkpointing called
        self._armed = False
        self._in_forward = False
        self._passes_taken = 0
        super().__init__(model, passes=passes)

    def _take(self, parameter: nn.Parameter, use: Contribution) -> None:
        if self._in_forward:
            (name,) = (name for name, p in self._trainable.items() if p is parameter)
            raise NotImplementedError(
                f"{name} received a gradient within the forward pass, which is none of the loss; "
                "compute it with the parameter detached, or freeze it with requires_grad_(False)."
            )
        self._receive(parameter, use)

    @abstractmethod
    def _receive(self, parameter: nn.Parameter, use: Contribution) -> None:
        """Take the gradients of one use of a parameter, in a backward pass."""

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[NotImplementedError]:
        """Refuse layers that mix samples, or hide; buffers like a table of indices do no harm."""
        scripted = [
            name
            for prefix, layer in module.named_modules()
            if isinstance(layer, torch.jit.ScriptModule)
            for name, p in layer.named_parameters(prefix)
            if p.requires_grad
        ]
        mixing = [
            name
            for name, layer in module.named_modules()
            if isinstance(layer, nn.modules.batchnorm._BatchNorm)
            or (
                isinstance(layer, nn.modules.instancenorm._InstanceNorm)
                and layer.track_running_stats
            )
        ]
        errors = []
        if mixing:
            errors.append(
                NotImplementedError(
                    f"{', '.join(mixing)} mixes the samples of a batch; use a model with GroupNorm "
                    "instead."
                )
            )
        if scripted:
            errors.append(
                NotImplementedError(
                    f"{', '.join(dict.fromkeys(scripted))} of a scripted module: its functions "
                    "cannot be watched; use the module before torch.jit.script, or freeze them."
                )
            )
        if strict and errors:
            raise errors[0]
        return errors

    def add_hooks(self, **_: Any) -> None:
        """Watch modules, since activation checkpointing calls them again in the backward pass."""
        handles: list[torch.utils.hooks.RemovableHandle] = []
        self.autograd_grad_sample_hooks = handles
        for module in self._module.modules():
            if any(p.requires_grad for p in module.parameters()):
                handles += [
                    module.register_forward_pre_hook(self._enter_module, with_kwargs=True),
                    module.register_forward_hook(self._leave_recomputation, always_call=True),
                ]
        self.enable_hooks()

    def _enter_module(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self._armed or self._recomputing or torch.compiler.is_compiling():
            return
        operands = (*args, *kwargs.values())
        if torch._C._current_graph_task_id() == -1:
            self._interception.remember_call(module, operands)
        else:
            self._interception.recall_call(module, operands)
            self._recomputing.append(module)
            self._interception.__enter__()  # type: ignore[no-untyped-call]

    def _leave_recomputation(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if self._recomputing and self._recomputing[0] is module:
            self._recomputing.clear()
            self._interception.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; with gradients enabled, prepare for the backward pass."""
        if not (self.hooks_enabled and torch.is_grad_enabled()):
            return self._module(*args, **kwargs)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        batch_size = len(inputs[0])
        if self._unit_of_row is not None and len(self._unit_of_row) != batch_size:
            raise ValueError(
                f"set_units named the units of {len(self._unit_of_row)} rows, but the batch has "
                f"{batch_size}."
            )
        self._interception.begin(inputs)
        self._armed = True
        self._in_forward = True
        try:
            with self._interception:
                output = self._module(*args, **kwargs)
        finally:
            self._in_forward = False
        return self._watch_output(output)

    @abstractmethod
    def _watch_output(self, output: Any) -> Any:
        """Count a pass when its output is used; return what the loss is to be computed from."""

    def set_units(
        self,
        unit_of_row: Tensor | None,
        num_units: int,
        *,
        reduction: Literal["sum", "mean"] = "sum",
    ) -> None:
        super().set_units(unit_of_row, num_units, reduction=reduction)
        if unit_of_row is not None:
            counts = torch.bincount(unit_of_row, minlength=num_units)
            order = unit_of_row.argsort(stable=True)
            first = counts.cumsum(0) - counts
            self._max_rows = int(counts.max())
            self._place_of_row = torch.empty_like(order)  # among the rows of its unit
            self._place_of_row[order] = (
                torch.arange(len(order), device=order.device) - first[unit_of_row[order]]
            )

    def _unit_tokens(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) to (U, T', D): tokens of a unit in one row, filled up with zeros."""
        if self._unit_of_row is None:
            return x_BTD
        laid_out = x_BTD.new_zeros(self._num_units, self._max_rows, *x_BTD.shape[1:])
        laid_out[self._unit_of_row, self._place_of_row] = x_BTD
        return laid_out.flatten(1, 2)

    def _check_complete(self) -> None:
        raw = [name for name, p in self._trainable.items() if p.grad is not None]
        if raw:
            raise RuntimeError(
                f"{', '.join(raw)} received a gradient that is not known per sample, so it cannot "
                "be clipped: it was used outside this engine's forward pass, by a compiled "
                "function, or by a loss that reads it."
            )
        if self._passes_taken > self.passes:
            raise RuntimeError(
                f"gradients of {self._passes_taken} passes were taken, not of {self.passes}; call "
                "discard() between releases."
            )

    def discard(self) -> None:
        self.set_units(None, 0)
        self._interception.forget()
        self._armed = False
        self._passes_taken = 0
        for p in self._trainable.values():
            p.grad = None
            p.grad_sample = None  # type: ignore[attr-defined]


class BookKeepingGradSampleModule(_InterceptingEngine):
    """Clipped sums from one forward and one backward pass (Bu et al. 2023, arXiv 2210.00038).

    Args:
        model: The plain classifier; trainable layers in eval mode get gradients too.
        passes: Forward passes of a physical batch that one release consumes, at most.
    """

    def __init__(self, model: nn.Module, *, passes: int = 1) -> None:
        self._uses: dict[nn.Parameter, list[Contribution]] = {}
        super().__init__(model, passes=passes)

    def _receive(self, parameter: nn.Parameter, use: Contribution) -> None:
        self._uses.setdefault(parameter, []).append(use.held())

    def _watch_output(self, output: Any) -> Any:
        started = False

        def start(_: Tensor) -> None:
            nonlocal started
            self._passes_taken += not started
            started = True

        for x in tree_leaves(output):
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(start)  # type: ignore[no-untyped-call]
        return output

    def _combined(self, parameter: nn.Parameter) -> Contribution | None:
        uses = self._uses.get(parameter)
        if not uses:
            return None
        if len(uses) > 1:
            uses[:] = [combine(uses).held()]
        return uses[0]

    def per_unit_norms(self) -> dict[str, Tensor]:  # noqa: D102
        self._check_complete()
        norms = {}
        for name, p in self._trainable.items():
            gradient = self._combined(p)
            if gradient is not None:
                norms[name] = gradient.norms()
        return norms

    def add_weighted_sum(  # noqa: D102
        self, weights: Mapping[str, Tensor], *, into: Mapping[str, Tensor]
    ) -> None:
        self._check_complete()
        gradients = {n: g for n, p in self._trainable.items() if (g := self._combined(p))}
        mask_zeros = any_zero(weights)
        in_float64 = exceed_float32([gradient.largest() for gradient in gradients.values()])
        for name, gradient in gradients.items():
            gradient.add_weighted_sum(
                weights[name], into=into[name], mask_zeros=mask_zeros, in_float64=in_float64
            )

    def discard(self) -> None:  # noqa: D102
        self._uses.clear()
        super().discard()


class GhostGradSampleModule(_InterceptingEngine):
    """Clipped sums from two backward passes over one forward; no gradient per sample is kept.

    The loss is backpropagated to copies of the model's outputs, and from there by this engine: once
    for the norms, and once, when the weights are known, for the sums.

    Args:
        model: The plain classifier; trainable layers in eval mode get gradients too.
        passes: Must be 1: between passes the weights move, and this engine goes back only later.
    """

    def __init__(self, model: nn.Module, *, passes: int = 1) -> None:
        if passes != 1:
            raise ValueError(
                f"the ghost engine takes one pass, not {passes}: it goes back through the model "
                "when the weights have moved on; use grad_sample_mode='bookkeeping'."
            )
        self._outputs: list[tuple[Tensor, Tensor]] = []  # of the model, and the copy that was used
        self._reused: set[nn.Parameter] = set()  # used more than once: gradients add up first
        self._norms: dict[nn.Parameter, Tensor] = {}
        self._uses: dict[nn.Parameter, list[Contribution]] = {}
        self._sums: dict[nn.Parameter, tuple[Tensor, Tensor]] | None = None
        self._largest: list[Tensor] = []  # of each use
        self._mask_zeros = True
        self._in_float64 = False
        self._going_back = False
        super().__init__(model, passes=passes)

    def _watch_output(self, output: Any) -> Any:
        self._passes_taken += 1

        def copy(x: Any) -> Any:
            if not (isinstance(x, Tensor) and x.requires_grad):
                return x
            used = x.detach().requires_grad_()
            self._outputs.append((x, used))
            return used

        return tree_map(copy, output)

    def _receive(self, parameter: nn.Parameter, use: Contribution) -> None:
        if not self._going_back:
            raise RuntimeError(
                "the loss reached the model past the copies of its outputs; return a tensor, or "
                "tensors in a tuple, a dict or a ModelOutput, or use another grad_sample_mode."
            )
        if self._sums is not None:
            weights, into = self._sums[parameter]
            use.add_weighted_sum(
                weights, into=into, mask_zeros=self._mask_zeros, in_float64=self._in_float64
            )
            return
        self._largest.append(use.largest())
        if parameter in self._reused:
            self._uses.setdefault(parameter, []).append(use)
        elif parameter in self._norms:
            self._reused.add(parameter)
        else:
            self._norms[parameter] = use.norms()

    def _backward(self) -> None:
        self._check_complete()
        outputs = [(x, used.grad) for x, used in self._outputs if used.grad is not None]
        self._going_back = True
        try:
            if outputs:
                torch.autograd.backward(
                    [x for x, _ in outputs], [g for _, g in outputs], retain_graph=True
                )
        finally:
            self._going_back = False
        self._check_complete()

    def per_unit_norms(self) -> dict[str, Tensor]:  # noqa: D102
        reused = None
        while reused != self._reused:  # a second time if a parameter turns out to be used twice
            reused = set(self._reused)
            self._norms.clear()
            self._uses.clear()
            self._backward()
        norms = self._norms | {p: combine(uses).norms() for p, uses in self._uses.items()}
        self._uses.clear()
        return {name: norms[p] for name, p in self._trainable.items() if p in norms}

    def add_weighted_sum(  # noqa: D102
        self, weights: Mapping[str, Tensor], *, into: Mapping[str, Tensor]
    ) -> None:
        self._mask_zeros = any_zero(weights)
        self._in_float64 = exceed_float32(self._largest)
        self._sums = {
            p: (weights[name], into[name]) for name, p in self._trainable.items() if name in weights
        }
        try:
            self._backward()
        finally:
            self._sums = None

    def discard(self) -> None:  # noqa: D102
        self._outputs.clear()
        self._largest.clear()
        self._norms.clear()
        self._uses.clear()
        super().discard()

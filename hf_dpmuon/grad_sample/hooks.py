"""The reference engine: Opacus' hooks, one stored gradient per sample and parameter.

Opacus hooks leaf layers, and hands a composite module that owns a parameter itself (a class token,
a position table) to ``torch.func`` whole, which is slow and fails on dropout. Here such a *bare*
parameter is expanded along the batch before its owner's forward reads it, so that autograd itself
yields one gradient per sample, through dropout and whatever else follows. Layers with a parameter
of their own that scales channels get a registered grad sampler.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from opacus.grad_sample import register_grad_sampler
from opacus.utils.module_utils import has_trainable_params
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from hf_dpmuon.grad_sample.engine import (
    PerSampleEngine,
    add_weighted,
    any_zero,
    at_least_float32,
    row_norms,
)

__all__ = ["HooksGradSampleModule"]


# Said of the first layer, whose input is the image; its output gradient is all that hooks need.
warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are comp")

# What rounding to bfloat16 may take from the samples' sum, as a share of their norms. A use of a
# weight that makes less is found only by the check before a run.
SUM_TOLERANCE = 1 / 32
WHOLE_TOLERANCE = 1e-4  # of all parameters, for those whose own gradient is nothing but rounding

# Layers of timm and transformers that only multiply by one trainable scale a channel. They are
# known by name so that importing this package imports neither; the trainer's check against batches
# of one would show a namesake that does something else.
CHANNEL_SCALES = frozenset({"LayerScale", "Dinov2LayerScale"})


def _channel_scale_grad_sample(
    layer: nn.Module, activations: Sequence[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Per-sample gradient of ``y = x * scale`` with one scale a channel: sum over positions."""
    (scale,) = layer.parameters(recurse=False)
    product = activations[0].to(backprops.dtype) * backprops
    return {scale: product.flatten(1, -2).sum(1) if product.dim() > 2 else product}


def _rows_of(grad_sample: Any) -> int:
    """Rows for which Opacus has a gradient; of several passes, of the first."""
    if grad_sample is None:
        return 0
    return len(grad_sample[0] if isinstance(grad_sample, list) else grad_sample)


class HooksGradSampleModule(PerSampleEngine):
    """Per-sample gradients as Opacus computes them.

    Slow and memory-hungry but plain: what the other engines must equal.

    Args:
        model: The plain classifier, in training mode.
        passes: Forward passes of a physical batch that one release consumes, at most.

    Raises:
        NotImplementedError: If a trainable layer has buffers (as BatchNorm does).
        ValueError: If a composite module owns a parameter that no rule covers, or Opacus has no
            rule, or a wrong one, for a layer.
    """

    def __init__(self, model: nn.Module, *, passes: int = 1) -> None:
        self._bare: dict[nn.Module, dict[str, nn.Parameter]] = {}
        self._bare_handles: list[torch.utils.hooks.RemovableHandle] = []
        for kind in {type(m) for m in model.modules() if type(m).__name__ in CHANNEL_SCALES}:
            register_grad_sampler(kind)(_channel_scale_grad_sample)
        self._rows_tried = False
        self._reject_layers(model)
        super().__init__(model, passes=passes)
        self._reject_uncovered()

    def iterate_submodules(self, module: nn.Module) -> Iterable[nn.Module]:
        """Yield the layers that Opacus hooks; note the bare parameters of composite modules."""
        children = list(module.children())
        if has_trainable_params(module):
            if type(module) in self.GRAD_SAMPLERS or not children:
                yield module
            else:
                self._expand_bare_parameters(module)
        for child in children:
            yield from self.iterate_submodules(child)

    def _expand_bare_parameters(self, module: nn.Module) -> None:
        self._bare[module] = {
            name: p for name, p in module.named_parameters(recurse=False) if p.requires_grad
        }
        self._bare_handles += [
            module.register_forward_pre_hook(self._expand, with_kwargs=True),
            module.register_forward_hook(self._restore, always_call=True),
        ]

    def _expand(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (self.hooks_enabled and module.training and torch.is_grad_enabled()):
            return
        first = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        for name, parameter in self._bare[module].items():
            expanded = parameter.expand(first.shape[0], *parameter.shape[1:])
            expanded.register_hook(partial(self._collect, parameter))  # type: ignore[no-untyped-call]
            # Set past nn.Module's own check: a module attribute that is read as a parameter.
            module._parameters[name] = expanded  # type: ignore[assignment]

    def _restore(self, module: nn.Module, _args: Any, _output: Any) -> None:
        module._parameters.update(self._bare[module])

    def _collect(self, parameter: Any, gradient: Tensor) -> None:
        row_gradient = gradient.detach().unsqueeze(1)
        if parameter.grad_sample is None:
            parameter.grad_sample = row_gradient
        else:  # another forward of the owner, in this pass or in another one
            parameter.grad_sample = parameter.grad_sample + row_gradient

    @staticmethod
    def _reject_layers(model: nn.Module) -> None:
        """Name the layers at which Opacus or its hooks would fail in words of their own."""
        bad = [
            f"{name} ({type(layer).__name__})"
            for name, layer in model.named_modules()
            if vars(layer).get("inplace")
            or (
                has_trainable_params(layer)
                and (
                    isinstance(layer, (nn.RNNBase, nn.RNNCellBase, nn.EmbeddingBag))
                    or (isinstance(layer, (nn.LayerNorm, nn.GroupNorm)) and layer.bias is None)
                )
            )
        ]
        if bad:
            raise ValueError(
                f"grad_sample_mode='hooks' has no rule for {', '.join(bad)}: recurrent layers, "
                "bags of embeddings, norms without bias, and activations with inplace=True; use "
                "grad_sample_mode='bookkeeping', or freeze or replace them."
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; before the first batch that gets gradients, try its first row alone."""
        if not self._rows_tried and self.hooks_enabled and torch.is_grad_enabled():
            self._try_one_row(args, kwargs)
        return super().forward(*args, **kwargs)

    def _try_one_row(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a model whose layers, or whose inputs, have the batch elsewhere than first.

        In a batch that is as large as something else, nothing but a batch of one shows it.
        """
        self._rows_tried = True
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        size = len(inputs[0])

        def first(x: Any) -> Any:
            return x[:1] if isinstance(x, Tensor) and x.dim() and len(x) == size else x

        devices = [inputs[0].device.index or 0] if inputs[0].is_cuda else []
        with torch.random.fork_rng(devices=devices):
            one_args, one_kwargs = tree_map(first, (args, kwargs))
            outputs = super().forward(*one_args, **one_kwargs)
            leaves = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
            if leaves:
                torch.autograd.backward([x.float().sum() for x in leaves])
        parameters: dict[str, Any] = self._trainable
        rows = {name: _rows_of(p.grad_sample) for name, p in parameters.items()}
        units = self._unit_of_row, self._num_units, self._row_weights
        self.discard()  # which forgets the units of the batch that is about to come
        self._unit_of_row, self._num_units, self._row_weights = units
        wrong = [name for name, count in rows.items() if count not in (0, 1)]
        if wrong or any(len(x) != 1 for x in leaves if x.dim()):
            raise ValueError(
                f"{', '.join(wrong) or 'the output'}: a batch of one row gives several, so the "
                "batch is not the first dimension there; put it first, in the model's inputs and "
                "throughout its layers."
            )

    def _reject_uncovered(self) -> None:
        owners = {id(p): name for name, p in self._trainable.items()}
        bad = [
            f"{owners[id(p)]} {tuple(p.shape)}"
            for owned in self._bare.values()
            for p in owned.values()
            if p.shape[0] != 1
        ]
        if bad:
            raise ValueError(
                "grad_sample_mode='hooks' has no rule for parameters owned by a composite module "
                f"that do not start with a dimension of 1: {', '.join(bad)}; freeze them with "
                "requires_grad_(False) or choose another model."
            )

    def remove_hooks(self) -> None:
        """Remove Opacus' hooks and those on the owners of bare parameters."""
        for handle in self._bare_handles:
            handle.remove()
        self._bare_handles.clear()
        super().remove_hooks()
        for module in self._module.modules():
            vars(module).pop("activations", None)

    def _taken(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradients of the units, (U, *shape), by name of a reached parameter."""
        parameters: dict[str, Any] = self._trainable  # with what Opacus hangs on them
        for name, parameter in parameters.items():
            passes = parameter.grad_sample
            if passes is None and parameter.grad is not None:
                raise RuntimeError(
                    f"{name} received a gradient but no per-sample gradients, so it cannot be "
                    "clipped: its layer was used outside its own forward(), or is in eval mode."
                )
            if isinstance(passes, list):
                if len(passes) > self.passes:
                    raise RuntimeError(
                        f"{name} holds per-sample gradients of {len(passes)} backward passes, not "
                        f"of {self.passes}; call discard() between releases."
                    )
                passes = torch.stack(passes).sum(0)
            if passes is not None:
                yield name, self._sum_rows(at_least_float32(passes))

    def _check_complete(self) -> None:
        """Compare what the samples add up to with what autograd gives for all of them."""
        known, sizes, missed = [], [], []
        parameters: dict[str, Any] = self._trainable
        for name, p in parameters.items():
            if p.grad is not None and p.grad_sample is not None:
                passes = p.grad_sample if isinstance(p.grad_sample, list) else [p.grad_sample]
                rows = torch.cat(passes)
                known.append(name)
                sizes.append(row_norms(at_least_float32(rows)).sum())
                missed.append(row_norms((rows.sum(0) - p.grad)[None])[0])
        if not known:
            return
        size = torch.stack(sizes)
        allowed = SUM_TOLERANCE * size + WHOLE_TOLERANCE * size.norm()
        wrong = (torch.stack(missed) > allowed).tolist()
        names = [name for name, is_wrong in zip(known, wrong, strict=True) if is_wrong]
        if names:
            raise RuntimeError(
                f"{', '.join(names)}: the per-sample gradients do not add up to the gradient of "
                "the batch, so part of it would not be clipped: the weight is also used outside "
                "its layer's forward(), or Opacus has a wrong rule for the layer; use "
                "grad_sample_mode='bookkeeping'."
            )

    def per_unit_norms(self) -> dict[str, Tensor]:  # noqa: D102
        self._check_complete()
        norms = {name: row_norms(gradient).to(gradient.dtype) for name, gradient in self._taken()}
        if len({len(norm) for norm in norms.values()}) > 1:
            sizes = {name: len(norm) for name, norm in norms.items()}
            raise RuntimeError(f"per-sample gradients disagree on the batch size: {sizes}.")
        return norms

    def add_weighted_sum(  # noqa: D102
        self, weights: Mapping[str, Tensor], *, into: Mapping[str, Tensor]
    ) -> None:
        mask_zeros = any_zero(weights)
        for name, gradient in self._taken():
            add_weighted(gradient, weights[name], into=into[name], mask_zeros=mask_zeros)

    def discard(self) -> None:  # noqa: D102
        self.set_units(None, 0)
        parameters: dict[str, Any] = self._trainable
        for parameter in parameters.values():
            parameter.grad = None
            parameter.grad_sample = None
            parameter._forward_counter = 0
            if hasattr(parameter, "_current_grad_sample"):
                del parameter._current_grad_sample
        for module in self.modules():
            if hasattr(module, "activations"):
                module.activations.clear()
                if hasattr(module, "max_batch_len"):
                    del module.max_batch_len

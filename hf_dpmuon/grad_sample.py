"""Per-sample gradients for every trainable parameter of a vision transformer.

Receives a plain model; returns it wrapped so that one backward pass of a *summed* loss leaves, for
each trainable parameter, what the privacy mechanism needs: the norm of every sample's gradient and
sums of those gradients under weights that the mechanism chooses.

Per-sample gradients come from Opacus' ``GradSampleModule``. It hooks leaf layers, and hands a
composite module that owns a parameter itself (a class token, a position table) to ``torch.func``
whole, which is slow and fails on dropout. Here such a *bare* parameter is expanded along the batch
before its owner's forward reads it, so that autograd itself yields one gradient per sample, through
dropout and whatever else follows. Layers with a parameter of their own that scales channels get a
registered grad sampler.

Guarantees:
    A trainable parameter either has a gradient per sample, or was not on the path of this forward
    pass (its gradients are zero), or an error names it. The raw gradient of autograd is dropped.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from opacus.grad_sample import GradSampleModule, register_grad_sampler
from opacus.utils.module_utils import has_trainable_params
from torch import Tensor, nn

__all__ = ["HooksGradSampleModule"]


# Said of the first layer, whose input is the image; its output gradient is all that hooks need.
warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are comp")

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


class HooksGradSampleModule(GradSampleModule):  # type: ignore[misc]
    """The reference engine: Opacus' hooks, one stored gradient per sample and parameter.

    Backpropagate the loss *summed* over the batch, then read ``per_sample_norms`` and
    ``add_weighted_sum``, then ``discard``.

    Args:
        model: The plain classifier; it keeps its class and its state-dict keys.

    Raises:
        NotImplementedError: If a trainable layer has buffers (as BatchNorm does).
        ValueError: If a composite module owns a parameter that no rule covers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._bare: dict[nn.Module, dict[str, nn.Parameter]] = {}
        self._bare_handles: list[torch.utils.hooks.RemovableHandle] = []
        for kind in {type(m) for m in model.modules() if type(m).__name__ in CHANNEL_SCALES}:
            register_grad_sampler(kind)(_channel_scale_grad_sample)
        super().__init__(model, loss_reduction="sum", strict=True)
        self._names = {name: p for name, p in model.named_parameters() if p.requires_grad}
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
            expanded.register_hook(partial(self._collect, parameter))
            # Set past nn.Module's own check: a module attribute that is read as a parameter.
            module._parameters[name] = expanded  # type: ignore[assignment]

    def _restore(self, module: nn.Module, _args: Any, _output: Any) -> None:
        module._parameters.update(self._bare[module])

    @staticmethod
    def _collect(parameter: nn.Parameter, gradient: Tensor) -> None:
        grad_sample = gradient.detach().unsqueeze(1)
        if parameter.grad_sample is not None:  # a second forward of the owner in this pass
            grad_sample = parameter.grad_sample + grad_sample
        parameter.grad_sample = grad_sample

    def _reject_uncovered(self) -> None:
        owners = {id(p): name for name, p in self._names.items()}
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

    def _taken(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        for name, parameter in self._names.items():
            grad_sample = parameter.grad_sample
            if isinstance(grad_sample, list):
                raise RuntimeError(
                    f"{name} holds per-sample gradients of more than one backward pass; call "
                    "discard() between them."
                )
            if grad_sample is not None:
                yield name, parameter, grad_sample
            elif parameter.grad is not None:
                raise RuntimeError(
                    f"{name} received a gradient but no per-sample gradients, so it cannot be "
                    "clipped; its layer was used outside its own forward()."
                )

    def per_sample_norms(self) -> dict[str, Tensor]:
        """Norm of each sample's gradient, per parameter reached by the last backward pass.

        Returns:
            For each reached parameter, by name, a float32 tensor of shape (B,).

        Raises:
            RuntimeError: If a parameter has a gradient but no per-sample gradients, or batch sizes
                disagree.
        """
        norms = {
            name: torch.linalg.vector_norm(grad_sample.flatten(1), dim=1, dtype=torch.float32)
            for name, _, grad_sample in self._taken()
        }
        if len({len(norm) for norm in norms.values()}) > 1:
            sizes = {name: len(norm) for name, norm in norms.items()}
            raise RuntimeError(f"per-sample gradients disagree on the batch size: {sizes}.")
        return norms

    def add_weighted_sum(
        self, weights: Mapping[str, Tensor], *, into: Mapping[str, Tensor]
    ) -> None:
        """Add ``sum_i weights[name][i] * gradient_i`` to ``into[name]``, for reached parameters.

        Args:
            weights: For each reached parameter, float32 of shape (B,).
            into: For each trainable parameter, a float32 tensor of the parameter's shape.

        Guarantees:
            A sample of weight 0 contributes exactly zero, even where its gradient is not finite.
        """
        for name, _, grad_sample in self._taken():
            weight = weights[name]
            samples = grad_sample.flatten(1).float()
            if not bool(weight.all()):
                samples = torch.where(weight[:, None] != 0, samples, 0.0)
            into[name].view(-1).addmv_(samples.T, weight)

    def discard(self) -> None:
        """Drop all per-sample and raw gradients, and whatever an unfinished pass left behind."""
        for parameter in self._names.values():
            parameter.grad = None
            parameter.grad_sample = None
            parameter._forward_counter = 0  # type: ignore[attr-defined]
            if hasattr(parameter, "_current_grad_sample"):
                del parameter._current_grad_sample
        for module in self.modules():
            if hasattr(module, "activations"):
                module.activations.clear()  # type: ignore[operator, union-attr]
                if hasattr(module, "max_batch_len"):
                    del module.max_batch_len

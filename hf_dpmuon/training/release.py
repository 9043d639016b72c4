"""What an optimizer may step on: the last release, and nothing else.

Receives the private gradients of one step; gives them back to the parameters right before the
optimizer's step, and once.

Guarantees:
    Whatever a callback, a hook or a subclass adds to ``p.grad`` between the release and the
    optimizer's step, a raw backward pass say, moves no weight. A step without a release of its own
    raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

__all__ = ["ReleaseGate"]


class ReleaseGate:
    """Stands between a release and the optimizers that may use it.

    Args:
        parameters: The trainable parameters by name.

    Attributes:
        gradients: The private gradient of each parameter from the release until the optimizer's
            step; None otherwise. Editing these tensors in place is post-processing.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        self.gradients: dict[str, Tensor] | None = None
        self._handles: list[RemovableHandle] = []

    def publish(self, gradients: Mapping[str, Tensor]) -> None:
        """Offer a release, whose draw of noise is on the disk by now, to the next step."""
        assert gradients.keys() == self.parameters.keys()
        self.gradients = dict(gradients)
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name].clone()  # for whoever reads it; no step uses it

    def guard(self) -> None:
        """Let every optimizer step these parameters along releases only, until ``close``.

        Of all optimizers, since a callback may put another one in the place of the run's.
        """
        self._handles = [
            register_optimizer_step_pre_hook(self._restore),
            register_optimizer_step_post_hook(self._spend),
        ]

    def close(self) -> None:
        """Leave optimizers as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.gradients = [], None

    def _moves(self, optimizer: Optimizer) -> bool:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return not held.isdisjoint(map(id, self.parameters.values()))

    def _restore(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._moves(optimizer):
            return
        if any(closure is not None for closure in (*args[1:], *kwargs.values())):
            raise RuntimeError(
                "the optimizer's step was given a closure, whose gradients are not private; call "
                "step() without one."
            )
        if self.gradients is None:
            raise RuntimeError(
                "the optimizer was asked to step without a private gradient: each step must come "
                "from DPTrainer.training_step, which a subclass may extend but not replace, and be "
                "taken once."
            )
        for name, parameter in self.parameters.items():
            parameter.grad = self.gradients[name]

    def _spend(self, optimizer: Optimizer, *_: Any) -> None:
        if self._moves(optimizer):
            self.gradients = None

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

    def guard(self, optimizer: Optimizer) -> None:
        """Let an optimizer step on releases only, until ``close``."""
        self._handles = [
            optimizer.register_step_pre_hook(self._restore),
            optimizer.register_step_post_hook(self._spend),
        ]

    def close(self) -> None:
        """Leave the optimizer as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.gradients = [], None

    def _restore(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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

    def _spend(self, *_: Any) -> None:
        self.gradients = None

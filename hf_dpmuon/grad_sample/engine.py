"""What every engine of per-sample gradients offers to the mechanism and the trainer.

Receives a plain model and, before a forward pass, to which privacy unit each row of the batch
belongs. Returns, after a backward pass of the *summed* loss, norms of the units' gradients and
weighted sums of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn

__all__ = ["PerSampleEngine"]

PIECE = 4096  # numbers whose squares are added up at once
# Products of float32 below 1e-38 underflow: that moves a norm above this by less than 1e-6 of it,
# for each of the numbers whose squares it adds up, whose root it takes.
UNDERFLOW = 1e-16


class PerSampleEngine(GradSampleModule, ABC):  # type: ignore[misc]
    """A model wrapped so that each privacy unit's gradient can be clipped before it is summed.

    Per physical batch: ``set_units`` where a unit owns several rows; ``passes`` times a forward
    pass through the engine and a backward pass of its loss summed over rows; ``per_unit_norms``;
    ``add_weighted_sum``; ``discard``. The gradients of the passes, and of the rows of a unit, add
    up before a norm is taken.

    Args:
        model: The plain classifier in training form; it keeps its class and state-dict keys.
        passes: Forward passes of a physical batch that one release consumes, at most.

    Guarantees:
        The gradient of a trainable parameter is either reported per unit, or zero since this
        pass did not reach it, or an error names the parameter. No ``p.grad`` outlives ``discard``.
    """

    def __init__(self, model: nn.Module, *, passes: int = 1) -> None:
        self.passes = passes
        self._unit_of_row: Tensor | None = None
        self._num_units = 0
        self._row_weights: Tensor | None = None
        super().__init__(model, loss_reduction="sum", strict=True)
        self._trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def set_units(
        self,
        unit_of_row: Tensor | None,
        num_units: int,
        *,
        reduction: Literal["sum", "mean"] = "sum",
    ) -> None:
        """Say which unit owns each row, from the next forward pass to ``discard``.

        Args:
            unit_of_row: int64 of shape (B,), values in [0, num_units); None if row i is unit i.
            num_units: U, the number of units in this physical batch.
            reduction: A unit's gradient is the sum of those of its rows, or their mean: each row
                counts 1 / (rows of its unit), whatever the loss. Backpropagate the sum over rows.
        """
        self._unit_of_row = unit_of_row
        self._num_units = num_units
        self._row_weights = None
        if unit_of_row is not None and reduction == "mean":
            rows_of_unit = torch.bincount(unit_of_row, minlength=num_units)
            if rows_of_unit.max() > 1:
                self._row_weights = 1 / rows_of_unit[unit_of_row].double()

    @abstractmethod
    def per_unit_norms(self) -> dict[str, Tensor]:
        """Norm of each unit's gradient, per parameter reached by the last passes.

        Returns:
            For each reached parameter, by name, at least float32, of shape (U,).

        Raises:
            RuntimeError: If a parameter has a gradient that is not known per unit, or more passes
                than ``passes`` were taken.
        """

    @abstractmethod
    def add_weighted_sum(
        self, weights: Mapping[str, Tensor], *, into: Mapping[str, Tensor]
    ) -> None:
        """Add ``sum_u weights[name][u] * gradient_u`` to ``into[name]``, for reached parameters.

        Args:
            weights: For each reached parameter, of shape (U,).
            into: For each trainable parameter, a tensor of its shape, at least float32.

        Guarantees:
            A unit of weight 0 contributes exactly zero, even where its gradient is not finite.
        """

    @abstractmethod
    def discard(self) -> None:
        """Drop all gradients, the units, and whatever an unfinished or foreign pass left."""

    def close(self) -> None:
        """Leave the model as if it had never been wrapped: no hook, gradient or state of ours."""
        self.discard()
        self.to_standard_module()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; here they are never zeroed in place."""
        self.discard()

    def _sum_rows(self, gradient_rows: Tensor) -> Tensor:
        """(B, ...) per row to (U, ...) per unit."""
        if self._unit_of_row is None:
            return gradient_rows
        units = gradient_rows.new_zeros(self._num_units, *gradient_rows.shape[1:])
        return units.index_add_(0, self._unit_of_row, self._weighted_rows(gradient_rows))

    def _weighted_rows(self, gradient_rows: Tensor) -> Tensor:
        """Gradients that belong to rows (B, ...), by what each row counts in its unit."""
        if self._row_weights is None:
            return gradient_rows
        gradient_rows = at_least_float32(gradient_rows)
        weights = self._row_weights.to(gradient_rows.dtype)
        return gradient_rows * weights.view(-1, *(1,) * (gradient_rows.dim() - 1))


def at_least_float32(x: Tensor) -> Tensor:
    """Return ``x``, or its float32 form where it is narrower."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def row_norms(x: Tensor) -> Tensor:
    """(U, ...) to (U,), float64: norms in pieces, since long sums in float32 lose up to 1e-4.

    Where squares in float32 may have underflowed or overflowed, the norm is taken in float64.
    """
    flat = x.reshape(len(x), -1)
    if flat.shape[1] <= PIECE:
        return torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)  # type: ignore[no-any-return]
    whole = flat.shape[1] // PIECE * PIECE
    pieces = flat[:, :whole].reshape(len(x), whole // PIECE, PIECE)
    rest = torch.linalg.vector_norm(flat[:, whole:], dim=1, keepdim=True)
    parts = torch.cat([torch.linalg.vector_norm(pieces, dim=2), rest], 1)
    norms: Tensor = torch.linalg.vector_norm(parts, dim=1, dtype=torch.float64)
    trusted = norms.isfinite() & (norms >= UNDERFLOW * math.sqrt(flat.shape[1]))
    for u in (~trusted).nonzero().flatten().tolist():
        norms[u] = torch.linalg.vector_norm(flat[u], dtype=torch.float64)
    return norms


def any_zero(weights: Mapping[str, Tensor]) -> bool:
    """Whether some weight is 0; asked once for all parameters, since the answer must be awaited."""
    return bool(weights) and not bool(torch.stack(list(weights.values())).all())


def add_weighted(samples: Tensor, weights: Tensor, *, into: Tensor, mask_zeros: bool) -> None:
    """Add ``sum_u weights[u] samples[u]`` to ``into``.

    Args:
        samples: (U, *shape).
        weights: (U,).
        into: (*shape), contiguous.
        mask_zeros: Where a weight is 0, add exactly nothing.
    """
    flat = samples.reshape(len(samples), -1)  # (U, P)
    if mask_zeros:
        flat = torch.where(weights[:, None] != 0, flat, 0.0)
    into.view(1, -1).addmm_(weights[None].to(into.dtype), flat.to(into.dtype))

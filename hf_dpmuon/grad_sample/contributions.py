"""The gradient of one parameter, per privacy unit, in the form that is cheapest to hold.

Shape letters: U units, T tokens (all rows and positions of a unit), D inputs, P outputs.

Where a weight multiplies tokens, unit u's gradient is sum_t g_ut a_ut^T. Its norm needs no (P, D)
matrix per unit (Li et al. 2022, arXiv 2110.05679), and a weighted sum over units is one product of
matrices (book-keeping, Bu et al. 2023, arXiv 2210.00038):

    |sum_t g_t a_t^T|^2 = sum_ts (a_t . a_s) (g_t . g_s)
    sum_u w_u sum_t g_ut a_ut^T = (w g)^T a, over all U T tokens at once

The rows of a unit, and several uses of a weight, only make the token axis longer.
"""

# ruff: noqa: N815 (names end in their shape letters)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hf_dpmuon.grad_sample.engine import add_weighted, at_least_float32, row_norms

__all__ = ["Contribution", "OuterProducts", "UnitGradients", "combine"]

# Norms come from Gram matrices where these take at most this many times the multiplications of the
# gradients themselves: T^2 (D + P) against T D P.
GRAM_ALLOWANCE = 1.0

# A norm in float32 counts where it is at least this part of sum_t |a_t| |g_t|; where tokens cancel
# to less, it is taken again in float64. Rounding changes the square of a norm from Gram matrices by
# up to 1e-6 of the square of that sum, and a gradient by up to 1e-7 of that sum: in both cases the
# norm by less than 1e-5 of itself.
GRAM_LEAST = 0.25
DIRECT_LEAST = 1 / 64

# Gradients are held where they take at most this many times the memory of the pair that gives them,
# D P against T (D + P): their sum is cheaper, an addition over units and not a product over tokens.
GRADIENT_ALLOWANCE = 1.6


class Contribution(Protocol):
    """Gradients of the units with respect to one parameter."""

    def norms(self) -> Tensor:
        """(U,), at least float32."""

    def add_weighted_sum(self, weights: Tensor, *, into: Tensor, mask_zeros: bool) -> None:
        """Add the gradients under weights (U,); if masked, a weight of 0 adds exactly nothing."""

    def gradients(self) -> Tensor:
        """(U, *shape), at least float32."""

    def held(self) -> Contribution:
        """The same in the form in which to wait for the weights."""


@dataclass(frozen=True)
class UnitGradients:
    """The gradients themselves.

    Attributes:
        values_U: (U, *shape of the parameter).
    """

    values_U: Tensor

    def norms(self) -> Tensor:  # noqa: D102
        return row_norms(self.values_U)

    def add_weighted_sum(  # noqa: D102
        self, weights: Tensor, *, into: Tensor, mask_zeros: bool
    ) -> None:
        add_weighted(self.values_U, weights, into=into, mask_zeros=mask_zeros)

    def gradients(self) -> Tensor:  # noqa: D102
        return self.values_U

    def held(self) -> Contribution:  # noqa: D102
        return self


@dataclass(frozen=True)
class OuterProducts:
    """The gradients as the inputs and output gradients of the layer.

    Attributes:
        a_UTD: Inputs of the weight.
        g_UTP: Gradients with respect to its outputs.
        shape: Of the parameter, with P * D entries.
    """

    a_UTD: Tensor
    g_UTP: Tensor
    shape: torch.Size

    def norms(self) -> Tensor:  # noqa: D102
        a_UTD, g_UTP = at_least_float32(self.a_UTD), at_least_float32(self.g_UTP)
        if self._num_tokens == 1:
            return row_norms(a_UTD) * row_norms(g_UTP)
        a_UT, g_UT = (torch.linalg.vector_norm(x, dim=2) for x in (a_UTD, g_UTP))
        sizes_U = (a_UT * g_UT).sum(1)  # what the norm would be if no token cancelled another
        if self._pair_size > GRAM_ALLOWANCE * self.shape.numel():
            norms_U, least = row_norms(self.gradients()), DIRECT_LEAST
        else:
            gram_UTT = torch.bmm(a_UTD, a_UTD.mT).mul_(torch.bmm(g_UTP, g_UTP.mT))
            norms_U, least = gram_UTT.sum((1, 2)).clamp(min=0).sqrt(), GRAM_LEAST
        for u in (norms_U < least * sizes_U).nonzero().flatten().tolist():
            gradient = g_UTP[u].double().mT @ a_UTD[u].double()
            rounding = (self._num_tokens + 1) * torch.finfo(torch.float64).eps * sizes_U[u].double()
            norms_U[u] = gradient.norm() + rounding
        return norms_U

    def add_weighted_sum(  # noqa: D102
        self, weights: Tensor, *, into: Tensor, mask_zeros: bool
    ) -> None:
        a_UTD, g_UTP = at_least_float32(self.a_UTD), at_least_float32(self.g_UTP)
        w_U11 = weights.to(g_UTP.dtype)[:, None, None]
        if mask_zeros:
            a_UTD = torch.where(w_U11 != 0, a_UTD, 0.0)
            g_UTP = torch.where(w_U11 != 0, g_UTP, 0.0)
        if a_UTD.shape[-1] < g_UTP.shape[-1]:
            a_UTD = a_UTD * w_U11
        else:
            g_UTP = g_UTP * w_U11
        into.view(g_UTP.shape[-1], -1).addmm_(
            g_UTP.flatten(0, 1).T.to(into.dtype), a_UTD.flatten(0, 1).to(into.dtype)
        )

    def gradients(self) -> Tensor:  # noqa: D102
        a_UTD, g_UTP = at_least_float32(self.a_UTD), at_least_float32(self.g_UTP)
        return torch.bmm(g_UTP.mT, a_UTD).view(len(a_UTD), *self.shape)

    def held(self) -> Contribution:  # noqa: D102
        if self.shape.numel() > GRADIENT_ALLOWANCE * self._pair_size:
            return self
        return UnitGradients(self.gradients())

    @property
    def _num_tokens(self) -> int:
        return self.a_UTD.shape[1]

    @property
    def _pair_size(self) -> int:
        """Numbers a unit, T (D + P)."""
        return self._num_tokens * (self.a_UTD.shape[2] + self.g_UTP.shape[2])


def combine(uses: Sequence[Contribution]) -> Contribution:
    """Add the gradients of all uses of one parameter."""
    if len(uses) == 1:
        return uses[0]
    pairs = [use for use in uses if isinstance(use, OuterProducts)]
    if len(pairs) == len(uses):
        return OuterProducts(
            torch.cat([pair.a_UTD for pair in pairs], 1),
            torch.cat([pair.g_UTP for pair in pairs], 1),
            pairs[0].shape,
        )
    return UnitGradients(torch.stack([use.gradients() for use in uses]).sum(0))

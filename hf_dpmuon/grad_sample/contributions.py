"""The gradient of one parameter, per privacy unit, in the form that is cheapest to hold.

Shape letters: U units, T tokens (all rows and positions of a unit), D inputs, P outputs.

Where a weight multiplies tokens, unit u's gradient is sum_t g_ut a_ut^T. Its norm needs no (P, D)
matrix per unit (Li et al. 2022, arXiv 2110.05679), and a weighted sum over units is one product of
matrices (book-keeping, Bu et al. 2023, arXiv 2210.00038):

    |sum_t g_t a_t^T|^2 = sum_ts (a_t . a_s) (g_t . g_s)
    sum_u w_u sum_t g_ut a_ut^T = (w g)^T a, over all U T tokens at once

The rows of a unit, and several uses of a weight, only make the token axis longer.

Guarantees:
    Norms are right to 1e-5, and weighted sums as exact as float32 can be, for all finite float32
    values: what float32 would over- or underflow is taken in float64, where no product of four
    such values leaves the range.
"""

# ruff: noqa: N815 (names end in their shape letters)

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hf_dpmuon.grad_sample.engine import UNDERFLOW, add_weighted, at_least_float32, row_norms

__all__ = ["Contribution", "OuterProducts", "UnitGradients", "combine", "exceed_float32"]

# Norms come from Gram matrices where these take at most this many times the multiplications of the
# gradients themselves: T^2 (D + P) against T D P.
GRAM_ALLOWANCE = 1.0

# A norm in float32 counts where it is at least this part of sum_t |a_t| |g_t|; where tokens cancel
# to less, it is taken again in float64. Rounding changes the square of a norm from Gram matrices by
# up to 1e-6 of the square of that sum, and a gradient by up to 1e-7 of that sum: in both cases the
# norm by less than 1e-5 of itself.
GRAM_LEAST = 0.25
DIRECT_LEAST = 1 / 64

# Up to here no product of two numbers and a weight overflows, and one that underflows is nothing.
LARGEST_IN_FLOAT32 = 1e15

# Gradients are held where they take at most this many times the memory of the pair that gives them,
# D P against T (D + P): their sum is cheaper, an addition over units and not a product over tokens.
GRADIENT_ALLOWANCE = 1.6


class Contribution(Protocol):
    """Gradients of the units with respect to one parameter."""

    def norms(self) -> Tensor:
        """(U,), at least float32."""

    def largest(self) -> Tensor:
        """The largest magnitude in what a weighted sum multiplies with one another; a scalar."""

    def add_weighted_sum(
        self, weights: Tensor, *, into: Tensor, mask_zeros: bool, in_float64: bool = False
    ) -> None:
        """Add the gradients under weights (U,).

        Args:
            weights: (U,).
            into: The parameter's shape.
            mask_zeros: Whether a weight of 0 adds exactly nothing.
            in_float64: Whether ``largest`` says that float32 might not do.
        """

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
        return row_norms(self.values_U).to(self.values_U.dtype)

    def largest(self) -> Tensor:  # noqa: D102
        return self.values_U.new_zeros(())  # a weight times a gradient is at most the bound

    def add_weighted_sum(  # noqa: D102
        self, weights: Tensor, *, into: Tensor, mask_zeros: bool, in_float64: bool = False
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
        shape: That of the parameter, with P * D entries.
    """

    a_UTD: Tensor
    g_UTP: Tensor
    shape: torch.Size

    def norms(self) -> Tensor:  # noqa: D102
        a_UTD, g_UTP = at_least_float32(self.a_UTD), at_least_float32(self.g_UTP)
        if self._num_tokens == 1:
            return (row_norms(a_UTD) * row_norms(g_UTP)).to(g_UTP.dtype)
        a_UT, g_UT = (torch.linalg.vector_norm(x, dim=2) for x in (a_UTD, g_UTP))
        sizes_U = (a_UT * g_UT).sum(1)  # what the norm would be if no token cancelled another
        if self._pair_size > GRAM_ALLOWANCE * self.shape.numel():
            norms_U, least = row_norms(self.gradients()).to(g_UTP.dtype), DIRECT_LEAST
        else:
            gram_UTT = torch.bmm(a_UTD, a_UTD.mT).mul_(torch.bmm(g_UTP, g_UTP.mT))
            norms_U, least = gram_UTT.sum((1, 2)).clamp(min=0).sqrt(), GRAM_LEAST
        rounds = UNDERFLOW * self._num_tokens * math.sqrt(max(a_UTD.shape[2], g_UTP.shape[2]))
        lost_U = rounds * (1 + a_UT.amax(1) + g_UT.amax(1))
        trusted_U = norms_U.isfinite() & (norms_U >= least * sizes_U) & (norms_U >= lost_U)
        for u in (~trusted_U).nonzero().flatten().tolist():
            norms_U[u] = self._norm_in_float64(u)
        return norms_U

    def _norm_in_float64(self, u: int) -> Tensor:
        a_TD, g_TP = self.a_UTD[u].double(), self.g_UTP[u].double()
        if not (a_TD.any() and g_TP.any()):
            return a_TD.new_zeros(())
        size = (a_TD.norm(dim=1) * g_TP.norm(dim=1)).sum()
        rounding = (self._num_tokens + 1) * torch.finfo(torch.float64).eps * size
        norm: Tensor = (g_TP.mT @ a_TD).norm() + rounding
        return norm

    def largest(self) -> Tensor:  # noqa: D102
        ends = [end.float() for x in (self.a_UTD, self.g_UTP) for end in x.aminmax()]
        return torch.stack(ends).abs().amax()

    def add_weighted_sum(  # noqa: D102
        self, weights: Tensor, *, into: Tensor, mask_zeros: bool, in_float64: bool = False
    ) -> None:
        a_UTD, g_UTP = at_least_float32(self.a_UTD), at_least_float32(self.g_UTP)
        if in_float64:
            a_UTD, g_UTP = a_UTD.double(), g_UTP.double()
        w_U11 = weights.to(g_UTP.dtype)[:, None, None]
        if mask_zeros:
            a_UTD = torch.where(w_U11 != 0, a_UTD, 0.0)
            g_UTP = torch.where(w_U11 != 0, g_UTP, 0.0)
        if a_UTD.shape[-1] < g_UTP.shape[-1]:
            a_UTD = a_UTD * w_U11
        else:
            g_UTP = g_UTP * w_U11
        if in_float64:
            into.add_((g_UTP.flatten(0, 1).T @ a_UTD.flatten(0, 1)).view(into.shape))
        else:
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


def exceed_float32(largest: Sequence[Tensor]) -> bool:
    """Whether weighted sums need float64; asked once for all uses, as the answer is awaited."""
    return bool(largest) and not bool(torch.stack(list(largest)).amax() <= LARGEST_IN_FLOAT32)

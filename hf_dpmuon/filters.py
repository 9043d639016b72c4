"""Filters: smooth a stream of private gradients over time, before the optimizer reads them.

Receives the private gradient of each step; returns the filtered one. A filter may also ask for
another gradient than that at the weights: ``query_points`` says where each sample's gradient is to
be evaluated and with which coefficients the evaluations are summed *before* they are clipped. That
is the one arrow that runs from here back to the trainer; it needs no closure, and it costs no
privacy, since the points are functions of past releases.

Every filter is linear, so what it does to the noise is known exactly: see ``known_noise``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_dpmuon.known_noise import NO_FILTER, LinearResponse, variance_factor

__all__ = [
    "QueryPoint",
    "moved_to",
    "GradientFilter",
    "LOW_PASS",
    "LowPassFilter",
    "KalmanFilter",
]


@dataclass(frozen=True)
class QueryPoint:
    """One evaluation of every sample's gradient.

    Attributes:
        coefficient: Its weight in the sample's combined gradient, which is what is clipped.
        weights: Where to evaluate, one tensor a parameter; None for the weights as they are.
    """

    coefficient: float
    weights: list[Tensor] | None = None


@contextmanager
def moved_to(parameters: Sequence[Tensor], point: QueryPoint) -> Iterator[None]:
    """Let the parameters hold the point's weights, and their own, bit for bit, afterwards."""
    own = [p.data for p in parameters]
    try:
        for p, x in zip(parameters, own if point.weights is None else point.weights, strict=True):
            p.data = x
        yield
    finally:
        for p, x in zip(parameters, own, strict=True):
            p.data = x


class GradientFilter:
    """No filter, and the interface of all.

    In each step: ``query_points``, then the release, then ``smooth`` once, then the optimizer.

    Attributes:
        response: What the filter does to a stream of releases.
        evaluations: Largest number of query points of a step.
    """

    response = NO_FILTER
    evaluations = 1

    def query_points(self) -> list[QueryPoint]:
        """Where this step's gradients are evaluated; coefficients sum to 1."""
        return [QueryPoint(1.0)]

    def smooth(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the filtered gradients, given this step's private ones, which are only read."""
        return list(gradients)

    @property
    def noise_gain(self) -> float:
        """Steady-state variance of the filtered noise over that of a release."""
        return variance_factor([self.response])

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, in tensors and plain numbers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()`` of a filter with the same settings."""


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


# Coefficients (b, a) of DOPPLER's experiments (its file `coefs/`, by way of DP-PMLF). Which of them
# gave which published accuracy is not known. The default of its code, a Butterworth filter, is left
# out: its coefficients as printed do not pass a constant unchanged.
LOW_PASS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "ema_0.9": ((0.1,), (-0.9,)),
    "ema_0.9_averaged": ((0.05, 0.05), (-0.9,)),
    "ema_0.9_sharpened": ((0.15, -0.05), (-0.9,)),
    "ema_0.6": ((0.4,), (-0.6,)),
    "ema_0.6_averaged": ((0.2, 0.2), (-0.6,)),
    "ema_0.6_sharpened": ((0.5, -0.1), (-0.6,)),
    "second_order": ((0.05, 0.05), (-0.7, -0.2)),
}


class LowPassFilter(GradientFilter):
    """DOPPLER: a linear low-pass filter on the private gradient, corrected for its start.

    m_t = sum_j b_j g_{t-j} - sum_j a_j m_{t-j}; c_t the same of a constant 1; m_t / c_t is returned
    (Zhang, Bu, Hong, Razaviyayn, NeurIPS 2024, arXiv 2408.13460). A constant gradient passes
    unchanged at every step. Keeps len(a) + len(b) - 1 copies of the gradient.

    Args:
        b: Coefficients of the input, b_0 first.
        a: Coefficients of past outputs, a_1 first.

    Raises:
        ValueError: If sum(b) - sum(a) is not 1 (the filter would rescale), or it is unstable.
    """

    def __init__(self, b: Sequence[float] = (0.1,), a: Sequence[float] = (-0.9,)) -> None:
        if not math.isclose(sum(b) - sum(a), 1.0, abs_tol=1e-6):
            raise ValueError(
                f"b={tuple(b)} and a={tuple(a)} must satisfy sum(b) - sum(a) = 1, so that a "
                f"constant gradient keeps its size; it is {sum(b) - sum(a):.6g}."
            )
        self.response = LinearResponse(b=tuple(b), a=tuple(a), start="average")
        self._inputs: list[list[Tensor]] = []  # newest first, len(b) - 1 at most
        self._outputs: list[list[Tensor]] = []  # newest first, len(a) at most
        self._step = 0

    @classmethod
    def named(cls, name: str) -> LowPassFilter:
        """Build the filter with the coefficients of that name in ``LOW_PASS``.

        Raises:
            ValueError: If the name is unknown.
        """
        if name not in LOW_PASS:
            raise ValueError(f"low_pass={name!r} must be one of {', '.join(LOW_PASS)}.")
        return cls(*LOW_PASS[name])

    def smooth(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Advance the recursion by one step and return m_t / c_t."""
        b, a = self.response.b, self.response.a
        self._step += 1
        m = list(torch._foreach_mul(list(gradients), b[0]))
        for coefficient, past in zip(b[1:], self._inputs, strict=False):
            torch._foreach_add_(m, past, alpha=coefficient)
        for coefficient, past in zip(a, self._outputs, strict=False):
            torch._foreach_sub_(m, past, alpha=coefficient)
        if len(b) > 1:
            self._inputs = [_copies(gradients), *self._inputs][: len(b) - 1]
        if a:
            self._outputs = [m, *self._outputs][: len(a)]
        c = self.response.apply([1.0] * min(self._step, self.response.memory))[-1]
        return list(torch._foreach_div(m, c))

    def state_dict(self) -> dict[str, Any]:
        """Past inputs and outputs, and the number of steps."""
        return {"step": self._step, "inputs": self._inputs, "outputs": self._outputs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()`` of a filter with the same coefficients."""
        self._step = state["step"]
        self._inputs = [_copies(past) for past in state["inputs"]]
        self._outputs = [_copies(past) for past in state["outputs"]]


class KalmanFilter(GradientFilter):
    """DiSK: predict the gradient along the last move, correct it by the release with gain kappa.

    With d = x_t - x_{t-1} and c = (1 - kappa) / (kappa gamma), each sample's gradient is c times
    that at x_t + gamma d plus (1 - c) times that at x_t; the combination is clipped, noised, and
    g_t = (1 - kappa) g_{t-1} + kappa release, with the first release as first g (Zhang, Bu,
    Balle, Hong, Razaviyayn, Mirrokni, ICLR 2025, arXiv 2410.03883). On a quadratic loss without
    noise and clipping, g_t is the gradient at x_t. Keeps two copies of the parameters.

    Args:
        parameters: The trainable parameters, in the order of the gradients that are smoothed.
        kappa: Gain in (0, 1]; 1 is no filter. The paper on DP-Muon reports 1.5, which is outside
            the method: it would multiply the noise's variance by kappa / (2 - kappa) = 3.
        gamma: Length of the look-ahead in moves, > 0. At (1 - kappa) / kappa, the default, one
            evaluation a step suffices; at any other, two are made.

    Raises:
        ValueError: If ``kappa`` or ``gamma`` is out of range.
    """

    def __init__(
        self, parameters: Sequence[Tensor], *, kappa: float = 0.7, gamma: float | None = None
    ) -> None:
        if not 0 < kappa <= 1:
            raise ValueError(f"kappa={kappa} must be in (0, 1].")
        if gamma is not None and not 0 < gamma < math.inf:
            raise ValueError(f"gamma={gamma} must be a finite number > 0.")
        single = (1 - kappa) / kappa
        self.parameters = list(parameters)
        self.kappa = kappa
        self.gamma = single if gamma is None else gamma
        # 1 to the bit where it is meant to be, since it decides between one evaluation and two
        self._coefficient = (
            1.0 if math.isclose(self.gamma, single, rel_tol=1e-9) else single / self.gamma
        )
        self.evaluations = 1 if kappa == 1 or self._coefficient == 1 else 2
        self.response = LinearResponse(b=(kappa,), a=(kappa - 1,), start="first")
        self._previous: list[Tensor] | None = None  # x_{t-1}
        self._filtered: list[Tensor] | None = None  # g_{t-1}

    def query_points(self) -> list[QueryPoint]:
        """x_t + gamma d, and x_t unless its coefficient is zero."""
        if self._previous is None or self.kappa == 1:
            return [QueryPoint(1.0)]
        x = [p.detach() for p in self.parameters]
        ahead = list(torch._foreach_sub(x, self._previous))
        torch._foreach_mul_(ahead, self.gamma)
        torch._foreach_add_(ahead, x)
        c = self._coefficient
        at_ahead = QueryPoint(c, ahead)
        return [at_ahead] if c == 1 else [at_ahead, QueryPoint(1 - c)]

    def smooth(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Correct the prediction by this step's release; note where the weights stand."""
        if self._filtered is None:
            self._filtered = _copies(gradients)
        else:
            torch._foreach_lerp_(self._filtered, list(gradients), self.kappa)
        self._previous = _copies(self.parameters)
        return _copies(self._filtered)

    def state_dict(self) -> dict[str, Any]:
        """Filtered gradient and last weights; None before the first step."""
        return {"previous": self._previous, "filtered": self._filtered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()`` of a filter with the same kappa and gamma."""
        self._previous, self._filtered = (
            None if state[key] is None else _copies(state[key]) for key in ("previous", "filtered")
        )

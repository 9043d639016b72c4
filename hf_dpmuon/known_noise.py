"""What is known of the noise in a private gradient, since every recursion it passes is linear.

Receives public constants, and private values only; everything here is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "NO_FILTER",
    "KnownNoise",
    "LinearResponse",
    "constant_gain",
    "ema",
    "heavy_ball",
    "lookahead",
    "release_weights",
    "signal_to_noise",
    "variance_factor",
]


@dataclass(frozen=True)
class LinearResponse:
    """Recursion y_t = sum_j b_j x_{t-j} - sum_j a_j y_{t-j}, from zero before step 1.

    Attributes:
        b: Coefficients of the input, b_0 first.
        a: Coefficients of past outputs, a_1 first; the recursion must be stable.
        start: "zero" for the bare recursion; "average" if y_t is divided by the response to a
            constant 1, as in DOPPLER; "first" if the first output is the first input, as in DiSK.

    Raises:
        ValueError: If ``b`` is empty, or the recursion would grow without bound.
    """

    b: tuple[float, ...]
    a: tuple[float, ...] = ()
    start: Literal["zero", "average", "first"] = "zero"

    def __post_init__(self) -> None:
        if not self.b:
            raise ValueError("b=() must hold at least b_0.")
        if self.radius >= 1:
            raise ValueError(
                f"a={self.a} makes the recursion unstable: its largest pole is {self.radius:.4g} "
                "and must be below 1."
            )

    @property
    def radius(self) -> float:
        """Modulus of the largest pole: the factor by which memory fades each step."""
        return float(np.abs(np.roots((1.0, *self.a))).max(initial=0.0))

    @property
    def memory(self) -> int:
        """Number of steps after which a release's weight is below 1e-9 of the largest, or 10^5."""
        if self.radius == 0:
            return len(self.b)
        return min(10**5, len(self.b) + math.ceil(math.log(1e-9) / math.log(self.radius)))

    def apply(self, inputs: Sequence[float]) -> list[float]:
        """Run the bare recursion over numbers: the reference for what a filter does to tensors."""
        outputs: list[float] = []
        for t in range(len(inputs)):
            y = sum(b * inputs[t - j] for j, b in enumerate(self.b) if j <= t)
            y -= sum(a * outputs[t - j] for j, a in enumerate(self.a, start=1) if j <= t)
            outputs.append(y)
        return outputs

    def pull_back(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Weights on inputs 1..t that give what ``weights`` on outputs 1..t give."""
        if self.start == "average":
            weights = weights / np.array(self.apply([1.0] * len(weights)))
        # The transpose of a recursion is the same recursion backwards in time.
        pulled = np.array(self.apply(weights[::-1].tolist())[::-1])
        if self.start == "first":
            pulled[0] /= self.b[0]
        return pulled


NO_FILTER = LinearResponse(b=(1.0,))


def ema(beta: float) -> LinearResponse:
    """M_t = beta M_{t-1} + (1 - beta) g_t."""
    return LinearResponse(b=(1 - beta,), a=(-beta,))


def lookahead(beta: float) -> LinearResponse:
    """(1 - beta) g_t + beta M_t with M the ``ema``: what DP-Muon orthogonalises."""
    return LinearResponse(b=((1 - beta) * (1 + beta), -(1 - beta) * beta), a=(-beta,))


def heavy_ball(beta: float) -> LinearResponse:
    """M_t = beta M_{t-1} + g_t."""
    return LinearResponse(b=(1.0,), a=(-beta,))


def release_weights(responses: Sequence[LinearResponse], step: int) -> NDArray[np.float64]:
    """Weights of releases 1..step in what the chain of ``responses`` gives at ``step``.

    Args:
        responses: In order of application; none for the release itself.
        step: t >= 1, the number of releases so far.

    Returns:
        Shape (t,), the oldest release first.

    Raises:
        ValueError: If ``step`` < 1.
    """
    if step < 1:
        raise ValueError(f"step={step} must be >= 1.")
    weights = np.zeros(step)
    weights[-1] = 1.0
    for response in reversed(responses):
        weights = response.pull_back(weights)
    return weights


@lru_cache(maxsize=64)
def _moments(responses: tuple[LinearResponse, ...], step: int) -> tuple[float, float]:
    weights = release_weights(responses, step)
    return float(np.square(weights).sum()), float(weights.sum())


def _at(responses: Sequence[LinearResponse], step: int | None) -> tuple[float, float]:
    steady = sum(response.memory for response in responses) + 1
    return _moments(tuple(responses), steady if step is None else min(step, steady))


def variance_factor(responses: Sequence[LinearResponse], step: int | None = None) -> float:
    """Variance of the noise in every entry at ``step``, over that of one release.

    The noise of different releases is independent, so this is the sum of squared weights; noise
    stays independent across entries. For one filter in its steady state it is the noise gain.

    Args:
        responses: Filters and momentum in order of application.
        step: t >= 1, or None for the steady state.
    """
    return _at(responses, step)[0]


def constant_gain(responses: Sequence[LinearResponse], step: int | None = None) -> float:
    """What the chain makes of a constant gradient at ``step``, over that gradient."""
    return _at(responses, step)[1]


@dataclass(frozen=True)
class KnownNoise:
    """What is publicly known of the noise in the gradients that an optimizer reads.

    Attributes:
        std: Standard deviation in every entry of a release, >= 0; ``GaussianMechanism.noise_std``.
        filter: What the gradient passed through since its release.
    """

    std: float
    filter: LinearResponse = NO_FILTER

    def __post_init__(self) -> None:
        if not 0 <= self.std < math.inf:
            raise ValueError(f"std={self.std} must be in [0.0, inf).")

    def variance(self, step: int) -> float:
        """Variance of every entry of the gradient at ``step``, from 1."""
        return self.std**2 * variance_factor([self.filter], step)

    def std_after(self, momentum: LinearResponse, step: int) -> float:
        """Standard deviation of every entry of the momentum at ``step``, from 1."""
        return self.std * math.sqrt(variance_factor([self.filter, momentum], step))


def signal_to_noise(*, gradient_norm: float, noise_std: float, num_entries: int) -> float:
    """Estimate |G| / |N| of a private gradient G + N whose noise level is known.

    E|G + N|^2 = |G|^2 + d s^2 with d entries of noise of standard deviation s, so the signal is
    what the observed norm has beyond the noise's; where it has nothing beyond, the estimate is 0.

    Args:
        gradient_norm: Norm of the private gradient over all entries.
        noise_std: s = sigma C / (q N); 0 gives infinity.
        num_entries: d.

    Returns:
        The ratio, >= 0; single estimates below about (2/d)^(1/4) are indistinguishable from 0.
    """
    noise_energy = num_entries * noise_std**2
    if noise_energy == 0:
        return math.inf
    return math.sqrt(max(0.0, gradient_norm**2 / noise_energy - 1.0))

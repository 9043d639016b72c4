"""Learning rates where none is set: what noise alone may do to a matrix in one step.

Receives public facts only: the shapes of what is trained, the number of steps, the bound on a
unit's gradient, and the known noise. Returns rates; no weight, gradient or row is looked at.

The rule: in one step pure noise moves each of the L matrices that are trained by spectral norm
tau = min(0.15, 1/3 / sqrt(L)) / sqrt(max(1, T/100)). A spectral step has that norm whatever its
gradient is, so its rate is tau. DP-SGD's and DP-Adam's follow from the noise that their momentum
lets through, whose norm in an m x n matrix is its standard deviation times sqrt(m) + sqrt(n). Where
there is little noise, DP-SGD's is held by the bound C instead. What this was measured against is in
``benchmarks/reports/defaults_cpu_2026-12-01.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hf_dpmuon.known_noise import (
    KnownNoise,
    LinearResponse,
    constant_gain,
    ema,
    variance_factor,
)

__all__ = ["Course"]

SPECTRAL_NORM = 1 / 3  # of a step of noise, over all matrices as if they were one
MOST_IN_A_MATRIX = 0.15
STEPS_AT_FULL_RATE = 100
LONGEST_STEP = 7.0  # of DP-SGD, in units of C, if all gradients were alike
ADAM_LEAST_DENOMINATOR = math.sqrt(0.1)  # of the noise's, after `correct_for_noise`


@dataclass(frozen=True)
class Course:
    """What is known of a run before its first draw, as far as its rates depend on it.

    Attributes:
        shapes: Rows and columns of each trained matrix.
        steps: T >= 1.
        max_grad_norm: C > 0.
        noise: That of the gradients that the optimizer reads.
    """

    shapes: Sequence[tuple[int, int]]
    steps: int
    max_grad_norm: float
    noise: KnownNoise

    @property
    def spectral_rate(self) -> float:
        """Tau: the rate of steps of spectral norm 1."""
        tau = min(MOST_IN_A_MATRIX, SPECTRAL_NORM / math.sqrt(len(self.shapes)))
        return _short(tau / math.sqrt(max(1.0, self.steps / STEPS_AT_FULL_RATE)))

    def gradient_rate(self, momentum: LinearResponse) -> float:
        """The rate of steps in units of the gradient, as DP-SGD and DP-Muon-S take them."""
        gain = constant_gain([self.noise.filter, momentum], self.steps)
        longest = LONGEST_STEP / (self.max_grad_norm * gain)
        noise = self.noise.std_after(momentum, self.steps) * self._width
        return _short(min(longest, self.spectral_rate / noise) if noise else longest)

    def adam_rate(self, beta1: float, *, correct_for_noise: bool) -> float:
        """The rate of DP-Adam, in which noise alone gives its own share of each entry's step."""
        filter = self.noise.filter
        before, after = (
            variance_factor(chain, self.steps) for chain in ([filter], [filter, ema(beta1)])
        )
        # The first moment starts at zero, and DP-Adam divides by what it then lacks.
        share = math.sqrt(after / before) / constant_gain([ema(beta1)], self.steps)
        if correct_for_noise:
            share /= ADAM_LEAST_DENOMINATOR
        return _short(self.spectral_rate / (share * self._width))

    @property
    def _width(self) -> float:
        """Mean spectral norm of matrices of these shapes whose entries are standard normal."""
        return sum(math.sqrt(m) + math.sqrt(n) for m, n in self.shapes) / len(self.shapes)


def _short(rate: float) -> float:
    """The float that prints with three significant digits, so that what is printed is in use."""
    return float(f"{rate:.3g}")

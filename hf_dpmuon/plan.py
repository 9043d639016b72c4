"""A run as the accountant sees it: units, sampling rate, steps, noise and what they cost together.

Receives public facts only, before any private row is used; returns the plan that follows.

Guarantees:
    A calibrated noise multiplier meets its target under the same accountant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from hf_dpmuon.accounting import (
    SMALLEST_NOISE_MULTIPLIER,
    SampledGaussian,
    check_delta,
    epsilon_bound,
)
from hf_dpmuon.rounding import round_up

__all__ = [
    "Budget",
    "PrivacyPlan",
    "affordable_steps",
    "calibrate_noise_multiplier",
    "default_batch_size",
    "default_steps",
    "num_steps",
    "steps_per_epoch",
]

DEFAULT_STEPS = 100
FEWEST_STEPS = 30  # with which the default learning rates were tried
LARGEST_DEFAULT_BATCH = 8192
MOST_STEPS = 10**9
_SIGNIFICANT_DIGITS = 6
_LARGEST_NOISE_MULTIPLIER = 2.0**40
# Calibration may fall short of a budget by this share: the less, the cheaper epsilon is to compute.
_ALLOWANCE, _SLOW_ALLOWANCE = 1e-5, 0.004
_SAME_NOISE = 1e-6  # log noise multipliers this close have nearly the same digits


class _Point(NamedTuple):
    """A logarithm of the noise, and that of epsilon over its target there."""

    x: float
    excess: float


@dataclass(frozen=True)
class Budget:
    """What is asked of a run before its data is known: two of epsilon, sigma and the length.

    Attributes:
        logical_batch_size: Expected units in a step, >= 1; see ``default_batch_size`` if None.
        target_epsilon: What the run may cost, > 0.
        noise_multiplier: sigma >= 0.
        max_steps: T >= 1, which overrules ``num_train_epochs``.
        num_train_epochs: Passes over the data, > 0.
        target_delta: In (0, 1/N); 1 / (10 N) if None.
        accountant: What composes the steps.

    Raises:
        ValueError: A value lies outside its range, or not two of three are given.
    """

    logical_batch_size: int | None = None
    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    max_steps: int | None = None
    num_train_epochs: float | None = None
    target_delta: float | None = None
    accountant: str = "rdp"

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Budget:
        """Take the budget out of all arguments of a run, whose ``max_steps`` is -1 if unset."""
        taken = {field.name: settings[field.name] for field in fields(cls)}
        return cls(
            **taken | {"max_steps": None if taken["max_steps"] == -1 else taken["max_steps"]}
        )

    def __post_init__(self) -> None:
        """Check every value that can be checked without N."""
        if self.logical_batch_size is not None and self.logical_batch_size < 1:
            raise ValueError(f"logical_batch_size={self.logical_batch_size} must be >= 1.")
        if self.target_epsilon is not None:
            _check_target(self.target_epsilon)
        if self.noise_multiplier is not None:
            SampledGaussian(self.noise_multiplier, 1.0)  # which checks it
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"max_steps={self.max_steps} must be >= 1.")
        if self.num_train_epochs is not None and not 0 < self.num_train_epochs < math.inf:
            raise ValueError(
                f"num_train_epochs={self.num_train_epochs} must be a finite number > 0."
            )
        if self.target_delta is not None and not 0 < self.target_delta < 1:
            raise ValueError(f"target_delta={self.target_delta} must be in (0, 1/N).")
        has_length = self.max_steps is not None or self.num_train_epochs is not None
        given = [self.target_epsilon is not None, self.noise_multiplier is not None]
        if not any(given) or (all(given) and has_length):
            raise ValueError(
                "set epsilon (target_epsilon), from which sigma is calibrated, or sigma itself "
                "(noise_multiplier); both go together only where steps and epochs are left unset."
            )

    def plan(self, num_units: int, *, spent: Sequence[SampledGaussian] = ()) -> PrivacyPlan:
        """Return the plan for N privacy units, with the third of the three.

        Args:
            num_units: N >= 1.
            spent: Draws on the same units before, which count towards ``target_epsilon``.

        Raises:
            ValueError: N does not go with the batch size or delta, the two do not go together, or
                the target is spent already.
        """
        if num_units < 1:
            raise ValueError(f"num_units={num_units} must be >= 1.")
        batch_size, epochs = self.logical_batch_size, self.num_train_epochs
        if batch_size is None:
            of_epochs = epochs if self.max_steps is None else None
            batch_size = default_batch_size(num_units, self.target_epsilon, of_epochs)
        if batch_size > num_units:
            raise ValueError(
                f"logical_batch_size={batch_size} must be in [1, {num_units}], the "
                "number of privacy units."
            )
        delta = 1 / (10 * num_units) if self.target_delta is None else self.target_delta
        if delta >= 1 / num_units:
            raise ValueError(
                f"target_delta={delta} must be above 0 and below 1/N = {1 / num_units:.3g}, or a "
                "guarantee could publish one record in full; leave it unset for 1/(10 N)."
            )
        sample_rate = batch_size / num_units
        epsilon, sigma, steps = self.target_epsilon, self.noise_multiplier, self.max_steps
        if epsilon is not None and spent:
            before = epsilon_bound(spent, delta=delta, accountant=self.accountant).epsilon
            if before >= epsilon:
                raise ValueError(
                    f"target_epsilon={epsilon} must be above {round_up(before)}, which the "
                    "training that the model started from has spent on the same units already."
                )
        if steps is None and epochs is not None:
            steps = num_steps(num_epochs=epochs, sample_rate=sample_rate)
        if steps is None and (epsilon is None or sigma is None):
            steps = default_steps(sample_rate, epsilon)
        if steps is None:
            assert epsilon is not None
            assert sigma is not None
            steps = _longest(sigma, sample_rate, epsilon, delta, self.accountant, spent)
        if sigma is None:
            assert epsilon is not None
            sigma = calibrate_noise_multiplier(
                target_epsilon=epsilon,
                target_delta=delta,
                sample_rate=sample_rate,
                steps=steps,
                accountant=self.accountant,
                spent=spent,
            )
        return PrivacyPlan(num_units, sample_rate, steps, delta, sigma, self.accountant)


@dataclass(frozen=True)
class PrivacyPlan:
    """The run as the accountant sees it, fixed before the first row is used.

    Attributes:
        num_units: N, the number of privacy units.
        sample_rate: q = logical_batch_size / N, exact.
        steps: T, the number of logical steps.
        delta: The delta of the guarantee.
        noise_multiplier: sigma.
        accountant: What composes the steps.
    """

    num_units: int
    sample_rate: float
    steps: int
    delta: float
    noise_multiplier: float
    accountant: str = "rdp"

    @property
    def draws(self) -> SampledGaussian:
        """All draws of noise, as the accountant takes them."""
        return SampledGaussian(self.noise_multiplier, self.sample_rate, self.steps)

    @property
    def epsilon(self) -> float:
        """What the whole run costs."""
        return epsilon_bound([self.draws], delta=self.delta, accountant=self.accountant).epsilon

    @property
    def logical_batch_size(self) -> int:
        """Expected units in a step, q N."""
        return round(self.sample_rate * self.num_units)

    @property
    def epochs(self) -> float:
        """Expected passes over the data, T q."""
        return self.steps * self.sample_rate

    def noise_std(self, max_grad_norm: float) -> float:
        """Standard deviation of the noise in each entry of a release, at a clipping bound."""
        return self.noise_multiplier * max_grad_norm / (self.sample_rate * self.num_units)


def calibrate_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    accountant: str = "rdp",
    spent: Sequence[SampledGaussian] = (),
) -> float:
    """Returns a noise multiplier of six significant digits that meets the budget and uses it up.

    The digits are few so that the number in a log or a configuration file is the one in use.

    Args:
        target_epsilon: Budget, > 0.
        target_delta: In (0, 1).
        sample_rate: In (0, 1].
        steps: Number of draws, >= 1.
        accountant: How the draws are composed.
        spent: Draws before these, which the budget is for as well.

    Raises:
        ValueError: A value lies outside its range, or no noise reaches so small an epsilon.

    Guarantees:
        What all draws together cost at the returned value is at most ``target_epsilon``, and at
        least 99.5 % of it unless even noise of 2**-13 costs less (under PRV, where ``steps`` times
        ``sample_rate`` is about ``target_delta``) or epsilon jumps over that range, as where PRV
        gives way to RDP.
    """
    check_delta(target_delta)
    _check_target(target_epsilon)
    if steps < 1:
        raise ValueError(f"steps={steps} must be >= 1.")
    start = 1.0
    if accountant != "rdp":  # slower, and never above RDP, so RDP's answer meets the budget
        start = calibrate_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=sample_rate,
            steps=steps,
            spent=spent,
        )

    def excess(log_noise: float) -> float:
        """Logarithm of epsilon over its target, which falls as the noise grows."""
        event = SampledGaussian(_digits_up(math.exp(log_noise)), sample_rate, steps)
        bound = epsilon_bound([*spent, event], delta=target_delta, accountant=accountant)
        return math.log(max(bound.epsilon, 1e-300) / target_epsilon)

    allowance = _ALLOWANCE if accountant == "rdp" else _SLOW_ALLOWANCE
    low, *others = _bracket(excess, start=math.log(start), allowance=allowance)
    found = _false_position(excess, low, *others, allowance=allowance) if others else low
    if found.excess > 0:
        raise ValueError(
            f"target_epsilon={target_epsilon} must be at least "
            f"{round_up(target_epsilon * math.exp(found.excess), 3)} at "
            f"target_delta={target_delta}."
        )
    return _digits_up(math.exp(found.x))


def default_batch_size(
    num_units: int, target_epsilon: float | None, num_epochs: float | None = None
) -> int:
    """Returns the expected units of a step where none are set; see ``_default_share``.

    Args:
        num_units: N >= 1.
        target_epsilon: What the run may cost, where that is set.
        num_epochs: Passes over the data, where they are set; few of them are cut into
            ``DEFAULT_STEPS`` smaller steps.
    """
    share = _default_share(target_epsilon)
    if num_epochs is not None:
        share = min(share, num_epochs / DEFAULT_STEPS)
    return max(1, min(LARGEST_DEFAULT_BATCH, math.ceil(share * num_units)))


def default_steps(sample_rate: float, target_epsilon: float | None) -> int:
    """Returns the steps of a run whose length is not set: ``DEFAULT_STEPS``, or more if q is small.

    They pass over the data as often as ``DEFAULT_STEPS`` with the default batch do, or more often.
    """
    return math.ceil(DEFAULT_STEPS * max(1.0, _default_share(target_epsilon) / sample_rate))


def _default_share(target_epsilon: float | None) -> float:
    """Share of all units in a step: epsilon / 25, from 0.02 to 0.32; without a target 0.1.

    At a given number of steps the noise in a step's mean falls with the share, to a limit. In
    ``DEFAULT_STEPS`` steps it is within a fifth of the limit here (RDP, N = 3000, epsilon 1 to 8);
    larger batches would take time and give little.
    """
    return 0.1 if target_epsilon is None else min(0.32, max(0.02, target_epsilon / 25))


def steps_per_epoch(sample_rate: float) -> int:
    """Returns the number of draws whose expected sizes add up to one pass over the data.

    It is the nearest whole number to 1 / q, and at least 1. (Truncation instead of rounding loses a
    step for 312 of the rates 1/n with n < 5000.)

    Raises:
        ValueError: ``sample_rate`` is outside (0, 1].
    """
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate={sample_rate} must be in (0, 1].")
    return max(1, round(1 / sample_rate))


def num_steps(*, num_epochs: float, sample_rate: float) -> int:
    """Returns the number of logical steps of a run; everything that counts steps asks here.

    Raises:
        ValueError: ``num_epochs`` is negative or not finite, or ``sample_rate`` outside (0, 1].
    """
    if not 0 <= num_epochs < math.inf:
        raise ValueError(f"num_epochs={num_epochs} must be a finite number >= 0.")
    return math.ceil(num_epochs * steps_per_epoch(sample_rate))


def affordable_steps(
    events: Sequence[SampledGaussian],
    *,
    noise_multiplier: float,
    sample_rate: float,
    target_epsilon: float,
    delta: float,
    accountant: str,
    limit: int,
) -> int:
    """Returns how many more draws, at most ``limit``, a budget allows.

    Args:
        events: What was released before.
        noise_multiplier: That of the further draws.
        sample_rate: That of the further draws.
        target_epsilon: Budget for ``events`` and the further draws together.
        delta: In (0, 1).
        accountant: How the draws are composed.
        limit: The number of draws wanted, >= 0.

    Raises:
        ValueError: A value lies outside its range.

    Guarantees:
        Unless the result is 0, the events and that many draws together cost at most
        ``target_epsilon``.
    """

    def fits(steps: int) -> bool:
        further = SampledGaussian(noise_multiplier, sample_rate, steps)
        bound = epsilon_bound([*events, further], delta=delta, accountant=accountant)
        return bound.epsilon <= target_epsilon

    if fits(limit):
        return limit
    fitting, excessive = 0, limit
    while excessive - fitting > 1:
        middle = (fitting + excessive) // 2
        if fits(middle):
            fitting = middle
        else:
            excessive = middle
    return fitting


def _check_target(target_epsilon: float) -> None:
    if not 0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon={target_epsilon} must be a finite number > 0.")


def _longest(
    noise_multiplier: float,
    sample_rate: float,
    target_epsilon: float,
    delta: float,
    accountant: str,
    spent: Sequence[SampledGaussian],
) -> int:
    """The most steps that a budget allows, after what was spent of it."""

    def affordable(limit: int, accountant: str) -> int:
        return affordable_steps(
            spent,
            noise_multiplier=noise_multiplier,
            sample_rate=sample_rate,
            target_epsilon=target_epsilon,
            delta=delta,
            accountant=accountant,
            limit=limit,
        )

    steps = affordable(MOST_STEPS, "rdp")
    if accountant != "rdp":  # slower, and never above RDP: search from its answer upwards
        limit = 2 * steps + 1
        while (steps := affordable(limit, accountant)) == limit < MOST_STEPS:
            limit *= 2
    if steps >= MOST_STEPS:
        raise ValueError(
            f"noise_multiplier={noise_multiplier} must be smaller: {MOST_STEPS} steps cost less "
            f"than epsilon={target_epsilon}."
        )
    if steps == 0:
        one = SampledGaussian(noise_multiplier, sample_rate)
        cost = epsilon_bound([*spent, one], delta=delta, accountant=accountant).epsilon
        raise ValueError(
            f"epsilon={target_epsilon} must be at least {round_up(cost, 4)}, the cost of one step."
        )
    return steps


def _bracket(excess: Callable[[float], float], *, start: float, allowance: float) -> list[_Point]:
    """Points around the zero of a falling function, or the one that is met or ends the range.

    Epsilon nearly always falls at least as fast as one over the noise, so that a first move by the
    excess passes the middle of the allowance.
    """
    smallest, largest = map(math.log, (SMALLEST_NOISE_MULTIPLIER, _LARGEST_NOISE_MULTIPLIER))
    near = _Point(start, excess(start))
    upwards, stride = near.excess > 0, 0.0
    while not -allowance <= near.excess <= 0 and near.x != (largest if upwards else smallest):
        stride = max(2 * stride, min(1.0, abs(near.excess + allowance / 2)))
        x = min(largest, near.x + stride) if upwards else max(smallest, near.x - stride)
        far = _Point(x, excess(x))
        if (far.excess > 0) != upwards:
            return [near, far] if upwards else [far, near]
        near = far
    return [near]


def _false_position(
    excess: Callable[[float], float], low: _Point, high: _Point, *, allowance: float
) -> _Point:
    """A point between where the function is in [-allowance, 0], or the lowest below a jump.

    Aims at the middle of the allowance, and halves the pull of an end that stays (Illinois).
    """

    def pull(point: _Point) -> float:
        return min(1.0, abs(point.excess + allowance / 2))

    pull_low, pull_high, moved = pull(low), pull(high), ""
    while high.excess < -allowance and high.x - low.x > _SAME_NOISE:
        x = low.x + (high.x - low.x) * pull_low / (pull_low + pull_high)
        point = _Point(x, excess(x))
        if point.excess > 0:
            pull_high /= 2 if moved == "low" else 1
            low, pull_low, moved = point, pull(point), "low"
        else:
            pull_low /= 2 if moved == "high" else 1
            high, pull_high, moved = point, pull(point), "high"
    return high


def _digits_up(value: float) -> float:
    """The number of six significant digits that is not below the value."""
    return float(round_up(value, _SIGNIFICANT_DIGITS))

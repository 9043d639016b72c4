"""What a sequence of noise draws costs in privacy.

Receives public facts only (noise multiplier, sampling rate, number of draws, delta) and returns
numbers; holds no state but a cache of pure results.

The mechanism is the Poisson-subsampled Gaussian: every privacy unit joins a draw independently
with probability ``sample_rate`` (q), the sum of vectors of norm at most C receives noise
N(0, (sigma C)^2 I), and two data sets are neighbours when one has one unit more than the other
(add/remove one).

Three accountants:

* ``"rdp"``: Renyi divergences of the subsampled Gaussian (Mironov, Talwar and Zhang 2019), added
  up and converted to (epsilon, delta) by Theorem 21 of Balle et al. 2020. Closed form at q = 1.
* ``"prv"``: numerical composition of privacy loss variables (Gopi, Lee and Wutschitz 2021) by
  Opacus. At q = 1 the analytic Gaussian trade-off (Balle and Wang 2018).
* ``"pld"``: privacy loss distributions by Google's ``dp-accounting``, which is an extra.

Guarantees:
    Every returned epsilon is an upper bound (the libraries' own error terms included), and never
    more than the RDP bound.

>>> epsilon = compute_epsilon(
...     noise_multiplier=1.38, sample_rate=1024 / 50_000, steps=2400, delta=1e-5
... )
>>> round(epsilon, 2)
4.0
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln, log_ndtr, logsumexp

__all__ = [
    "Accountant",
    "Clipping",
    "NoiseEvent",
    "SampledGaussian",
    "EpsilonBound",
    "epsilon_bound",
    "compute_epsilon",
]

Accountant = Literal["rdp", "prv", "pld"]
Clipping = Literal["flat", "per_layer", "automatic"]
FloatArray = npt.NDArray[np.float64]

# The orders of Opacus and TF Privacy are the middle of the grid. Each block below them halves
# (order - 1), each block above them doubles the order, in four geometric steps; that leaves epsilon
# within 1 % of its infimum over all orders.
_MIDDLE_ORDERS = np.concatenate([np.arange(11, 110) / 10, np.arange(12.0, 64.0)])
_QUARTERS = np.arange(5) / 4
_LOWEST_BLOCK = -20  # order 1 + 1e-7, which serves an epsilon of about 1e8
_HIGHEST_BLOCK = 12  # order 258,048, which serves an epsilon of about 1e-4
# A log moment near 0 has lost digits of about this size; more draws would multiply it too far.
_ROUNDING = 1e-14
_MOST_STEPS = 10**10
_LEAST_QUADRATURE_NOISE = 0.05  # below it the points of quadrature would be too many

# Opacus holds about 9 arrays of this many float64 at its peak: 150 megabytes, one second.
_MAX_PRV_POINTS = 2**21
_LARGEST_PRV_LOSS = 700.0  # exp of it is still a float64
_PRV_EPSILON_ERROR = 0.01  # Opacus' default, up to an epsilon of 10
_PRV_SHARE_OF_ERROR = 0.001  # of a larger epsilon, whose grid would otherwise be needlessly fine

SMALLEST_NOISE_MULTIPLIER = 2.0**-13


@dataclass(frozen=True)
class SampledGaussian:
    """``steps`` draws of one Poisson-subsampled Gaussian mechanism.

    Args:
        noise_multiplier: Noise standard deviation over sensitivity, >= 0; 0 is no privacy.
        sample_rate: Probability with which a unit joins a draw, in (0, 1].
        steps: Number of draws, >= 0.

    Raises:
        ValueError: A value lies outside its range.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(
                f"noise_multiplier={self.noise_multiplier} must be a finite number >= 0."
            )
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"sample_rate={self.sample_rate} must be in (0, 1].")
        if not 0 <= self.steps <= _MOST_STEPS or self.steps != int(self.steps):
            raise ValueError(
                f"steps={self.steps} must be a whole number in [0, {_MOST_STEPS:.0e}]."
            )


@dataclass(frozen=True)
class NoiseEvent:
    """One draw of noise: what the accountant and an auditor need to know of it.

    Attributes:
        step: Logical step, from 1.
        noise_multiplier: sigma, the noise's standard deviation in units of ``max_grad_norm``.
        sample_rate: Inclusion probability q of each privacy unit in this step.
        max_grad_norm: C, the bound on one unit's contribution to the sum.
        clipping: The rule that enforces the bound.
        digest: SHA-256 of the released gradient; a function of the release, so free of cost.
    """

    step: int
    noise_multiplier: float
    sample_rate: float
    max_grad_norm: float
    clipping: str
    digest: str


@dataclass(frozen=True)
class EpsilonBound:
    """An upper bound on epsilon and the accountant that produced it."""

    epsilon: float
    accountant: str


def epsilon_bound(
    events: Sequence[SampledGaussian], *, delta: float, accountant: str = "rdp"
) -> EpsilonBound:
    """Returns the epsilon of all events together.

    Args:
        events: What was released, in any order; equal mechanisms are merged before composing.
        delta: In (0, 1).
        accountant: PRV and PLD give way to RDP, and the result says so, where their grid would
            not fit in bounded time and memory, where double precision cannot resolve ``delta``,
            and where RDP is the tighter one.

    Returns:
        Epsilon 0 for no draws and infinity for a draw without noise.

    Raises:
        ValueError: ``delta`` or ``accountant`` is outside its range, or not installed.

    Guarantees:
        The events together are (epsilon, delta)-differentially private under add/remove-one
        adjacency. PRV relies, as Opacus does, on the removal of a unit being the worse direction.
    """
    check_delta(delta)
    _check_accountant(accountant)
    mechanisms = merged(events)
    if not mechanisms:
        return EpsilonBound(0.0, accountant)
    if any(event.noise_multiplier == 0 for event in mechanisms):
        return EpsilonBound(math.inf, accountant)
    rdp = EpsilonBound(_rdp_epsilon(mechanisms, delta), "rdp")
    if accountant == "rdp" or rdp.epsilon == 0:
        return rdp
    numeric = _prv_epsilon if accountant == "prv" else pld_epsilon
    epsilon = numeric(mechanisms, delta, rdp.epsilon)
    return EpsilonBound(epsilon, accountant) if epsilon < rdp.epsilon else rdp


def compute_epsilon(
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    accountant: str = "rdp",
) -> float:
    """Returns the epsilon of ``steps`` draws of one mechanism; see :func:`epsilon_bound`."""
    event = SampledGaussian(noise_multiplier, sample_rate, steps)
    return epsilon_bound([event], delta=delta, accountant=accountant).epsilon


def merged(events: Sequence[SampledGaussian]) -> tuple[SampledGaussian, ...]:
    """One event for each distinct mechanism that was used at all."""
    steps: dict[tuple[float, float], int] = {}
    for event in events:
        mechanism = (event.noise_multiplier, event.sample_rate)
        steps[mechanism] = steps.get(mechanism, 0) + event.steps
    return tuple(SampledGaussian(*mechanism, count) for mechanism, count in steps.items() if count)


@functools.lru_cache(maxsize=64)
def _orders(block: int) -> FloatArray:
    """Orders of one block of the grid, ascending; block 0 is Opacus' own grid."""
    base = _MIDDLE_ORDERS
    if block == 0:
        return base
    if block < 0:
        below: FloatArray = 1 + (base[0] - 1) * 2.0 ** (block + _QUARTERS[:-1])
        return below
    above: FloatArray = np.ceil(base[-1] * 2.0 ** (block - 1 + _QUARTERS[1:]))
    return above


@functools.lru_cache(maxsize=1024)
def _renyi_divergences(noise_multiplier: float, sample_rate: float, block: int) -> FloatArray:
    """Renyi divergence of one draw at the orders of one block."""
    orders = _orders(block)
    gaussian: FloatArray = orders / (
        2 * noise_multiplier**2
    )  # no subsampling: an upper bound, exact at q = 1
    if sample_rate == 1:
        return gaussian
    whole = orders == np.round(orders)
    log_moments = np.empty_like(orders)
    log_moments[whole] = [_binomial(noise_multiplier, sample_rate, a) for a in orders[whole]]
    log_moments[~whole] = _between(noise_multiplier, sample_rate, orders[~whole])
    bounded: FloatArray = np.clip((log_moments + _ROUNDING) / (orders - 1), 0, gaussian)
    return bounded


def _binomial(noise_multiplier: float, sample_rate: float, order: float) -> float:
    """Log moment at a whole order; Mironov et al. 2019, section 3.3, in log space."""
    i = np.arange(order + 1.0)
    log_binomials = gammaln(order + 1) - gammaln(i + 1) - gammaln(order - i + 1)
    log_weights = i * math.log(sample_rate) + (order - i) * math.log1p(-sample_rate)
    return float(logsumexp(log_binomials + log_weights + i * (i - 1) / (2 * noise_multiplier**2)))


def _between(noise_multiplier: float, sample_rate: float, orders: FloatArray) -> FloatArray:
    """Log moments E[ratio(z)^order], z ~ N(0, s^2), at orders that are not whole.

    By the trapezoidal rule: the integrand is analytic in a strip of half-width pi s^2, so that the
    rule's error is below e^-79, and its mass lies within 12 s of [0, order]. Where the noise s is
    so small that this takes too many points, Minkowski's inequality bounds them, nearly tight
    there: the ratio's norm is at most 1 - q + q exp((order - 1) / (2 s^2)).
    """
    s = noise_multiplier
    log_keep, log_join = math.log1p(-sample_rate), math.log(sample_rate)
    if orders.size == 0:
        return orders
    if s < _LEAST_QUADRATURE_NOISE:
        bound: FloatArray = orders * np.logaddexp(log_keep, log_join + (orders - 1) / (2 * s**2))
        return bound
    step = min(s, s**2) / 4
    z = np.arange(-12 * s, orders.max() + 12 * s, step)
    log_ratio = np.logaddexp(log_keep, log_join + (2 * z - 1) / (2 * s**2))
    log_density = -((z / s) ** 2) / 2 + math.log(step / (s * math.sqrt(2 * math.pi)))
    log_moments: FloatArray = logsumexp(orders[:, None] * log_ratio + log_density, axis=1)
    return log_moments


def converted(divergences: FloatArray, orders: FloatArray, delta: float) -> FloatArray:
    """Epsilon by each order: Balle et al. 2020, Theorem 21."""
    epsilons: FloatArray = (
        divergences - (math.log(delta) + np.log(orders)) / (orders - 1) + np.log1p(-1 / orders)
    )
    return epsilons


def _rdp_epsilon(mechanisms: Sequence[SampledGaussian], delta: float) -> float:
    """Smallest conversion over the orders, the grid extended while its end is the best."""
    if any(event.noise_multiplier < SMALLEST_NOISE_MULTIPLIER for event in mechanisms):
        return math.inf

    def best_of(block: int) -> tuple[float, int]:
        orders = _orders(block)
        divergences = np.zeros_like(orders)
        for event in mechanisms:
            divergences += event.steps * _renyi_divergences(
                event.noise_multiplier, event.sample_rate, block
            )
        bounds = converted(divergences, orders, delta)
        best = int(np.argmin(bounds))
        return float(bounds[best]), best

    epsilon, best = best_of(0)
    at_low_end, at_high_end = best == 0, best == len(_orders(0)) - 1
    block = 0
    while at_low_end and block > _LOWEST_BLOCK:
        block -= 1
        candidate, best = best_of(block)
        at_low_end = best == 0
        epsilon = min(epsilon, candidate)
    while at_high_end and block < _HIGHEST_BLOCK and epsilon > 0:
        block += 1
        candidate, best = best_of(block)
        at_high_end = best == len(_orders(block)) - 1
        epsilon = min(epsilon, candidate)
    return max(0.0, epsilon)


@functools.lru_cache(maxsize=256)
def _prv_epsilon(
    mechanisms: tuple[SampledGaussian, ...], delta: float, rdp_epsilon: float
) -> float:
    """PRV bound on a grid of bounded size; infinity where it cannot be computed.

    The same computation as Opacus' ``PRVAccountant``, from its parts: that class takes the range of
    losses from Opacus' RDP accountant, whose time is not bounded, and a fixed error of 0.01.
    """
    if all(event.sample_rate == 1 for event in mechanisms):
        mean_shift = math.sqrt(sum(e.steps / e.noise_multiplier**2 for e in mechanisms))
        return _gaussian_epsilon(mean_shift, delta)
    from opacus.accountants.analysis import prv  # it loads torch

    delta_error = delta / 1000
    steps = sum(event.steps for event in mechanisms)
    # Gopi et al. 2021, remark 5.6: losses beyond half_width are rarer than delta_error.
    half_width = 3 + max(
        _rdp_epsilon(mechanisms, delta_error / 4),
        *(
            _rdp_epsilon([replace(event, steps=1)], delta_error / (8 * steps))
            for event in mechanisms
        ),
    )
    points_per_error = 2 * half_width * math.sqrt(steps * math.log(12 / delta_error) / 2)
    epsilon_error = max(
        _PRV_EPSILON_ERROR * min(1.0, rdp_epsilon),
        _PRV_SHARE_OF_ERROR * rdp_epsilon,
        points_per_error / _MAX_PRV_POINTS,
    )
    num_points = points_per_error / epsilon_error
    rounding = np.finfo(np.float64).eps * num_points
    if epsilon_error >= 1 or half_width > _LARGEST_PRV_LOSS or rounding > delta:
        return math.inf
    domain = prv.Domain.create_aligned(-half_width, half_width, 2 * half_width / num_points)
    with np.errstate(all="ignore"):  # logarithms of 0 at the edge of the support
        try:
            losses = [
                prv.discretize(
                    prv.TruncatedPrivacyRandomVariable(
                        prv.PoissonSubsampledGaussianPRV(event.sample_rate, event.noise_multiplier),
                        domain.t_min,
                        domain.t_max,
                    ),
                    domain,
                )
                for event in mechanisms
            ]
            composed = prv.compose_heterogeneous(losses, [event.steps for event in mechanisms])
            _, _, epsilon = composed.compute_epsilon(delta, delta_error, epsilon_error)
        except (RuntimeError, ValueError):  # what Opacus raises when its grid does not resolve
            return math.inf
    return max(0.0, float(epsilon)) if math.isfinite(epsilon) else math.inf


@functools.lru_cache(maxsize=256)
def pld_epsilon(
    mechanisms: tuple[SampledGaussian, ...],
    delta: float,
    rdp_epsilon: float,
    *,
    group_size: int = 1,
) -> float:
    """PLD bound, of the mixture that a draw makes of a group where there is one."""
    dp_accounting, pld = _load_pld()
    accountant = pld.PLDAccountant(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        value_discretization_interval=1e-4 * max(1.0, rdp_epsilon),
    )
    count = np.arange(group_size + 1)
    for event in mechanisms:
        s, q = event.noise_multiplier, event.sample_rate
        if group_size == 1:
            draw = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(s))
        elif q == 1:
            draw = dp_accounting.GaussianDpEvent(s / group_size)
        else:
            shares = np.exp(
                gammaln(group_size + 1)
                - gammaln(count + 1)
                - gammaln(group_size - count + 1)
                + count * math.log(q)
                + (group_size - count) * math.log1p(-q)
            )
            draw = dp_accounting.dp_event.MixtureOfGaussiansDpEvent(
                s, count.tolist(), (shares / shares.sum()).tolist()
            )
        accountant.compose(draw, event.steps)
    return max(0.0, float(accountant.get_epsilon(delta)))


def _load_pld() -> tuple[Any, Any]:
    try:
        import dp_accounting
        from dp_accounting import pld
    except ImportError as error:
        raise ValueError(
            "accountant='pld' needs dp-accounting, which must be installed: pip install "
            "'hf-dpmuon[pld]'; or choose 'rdp' or 'prv'."
        ) from error
    return dp_accounting, pld


def _gaussian_epsilon(mean_shift: float, delta: float) -> float:
    """Epsilon of N(0, 1) against N(mean_shift, 1), exactly: Balle and Wang 2018, Theorem 8."""

    def excess(epsilon: float) -> float:
        above = float(log_ndtr(mean_shift / 2 - epsilon / mean_shift))
        below = epsilon + float(log_ndtr(-mean_shift / 2 - epsilon / mean_shift))
        share = -math.expm1(below - above)  # 0 where the two cannot be told apart
        return above + math.log(share) - math.log(delta) if share > 0 else -math.inf

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return falling_root(excess, 0.0, high, tolerance=1e-12 * high)


def falling_root(
    falling: Callable[[float], float], low: float, high: float, *, tolerance: float
) -> float:
    """Where a falling function is no longer above 0, to within ``tolerance`` on that side."""
    while high - low > tolerance and low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return high


def check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta} must be in (0, 1).")


def _check_accountant(accountant: str) -> None:
    if accountant not in get_args(Accountant):
        raise ValueError(f"accountant={accountant!r} must be one of {get_args(Accountant)}.")

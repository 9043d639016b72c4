"""What a sequence of noise draws costs in privacy, and the noise that meets a budget.

Receives public facts only (noise multiplier, sampling rate, number of draws, delta) and returns
numbers; holds no state but a cache of pure results.

The mechanism is the Poisson-subsampled Gaussian: every privacy unit joins a draw independently
with probability ``sample_rate`` (q), the sum of vectors of norm at most C receives noise
N(0, (sigma C)^2 I), and two data sets are neighbours when one has one unit more than the other
(add/remove one).

Two accountants, both on Opacus:

* ``"rdp"``: Renyi divergences of the subsampled Gaussian (Mironov, Talwar and Zhang 2019), added
  up and converted to (epsilon, delta) by Theorem 21 of Balle et al. 2020. Closed form at q = 1.
* ``"prv"``: numerical composition of privacy loss variables (Gopi, Lee and Wutschitz 2021). At
  q = 1 the analytic Gaussian trade-off (Balle and Wang 2018).

Guarantees:
    Every returned epsilon is an upper bound (Opacus' own error terms included), and never more
    than the RDP bound. A calibrated noise multiplier meets its target under the same accountant.
    What ``round_up`` and its kin print is never below the number.

>>> epsilon = compute_epsilon(
...     noise_multiplier=1.38, sample_rate=1024 / 50_000, steps=2400, delta=1e-5
... )
>>> round(epsilon, 2)
4.0
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context, Decimal

import numpy as np
import numpy.typing as npt
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis.prv import (
    Domain,
    PoissonSubsampledGaussianPRV,
    TruncatedPrivacyRandomVariable,
    compose_heterogeneous,
    discretize,
)
from opacus.accountants.analysis.rdp import compute_rdp
from scipy.optimize import brentq
from scipy.special import gammaln, log_ndtr, logsumexp, softmax

__all__ = [
    "SampledGaussian",
    "EpsilonBound",
    "epsilon_bound",
    "compute_epsilon",
    "group_epsilon",
    "membership_tpr",
    "sharper_membership_tpr",
    "calibrate_noise_multiplier",
    "steps_per_epoch",
    "num_steps",
    "affordable_steps",
    "round_up",
    "round_up_fixed",
    "percent_up",
]

FloatArray = npt.NDArray[np.float64]

# Opacus' orders are the middle of the grid. Each block below them halves (order - 1), each block
# above them doubles the order, in four geometric steps; that leaves epsilon within 1 % of its
# infimum over all orders.
_QUARTERS = np.arange(5) / 4
_LOWEST_BLOCK = -20  # order 1 + 1e-7, which serves an epsilon of about 1e8
_HIGHEST_BLOCK = 12  # order 258,048, which serves an epsilon of about 1e-4
_LARGEST_OPACUS_ORDER = 1000  # above this the binomial coefficients in Opacus overflow

# Opacus holds about 9 arrays of this many float64 at its peak: 150 megabytes, one second.
_MAX_PRV_POINTS = 2**21
_LARGEST_PRV_LOSS = 700.0  # exp of it is still a float64
_PRV_EPSILON_ERROR = 0.01  # Opacus' default

# Orders for groups, whose epsilons are large, and the most work that one mechanism may take.
_GROUP_ORDERS = 1 + np.geomspace(0.01, 200, 48)
_MAX_GROUP_TERMS = 1e7

_LARGEST_EXPONENT = 700.0  # exp of it is still a float64

_SIGNIFICANT_DIGITS = 6
_SMALLEST_NOISE_MULTIPLIER = 2.0**-13
_LARGEST_NOISE_MULTIPLIER = 2.0**40


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
        if self.steps < 0 or self.steps != int(self.steps):
            raise ValueError(f"steps={self.steps} must be a whole number >= 0.")


@dataclass(frozen=True)
class EpsilonBound:
    """An upper bound on epsilon and the accountant (``"rdp"`` or ``"prv"``) that produced it."""

    epsilon: float
    accountant: str


def epsilon_bound(
    events: Sequence[SampledGaussian], *, delta: float, accountant: str = "rdp"
) -> EpsilonBound:
    """Returns the epsilon of all events together.

    Args:
        events: What was released, in any order; equal mechanisms are merged before composing.
        delta: In (0, 1).
        accountant: ``"rdp"`` or ``"prv"``. PRV gives way to RDP, and the result says so, where its
            grid would not fit in bounded time and memory, where double precision cannot resolve
            ``delta``, and where RDP is the tighter of the two.

    Returns:
        Epsilon 0 for no draws and infinity for a draw without noise.

    Raises:
        ValueError: ``delta`` or ``accountant`` is outside its range.

    Guarantees:
        The events together are (epsilon, delta)-differentially private under add/remove-one
        adjacency. PRV relies, as Opacus does, on the removal of a unit being the worse direction.
    """
    _check_delta(delta)
    _check_accountant(accountant)
    mechanisms = _merged(events)
    if not mechanisms:
        return EpsilonBound(0.0, accountant)
    if any(event.noise_multiplier == 0 for event in mechanisms):
        return EpsilonBound(math.inf, accountant)
    if accountant == "prv":
        return _prv_bound(mechanisms, delta)
    return EpsilonBound(_rdp_epsilon(mechanisms, delta), "rdp")


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


def group_epsilon(events: Sequence[SampledGaussian], *, group_size: int, delta: float) -> float:
    """Returns the epsilon, by RDP, of a group of units that are added or removed together.

    A draw takes Binomial(group_size, q) of them, each of which moves the sum by at most the
    sensitivity; the worst that they can do is to move it in one direction. That pair of
    distributions (Schuchardt et al. 2024; Choquette-Choo et al. 2024 for vectors) costs far less
    than the conversion of one unit's epsilon into a group's, which takes all of them for drawn.

    Args:
        events: What was released, in any order.
        group_size: Number of units in the group, >= 1; for one, the result of ``epsilon_bound``.
        delta: Of the group's guarantee, in (0, 1).

    Raises:
        ValueError: A value lies outside its range.
    """
    if group_size < 1 or group_size != int(group_size):
        raise ValueError(f"group_size={group_size} must be a whole number >= 1.")
    single = epsilon_bound(events, delta=delta).epsilon
    mechanisms = _merged(events)
    if group_size == 1 or math.isinf(single) or not mechanisms:
        return single
    divergences = np.zeros_like(_GROUP_ORDERS)
    for event in mechanisms:
        divergences += event.steps * _group_divergences(
            event.noise_multiplier, event.sample_rate, int(group_size)
        )
    return max(single, float(_converted(divergences, _GROUP_ORDERS, delta).min()))


def membership_tpr(*, epsilon: float, delta: float, fpr: float) -> float:
    """Returns the largest true-positive rate of any test for one unit's membership.

    Whatever an attacker knows and computes, a test that takes at most a share ``fpr`` of
    non-members for members finds at most this share of the members (Kairouz, Oh and Viswanath
    2015, theorem 2.1, both directions of add/remove one).

    Args:
        epsilon: Of the release, >= 0; infinity bounds nothing.
        delta: Of the release, in (0, 1).
        fpr: False-positive rate of the test, in [0, 1].

    Raises:
        ValueError: A value lies outside its range.
    """
    if not epsilon >= 0:
        raise ValueError(f"epsilon={epsilon} must be >= 0.")
    _check_delta(delta)
    if not 0 <= fpr <= 1:
        raise ValueError(f"fpr={fpr} must be in [0, 1].")
    if epsilon > _LARGEST_EXPONENT:
        return 1.0
    return min(
        1.0,
        math.exp(epsilon) * fpr + delta,
        1 - math.exp(-epsilon) * max(0.0, 1 - delta - fpr),
    )


def sharper_membership_tpr(
    events: Sequence[SampledGaussian], *, delta: float, fpr: float, accountant: str = "rdp"
) -> float:
    """Returns the smallest :func:`membership_tpr` of the events' epsilons at several deltas.

    A release has an epsilon at every delta, and each pair bounds the same test. At an epsilon of 8
    and its small delta the bound is nearly 1, at a delta of 0.01 it is far lower.

    Args:
        events: What was released, in any order.
        delta: The smallest delta, in (0, 1).
        fpr: False-positive rate of the test, in [0, 1].
        accountant: ``"rdp"`` or ``"prv"``.

    Raises:
        ValueError: A value lies outside its range.
    """
    _check_delta(delta)
    pairs = [
        (epsilon_bound(events, delta=d, accountant=accountant).epsilon, d)
        for d in np.geomspace(delta, max(delta, 0.3), 8).tolist()
    ]
    return min(membership_tpr(epsilon=epsilon, delta=d, fpr=fpr) for epsilon, d in pairs)


def calibrate_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    accountant: str = "rdp",
) -> float:
    """Returns the smallest noise multiplier, to six significant digits, that meets the budget.

    The digits are few so that the number in a log or a configuration file is the one in use.

    Args:
        target_epsilon: Budget, > 0.
        target_delta: In (0, 1).
        sample_rate: In (0, 1].
        steps: Number of draws, >= 1.
        accountant: ``"rdp"`` or ``"prv"``.

    Raises:
        ValueError: A value lies outside its range, or no noise reaches so small an epsilon.

    Guarantees:
        ``compute_epsilon`` at the returned value is at most ``target_epsilon``, and at least
        99.5 % of it unless even noise of 2**-13 costs less (under PRV, where ``steps`` times
        ``sample_rate`` is about ``target_delta``) or PRV gives way to RDP just there.
    """
    if not 0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon={target_epsilon} must be a finite number > 0.")
    if steps < 1:
        raise ValueError(f"steps={steps} must be >= 1.")

    event = functools.partial(SampledGaussian, sample_rate=sample_rate, steps=steps)
    start = 1.0
    if accountant == "prv":  # never above RDP, so RDP's answer is where the search begins
        start = calibrate_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=sample_rate,
            steps=steps,
        )

    @functools.cache
    def excess(log_noise: float) -> float:
        """Logarithm of epsilon over its target, which falls as the noise grows."""
        bound = epsilon_bound(
            [event(math.exp(log_noise))], delta=target_delta, accountant=accountant
        )
        return math.log(max(bound.epsilon, 1e-300) / target_epsilon)

    low, high = _bracket(excess, start=math.log(start), step=math.log(2 if start == 1 else 1.25))
    if excess(high) > 0:
        raise ValueError(
            f"target_epsilon={target_epsilon} must be at least "
            f"{round_up(target_epsilon * math.exp(excess(high)), 3)} at "
            f"target_delta={target_delta}."
        )
    root = brentq(excess, low, high, xtol=1e-7) if excess(low) > 0 else low
    quantum = 10.0 ** (math.floor(root / math.log(10)) - _SIGNIFICANT_DIGITS + 1)
    units = math.ceil(math.exp(root) / quantum)
    while excess(math.log(_decimal(units * quantum))) > 0:
        units += 1
    return _decimal(units * quantum)


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
        noise_multiplier: Of the further draws.
        sample_rate: Of the further draws.
        target_epsilon: Budget for ``events`` and the further draws together.
        delta: In (0, 1).
        accountant: ``"rdp"`` or ``"prv"``.
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


def round_up(value: float, digits: int = 3) -> str:
    """Returns the number with this many significant digits, rounded up: how a cost is printed.

    >>> round_up(2.7182818), round_up(1.0000001e-5)
    ('2.72', '1.01e-05')
    """
    up = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(value)))
    return f"{float(up):.{digits}g}"


def round_up_fixed(value: float, decimals: int = 4) -> str:
    """Returns the number with this many decimals, rounded up; infinity is ``"inf"``.

    >>> round_up_fixed(2.00000001)
    '2.0001'
    """
    exact = Decimal(repr(float(value)))
    if not exact.is_finite():
        return str(float(value))
    up = exact.quantize(Decimal(1).scaleb(-decimals), ROUND_CEILING, Context(prec=400))
    return f"{up:f}"


def percent_up(share: float) -> str:
    """Returns a share as per cent with at most two decimals, rounded up, and never above 100 %.

    >>> percent_up(0.123401), percent_up(0.5)
    ('12.35 %', '50 %')
    """
    percent = Decimal(round_up_fixed(min(1.0, share))) * 100
    return f"{float(percent):g} %"


def _merged(events: Sequence[SampledGaussian]) -> tuple[SampledGaussian, ...]:
    """One event for each distinct mechanism that was used at all."""
    steps: dict[tuple[float, float], int] = {}
    for event in events:
        mechanism = (event.noise_multiplier, event.sample_rate)
        steps[mechanism] = steps.get(mechanism, 0) + event.steps
    return tuple(SampledGaussian(*mechanism, count) for mechanism, count in steps.items() if count)


@functools.lru_cache(maxsize=64)
def _orders(block: int) -> FloatArray:
    """Orders of one block of the grid, ascending; block 0 is Opacus' own grid."""
    if block == 0:
        return np.asarray(RDPAccountant.DEFAULT_ALPHAS, dtype=np.float64)
    base = _orders(0)
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
    if orders[-1] > _LARGEST_OPACUS_ORDER:
        divergences = np.array(
            [_divergence_at_large_order(noise_multiplier, sample_rate, int(a)) for a in orders]
        )
    elif noise_multiplier > 1:
        divergences = _divergences_by_quadrature(noise_multiplier, sample_rate, orders)
    else:
        divergences = np.asarray(
            compute_rdp(q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=orders)
        )
    bounded: FloatArray = np.clip(divergences, 0, gaussian)
    return bounded


def _divergences_by_quadrature(
    noise_multiplier: float, sample_rate: float, orders: FloatArray
) -> FloatArray:
    """Renyi divergences for noise s > 1: the trapezoidal rule on E[ratio(z)^order], z ~ N(0, s^2).

    Opacus' series for a fractional order takes up to e^15 terms there when q is near 1/2. The
    integrand is analytic in a strip of half-width pi s^2, so that the rule's error is below e^-79,
    and its mass lies within 12 s of [0, order].
    """
    s = noise_multiplier
    h = s / 4
    orders = orders[:, None]
    z = np.arange(-12 * s, orders.max() + 12 * s, h)
    log_ratio = np.logaddexp(
        math.log1p(-sample_rate), math.log(sample_rate) + (2 * z - 1) / (2 * s**2)
    )
    log_density = -((z / s) ** 2) / 2 + math.log(h / (s * math.sqrt(2 * math.pi)))
    log_moments = logsumexp(orders * log_ratio + log_density, axis=1)
    divergences: FloatArray = log_moments / (orders[:, 0] - 1)
    return divergences


def _divergence_at_large_order(noise_multiplier: float, sample_rate: float, order: int) -> float:
    """Renyi divergence at an integer order; Mironov et al. 2019, section 3.3, in log space."""
    i = np.arange(order + 1.0)
    log_binomials = gammaln(order + 1) - gammaln(i + 1) - gammaln(order - i + 1)
    log_weights = i * math.log(sample_rate) + (order - i) * math.log1p(-sample_rate)
    log_moments = i * (i - 1) / (2 * noise_multiplier**2)
    return float(logsumexp(log_binomials + log_weights + log_moments)) / (order - 1)


@functools.lru_cache(maxsize=256)
def _group_divergences(noise_multiplier: float, sample_rate: float, size: int) -> FloatArray:
    """Renyi divergences of one draw for a group: the larger of removing and of adding it.

    With s the noise, r(z) is the density of the mixture of N(j, s^2), j ~ Binomial(size, q), over
    that of N(0, s^2), and z ~ N(0, s^2). Removal costs E[r^order]; r is a polynomial in exp(z/s^2)
    whose zeros are real and negative, so that the trapezoidal rule is as good as for one unit.
    Addition costs E[r^(1-order)], whose integrand is log-concave and no narrower than ``width``.
    """
    s, orders = noise_multiplier, _GROUP_ORDERS
    divergences: FloatArray = orders * size**2 / (2 * s**2)  # all drawn: an upper bound
    if sample_rate == 1:
        return divergences
    j = np.arange(size + 1.0)
    log_weights = (
        gammaln(size + 1)
        - gammaln(j + 1)
        - gammaln(size - j + 1)
        + j * math.log(sample_rate)
        + (size - j) * math.log1p(-sample_rate)
        - j**2 / (2 * s**2)
    )

    def log_mean(z: FloatArray, exponent: float, step: float) -> float:
        log_ratio = np.full_like(z, -np.inf)
        for count, log_weight in zip(j, log_weights, strict=True):
            log_ratio = np.logaddexp(log_ratio, log_weight + count * z / s**2)
        log_density = -((z / s) ** 2) / 2 + math.log(step / (s * math.sqrt(2 * math.pi)))
        return float(logsumexp(exponent * log_ratio + log_density))

    def slope(z: float, order: float) -> float:
        """Falls through 0 at the peak of addition's integrand, up to the sign."""
        weights = softmax(log_weights + j * z / s**2)
        return z + (order - 1) * float(weights @ j)

    for i, order in enumerate(orders):
        step = min(s, s**2) / 4
        width = 1 / math.sqrt(1 / s**2 + order * size**2 / (4 * s**4))
        if size * (order * size / step + 24 * s / width) > _MAX_GROUP_TERMS:
            break
        removal = log_mean(np.arange(-12 * s, order * size + 12 * s, step), order, step)
        peak = brentq(slope, -(order - 1) * size - 1, 1.0, args=(order,))
        around = peak + np.arange(-12 * s, 12 * s, width / 2)
        addition = log_mean(around, 1 - order, width / 2)
        divergences[i] = min(divergences[i], max(0.0, removal, addition) / (order - 1))
    return divergences


def _converted(divergences: FloatArray, orders: FloatArray, delta: float) -> FloatArray:
    """Epsilon by each order: Balle et al. 2020, Theorem 21."""
    epsilons: FloatArray = (
        divergences - (math.log(delta) + np.log(orders)) / (orders - 1) + np.log1p(-1 / orders)
    )
    return epsilons


def _rdp_epsilon(mechanisms: Sequence[SampledGaussian], delta: float) -> float:
    """Smallest conversion over the orders, the grid extended while its end is the best."""
    if any(event.noise_multiplier < _SMALLEST_NOISE_MULTIPLIER for event in mechanisms):
        return math.inf

    def best_of(block: int) -> tuple[float, int]:
        orders = _orders(block)
        divergences = np.zeros_like(orders)
        for event in mechanisms:
            divergences += event.steps * _renyi_divergences(
                event.noise_multiplier, event.sample_rate, block
            )
        bounds = _converted(divergences, orders, delta)
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
def _prv_bound(mechanisms: tuple[SampledGaussian, ...], delta: float) -> EpsilonBound:
    """The PRV bound, or the RDP bound where that is tighter or all that can be had."""
    if all(event.sample_rate == 1 for event in mechanisms):
        mean_shift = math.sqrt(sum(e.steps / e.noise_multiplier**2 for e in mechanisms))
        return EpsilonBound(_gaussian_epsilon(mean_shift, delta), "prv")
    rdp = EpsilonBound(_rdp_epsilon(mechanisms, delta), "rdp")
    if rdp.epsilon == 0:
        return rdp
    epsilon = _composed_epsilon(mechanisms, delta, rdp_epsilon=rdp.epsilon)
    return EpsilonBound(epsilon, "prv") if epsilon < rdp.epsilon else rdp


def _composed_epsilon(
    mechanisms: Sequence[SampledGaussian], delta: float, *, rdp_epsilon: float
) -> float:
    """PRV bound on a grid of bounded size; infinity where it cannot be computed.

    The same computation as Opacus' ``PRVAccountant``, from its parts: that class takes the range of
    losses from Opacus' RDP accountant, whose time is not bounded, and a fixed error of 0.01.
    """
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
        _PRV_EPSILON_ERROR * min(1.0, rdp_epsilon), points_per_error / _MAX_PRV_POINTS
    )
    num_points = points_per_error / epsilon_error
    rounding = np.finfo(np.float64).eps * num_points
    if epsilon_error >= 1 or half_width > _LARGEST_PRV_LOSS or rounding > delta:
        return math.inf
    domain = Domain.create_aligned(-half_width, half_width, 2 * half_width / num_points)
    with np.errstate(all="ignore"):  # logarithms of 0 at the edge of the support
        try:
            losses = [
                discretize(
                    TruncatedPrivacyRandomVariable(
                        PoissonSubsampledGaussianPRV(event.sample_rate, event.noise_multiplier),
                        domain.t_min,
                        domain.t_max,
                    ),
                    domain,
                )
                for event in mechanisms
            ]
            composed = compose_heterogeneous(losses, [event.steps for event in mechanisms])
            _, _, epsilon = composed.compute_epsilon(delta, delta_error, epsilon_error)
        except (RuntimeError, ValueError):  # what Opacus raises when its grid does not resolve
            return math.inf
    return max(0.0, float(epsilon)) if math.isfinite(epsilon) else math.inf


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
    root = float(brentq(excess, 0.0, high, xtol=1e-12, rtol=1e-12))
    return root * (1 + 1e-9)  # on the safe side of the root finder's tolerance


def _bracket(excess: Callable[[float], float], *, start: float, step: float) -> tuple[float, float]:
    """Two log noise multipliers around the zero of a falling function, or the end of the range."""
    low = high = start
    smallest, largest = map(math.log, (_SMALLEST_NOISE_MULTIPLIER, _LARGEST_NOISE_MULTIPLIER))
    while excess(high) > 0 and high < largest:
        low, high = high, min(high + step, largest)
    while excess(low) <= 0 and low > smallest:
        low, high = max(low - step, smallest), low
    return low, high


def _decimal(value: float) -> float:
    """The float that prints with six significant digits."""
    return float(f"{value:.{_SIGNIFICANT_DIGITS - 1}e}")


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta} must be in (0, 1).")


def _check_accountant(accountant: str) -> None:
    if accountant not in ("rdp", "prv"):
        raise ValueError(f"accountant={accountant!r} must be 'rdp' or 'prv'.")

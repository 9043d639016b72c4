"""What a release costs several units that are added or removed together.

Receives the draws of a release and the size of the group; returns a bound on its epsilon.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
from scipy.special import gammaln, logsumexp, softmax

from hf_dpmuon.accounting import (
    FloatArray,
    SampledGaussian,
    converted,
    epsilon_bound,
    falling_root,
    merged,
    pld_epsilon,
)

__all__ = ["group_epsilon"]

# Orders for groups, whose epsilons are large, and the most work that one mechanism may take.
_GROUP_ORDERS = 1 + np.geomspace(0.01, 200, 48)
_MAX_GROUP_TERMS = 1e7


def group_epsilon(
    events: Sequence[SampledGaussian],
    *,
    group_size: int,
    delta: float,
    accountant: str = "rdp",
) -> float:
    """Returns the epsilon of a group of units that are added or removed together.

    A draw takes Binomial(group_size, q) of them, each of which moves the sum by at most the
    sensitivity; the worst that they can do is to move it in one direction. That pair of
    distributions (Schuchardt et al. 2024; Choquette-Choo et al. 2024 for vectors) costs far less
    than the conversion of one unit's epsilon into a group's, which takes all of them for drawn.

    Args:
        events: What was released, in any order.
        group_size: Number of units in the group, >= 1; for one, the result of ``epsilon_bound``.
        delta: That of the group's guarantee, in (0, 1).
        accountant: ``"pld"`` composes that pair exactly; the others bound it by RDP.

    Raises:
        ValueError: A value lies outside its range.
    """
    if group_size < 1 or group_size != int(group_size):
        raise ValueError(f"group_size={group_size} must be a whole number >= 1.")
    single = epsilon_bound(events, delta=delta, accountant=accountant).epsilon
    mechanisms = merged(events)
    if group_size == 1 or math.isinf(single) or not mechanisms:
        return single
    if accountant == "pld":
        return max(single, pld_epsilon(mechanisms, delta, single, group_size=group_size))
    divergences = np.zeros_like(_GROUP_ORDERS)
    for event in mechanisms:
        divergences += event.steps * _group_divergences(
            event.noise_multiplier, event.sample_rate, int(group_size)
        )
    return max(single, float(converted(divergences, _GROUP_ORDERS, delta).min()))


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
        """Falls through 0 at the peak of addition's integrand."""
        weights = softmax(log_weights + j * z / s**2)
        return -z - (order - 1) * float(weights @ j)

    for i, order in enumerate(orders):
        step = min(s, s**2) / 4
        width = 1 / math.sqrt(1 / s**2 + order * size**2 / (4 * s**4))
        if size * (order * size / step + 24 * s / width) > _MAX_GROUP_TERMS:
            break
        removal = log_mean(np.arange(-12 * s, order * size + 12 * s, step), order, step)
        falling = functools.partial(slope, order=order)
        peak = falling_root(falling, -(order - 1) * size - 1, 1.0, tolerance=1e-9)
        around = peak + np.arange(-12 * s, 12 * s, width / 2)
        addition = log_mean(around, 1 - order, width / 2)
        divergences[i] = min(divergences[i], max(0.0, removal, addition) / (order - 1))
    return divergences

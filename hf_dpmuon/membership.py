"""What the best membership test can find, given what a release cost.

Receives epsilon and delta, or the draws of a release; returns bounds on true-positive rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hf_dpmuon.accounting import SampledGaussian, check_delta, epsilon_bound

__all__ = ["membership_tpr", "sharper_membership_tpr"]

_LARGEST_EXPONENT = 700.0  # exp of it is still a float64


def membership_tpr(*, epsilon: float, delta: float, fpr: float) -> float:
    """Returns the largest true-positive rate of any test for one unit's membership.

    Whatever an attacker knows and computes, a test that takes at most a share ``fpr`` of
    non-members for members finds at most this share of the members (Kairouz, Oh and Viswanath
    2015, theorem 2.1, both directions of add/remove one).

    Args:
        epsilon: That of the release, >= 0; infinity bounds nothing.
        delta: That of the release, in (0, 1).
        fpr: False-positive rate of the test, in [0, 1].

    Raises:
        ValueError: A value lies outside its range.
    """
    if not epsilon >= 0:
        raise ValueError(f"epsilon={epsilon} must be >= 0.")
    check_delta(delta)
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
        accountant: How the draws are composed.

    Raises:
        ValueError: A value lies outside its range.
    """
    check_delta(delta)
    pairs = [
        (epsilon_bound(events, delta=d, accountant=accountant).epsilon, d)
        for d in np.geomspace(delta, max(delta, 0.3), 8).tolist()
    ]
    return min(membership_tpr(epsilon=epsilon, delta=d, fpr=fpr) for epsilon, d in pairs)

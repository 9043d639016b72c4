"""What an audit has shown: a lower bound on epsilon from scores of members and of non-members.

Receives the releases at the coordinates of canaries, privacy units whose gradients meet no other's
(Steinke, Nasr and Jagielski 2023, arXiv 2305.08846); or scores of any kind, one an experiment.

Guarantees:
    If the experiments are independent, membership was decided by fair coins and the mechanism is
    (epsilon, delta)-differentially private, then no bound at that delta is above epsilon, but with
    a probability of at most 1 - confidence over all deltas together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv

from hf_dpmuon.accounting import check_delta

__all__ = ["AuditBound", "canary_scores", "epsilon_lower_bounds"]

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

# The rest bounds epsilon. Of 10,000 canaries a quarter to choose by showed more than a half.
SHARE_TO_CHOOSE_BY = 0.25


@dataclass(frozen=True)
class AuditBound:
    """A test for membership, and what its errors say of the privacy.

    Attributes:
        delta: The delta that is granted.
        epsilon: No epsilon below this fits the errors, >= 0.
        score: What the test looks at.
    """

    delta: float
    epsilon: float
    score: str


def canary_scores(
    releases: Mapping[str, npt.ArrayLike], *, noise_multiplier: float, sample_rate: float
) -> dict[str, FloatArray]:
    """Return what an attacker might make of the releases, one number a canary, by name.

    Args:
        releases: By group of parameters, the released sums in units of the clipping bound at the
            canaries' coordinates, (T, n). A canary's gradient is equally large in each group.
        noise_multiplier: sigma > 0, as it is claimed.
        sample_rate: q in (0, 1], as it is claimed.

    Returns:
        The likelihood ratio under the claimed mechanism is the best where the claim is true; each
        of the others finds a fault that this one is blind to.
    """
    groups = {name: np.asarray(values, dtype=np.float64) for name, values in releases.items()}
    stacked = np.stack(list(groups.values()))
    projected: FloatArray = stacked.sum(axis=0) / math.sqrt(len(groups))  # (T, n)
    pairs = projected[: len(projected) // 2 * 2].reshape(-1, 2, projected.shape[1])
    with np.errstate(divide="ignore"):
        stay = np.log1p(-sample_rate)
    join = math.log(sample_rate) + (2 * projected - 1) / (2 * noise_multiplier**2)
    return {
        "likelihood ratio": np.logaddexp(stay, join).sum(axis=0),
        "max": projected.max(axis=0),
        "sum": projected.sum(axis=0),
        "least magnitude": np.abs(projected).min(axis=0),
        "range over steps": np.ptp(projected, axis=0),
        "range over pairs of steps": np.ptp(pairs, axis=1).max(axis=0, initial=0.0),
        **{f"max of {name} alone": values.max(axis=0) for name, values in groups.items()},
    }


def epsilon_lower_bounds(
    scores: Mapping[str, npt.ArrayLike],
    is_member: npt.ArrayLike,
    *,
    deltas: Sequence[float],
    confidence: float = 0.95,
) -> list[AuditBound]:
    """Return what the scores show, at each delta.

    Score, direction, threshold and whether members or non-members are searched for are chosen on a
    quarter of the experiments; the errors of that one test are counted on the others. So nothing
    has to be corrected for the number of scores.

    Args:
        scores: Numbers by experiment, of shape (n,), by name.
        is_member: Whether the unit was there, of shape (n,); in no order that the scores know.
        deltas: Each in (0, 1).
        confidence: That of all bounds together, in (0, 1).

    Raises:
        ValueError: A value lies outside its range, or there are fewer than 40 experiments.
    """
    members = np.asarray(is_member, dtype=np.bool_)
    if len(members) < 40:
        raise ValueError(f"is_member has {len(members)} experiments; at least 40 are needed.")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} must be in (0, 1).")
    error = (1 - confidence) / (2 * len(deltas))  # each delta has a test with two rates
    cut = int(SHARE_TO_CHOOSE_BY * len(members))
    by_name = {name: np.asarray(values, dtype=np.float64) for name, values in scores.items()}
    bounds = []
    for delta in deltas:
        check_delta(delta)
        best = (-math.inf, 0.0, next(iter(by_name)), 1, True)
        for name, sign, searched in itertools.product(by_name, (1, -1), (True, False)):
            values, is_positive = sign * by_name[name][:cut], members[:cut] == searched
            thresholds = np.unique(values)
            shown = _bounds(values, is_positive, thresholds, delta, error)
            at = int(shown.argmax())
            best = max(best, (float(shown[at]), float(thresholds[at]), name, sign, searched))
        _, threshold, name, sign, searched = best
        values, is_positive = sign * by_name[name][cut:], members[cut:] == searched
        (epsilon,) = _bounds(values, is_positive, np.array([threshold]), delta, error).tolist()
        bounds.append(AuditBound(delta, max(0.0, epsilon), name))
    return bounds


def _bounds(
    values: FloatArray,
    is_positive: BoolArray,
    thresholds: FloatArray,
    delta: float,
    error: float,
) -> FloatArray:
    """For each threshold, log((hits - delta) / false alarms), each rate at its worst.

    A test that says "positive" at or above a threshold has hits <= e^epsilon false alarms + delta.
    The rates are Clopper and Pearson's one-sided limits, each wrong with probability ``error``.
    """
    hits, alarms = (
        len(part) - np.searchsorted(np.sort(part), thresholds, side="left")
        for part in (values[is_positive], values[~is_positive])
    )
    positives, negatives = is_positive.sum(), (~is_positive).sum()
    fewest = np.where(hits > 0, betaincinv(np.maximum(hits, 1), positives - hits + 1, error), 0.0)
    most = np.where(
        alarms < negatives,
        betaincinv(alarms + 1, np.maximum(negatives - alarms, 1), 1 - error),
        1.0,
    )
    with np.errstate(divide="ignore"):
        bounds: FloatArray = np.log(np.maximum(fewest - delta, 0.0)) - np.log(most)
    return bounds

"""Lower bounds on epsilon: known values, and how often they are wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import beta, norm

from hf_dpmuon.accounting import compute_epsilon
from hf_dpmuon.auditing import SHARE_TO_CHOOSE_BY, canary_scores, epsilon_lower_bounds


def bound(scores, members, *, delta=1e-9, confidence=0.95):
    return epsilon_lower_bounds(scores, members, deltas=[delta], confidence=confidence)[0]


def test_a_perfect_test_shows_what_its_number_of_experiments_allows():
    """All of n right: the rates are within Clopper and Pearson's alpha^(1/n) of 1 and 0."""
    members = np.tile([True, False], 400)
    found = bound({"score": members.astype(float)}, members, delta=0.01)
    alpha = 0.05 / 2
    n = 400 - 400 * SHARE_TO_CHOOSE_BY
    lowest, highest = alpha ** (1 / n), 1 - alpha ** (1 / n)
    assert found.epsilon == pytest.approx(math.log((lowest - 0.01) / highest), rel=1e-9)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_bound_is_clopper_and_pearson_s_of_the_counted_errors(sign):
    """60 hits and 20 false alarms of 100 each, in every part of the experiments."""
    block = [(True, 1)] * 3 + [(True, 0)] * 2 + [(False, 1)] + [(False, 0)] * 4
    members, scores = np.array(block * 40).T
    found = bound({"score": sign * scores}, members.astype(bool))
    cut = int(SHARE_TO_CHOOSE_BY * len(members))
    n = (len(members) - cut) // 2
    by_hits = math.log(
        beta.ppf(0.025, 0.6 * n, 0.4 * n + 1) / beta.ppf(0.975, 0.2 * n + 1, 0.8 * n)
    )
    by_misses = math.log(
        beta.ppf(0.025, 0.8 * n, 0.2 * n + 1) / beta.ppf(0.975, 0.4 * n + 1, 0.6 * n)
    )
    assert found.epsilon == pytest.approx(max(by_hits, by_misses), rel=1e-6)


def test_scores_that_know_nothing_show_nothing():
    generator = np.random.default_rng(0)
    members = generator.random(2000) < 0.5
    scores = {str(i): generator.standard_normal(2000) for i in range(20)}
    assert bound(scores, members).epsilon < 0.1
    assert bound({"constant": np.zeros(2000)}, members).epsilon == 0


def test_the_test_is_chosen_on_other_experiments_than_those_it_is_judged_by():
    """Membership known of the first quarter only: it is chosen, and shows nothing."""
    generator = np.random.default_rng(0)
    members = generator.random(1000) < 0.5
    cheat = np.where(np.arange(1000) < 250, members, generator.random(1000))
    assert bound({"cheat": cheat}, members).epsilon < 0.2


def test_a_bound_is_above_the_truth_no_more_often_than_its_confidence_allows():
    """The Gaussian mechanism, whose epsilon is exact: at 60 % confidence, 200 times."""
    generator = np.random.default_rng(0)
    truth = compute_epsilon(
        noise_multiplier=1.0, sample_rate=1.0, steps=1, delta=0.05, accountant="prv"
    )
    wrong = 0
    for _ in range(200):
        members = generator.random(400) < 0.5
        scores = {"x": generator.standard_normal(400) + members}
        wrong += bound(scores, members, delta=0.05, confidence=0.6).epsilon > truth
    assert wrong <= 0.4 * 200


def test_the_likelihood_ratio_is_that_of_the_mechanism():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((5, 7))
    scores = canary_scores({"all": x}, noise_multiplier=0.7, sample_rate=0.3)
    present = 0.7 * norm.pdf(x, 0, 0.7) + 0.3 * norm.pdf(x, 1, 0.7)
    expected = np.log(present / norm.pdf(x, 0, 0.7)).sum(0)
    np.testing.assert_allclose(scores["likelihood ratio"], expected)
    at_one = canary_scores({"all": x}, noise_multiplier=0.7, sample_rate=1.0)
    np.testing.assert_allclose(
        at_one["likelihood ratio"], np.log(norm.pdf(x, 1, 0.7) / norm.pdf(x, 0, 0.7)).sum(0)
    )


def test_groups_are_projected_on_the_canary_s_direction():
    scores = canary_scores(
        {"weight": np.full((2, 3), 1.0), "bias": np.full((2, 3), 3.0)},
        noise_multiplier=1.0,
        sample_rate=0.5,
    )
    np.testing.assert_allclose(scores["max"], 4 / math.sqrt(2))
    np.testing.assert_allclose(scores["sum"], 8 / math.sqrt(2))
    np.testing.assert_allclose(scores["max of bias alone"], 3)
    assert not scores["range over steps"].any()


def test_pairs_are_of_a_step_and_the_next():
    x = np.array([[0.0], [5.0], [5.0], [0.0], [9.0]])
    scores = canary_scores({"all": x}, noise_multiplier=1.0, sample_rate=0.5)
    assert scores["range over pairs of steps"] == 5
    assert scores["range over steps"] == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_member": [True] * 39}, "39 experiments"),
        ({"confidence": 1.0}, "confidence=1.0"),
        ({"deltas": [0.0]}, "delta=0.0"),
    ],
)
def test_values_outside_their_range_are_refused(change, message):
    call = {"scores": {"x": np.zeros(39)}, "is_member": [True, False] * 30, "deltas": [0.1]}
    call["scores"] = {"x": np.zeros(len(change.get("is_member", call["is_member"])))}
    with pytest.raises(ValueError, match=message):
        epsilon_lower_bounds(**{**call, **change})

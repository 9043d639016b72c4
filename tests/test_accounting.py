"""Laws, oracles and known values of the privacy accounting."""

import itertools
import math
import sys
import time
import warnings
from decimal import Decimal

import dp_accounting
import dp_accounting.pld
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp
from scipy.optimize import brentq
from scipy.special import logsumexp
from scipy.stats import binom, norm

from hf_dpmuon.accounting import (
    EpsilonBound,
    SampledGaussian,
    _between,
    _binomial,
    compute_epsilon,
    epsilon_bound,
)
from hf_dpmuon.group_privacy import _GROUP_ORDERS, _group_divergences, group_epsilon
from hf_dpmuon.membership import membership_tpr, sharper_membership_tpr
from hf_dpmuon.plan import affordable_steps, calibrate_noise_multiplier, num_steps, steps_per_epoch
from hf_dpmuon.rounding import percent_up, round_up, round_up_fixed

N = 50_000
DELTA = 1e-5

noise_multipliers = st.floats(0.3, 30)
sample_rates = st.floats(1e-4, 1)
step_counts = st.integers(1, 20_000)
few = settings(max_examples=25, deadline=None, derandomize=True)


def epsilon(sigma, q, steps, delta=DELTA, accountant="rdp"):
    return compute_epsilon(
        noise_multiplier=sigma, sample_rate=q, steps=steps, delta=delta, accountant=accountant
    )


def calibrate(target, q, steps, delta=DELTA, accountant="rdp"):
    return calibrate_noise_multiplier(
        target_epsilon=target,
        target_delta=delta,
        sample_rate=q,
        steps=steps,
        accountant=accountant,
    )


# Known values


@pytest.mark.parametrize(
    ("batch", "steps", "sigma", "expected"),
    [
        (256, 9750, 0.88, 4.03),
        (1024, 2400, 1.38, 4.00),
        (4096, 600, 2.49, 4.00),
        (256, 9750, 0.85, 4.37),
        (1024, 2400, 1.32, 4.28),
        (4096, 600, 2.35, 4.30),
    ],
)
def test_rdp_reproduces_the_published_epsilons(batch, steps, sigma, expected):
    assert round(epsilon(sigma, batch / N, steps), 2) == expected


@pytest.mark.parametrize(("batch", "steps", "sigma"), [(256, 9750, 0.85), (4096, 600, 2.35)])
def test_prv_meets_epsilon_4_at_the_papers_prv_sigmas(batch, steps, sigma):
    assert epsilon(sigma, batch / N, steps, accountant="prv") == pytest.approx(4, rel=0.01)


# Oracles


@pytest.mark.parametrize(("sigma", "q", "steps"), [(0.88, 0.00512, 9750), (2.0, 0.3, 100)])
def test_equals_opacus_where_the_grid_agrees(sigma, q, steps):
    rdp, prv = RDPAccountant(), PRVAccountant()
    rdp.history = prv.history = [(sigma, q, steps)]
    assert epsilon(sigma, q, steps) == pytest.approx(rdp.get_epsilon(DELTA), rel=1e-9)
    # Our longer grid of orders may narrow the range of losses, so the meshes differ a little.
    assert epsilon(sigma, q, steps, accountant="prv") == pytest.approx(
        prv.get_epsilon(DELTA), rel=1e-6
    )


@pytest.mark.parametrize("order", [2, 63, 700])
def test_the_moment_at_a_whole_order_equals_opacus(order):
    expected = compute_rdp(q=0.01, noise_multiplier=8.0, steps=1, orders=[order])[0]
    assert _binomial(8.0, 0.01, order) / (order - 1) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("sigma", [0.06, 0.3, 0.9, 1.01, 3.0, 50.0])
@pytest.mark.parametrize("q", [1e-3, 0.3, 0.99])
def test_moments_between_whole_orders_equal_opacus(sigma, q):
    orders = np.array([1.01, 1.5, 2.0, 7.3, 10.9])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus' series may not converge at large noise
        expected = compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=orders)
    ours = _between(sigma, q, orders) / (orders - 1)
    assert ours == pytest.approx(np.asarray(expected), rel=1e-7, abs=1e-10)


@few
@given(st.floats(1e-3, 0.0499), sample_rates, st.floats(1.0001, 10.9))
def test_the_bound_for_little_noise_is_above_the_moment_and_below_no_subsampling(sigma, q, order):
    bound = float(_between(sigma, q, np.array([order]))[0])
    below, above = math.floor(order), math.floor(order) + 1
    convex = [0.0 if a < 2 else _binomial(sigma, q, a) for a in (below, above)]
    # Log moments are convex in the order, so that the larger neighbour bounds this one from above.
    assert bound >= 0
    assert bound <= order * (order - 1) / (2 * sigma**2) * (1 + 1e-9)
    if order - below < 1e-3 and below >= 2:
        assert bound >= convex[0] * (1 - 1e-9)


@few
@given(noise_multipliers, st.integers(1, 1000))
def test_rdp_without_subsampling_is_close_to_its_closed_form(sigma, steps):
    """At q = 1 the curve is rho * order; a dense search finds its infimum over real orders."""
    rho = steps / (2 * sigma**2)
    orders = 1 + np.logspace(-7, 6, 20_001)
    bounds = (
        rho * orders - (math.log(DELTA) + np.log(orders)) / (orders - 1) + np.log1p(-1 / orders)
    )
    best = max(0.0, float(bounds.min()))
    assert best * (1 - 1e-6) <= epsilon(sigma, 1.0, steps) <= best * 1.07 + 1e-9


@few
@given(noise_multipliers, st.integers(1, 1000))
def test_prv_without_subsampling_is_the_exact_gaussian_trade_off(sigma, steps):
    mu = math.sqrt(steps) / sigma
    bound = epsilon_bound([SampledGaussian(sigma, 1.0, steps)], delta=DELTA, accountant="prv")
    e = bound.epsilon
    log_second = e + norm.logcdf(-mu / 2 - e / mu)
    delta = norm.cdf(mu / 2 - e / mu) - math.exp(log_second)
    assert bound.accountant == "prv"
    assert delta == pytest.approx(DELTA, rel=1e-3) or (e == 0 and delta <= DELTA)


def test_prv_composes_a_full_draw_with_subsampled_ones():
    full, part = SampledGaussian(5.0, 1.0, 3), SampledGaussian(1.0, 0.01, 500)
    together = epsilon_bound([full, part], delta=DELTA, accountant="prv")
    assert together.accountant == "prv"
    for alone in (full, part):
        assert together.epsilon > epsilon_bound([alone], delta=DELTA, accountant="prv").epsilon


# Laws of the bound


@few
@given(noise_multipliers, sample_rates, step_counts)
def test_epsilon_is_monotone(sigma, q, steps):
    base = epsilon(sigma, q, steps)
    slack = 1e-6 * (1 + base)
    assert math.isfinite(base)
    assert epsilon(sigma, q, 2 * steps) >= base - slack
    assert epsilon(1.1 * sigma, q, steps) <= base + slack
    assert epsilon(sigma, q / 1.1, steps) <= base + slack


def test_doubling_the_steps_or_halving_the_noise_costs_more():
    assert epsilon(1.0, 0.01, 2000) > 1.1 * epsilon(1.0, 0.01, 1000)
    assert epsilon(1.0, 0.01, 1000) > 1.5 * epsilon(2.0, 0.01, 1000)
    assert epsilon(1.0, 0.02, 1000) > 1.5 * epsilon(1.0, 0.01, 1000)


@few
@given(
    st.lists(
        st.tuples(st.sampled_from([0.7, 1.3, 4.0]), st.sampled_from([0.01, 0.2, 1.0])),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 50),
)
def test_composition_does_not_depend_on_how_events_are_split_or_ordered(mechanisms, steps):
    whole = [SampledGaussian(*m, steps) for m in mechanisms]
    pieces = [SampledGaussian(*m) for m in mechanisms * steps]
    assert epsilon_bound(whole, delta=DELTA) == epsilon_bound(pieces, delta=DELTA)
    backwards = epsilon_bound(whole[::-1], delta=DELTA).epsilon
    assert backwards == pytest.approx(epsilon_bound(whole, delta=DELTA).epsilon, rel=1e-12)


@settings(few, max_examples=8)
@given(noise_multipliers, sample_rates, st.integers(1, 500))
def test_prv_is_never_above_rdp(sigma, q, steps):
    assert epsilon(sigma, q, steps, accountant="prv") <= epsilon(sigma, q, steps)


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_no_steps_cost_nothing_and_no_noise_costs_everything(accountant):
    assert epsilon_bound([], delta=DELTA, accountant=accountant) == EpsilonBound(0.0, accountant)
    assert epsilon(1.0, 0.1, 0, accountant=accountant) == 0
    assert epsilon(0.0, 0.1, 0, accountant=accountant) == 0
    assert epsilon(0.0, 0.1, 1, accountant=accountant) == math.inf


# The ends of the grid


@pytest.mark.parametrize(
    ("sigma", "q", "steps"), [(20, 1e-3, 10), (0.4, 0.01, 1000), (0.05, 1, 9000)]
)
def test_orders_are_extended_past_both_ends_without_a_warning(sigma, q, steps):
    opacus = RDPAccountant()
    opacus.history = [(sigma, q, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        short_grid = opacus.get_epsilon(DELTA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = epsilon(sigma, q, steps)
        epsilon(sigma, q, steps, accountant="prv")
    assert 0 < ours <= short_grid
    if sigma != 0.4:
        assert ours < 0.95 * short_grid
    values = [epsilon(sigma, q, t) for t in range(1, 4 * steps, max(1, steps // 5))]
    assert all(a < b for a, b in itertools.pairwise(values))


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
@pytest.mark.parametrize(
    ("sigma", "q", "steps"),
    [(0.05, 0.5, 10**6), (1e-3, 0.1, 10), (1e6, 1e-6, 1), (1e6, 0.5, 9)],
)
def test_extreme_mechanisms_are_bounded_in_time(sigma, q, steps, accountant):
    start = time.process_time()
    assert epsilon(sigma, q, steps, accountant=accountant) >= 0
    assert time.process_time() - start < 20


def test_prv_falls_back_to_rdp_and_says_so():
    too_wide = epsilon_bound([SampledGaussian(0.05, 0.5, 1000)], delta=DELTA, accountant="prv")
    too_fine = epsilon_bound([SampledGaussian(1.0, 0.01, 10**6)], delta=1e-13, accountant="prv")
    fits = epsilon_bound([SampledGaussian(1.0, 0.01, 1000)], delta=DELTA, accountant="prv")
    assert [b.accountant for b in (too_wide, too_fine, fits)] == ["rdp", "rdp", "prv"]
    assert too_wide.epsilon == epsilon(0.05, 0.5, 1000)


def test_asking_at_every_step_is_cheap():
    epsilon(1.1, 0.01, 1)
    start = time.process_time()
    for steps in range(2000):
        epsilon(1.1, 0.01, steps)
    assert (time.process_time() - start) / 2000 < 1e-3


# Calibration


@few
@given(st.floats(0.05, 50), st.floats(1e-3, 1), st.integers(1, 5000))
def test_calibration_meets_the_budget_and_uses_it_up(target, q, steps):
    sigma = calibrate(target, q, steps)
    assert 0.995 * target <= epsilon(sigma, q, steps) <= target
    assert float(f"{sigma:.5e}") == sigma


@pytest.mark.parametrize("target", [1e-2, 1e3, 1e6])
@pytest.mark.parametrize(("q", "steps"), [(0.02, 1200), (1.0, 60)])
def test_calibration_to_extreme_budgets(target, q, steps):
    assert 0.995 * target <= epsilon(calibrate(target, q, steps), q, steps) <= target


@pytest.mark.parametrize(
    ("accountant", "target", "q", "steps"),
    [
        ("prv", 3, 0.02, 500),
        ("prv", 8, 1.0, 60),
        ("prv", 1000, 0.02, 50),
        ("prv", 0.01, 1e-4, 1),  # where epsilon falls steeply with the noise
        ("pld", 0.01, 0.3, 100),
        ("pld", 3, 0.3, 100),
        ("pld", 50, 1.0, 10_000),
    ],
)
def test_slow_accountants_are_asked_few_times_for_a_calibration(
    accountant, target, q, steps, monkeypatch
):
    asked = []

    def counting(events, *, delta, accountant):
        asked.append(accountant)
        return epsilon_bound(events, delta=delta, accountant=accountant)

    monkeypatch.setattr("hf_dpmuon.plan.epsilon_bound", counting)
    sigma = calibrate(target, q, steps, accountant=accountant)
    assert 0.995 * target <= epsilon(sigma, q, steps, accountant=accountant) <= target
    assert sigma <= calibrate(target, q, steps)
    assert asked.count(accountant) <= 8


@pytest.mark.parametrize(("target", "q", "steps"), [(4, 0.02048, 2400), (3, 1.0, 60), (0.5, 1, 1)])
def test_calibration_agrees_with_a_root_finder(target, q, steps):
    root = brentq(lambda s: epsilon(s, q, steps) - target, 0.1, 1000)
    assert calibrate(target, q, steps) == pytest.approx(root, rel=0.01)


def test_a_budget_below_reach_is_refused_with_the_smallest_one():
    with pytest.raises(ValueError, match=r"target_epsilon=1e-09 must be at least \d"):
        calibrate(1e-9, 0.5, 1000, delta=1e-12)


# Groups


def gaussian_delta(mean_shift, epsilon):
    """Delta of N(0, 1) against N(mean_shift, 1): Balle and Wang 2018, theorem 8."""
    above = norm.cdf(mean_shift / 2 - epsilon / mean_shift)
    log_below = epsilon + norm.logcdf(-mean_shift / 2 - epsilon / mean_shift)
    return above - math.exp(log_below) if log_below < 700 else 0.0


def exact_gaussian_epsilon(mean_shift, delta):
    if gaussian_delta(mean_shift, 0.0) <= delta:
        return 0.0
    return brentq(lambda e: gaussian_delta(mean_shift, e) - delta, 0.0, 600.0)


@few
@given(st.floats(0.5, 50), st.integers(2, 40), st.integers(1, 100), st.floats(1e-9, 1e-2))
def test_a_groups_bound_without_subsampling_is_that_of_k_times_the_shift(sigma, k, steps, delta):
    bound = group_epsilon([SampledGaussian(sigma, 1.0, steps)], group_size=k, delta=delta)
    mean_shift = k * math.sqrt(steps) / sigma
    if mean_shift < 25:
        assert bound >= exact_gaussian_epsilon(mean_shift, delta) * (1 - 1e-6)
    one = epsilon(sigma / k, 1.0, steps, delta=delta)
    if 0.5 < one < 1e4:
        assert bound == pytest.approx(one, rel=0.02)


def log_ratio(z, sigma, q, k):
    """Log density of the binomial mixture over that of no shift."""
    terms = [binom.logpmf(j, k, q) + (2 * j * z - j**2) / (2 * sigma**2) for j in range(k + 1)]
    return logsumexp(terms, axis=0)


@settings(few, max_examples=12)
@given(st.floats(0.5, 4), st.floats(0.01, 0.9), st.integers(1, 6), st.integers(0, 34))
def test_a_groups_divergence_is_the_worse_of_both_directions(sigma, q, k, index):
    order = _GROUP_ORDERS[index]  # up to 17
    z = np.linspace(-60 * sigma - order * k, 60 * sigma + order * k, 100_001)
    log_density = norm.logpdf(z, scale=sigma) + math.log(z[1] - z[0])
    removal, addition = (
        logsumexp(exponent * log_ratio(z, sigma, q, k) + log_density) / (order - 1)
        for exponent in (order, 1 - order)
    )
    assert _group_divergences(sigma, q, k)[index] == pytest.approx(
        max(removal, addition), rel=1e-5, abs=1e-8
    )


@settings(few, max_examples=15)
@given(st.floats(0.3, 5), st.floats(0.01, 0.9), st.integers(2, 8), st.floats(1e-7, 0.1))
def test_a_groups_bound_holds_for_one_draw_in_both_directions(sigma, q, k, delta):
    e = group_epsilon([SampledGaussian(sigma, q)], group_size=k, delta=delta)
    z = np.linspace(-14 * sigma, k + 14 * sigma, 50_001)
    log_without = norm.logpdf(z, scale=sigma) + math.log(z[1] - z[0])
    log_with = log_without + log_ratio(z, sigma, q, k)
    for above, below in ((log_with, log_without), (log_without, log_with)):
        excess = above > e + below
        assert (np.exp(above[excess]) - np.exp(e + below[excess])).sum() <= delta


@settings(few, max_examples=10)
@given(st.floats(0.6, 10), st.floats(1e-3, 1), st.integers(1, 500))
def test_a_groups_bound_grows_with_the_group_from_that_of_one(sigma, q, steps):
    events, sizes = [SampledGaussian(sigma, q, steps)], (1, 2, 3, 5, 9, 20)
    bounds = [group_epsilon(events, group_size=k, delta=DELTA) for k in sizes]
    assert bounds[0] == epsilon_bound(events, delta=DELTA).epsilon
    assert all(a <= b for a, b in itertools.pairwise(bounds))
    assert group_epsilon(events * 2, group_size=2, delta=DELTA) >= bounds[1]


@pytest.mark.parametrize(("sigma", "q", "steps"), [(2.0, 0.02, 400), (1.0, 0.3, 5), (6.0, 1.0, 30)])
def test_a_groups_bound_is_below_the_conversion_of_one_units_curve(sigma, q, steps):
    """(e, d) for one unit is (k e, d (1 + exp(e) + ... + exp((k - 1) e))) for k: Vadhan 2017."""
    events = [SampledGaussian(sigma, q, steps)]
    for k in (2, 4):
        pairs = [
            (epsilon_bound(events, delta=d).epsilon, d) for d in 10.0 ** np.arange(-90, 0, 0.5)
        ]
        converted = min(
            [k * e for e, d in pairs if d * sum(math.exp(i * e) for i in range(k)) <= DELTA],
            default=math.inf,
        )
        bound = group_epsilon(events, group_size=k, delta=DELTA)
        assert 2 * epsilon_bound(events, delta=DELTA).epsilon < bound <= converted


def test_a_group_too_large_to_compute_is_bounded_by_all_of_it_being_drawn():
    start = time.process_time()
    events = [SampledGaussian(0.7, 0.1, 10), SampledGaussian(1.1, 0.05, 10)]
    bound = group_epsilon(events, group_size=5000, delta=DELTA)
    assert time.process_time() - start < 20
    all_drawn = [SampledGaussian(e.noise_multiplier, 1.0, e.steps) for e in events]
    assert bound == pytest.approx(group_epsilon(all_drawn, group_size=5000, delta=DELTA), rel=1e-12)


def test_a_group_without_noise_or_draws():
    assert group_epsilon([SampledGaussian(0.0, 0.1)], group_size=2, delta=DELTA) == math.inf
    assert group_epsilon([], group_size=10, delta=DELTA) == 0


# Membership


@few
@given(
    st.floats(0.05, 8), st.floats(1e-9, 0.3), st.floats(1e-6, 1), st.sampled_from(["rdp", "prv"])
)
def test_no_test_on_a_gaussian_beats_the_bound(mean_shift, delta, fpr, accountant):
    """The best test of N(0, 1) against N(mean_shift, 1) is known (Neyman and Pearson)."""
    best = norm.cdf(norm.ppf(fpr) + mean_shift)
    e = epsilon(1 / mean_shift, 1.0, 1, delta=delta, accountant=accountant)
    assert best <= membership_tpr(epsilon=e, delta=delta, fpr=fpr) + 1e-9


@few
@given(st.floats(0.05, 5), st.floats(0.001, 0.999))
def test_the_bound_over_all_deltas_is_the_gaussian_trade_off(mean_shift, fpr):
    """A differentially private trade-off is the envelope of its (epsilon, delta) pairs."""
    pairs = [(e, gaussian_delta(mean_shift, e)) for e in np.linspace(0, 40, 801)]
    bound = min(membership_tpr(epsilon=e, delta=d, fpr=fpr) for e, d in pairs if 0 < d < 1)
    assert bound == pytest.approx(norm.cdf(norm.ppf(fpr) + mean_shift), abs=1e-3)


@few
@given(st.floats(0, 1000), st.floats(1e-12, 0.5), st.floats(0, 1), st.floats(0, 1))
def test_the_membership_bound_is_monotone_and_above_guessing(e, delta, fpr, other):
    def bound(**change):
        return membership_tpr(**({"epsilon": e, "delta": delta, "fpr": fpr} | change))

    assert fpr <= bound() <= 1
    assert bound() <= bound(epsilon=e + other)
    assert bound() <= bound(fpr=max(fpr, other))
    assert bound() <= bound(delta=max(delta, other / 2))


@few
@given(
    st.floats(0.05, 8), st.floats(1e-9, 0.5), st.floats(1e-6, 1), st.sampled_from(["rdp", "prv"])
)
def test_the_sharper_bound_holds_and_is_below_that_of_one_delta(mean_shift, delta, fpr, accountant):
    events = [SampledGaussian(1 / mean_shift, 1.0)]
    sharper = sharper_membership_tpr(events, delta=delta, fpr=fpr, accountant=accountant)
    e = epsilon(1 / mean_shift, 1.0, 1, delta=delta, accountant=accountant)
    assert norm.cdf(norm.ppf(fpr) + mean_shift) <= sharper + 1e-9
    assert sharper <= membership_tpr(epsilon=e, delta=delta, fpr=fpr) + 1e-12


def test_the_sharper_bound_says_something_at_an_epsilon_of_8():
    events = [SampledGaussian(0.697347, 1024 / 60_000, 590)]
    assert epsilon_bound(events, delta=1 / 600_000).epsilon > 7.99
    assert sharper_membership_tpr(events, delta=1 / 600_000, fpr=0.01) < 0.2
    with pytest.raises(ValueError, match="delta=0"):
        sharper_membership_tpr(events, delta=0, fpr=0.01)


def test_membership_bounds_known_by_hand():
    assert membership_tpr(epsilon=0, delta=1e-3, fpr=0.01) == pytest.approx(0.011)
    assert membership_tpr(epsilon=1, delta=1e-5, fpr=0.01) == pytest.approx(0.01 * math.e + 1e-5)
    assert membership_tpr(epsilon=8, delta=1e-5, fpr=0.01) == pytest.approx(
        1 - math.exp(-8) * 0.98999
    )
    assert membership_tpr(epsilon=math.inf, delta=1e-5, fpr=0.01) == 1


# Steps


def test_an_epoch_of_rate_one_over_n_has_n_steps():
    assert all(steps_per_epoch(1 / n) == n for n in range(1, 5000))
    assert [steps_per_epoch(b / 1000) for b in (300, 1000, 999, 64)] == [3, 1, 1, 16]


@pytest.mark.parametrize(
    ("epochs", "rate", "steps"), [(3, 0.3, 9), (50, 1 / 93, 4650), (0.5, 0.2, 3), (0, 0.2, 0)]
)
def test_num_steps(epochs, rate, steps):
    assert num_steps(num_epochs=epochs, sample_rate=rate) == steps


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_affordable_steps_are_the_most_that_fit(accountant):
    past = [SampledGaussian(1.0, 0.02, 100)]

    def cost(steps):
        events = [*past, SampledGaussian(1.5, 0.02, steps)]
        return epsilon_bound(events, delta=DELTA, accountant=accountant).epsilon

    def affordable(target, limit):
        return affordable_steps(
            past,
            noise_multiplier=1.5,
            sample_rate=0.02,
            target_epsilon=target,
            delta=DELTA,
            accountant=accountant,
            limit=limit,
        )

    most = affordable(3.0, 2000)
    assert 0 < most < 2000
    assert cost(most) <= 3.0 < cost(most + 1)
    assert affordable(3.0, 10) == 10
    assert affordable(cost(0) / 2, 100) == 0


# Errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier=-1.0 must be a finite number >= 0"),
        ({"noise_multiplier": math.nan}, "noise_multiplier=nan"),
        ({"sample_rate": 0.0}, r"sample_rate=0.0 must be in \(0, 1\]"),
        ({"sample_rate": 1.5}, r"sample_rate=1.5 must be in \(0, 1\]"),
        ({"steps": -1}, "steps=-1 must be a whole number in"),
        ({"delta": 1.0}, r"delta=1.0 must be in \(0, 1\)"),
        ({"accountant": "gdp"}, "accountant='gdp' must be one of"),
    ],
)
def test_values_outside_their_range_are_named(change, message):
    legal = {"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 5, "delta": DELTA}
    with pytest.raises(ValueError, match=message):
        compute_epsilon(**(legal | change))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0.0, 0.1, 5), "target_epsilon=0.0"), ((1.0, 0.1, 0), "steps=0 must be >= 1")],
)
def test_calibration_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        calibrate(*arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": -0.1}, "epsilon=-0.1 must be >= 0"),
        ({"epsilon": math.nan}, "epsilon=nan must be >= 0"),
        ({"delta": 0.0}, r"delta=0.0 must be in \(0, 1\)"),
        ({"fpr": 1.1}, r"fpr=1.1 must be in \[0, 1\]"),
    ],
)
def test_a_membership_bound_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        membership_tpr(**({"epsilon": 1.0, "delta": DELTA, "fpr": 0.01} | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 0}, "group_size=0 must be a whole number >= 1"),
        ({"group_size": 2.5}, "group_size=2.5"),
        ({"delta": 2.0}, "delta=2.0"),
    ],
)
def test_a_group_bound_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        group_epsilon([], **({"group_size": 2, "delta": DELTA} | change))


# Printing


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.floats(1e-12, 1e12) | st.integers(1, 10**7).map(lambda n: n / 1e4),
    st.integers(1, 12),
    st.integers(0, 8),
)
def test_what_is_printed_is_never_below_the_number(value, digits, decimals):
    for number in (value, math.nextafter(value, math.inf), 0.0):
        exact = Decimal(repr(number))
        shown = Decimal(round_up(number, digits))
        assert exact <= shown <= exact * (1 + Decimal(10) ** (1 - digits))
        assert len(shown.normalize().as_tuple().digits) <= digits
        fixed = Decimal(round_up_fixed(number, decimals))
        assert exact <= fixed < exact + Decimal(10) ** -decimals
        assert fixed.as_tuple().exponent == -decimals
        share = min(1.0, number)
        percent = Decimal(percent_up(share).removesuffix(" %"))
        assert Decimal(repr(share)) * 100 <= percent <= 100
        assert percent <= Decimal(repr(share)) * 100 + Decimal("0.01")


def test_a_number_of_few_digits_is_printed_as_it_is():
    assert [round_up(x) for x in (1e-5, 0.5, 8.0, 120.0, 1e6)] == [
        "1e-05",
        "0.5",
        "8",
        "120",
        "1e+06",
    ]
    assert round_up_fixed(8.0) == "8.0000"
    assert round_up(math.inf) == round_up_fixed(math.inf) == "inf"
    assert [percent_up(x) for x in (0.1, 0.0001, 0.99999, 1.0)] == [
        "10 %",
        "0.01 %",
        "100 %",
        "100 %",
    ]


# Google's accountant, the oracle


PLD_CASES = [(0.6, 0.01, 200), (1.38, 1024 / 50_000, 2400), (2.0, 0.2, 50), (5.0, 1.0, 20)]


def google(sigma, q, steps, delta=DELTA):
    accountant = dp_accounting.pld.PLDAccountant(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    draw = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
    accountant.compose(draw, steps)
    return accountant.get_epsilon(delta)


@pytest.mark.parametrize(("sigma", "q", "steps"), PLD_CASES)
def test_every_accountant_is_above_googles_and_pld_is_it(sigma, q, steps):
    exact = google(sigma, q, steps)
    assert epsilon(sigma, q, steps, accountant="pld") == pytest.approx(exact, rel=1e-3)
    assert epsilon(sigma, q, steps) >= exact * (1 - 1e-4)
    assert epsilon(sigma, q, steps, accountant="prv") >= exact * (1 - 1e-2)


def test_the_exact_bound_of_a_group_is_below_that_by_rdp():
    events = [SampledGaussian(1.38, 1024 / 50_000, 2400)]
    by_rdp = group_epsilon(events, group_size=8, delta=DELTA)
    exact = group_epsilon(events, group_size=8, delta=DELTA, accountant="pld")
    assert exact == pytest.approx(51.5, abs=0.2)
    assert by_rdp == pytest.approx(54.8, abs=0.1)
    full = group_epsilon(
        [SampledGaussian(4.0, 1.0, 3)], group_size=2, delta=DELTA, accountant="pld"
    )
    assert full == pytest.approx(exact_gaussian_epsilon(2 * math.sqrt(3) / 4, DELTA), rel=1e-2)


def test_pld_without_its_extra_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ValueError, match=r"accountant='pld' needs dp-accounting.*hf-dpmuon\[pld\]"):
        epsilon(1.0, 0.017, 11, accountant="pld")


@pytest.mark.parametrize("steps", [10**6, 10**8, 10**10])
@pytest.mark.parametrize("shift", [0.3, 1.0, 4.0])
def test_many_tiny_draws_cost_at_least_their_gaussian_limit(steps, shift):
    """Log moments near 0 lose digits, which so many steps would multiply."""
    q = 0.02
    sigma = q * math.sqrt(steps) / shift
    assert epsilon(sigma, q, steps) >= exact_gaussian_epsilon(shift, DELTA) * (1 - 1e-6)
    with pytest.raises(ValueError, match="steps="):
        epsilon(sigma, q, 10**10 + 1)

"""Laws, oracles and known values of the filters and of what they do to noise."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dpmuon.filters import LOW_PASS, GradientFilter, KalmanFilter, LowPassFilter, moved_to
from hf_dpmuon.known_noise import (
    LinearResponse,
    constant_gain,
    ema,
    heavy_ball,
    lookahead,
    release_weights,
    variance_factor,
)

few = settings(max_examples=25, deadline=None, derandomize=True)
betas = st.floats(0.05, 0.97)
kappas = st.floats(0.05, 1.0)
gammas = st.floats(0.1, 3.0)


def run(filter_, inputs):
    """What a filter returns for a stream of numbers."""
    return [filter_.smooth([torch.tensor([float(x)])])[0].item() for x in inputs]


# DOPPLER


@pytest.mark.parametrize(
    ("name", "outputs", "gain"),
    [
        ("ema_0.9", (1, 1.526316, 2.070111, 1.177377), 0.052632),
        ("ema_0.9_averaged", (1, 1.344828, 1.845987, 1.570825), 0.05),
        ("ema_0.9_sharpened", (1, 1.638298, 2.235955, 0.859340), 0.060526),
        ("ema_0.6", (1, 1.625, 2.326531, 0.797794), 0.25),
        ("ema_0.6_averaged", (1, 1.384615, 2.011236, 1.522244), 0.2),
        ("ema_0.6_sharpened", (1, 1.714286, 2.463415, 0.461883), 0.3125),
        ("second_order", (1, 1.370370, 1.904645, 1.516380), 0.041667),
    ],
)
def test_low_pass_filters_have_their_known_values(name, outputs, gain):
    assert run(LowPassFilter.named(name), [1, 2, 3, -1]) == pytest.approx(outputs, abs=1e-6)
    assert LowPassFilter.named(name).noise_gain == pytest.approx(gain, abs=1e-6)


def test_every_published_set_has_a_known_value():
    assert len(LOW_PASS) == 7


@pytest.mark.parametrize("name", LOW_PASS)
@few
@given(value=st.floats(-100, 100), steps=st.integers(1, 30))
def test_a_constant_passes_unchanged_at_every_step(name, value, steps):
    assert run(LowPassFilter.named(name), [value] * steps) == pytest.approx(
        [value] * steps, rel=1e-5, abs=1e-5
    )


def test_the_bias_corrected_average_is_that_of_adam():
    """DOPPLER's (0.1; -0.9) is Adam's first moment over 1 - beta^t."""
    inputs, m, expected = [3.0, -1.0, 0.5, 2.0, 7.0], 0.0, []
    for t, x in enumerate(inputs, start=1):
        m = 0.9 * m + 0.1 * x
        expected.append(m / (1 - 0.9**t))
    assert run(LowPassFilter(), inputs) == pytest.approx(expected, rel=1e-5)


# DiSK


def quadratic(filter_, *, steps, lr=0.1, start=3.0):
    """Gradient descent on .5 (x - 1)^2; the releases and filtered gradients of each step."""
    (x,) = filter_.parameters
    x.fill_(start)
    releases, filtered, true = [], [], []
    for _ in range(steps):
        release = torch.zeros_like(x)
        for point in filter_.query_points():
            with moved_to(filter_.parameters, point):
                release += point.coefficient * (x - 1)
        true.append(x.item() - 1)
        (g,) = filter_.smooth([release])
        releases.append(release.item())
        filtered.append(g.item())
        x.sub_(lr * g)
    return releases, filtered, true


@few
@given(kappa=kappas, gamma=st.none() | gammas)
def test_on_a_quadratic_disk_returns_the_true_gradient(kappa, gamma):
    filter_ = KalmanFilter([torch.zeros(1, dtype=torch.float64)], kappa=kappa, gamma=gamma)
    _, filtered, true = quadratic(filter_, steps=8)
    assert filtered == pytest.approx(true, rel=1e-9)
    assert true == pytest.approx([2 * 0.9**t for t in range(8)], rel=1e-9)


def test_releases_on_the_quadratic_have_their_known_values():
    """Opacus' research copy inverts the gain and gives 1.914 for the second filtered gradient."""
    filter_ = KalmanFilter([torch.zeros(1, dtype=torch.float64)], kappa=0.7, gamma=0.5)
    releases, filtered, _ = quadratic(filter_, steps=4)
    assert releases == pytest.approx([2, 1.71428571, 1.54285714, 1.38857143], abs=1e-8)
    assert filtered == pytest.approx([2, 1.8, 1.62, 1.458], abs=1e-12)


@few
@given(kappa=kappas, gamma=gammas)
def test_coefficients_sum_to_one_and_points_lie_on_the_last_move(kappa, gamma):
    x = torch.tensor([1.0, -2.0], dtype=torch.float64)
    filter_ = KalmanFilter([x], kappa=kappa, gamma=gamma)
    assert [point.coefficient for point in filter_.query_points()] == [1.0]
    filter_.smooth([torch.ones(2, dtype=torch.float64)])
    move = torch.tensor([0.5, 0.25], dtype=torch.float64)
    x.add_(move)
    points = filter_.query_points()
    assert len(points) == filter_.evaluations
    assert sum(point.coefficient for point in points) == pytest.approx(1)
    if kappa < 1:
        assert points[0].coefficient * gamma == pytest.approx((1 - kappa) / kappa)
        torch.testing.assert_close(points[0].weights[0], x + gamma * move)


@pytest.mark.parametrize(
    ("kappa", "gamma", "evaluations"),
    [(0.7, None, 1), (0.7, 0.3 / 0.7, 1), (0.7, 0.5, 2), (1.0, 0.5, 1), (0.1, 9.0, 1)],
)
def test_one_evaluation_suffices_at_the_natural_gamma(kappa, gamma, evaluations):
    assert KalmanFilter([torch.zeros(1)], kappa=kappa, gamma=gamma).evaluations == evaluations


def test_unit_gain_is_no_filter():
    inputs = [3.0, -1.0, 0.5]
    assert run(KalmanFilter([torch.zeros(1)], kappa=1.0), inputs) == inputs
    assert run(GradientFilter(), inputs) == inputs


@few
@given(kappa=kappas)
def test_noise_gain_of_disk_is_kappa_over_two_minus_kappa(kappa):
    filter_ = KalmanFilter([torch.zeros(1)], kappa=kappa)
    assert filter_.noise_gain == pytest.approx(kappa / (2 - kappa), rel=1e-6)


def test_moving_to_a_point_and_back_changes_no_bit():
    p = torch.nn.Parameter(torch.randn(5))
    before, pointer = p.detach().clone(), p.data_ptr()
    filter_ = KalmanFilter([p], kappa=0.5, gamma=0.3)
    filter_.smooth([torch.ones(5)])
    with torch.no_grad():
        p.add_(0.1)
    ahead, here = filter_.query_points()
    with moved_to([p], ahead):
        torch.testing.assert_close(p.detach(), before + 0.1 * 1.3)
    with moved_to([p], here):
        assert torch.equal(p.detach(), before + 0.1)
    with pytest.raises(RuntimeError, match="no memory"), moved_to([p], ahead):
        raise RuntimeError("no memory")
    assert torch.equal(p.detach(), before + 0.1)
    assert p.data_ptr() == pointer


# What all filters keep


PARAMETERS = [torch.zeros(3), torch.zeros(2, 2)]
FILTERS = {
    "none": lambda: GradientFilter(),
    **{name: lambda name=name: LowPassFilter.named(name) for name in LOW_PASS},
    "disk": lambda: KalmanFilter(PARAMETERS, kappa=0.4),
    "disk_two": lambda: KalmanFilter(PARAMETERS, kappa=0.4, gamma=0.5),
}


def gradients(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in PARAMETERS]


@pytest.mark.parametrize("name", FILTERS)
def test_gradients_are_read_and_not_kept(name):
    filter_ = FILTERS[name]()
    for step in range(3):
        given_ = gradients(step)
        before = [g.clone() for g in given_]
        outputs = filter_.smooth(given_)
        assert all(torch.equal(g, old) for g, old in zip(given_, before, strict=True))
        for g in (*given_, *outputs):
            g.fill_(float("nan"))  # neither input nor output is part of the state
    assert all(g.isfinite().all() for g in filter_.smooth(gradients(3)))


@pytest.mark.parametrize("name", FILTERS)
def test_resuming_in_lock_step_changes_no_bit(name, tmp_path):
    filter_, twin = FILTERS[name](), FILTERS[name]()
    for step in range(4):
        torch.save(filter_.state_dict(), tmp_path / "filter.pt")
        twin = FILTERS[name]()
        twin.load_state_dict(torch.load(tmp_path / "filter.pt", weights_only=True))
        ours, theirs = filter_.smooth(gradients(step)), twin.smooth(gradients(step))
        assert all(torch.equal(g, h) for g, h in zip(ours, theirs, strict=True))
        assert len(filter_.query_points()) == len(twin.query_points())


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 40])
def test_weights_of_past_releases_are_what_the_filter_does(name, steps):
    """Feed one release at a time: its share in the last output is its weight."""
    shares = []
    for impulse in range(steps):
        filter_ = FILTERS[name]()
        for step in range(steps):
            value = float(step == impulse)
            output = filter_.smooth([torch.full_like(p, value) for p in PARAMETERS])
        shares.append(output[0][0].item())
    weights = release_weights([FILTERS[name]().response], steps)
    assert shares == pytest.approx(weights.tolist(), abs=1e-5)


@pytest.mark.parametrize("name", [n for n in FILTERS if n != "none"])
def test_each_filter_does_something_of_its_own(name):
    inputs = [[torch.full_like(p, x) for p in PARAMETERS] for x in (1.0, 2.0, 3.0, -1.0)]
    last = {}
    for other in FILTERS:
        filter_ = FILTERS[other]()
        for release in inputs:
            last[other] = filter_.smooth(release)[0][0].item()
    same = [o for o in last if o != name and abs(last[o] - last[name]) < 1e-3]
    assert same == ([] if not name.startswith("disk") else [{"disk": "disk_two"}.get(name, "disk")])


# Variance of the noise after filter and momentum


@few
@given(b=betas, t=st.integers(1, 300))
def test_variance_factors_of_momentum_have_their_closed_forms(b, t):
    assert variance_factor([ema(b)], t) == pytest.approx((1 - b) / (1 + b) * (1 - b ** (2 * t)))
    assert variance_factor([heavy_ball(b)], t) == pytest.approx((1 - b ** (2 * t)) / (1 - b * b))
    assert variance_factor([lookahead(b)], t) == pytest.approx(
        (1 - b * b) ** 2 + b**4 * (1 - b) / (1 + b) * (1 - b ** (2 * (t - 1)))
    )
    assert constant_gain([ema(b)], t) == pytest.approx(1 - b**t)
    assert constant_gain([heavy_ball(b)], t) == pytest.approx((1 - b**t) / (1 - b))
    assert constant_gain([lookahead(b)], t) == pytest.approx(1 - b ** (t + 1))


@few
@given(a=betas, b=betas)
def test_variance_factor_of_two_averages_has_its_closed_form(a, b):
    expected = (1 - a) * (1 - b) * (1 + a * b) / ((1 + a) * (1 + b) * (1 - a * b))
    assert variance_factor([ema(a), ema(b)]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        ([ema(0.95)], 0.0256410),
        ([lookahead(0.95)], 0.0303910),
        ([heavy_ball(0.95)], 10.256),
        ([ema(0.9)], 0.0526316),
        ([lookahead(0.9)], 0.0706316),
        ([heavy_ball(0.9)], 5.263),
        ([ema(0.9), ema(0.95)], 0.0172646),
        ([ema(0.9), ema(0.9)], 0.0263887),
        ([ema(0.9), lookahead(0.95)], 0.0174371),
        ([ema(0.9), lookahead(0.9)], 0.0268873),
    ],
)
def test_steady_variance_factors_have_their_known_values(chain, expected):
    assert variance_factor(chain) == pytest.approx(expected, rel=2e-4)
    assert variance_factor(chain, 10**6) == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize("name", ["ema_0.9", "second_order", "disk"])
def test_the_variance_factor_is_that_of_simulated_noise(name):
    """Through a filter and the look-ahead, in the first steps, where both are still starting."""
    rng, size, beta = np.random.default_rng(0), 200_000, 0.8
    filter_ = (
        KalmanFilter([torch.zeros(size)], kappa=0.4)
        if name == "disk"
        else LowPassFilter.named(name)
    )
    M = torch.zeros(size)
    for step in range(1, 5):
        (g,) = filter_.smooth([torch.from_numpy(rng.standard_normal(size)).float()])
        M = torch.lerp(M, g, 1 - beta)
        seen = torch.lerp(g, M, beta).var().item()
        assert seen == pytest.approx(
            variance_factor([filter_.response, lookahead(beta)], step), rel=0.015
        )


# Misuse


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: KalmanFilter([], kappa=1.5), r"kappa=1.5 must be in \(0, 1\]"),
        (lambda: KalmanFilter([], kappa=0.0), r"kappa=0.0 must be in \(0, 1\]"),
        (lambda: KalmanFilter([], gamma=0.0), r"gamma=0.0 must be a finite number > 0"),
        (lambda: KalmanFilter([], gamma=math.inf), r"gamma=inf must be"),
        (lambda: LowPassFilter.named("butter"), r"low_pass='butter' must be one of ema_0.9, "),
        (lambda: LowPassFilter((0.1,), (-0.8,)), r"it is 0.9"),
        (lambda: LowPassFilter((1.0 - 1.1,), (-1.1,)), r"unstable: its largest pole is 1.1"),
        (lambda: LinearResponse(()), r"must hold at least b_0"),
        (lambda: release_weights([], 0), r"step=0 must be >= 1"),
    ],
)
def test_misuse_is_refused_by_name_and_range(call, message):
    with pytest.raises(ValueError, match=message):
        call()

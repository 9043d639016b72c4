"""Known values of random-matrix theory, and simulations that it must foretell."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dpmuon.known_noise import heavy_ball, lookahead
from hf_dpmuon.random_matrix import (
    SHRINKERS,
    bulk_density,
    detection_gate,
    detection_threshold,
    effective_rank,
    noise_edge,
    overlaps,
    polar_weights,
    recovery_batch_size,
    shrink_singular_values,
)

few = settings(max_examples=25, deadline=None, derandomize=True)
SHAPES = [(300, 300), (150, 450), (450, 150), (60, 600)]


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def orthogonal(n: int, seed: int) -> torch.Tensor:
    return torch.linalg.qr(gaussian(n, n, seed=seed))[0]


def unit(size: int, seed: int) -> torch.Tensor:
    return torch.nn.functional.normalize(gaussian(size, seed=seed), dim=0)


def spiked(x: float, m: int, n: int, *, s: float, seed: int) -> tuple[float, float, torch.Tensor]:
    """Singular values of x u v^T + s Z, and the cosines of its leading vectors to u and v."""
    u, v = unit(m, seed), unit(n, seed + 1)
    U, S, Vh = torch.linalg.svd(
        x * torch.outer(u, v) + s * gaussian(m, n, seed=seed + 2), full_matrices=False
    )
    return float(abs(U[:, 0] @ u)), float(abs(Vh[0] @ v)), S


# The table of a ViT-S and a ViT-B, in units of s


@pytest.mark.parametrize(
    ("m", "n", "edge", "threshold"),
    [
        (384, 384, 39.19, 19.60),
        (384, 1152, 53.54, 25.79),
        (1536, 384, 58.79, 27.71),
        (100, 384, 29.60, 14.00),
        (768, 768, 55.43, 27.71),
        (3072, 768, 83.14, 39.19),
    ],
)
def test_edge_and_threshold_have_their_known_values(m, n, edge, threshold):
    assert noise_edge(m, n) == pytest.approx(edge, abs=6e-3)
    assert detection_threshold(m, n) == pytest.approx(threshold, abs=6e-3)
    assert detection_threshold(m, n) <= noise_edge(m, n) / 2 + 1e-9


@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_noise_alone_ends_at_its_edge_and_has_its_density(m, n):
    """Shares of the singular values below quantiles of the law, of any shape and level."""
    s = 0.02
    values = torch.linalg.svdvals(s * gaussian(m, n, seed=m + n))
    assert values[0] == pytest.approx(s * noise_edge(m, n), rel=0.03)
    grid = torch.linspace(0, 1.1 * s * noise_edge(m, n), 20_001, dtype=torch.float64)
    density = bulk_density(grid, rows=m, columns=n, noise_std=s)
    share = torch.cumulative_trapezoid(density, grid)
    assert share[-1] == pytest.approx(1, abs=2e-3)
    for quantile in (0.1, 0.5, 0.9):
        place = grid[1:][torch.searchsorted(share, quantile)]
        assert (values < place).float().mean() == pytest.approx(quantile, abs=0.02)


@pytest.mark.parametrize("strength", [1.5, 3.0])
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_a_direction_above_the_threshold_is_found_as_theory_says(m, n, strength):
    """Its value less what noise adds, and the overlap of both vectors, as means over draws."""
    s = 0.5
    x = strength * s * detection_threshold(m, n)
    level = {"rows": m, "columns": n, "noise_std": s}
    draws = [spiked(x, m, n, s=s, seed=3 * seed) for seed in range(8)]
    leading = torch.stack([values[0] for *_, values in draws])
    clean = shrink_singular_values(leading, rule="operator", **level)
    assert clean.mean().item() == pytest.approx(x, rel=0.04)
    for side, estimated in enumerate(overlaps(leading, **level)):
        true = sum(draw[side] for draw in draws) / len(draws)
        assert estimated.mean().item() == pytest.approx(true, abs=0.05)


@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_a_direction_below_the_threshold_leaves_no_trace(m, n):
    s = 0.5
    left, right, values = spiked(0.6 * s * detection_threshold(m, n), m, n, s=s, seed=20)
    assert values[0] < s * detection_gate(m, n)
    assert left * right < 0.05


def test_overlaps_name_the_vectors_of_the_rows_first():
    """Known values at 400 x 800 and x = 1.3 and 2; a matrix that stands swaps the two."""
    for x, of_rows, of_columns in ((1.3, 0.637, 0.518), (2.0, 0.861, 0.775)):
        y = math.sqrt((x + 1 / x) * (x + 0.5 / x)) * math.sqrt(800)
        for shape, expected in (
            ((400, 800), (of_rows, of_columns)),
            ((800, 400), (of_columns, of_rows)),
        ):
            found = overlaps(torch.tensor([y]), rows=shape[0], columns=shape[1], noise_std=1.0)
            assert [c.item() ** 2 for c in found] == pytest.approx(expected, abs=1e-3)


def test_the_recovery_batch_size_is_where_a_direction_begins_to_be_detected():
    m, n, sigma, x = 384, 384, 2.35, 0.02
    size = recovery_batch_size(x, rows=m, columns=n, noise_multiplier=sigma)
    assert size == math.floor(2.35 * 19.5959 / 0.02) + 1
    assert x > sigma / size * detection_threshold(m, n)
    assert not x > sigma / (size - 1) * detection_threshold(m, n)
    shape = {"rows": m, "columns": n, "noise_multiplier": sigma}
    assert recovery_batch_size(x, max_grad_norm=0.1, **shape) == pytest.approx(size / 10, abs=1)
    averaged = recovery_batch_size(x, responses=[lookahead(0.95)], **shape)
    assert size / averaged == pytest.approx(5.74, abs=0.02)
    # a momentum that does not average, but adds up, is the same average in other units
    assert recovery_batch_size(x, responses=[heavy_ball(0.9)], **shape) == pytest.approx(
        size * math.sqrt(0.1 / 1.9), rel=1e-2
    )
    # the paper's condition, for a gap of x, asks for at least twice as much
    assert sigma * noise_edge(m, n) / x >= 2 * (size - 1)
    with pytest.raises(ValueError, match="signal=0 must be > 0"):
        recovery_batch_size(0, **shape)


def test_effective_rank_counts_equal_values_and_weighs_others():
    assert effective_rank(torch.tensor([2.0] * 7 + [0.0] * 5)) == pytest.approx(7)
    assert effective_rank(torch.zeros(3)) == 0
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert effective_rank(torch.tensor([3.0, 1.0])) == pytest.approx(math.exp(entropy))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: detection_gate(3, 0), r"columns=0 must be >= 1"),
        (lambda: detection_gate(3, 3, false_alarm=0.5), r"false_alarm=0.5 must be one of"),
        (
            lambda: shrink_singular_values(torch.ones(1), rows=1, columns=1, noise_std=-1.0),
            r"noise_std=-1.0 must be a finite",
        ),
        (
            lambda: shrink_singular_values(
                torch.ones(1), rows=1, columns=1, noise_std=1.0, rule="l1"
            ),
            r"rule='l1' must be one of",
        ),
    ],
)
def test_misuse_is_refused_by_name_and_range(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("beta", "y", "frobenius", "operator", "nuclear"),
    [
        (1.0, 3.0, 2.236068, 2.618034, 1.854102),
        (1.0, 2.5, 1.5, 2.0, 1.0),
        (1.0, 2.1, 0.640312, 1.370156, 0.0),
        (0.25, 3.0, 2.561738, 2.778058, 2.381756),
        (0.25, 2.0, 1.280869, 1.629684, 0.974061),
        (0.25, 1.6, 0.528892, 1.038322, 0.047346),
    ],
)
def test_shrinkers_have_their_known_values(beta, y, frobenius, operator, nuclear):
    """In the units of a noise of 0.5 an entry; a 1/4 matrix may stand or lie."""
    n, s = 400, 0.5
    m = int(beta * n)
    values = torch.tensor([y * s * n**0.5])
    for rule, expected in (("frobenius", frobenius), ("operator", operator), ("nuclear", nuclear)):
        for rows, columns in ((m, n), (n, m)):
            shrunk = shrink_singular_values(
                values, rows=rows, columns=columns, noise_std=s, rule=rule
            )
            assert shrunk.item() / (s * n**0.5) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(
    ("m", "n", "threshold"),
    [(300, 300, 2.309401), (150, 300, 1.978599), (100, 300, 1.838544), (75, 300, 1.758029)],
)
def test_the_hard_threshold_is_at_its_known_value(m, n, threshold):
    s = 0.1
    values = torch.tensor([threshold * (1 + 1e-5), threshold * (1 - 1e-5)]).double() * s * n**0.5
    kept = shrink_singular_values(values, rows=m, columns=n, noise_std=s, rule="hard")
    assert kept[0] == values[0]
    assert kept[1] == 0


@pytest.mark.parametrize(("beta", "y", "weight"), [(1.0, 3.0, 0.854102), (0.25, 2.0, 0.785962)])
def test_weights_of_the_clean_polar_factor_have_their_known_values(beta, y, weight):
    values = torch.tensor([y * 20.0])
    weights = polar_weights(values, rows=int(400 * beta), columns=400, noise_std=1.0)
    assert weights.item() == pytest.approx(weight, abs=2e-6)


@few
@given(y=st.floats(0, 50), beta=st.floats(0.01, 1))
def test_shrinking_never_grows_a_value_and_orders_the_rules(y, beta):
    n = 1000
    m = max(1, int(beta * n))
    shrunk = {
        rule: shrink_singular_values(
            torch.tensor([y * n**0.5]), rows=m, columns=n, noise_std=1.0, rule=rule
        ).item()
        for rule in SHRINKERS
    }
    assert 0 <= shrunk["nuclear"] <= shrunk["frobenius"] + 1e-9
    assert shrunk["frobenius"] <= shrunk["operator"] + 1e-9
    assert shrunk["operator"] <= y * n**0.5 + 1e-9
    weight = polar_weights(torch.tensor([y * n**0.5]), rows=m, columns=n, noise_std=1.0).item()
    assert weight == pytest.approx(  # the identity: Frobenius = x c_L c_R
        shrunk["frobenius"] / shrunk["operator"] if shrunk["operator"] else 0.0, abs=1e-9
    )


@pytest.mark.parametrize("false_alarm", [0.05, 0.01])
def test_pure_noise_clears_the_gate_as_often_as_said(false_alarm):
    draws = torch.linalg.matrix_norm(gaussian(3000, 24, 48, seed=1), ord=2)
    alarms = (draws > detection_gate(24, 48, false_alarm=false_alarm)).float().mean().item()
    assert abs(alarms - false_alarm) < 4 * (false_alarm / 3000) ** 0.5
    assert (draws > 24**0.5 + 48**0.5).float().mean() > 0.1  # the bare edge does not do


def test_the_clean_values_are_recovered_from_a_noisy_matrix():
    m, n, s = 200, 400, 0.01
    clean = torch.tensor([3.0, 2.0, 1.5]) * s * n**0.5
    U, V = orthogonal(m, seed=1)[:, :3], orthogonal(n, seed=2)[:, :3]
    noisy = (U * clean) @ V.mT + s * gaussian(m, n, seed=3)
    found = shrink_singular_values(
        torch.linalg.svdvals(noisy), rows=m, columns=n, noise_std=s, rule="operator"
    )
    torch.testing.assert_close(found[:3].float(), clean, rtol=0.05, atol=0)
    assert (found[3:] < 1.05 * s * detection_threshold(m, n)).all()

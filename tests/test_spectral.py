"""Laws, oracles and known values of the spectral maps."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dpmuon.random_matrix import (
    SHRINKERS,
    detection_gate,
    detection_threshold,
    polar_weights,
    shrink_singular_values,
)
from hf_dpmuon.spectral import (
    COEFFICIENTS,
    NOISE_AWARE_MAPS,
    SPECTRAL_MAPS,
    newton_schulz,
    polar_factor,
    scaled_polar,
    spectral_map,
    spectral_norm,
)

few = settings(max_examples=25, deadline=None, derandomize=True)
shapes = st.tuples(st.integers(1, 24), st.integers(1, 24))
seeds = st.integers(0, 2**32 - 1)

# Where a singular value lands after five steps, once normalised and divided by the safety factor.
LANDING = {
    "quintic": {
        1e-4: 0.0485, 1e-3: 0.4705, 3e-3: 1.1104, 1e-2: 0.6989, 2e-2: 0.6818, 5e-2: 0.7581,
        0.1: 0.7121, 0.3: 1.0796, 0.5: 0.7654, 1.0: 0.6964,
    },
    "quintic_tuned": {
        1e-4: 0.0493, 1e-3: 0.4750, 3e-3: 1.0751, 1e-2: 1.0180, 2e-2: 1.0188, 5e-2: 1.0106,
        0.1: 1.0190, 0.3: 0.9962, 0.5: 0.9859, 1.0: 0.9783,
    },
    "polar_express": {
        1e-4: 0.0985, 1e-3: 0.8524, 3e-3: 0.9574, 1e-2: 1.0604, 2e-2: 0.9370, 5e-2: 0.9629,
        0.1: 0.8811, 0.3: 0.9043, 0.5: 0.9272,
    },
}  # fmt: skip
INTERVAL = {  # image of [0.01, 1]
    "quintic": (0.6818, 1.1344),
    "quintic_tuned": (0.9778, 1.0318),
    "polar_express": (0.8764, 1.1236),
}
SLOPE = {"quintic": 484.876, "quintic_tuned": 492.750, "polar_express": 986.03 / 1.01}  # at 0


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def orthogonal(n: int, seed: int) -> torch.Tensor:
    return torch.linalg.qr(gaussian(n, n, seed=seed))[0]


def landing(values: list[float], name: str, *, steps: int = 5) -> torch.Tensor:
    """Image of normalised singular values, read off a diagonal matrix of unit Frobenius norm."""
    values_and_rest = [*values, (1 - sum(v * v for v in values)) ** 0.5]
    return newton_schulz(torch.diag(torch.tensor(values_and_rest)), coefficients=name, steps=steps)


# Landing of each table


@pytest.mark.parametrize("name", LANDING)
def test_singular_values_land_on_the_known_values(name):
    for value, expected in LANDING[name].items():
        if value < 1.0:
            image = landing([value * COEFFICIENTS[name].safety], name)[0, 0].item()
        else:
            image = newton_schulz(torch.eye(1), coefficients=name).item()
        assert image == pytest.approx(expected, abs=2e-4), value


@pytest.mark.parametrize("name", INTERVAL)
def test_the_landing_interval_is_reached_and_not_left(name):
    grid = np.geomspace(0.01, 0.999, 400)
    images = torch.tensor([landing([float(v)], name)[0, 0].item() for v in grid])
    low, high = INTERVAL[name]
    assert images.min() == pytest.approx(low, abs=2e-3)
    assert images.max() == pytest.approx(high, abs=2e-3)


@pytest.mark.parametrize("name", SLOPE)
def test_slope_at_zero_is_the_product_of_the_linear_coefficients(name):
    assert landing([1e-6], name)[0, 0].item() / 1e-6 == pytest.approx(SLOPE[name], rel=1e-3)


def test_keller_never_converges_however_many_steps():
    for steps in (5, 6, 10):
        grid = np.linspace(0.05, 0.95, 50)
        images = torch.stack([landing([v], "quintic", steps=steps)[0, 0] for v in grid])
        assert (images - 1).abs().max() > 0.2
        assert ((images >= 0.6818) & (images <= 1.1344)).all()


def test_a_diagonal_matrix_is_mapped_entry_by_entry():
    diagonal = torch.tensor([1.0, 0.01, 0.001])
    image = newton_schulz(torch.diag(diagonal)).diagonal()
    normalised = (diagonal / diagonal.norm()).tolist()
    alone = torch.stack([newton_schulz(torch.diag(torch.tensor(
        [v, (1 - v * v) ** 0.5])))[0, 0] for v in normalised])  # fmt: skip
    torch.testing.assert_close(image, alone, rtol=1e-4, atol=1e-5)


# Laws


@few
@given(shape=shapes, seed=seeds)
def test_transposing_and_mapping_commute(shape, seed):
    X = gaussian(*shape, seed=seed)
    torch.testing.assert_close(newton_schulz(X.mT), newton_schulz(X).mT, rtol=1e-4, atol=1e-4)


@few
@given(shape=shapes, seed=seeds)
def test_rotating_and_mapping_commute(shape, seed):
    X = gaussian(*shape, seed=seed)
    Q, P = orthogonal(shape[0], seed=seed + 1), orthogonal(shape[1], seed=seed + 2)
    torch.testing.assert_close(
        newton_schulz(Q @ X @ P), Q @ newton_schulz(X) @ P, rtol=1e-3, atol=2e-3
    )


@few
@given(shape=shapes, seed=seeds, exponent=st.integers(-60, 60))
def test_scale_is_ignored(shape, seed, exponent):
    """Also where a matrix of private gradients is tiny: powers of two change no bit."""
    X = gaussian(*shape, seed=seed)
    assert torch.equal(newton_schulz(X * 2.0**exponent), newton_schulz(X))


EXTREMES = [2.0**-149, 1e-40, 1e-30, 2.0**-120, 1e-25, 1e-19, 1e19, 1e25, 2.0**120]


@pytest.mark.parametrize("size", EXTREMES)
@pytest.mark.parametrize("name", ["scaled_polar", *sorted(SPECTRAL_MAPS)])
def test_every_map_is_finite_and_of_its_size_at_any_scale(name, size):
    """Squares of such entries are zero or infinite in float32: no norm may be taken of them."""
    X = torch.stack([torch.zeros(6, 9), size * gaussian(6, 9).sign(), size * torch.ones(6, 9)])
    image = scaled_polar(X) / size if name == "scaled_polar" else spectral_map(
        X, name=name, noise_std=0.0
    )  # fmt: skip
    assert image.isfinite().all()
    assert torch.equal(image[0], X[0])
    unit = torch.stack([gaussian(6, 9).sign(), torch.ones(6, 9)])
    expected = scaled_polar(unit) if name == "scaled_polar" else spectral_map(
        unit, name=name, noise_std=0.0
    )  # fmt: skip
    if size > 1e-38 or name != "scaled_polar":  # whose result is too small to hold its digits
        torch.testing.assert_close(image[1:], expected, rtol=1e-3, atol=1e-3)


@few
@given(shape=shapes, seed=seeds, exponent=st.integers(-1000, 1000))
def test_a_double_precision_matrix_need_not_fit_into_single_precision(shape, seed, exponent):
    X = gaussian(*shape, seed=seed).double()
    image = newton_schulz(X * 2.0**exponent)
    torch.testing.assert_close(image, newton_schulz(X), rtol=1e-5, atol=1e-5)
    assert image.dtype is torch.float64


@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3), (0, 4, 3)])
@pytest.mark.parametrize("name", ["scaled_polar", *sorted(SPECTRAL_MAPS)])
def test_every_map_of_nothing_is_nothing(name, shape):
    X = torch.zeros(shape)
    if name == "scaled_polar":
        assert scaled_polar(X, noise_std=1.0).shape == X.shape
    else:
        assert spectral_map(X, name=name, noise_std=1.0).shape == X.shape


@few
@given(shape=shapes, seed=seeds, batch=st.integers(1, 5))
def test_a_stack_is_mapped_as_its_matrices_are(shape, seed, batch):
    X = gaussian(batch, *shape, seed=seed)
    looped = torch.stack([newton_schulz(matrix) for matrix in X])
    torch.testing.assert_close(newton_schulz(X), looped, rtol=1e-4, atol=1e-4)


def test_a_rank_one_matrix_keeps_its_directions():
    u, v = torch.nn.functional.normalize(gaussian(2, 12), dim=1)
    image = newton_schulz(3e-4 * torch.outer(u, v))
    torch.testing.assert_close(image, 0.6964 * torch.outer(u, v), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (2, 4, 4), (0, 3), (2, 0, 3)])
def test_zero_and_empty_matrices_give_zero(shape):
    X = torch.zeros(shape)
    assert torch.equal(newton_schulz(X), X)
    if X.numel():
        assert torch.equal(polar_factor(X), X)


def test_a_zero_matrix_in_a_stack_leaves_the_others_alone():
    X = torch.stack([gaussian(4, 6), torch.zeros(4, 6)])
    image = newton_schulz(X)
    assert torch.equal(image[1], torch.zeros(4, 6))
    torch.testing.assert_close(image[0], newton_schulz(X[0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_the_input_is_neither_changed_nor_shared(dtype, shape):
    """torch.optim.Muon 2.14 normalises a bfloat16 momentum buffer in place (PR 190597)."""
    X = gaussian(*shape).to(dtype)
    before = X.clone()
    for image in (newton_schulz(X), polar_factor(X)):
        assert torch.equal(X, before)
        assert image.dtype is dtype
        assert image.shape == X.shape
        assert image.untyped_storage().data_ptr() != X.untyped_storage().data_ptr()


def test_half_precision_input_is_normalised_in_single_precision():
    """The norm of this matrix, 1e-4 an entry in bfloat16, loses nothing to the narrow type."""
    X = (1e-4 * gaussian(32, 48)).bfloat16()
    expected = newton_schulz(X.float())
    torch.testing.assert_close(newton_schulz(X).float(), expected, rtol=1e-2, atol=1e-2)


def test_newton_schulz_approaches_the_polar_factor():
    X = gaussian(96, 384)
    image, exact = newton_schulz(X), polar_factor(X)
    cosine = torch.nn.functional.cosine_similarity(image.flatten(), exact.flatten(), dim=0)
    assert cosine > 0.98
    torch.testing.assert_close(exact @ exact.mT, torch.eye(96), rtol=0, atol=1e-4)
    assert (image - exact).abs().max() > 1e-3  # the iteration is not the decomposition


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: newton_schulz(torch.ones(3)), r"shape \(3,\) must have at least 2"),
        (lambda: newton_schulz(torch.ones(3, 3), steps=0), r"steps=0 must be >= 1"),
        (lambda: newton_schulz(torch.ones(3, 3), coefficients="kelly"), r"'kelly' must be one of"),
        (lambda: newton_schulz(torch.ones(3, 3), dtype=torch.float16), r"float16 must be"),
        (lambda: spectral_norm(torch.ones(3, 3), iterations=0), r"iterations=0 must be >= 1"),
        (lambda: spectral_map(torch.ones(3, 3), name="svdd"), r"'svdd' must be one of"),
        (lambda: spectral_map(torch.ones(3, 3), name="selective"), r"'selective' needs noise_std"),
    ],
)
def test_misuse_is_refused_by_name_and_range(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_eight_steps_of_polar_express_converge():
    for value in (1e-3, 1e-2, 0.1, 0.9):
        assert landing([value], "polar_express", steps=8)[0, 0] == pytest.approx(1, abs=1e-4)


@few
@given(
    rows=st.integers(1, 24),
    aspect=st.integers(2, 6),
    steps=st.integers(1, 9),
    name=st.sampled_from(sorted(COEFFICIENTS)),
    seed=seeds,
)
def test_the_gram_form_of_a_wide_matrix_is_the_textbook_iteration(rows, aspect, steps, name, seed):
    X = gaussian(rows, rows * aspect, seed=seed)
    expected = X.double() / (COEFFICIENTS[name].safety * X.double().norm())
    for a, b, c in COEFFICIENTS[name].triples(steps):
        A = expected @ expected.mT
        expected = a * expected + (b * A + c * A @ A) @ expected
    image = newton_schulz(X, steps=steps, coefficients=name)
    torch.testing.assert_close(image.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(513, 520), (301, 700), (512, 1100)])
@pytest.mark.parametrize("name", COEFFICIENTS)
def test_large_matrices_are_mapped_by_the_same_iteration(shape, name):
    """Products of which only three of four blocks are computed, on values over six decades."""
    rank = min(shape)
    U, V = (torch.linalg.qr(gaussian(n, rank, seed=n))[0] for n in shape)
    S = torch.logspace(0, -6, rank)
    X = (U * S) @ V.mT
    expected = X.double() / (COEFFICIENTS[name].safety * X.double().norm())
    expected = expected if shape[0] <= shape[1] else expected.mT
    for a, b, c in COEFFICIENTS[name].triples(5):
        A = expected @ expected.mT
        expected = a * expected + (b * A + c * A @ A) @ expected
    image = newton_schulz(X, coefficients=name)
    image = image if shape[0] <= shape[1] else image.mT
    torch.testing.assert_close(image.double(), expected, rtol=0, atol=2e-3)


def test_the_iteration_may_run_in_bfloat16():
    X = gaussian(64, 96)
    image = newton_schulz(X, dtype=torch.bfloat16)
    assert image.dtype is torch.float32
    exact = newton_schulz(X)
    assert torch.nn.functional.cosine_similarity(image.flatten(), exact.flatten(), dim=0) > 0.995
    assert not torch.equal(image, exact)


# Power iteration


@few
@given(shape=shapes, seed=seeds, gap=st.floats(1.2, 10))
def test_power_iteration_finds_a_value_that_stands_out(shape, seed, gap):
    rank = min(shape)
    U, V = (orthogonal(n, seed=seed + n)[:, :rank] for n in shape)
    S = torch.cat([torch.tensor([gap]), torch.rand(rank - 1)])
    assert spectral_norm((U * S) @ V.mT).item() == pytest.approx(gap, rel=1e-3)


@pytest.mark.parametrize("start", range(10))
def test_power_iteration_leaves_the_block_that_the_longest_row_lies_in(start):
    """Rows and axes are eigenvectors' own blocks here: from them the rest is never reached."""
    X = torch.zeros(10, 10)
    X[start, start] = 1.0
    others = [i for i in range(10) if i != start]
    X[torch.meshgrid(torch.tensor(others), torch.tensor(others[:9]), indexing="ij")] = 0.9
    assert spectral_norm(X).item() == pytest.approx(8.1, rel=1e-5)
    rank_one = torch.zeros(10, 10)
    rank_one[start, start] = 1.0
    rank_one[others, others[0]] = 0.9
    assert spectral_norm(rank_one).item() == pytest.approx(2.7, rel=1e-5)
    assert spectral_norm(rank_one.mT).item() == pytest.approx(2.7, rel=1e-5)


def test_power_iteration_stays_just_below_the_norm_of_noise():
    X = gaussian(4, 96, 128)
    exact = torch.linalg.matrix_norm(X, ord=2)
    found = spectral_norm(X).flatten()
    assert (found <= exact * 1.00001).all()
    assert (found > 0.97 * exact).all()
    assert torch.equal(spectral_norm(torch.zeros(2, 3)), torch.zeros(1, 1))
    torch.testing.assert_close(spectral_norm(X.mT), spectral_norm(X))


# Maps by name


def test_every_map_gives_zero_for_zero_and_only_there():
    X = torch.stack([torch.zeros(6, 9), 1e-3 * gaussian(6, 9)])
    for name in SPECTRAL_MAPS:
        image = spectral_map(X, name=name, noise_std=1e-3)
        assert torch.equal(image[0], X[0]), name
        assert image[1].norm() > 0.5, name
        assert image.isfinite().all(), name


@pytest.mark.parametrize("name", sorted(NOISE_AWARE_MAPS))
def test_where_nothing_is_detectable_the_filtered_gradient_is_the_direction(name):
    X = 1e-3 * gaussian(48, 64)
    image = spectral_map(X, name=name, noise_std=1.1e-3)
    norm = 48**0.5 if name == "selective" else 1.0
    torch.testing.assert_close(image, X * norm / X.norm(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(48, 48), (24, 96), (96, 24)])
@pytest.mark.parametrize("name", sorted(NOISE_AWARE_MAPS))
def test_pure_noise_takes_a_step_of_the_stated_norm(name, shape):
    """In all but the gate's 1 % of draws it is the filtered gradient; never a shorter one."""
    s = 1e-3
    X = s * gaussian(400, *shape, seed=5)
    images = spectral_map(X, name=name, noise_std=s)
    norm = min(shape) ** 0.5 if name == "selective" else 1.0
    sizes = torch.linalg.matrix_norm(images)
    raw = X * norm / torch.linalg.matrix_norm(X, keepdim=True)
    is_raw = (images - raw).abs().amax(dim=(-2, -1)) < 1e-5
    assert is_raw.float().mean() >= 0.98
    torch.testing.assert_close(sizes[is_raw], torch.full_like(sizes[is_raw], norm))
    assert (sizes > 0.8 * norm).all()
    bare = s * (shape[0] ** 0.5 + shape[1] ** 0.5)
    above = torch.linalg.matrix_norm(X, ord=2) > bare
    assert above.float().mean() > 0.08  # without the gate these would be taken for a signal
    assert is_raw[above].float().mean() > 0.8


def test_pure_noise_takes_a_scaled_step_of_what_noise_can_hide():
    s, m, n = 1e-3, 32, 64
    X = s * gaussian(400, m, n, seed=6)
    sizes = torch.linalg.matrix_norm(scaled_polar(X, noise_std=s), ord=2)
    stated = s * detection_threshold(m, n)
    assert ((sizes / stated - 1).abs() < 0.05).float().mean() >= 0.98


def test_a_known_noise_polar_that_is_unsure_is_stretched_to_norm_one():
    """One direction just above the gate has a weight near 0.5; its step is not half as long."""
    m, n, s = 64, 96, 1e-3
    u, v = torch.nn.functional.normalize(gaussian(2, n, seed=3), dim=1)
    u = torch.nn.functional.normalize(u[:m], dim=0)
    y = 1.01 * s * detection_gate(m, n)
    X = y * torch.outer(u, v)
    weight = polar_weights(torch.tensor([y]), rows=m, columns=n, noise_std=s).item()
    assert 0.05 < weight < 0.7
    image = spectral_map(X, name="known_noise_polar", noise_std=s)
    torch.testing.assert_close(image, torch.outer(u, v), rtol=1e-3, atol=1e-4)


def test_scaled_polar_has_the_size_of_the_operator_shrinker():
    _, noisy = signal_in_noise()
    image = scaled_polar(noisy, noise_std=1e-3)
    top = torch.linalg.svdvals(noisy)[:1]
    sizes = {
        rule: shrink_singular_values(top, rows=96, columns=128, noise_std=1e-3, rule=rule).item()
        for rule in SHRINKERS
    }
    scale = image.norm() / newton_schulz(noisy).norm()
    assert scale.item() == pytest.approx(sizes["operator"], rel=1e-3)
    assert scale.item() != pytest.approx(sizes["frobenius"], rel=5e-3)
    torch.testing.assert_close(image, newton_schulz(noisy) * scale, rtol=1e-3, atol=1e-6)


def signal_in_noise(rank=3, *, size=1.0, m=96, n=128, s=1e-3):
    U, V = orthogonal(m, seed=1)[:, :rank], orthogonal(n, seed=2)[:, :rank]
    clean = torch.linspace(8, 5, rank) * s * n**0.5 * size
    return U @ V.mT, (U * clean) @ V.mT + s * gaussian(m, n, seed=3)


@pytest.mark.parametrize("name", ["known_noise_polar", "hard_threshold", "shrink_frobenius"])
def test_a_known_noise_level_aligns_the_direction_with_the_clean_one(name):
    """Plain orthogonalisation gives each of 93 directions of noise the weight of a signal's."""
    clean, noisy = signal_in_noise()
    cosine = torch.nn.functional.cosine_similarity
    image = spectral_map(noisy, name=name, noise_std=1e-3)
    plain = spectral_map(noisy, name="svd")
    assert cosine(image.flatten(), clean.flatten(), dim=0) > 0.9
    assert cosine(plain.flatten(), clean.flatten(), dim=0) < 0.3
    assert torch.linalg.matrix_rank(image, rtol=1e-3) == 3
    assert torch.linalg.matrix_norm(image, ord=2) <= 1.0001


def test_without_noise_the_known_noise_polar_is_the_polar_factor():
    X = gaussian(5, 9)
    image = spectral_map(X, name="known_noise_polar", noise_std=0.0)
    torch.testing.assert_close(image, polar_factor(X), rtol=1e-5, atol=1e-5)
    X = X @ torch.diag(torch.linspace(1, 3, 9))
    for name in ("shrink_frobenius", "shrink_operator", "hard_threshold"):
        image = spectral_map(X, name=name, noise_std=0.0)
        torch.testing.assert_close(image, X / torch.linalg.matrix_norm(X, 2), rtol=1e-4, atol=1e-5)


def test_selective_orthogonalises_a_matrix_exactly_where_its_signal_clears_the_gate():
    _, strong = signal_in_noise()
    _, weak = signal_in_noise(size=0.05)
    image = spectral_map(torch.stack([strong, weak]), name="selective", noise_std=1e-3)
    torch.testing.assert_close(image[0], newton_schulz(strong), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(image[1], weak * 96**0.5 / weak.norm(), rtol=1e-4, atol=1e-4)


def test_selective_asks_the_gate_and_not_the_bare_edge():
    m, n, s = 64, 96, 1e-3
    u, v = torch.nn.functional.normalize(gaussian(2, n, seed=3), dim=1)
    u = torch.nn.functional.normalize(u[:m], dim=0)
    edge, gate = m**0.5 + n**0.5, detection_gate(m, n)
    for y, orthogonalised in ((0.5 * (edge + gate), False), (1.01 * gate, True)):
        X = y * s * torch.outer(u, v) + 1e-8 * gaussian(m, n, seed=4)
        image = spectral_map(X, name="selective", noise_std=s)
        expected = newton_schulz(X) if orthogonalised else X * m**0.5 / X.norm()
        torch.testing.assert_close(image, expected, rtol=1e-3, atol=1e-3)


@few
@given(shape=shapes, seed=seeds, name=st.sampled_from(sorted(SPECTRAL_MAPS)))
def test_every_map_treats_a_stack_and_a_transpose_as_its_matrices(shape, seed, name):
    X = gaussian(2, *shape, seed=seed)
    kwargs = {"name": name, "noise_std": 0.3}
    image = spectral_map(X, **kwargs)
    looped = torch.stack([spectral_map(matrix, **kwargs) for matrix in X])
    torch.testing.assert_close(image, looped, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(spectral_map(X.mT, **kwargs), image.mT, rtol=1e-3, atol=1e-3)


def test_every_table_says_where_it_comes_from():
    for table in COEFFICIENTS.values():
        assert table.source

"""Laws, oracles and known values of the spectral maps."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dpmuon.spectral import COEFFICIENTS, newton_schulz, polar_factor

few = settings(max_examples=25, deadline=None, derandomize=True)
shapes = st.tuples(st.integers(1, 24), st.integers(1, 24))
seeds = st.integers(0, 2**32 - 1)

# Where a singular value of the normalised matrix lands after five steps.
LANDING = {
    "keller": {
        1e-4: 0.0485, 1e-3: 0.4705, 3e-3: 1.1104, 1e-2: 0.6989, 2e-2: 0.6818, 5e-2: 0.7581,
        0.1: 0.7121, 0.3: 1.0796, 0.5: 0.7654, 1.0: 0.6964,
    },
}  # fmt: skip
INTERVAL = {"keller": (0.6818, 1.1344)}  # image of [0.01, 1]
SLOPE = {"keller": 484.876}  # at 0


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
            image = landing([value], name)[0, 0].item()
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
        images = torch.stack([landing([v], "keller", steps=steps)[0, 0] for v in grid])
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
    ],
)
def test_misuse_is_refused_by_name_and_range(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_every_table_says_where_it_comes_from():
    for table in COEFFICIENTS.values():
        assert table.source

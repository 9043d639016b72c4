"""Case 206: norms are right, and no sample moves a sum by more than C, at any scale of float32."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import tiny_timm_vit, tiny_vit
from torch import Tensor, nn

from hf_dpmuon.grad_sample import ENGINES, PerSampleEngine
from hf_dpmuon.grad_sample.engine import row_norms
from hf_dpmuon.mechanism import GaussianMechanism, clip_factors

all_engines = pytest.mark.parametrize("engine_class", ENGINES.values(), ids=ENGINES)
FAST = [engine for name, engine in ENGINES.items() if name != "hooks"]
Engine = type[PerSampleEngine]
LARGEST = torch.finfo(torch.float32).max
MAGNITUDES = st.floats(-40, 38)


class Scaled(nn.Module):
    """Channels times a bare parameter, plus another."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 1, 12))
        self.shift = nn.Parameter(torch.zeros(1, 16, 12))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


def as_image(x: Tensor) -> Tensor:
    return x.view(len(x), 3, 8, 8)


class Image(nn.Module):
    """A layer that takes images."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(as_image(x)).flatten(1)


class First(nn.Module):
    """A layer that takes one token."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, 0])


# Each gradient is a sum of products of inputs (B, 16, 12) and gradients of outputs.
LINEAR_KINDS: dict[str, Callable[[], nn.Module]] = {
    "tokens": lambda: nn.Linear(12, 24),
    "many outputs": lambda: nn.Linear(12, 500),
    "wide": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 30)),
    "one token": lambda: First(nn.Linear(12, 7)),
    "patches": lambda: Image(nn.Conv2d(3, 8, 4, 4)),
    "overlapping": lambda: Image(nn.Conv2d(3, 5, 3, padding=1)),
    "groups": lambda: Image(nn.Conv2d(3, 6, 3, groups=3)),
    "signals": lambda: nn.Conv1d(16, 4, 3),
    "bare": Scaled,
}
NORM_KINDS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(12),
    "GroupNorm": lambda: Image(nn.GroupNorm(3, 3)),
}


def rows(seed: int, exponent: float, spread: float, *shape: int) -> Tensor:
    """One row of this magnitude, its tokens of unequal ones, and one of magnitude 1."""
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> Tensor:
        return 2 * torch.rand(2, *size, generator=generator, dtype=torch.float64) - 1

    away = random(shape[0], *(1 for _ in shape[1:])) * spread
    powers = (exponent - away.abs()).clamp(-44, 38)
    powers[1] = 0.0
    return (random(*shape) * 10.0**powers).clamp(-LARGEST, LARGEST).float()


def gradients(model: nn.Module, x: Tensor, g: Tensor) -> list[dict[str, Tensor]]:
    """Of each row, in float64."""
    reference = model.double()
    result = []
    for i in range(2):
        reference.zero_grad()
        (reference(x[i : i + 1].double()) * g[i : i + 1].double()).sum().backward()
        result.append({n: p.grad.clone() for n, p in reference.named_parameters()})
    model.zero_grad()
    model.float()
    return result


def norm(tensors: Any) -> float:
    return math.hypot(*(float(t.double().norm()) for t in tensors))


def clipped_sum(
    engine: PerSampleEngine, x: Tensor, g: Tensor, bound: float, **settings: Any
) -> dict[str, Tensor]:
    mechanism = GaussianMechanism(
        engine,
        noise_multiplier=0.0,
        max_grad_norm=bound,
        sample_rate=1.0,
        num_units=1,
        noise_key=b"",
        **settings,
    )
    mechanism.begin()
    (engine(x) * g).sum().backward()
    mechanism.accumulate()
    mechanism.release(step=1)
    total = {n: p.grad.clone() for n, p in engine._module.named_parameters()}
    engine.discard()
    return total


def check(
    engine_class: Engine,
    kind: Callable[[], nn.Module],
    x: Tensor,
    g_of: Callable[..., Tensor],
    bound: float,
    clipping: str,
) -> None:
    torch.manual_seed(0)
    model = kind()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1e-3)
        g = g_of(*model(torch.zeros_like(x)).shape[1:])
    truth = gradients(model, x, g)
    engine = engine_class(model.train())
    (engine(x) * g).sum().backward()
    norms = engine.per_unit_norms()
    engine.discard()
    for name, said in norms.items():
        for i, of_row in enumerate(truth):
            true = float(of_row[name].norm())
            if true < LARGEST / 1e3:  # sums on the way may overflow a little earlier
                assert abs(float(said[i]) - true) <= 1e-5 * true + 1e-40, (name, i)
            else:
                assert not said[i].isfinite() or abs(float(said[i]) - true) <= 1e-5 * true
    both = clipped_sum(engine, x, g, bound, clipping=clipping)
    alone = clipped_sum(engine, x[1:], g[1:], bound, clipping=clipping)
    moved = norm(both[n].double() - alone[n].double() for n in both)
    assert moved <= bound * (1 + 1e-5) + 1e-6 * norm(alone.values())
    exact = norm(truth[0].values())
    if clipping == "flat" and bound * 1e-3 < exact < min(1e29 * bound, LARGEST / 1e3):
        wanted = min(1.0, bound / exact) * exact
        assert moved == pytest.approx(wanted, rel=1e-4, abs=1e-5 * norm(alone.values()))


scales = given(
    seed=st.integers(0, 2**31),
    inputs=MAGNITUDES,
    outputs=MAGNITUDES,
    spread=st.sampled_from([0.0, 3.0, 30.0]),
    bound=st.sampled_from([1e-3, 0.1, 10.0]),
    clipping=st.sampled_from(["flat", "per_layer", "automatic"]),
)
SETTINGS = settings(deadline=None, max_examples=20)


@all_engines
@pytest.mark.parametrize("kind", LINEAR_KINDS.values(), ids=LINEAR_KINDS)
@scales
@example(0, 17.8, -18.5, 0.0, 0.1, "flat")
@example(0, 38.0, -38.0, 0.0, 0.1, "automatic")
@example(0, -40.0, 38.0, 0.0, 10.0, "automatic")
@example(0, 38.0, 38.0, 0.0, 0.1, "flat")
@example(0, 38.0, 0.0, 0.0, 1e-3, "per_layer")
@example(0, -40.0, -40.0, 0.0, 0.1, "flat")
@example(0, 20.0, 18.0, 30.0, 0.1, "flat")
@SETTINGS
def test_k206_norms_and_sums_hold_at_any_scale(
    engine_class: Engine,
    kind: Callable[[], nn.Module],
    seed: int,
    inputs: float,
    outputs: float,
    spread: float,
    bound: float,
    clipping: str,
) -> None:
    x = rows(seed, inputs, spread, 16, 12)

    def g_of(*shape: int) -> Tensor:
        return rows(seed + 1, outputs, spread, *shape)

    check(engine_class, kind, x, g_of, bound, clipping)


@all_engines
@pytest.mark.parametrize("kind", NORM_KINDS.values(), ids=NORM_KINDS)
@given(seed=st.integers(0, 2**31), outputs=MAGNITUDES, clipping=st.sampled_from(["flat"]))
@SETTINGS
def test_k206_gradients_of_norms_hold_at_any_scale(
    engine_class: Engine, kind: Callable[[], nn.Module], seed: int, outputs: float, clipping: str
) -> None:
    x = rows(seed, 0.0, 0.0, 16, 12)
    check(engine_class, kind, x, lambda *s: rows(seed + 1, outputs, 3.0, *s), 0.1, clipping)


@pytest.mark.parametrize("engine_class", FAST)
@scales
@SETTINGS
def test_k206_the_bound_holds_under_bfloat16(
    engine_class: Engine,
    seed: int,
    inputs: float,
    outputs: float,
    spread: float,
    bound: float,
    clipping: str,
) -> None:
    """What a sample adds is its gradient as rounded to bfloat16, and the bound is exact."""
    x, g = rows(seed, inputs, spread, 16, 12), rows(seed + 1, outputs, spread, 16, 24)
    engine = engine_class(nn.Linear(12, 24).train())
    sums = []
    for part in (slice(0, 2), slice(1, 2)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            sums.append(clipped_sum(engine, x[part], g[part], bound, clipping=clipping))
    both, alone = sums
    moved = norm(both[n].double() - alone[n].double() for n in both)
    assert moved <= bound * (1 + 1e-5) + 1e-6 * norm(alone.values())


@pytest.mark.parametrize("engine_class", FAST)
def test_k206_bright_pixels_of_a_patch_embedding_keep_the_bound(engine_class: Engine) -> None:
    """Its smallest input: the Gram matrix of the gradients underflowed, that of the pixels not."""
    torch.manual_seed(0)
    model = nn.Conv2d(3, 768, 16, 16)
    x = torch.full((2, 3, 32, 32), 6e17)
    x[1] = 0.5
    g = 1e-21 * torch.randn(2, 768, 2, 2)
    g[1] = 1.0
    engine = engine_class(model.train())
    both = clipped_sum(engine, x, g, 0.1)
    alone = clipped_sum(engine, x[1:], g[1:], 0.1)
    true = gradients(model, x, g)[0]
    assert norm(both[n].double() - alone[n].double() for n in both) == pytest.approx(
        min(0.1, norm(true.values())), rel=1e-4
    )


class Logits(nn.Module):
    """The logits of a model of HF."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        output = self.model(x)
        return output if isinstance(output, Tensor) else output.logits


@all_engines
@pytest.mark.parametrize("factory", [tiny_vit, tiny_timm_vit])
@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize("power", [-40, -19, 9, 14, 17.8, 19.5, 30, 38])
def test_k206_a_transformer_keeps_the_bound_for_pixels_of_any_size(
    engine_class: Engine, factory: Callable[..., nn.Module], clipping: str, power: float
) -> None:
    torch.manual_seed(0)
    x, g = torch.randn(3, 3, 8, 8), torch.randn(3, 3)
    x[0] = (x[0].double() / x[0].abs().max() * 10.0**power).float()
    engine = engine_class(Logits(factory()).train())
    both = clipped_sum(engine, x, g, 0.1, clipping=clipping)
    alone = clipped_sum(engine, x[1:], g[1:], 0.1, clipping=clipping)
    assert all(bool(total.isfinite().all()) for total in both.values())
    moved = norm(both[n].double() - alone[n].double() for n in both)
    assert moved <= 0.1 * (1 + 1e-5) + 1e-6


@all_engines
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, LARGEST])
def test_k206_what_is_not_finite_weighs_nothing(engine_class: Engine, value: float) -> None:
    engine = engine_class(nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12)).train())
    x, g = rows(0, 0.0, 0.0, 16, 12), rows(1, 0.0, 0.0, 16, 12)
    alone = clipped_sum(engine, x[1:], g[1:], 0.1)
    x[0, 3] = value
    g[0, 3] = LARGEST
    both = clipped_sum(engine, x, g, 0.1)
    for name in both:
        torch.testing.assert_close(both[name], alone[name])


@given(
    st.lists(st.floats(width=32).map(abs), min_size=1, max_size=6),
    st.floats(1e-12, 1e12),
    st.sampled_from(["flat", "per_layer", "automatic"]),
)
@example([1e-45, 1e38], 1e-3, "flat")
@example([3.4e38] * 6, 1e-12, "automatic")
@settings(deadline=None)
def test_k206_factors_bound_norms_of_all_magnitudes(
    norms: list[float], bound: float, clipping: str
) -> None:
    by_parameter = {str(i): torch.tensor([n]) for i, n in enumerate(norms)}
    factors = clip_factors(
        by_parameter, max_grad_norm=bound, clipping=clipping, num_layers=len(norms)
    )
    if not all(map(math.isfinite, norms)):
        assert not any(bool(factor.any()) for factor in factors.values())
        return
    clipped = [float(factors[n].double() * by_parameter[n].double()) for n in by_parameter]
    assert math.hypot(*clipped) <= bound * (1 + 1e-5)


@given(st.integers(0, 2**31), MAGNITUDES, st.sampled_from([7, 5000, 9001]))
@SETTINGS
def test_k206_a_gradient_of_any_magnitude_has_its_norm(seed: int, power: float, size: int) -> None:
    x = rows(seed, power, 3.0, size)
    torch.testing.assert_close(row_norms(x), x.double().norm(dim=1), rtol=1e-6, atol=0.0)

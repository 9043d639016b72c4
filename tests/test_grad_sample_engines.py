"""What the bookkeeping and ghost engines do beyond plain models and one row a unit."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from per_sample_oracle import (
    assert_matches,
    backward,
    force_form,
    gradient_of,
    logits_of,
    loop_of_one,
    random_batch,
    summed_loss,
    trainable,
    weighted_sum,
)
from support import tiny_dinov2, tiny_timm_vit, tiny_vit, trainer_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from hf_dpmuon.grad_sample import (
    ENGINES,
    BookKeepingGradSampleModule,
    GhostGradSampleModule,
    HooksGradSampleModule,
    PerSampleEngine,
)
from hf_dpmuon.grad_sample.contributions import OuterProducts
from hf_dpmuon.grad_sample.engine import row_norms
from hf_dpmuon.mechanism import clip_factors

Engine = type[PerSampleEngine]
INTERCEPTING = [BookKeepingGradSampleModule, GhostGradSampleModule]
all_engines = pytest.mark.parametrize("engine_class", [HooksGradSampleModule, *INTERCEPTING])
intercepting = pytest.mark.parametrize("engine_class", INTERCEPTING)


@pytest.fixture(params=[True, False], ids=["pairs", "gradients"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight's gradient is held, and its norm taken, as a pair of tensors, or as itself."""
    force_form(monkeypatch, pairs=request.param)


@pytest.mark.parametrize(("tokens", "form_held"), [(1, "OuterProducts"), (40, "UnitGradients")])
def test_a_weight_waits_in_the_form_that_holds_less(tokens: int, form_held: str) -> None:
    a_UTD, g_UTP = torch.randn(3, tokens, 8).double(), torch.randn(3, tokens, 16).double()
    pair = OuterProducts(a_UTD, g_UTP, torch.Size((16, 8)))
    held = pair.held()
    assert type(held).__name__ == form_held
    expected = torch.einsum("utp,utd->upd", g_UTP, a_UTD)
    weights = torch.tensor([2.0, 0.0, -1.0]).double()
    for gradient in (pair, held):
        torch.testing.assert_close(gradient.gradients(), expected)
        torch.testing.assert_close(gradient.norms(), expected.flatten(1).norm(dim=1))
        into = torch.ones(16, 8).double()
        gradient.add_weighted_sum(weights, into=into, mask_zeros=True)
        torch.testing.assert_close(into, 1 + 2 * expected[0] - expected[2])


@st.composite
def cancelling_tokens(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Tokens of four units whose gradients nearly cancel, to any degree and in any number."""
    seed, pairs = draw(st.integers(0, 2**31)), draw(st.integers(1, 20))
    inputs, outputs = draw(st.sampled_from([(1, 1), (3, 200), (64, 64), (400, 30)]))
    spread = 10.0 ** draw(st.integers(-7, 1))
    scale = 10.0 ** draw(st.integers(-4, 4))
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    base = normal(4, 1, inputs) * scale
    away = normal(4, pairs, inputs) * spread * scale
    g = normal(4, pairs, outputs)
    nearly = spread * draw(st.booleans())  # or the gradients cancel exactly
    g_other = -g * (1 + nearly * normal(4, pairs, 1))
    return torch.cat([base + away, base - away], 1), torch.cat([g, g_other], 1)


@pytest.mark.usefixtures("form")
@given(cancelling_tokens(), st.sampled_from([1e-3, 1.0, 1e3]))
@settings(
    deadline=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_clipped_gradient_keeps_its_bound_where_tokens_cancel(
    tokens: tuple[Tensor, Tensor], bound: float
) -> None:
    a_UTD, g_UTP = tokens
    pair = OuterProducts(a_UTD, g_UTP, torch.Size((g_UTP.shape[2], a_UTD.shape[2])))
    norms = pair.norms()
    assert norms.isfinite().all()
    # Exact products in float64, summed in two halves that cancel.
    true = (g_UTP.double().mT @ a_UTD.double()).flatten(1).norm(dim=1)
    factors = clip_factors({"weight": norms}, max_grad_norm=bound, clipping="flat", num_layers=1)[
        "weight"
    ]
    assert (factors * true <= bound * (1 + 1e-5)).all()
    sizes = (a_UTD.double().norm(dim=2) * g_UTP.double().norm(dim=2)).sum(1)
    assert (norms <= true * (1 + 1e-5) + 1e-13 * sizes).all(), "clipped more than needed"


@pytest.mark.parametrize("size", [10, 4096, 10**6 + 7])
def test_norms_of_large_gradients_lose_nothing_to_their_length(size: int) -> None:
    rows = torch.randn(3, size)
    torch.testing.assert_close(
        row_norms(rows).double(), rows.double().norm(dim=1), rtol=1e-6, atol=0.0
    )


# Units and passes


@all_engines
@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(
    "unit_of_row", [[0, 1, 2, 0, 1, 2], [2, 0, 0, 0, 2, 0], [1, 1, 1, 1, 1, 1]]
)
def test_rows_of_a_unit_add_up_before_the_norm(
    engine_class: Engine, unit_of_row: list[int]
) -> None:
    """Units of any size, in any order; a unit without rows has gradient zero."""
    model = tiny_timm_vit().double().train()
    images, labels = random_batch(6, dtype=torch.float64)
    units = torch.tensor(unit_of_row)
    expected = {
        name: torch.zeros(3, *rows.shape[1:], dtype=rows.dtype).index_add(0, units, rows)
        for name, rows in loop_of_one(model, images, labels).items()
    }
    engine = engine_class(model)
    engine.set_units(units, 3)
    backward(engine, images, labels)
    norms = engine.per_unit_norms()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            norms[name], gradient.flatten(1).norm(dim=1), rtol=1e-5, atol=1e-6
        )
    for i, one in enumerate(torch.eye(3, dtype=torch.float64)):
        for name, total in weighted_sum(engine, one).items():
            torch.testing.assert_close(total, expected[name][i], rtol=1e-9, atol=1e-9)
    engine.discard()
    backward(engine, images, labels)
    assert len(next(iter(engine.per_unit_norms().values()))) == 6, "units outlive discard"


class Windows(nn.Module):
    """Attention in windows, an embedding, a convolution and bare parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.norm = nn.GroupNorm(3, 12)
        self.inner = nn.Linear(12, 12)
        self.bias = nn.Parameter(torch.randn(4, 12))
        self.table = nn.Embedding(5, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.stem(images))).flatten(2).mT.reshape(-1, 4, 12)
        x = torch.tanh(self.inner(x) + torch.tanh(self.bias))
        x = x.reshape(len(images), -1, 12).mean(1)
        return self.head(x * self.table((images[:, 0, 0, 0] > 0).long()))


@pytest.mark.parametrize(
    ("engine_class", "factory"),
    [
        (HooksGradSampleModule, tiny_timm_vit),
        *[(kind, factory) for kind in INTERCEPTING for factory in (tiny_timm_vit, Windows)],
    ],
)
@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("unit_of_row", [[0, 1, 2, 3, 4, 5], [2, 0, 0, 0, 2, 1], [1] * 6])
def test_the_mean_over_rows_of_a_unit_is_that_of_a_batch_of_its_rows(
    engine_class: Engine, factory: Callable[[], nn.Module], unit_of_row: list[int]
) -> None:
    torch.manual_seed(0)
    model = factory().double().train()
    images, labels = random_batch(6, dtype=torch.float64)
    units = torch.tensor(unit_of_row)
    present = sorted(set(unit_of_row))
    batches = []
    for unit in present:
        loss = F.cross_entropy(logits_of(model(images[units == unit])), labels[units == unit])
        batches.append(torch.autograd.grad(loss, list(trainable(model).values())))
    engine = engine_class(model)
    engine.set_units(units, 6, reduction="mean")
    backward(engine, images, labels)
    norms = engine.per_unit_norms()
    for k, name in enumerate(trainable(model)):
        for unit, gradients in zip(present, batches, strict=True):
            one = torch.nn.functional.one_hot(torch.tensor(unit), 6).double()
            torch.testing.assert_close(norms[name][unit], gradients[k].norm(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(
                weighted_sum(engine, one)[name], gradients[k], rtol=1e-9, atol=1e-9, msg=name
            )


@intercepting
def test_units_of_another_batch_are_refused(engine_class: Engine) -> None:
    engine = engine_class(tiny_vit())
    engine.set_units(torch.tensor([0, 0, 1]), 2)
    with pytest.raises(ValueError, match="3 rows, but the batch has 4"):
        engine(random_batch(4)[0])


@pytest.mark.parametrize("engine_class", [HooksGradSampleModule, BookKeepingGradSampleModule])
@pytest.mark.usefixtures("form")
def test_gradients_of_two_passes_add_up_before_the_norm(engine_class: Engine) -> None:
    """As DiSK needs them: the same rows at two points, each loss scaled by its coefficient."""
    model = tiny_timm_vit().double().train()
    images, labels = random_batch(3, dtype=torch.float64)
    parameters = trainable(model)
    moves = {name: 0.1 * torch.randn_like(p) for name, p in parameters.items()}

    def move(sign: int) -> None:
        with torch.no_grad():
            for name, p in parameters.items():
                p.add_(moves[name], alpha=sign)

    here = loop_of_one(model, images, labels)
    move(1)
    there = loop_of_one(model, images, labels)
    move(-1)
    expected = {name: 0.3 * here[name] + 1.7 * there[name] for name in here}

    engine = engine_class(model, passes=2)
    (0.3 * summed_loss(logits_of(engine(images)), labels)).backward()
    move(1)
    (1.7 * summed_loss(logits_of(engine(images)), labels)).backward()
    move(-1)
    assert_matches(engine, expected, rtol=1e-9)


def test_ghost_takes_one_pass() -> None:
    with pytest.raises(ValueError, match="bookkeeping"):
        GhostGradSampleModule(tiny_vit(), passes=2)


@all_engines
def test_more_passes_than_said_are_refused(engine_class: Engine) -> None:
    engine = engine_class(tiny_vit().train())
    for size in (3, 3):
        backward(engine, *random_batch(size))
    with pytest.raises(RuntimeError, match="discard"):
        engine.per_unit_norms()


# Parameters in unusual places


class Reuse(nn.Module):
    """Shared modules, tied weights, a layer called twice, q = k, and a weight used transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(12, 12)
        self.query = nn.Linear(12, 12)
        self.key = nn.Linear(12, 12)
        self.key.weight = self.query.weight
        self.shared = nn.ModuleList([nn.LayerNorm(12)] * 2)
        self.head = nn.Linear(12, 3)
        self.scalar = nn.Parameter(torch.tensor(0.7))

    def forward(self, images: Tensor) -> Tensor:
        x = images.mean(1)[:, :6].flatten(2).repeat(1, 1, 2)[..., :12]  # (B, 6, 12)
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        attention = (self.query(x) @ self.key(x).mT / 4).softmax(-1)
        x = self.shared[1](self.shared[0](attention @ x))
        x = F.linear(x, self.twice.weight.t()) * self.scalar + x @ self.query.weight
        return self.head(F.layer_norm(x, (12,), self.shared[0].weight).mean(1))


@intercepting
@pytest.mark.usefixtures("form")
def test_parameters_used_more_than_once(engine_class: Engine) -> None:
    torch.manual_seed(0)
    model = Reuse().double().train()
    images, labels = random_batch(4, image_size=12, dtype=torch.float64)
    expected = loop_of_one(model, images, labels)
    engine = engine_class(model)
    for _ in range(2):
        backward(engine, images, labels)
        assert_matches(engine, expected, rtol=1e-9)
        engine.discard()


class Einsum(nn.Module):
    """A layer with parameters that no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, images: Tensor) -> Tensor:
        return torch.einsum("bchw,chw->bc", images, self.weight)


@intercepting
def test_a_function_without_a_rule_goes_through_torch_func_and_says_so(
    engine_class: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Einsum(), nn.Linear(3, 3)).double()
    images, labels = random_batch(4, dtype=torch.float64)
    expected = loop_of_one(model, images, labels)
    engine = engine_class(model)
    with caplog.at_level(logging.WARNING):
        backward(engine, images, labels)
    assert "0.weight has no rule in einsum" in caplog.text
    assert_matches(engine, expected, rtol=1e-9)


@intercepting
def test_a_layer_used_outside_its_forward_is_exact(engine_class: Engine) -> None:
    norm = nn.LayerNorm(8)

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm
            self.head = nn.Linear(8, 3)

        def forward(self, images: Tensor) -> Tensor:
            x = F.layer_norm(images.mean((1, 2)), (8,), self.norm.weight, self.norm.bias)
            return self.head(x)

    model = Outside().double()
    images, labels = random_batch(4, dtype=torch.float64)
    expected = loop_of_one(model, images, labels)
    engine = engine_class(model)
    backward(engine, images, labels)
    assert_matches(engine, expected, rtol=1e-9)


@intercepting
def test_a_loss_that_reads_a_parameter_is_refused_by_name(engine_class: Engine) -> None:
    model = tiny_vit().train()
    engine = engine_class(model)
    images, labels = random_batch(3)
    loss = summed_loss(logits_of(engine(images)), labels) + model.classifier.weight.square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match=r"^classifier\.weight received"):
        engine.per_unit_norms()


class Scripted(torch.autograd.Function):
    """Hides a product from torch functions, as compiled code does."""

    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: object, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return g @ weight, g.t() @ x


@intercepting
def test_a_parameter_read_where_nobody_looks_is_refused_by_name(engine_class: Engine) -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, images: Tensor) -> Tensor:
            return Scripted.apply(images.mean((1, 2)), self.layer.weight) + self.layer.bias

    engine = engine_class(Hidden())
    backward(engine, *random_batch(3))
    with pytest.raises(RuntimeError, match=r"^layer\.weight received"):
        engine.per_unit_norms()


@intercepting
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_gradient_within_the_model_is_refused(engine_class: Engine, create_graph: bool) -> None:
    class Descends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Linear(8, 3)

        def forward(self, images: Tensor) -> Tensor:
            x = images.mean((1, 2)).requires_grad_()
            energy = self.energy(x).square().sum()
            (step,) = torch.autograd.grad(energy, x, create_graph=create_graph)
            return self.energy(x - step)

    engine = engine_class(Descends())
    with pytest.raises(NotImplementedError, match=r"create_graph|^energy\.weight|^energy\.bias"):
        backward(engine, *random_batch(3))


@intercepting
def test_a_scripted_module_is_refused_by_name(engine_class: Engine) -> None:
    model = nn.Sequential(nn.Flatten(), torch.jit.script(nn.Linear(192, 3)))
    with pytest.raises(NotImplementedError, match=r"^1\.weight, 1\.bias"):
        engine_class(model)


@intercepting
def test_a_compiled_module_is_exact(engine_class: Engine) -> None:
    """Also where it is compiled again for a batch of another size."""
    torch.manual_seed(0)
    model = Uses((12,), lambda x, w: x * w).double()
    model.patches = torch.compile(
        nn.Sequential(nn.Linear(12, 12), nn.Tanh()).double(), backend="eager"
    )
    for size in (4, 3):
        check_exact(engine_class, model, size)


class Opaque:
    """An output in which nobody can look for tensors."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


def test_ghost_refuses_an_output_that_it_cannot_copy() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, images: Tensor) -> Opaque:
            return Opaque(self.layer(images.mean((1, 2))))

    engine = GhostGradSampleModule(Wrapped())
    with pytest.raises(RuntimeError, match="past the copies"):
        backward(engine, *random_batch(3))


@intercepting
def test_multihead_attention_is_refused_by_name(engine_class: Engine) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, images: Tensor) -> Tensor:
            x = images.mean(1)
            return self.attention(x, x, x)[0].mean(1)[:, :3]

    engine = engine_class(Attends())
    with pytest.raises(NotImplementedError, match=r"attention\.in_proj_weight"):
        engine(random_batch(3)[0])


# What is an activation


def features(images: Tensor) -> Tensor:
    """(B, 3, 8, 8) to (B, 16, 12), without parameters."""
    return F.unfold(images, 2, stride=2).mT


class Places(nn.Module):
    """A network of coordinates and a table of positions, none of which sees the images."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(12, 12)
        self.grid = nn.Linear(2, 12)
        self.grid_norm = nn.LayerNorm(12)
        self.table = nn.Embedding(16, 12)
        self.smooth = nn.Conv1d(12, 12, 3, padding=1)
        self.bias = nn.Parameter(torch.randn(16, 12))
        self.register_buffer("coordinates", torch.randn(16, 2))
        self.head = nn.Linear(12, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(features(images))
        constant = torch.linspace(-1, 1, 16, dtype=x.dtype)
        grid = torch.stack([constant, constant.square()], -1)
        place = self.grid_norm(torch.tanh(self.grid(torch.cat([grid, self.coordinates])[8:24])))
        place = place + self.table(torch.arange(16)) + grid[:, :1] * self.bias
        x = torch.tanh(x + self.smooth(place.T).T)
        return self.head((x * self.grid(self.coordinates)).mean(1))


class Tokens(nn.Module):
    """Tokens that get the rows of the batch in several ways before they meet it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(12, 12)
        self.first = nn.Parameter(torch.randn(1, 1, 12))
        self.second = nn.Parameter(torch.randn(12))
        self.third = nn.Parameter(torch.randn(1, 12))
        self.window = nn.Parameter(torch.randn(1, 2, 12))
        self.head = nn.Linear(12, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(features(images))
        size = len(x)
        first = self.first.expand(size, -1, -1) + self.first.square()
        second = x.new_zeros(size, 1, 12) + self.second
        third = self.third.repeat(size, 1)[:, None]
        filled = torch.zeros_like(x)
        filled[:, 3:] = x[:, 3:]
        x = torch.cat([self.second.expand(size, 1, -1), first, second, third, filled], 1)
        windows = x.reshape(-1, 4, 12) + self.window.repeat(1, 2, 1)
        windows = windows + F.layer_norm(self.window, (12,)).expand(len(windows), -1, -1).sum(
            1, True
        )
        window = self.window.expand(4, -1, -1).reshape(-1, 12)[:4]
        x = torch.tanh(windows + window).reshape(size, -1, 12)
        return self.head(x.mean(1) * first[:, 0])


@intercepting
@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("factory", [Places, Tokens])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 12, 16])
def test_a_constant_of_the_shape_of_a_batch_is_none(
    engine_class: Engine, factory: Callable[[], nn.Module], size: int
) -> None:
    torch.manual_seed(0)
    model = factory().double()
    images, labels = random_batch(size, dtype=torch.float64)
    expected = loop_of_one(model, images, labels)
    engine = engine_class(model)
    for _ in range(2):
        backward(engine, images, labels)
        assert_matches(engine, expected, rtol=1e-9)
        engine.discard()


class Reduced(nn.Module):
    """Meets its parameter with something made of the batch that has no row a sample."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.patches = nn.Linear(12, 12)
        self.scale = nn.Parameter(torch.ones(12))
        self.head = nn.Linear(12, 3)
        self.reduce = reduce

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(features(images))
        return self.head((x * (self.scale * self.reduce(x))).mean(1))


@intercepting
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "reduce",
    [
        Tensor.mean,
        lambda x: x.mean((0, 1)),
        lambda x: x.mean(0)[:7].mean(0),
        lambda x: x.mean(2).mT,
    ],
    ids=["scalar", "mean", "part", "transposed"],
)
def test_rows_that_are_not_samples_are_refused_by_name(
    engine_class: Engine, reduce: Callable[[Tensor], Tensor], frozen: bool
) -> None:
    model = Reduced(reduce)
    model.patches.requires_grad_(not frozen)
    engine = engine_class(model)
    with pytest.raises(NotImplementedError, match=r"^scale meets .* made of a batch of 5"):
        engine(random_batch(5)[0])


class Rearranged(nn.Module):
    """A layer whose activations were rearranged, between others that need not know."""

    def __init__(self, rearrange: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.patches = nn.Linear(12, 12)
        self.inner = nn.Linear(12, 12)
        self.head = nn.Linear(12, 3)
        self.rearrange = rearrange

    def forward(self, images: Tensor) -> Tensor:
        x = torch.tanh(self.patches(features(images)))  # (B, 16, 12)
        y = torch.tanh(self.inner(self.rearrange(x)))
        return self.head(x.mean(1)) + y.sum()


def one_half(x: Tensor) -> Tensor:
    """A mask of half of the tokens of all samples together: as many rows as samples may divide."""
    return x[..., 0] > x[..., 0].flatten().median()


ROWS_LOST = {
    "mask": lambda x: x[one_half(x)],
    "masked_select": lambda x: x.masked_select(one_half(x)[..., None]).view(-1, 12),
    "nonzero": lambda x: x[one_half(x).nonzero(as_tuple=True)],
    "where": lambda x: x[torch.where(one_half(x))],
    "sorted by value": lambda x: x[x[:, 0, 0].argsort()],
    "index_select": lambda x: x.index_select(0, x[:, 0, 0].argsort()),
    "gather": lambda x: x.gather(0, x.argsort(0)),
    "sort": lambda x: x.sort(0).values,
    "and computed on": lambda x: torch.relu(x[one_half(x)][:, None] * 2).squeeze(1),
    "and put back": lambda x: torch.zeros_like(x).masked_scatter(
        one_half(x)[..., None].expand_as(x), x[one_half(x)]
    ),
    "constant order": lambda x: x[torch.arange(len(x)).flip(0)],
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "cat": lambda x: torch.cat([x, x.flip(1)]),
    "one sample": lambda x: x[0],
    "chunk": lambda x: x.repeat_interleave(2, 0).chunk(2)[0],
    "less the mean": lambda x: x - x.mean(0),
    "softmax": lambda x: x.softmax(0),
    "normalised": lambda x: x / x.abs().amax(dim=(0, 1)),
    "transposed": lambda x: x.transpose(0, 1),
    "permuted": lambda x: x.permute(1, 0, 2),
    "stack": lambda x: torch.stack([x, x, x, x]),
    "unravelled": lambda x: x.reshape(len(x), 4, 4, 12).swapaxes(0, 1),
}
ROWS_KEPT = {
    "windows": lambda x: x.view(-1, 2, 2, 2, 2, 12).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 12),
    "heads": lambda x: x.reshape(len(x), 16, 3, 2, 2).permute(2, 0, 3, 1, 4)[1].repeat(1, 1, 1, 6),
    "there and back": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "tokens by value": lambda x: x[torch.arange(len(x)), x[..., 0].argmax(1)],
    "tokens sorted": lambda x: x.gather(1, x.argsort(1)),
    "tokens kept": lambda x: x[torch.arange(len(x))[:, None], x[..., 0].argsort(1)[:, :3]],
    "rolled": lambda x: x.view(-1, 4, 4, 12).roll((1, 1), (1, 2)).flatten(1, 2).flip(1),
    "mean of two": lambda x: torch.stack([x, x.sin()]).mean(0),
    "slices": lambda x: x[:, ::2, None][:, :, 0][..., :12],
    "masked": lambda x: x.masked_fill(x > 0, 0.0) + torch.where(x > 0, x, -x),
    "half": lambda x: torch.cat(x.unbind(1), 1).view(-1, 16, 12) + x.sum(1, True),
}


@intercepting
@pytest.mark.parametrize("rearrange", ROWS_LOST.values(), ids=ROWS_LOST)
def test_rows_of_no_known_sample_are_refused_by_name(
    engine_class: Engine, rearrange: Callable[[Tensor], Tensor]
) -> None:
    """Though there are as many of them as the samples divide."""
    model = Rearranged(rearrange)
    with torch.no_grad():
        rows = rearrange(features(random_batch(4)[0]))
    assert len(rows) % 4 == 0
    engine = engine_class(model)
    with pytest.raises(
        NotImplementedError, match=r"^inner\.weight.* meets .* made of a batch of 4"
    ):
        engine(random_batch(4)[0])


@intercepting
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("rearrange", ROWS_KEPT.values(), ids=ROWS_KEPT)
def test_rows_that_stay_with_their_samples_are_exact(
    engine_class: Engine, rearrange: Callable[[Tensor], Tensor], size: int
) -> None:
    class Model(Rearranged):
        def forward(self, images: Tensor) -> Tensor:
            x = torch.tanh(self.patches(features(images)))
            y = torch.tanh(self.inner(self.rearrange(x)))
            return self.head(y.view(len(x), -1, 12).mean(1))

    torch.manual_seed(0)
    check_exact(engine_class, Model(rearrange).double(), size)


def check_exact(engine_class: Engine, model: nn.Module, size: int) -> None:
    images, labels = random_batch(size, dtype=torch.float64)
    expected = loop_of_one(model, images, labels)
    engine = engine_class(model)
    backward(engine, images, labels)
    assert_matches(engine, expected, rtol=1e-9)
    engine.discard()
    engine.remove_hooks()


class Uses(nn.Module):
    """Uses a parameter in one way."""

    def __init__(self, shape: tuple[int, ...], use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(shape))
        self.patches = nn.Linear(12, 12)
        self.head = nn.Linear(12, 3)
        self.use = use

    def forward(self, images: Tensor) -> Tensor:
        x = torch.tanh(self.patches(features(images))) + 2
        return self.head(torch.tanh(self.use(x, self.weight)).mean(1))


EXACT_USES = {
    "bmm": ((12, 12), lambda x, w: torch.bmm(x, w.expand(len(x), -1, -1))),
    "baddbmm": ((1, 12, 12), lambda x, w: torch.baddbmm(x, x, w.repeat(len(x), 1, 1))),
    "matmul": ((12, 12), lambda x, w: x @ w.expand(len(x), -1, -1)),
    "concatenate": ((1, 1, 12), lambda x, w: torch.concatenate([w.expand(len(x), 1, 12), x], 1)),
    "cat axis": ((1, 1, 12), lambda x, w: torch.cat([w.expand(len(x), 1, 12), x], axis=1)),
    "hstack": ((12,), lambda x, w: torch.hstack([w.expand(len(x), 1, 12), x])),
    "stack": ((12,), lambda x, w: torch.stack([x, w.expand_as(x)], 1).flatten(1, 2)),
    "multiply_": ((12,), lambda x, w: x.clone().multiply_(w)),
    "clamp_": ((12,), lambda x, w: x.clone().clamp_(max=w + 1.5)),
    "pow_": ((12,), lambda x, w: x.clone().pow_(w)),
    "lerp_": ((12,), lambda x, w: x.clone().lerp_(x.sin(), w)),
    "copy_": ((12,), lambda x, w: torch.cat([x, torch.empty_like(x).copy_(w)], 1)),
    "repeat": ((16, 12), lambda x, w: x * w.repeat(len(x), 1, 1)),
}


@intercepting
@pytest.mark.parametrize(("shape", "use"), EXACT_USES.values(), ids=EXACT_USES)
@pytest.mark.parametrize("size", [1, 3])
def test_a_parameter_with_the_rows_of_the_batch_is_exact(
    engine_class: Engine,
    shape: tuple[int, ...],
    use: Callable[[Tensor, Tensor], Tensor],
    size: int,
) -> None:
    torch.manual_seed(0)
    check_exact(engine_class, Uses(shape, use).double(), size)


REFUSED_USES = {
    "one output": ((12,), lambda x, w: x * F.linear(x, w)[..., None]),
    "stack": ((12,), lambda x, w: torch.stack([x, w.expand_as(x)])[0]),
    "einsum": ((12,), lambda x, w: torch.einsum("btc,bc->btc", x, w.expand(len(x), -1))),
    "atan2_": ((12,), lambda x, w: x.clone().atan2_(w)),
    "into a derived tensor": ((1, 1, 12), lambda x, w: w.repeat(len(x), 16, 1).mul_(x)),
    "setitem": ((12,), lambda x, w: x.clone().index_fill_(1, torch.tensor(0), w[0])),
    "sparse": ((5, 12), lambda x, w: x + F.embedding((x[..., 0] > 2).long(), w, sparse=True)),
    "sparse table": ((5, 12), lambda x, w: x + F.embedding(torch.arange(16) % 5, w, sparse=True)),
    "bags of offsets": (
        (5, 12),
        lambda x, w: (
            x
            + F.embedding_bag(
                (x[..., 0] > 2).long().flatten(), w, torch.arange(0, 16 * len(x), 16)
            )[:, None]
        ),
    ),
}


@intercepting
@pytest.mark.parametrize(("shape", "use"), REFUSED_USES.values(), ids=REFUSED_USES)
def test_a_use_without_a_rule_is_refused_by_name(
    engine_class: Engine, shape: tuple[int, ...], use: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """In the forward pass, not by whatever error the backward pass runs into."""
    engine = engine_class(Uses(shape, use))
    with pytest.raises(NotImplementedError, match=r"^weight: "):
        engine(random_batch(3)[0])


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


@intercepting
@pytest.mark.parametrize(
    "rows",
    [lambda w, b: w.expand(b, -1, -1), lambda w, b: w.repeat(b, 1, 1)],
    ids=["expand", "repeat"],
)
def test_a_parameter_repeated_along_the_batch_takes_memory_of_one_batch(
    engine_class: Engine, rows: Callable[[Tensor, int], Tensor]
) -> None:
    size = 32
    engine = engine_class(Uses((16, 12), lambda x, w: x * rows(w, len(x))))
    with Largest() as largest:
        backward(engine, *random_batch(size))
        engine.per_unit_norms()
    assert largest.numel <= 2 * size * 16 * 12


@intercepting
def test_stacking_tokens_on_the_batch_is_refused_by_name(engine_class: Engine) -> None:
    class Stacks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.row = nn.Parameter(torch.randn(1, 12))

        def forward(self, images: Tensor) -> Tensor:
            return torch.cat([self.row, features(images).mean(1)], dim=0)[1:, :3]

    with pytest.raises(NotImplementedError, match=r"^row: no per-sample rule for cat"):
        engine_class(Stacks())(random_batch(3)[0])


def doubled_unseen(x: Tensor) -> Tensor:
    """What compiled preprocessing might do: no torch function tells where the result is from."""
    return torch.from_numpy(2 * x.numpy())


@intercepting
@pytest.mark.parametrize("again", [False, True])
def test_activations_of_unknown_origin_are_exact_or_refused(
    engine_class: Engine, again: bool
) -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Linear(12, 12)
            self.head = nn.Linear(12, 3)

        def forward(self, images: Tensor) -> Tensor:
            x = torch.tanh(self.patches(doubled_unseen(features(images))))
            return self.head((x + features(images) if again else x).mean(1))

    model = Hidden().double()
    images, labels = random_batch(4, dtype=torch.float64)
    expected = loop_of_one(model, images, labels)
    engine = engine_class(model)
    backward(engine, images, labels)
    if again:
        assert_matches(engine, expected, rtol=1e-9)
    else:
        with pytest.raises(RuntimeError, match=r"^patches\.weight.* received"):
            engine.per_unit_norms()


# Modes of running


@intercepting
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("factory", [tiny_vit, tiny_dinov2])
def test_gradient_checkpointing_changes_nothing(
    engine_class: Engine, use_reentrant: bool, factory: Callable[..., nn.Module]
) -> None:
    model = factory(dropout=0.2).double().train()
    images, labels = random_batch(3, dtype=torch.float64)
    sums = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        engine = engine_class(model)
        torch.manual_seed(1)
        backward(engine, images, labels)
        norms = engine.per_unit_norms()
        assert set(norms) == set(trainable(model))
        sums.append((norms, weighted_sum(engine, torch.tensor([1.0, -2.0, 0.5]).double())))
        engine.discard()
        engine.remove_hooks()
    for plain, checkpointed in zip(*sums, strict=True):
        for name, value in plain.items():
            torch.testing.assert_close(checkpointed[name], value, rtol=1e-9, atol=1e-9)


class Block(nn.Module):
    """Takes activations, a constant grid and a derived bias."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)
        self.grid = nn.Linear(2, 12)

    def forward(self, x: Tensor, grid: Tensor, *, bias: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) + self.grid(grid)) * bias


class Checkpointed(nn.Module):
    """Blocks that share a derived bias, after a stem without trainable parameters."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.bias = nn.Parameter(torch.randn(16, 12))
        self.head = nn.Linear(12, 3)
        self.use_reentrant = use_reentrant

    def forward(self, images: Tensor) -> Tensor:
        x, bias = features(images), torch.tanh(self.bias)
        grid = torch.linspace(-1, 1, 32, dtype=x.dtype).reshape(16, 2)
        for block in self.blocks:
            if self.use_reentrant is None:
                x = block(x, grid, bias=bias)
            else:
                x = checkpoint(
                    lambda x, grid, bias, block=block: block(x, grid, bias=bias),
                    x,
                    grid,
                    bias,
                    use_reentrant=self.use_reentrant,
                )
        return self.head(x.mean(1))


@intercepting
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("size", [3, 4])
def test_a_repeated_block_knows_its_operands(
    engine_class: Engine, use_reentrant: bool, size: int
) -> None:
    torch.manual_seed(0)
    model = Checkpointed(None).double()
    images, labels = random_batch(size, dtype=torch.float64)
    expected = loop_of_one(model, images, labels)
    model.use_reentrant = use_reentrant
    engine = engine_class(model)
    for _ in range(2):
        backward(engine, images, labels)
        assert_matches(engine, expected, rtol=1e-9)
        engine.discard()


class Conditioned(nn.Module):
    """One block, called with one derived operand after another, or with the same twice."""

    def __init__(self, use_reentrant: bool | None, *, same: bool, derived: bool) -> None:
        super().__init__()
        self.block = Block()
        self.biases = nn.ParameterList([torch.randn(12), torch.randn(12)])
        self.head = nn.Linear(12, 3)
        self.use_reentrant, self.same, self.derived = use_reentrant, same, derived

    def forward(self, images: Tensor) -> Tensor:
        x = features(images).requires_grad_()
        grid = torch.linspace(-1, 1, 32, dtype=x.dtype).reshape(16, 2)
        biases = [torch.tanh(bias) if self.derived else bias for bias in self.biases]

        def call(x: Tensor, bias: Tensor) -> Tensor:
            return self.block(x, grid, bias=bias)

        for bias in (biases[0], biases[0 if self.same else 1]):
            if self.use_reentrant is None:
                x = call(x, bias)
            else:
                x = checkpoint(call, x, bias, use_reentrant=self.use_reentrant)
        return self.head(x.mean(1) * (biases[1] if self.same else 1))


@intercepting
@pytest.mark.parametrize("derived", [False, True])
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_block_repeated_with_another_operand_is_exact_or_refused_by_name(
    engine_class: Engine, use_reentrant: bool, same: bool, derived: bool
) -> None:
    torch.manual_seed(0)
    model = Conditioned(None, same=same, derived=derived).double()
    images, labels = random_batch(3, dtype=torch.float64)
    expected = loop_of_one(model, images, labels)
    model.use_reentrant = use_reentrant
    engine = engine_class(model)

    def check() -> None:
        backward(engine, images, labels)
        assert_matches(engine, expected, rtol=1e-9)

    for _ in range(2):
        if use_reentrant and not same:
            with pytest.raises(NotImplementedError, match=r"^biases\.0, biases\.1: "):
                check()
        else:
            check()
        engine.discard()


@intercepting
def test_a_buffer_that_once_held_activations_is_a_constant_again(engine_class: Engine) -> None:
    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grid = nn.Linear(12, 12)
            self.head = nn.Linear(12, 3)
            self.register_buffer("cache", torch.randn(16, 12))
            self.writes = True

        def forward(self, images: Tensor) -> Tensor:
            if self.writes:
                self.cache.copy_(features(images)[0])
            return self.head((features(images) * torch.tanh(self.grid(self.cache))).mean(1))

    model = Caches().double()
    images, labels = random_batch(4, dtype=torch.float64)
    engine = engine_class(model)
    with pytest.raises(NotImplementedError, match=r"^grid\.weight"):
        engine(images)
    engine.discard()
    model.writes = False
    expected = loop_of_one(model, images, labels)
    backward(engine, images, labels)
    assert_matches(engine, expected, rtol=1e-9)


@intercepting
@pytest.mark.parametrize("factory", [tiny_vit, tiny_dinov2])
def test_activation_checkpointing_through_the_trainer_changes_nothing(
    engine_class: Engine, factory: Callable[..., nn.Module], tmp_path: Path
) -> None:
    (mode,) = (name for name, kind in ENGINES.items() if kind is engine_class)

    def trained(**settings: object) -> dict[str, Tensor]:
        folder, model = tmp_path / str(settings), factory(dropout=0.2)
        trainer = trainer_of(folder, model, grad_sample_mode=mode, max_steps=3, **settings)
        trainer.train()
        return trainer.model.state_dict()

    plain = trained()
    for kwargs in (None, {"use_reentrant": True}, {"use_reentrant": False}):
        recomputed = trained(activation_checkpointing=True, activation_checkpointing_kwargs=kwargs)
        for name, expected in plain.items():
            says = f"{name} with {kwargs}"
            torch.testing.assert_close(recomputed[name], expected, rtol=1e-4, atol=1e-5, msg=says)


@intercepting
def test_trainable_norms_of_a_backbone_in_eval_mode(engine_class: Engine) -> None:
    model = tiny_vit().eval()
    for name, p in model.named_parameters():
        p.requires_grad_("norm" in name or "classifier" in name)
    model.classifier.train()
    images, labels = random_batch(3)
    expected = loop_of_one(model, images, labels)
    engine = engine_class(model)
    backward(engine, images, labels)
    assert_matches(engine, expected, rtol=1e-4)


def test_hooks_name_a_trainable_layer_in_eval_mode() -> None:
    engine = HooksGradSampleModule(tiny_vit().train())
    engine._module.vit.layernorm.eval()
    with pytest.raises(ValueError, match="LayerNorm"):
        backward(engine, *random_batch(3))


@all_engines
def test_evaluation_between_steps_leaves_no_trace(engine_class: Engine) -> None:
    model = tiny_vit().train()
    images, labels = random_batch(3)
    expected = loop_of_one(model, images, labels)
    engine = engine_class(model)
    engine.eval()
    with torch.no_grad():
        evaluated, plain = engine(images).logits, model(images).logits
    assert torch.equal(evaluated, plain)
    engine.train()
    backward(engine, images, labels)
    assert_matches(engine, expected, rtol=1e-4)


@intercepting
@pytest.mark.usefixtures("form")
def test_norms_and_sums_are_float32_under_bfloat16_autocast(engine_class: Engine) -> None:
    """Within what rounding to 8 bits costs, of what they are in float32."""
    model = tiny_timm_vit().train()
    images, labels = random_batch(4)
    expected = loop_of_one(model, images, labels)
    engine = engine_class(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = summed_loss(engine(images), labels)
    loss.backward()
    norms = engine.per_unit_norms()
    assert all(norm.dtype == torch.float32 for norm in norms.values())
    total = torch.stack(list(norms.values())).norm(dim=0)
    wanted = torch.stack([rows.flatten(1).norm(dim=1) for rows in expected.values()]).norm(dim=0)
    torch.testing.assert_close(total, wanted, rtol=0.03, atol=0.0)
    for name, total in weighted_sum(engine, torch.ones(4)).items():
        wanted = expected[name].sum(0)
        assert (total - wanted).norm() <= 0.05 * expected[name].norm() + 0.01, name


@intercepting
def test_autograd_computes_no_weight_gradient(engine_class: Engine) -> None:
    """Nothing that an optimizer, a hook or Opacus could read is ever set."""
    model = tiny_vit().train()
    engine = engine_class(model)
    backward(engine, *random_batch(3))
    engine.per_unit_norms()
    assert all(p.grad is None and p.grad_sample is None for p in model.parameters())


@all_engines
def test_each_parameter_may_have_weights_of_its_own(engine_class: Engine) -> None:
    """As clipping per layer needs them."""
    model = tiny_vit().train()
    images, labels = random_batch(3)
    expected = loop_of_one(model, images, labels)
    engine = engine_class(model)
    backward(engine, images, labels)
    weights = {name: torch.randn(3) for name in engine.per_unit_norms()}
    into = {name: torch.zeros_like(p) for name, p in trainable(model).items()}
    engine.add_weighted_sum(weights, into=into)
    for name, rows in expected.items():
        wanted = torch.tensordot(weights[name], rows, 1)
        torch.testing.assert_close(into[name], wanted, rtol=1e-4, atol=1e-4, msg=name)


@intercepting
def test_plain_and_engine_give_the_same_sum(engine_class: Engine) -> None:
    """Weights of one: the gradient of the batch, under dropout and drop-path."""
    model = tiny_timm_vit(dropout=0.3, drop_path=0.5).double().train()
    images, labels = random_batch(8, dtype=torch.float64)
    torch.manual_seed(0)
    expected = gradient_of(model, images, labels)
    engine = engine_class(model)
    torch.manual_seed(0)
    backward(engine, images, labels)
    for name, total in weighted_sum(engine, torch.ones(8, dtype=torch.float64)).items():
        torch.testing.assert_close(total, expected[name], rtol=1e-9, atol=1e-9)

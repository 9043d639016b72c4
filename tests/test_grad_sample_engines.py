"""What the bookkeeping and ghost engines do beyond plain models and one row a unit."""

import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_dinov2, tiny_timm_vit, tiny_vit
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
from torch import Tensor, nn

from hf_dpmuon.grad_sample import (
    BookKeepingGradSampleModule,
    GhostGradSampleModule,
    HooksGradSampleModule,
    PerSampleEngine,
)
from hf_dpmuon.grad_sample.contributions import OuterProducts

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
    norms = engine.per_sample_norms()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            norms[name], gradient.flatten(1).norm(dim=1), rtol=1e-5, atol=1e-6
        )
    for i, one in enumerate(torch.eye(3, dtype=torch.float64)):
        for name, total in weighted_sum(engine, one).items():
            torch.testing.assert_close(total, expected[name][i], rtol=1e-9, atol=1e-9)
    engine.discard()
    backward(engine, images, labels)
    assert len(next(iter(engine.per_sample_norms().values()))) == 6, "units outlive discard"


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
        engine.per_sample_norms()


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
        engine.per_sample_norms()


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
        engine.per_sample_norms()


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
        norms = engine.per_sample_norms()
        assert set(norms) == set(trainable(model))
        sums.append((norms, weighted_sum(engine, torch.tensor([1.0, -2.0, 0.5]).double())))
        engine.discard()
        engine.remove_hooks()
    for plain, checkpointed in zip(*sums, strict=True):
        for name, value in plain.items():
            torch.testing.assert_close(checkpointed[name], value, rtol=1e-9, atol=1e-9)


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
    norms = engine.per_sample_norms()
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
    engine.per_sample_norms()
    assert all(p.grad is None and p.grad_sample is None for p in model.parameters())


@all_engines
def test_each_parameter_may_have_weights_of_its_own(engine_class: Engine) -> None:
    """As clipping per layer needs them."""
    model = tiny_vit().train()
    images, labels = random_batch(3)
    expected = loop_of_one(model, images, labels)
    engine = engine_class(model)
    backward(engine, images, labels)
    weights = {name: torch.randn(3) for name in engine.per_sample_norms()}
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

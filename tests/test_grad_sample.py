"""Per-sample gradients of every engine against batches of one."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from per_sample_oracle import (
    assert_matches,
    backward,
    gradient_of,
    loop_of_one,
    random_batch,
    weighted_sum,
)
from support import TINY_MODELS, tiny_deit, tiny_dinov2, tiny_timm_vit, tiny_vit
from torch import Tensor, nn

from hf_dpmuon.grad_sample import (
    BookKeepingGradSampleModule,
    GhostGradSampleModule,
    HooksGradSampleModule,
    PerSampleEngine,
)

ENGINES = [HooksGradSampleModule, BookKeepingGradSampleModule, GhostGradSampleModule]
Engine = type[PerSampleEngine]
all_engines = pytest.mark.parametrize("engine_class", ENGINES)
all_models = pytest.mark.parametrize("factory", TINY_MODELS.values(), ids=TINY_MODELS.keys())


def check(engine_class: Engine, model: nn.Module, size: int, *, rtol: float = 1e-4) -> None:
    dtype = next(model.parameters()).dtype
    images, labels = random_batch(size, dtype=dtype)
    expected = loop_of_one(model, images, labels)
    engine = engine_class(model)
    backward(engine, images, labels)
    assert_matches(engine, expected, rtol=rtol)


@all_engines
@all_models
@pytest.mark.parametrize("size", [1, 4])
def test_equals_batches_of_one(
    engine_class: Engine, factory: Callable[..., nn.Module], size: int
) -> None:
    check(engine_class, factory(), size)


@all_engines
@all_models
def test_equals_batches_of_one_in_double(
    engine_class: Engine, factory: Callable[..., nn.Module]
) -> None:
    check(engine_class, factory().double(), 3, rtol=1e-9)


@all_engines
@pytest.mark.parametrize(("factory", "tokens"), [(tiny_vit, 5), (tiny_deit, 6), (tiny_timm_vit, 7)])
def test_batch_as_large_as_the_token_count(
    engine_class: Engine, factory: Callable[..., nn.Module], tokens: int
) -> None:
    check(engine_class, factory(), tokens)


def freeze_all_but(model: nn.Module, keep: Callable[[str], bool]) -> nn.Module:
    for name, p in model.named_parameters():
        p.requires_grad_(keep(name))
    return model


@all_engines
@all_models
@pytest.mark.parametrize(
    "keep",
    [
        lambda name: name.endswith("bias"),
        lambda name: "classifier" in name or "head" in name,
        lambda name: "token" in name or "pos" in name,
        lambda name: "norm" in name or "scale" in name or "ls" in name,
        lambda name: "patch_embed" not in name,
    ],
    ids=["biases", "head", "tokens", "norms", "stem frozen"],
)
def test_part_of_the_model(
    engine_class: Engine, factory: Callable[..., nn.Module], keep: Callable[[str], bool]
) -> None:
    """Frozen parameters are neither reported nor given a gradient."""
    model = freeze_all_but(factory(), keep)
    check(engine_class, model, 3)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@all_engines
@pytest.mark.parametrize(
    "factory",
    [
        partial(tiny_vit, dropout=0.3),
        partial(tiny_deit, dropout=0.3),
        partial(tiny_dinov2, dropout=0.3, drop_path=0.5),
        partial(tiny_timm_vit, dropout=0.3, drop_path=0.5),
    ],
    ids=TINY_MODELS.keys(),
)
def test_dropout_masks_are_those_of_the_forward_pass(
    engine_class: Engine, factory: Callable[..., nn.Module]
) -> None:
    """A sample's gradient is what it is when, under the same masks, only its loss counts."""
    model = factory().train()
    images, labels = random_batch(4)
    rows = []
    for i in range(4):
        torch.manual_seed(3)
        logits = model(images)
        logits = logits if isinstance(logits, Tensor) else logits.logits
        parameters = dict(model.named_parameters())
        loss = F.cross_entropy(logits[i : i + 1], labels[i : i + 1])
        rows.append(torch.autograd.grad(loss, list(parameters.values())))
    expected = {name: torch.stack([row[k] for row in rows]) for k, name in enumerate(parameters)}
    torch.manual_seed(3)
    for name, total in gradient_of(model, images, labels).items():
        torch.testing.assert_close(expected[name].sum(0), total, rtol=1e-4, atol=1e-5)

    engine = engine_class(model)
    torch.manual_seed(3)
    backward(engine, images, labels)
    assert_matches(engine, expected, rtol=1e-4)


@all_engines
def test_attention_implementations_agree(engine_class: Engine) -> None:
    images, labels = random_batch(3)
    sums = []
    for implementation in ("eager", "sdpa"):
        model = tiny_vit()
        model.set_attn_implementation(implementation)
        engine = engine_class(model.train())
        backward(engine, images, labels)
        sums.append(weighted_sum(engine, torch.tensor([1.0, -2.0, 0.5])))
    for name, eager in sums[0].items():
        torch.testing.assert_close(sums[1][name], eager, rtol=1e-4, atol=1e-5, msg=name)


class Bypass(nn.Module):
    """A classifier that may use its norm's weight without calling the norm."""

    def __init__(self, *, bypass: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 3)
        self.bypass = bypass

    def forward(self, images: Tensor) -> Tensor:
        x = images.mean(-1).flatten(1)[:, :12]
        if self.bypass:
            x = F.layer_norm(x, (12,), self.norm.weight, self.norm.bias)
        else:
            x = self.norm(x)
        return self.head(x)


def test_hooks_name_a_layer_used_outside_its_forward() -> None:
    engine = HooksGradSampleModule(Bypass(bypass=True).train())
    backward(engine, *random_batch(3))
    with pytest.raises(RuntimeError, match=r"norm\.weight"):
        engine.per_unit_norms()


class UsedTwice(nn.Module):
    """A weight that its layer uses, and a function, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.tanh(self.layer(images.mean(-1).flatten(1)[:, :12]))
        return self.head(F.linear(x, self.layer.weight))


def test_hooks_name_a_layer_of_which_they_know_only_a_part() -> None:
    """Of whatever reason: the samples' gradients must add up to the batch's."""
    engine = HooksGradSampleModule(UsedTwice().train())
    backward(engine, *random_batch(3))
    with pytest.raises(RuntimeError, match=r"^layer\.weight: .* do not add up"):
        engine.per_unit_norms()


class Skips(nn.Module):
    """A classifier that reaches its second layer only if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.second = nn.Linear(12, 12)
        self.head = nn.Linear(12, 3)
        self.skip = True

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images.mean(-1).flatten(1)[:, :12])
        return self.head(x if self.skip else self.second(x))


@all_engines
def test_a_parameter_that_is_not_reached_adds_nothing(engine_class: Engine) -> None:
    model = Skips().train()
    images, labels = random_batch(3)
    expected = loop_of_one(model, images, labels)
    engine = engine_class(model)
    model.skip = False
    backward(engine, images, labels)
    engine.discard()
    model.skip = True
    backward(engine, images, labels)
    assert "second.weight" not in engine.per_unit_norms()
    assert_matches(engine, expected, rtol=1e-4)
    assert not weighted_sum(engine, torch.ones(3))["second.weight"].any()


@all_engines
@pytest.mark.parametrize("stale", ["forward", "backward", "plain backward"])
def test_discard_forgets_foreign_passes(engine_class: Engine, stale: str) -> None:
    """A pass that nobody consumed, of another batch size, leaves no trace in the next."""
    model = tiny_dinov2().train()
    images, labels = random_batch(3)
    expected = loop_of_one(model, images, labels)
    engine = engine_class(model)
    if stale == "forward":
        engine(random_batch(5)[0])
    else:
        backward(model if stale == "plain backward" else engine, *random_batch(5))
    engine.discard()
    assert all(p.grad is None and p.grad_sample is None for p in model.parameters())
    backward(engine, images, labels)
    assert_matches(engine, expected, rtol=1e-4)


@all_engines
def test_nothing_is_left_after_discard(engine_class: Engine) -> None:
    model = tiny_vit().train()
    engine = engine_class(model)
    keys = model.state_dict().keys()
    backward(engine, *random_batch(3))
    engine.per_unit_norms()
    engine.discard()
    assert engine.per_unit_norms() == {}
    assert not any(total.any() for total in weighted_sum(engine, torch.ones(3)).values())
    assert all(p.grad is None and p.grad_sample is None for p in model.parameters())
    assert model.state_dict().keys() == keys
    copy.deepcopy(model.state_dict())


@all_engines
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weight_zero_silences_a_sample_that_is_not_finite(
    engine_class: Engine, value: float
) -> None:
    model = tiny_timm_vit().train()
    images, labels = random_batch(4)
    expected = loop_of_one(model, images, labels)
    engine = engine_class(model)
    broken = images.clone()
    broken[2, 0, 3, 3] = value
    backward(engine, broken, labels)
    norms = torch.stack(list(engine.per_unit_norms().values()))
    assert norms.isfinite().all(0).tolist() == [True, True, False, True]
    total = weighted_sum(engine, torch.tensor([1.0, 2.0, 0.0, -1.0]))
    for name, rows in expected.items():
        wanted = rows[0] + 2 * rows[1] - rows[3]
        torch.testing.assert_close(total[name], wanted, rtol=1e-4, atol=1e-4, msg=name)

"""The check before a run finds whatever ties one sample's gradient to the others, or keeps data."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from per_sample_oracle import logits_of, summed_loss
from support import IMAGES, LABELS, TINY_MODELS, Lambda, Middle, verify
from torch import Tensor, nn

from hf_dpmuon.grad_sample import (
    ENGINES,
    BookKeepingGradSampleModule,
    PerSampleEngine,
    verify_per_sample_gradients,
)

all_engines = pytest.mark.parametrize("engine_class", ENGINES.values(), ids=ENGINES)


@all_engines
@pytest.mark.parametrize("factory", TINY_MODELS.values(), ids=TINY_MODELS)
def test_sound_models_pass_and_are_left_alone(
    engine_class: type[PerSampleEngine], factory: Callable[..., nn.Module]
) -> None:
    model = factory(dropout=0.3)
    model.train()
    next(iter(model.children())).eval()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    engine = engine_class(model)
    engine.training = model.training
    torch.manual_seed(5)
    state = torch.get_rng_state()
    verify(engine)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


MIXERS = {
    "flip": lambda x: x / 2 + x.flip(0) / 2,
    "previous": lambda x: x + F.pad(x.detach()[:-1], (0, 0, 1, 0)),
    "next": lambda x: x + F.pad(x.detach()[1:], (0, 0, 0, 1)),
    "mean": lambda x: x - x.mean(0),
    "norm": lambda x: x / x.detach().norm(),
    "pairs of an even batch": lambda x: x + x.flip(0) if len(x) % 2 == 0 else x,
    "batches above three": lambda x: x + x.mean(0) if len(x) > 3 else x,
}


@all_engines
@pytest.mark.parametrize("in_eval", [True, False])
@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_layers_that_mix_samples_are_found(
    engine_class: type[PerSampleEngine], mixer: Callable[[Tensor], Tensor], in_eval: bool
) -> None:
    """By the check, or already by the engine, where it sees the function that mixes."""
    engine = engine_class(Middle(Lambda(mixer, in_eval=in_eval)).train())
    found = r"gradient of one sample .* changes with the other|rows are not those of the samples"
    with pytest.raises((ValueError, NotImplementedError), match=found):
        verify(engine)


class Statistics(nn.Module):
    """Keeps something of its batches, as custom normalisation layers do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(12))
        self.register_buffer("late", None)
        self.register_buffer("nan", torch.tensor(float("nan")))
        self.centre = nn.Parameter(torch.zeros(12), requires_grad=False)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        mean, result = x.detach().mean(0), x - 0 * self.kept
        if self.training and self.kind == "in place":
            self.kept.mul_(0.9).add_(mean)
        elif self.training and self.kind == "replaced":
            self.kept = 0.9 * self.kept + mean
        elif self.training and self.kind == "late":
            self.late = mean
        elif self.training and self.kind == "frozen parameter":
            self.centre.data.add_(mean)
        return result


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("in place", "kept"),
        ("replaced", "kept"),
        ("late", "late"),
        ("frozen parameter", "centre"),
    ],
)
def test_statistics_of_batches_are_refused_by_name_and_put_back(kind: str, name: str) -> None:
    layer = Statistics(kind)
    kept, centre = layer.kept, layer.centre
    engine = BookKeepingGradSampleModule(Middle(layer).train())
    with pytest.raises(ValueError, match=rf"training mode changes layer\.{name}, which no noise"):
        verify(engine)
    assert layer.kept is kept
    assert layer.late is None
    assert layer.centre is centre
    assert not kept.any()
    assert not centre.any()


def test_buffers_that_stay_as_they_are_pass() -> None:
    verify(BookKeepingGradSampleModule(Middle(Statistics("none")).train()))


@all_engines
def test_rows_that_become_several_pass(engine_class: type[PerSampleEngine]) -> None:
    engine = engine_class(TINY_MODELS["vit"]().train())

    def loss_of(model: nn.Module, rows: Sequence[int]) -> tuple[Tensor, int]:
        images = torch.stack([x for row in rows for x in (IMAGES[row], IMAGES[row].flip(-1))])
        labels = LABELS[list(rows)].repeat_interleave(2)
        return summed_loss(logits_of(model(images)), labels), len(images)

    verify_per_sample_gradients(engine, loss_of)

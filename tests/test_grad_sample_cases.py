"""What engines and the check before a run refuse in one sentence, and mutants of them."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from per_sample_oracle import (
    assert_matches,
    backward,
    loop_of_one,
    random_batch,
    summed_loss,
    trainable,
)
from support import Lambda, Middle, verify
from torch import Tensor, nn

from hf_dpmuon.grad_sample import (
    ENGINES,
    HooksGradSampleModule,
    PerSampleEngine,
    verify_per_sample_gradients,
)
from hf_dpmuon.mechanism import GaussianMechanism

all_engines = pytest.mark.parametrize("engine_class", ENGINES.values(), ids=ENGINES)
Engine = type[PerSampleEngine]


# ---- case 243 ----


class OnlyInEval(nn.Module):
    """Reads its layer in one mode alone."""

    def __init__(self, layer: nn.Module, *, in_training: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.in_training = in_training

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.training is self.in_training else x


@all_engines
@pytest.mark.parametrize("layer", [nn.Linear(12, 12), nn.LayerNorm(12)])
def test_k243_a_layer_that_only_evaluation_reads_is_dead(
    engine_class: Engine, layer: nn.Module
) -> None:
    """Case 243: noise alone would move it."""
    engine = engine_class(Middle(OnlyInEval(layer)).train())
    with pytest.raises(ValueError, match=r"does not reach in training mode.*layer\.layer\.weight"):
        verify(engine)


@all_engines
def test_k243_a_layer_that_only_training_reads_is_alive(engine_class: Engine) -> None:
    engine = engine_class(Middle(OnlyInEval(nn.Linear(12, 12), in_training=True)).train())
    verify(engine)


class LayerDrop(nn.Module):
    """Leaves its layer out of most batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and torch.rand(()) < 0.5 else self.layer(x)


@all_engines
def test_k243_a_layer_that_is_left_out_at_random_is_alive(engine_class: Engine) -> None:
    verify(engine_class(Middle(LayerDrop()).train()))


# ---- case 244 ----


@all_engines
@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_k244_the_check_has_no_more_rows_than_it_may(engine_class: Engine, most: int) -> None:
    images, labels = random_batch(5)
    sizes = []

    def loss_of(model: nn.Module, rows: Sequence[int]) -> tuple[Tensor, int]:
        sizes.append(len(rows))
        selected = list(rows)
        return summed_loss(model(images[selected]), labels[selected]), len(selected)

    engine = engine_class(Middle(nn.Linear(12, 12)).train())
    verify_per_sample_gradients(engine, loss_of, most_rows=most)
    assert max(sizes) == most
    wrong = engine_class(Middle(Lambda(lambda x: x * 1.0)).train())
    real = wrong.add_weighted_sum
    wrong.add_weighted_sum = lambda weights, into: real(
        {n: 1.01 * w for n, w in weights.items()}, into=into
    )
    with pytest.raises(ValueError, match="differ from those of a batch of one"):
        verify_per_sample_gradients(wrong, loss_of, most_rows=most)


# ---- case 266 ----


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(5, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.bag((x[:, :3] > 0).long()) + 0 * x


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layer = kind(12, 12, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, None])[0][:, 0]


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (lambda: nn.LayerNorm(12, bias=False), r"layer \(LayerNorm\)"),
        (Bags, r"layer\.bag \(EmbeddingBag\)"),
        (lambda: Recurrent(nn.LSTM), r"layer\.layer \(LSTM\)"),
        (lambda: Recurrent(nn.GRU), r"layer\.layer \(GRU\)"),
        (lambda: Recurrent(nn.RNN), r"layer\.layer \(RNN\)"),
        (lambda: nn.ReLU(inplace=True), r"layer \(ReLU\)"),
        (lambda: nn.Sequential(nn.Linear(12, 12), nn.SiLU(inplace=True)), r"layer\.1 \(SiLU\)"),
    ],
)
def test_k266_hooks_name_layers_they_have_no_rule_for(
    layer: Callable[[], nn.Module], name: str
) -> None:
    with pytest.raises(ValueError, match=rf"grad_sample_mode='hooks' has no rule for {name}"):
        HooksGradSampleModule(Middle(layer()).train())


@pytest.mark.parametrize("engine_class", [e for n, e in ENGINES.items() if n != "hooks"])
@pytest.mark.parametrize(
    "layer", [lambda: nn.LayerNorm(12, bias=False), Bags, lambda: nn.ReLU(inplace=True)]
)
def test_k266_the_fast_engines_take_them(
    engine_class: Engine, layer: Callable[[], nn.Module]
) -> None:
    model = Middle(layer()).double().train()
    images, labels = random_batch(3, dtype=torch.float64)
    expected = loop_of_one(model, images, labels)
    engine = engine_class(model)
    backward(engine, images, labels)
    assert_matches(engine, expected, rtol=1e-9)


# ---- case 267 ----


class BatchSecond(nn.Module):
    """Takes (tokens, batch, channels), as torch's transformers do by default."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x)).mean(0))


class TurnsWithin(nn.Module):
    """Takes (batch, tokens, channels), and has the batch second in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x.transpose(0, 1))).mean(0))


class TurnsNorm(TurnsWithin):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LayerNorm(12)


@pytest.mark.parametrize("tokens", [4, 6])
@pytest.mark.parametrize("model", [BatchSecond, TurnsWithin, TurnsNorm])
def test_k267_a_batch_that_is_not_first_is_refused_by_hooks(
    model: type[nn.Module], tokens: int
) -> None:
    """Case 267: one image made 2.07 C where there were as many tokens as images."""
    engine = HooksGradSampleModule(model().train())
    mechanism = GaussianMechanism(
        engine, noise_multiplier=0, max_grad_norm=1, sample_rate=1, num_units=1, noise_key=b""
    )
    mechanism.begin()
    with pytest.raises(ValueError, match="batch of one row gives several"):
        engine(torch.randn(4, tokens, 12))


def test_k267_the_trial_of_one_row_leaves_no_trace() -> None:
    model = Middle(nn.Dropout(0.5)).train()
    images, labels = random_batch(4)
    sums = []
    for _ in range(2):
        engine = HooksGradSampleModule(model)
        torch.manual_seed(3)
        backward(engine, images, labels)
        engine.discard()
        torch.manual_seed(3)
        backward(engine, images, labels)
        sums.append(torch.stack(list(engine.per_unit_norms().values())))
        engine.close()
    torch.manual_seed(3)
    engine = HooksGradSampleModule(model)
    backward(engine, images, labels)
    torch.testing.assert_close(torch.stack(list(engine.per_unit_norms().values())), sums[0])


# ---- mutants ----


class Volume(nn.Module):
    def __init__(self, **settings: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(3, 4, 2, **settings)
        self.head = nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = images.view(len(images), 3, 4, 4, 4)
        return self.head(torch.tanh(self.conv(x)).flatten(2).mean(2))


@all_engines
@pytest.mark.parametrize("settings", [{}, {"stride": 2}, {"padding": 1}, {"dilation": 2}])
def test_gradients_of_volumes_are_right_to_a_millionth(
    engine_class: Engine, settings: dict[str, int]
) -> None:
    """Opacus' own tests allow 1e-2, in which a factor of 1.01 is not seen."""
    model = Volume(**settings).double().train()
    images, labels = random_batch(3, dtype=torch.float64)
    expected = loop_of_one(model, images, labels)
    engine = engine_class(model)
    backward(engine, images, labels)
    assert_matches(engine, expected, rtol=1e-6)


class SequenceBias(nn.Module):
    """A token that is appended to each sample, as Opacus' SequenceBias appends it, batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(12))
        self.head = nn.Linear(12, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1).view(len(images), 16, 12)
        x = torch.cat([x, self.bias.expand(len(x), 1, -1)], 1)
        return self.head((torch.softmax(x.mean(2), 1)[..., None] * torch.tanh(x)).sum(1))


@pytest.mark.parametrize("engine_class", [e for n, e in ENGINES.items() if n != "hooks"])
def test_an_appended_token_has_each_sample_s_own_gradient(engine_class: Engine) -> None:
    """In a batch whose samples are far from equal, so that rolled ones are seen."""
    model = SequenceBias().double().train()
    images, labels = random_batch(4, dtype=torch.float64)
    images *= torch.tensor([0.1, 1.0, 3.0, 9.0]).double()[:, None, None, None]
    expected = loop_of_one(model, images, labels)
    own = expected["bias"].flatten(1)
    assert (own - own.roll(1, 0)).norm(dim=1).min() > 1e-3
    engine = engine_class(model)
    backward(engine, images, labels)
    assert_matches(engine, expected, rtol=1e-9)


def test_opacus_sequence_bias_has_each_sample_s_own_gradient() -> None:
    from opacus.layers.dp_multihead_attention import SequenceBias as OpacusBias

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = OpacusBias(12, batch_first=True)
            self.head = nn.Linear(12, 3)

        def forward(self, images: Tensor) -> Tensor:
            x = self.token(images.flatten(1).view(len(images), 16, 12))
            return self.head((F.softmax(x.mean(2), 1)[..., None] * torch.tanh(x)).sum(1))

    model = Model().double().train()
    with torch.no_grad():
        for p in trainable(model).values():
            p.normal_()
    images, labels = random_batch(4, dtype=torch.float64)
    expected = loop_of_one(model, images, labels)
    for engine_class in ENGINES.values():
        engine = engine_class(model)
        backward(engine, images, labels)
        assert_matches(engine, expected, rtol=1e-9)
        engine.close()

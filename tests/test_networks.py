"""Laws of the networks that are trained from scratch.

Counts are taken on the meta device; what computes runs the networks shrunk to a few channels, or
the smallest of them on tiny images.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from per_sample_oracle import assert_matches, backward, loop_of_one, random_batch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hf_dpmuon import DPTrainer, DPTrainingArguments, networks
from hf_dpmuon.data import ImageFormat
from hf_dpmuon.grad_sample import ENGINES
from hf_dpmuon.methods import create_optimizer
from hf_dpmuon.models import FROM_SCRATCH, LoadedModel, load_model, save_model
from hf_dpmuon.networks import ARCHITECTURES, Architecture, ResidualNetwork
from hf_dpmuon.roles import ParameterRole, parameter_roles
from hf_dpmuon.validation import validate_model

NAMES = ("a", "b", "c")
SHRUNK = {
    "wide": Architecture(True, 8, (8, 16), depth=2),
    "resnet": Architecture(False, 8, (8, 16), depth=2),
}


def shrunk(kind: str, patch: pytest.MonkeyPatch) -> LoadedModel:
    """A network of every kind of layer that load_model's has, small, no weight at a round value."""
    torch.manual_seed(0)
    if kind == "nf":
        sizes = {"depths": (2, 1), "channels": (16, 32), "stem_chs": 8}
        real = timm.create_model
        patch.setattr(timm, "create_model", lambda name, **more: real(name, **more, **sizes))
        loaded = load_model("builtin:nf-resnet-50", label_names=NAMES, image_size=16)
        patch.undo()
    else:
        patch.setattr(networks, "NUM_GROUPS", 4)
        patch.setitem(ARCHITECTURES, "hf_dpmuon_wrn_16_4", SHRUNK[kind])
        loaded = load_model("builtin:wrn-16-4", label_names=NAMES, image_size=16)
    with torch.no_grad():
        for p in loaded.model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return loaded


KINDS = pytest.mark.parametrize("kind", [*SHRUNK, "nf"])


def count(build: Callable[[], nn.Module]) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build().parameters())


def logits(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(images)


# ---- what they are ----


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # The paper on DP-Muon says 2.76 million of the first, Zagoruyko and Komodakis 36.5 of the
        # second; the last is He et al.'s 11.2 for ten classes.
        ("hf_dpmuon_wrn_16_4", 2_748_890),
        ("hf_dpmuon_wrn_28_10", 36_479_194),
        ("hf_dpmuon_resnet_18_gn", 11_173_962),
    ],
)
def test_numbers_of_parameters(name: str, expected: int) -> None:
    assert count(lambda: timm.create_model(name, num_classes=10)) == expected


def test_numbers_of_parameters_agree_with_others() -> None:
    """The paper's own number, and timm's ResNet-18 but for its larger stem."""
    wide = count(lambda: timm.create_model("hf_dpmuon_wrn_16_4", num_classes=10))
    assert wide == pytest.approx(2.76e6, rel=0.005)
    ours = count(lambda: timm.create_model("hf_dpmuon_resnet_18_gn", num_classes=10))
    theirs = count(lambda: timm.create_model("resnet18", num_classes=10))
    assert theirs - ours == 64 * 3 * (7 * 7 - 3 * 3)


@pytest.mark.parametrize("name", ["hf_dpmuon_wrn_16_4", "hf_dpmuon_resnet_18_gn"])
def test_stages_halve_the_resolution(name: str) -> None:
    sides = []
    with torch.device("meta"):
        network = timm.create_model(name, num_classes=10)
        for block in network.blocks:
            block.register_forward_hook(lambda _m, _i, output: sides.append(output.shape[-1]))
        assert network(torch.empty(2, 3, 32, 32)).shape == (2, 10)
    assert sides == [32, 32, 16, 16, 8, 8, *([4, 4] if "resnet" in name else [])]


@pytest.mark.parametrize("name", [n for n in FROM_SCRATCH if n != "builtin:wrn-28-10"])
def test_loading(name: str) -> None:
    """The widest is left out for its size; it differs in numbers only."""
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        loaded = load_model(name, label_names=NAMES)
        drawn.append(next(loaded.model.parameters()))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert loaded.notes == (f"{name} is not pretrained: all its weights are random",)
    side = 224 if name == "builtin:nf-resnet-50" else 32
    assert loaded.image_format == ImageFormat(side, side, 3, (0.5,) * 3, (0.5,) * 3, "bicubic")
    validate_model(loaded.model)
    images, _ = random_batch(2, image_size=32)
    assert logits(loaded.model, images).shape == (2, 3)
    assert load_model(name, label_names=NAMES, image_size=64).image_format.width == 64


def test_signals_neither_vanish_nor_explode() -> None:
    torch.manual_seed(0)
    images, _ = random_batch(8, image_size=32)
    for name in ("builtin:wrn-16-4", "builtin:resnet-18-gn"):
        model = load_model(name, label_names=tuple("0123456789")).model
        assert 0.1 < float(logits(model, images).std()) < 3


# ---- roles ----


@KINDS
def test_roles_and_routing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every convolution is orthogonalised, the first and the head too; no gain is."""
    model = shrunk(kind, monkeypatch).model
    roles = parameter_roles(model)
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
    expected = {"conv": len(convolutions) - 1, "head": 2}
    if kind == "nf":  # a gain and a bias each; the first bias goes with its convolution
        expected |= {"patch_embedding": 2, "scale": len(convolutions)}
        expected |= {"bias": len(convolutions) - 1}
    else:
        expected |= {"patch_embedding": 1, "norm": 2 * len(norms)}
    assert Counter(role.value for role in roles.values()) == expected
    first = next(name for name, role in roles.items() if role is ParameterRole.PATCH_EMBEDDING)
    assert dict(model.named_parameters())[first].shape[1] == 3
    optimizer = create_optimizer(model, learning_rate=0.1, vector_learning_rate=0.1)
    matrices = [p for g in optimizer.param_groups if g["rule"] != "sgd" for p in g["params"]]
    weights = [m.weight for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert {id(p) for p in matrices} == {id(p) for p in weights}


# ---- training ----


@KINDS
@pytest.mark.parametrize("mode", ENGINES)
def test_per_sample_gradients_equal_batches_of_one(
    kind: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shrunk(kind, monkeypatch).model.double().train()
    images, labels = random_batch(3, image_size=16, dtype=torch.float64)
    expected = loop_of_one(model, images, labels)
    engine = ENGINES[mode](model)
    backward(engine, images, labels)
    assert_matches(engine, expected, rtol=1e-6)


@pytest.mark.parametrize("mode", ENGINES)
def test_per_sample_gradients_of_the_paper_s_network(mode: str) -> None:
    """Untouched, as it starts: in full width, on images of eight pixels."""
    torch.manual_seed(0)
    model = load_model("builtin:wrn-16-4", label_names=NAMES).model.double().train()
    images, labels = random_batch(2, image_size=8, dtype=torch.float64)
    expected = loop_of_one(model, images, labels)
    engine = ENGINES[mode](model)
    backward(engine, images, labels)
    assert_matches(engine, expected, rtol=1e-6)


class Images(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.images, self.labels = random_batch(16, image_size=16)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"pixel_values": self.images[row], "labels": self.labels[row]}


@KINDS
@pytest.mark.parametrize("mode", ENGINES)
def test_a_private_step_moves_every_parameter(
    tmp_path: Path, kind: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = shrunk(kind, monkeypatch)
    before = {name: p.detach().clone() for name, p in loaded.model.named_parameters()}
    arguments = DPTrainingArguments(
        output_dir=str(tmp_path),
        noise_multiplier=1.0,
        logical_batch_size=8,
        per_device_train_batch_size=4,
        max_steps=1,
        learning_rate=0.1,
        vector_learning_rate=0.1,
        grad_sample_mode=mode,
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = DPTrainer(loaded, arguments, train_dataset=Images())
    trainer.train()
    after = dict(loaded.model.named_parameters())
    assert not [name for name, p in before.items() if torch.equal(p, after[name])]
    trainer.save_model()
    if kind != "nf":  # timm's own would come back in full size
        again = load_model(str(tmp_path), label_names=NAMES)
        images = Images().images
        assert torch.equal(logits(again.model, images), logits(loaded.model, images))


# ---- saving ----


@pytest.mark.parametrize("name", ["builtin:wrn-16-4", "builtin:nf-resnet-50"])
def test_a_saved_network_loads(tmp_path: Path, name: str) -> None:
    loaded = load_model(name, label_names=NAMES, image_size=16)
    save_model(loaded, tmp_path)
    again = load_model(str(tmp_path), label_names=NAMES)
    assert again.image_format == loaded.image_format
    assert again.notes == ()
    assert again.library == loaded.library == "timm"
    images, _ = random_batch(2, image_size=16)
    assert torch.equal(logits(again.model, images), logits(loaded.model, images))
    assert not any(vars(m).get("inplace") for m in again.model.modules())  # for the hooks


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_network_is_a_model_of_timm_s(name: str) -> None:
    """What timm asks of a model: its head, its features, its input and other channels."""
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=3, in_chans=1)
        assert isinstance(model, ResidualNetwork)
        features = model.forward_features(torch.empty(2, 1, 32, 32))
        assert features.shape[:2] == (2, model.num_features)
        assert model.forward_head(features, pre_logits=True).shape == (2, model.num_features)
        assert model.forward_head(features).shape == (2, 3)
        model.reset_classifier(5)
        assert model.get_classifier() is model.head
        assert (model.num_classes, model.head.out_features) == (5, 5)
        assert model(torch.empty(2, 1, 48, 40)).shape == (2, 5)
        model.reset_classifier(0)
        assert model(torch.empty(2, 1, 32, 32)).shape == (2, model.num_features)
    cfg = timm.create_model(name).pretrained_cfg
    assert (cfg["architecture"], cfg["input_size"]) == (name, (3, 32, 32))
    assert (cfg["first_conv"], cfg["classifier"]) == ("stem", "head")


def test_a_saved_network_loads_in_timm_itself(tmp_path: Path) -> None:
    loaded = load_model("builtin:wrn-16-4", label_names=NAMES)
    save_model(loaded, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    images, _ = random_batch(2, image_size=32)
    assert torch.equal(logits(again, images), logits(loaded.model, images))
    assert again.pretrained_cfg["label_names"] == list(NAMES)
    other = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=5)
    assert logits(other, images).shape == (2, 5)


def test_recomputed_activations_give_equal_gradients() -> None:
    torch.manual_seed(0)
    model = load_model("builtin:wrn-16-4", label_names=NAMES).model
    images, _ = random_batch(2, image_size=8)
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        gradients.append(torch.autograd.grad(model(images).sum(), list(model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_saved_timm_network_does_not_pass_for_the_pretrained_one(tmp_path: Path) -> None:
    save_model(load_model("builtin:nf-resnet-50", label_names=NAMES), tmp_path)
    config = (tmp_path / "config.json").read_text()
    assert "ra2_in1k" not in config
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert again.pretrained_cfg["label_names"] == list(NAMES)


def test_other_labels_change_the_head_and_nothing_else(tmp_path: Path) -> None:
    loaded = load_model("builtin:wrn-16-4", label_names=NAMES)
    save_model(loaded, tmp_path)
    again = load_model(str(tmp_path), label_names=("yes", "no"), image_size=48)
    assert again.notes == ("the head is new (2 classes)",)
    assert (again.image_format.height, again.image_format.width) == (48, 48)
    old, new = loaded.model.state_dict(), again.model.state_dict()
    changed = {key for key in old if not torch.equal(old[key], new[key])}
    assert changed == {"head.weight", "head.bias"}


def test_torn_weights_are_one_sentence(tmp_path: Path) -> None:
    save_model(load_model("builtin:wrn-16-4", label_names=NAMES), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot be loaded") as caught:
        load_model(str(tmp_path), label_names=NAMES)
    assert "\n" not in str(caught.value)

"""Laws of the models room, on tiny random models saved by the tests themselves."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support import TINY_MODELS, tiny_dinov2, tiny_timm_vit, tiny_vit
from torch import nn
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    BeitConfig,
    BeitForImageClassification,
    CLIPConfig,
    ViTImageProcessor,
)

from hf_dpmuon.data import build_transforms
from hf_dpmuon.models import load_model, save_model
from hf_dpmuon.roles import ParameterRole, parameter_roles
from hf_dpmuon.validation import validate_model

NAMES = ("a", "b", "c")
OTHER_NAMES = ("d", "e", "f")
HF_MODELS = {name: TINY_MODELS[name] for name in ("vit", "deit", "dinov2")}


def publish(model: nn.Module, folder: Path, *, names: tuple[str, ...] = NAMES) -> Path:
    """Write a model as a checkpoint of its library looks like on the Hub."""
    if hasattr(model, "save_pretrained"):
        model.config.id2label = dict(enumerate(names))
        model.config.label2id = {name: label for label, name in enumerate(names)}
        model.save_pretrained(folder)
        size = model.config.image_size
        channels = model.config.num_channels
        processor = ViTImageProcessor(
            size={"height": size, "width": size},
            image_mean=[0.4] * channels,
            image_std=[0.3] * channels,
        )
        processor.save_pretrained(folder)
    else:
        timm.models.save_for_hf(
            model, str(folder), model_config={"label_names": list(names)}, safe_serialization=True
        )
    return folder


def logits(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        output = model.eval()(images)
    return output if isinstance(output, torch.Tensor) else output.logits


def images(size: int = 8, channels: int = 3) -> torch.Tensor:
    return torch.randn(4, channels, size, size, generator=torch.Generator().manual_seed(0))


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace or, with None, remove stored weights; dots are written as two underscores."""
    state = load_file(folder / "model.safetensors")
    for key, value in changes.items():
        del state[key.replace("__", ".")]
        if value is not None:
            state[key.replace("__", ".")] = value
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


# Loading


@pytest.mark.parametrize("kind", TINY_MODELS)
def test_same_labels_keep_the_head(tmp_path: Path, kind: str) -> None:
    model = TINY_MODELS[kind]()
    loaded = load_model(str(publish(model, tmp_path)), label_names=NAMES)
    assert torch.equal(logits(loaded.model, images()), logits(model, images()))
    assert loaded.notes == ()
    assert loaded.library == ("timm" if kind == "timm_vit" else "transformers")


@pytest.mark.parametrize("kind", TINY_MODELS)
@pytest.mark.parametrize("names", [OTHER_NAMES, ("yes", "no")])
def test_other_labels_change_the_head_and_nothing_else(
    tmp_path: Path, kind: str, names: tuple[str, ...]
) -> None:
    """As many classes of other names need a new head too."""
    model = TINY_MODELS[kind]()
    loaded = load_model(str(publish(model, tmp_path)), label_names=names)
    old, new = model.state_dict(), loaded.model.state_dict()
    assert set(old) == set(new)
    changed = {
        key
        for key in old
        if old[key].shape != new[key].shape or not torch.equal(old[key], new[key])
    }
    roles = parameter_roles(loaded.model)
    assert changed == {key for key, role in roles.items() if role is ParameterRole.HEAD}
    assert logits(loaded.model, images()).shape == (4, len(names))
    assert any("the head is new" in note for note in loaded.notes)


@pytest.mark.parametrize("kind", TINY_MODELS)
def test_the_new_head_follows_the_global_seed(tmp_path: Path, kind: str) -> None:
    folder = str(publish(TINY_MODELS[kind](), tmp_path))
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(logits(load_model(folder, label_names=OTHER_NAMES).model, images()))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_a_checkpoint_that_lacks_more_than_the_head_is_refused(tmp_path: Path) -> None:
    publish(tiny_vit(), tmp_path)
    edit_weights(tmp_path, vit__layernorm__weight=None, classifier__weight=None)
    with pytest.raises(ValueError, match=r"lacks .* for vit\.layernorm\.weight; use"):
        load_model(str(tmp_path), label_names=NAMES)


def test_a_checkpoint_of_other_shapes_is_refused(tmp_path: Path) -> None:
    publish(tiny_vit(), tmp_path)
    edit_weights(tmp_path, vit__embeddings__position_embeddings=torch.zeros(1, 10, 16))
    with pytest.raises(ValueError, match=r"lacks .* vit\.embeddings\.position_embeddings"):
        load_model(str(tmp_path), label_names=NAMES)


def test_a_timm_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    publish(tiny_timm_vit(), tmp_path)
    edit_weights(tmp_path, blocks__1__mlp__fc1__weight=None)
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_model(str(tmp_path), label_names=OTHER_NAMES)


@pytest.mark.parametrize("kind", ["vit", "timm_vit"])
def test_torn_weights_are_one_sentence(tmp_path: Path, kind: str) -> None:
    weights = publish(TINY_MODELS[kind](), tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_model(str(tmp_path), label_names=NAMES)


def test_models_of_more_than_vision_are_refused(tmp_path: Path) -> None:
    size = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    CLIPConfig(vision_config=size, text_config=size).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="models of type clip are not supported"):
        load_model(str(tmp_path), label_names=NAMES)


def test_a_size_that_the_weights_cannot_take_is_refused(tmp_path: Path) -> None:
    config = BeitConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
        num_labels=3,
        use_relative_position_bias=True,
    )
    publish(BeitForImageClassification(config), tmp_path / "beit")
    with pytest.raises(ValueError, match=r"image_size=16 does not fit .* made for 8; use that"):
        load_model(str(tmp_path / "beit"), label_names=NAMES, image_size=16)
    publish(timm.create_model("resnet10t", num_classes=3), tmp_path / "resnet")
    with pytest.raises(ValueError, match="image_size=16 cannot be set for the timm model"):
        load_model(str(tmp_path / "resnet"), label_names=NAMES, image_size=16)


def test_a_checkpoint_without_head_gets_one(tmp_path: Path) -> None:
    publish(tiny_vit(), tmp_path)
    edit_weights(tmp_path, classifier__weight=None, classifier__bias=None)
    assert load_model(str(tmp_path), label_names=NAMES).notes == ("the head is new (3 classes)",)


def test_parameters_that_nothing_reads_are_frozen_and_named(tmp_path: Path) -> None:
    publish(tiny_dinov2(use_mask_token=True), tmp_path)
    loaded = load_model(str(tmp_path), label_names=NAMES)
    frozen = [name for name, p in loaded.model.named_parameters() if not p.requires_grad]
    assert frozen == ["dinov2.embeddings.mask_token"]
    assert any("frozen" in note and frozen[0] in note for note in loaded.notes)
    # and may be missing from the checkpoint
    edit_weights(tmp_path, dinov2__embeddings__mask_token=None)
    load_model(str(tmp_path), label_names=NAMES)


@pytest.mark.parametrize("kind", TINY_MODELS)
def test_bf16_weights_become_fp32_and_say_so(tmp_path: Path, kind: str) -> None:
    loaded = load_model(str(publish(TINY_MODELS[kind]().bfloat16(), tmp_path)), label_names=NAMES)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    # timm builds its models in fp32, whatever the checkpoint holds
    assert kind == "timm_vit" or any("bfloat16" in note for note in loaded.notes)


@pytest.mark.parametrize("kind", HF_MODELS)
def test_another_image_size_resizes_the_table_as_the_library_does(
    tmp_path: Path, kind: str
) -> None:
    model = HF_MODELS[kind](image_size=8)
    loaded = load_model(str(publish(model, tmp_path)), label_names=NAMES, image_size=16)
    assert (loaded.image_format.height, loaded.image_format.width) == (16, 16)
    assert any("refitted once to (16, 16)" in note for note in loaded.notes)
    with torch.no_grad():  # DINOv2 interpolates always, and takes no flag
        flag = {} if kind == "dinov2" else {"interpolate_pos_encoding": True}
        expected = model.eval()(images(16), **flag).logits
    torch.testing.assert_close(logits(loaded.model, images(16)), expected, rtol=0, atol=1e-6)


def test_timm_resizes_its_table(tmp_path: Path) -> None:
    folder = publish(tiny_timm_vit(image_size=8), tmp_path)
    loaded = load_model(str(folder), label_names=NAMES, image_size=16)
    assert loaded.image_format.height == loaded.image_format.width == 16
    assert logits(loaded.model, images(16)).shape == (4, 3)
    assert dict(loaded.model.named_parameters())["pos_embed"].shape[1] == 16 + 3


def test_the_size_of_the_processor_wins_over_that_of_the_weights(tmp_path: Path) -> None:
    """As with DINOv2, whose weights are for 518 pixels and whose images are 224."""
    publish(tiny_dinov2(image_size=16), tmp_path)
    facts = json.loads((tmp_path / "preprocessor_config.json").read_text())
    facts |= {
        "image_processor_type": "BitImageProcessor",
        "do_center_crop": True,
        "size": {"shortest_edge": 12},
        "crop_size": {"height": 8, "width": 8},
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(facts))
    loaded = load_model(str(tmp_path), label_names=NAMES)
    assert loaded.image_format.height == 8
    assert loaded.model.config.image_size == 8


def test_a_grey_model_with_a_colour_processor_states_both_numbers(tmp_path: Path) -> None:
    publish(tiny_vit(num_channels=1), tmp_path)
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"1 channels .* 3 means"):
        load_model(str(tmp_path), label_names=NAMES)


@pytest.mark.parametrize(
    "name", ["nobody/nothing", "timm/vit_tiny_patch16_224", "timm/nothing", "timm/nobody/nothing"]
)
def test_a_model_that_is_nowhere_is_one_sentence(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be loaded; check its spelling") as caught:
        load_model(name, label_names=NAMES)
    assert "\n" not in str(caught.value)


def test_wrong_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"use builtin:tiny-vit, .*builtin:wrn-16-4, .*nf-resnet"):
        load_model("builtin:huge-vit", label_names=NAMES)
    with pytest.raises(ValueError, match="two or more different names"):
        load_model("builtin:tiny-vit", label_names=("a", "a"))
    with pytest.raises(ValueError, match="image_size=0 must be at least 1"):
        load_model("builtin:wrn-16-4", label_names=NAMES, image_size=0)


def test_the_built_in_model_is_a_grey_vit_with_a_new_head() -> None:
    loaded = load_model("builtin:tiny-vit", label_names=tuple("0123456789"))
    assert (loaded.image_format.height, loaded.image_format.num_channels) == (28, 1)
    assert loaded.notes == ("the head is new (10 classes)",)
    validate_model(loaded.model)


# Saving


@pytest.mark.parametrize("image_size", [None, 16])
@pytest.mark.parametrize("kind", TINY_MODELS)
def test_a_saved_model_loads_in_its_own_library(
    tmp_path: Path, kind: str, image_size: int | None
) -> None:
    source = str(publish(TINY_MODELS[kind](), tmp_path / "source"))
    loaded = load_model(source, label_names=("x", "y"), image_size=image_size)
    with torch.no_grad():
        for p in loaded.model.parameters():
            p.add_(0.01)  # trained
    folder = tmp_path / "trained"
    save_model(loaded, folder)
    # no wrapper's prefix: the keys are those of the checkpoint that was loaded
    stored = [set(load_file(path / "model.safetensors")) for path in (folder, Path(source))]
    assert stored[0] == stored[1]
    if kind == "timm_vit":
        again = timm.create_model(f"local-dir:{folder}", pretrained=True)
        assert again.pretrained_cfg["label_names"] == ["x", "y"]
        assert again.pretrained_cfg["crop_mode"] == "squash"  # no edge cut away, as in training
        assert again.pretrained_cfg["crop_pct"] == 1
    else:
        again, info = AutoModelForImageClassification.from_pretrained(
            folder, output_loading_info=True
        )
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert not info["mismatched_keys"]
        assert again.config.id2label == {0: "x", 1: "y"}
    batch = images(image_size or 8)
    assert torch.equal(logits(again, batch), logits(loaded.model, batch))
    reloaded = load_model(str(folder), label_names=("x", "y"))
    assert reloaded.image_format == loaded.image_format
    assert torch.equal(logits(reloaded.model, batch), logits(loaded.model, batch))


@pytest.mark.parametrize("crop", [False, True])
def test_the_saved_processor_prepares_images_as_training_did(tmp_path: Path, crop: bool) -> None:
    publish(tiny_vit(), tmp_path / "source")
    if crop:
        facts = json.loads((tmp_path / "source" / "preprocessor_config.json").read_text())
        facts |= {
            "image_processor_type": "BitImageProcessor",
            "do_center_crop": True,
            "size": {"shortest_edge": 12},
            "crop_size": {"height": 8, "width": 8},
        }
        (tmp_path / "source" / "preprocessor_config.json").write_text(json.dumps(facts))
    loaded = load_model(str(tmp_path / "source"), label_names=NAMES)
    save_model(loaded, tmp_path / "trained")
    processor = AutoImageProcessor.from_pretrained(tmp_path / "trained")
    gradient = torch.arange(40 * 30 * 3, dtype=torch.float64).reshape(40, 30, 3) / 3600 * 255
    image = Image.fromarray(gradient.to(torch.uint8).numpy())
    expected = build_transforms(loaded.image_format, train=False)(image, None)
    prepared = processor(image, return_tensors="pt")["pixel_values"][0]
    levels = 2 / 255 / min(loaded.image_format.std)  # the two resize in different arithmetic
    torch.testing.assert_close(prepared, expected, rtol=0, atol=levels)


# Validation


@pytest.mark.parametrize("kind", TINY_MODELS)
def test_vision_transformers_are_accepted(kind: str) -> None:
    model = TINY_MODELS[kind](dropout=0.1)
    validate_model(model)
    validate_model(model.double())


class Strange(nn.Module):
    """One of each problem that a module can have without being wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.running = nn.InstanceNorm2d(4, track_running_stats=True)
        self.bounded = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.half = nn.Linear(4, 4).bfloat16()
        self.wave = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
        self.absent = nn.Linear(4, 4, device="meta")
        self.split = nn.DataParallel(nn.Linear(4, 4))


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ValueError, match="cannot be trained privately") as caught:
        validate_model(Strange())
    for words in [
        "stem.1",
        "GroupNorm",
        "running",
        "bounded.parametrizations.weight.0",
        "half.weight (torch.bfloat16)",
        "wave",
        "absent.weight",
        "split is wrapped",
    ]:
        assert words in str(caught.value)


def test_batch_norm_is_refused_and_the_group_norm_network_named() -> None:
    with pytest.raises(ValueError, match=r"bn1, .*GroupNorm \(as builtin:resnet-18-gn has it\)"):
        validate_model(timm.create_model("resnet18", num_classes=3))


def test_a_frozen_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter is trainable"):
        validate_model(tiny_vit().requires_grad_(False))


def test_frozen_half_precision_is_accepted() -> None:
    model = tiny_vit()
    model.vit.layers[0].bfloat16().requires_grad_(False)
    validate_model(model)


def test_compiled_models_are_refused() -> None:
    with pytest.raises(ValueError, match="compiled"):
        validate_model(torch.compile(tiny_vit(), backend="eager"))
    model = tiny_vit()
    model.compile(backend="eager")
    with pytest.raises(ValueError, match="compiled"):
        validate_model(model)


def test_frozen_batch_norm_is_accepted() -> None:
    from torchvision.ops import FrozenBatchNorm2d

    validate_model(nn.Sequential(nn.Conv2d(3, 4, 3), FrozenBatchNorm2d(4)))


# Roles

BLOCKS, NORMS = 2, 2 * 2 + 1


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("vit", {"matrix": 6 * BLOCKS, "bias": 6 * BLOCKS, "embedding": 2}),
        ("deit", {"matrix": 6 * BLOCKS, "bias": 6 * BLOCKS, "embedding": 3}),
        ("dinov2", {"matrix": 6 * BLOCKS, "bias": 6 * BLOCKS, "embedding": 2, "scale": 2 * BLOCKS}),
        (
            "timm_vit",
            {
                "matrix": 3 * BLOCKS,
                "fused_qkv": BLOCKS,
                "bias": 4 * BLOCKS,
                "embedding": 3,
                "scale": 2 * BLOCKS,
            },
        ),
    ],
)
def test_roles_of_vision_transformers(kind: str, expected: dict[str, int]) -> None:
    model = TINY_MODELS[kind]()
    roles = parameter_roles(model)
    assert list(roles) == [name for name, _ in model.named_parameters()]
    shared = {"patch_embedding": 2, "head": 2, "norm": 2 * NORMS}
    assert Counter(role.value for role in roles.values()) == expected | shared
    for name, p in model.named_parameters():
        if roles[name] in (ParameterRole.MATRIX, ParameterRole.FUSED_QKV):
            assert p.ndim == 2
        if roles[name] in (ParameterRole.NORM, ParameterRole.SCALE, ParameterRole.BIAS):
            assert p.ndim == 1
        if roles[name] is ParameterRole.HEAD:
            assert p.shape[0] == 3


@pytest.mark.parametrize("kind", TINY_MODELS)
def test_frozen_parameters_keep_their_role(kind: str) -> None:
    model = TINY_MODELS[kind]()
    assert parameter_roles(model) == parameter_roles(model.requires_grad_(False))


def test_roles_do_not_read_names() -> None:
    """Transformers renames modules between versions: a ViT under other names has the same roles."""

    class Renamed(type(tiny_vit())):  # type: ignore[misc]
        base_model_prefix = "trunk"

    model = tiny_vit()
    expected = Counter(parameter_roles(model).values())
    layer = model.vit.layers[0]
    layer.mlp.dense_in, layer.mlp.dense_out = layer.mlp.fc1, layer.mlp.fc2
    del layer.mlp.fc1, layer.mlp.fc2
    layer.self_attention, layer.pre_norm = layer.attention, layer.layernorm_before
    del layer.attention, layer.layernorm_before
    model.trunk, model.logit_layer = model.vit, model.classifier
    del model.vit, model.classifier
    model.__class__ = Renamed
    assert Counter(parameter_roles(model).values()) == expected


def test_distilled_timm_models_have_two_heads() -> None:
    model = timm.create_model(
        "deit_tiny_distilled_patch16_224",
        img_size=8,
        patch_size=4,
        embed_dim=16,
        depth=1,
        num_heads=2,
        num_classes=3,
    )
    heads = {name for name, role in parameter_roles(model).items() if role is ParameterRole.HEAD}
    assert heads == {"head.weight", "head.bias", "head_dist.weight", "head_dist.bias"}


def test_layers_that_the_tiny_models_lack() -> None:
    class RMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    model = nn.ModuleDict(
        {
            "stem": nn.Conv2d(3, 4, 2),
            "conv": nn.Conv2d(4, 4, 2),
            "standardised": timm.layers.ScaledStdConv2d(4, 4, 2),
            "norm": RMSNorm(),
            "attention": nn.MultiheadAttention(4, 2),
            "types": nn.Embedding(2, 4),
            "last": nn.Linear(4, 2),
        }
    )
    assert {name: role.value for name, role in parameter_roles(model).items()} == {
        "stem.weight": "patch_embedding",
        "stem.bias": "patch_embedding",
        "conv.weight": "conv",
        "conv.bias": "bias",
        "standardised.weight": "conv",
        "standardised.gain": "scale",
        "standardised.bias": "bias",
        "norm.weight": "norm",
        "attention.in_proj_weight": "fused_qkv",
        "attention.in_proj_bias": "bias",
        "attention.out_proj.weight": "matrix",
        "attention.out_proj.bias": "bias",
        "types.weight": "embedding",
        "last.weight": "matrix",
        "last.bias": "bias",
    }


def test_importing_the_module_imports_neither_timm_nor_datasets() -> None:
    code = "import sys, hf_dpmuon.models; sys.exit(bool({'timm', 'datasets'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("multi_label", [True, False])
def test_a_model_knows_whether_an_image_may_have_several_labels(tmp_path, multi_label):
    """By its configuration, so that `pipeline` applies a sigmoid or a softmax."""
    loaded = load_model(
        "builtin:tiny-vit", label_names=("edema", "nodule"), multi_label=multi_label
    )
    assert loaded.multi_label == multi_label
    save_model(loaded, tmp_path)
    again = AutoModelForImageClassification.from_pretrained(tmp_path)
    kind = "multi_label_classification" if multi_label else "single_label_classification"
    assert again.config.problem_type == kind


def test_one_label_is_enough_where_an_image_may_have_several():
    loaded = load_model("builtin:tiny-vit", label_names=("nodule",), multi_label=True)
    assert logits(loaded.model, images(28, channels=1)).shape[1] == 1

"""Models as users bring them: fused weights, ties, adapters, wrappers and checkpointing."""

from pathlib import Path

import pytest
import timm
import torch
from per_sample_oracle import assert_matches, backward, loop_of_one, random_batch
from support import Noise, tiny_timm_vit, tiny_vit
from torch import nn
from transformers import (
    AutoModelForImageClassification,
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
    ViTForImageClassification,
)

from hf_dpmuon import DPTrainer, DPTrainingArguments
from hf_dpmuon.data import ImageFormat
from hf_dpmuon.grad_sample import ENGINES
from hf_dpmuon.methods import create_optimizer
from hf_dpmuon.models import LoadedModel, load_model, save_model
from hf_dpmuon.roles import BLOCKS, ParameterRole, parameter_roles
from hf_dpmuon.validation import validate_model

NAMES = ("a", "b", "c")


def loaded(model: nn.Module, library: str = "timm") -> LoadedModel:
    image_format = ImageFormat(8, 8, 3, (0.5,) * 3, (0.5,) * 3, "bicubic")
    return LoadedModel(model, image_format, None, library, NAMES, ())


def trainer_of(folder: Path, model: nn.Module, **settings: object) -> DPTrainer:
    args = DPTrainingArguments(
        str(folder),
        **{
            "noise_multiplier": 1.0,
            "logical_batch_size": 8,
            "per_device_train_batch_size": 4,
            "max_steps": 2,
            "noise_seed": 1,
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "no",
            **settings,
        },
    )
    return DPTrainer(model, args, train_dataset=Noise())


# ---- case 242: what a fused weight holds ----


def on_meta(name: str, **settings: object) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, **settings)


@pytest.mark.parametrize(
    ("name", "ending", "matrices"),
    [
        ("vit_base_patch16_siglip_224", "attn_pool.kv.weight", 2),
        ("vit_base_patch16_siglip_224", "attn.qkv.weight", 3),
        ("pvt_v2_b0", ".kv.weight", 2),
        ("convit_tiny", "attn.qk.weight", 2),
        ("tnt_s_patch16_224", ".qk.weight", 2),
        ("gcvit_xxtiny", "qkv.weight", None),
        ("cait_xxs24_224", "attn.qkv.weight", 3),
        ("crossvit_9_240", "attn.qkv.weight", 3),
    ],
)
def test_k242_a_fused_weight_is_as_many_matrices_as_it_holds(
    name: str, ending: str, matrices: int | None
) -> None:
    """Case 242: two halves, or three thirds; gcvit has both under one name."""
    model = on_meta(name)
    roles = parameter_roles(model)
    fused = {n: p for n, p in model.named_parameters() if n.endswith(ending)}
    assert fused
    for parameter, p in fused.items():
        held = len(p) // p.shape[1]
        assert held in (2, 3)
        assert BLOCKS[roles[parameter]] == (matrices or held)


def test_k242_the_halves_are_orthogonalised_apart() -> None:
    model = nn.Module()
    model.attention = nn.Module()
    model.attention.kv = nn.Linear(6, 12, bias=False)
    model.attention.qkv = nn.Linear(6, 18, bias=False)
    model.attention.qk = nn.Linear(6, 8, bias=False)
    optimizer = create_optimizer(
        model, dp_optimizer="muon", learning_rate=1.0, vector_learning_rate=1.0
    )
    blocks = {
        id(p): group.get("blocks", 1) for group in optimizer.param_groups for p in group["params"]
    }
    found = [blocks[id(getattr(model.attention, n).weight)] for n in ("kv", "qkv", "qk")]
    assert found == [2, 3, 2]


# ---- case 255 ----


@pytest.mark.parametrize("mode", ["bookkeeping", "ghost"])
@pytest.mark.parametrize("kind", ["timm", "builtin:wrn-16-4"])
def test_k255_timm_and_convolutional_networks_recompute_activations(
    tmp_path: Path, mode: str, kind: str
) -> None:
    """Case 255: the same weights as without, and the arguments are as they were."""
    weights = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        if kind == "timm":
            model = loaded(tiny_timm_vit())
        else:
            model = load_model(kind, label_names=NAMES, image_size=8)
        trainer = trainer_of(
            tmp_path / str(checkpointing),
            model,
            grad_sample_mode=mode,
            activation_checkpointing=checkpointing,
        )
        trainer.train()
        assert trainer.args.activation_checkpointing is checkpointing
        weights.append(model.model.state_dict())
    for name, plain in weights[0].items():
        torch.testing.assert_close(weights[1][name], plain, rtol=1e-4, atol=1e-5, msg=name)


def test_k255_a_model_that_cannot_says_so(tmp_path: Path) -> None:
    class Plain(nn.Sequential):
        pass

    model = Plain(nn.Flatten(), nn.Linear(192, 3))
    trainer = trainer_of(tmp_path, loaded(model), activation_checkpointing=True)
    with pytest.raises(ValueError, match=r"^activation_checkpointing=True: Plain does not know"):
        trainer.train()


# ---- case 256 ----


def tied_vit() -> nn.Module:
    model = tiny_vit()
    model.vit.layers[1] = model.vit.layers[0]  # a shared block, which HF is not told of
    return model


def tied_timm() -> nn.Module:
    model = tiny_timm_vit()
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    return model


def half_tied() -> nn.Module:
    model = tiny_vit()
    first, second = (layer.mlp.fc1 for layer in model.vit.layers)
    second.weight = first.weight
    return model


@pytest.mark.parametrize("factory", [tied_vit, half_tied])
def test_k256_undeclared_ties_are_trained_saved_and_loaded(tmp_path: Path, factory) -> None:
    """Case 256: also in checkpoints, from which a run goes on."""
    trainer = trainer_of(tmp_path, factory(), save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model()
    images = torch.randn(2, 3, 8, 8)
    again = AutoModelForImageClassification.from_pretrained(tmp_path)
    trained = trainer.model.eval()(images).logits
    torch.testing.assert_close(again.eval()(images).logits, trained)
    resumed = trainer_of(tmp_path, factory(), save_strategy="steps", save_steps=1, max_steps=3)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3


def test_k256_ties_within_timm_models_are_saved_and_loaded(tmp_path: Path) -> None:
    model = tied_timm()
    save_model(loaded(model), tmp_path)
    state = __import__("safetensors.torch").torch.load_file(tmp_path / "model.safetensors")
    assert set(state) == set(model.state_dict())


@pytest.mark.parametrize("part", [slice(0, 16), slice(8, 24)])
def test_k256_two_parameters_in_one_storage_are_refused(part: slice) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(16, 16))
    model[1].weight = nn.Parameter(model[0].weight.data[part])
    with pytest.raises(ValueError, match=r"[01]\.weight and [01]\.weight share memory"):
        validate_model(model)


# ---- cases 237, 240 ----


def wrapped() -> TimmWrapperForImageClassification:
    config = TimmWrapperConfig(
        architecture="vit_tiny_patch16_224",
        num_labels=3,
        do_pooling=True,
        model_args={
            "img_size": 8,
            "patch_size": 4,
            "embed_dim": 16,
            "depth": 1,
            "num_heads": 2,
        },
    )
    return TimmWrapperForImageClassification(config)


def test_k237_the_head_of_a_timm_model_in_hf_s_wrapper_is_found() -> None:
    """Case 237: so that orthogonalize_head=False keeps it out."""
    model = wrapped()
    heads = [n for n, role in parameter_roles(model).items() if role is ParameterRole.HEAD]
    assert heads == ["timm_model.head.weight", "timm_model.head.bias"]
    optimizer = create_optimizer(
        model,
        dp_optimizer="muon",
        learning_rate=1.0,
        vector_learning_rate=1.0,
        orthogonalize_head=False,
    )
    head = model.timm_model.head.weight
    (group,) = [g for g in optimizer.param_groups if any(p is head for p in g["params"])]
    assert group["rule"] == "sgd"


# ---- timm's channels, which a mutant took for 3 ----


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_of_a_timm_model_are_its_own(tmp_path: Path, channels: int) -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=8,
        patch_size=4,
        embed_dim=16,
        depth=1,
        num_heads=2,
        in_chans=channels,
        num_classes=3,
    )
    written = ImageFormat(8, 8, channels, (0.5,) * channels, (0.5,) * channels, "bicubic")
    save_model(LoadedModel(model, written, None, "timm", NAMES, ()), tmp_path)
    again = load_model(str(tmp_path), label_names=NAMES)
    assert again.image_format == written
    images = torch.randn(2, channels, 8, 8)
    torch.testing.assert_close(again.model.eval()(images), model.eval()(images))


@pytest.mark.parametrize("engine", ["bookkeeping", "ghost"])
def test_a_network_that_recomputes_has_the_same_gradients(engine: str) -> None:
    model = load_model("builtin:wrn-16-4", label_names=NAMES, image_size=8).model.double()
    images, labels = random_batch(2, dtype=torch.float64)
    expected = loop_of_one(model, images, labels)
    model.set_grad_checkpointing()
    wrapped_model = ENGINES[engine](model)
    backward(wrapped_model, images, labels)
    assert_matches(wrapped_model, expected, rtol=1e-6)


def test_k256_a_tied_model_is_still_a_plain_one() -> None:
    assert isinstance(tied_vit(), ViTForImageClassification)
    validate_model(tied_vit())

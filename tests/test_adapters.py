"""LoRA adapters of peft, and training a part of a model: what trains, is saved and is refused."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from per_sample_oracle import backward, logits_of, loop_of_one, random_batch, trainable
from support import (
    NUM_CLASSES,
    as_loaded,
    largest_difference,
    tiny_dinov2,
    tiny_timm_vit,
    tiny_vit,
    trainer_of,
    weights,
)
from transformers import AutoModelForImageClassification

from hf_dpmuon.adapters import adapter_layers, add_lora, merged
from hf_dpmuon.grad_sample import (
    BookKeepingGradSampleModule,
    GhostGradSampleModule,
    HooksGradSampleModule,
)
from hf_dpmuon.roles import parameter_roles
from hf_dpmuon.scope import train_only
from hf_dpmuon.validation import validate_model

LAYERS = {"vit": ["q_proj", "fc1"], "timm": ["qkv", "fc2"]}
IMAGES, LABELS = random_batch(5)


def adapted(kind: str = "vit", way: str = "inject") -> torch.nn.Module:
    """A tiny model with adapters whose B is not zero, and its head trainable."""
    model = tiny_vit() if kind == "vit" else tiny_timm_vit()
    head = "classifier" if kind == "vit" else "head"
    config = peft.LoraConfig(r=2, target_modules=LAYERS[kind])
    if way == "get":
        config.modules_to_save = [head]
        model = peft.get_peft_model(model, config)
    elif way == "add":
        model.add_adapter(config)
    else:
        peft.inject_adapter_in_model(config, model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.add_(0.3 * torch.randn_like(p))
            if way != "get" and f"{head}." in name:
                p.requires_grad_(True)
    return model.eval()


@pytest.mark.parametrize(
    "engine", [BookKeepingGradSampleModule, GhostGradSampleModule, HooksGradSampleModule]
)
@pytest.mark.parametrize("kind", ["vit", "timm"])
def test_per_sample_gradients_of_adapters_equal_a_loop_of_one(engine, kind):
    model = adapted(kind).train()
    expected = loop_of_one(model, IMAGES, LABELS)
    assert any("lora_A" in name for name in expected)
    wrapped = engine(model)
    backward(wrapped, IMAGES, LABELS)
    norms = wrapped.per_unit_norms()
    for name, gradients in expected.items():
        torch.testing.assert_close(
            norms[name], gradients.flatten(1).norm(dim=1), rtol=1e-5, atol=1e-6
        )
    wrapped.close()


@pytest.mark.parametrize("way", ["inject", "add", "get"])
def test_k240_a_model_with_adapters_trains_and_loads_again_with_equal_logits(
    tmp_path, monkeypatch, way
):
    """Case 240: it was saved without its adapters."""
    # ``add_adapter`` of transformers 5.24 asks for a release of peft that is still to come.
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.17.0")
    model = adapted(way=way)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = trainer_of(tmp_path, model)
    assert adapter_layers(trainer.model)
    trainer.train()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == set(trainable(model))  # and nothing that is frozen
    trainer.save_model()
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == tiny_vit().state_dict().keys()
    with torch.no_grad():
        ours = logits_of(trainer.model.eval()(IMAGES))
    torch.testing.assert_close(logits_of(loaded.eval()(IMAGES)), ours, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["vit", "timm"])
def test_merging_changes_no_logit_and_leaves_the_model_alone(kind):
    model = adapted(kind)
    before = weights(model)
    plain = merged(model)
    assert not adapter_layers(plain)
    torch.testing.assert_close(logits_of(plain(IMAGES)), logits_of(model(IMAGES)))
    assert largest_difference(before, weights(model)) == 0
    assert merged(plain) is plain


def test_a_resumed_run_goes_on_with_its_adapters(tmp_path):
    through = trainer_of(tmp_path / "a", adapted(), save_strategy="steps", save_steps=2)
    through.train()
    resumed = trainer_of(tmp_path / "b", adapted())
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert largest_difference(weights(through.model), weights(resumed.model)) == 0


@pytest.mark.parametrize("change", ["frozen weights", "rank"])
def test_a_run_does_not_go_on_with_adapters_beside_other_weights(tmp_path, change):
    trainer_of(tmp_path / "a", adapted(), save_strategy="steps", save_steps=2).train()
    other = adapted() if change == "frozen weights" else tiny_vit()
    if change == "rank":
        add_lora(other, ["vit.layers.0.mlp.fc1"], rank=3)
    else:
        with torch.no_grad():
            next(p for p in other.parameters() if not p.requires_grad).add_(1.0)
    with pytest.raises(ValueError, match="other"):
        trainer_of(tmp_path / "b", other).train(
            resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2")
        )


KINDS = {
    "DoRA": lambda m: peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, use_dora=True, target_modules=["fc1"]), m
    ),
    "bias": lambda m: peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, lora_bias=True, target_modules=["fc1"]), m
    ),
    "IA3": lambda m: peft.inject_adapter_in_model(
        peft.IA3Config(target_modules=["fc1"], feedforward_modules=[]), m
    ),
    "LoHa": lambda m: peft.inject_adapter_in_model(peft.LoHaConfig(r=2, target_modules=["fc1"]), m),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_adapters_are_refused_by_name(tmp_path, kind):
    model = KINDS[kind](tiny_vit())
    with pytest.raises(ValueError, match=r"fc1.* of peft are no plain LoRA"):
        trainer_of(tmp_path, model)


def test_adapters_that_do_nothing_or_are_several_are_refused():
    disabled, merged_in, two = adapted(), adapted(), adapted()
    for layer in adapter_layers(disabled).values():
        layer.enable_adapters(False)
    for layer in adapter_layers(merged_in).values():
        layer.merge()
    peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, target_modules=["fc1"]), two, adapter_name="second"
    )
    for layer in adapter_layers(two).values():
        layer.set_adapter(list(layer.lora_A))
    for model, message in ((disabled, "disabled or"), (merged_in, "merged"), (two, "several")):
        with pytest.raises(ValueError, match=message):
            validate_model(model)


def test_adapters_beside_a_weight_that_layers_share_are_refused():
    model = tiny_vit()
    first, second = (layer.attention for layer in model.vit.layers)
    second.q_proj.weight = first.q_proj.weight
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), model)
    with pytest.raises(ValueError, match="beside a weight that others share"):
        validate_model(model)


def test_a_wrapper_of_peft_that_is_no_model_is_refused(tmp_path):
    """The tuner inside what ``get_peft_model`` returns."""
    with pytest.raises(ValueError, match="LoraModel of peft, which is not supported"):
        trainer_of(tmp_path, adapted(way="get").base_model)


# The part that is trained


def loaded_of(kind: str = "dinov2"):
    return as_loaded(tiny_timm_vit() if kind == "timm" else tiny_dinov2())


@pytest.mark.parametrize("kind", ["dinov2", "timm"])
@pytest.mark.parametrize("part", ["head", "bias", "norm", "lora", "last_n=1", "last_n=2"])
def test_what_is_trained_is_the_part_that_was_named_and_the_head(kind, part):
    loaded = loaded_of(kind)
    roles = parameter_roles(loaded.model)
    names = {
        "head": lambda n: False,
        "bias": lambda n: n.endswith("bias"),
        "norm": lambda n: roles[n].value == "norm",
        "lora": lambda n: "lora_" in n,
        # blocks 0 and 1, then the last norm; what comes before them stays frozen
        "last_n=1": lambda n: ".1." in n or ("norm" in n and ".0." not in n and "blocks" not in n),
        "last_n=2": lambda n: ".0." in n or ".1." in n or ("norm" in n and "embed" not in n),
    }[part]
    result = train_only(loaded, part, lora_rank=2)
    trained = set(trainable(result.model))
    heads = {n for n, role in parameter_roles(result.model).items() if role.value == "head"}
    assert heads
    assert trained == heads | {n for n, _ in result.model.named_parameters() if names(n)}
    assert "trained:" in result.notes[-1]


def test_all_of_a_model_is_left_as_it_is():
    loaded = loaded_of()
    assert train_only(loaded, "all", lora_rank=8) is loaded


def test_what_is_frozen_already_stays_frozen():
    loaded = loaded_of()
    for p in loaded.model.parameters():
        p.requires_grad_(p.ndim > 1)
    train_only(loaded, "norm", lora_rank=8)
    assert all(p.ndim > 1 for p in trainable(loaded.model).values())


def test_new_adapters_leave_the_logits_as_they_were_and_give_every_matrix_one():
    loaded = loaded_of()
    before = logits_of(copy.deepcopy(loaded.model).eval()(IMAGES))
    model = train_only(loaded, "lora", lora_rank=2).model
    torch.testing.assert_close(logits_of(model.eval()(IMAGES)), before)
    shapes = [p.shape for n, p in model.named_parameters() if "lora_A" in n]
    assert len(shapes) == 2 * 6  # query, key, value, output and two of the perceptron a block
    assert {s[0] for s in shapes} == {2}


@pytest.mark.parametrize(
    ("part", "rank", "message"),
    [
        ("lroa", 8, "trainable='lroa' must be all, head"),
        ("last_n=0", 8, "must be all, head"),
        ("last_n=3", 8, "at most 2"),
        ("lora", 0, "lora_rank=0 must be at least 1"),
    ],
)
def test_a_part_that_is_none_is_refused(part, rank, message):
    with pytest.raises(ValueError, match=message):
        train_only(loaded_of(), part, lora_rank=rank)


def test_a_model_without_a_known_head_is_refused():
    loaded = as_loaded(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, NUM_CLASSES)))
    with pytest.raises(ValueError, match="head of a Sequential is not known"):
        train_only(loaded, "head", lora_rank=8)


def test_without_peft_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ValueError, match=r"hf-dpmuon\[lora\]"):
        train_only(loaded_of(), "lora", lora_rank=2)


def test_the_factors_of_an_adapter_are_matrices_to_muon(tmp_path):
    trainer = trainer_of(tmp_path, adapted())
    roles = parameter_roles(trainer.model)
    factors = {n for n in roles if "lora_" in n}
    assert {roles[n].value for n in factors} == {"matrix"}
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    spectral = {id(p) for g in optimizer.param_groups if g["rule"] == "muon" for p in g["params"]}
    assert {id(dict(trainer.model.named_parameters())[n]) for n in factors} <= spectral

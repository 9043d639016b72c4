"""Every model family that is supported or refused, as a tiny random network.

``python tests/model_zoo.py`` prints docs/models.md, which a test holds equal to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import timm
import torch
import transformers
from torch import Tensor, nn

from hf_dpmuon.networks import ARCHITECTURES

NUM_CLASSES = 3


@dataclass(frozen=True)
class Family:
    """A model and what the engines make of it.

    Attributes:
        name: As users know it.
        build: Makes a tiny random one.
        image_size: Of its input.
        notes: What a user should know.
        refused: Part of the error's message, if the engines refuse it.
        hooks: Whether the reference engine is shown equal, too.
    """

    name: str
    build: Callable[[], nn.Module] = field(repr=False)
    image_size: int = 16
    notes: str = ""
    refused: str = ""
    hooks: bool = False


def hf(name: str, **settings: Any) -> nn.Module:
    """A tiny HF classifier; ``settings`` go to its configuration."""
    config = getattr(transformers, f"{name}Config")
    model = getattr(transformers, f"{name}ForImageClassification")
    return model(config(num_labels=NUM_CLASSES, **settings))


TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 4,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def vision_classifier(kind: str, **settings: Any) -> nn.Module:
    """A classifier whose configuration holds one of its vision tower."""
    config = getattr(transformers, f"{kind}Config")(vision_config={**TINY, **settings})
    config.num_labels = NUM_CLASSES
    return getattr(transformers, f"{kind}ForImageClassification")(config)


class Dinov3Classifier(nn.Module):
    """HF has no DINOv3 classifier: a linear head on the pooled features."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.DINOv3ViTConfig(
            **TINY,
            num_register_tokens=2,
            layerscale_value=0.5,
            use_gated_mlp=True,
            pos_embed_rescale=None,  # else positions are random in training
        )
        self.backbone = transformers.DINOv3ViTModel(config)
        self.classifier = nn.Linear(16, NUM_CLASSES)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.classifier(self.backbone(pixel_values).pooler_output)


def timm_model(name: str, **settings: Any) -> nn.Module:
    return timm.create_model(name, num_classes=NUM_CLASSES, **settings)


def residual(name: str, widths: tuple[int, ...]) -> nn.Module:
    """A residual network with all its blocks, in fewer channels."""
    few = replace(ARCHITECTURES[name], stem_width=16, widths=widths)
    with mock.patch.dict(ARCHITECTURES, {name: few}):
        return timm_model(name)


TIMM_VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
TIMM_STAGES = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}
GROUP_NORM = partial(timm.layers.GroupNorm, num_groups=4)


SWIN = {
    "embed_dim": 8,
    "depths": [2, 1],
    "num_heads": [2, 2],
    "window_size": 4,
    "image_size": 32,
    "patch_size": 4,
    "drop_path_rate": 0.0,
}
TIMM_SWIN = {
    "img_size": 32,
    "patch_size": 4,
    "window_size": 4,
    "embed_dim": 8,
    "depths": (2, 1),
    "num_heads": (2, 2),
    "drop_path_rate": 0.0,
}
CONVNEXT = {"depths": [1, 1], "hidden_sizes": [8, 16], "num_stages": 2}
RELATIVE = {"use_relative_position_bias": True, "use_absolute_position_embeddings": False}
BEIT = {**TINY, **NO_DROPOUT, "drop_path_rate": 0.0, "layer_scale_init_value": 0.5}
REGISTERS = "registers, LayerScale"

FAMILIES = [
    Family("HF ViT", partial(hf, "ViT", **TINY), hooks=True),
    Family("HF DeiT", partial(hf, "DeiT", **TINY), notes="distillation token", hooks=True),
    Family("HF BEiT", partial(hf, "Beit", **BEIT, use_absolute_position_embeddings=True)),
    Family("HF BEiT, relative positions", partial(hf, "Beit", **BEIT, **RELATIVE)),
    Family(
        "HF BEiT, shared relative positions",
        partial(hf, "Beit", **BEIT, use_shared_relative_position_bias=True),
    ),
    Family("HF DINOv2", partial(hf, "Dinov2", **TINY, mlp_ratio=2), notes="LayerScale", hooks=True),
    Family(
        "HF DINOv2, interpolated positions",
        partial(hf, "Dinov2", **{**TINY, "image_size": 24}, mlp_ratio=2),
        notes="position table resized in each forward",
    ),
    Family(
        "HF DINOv2 with registers",
        partial(hf, "Dinov2WithRegisters", **TINY, mlp_ratio=2, num_register_tokens=2),
        notes=REGISTERS,
        hooks=True,
    ),
    Family(
        "HF DINOv3 ViT",
        Dinov3Classifier,
        notes="engine only: transformers has no classifier of it, so load timm's",
        hooks=True,
    ),
    Family("HF Swin", partial(hf, "Swin", **SWIN), 32, "shifted windows"),
    Family("HF SwinV2", partial(hf, "Swinv2", **SWIN), 32, "position bias from a network"),
    Family("HF CLIP", partial(vision_classifier, "CLIP")),
    Family("HF SigLIP", partial(vision_classifier, "Siglip"), notes="its unused head is frozen"),
    Family("HF ConvNeXt", partial(hf, "ConvNext", **CONVNEXT)),
    Family("HF ConvNeXt V2", partial(hf, "ConvNextV2", **CONVNEXT)),
    Family("timm vit", partial(timm_model, "vit_tiny_patch16_224", **TIMM_VIT), hooks=True),
    Family(
        "timm vit with registers",
        partial(timm_model, "vit_tiny_patch16_224", **TIMM_VIT, reg_tokens=2, init_values=0.5),
        notes=REGISTERS,
        hooks=True,
    ),
    Family(
        "timm vit, any image size",
        partial(
            timm_model,
            "vit_tiny_patch16_224",
            **{**TIMM_VIT, "img_size": 24},
            dynamic_img_size=True,
        ),
        notes="position table resized in each forward",
    ),
    Family(
        "timm deit3",
        partial(timm_model, "deit3_small_patch16_224", **TIMM_VIT),
        notes="LayerScale",
        hooks=True,
    ),
    Family(
        "timm eva02",
        partial(timm_model, "eva02_tiny_patch14_224", **TIMM_VIT, init_values=0.5),
        notes="rotary positions, composite-owned scales",
    ),
    Family(
        "timm beit",
        partial(timm_model, "beit_base_patch16_224", **TIMM_VIT, init_values=0.5),
        notes="query and value biases of a fused projection",
    ),
    Family("timm swin", partial(timm_model, "swin_tiny_patch4_window7_224", **TIMM_SWIN), 32),
    Family("timm swinv2", partial(timm_model, "swinv2_tiny_window8_256", **TIMM_SWIN), 32),
    Family(
        "timm dinov3",
        partial(timm_model, "vit_small_patch16_dinov3", **TIMM_VIT, init_values=0.5),
        notes=f"{REGISTERS}, rotary positions",
    ),
    Family(
        "timm siglip",
        partial(timm_model, "vit_base_patch16_siglip_224", **TIMM_VIT),
        notes="pooled by attention from a learned query",
    ),
    Family("timm convnext", partial(timm_model, "convnext_atto", **TIMM_STAGES), 32),
    Family("timm convnextv2", partial(timm_model, "convnextv2_atto", **TIMM_STAGES), 32),
    Family("timm cait", partial(timm_model, "cait_xxs24_224", **TIMM_VIT)),
    Family(
        "builtin:wrn-16-4",
        partial(residual, "hf_dpmuon_wrn_16_4", (16, 32, 32)),
        notes="from scratch; builtin:wrn-28-10 is the same, deeper and wider, and not run here",
        hooks=True,
    ),
    Family(
        "builtin:resnet-18-gn",
        partial(residual, "hf_dpmuon_resnet_18_gn", (16, 16, 32, 32)),
        notes="from scratch",
        hooks=True,
    ),
    Family(
        "timm resnet18 with GroupNorm",
        partial(timm_model, "resnet18", channels=(16, 16, 32, 32), norm_layer=GROUP_NORM),
        32,
        notes="from scratch",
    ),
    Family(
        "timm nf_resnet50",
        partial(
            timm_model, "nf_resnet50", depths=(1, 1, 1, 1), channels=(16, 16, 32, 32), stem_chs=8
        ),
        32,
        notes="from scratch, standardised weights; builtin:nf-resnet-50 is made of the same layers",
    ),
    Family("timm resnet18", partial(timm_model, "resnet18"), 32, refused="GroupNorm"),
    Family(
        "HF ResNet",
        partial(hf, "ResNet", depths=[1, 1], hidden_sizes=[8, 16]),
        32,
        refused="GroupNorm",
    ),
    Family("HF LeViT", partial(hf, "Levit", image_size=64), 64, refused="GroupNorm"),
]
REASONS = {"GroupNorm": "BatchNorm mixes the samples of a batch: use builtin:resnet-18-gn"}


def build(family: Family) -> nn.Module:
    """A random model in double precision, no parameter at a round value, unread ones frozen."""
    torch.manual_seed(0)
    model = family.build().double().train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def freeze_unread(model: nn.Module, logits: Tensor) -> None:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(logits.sum(), parameters, allow_unused=True)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.requires_grad_(gradient is not None)


def documentation() -> str:
    lines = [
        "# Models",
        "",
        "Families whose every trainable parameter has exact per-sample gradients, shown equal",
        "to batches of one image by `tests/test_models_matrix.py`. This page is made from that",
        "test's list: `python tests/model_zoo.py > docs/models.md`. Under *hooks*, *no* means",
        "not shown equal: the engine refuses the family, or Opacus' rules get a layer of it",
        "wrong, which stops the first step.",
        "",
        "| family | bookkeeping, ghost | hooks | notes |",
        "|---|---|---|---|",
    ]
    for family in FAMILIES:
        if family.refused:
            lines.append(f"| {family.name} | refused | refused | {REASONS[family.refused]} |")
        else:
            hooks = "yes" if family.hooks else "no"
            lines.append(f"| {family.name} | yes | {hooks} | {family.notes} |")
    lines += [
        "",
        "What the bookkeeping and ghost engines refuse by name in any model:",
        "",
        "- BatchNorm, InstanceNorm with running statistics, and scripted modules (`torch.jit`),",
        "  when the engine is built. Use GroupNorm, and the module before it was scripted;",
        "  modules under `torch.compile` are fine.",
        "- `nn.MultiheadAttention` with trainable weights: it is one function to torch, with",
        "  the batch in its second dimension; use an attention of Linear layers.",
        "- A parameter that meets activations whose rows are not the samples': their number is",
        "  no multiple of the batch size; they were picked by value (`x[mask]`, `nonzero`, an",
        "  index made of the batch) or computed from any that were; or the batch, known to come",
        "  first, was reduced, sorted, flipped, rolled, cut, concatenated or moved.",
        "- Embeddings with `max_norm` or `scale_grad_by_freq`, which look at the whole batch,",
        "  or with `sparse=True`; an `EmbeddingBag` of one-dimensional input, whose bags only",
        "  offsets tell.",
        "- A block that reentrant activation checkpointing repeats, if it was called with",
        "  different parameters or tensors made of them; `use_reentrant=False` takes it.",
        "- A gradient within the model or its loss (`create_graph=True`).",
        "- Parameters read by an `autograd.Function`, or by the loss itself: they receive a",
        "  gradient that is not known per sample, which stops the step before any update.",
        "- Two parameters that share memory; one parameter in several modules is fine, and is",
        "  saved under each of its names.",
        "- Adapters of peft other than LoRA on linear layers and convolutions (DoRA and its kin).",
        "",
        "The hooks engine refuses by name, besides: recurrent layers, `EmbeddingBag`, norms",
        "without a bias, activations with `inplace=True`, and a batch that is not the first",
        "dimension of the inputs or within the model.",
        "",
        "An engine of one's own use wraps a model in training form:",
        "`engine = BookKeepingGradSampleModule(model)`. After a forward pass through it and",
        "`backward` of a loss *summed* over rows, `engine.per_unit_norms()` gives for each",
        "parameter that was reached, by name, the norm of every unit's gradient (a row is a",
        "unit, unless `set_units` said otherwise before the pass);",
        "`add_weighted_sum(weights, into=sums)` adds the weighted gradients up, and `discard()`",
        "drops them. `engine.close()` leaves the model as if it had never been wrapped: no hook,",
        "gradient or state of the engine. `DPTrainer` does all this itself.",
        "",
        "What only the check before a run finds, which compares with batches of one: samples",
        "mixed after a permutation has moved the batch (windows laid out before samples and",
        "flattened), in a function that mixes them itself (`F.batch_norm`, `einsum`), or out of",
        "torch's sight (numpy, `item`). It runs on a few rows, so a path that these do not take",
        "is not seen.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(documentation(), end="")

"""Tiny random models, one factory per architecture. Nothing here reaches the network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything that reads it is imported

from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    Dinov2Config,
    Dinov2ForImageClassification,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

NUM_CLASSES = 3


def _hf(config: type, model: type[PreTrainedModel], *, seed: int, **settings: object) -> nn.Module:
    torch.manual_seed(seed)
    return _randomise(
        model(
            config(
                **{
                    "hidden_size": 16,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "intermediate_size": 32,
                    "image_size": 8,
                    "patch_size": 4,
                    "num_labels": NUM_CLASSES,
                    **settings,
                }
            )
        )
    )


def _randomise(model: nn.Module) -> nn.Module:
    """Move tokens, scales and biases off the zeros and ones at which faults would hide."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def tiny_vit(
    *, image_size: int = 8, num_channels: int = 3, dropout: float = 0.0, seed: int = 0
) -> nn.Module:
    """HF ViT of 2 blocks and width 16, with 4-pixel patches."""
    return _hf(
        ViTConfig,
        ViTForImageClassification,
        seed=seed,
        image_size=image_size,
        num_channels=num_channels,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )


def tiny_deit(
    *, image_size: int = 8, num_channels: int = 3, dropout: float = 0.0, seed: int = 0
) -> nn.Module:
    """HF DeiT, which adds a distillation token."""
    return _hf(
        DeiTConfig,
        DeiTForImageClassification,
        seed=seed,
        image_size=image_size,
        num_channels=num_channels,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )


def tiny_dinov2(
    *,
    image_size: int = 8,
    num_channels: int = 3,
    dropout: float = 0.0,
    drop_path: float = 0.0,
    use_mask_token: bool = False,
    seed: int = 0,
) -> nn.Module:
    """HF DINOv2, which adds LayerScale and, if asked, a mask token that nothing reads."""
    return _hf(
        Dinov2Config,
        Dinov2ForImageClassification,
        seed=seed,
        image_size=image_size,
        num_channels=num_channels,
        mlp_ratio=2,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        drop_path_rate=drop_path,
        use_mask_token=use_mask_token,
    )


def tiny_timm_vit(
    *,
    image_size: int = 8,
    num_channels: int = 3,
    dropout: float = 0.0,
    drop_path: float = 0.0,
    seed: int = 0,
) -> nn.Module:
    """ViT of timm, which adds register tokens, LayerScale and a fused qkv."""
    import timm

    torch.manual_seed(seed)
    return _randomise(
        timm.create_model(
            "vit_tiny_patch16_224",
            img_size=image_size,
            patch_size=4,
            in_chans=num_channels,
            embed_dim=16,
            depth=2,
            num_heads=2,
            mlp_ratio=2,
            num_classes=NUM_CLASSES,
            init_values=0.5,
            reg_tokens=2,
            drop_rate=dropout,
            proj_drop_rate=dropout,
            pos_drop_rate=dropout,
            attn_drop_rate=dropout,
            drop_path_rate=drop_path,
        )
    )


TINY_MODELS: dict[str, Callable[..., nn.Module]] = {
    "vit": tiny_vit,
    "deit": tiny_deit,
    "dinov2": tiny_dinov2,
    "timm_vit": tiny_timm_vit,
}


def fixed_draw(
    num_units: int, *, seed: int, step: int, sample_rate: float
) -> tuple[np.ndarray, np.random.Generator]:
    """The units of a step of a run with ``noise_seed``, and the generator that drew them."""
    from hf_dpmuon.randomness import keyed_generator
    from hf_dpmuon.sampling import PoissonSampler

    generator = keyed_generator(seed.to_bytes(32, "big"), b"sampling", str(step).encode())
    return PoissonSampler(num_units, sample_rate=sample_rate).draw(generator), generator


def fixed_noise(
    parameter: str, shape: torch.Size, *, seed: int, step: int, sigma: float, C: float, batch: float
) -> torch.Tensor:
    """The standard normal noise of a parameter in a run with ``noise_seed``."""
    from hf_dpmuon.randomness import keyed_generator

    material = (seed.to_bytes(32, "big"), f"{step} {sigma} {C} {batch}".encode(), b"")
    generator = keyed_generator(*material, parameter.encode())
    return torch.from_numpy(generator.standard_normal(tuple(shape), dtype=np.float32))

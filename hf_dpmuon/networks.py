"""Residual networks with group norms, for small images and training from scratch.

Importing this module registers them with timm, which then makes, saves and loads them as its own:

    >>> import timm
    >>> network = timm.create_model("hf_dpmuon_wrn_16_4", num_classes=10)
    >>> sum(p.numel() for p in network.parameters())
    2748890

Nothing here mixes the samples of a batch or works in place, so every engine of per-sample gradients
takes these networks. They take images of any size.

The wide ones are those of Zagoruyko and Komodakis (2016, arXiv:1605.07146), the other is that of
He et al. (2015, arXiv:1512.03385), for images of about 32 pixels: a stem of 3 by 3 at full
resolution, and no pooling before the last. Batch norms are replaced by norms of 16 groups, as De et
al. (2022, arXiv:2204.13650) do; they also standardise the weights, which these networks do not.

Shape letters: B batch, C channels, H and W height and width, K classes.
"""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["ARCHITECTURES", "ResidualNetwork"]

NUM_GROUPS = 16


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class PreActivationBlock(nn.Module):
    """Norm, ReLU, convolution, twice; a projection starts at the first ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(NUM_GROUPS, inputs)
        self.conv1 = _convolution(inputs, outputs, 3, stride)
        self.norm2 = nn.GroupNorm(NUM_GROUPS, outputs)
        self.conv2 = _convolution(outputs, outputs, 3)
        projects = inputs != outputs or stride != 1
        self.projection = _convolution(inputs, outputs, 1, stride) if projects else None

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the sum of both branches."""
        y = F.relu(self.norm1(x_BCHW))
        shortcut = x_BCHW if self.projection is None else self.projection(y)
        y = F.relu(self.norm2(self.conv1(y)))
        result: Tensor = self.conv2(y) + shortcut
        return result


class PostActivationBlock(nn.Module):
    """Convolution and norm, twice, with a ReLU between and one after the sum."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, outputs, 3, stride)
        self.norm1 = nn.GroupNorm(NUM_GROUPS, outputs)
        self.conv2 = _convolution(outputs, outputs, 3)
        self.norm2 = nn.GroupNorm(NUM_GROUPS, outputs)
        projects = inputs != outputs or stride != 1
        self.projection = (
            nn.Sequential(
                _convolution(inputs, outputs, 1, stride), nn.GroupNorm(NUM_GROUPS, outputs)
            )
            if projects
            else None
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the sum of both branches, rectified."""
        shortcut = x_BCHW if self.projection is None else self.projection(x_BCHW)
        y = F.relu(self.norm1(self.conv1(x_BCHW)))
        return F.relu(self.norm2(self.conv2(y)) + shortcut)


@dataclass(frozen=True)
class Architecture:
    """What tells one residual network from another.

    Attributes:
        pre_activation: Whether blocks start with their norm; then one norm follows the last block.
        stem_width: Channels after the first convolution.
        widths: Channels of each stage; all but the first halve the resolution.
        depth: Blocks of each stage.
    """

    pre_activation: bool
    stem_width: int
    widths: tuple[int, ...]
    depth: int


# By the names that timm knows them under, which say who brings them.
ARCHITECTURES = {
    "hf_dpmuon_wrn_16_4": Architecture(True, 16, (64, 128, 256), depth=2),
    "hf_dpmuon_wrn_28_10": Architecture(True, 16, (160, 320, 640), depth=4),
    "hf_dpmuon_resnet_18_gn": Architecture(False, 64, (64, 128, 256, 512), depth=2),
}


class ResidualNetwork(nn.Module):
    """A classifier with random weights, drawn from torch's global generator; a model of timm's.

    Convolutions are initialised as He et al. do, for ReLU and the fan out.

    Args:
        cfg: What tells it from the others.
        num_classes: K.
        in_chans: Channels of the images.
    """

    def __init__(self, cfg: Architecture, *, num_classes: int, in_chans: int = 3) -> None:
        super().__init__()
        self.pre_activation = cfg.pre_activation
        block = PreActivationBlock if self.pre_activation else PostActivationBlock
        width = cfg.stem_width
        self.stem = _convolution(in_chans, width, 3)
        blocks = []
        for stage, outputs in enumerate(cfg.widths):
            for i in range(cfg.depth):
                blocks.append(block(width, outputs, stride=2 if stage > 0 and i == 0 else 1))
                width = outputs
        self.norm = nn.GroupNorm(NUM_GROUPS, width if self.pre_activation else cfg.stem_width)
        self.blocks = nn.Sequential(*blocks)
        self.checkpoints = False
        self.num_features = self.head_hidden_size = width
        self.reset_classifier(num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def get_classifier(self) -> nn.Module:
        """Return the layer that gives the logits."""
        return self.head

    def reset_classifier(self, num_classes: int) -> None:
        """Replace that layer by a new one; by none where ``num_classes`` is 0."""
        self.num_classes = num_classes
        self.head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of each block in the backward pass."""
        self.checkpoints = enable

    def forward_features(self, x_BCHW: Tensor) -> Tensor:
        """Return the feature maps after the last block."""
        x: Tensor = self.stem(x_BCHW)
        if not self.pre_activation:
            x = F.relu(self.norm(x))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return F.relu(self.norm(x)) if self.pre_activation else x

    def forward_head(self, x_BCHW: Tensor, pre_logits: bool = False) -> Tensor:
        """Return logits (B, K) of feature maps, or their means (B, C)."""
        means = x_BCHW.mean((2, 3))
        return means if pre_logits else self.head(means)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return logits (B, K)."""
        return self.forward_head(self.forward_features(x_BCHW))


# timm's registry reads this name. Mean and standard deviation are not the statistics of any data:
# those of private images would not be covered by epsilon.
default_cfgs = generate_default_cfgs(
    {
        name: {
            "input_size": (3, 32, 32),
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "first_conv": "stem",
            "classifier": "head",
        }
        for name in ARCHITECTURES
    }
)


def _build(name: str, pretrained: bool, settings: dict[str, Any]) -> nn.Module:
    network: nn.Module = build_model_with_cfg(
        ResidualNetwork,
        name,
        pretrained,
        model_cfg=ARCHITECTURES[name],
        kwargs_filter=("img_size",),  # they take any
        **settings,
    )
    return network


def hf_dpmuon_wrn_16_4(pretrained: bool = False, **settings: Any) -> nn.Module:
    """Wide residual network, 16 layers deep and 4 times as wide."""
    return _build("hf_dpmuon_wrn_16_4", pretrained, settings)


def hf_dpmuon_wrn_28_10(pretrained: bool = False, **settings: Any) -> nn.Module:
    """Wide residual network, 28 layers deep and 10 times as wide."""
    return _build("hf_dpmuon_wrn_28_10", pretrained, settings)


def hf_dpmuon_resnet_18_gn(pretrained: bool = False, **settings: Any) -> nn.Module:
    """Residual network of 18 layers."""
    return _build("hf_dpmuon_resnet_18_gn", pretrained, settings)


for _build_one in (hf_dpmuon_wrn_16_4, hf_dpmuon_wrn_28_10, hf_dpmuon_resnet_18_gn):
    register_model(_build_one)

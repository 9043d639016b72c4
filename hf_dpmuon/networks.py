"""Residual networks with group norms, for small images and training from scratch.

Receives the name of an architecture and what goes in and comes out; returns the network with
random weights. Nothing here mixes the samples of a batch or works in place, so every engine of
per-sample gradients takes these networks.

The wide ones are those of Zagoruyko and Komodakis (2016, arXiv:1605.07146), the other is that of
He et al. (2015, arXiv:1512.03385), for images of about 32 pixels: a stem of 3 by 3 at full
resolution, and no pooling before the last. Batch norms are replaced by norms of 16 groups, as De et
al. (2022, arXiv:2204.13650) do; they also standardise the weights, which these networks do not.

Shape letters: B batch, C channels, H and W height and width, K classes.

    >>> network = ResidualNetwork("builtin:wrn-16-4", num_classes=10)
    >>> sum(p.numel() for p in network.parameters())
    2748890
"""

from dataclasses import dataclass

import torch.nn.functional as F
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


ARCHITECTURES = {
    "builtin:wrn-16-4": Architecture(True, 16, (64, 128, 256), depth=2),
    "builtin:wrn-28-10": Architecture(True, 16, (160, 320, 640), depth=4),
    "builtin:resnet-18-gn": Architecture(False, 64, (64, 128, 256, 512), depth=2),
}


class ResidualNetwork(nn.Module):
    """A classifier with random weights, drawn from torch's global generator.

    Convolutions are initialised as He et al. do, for ReLU and the fan out.

    Args:
        architecture_name: A key of ``ARCHITECTURES``.
        num_classes: K.
        num_channels: Of the images.
    """

    def __init__(self, architecture_name: str, *, num_classes: int, num_channels: int = 3) -> None:
        super().__init__()
        self.architecture_name = architecture_name
        architecture = ARCHITECTURES[architecture_name]
        self.pre_activation = architecture.pre_activation
        block = PreActivationBlock if self.pre_activation else PostActivationBlock
        width = architecture.stem_width
        self.stem = _convolution(num_channels, width, 3)
        blocks = []
        for stage, outputs in enumerate(architecture.widths):
            for i in range(architecture.depth):
                blocks.append(block(width, outputs, stride=2 if stage > 0 and i == 0 else 1))
                width = outputs
        normed = width if self.pre_activation else architecture.stem_width
        self.norm = nn.GroupNorm(NUM_GROUPS, normed)
        self.blocks = nn.Sequential(*blocks)
        self.checkpoints = False
        self.head = nn.Linear(width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def get_classifier(self) -> nn.Module:
        """Return the layer that gives the logits, as timm's models do."""
        return self.head

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of each block in the backward pass, as timm's models do."""
        self.checkpoints = enable

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return logits (B, K)."""
        x = self.stem(x_BCHW)
        if self.pre_activation:
            x = F.relu(self.norm(self._through_blocks(x)))
        else:
            x = self._through_blocks(F.relu(self.norm(x)))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits

    def _through_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x

"""Pretrain the small ViT that ships with the package on public images (Fashion-MNIST).

    python scripts/pretrain_tiny_vit.py
    python scripts/pretrain_tiny_vit.py --epochs 2 --output_dir outputs/quick

The model (0.8 M parameters) is a starting point for private fine-tuning where no network is at
hand: the quickstart and the tests. It must transfer to grey images other than clothes, so training
images are warped, outlined and coarsened at random. No private data is used. The same seed gives
the same weights on the same machine with the same versions and thread count; elsewhere rounding
differs, and so do the weights.
"""

from __future__ import annotations

import argparse
import gzip
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import trange
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

CLASSES = [
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
]
MEAN, STD = 0.2860, 0.3530  # of the training pixels in [0, 1]

CARD = """\
---
license: mit
library_name: transformers
pipeline_tag: image-classification
datasets:
- zalando-datasets/fashion_mnist
---

# tiny-vit-fashion-mnist

A vision transformer of 0.8 M parameters (28x28 grey images, patches of 7x7, width 128, 4 blocks,
4 heads), pretrained on public images so that private fine-tuning can be shown and tested where no
network is at hand. It is a starting point for the quickstart of `hf_dpmuon`, not a strong
classifier of clothes.

- **Data**: the 60,000 training images of Fashion-MNIST (Zalando Research, MIT licence), which are
  public. No private data was used, so the weights cost no privacy budget.
- **Made by**: `python scripts/pretrain_tiny_vit.py --epochs {epochs} --seed {seed}`
- **Accuracy** on the 10,000 test images of Fashion-MNIST: {accuracy:.1%}

Do not fine-tune it privately on Fashion-MNIST: it has seen those images.
"""


def load_split(split: str, data_dir: Path) -> tuple[Tensor, Tensor]:
    """Read one split of Fashion-MNIST from a folder of IDX files, or else from the Hub.

    Args:
        split: `train` or `test`.
        data_dir: Folder with the four `.gz` files of the original distribution.

    Returns:
        Images (N, 1, 28, 28) with values in [0, 1], and labels (N,).
    """
    if data_dir.is_dir():
        prefix = data_dir / {"train": "train", "test": "t10k"}[split]
        with gzip.open(f"{prefix}-images-idx3-ubyte.gz") as file:
            images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)
        with gzip.open(f"{prefix}-labels-idx1-ubyte.gz") as file:
            labels = np.frombuffer(file.read(), np.uint8, offset=8)
    else:
        from datasets import load_dataset

        rows = load_dataset("zalando-datasets/fashion_mnist", split=split)
        images = np.stack([np.asarray(image) for image in rows["image"]])[:, None]
        labels = np.asarray(rows["label"])
    return torch.tensor(images).float() / 255, torch.tensor(labels).long()


def warp(images: Tensor) -> Tensor:
    """Rotate, scale, shear and shift every image by its own random amount."""
    uniform = torch.rand(6, len(images)) * 2 - 1
    angle = uniform[0] * math.pi / 15
    scale_x, scale_y = torch.exp(0.15 * uniform[1]), torch.exp(0.15 * uniform[2])
    shear, shift_x, shift_y = 0.15 * uniform[3], 0.08 * uniform[4], 0.08 * uniform[5]
    cos, sin = angle.cos(), angle.sin()
    rows = [
        torch.stack([cos * scale_x, (shear - sin) * scale_y, shift_x], dim=1),
        torch.stack([sin * scale_x, cos * scale_y, shift_y], dim=1),
    ]
    grid = F.affine_grid(torch.stack(rows, dim=1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def outline(images: Tensor) -> Tensor:
    """Turn filled shapes into bright strokes: local maximum minus local minimum."""
    strokes = F.max_pool2d(images, 3, 1, 1) + F.max_pool2d(-images, 3, 1, 1)
    return strokes / strokes.amax((1, 2, 3), keepdim=True).clamp_min(0.1)


def coarsen(images: Tensor) -> Tensor:
    """Keep 8x8 pixels, enlarge them to 20x20 and surround them with black."""
    small = F.interpolate(images, size=(8, 8), mode="area")
    large = F.interpolate(small, size=(20, 20), mode="bilinear", align_corners=False)
    return F.pad(large, (4, 4, 4, 4))


def augment(images: Tensor) -> Tensor:
    """Warp all images, outline a third of them, coarsen half of them.

    Clothes are large, filled and sharp; what the model will see later need not be.

    Args:
        images: (B, 1, 28, 28), values in [0, 1].
    """
    chance = torch.rand(2, len(images), 1, 1, 1)
    images = torch.where(chance[0] < 1 / 3, outline(images), images)
    images = warp(images)
    return torch.where(chance[1] < 1 / 2, coarsen(images), images)


def normalize(images: Tensor) -> Tensor:
    """Scale as the saved image processor does."""
    return (images - MEAN) / STD


@torch.no_grad()
def accuracy(model: ViTForImageClassification, images: Tensor, labels: Tensor) -> float:
    """Fraction of the images classified correctly."""
    predictions = [
        model(normalize(images[start : start + 500])).logits.argmax(-1)
        for start in range(0, len(images), 500)
    ]
    return float((torch.cat(predictions) == labels).float().mean())


def main(args: argparse.Namespace) -> None:
    """Train, evaluate, save the model with its processor and its card."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    images, labels = load_split("train", args.data_dir)
    config = ViTConfig(
        image_size=28,
        num_channels=1,
        patch_size=7,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        id2label=dict(enumerate(CLASSES)),
        label2id={name: index for index, name in enumerate(CLASSES)},
    )
    model = ViTForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    steps = args.epochs * len(images) // args.batch_size
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.learning_rate, steps, pct_start=0.1, cycle_momentum=False
    )
    order = torch.cat([torch.randperm(len(images)) for _ in range(args.epochs)])
    progress = trange(steps, desc="pretrain", unit="step", mininterval=1.0)
    for step in progress:
        batch = order[step * args.batch_size : (step + 1) * args.batch_size]
        logits = model(normalize(augment(images[batch]))).logits
        loss = F.cross_entropy(logits, labels[batch], label_smoothing=0.1)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}")

    test_accuracy = accuracy(model, *load_split("test", args.data_dir))
    print(f"Fashion-MNIST test accuracy: {test_accuracy:.4f}")
    model.save_pretrained(args.output_dir)
    ViTImageProcessor(
        size={"height": 28, "width": 28}, image_mean=[MEAN], image_std=[STD]
    ).save_pretrained(args.output_dir)
    card = CARD.format(epochs=args.epochs, seed=args.seed, accuracy=test_accuracy)
    (args.output_dir / "README.md").write_text(card)
    print(f"saved to {args.output_dir}")


def make_parser() -> argparse.ArgumentParser:
    """Command line of this script."""
    parser = argparse.ArgumentParser(
        description="Pretrain the small ViT of the quickstart on Fashion-MNIST.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    package = Path(__file__).resolve().parents[1] / "hf_dpmuon"
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training set")
    parser.add_argument("--batch_size", type=int, default=128, help="images per step")
    parser.add_argument("--learning_rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and augmentation")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument(
        "--data_dir",
        type=Path,
        default=Path("/usr/share/datasets/fashion-mnist"),
        help="IDX files (Debian: dataset-fashion-mnist); downloaded from the Hub if absent",
    )
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=package / "pretrained" / "tiny-vit-fashion-mnist",
        help="where the model goes",
    )
    return parser


if __name__ == "__main__":
    main(make_parser().parse_args())

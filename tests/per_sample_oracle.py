"""The oracle of every per-sample engine: a loop of backward passes over batches of one sample."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dpmuon.grad_sample import contributions

Loss = Callable[[Tensor, Tensor], Tensor]


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


def logits_of(output: Tensor | object) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def random_batch(
    size: int, *, image_size: int = 8, channels: int = 3, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    images = torch.randn(size, channels, image_size, image_size, generator=generator, dtype=dtype)
    return images, torch.randint(0, 3, (size,), generator=generator)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gradient_of(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Gradient of the summed loss by plain autograd; zero where a parameter is not reached."""
    parameters = trainable(model)
    loss = summed_loss(logits_of(model(images)), labels)
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if gradient is None else gradient
        for (name, p), gradient in zip(parameters.items(), gradients, strict=True)
    }


def loop_of_one(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Per-sample gradients, (B, *shape) for each trainable parameter."""
    rows = [gradient_of(model, images[i : i + 1], labels[i : i + 1]) for i in range(len(images))]
    return {name: torch.stack([row[name] for row in rows]) for name in trainable(model)}


def backward(engine: nn.Module, images: Tensor, labels: Tensor) -> None:
    summed_loss(logits_of(engine(images)), labels).backward()


def weighted_sum(engine: nn.Module, weights: Tensor) -> dict[str, Tensor]:
    """What the engine adds under one weight a unit, in the weights' dtype."""
    parameters = trainable(engine._module)
    into = {name: torch.zeros_like(p, dtype=weights.dtype) for name, p in parameters.items()}
    engine.add_weighted_sum(dict.fromkeys(parameters, weights), into=into)
    return into


def force_form(patch: pytest.MonkeyPatch, *, pairs: bool) -> None:
    """Make engines hold weights' gradients as pairs and use Gram matrices always, or never."""
    patch.setattr(contributions, "GRADIENT_ALLOWANCE", 0.0 if pairs else math.inf)
    patch.setattr(contributions, "GRAM_ALLOWANCE", math.inf if pairs else 0.0)


def row_norms(rows: Tensor) -> Tensor:
    return rows.reshape(len(rows), -1).norm(dim=1)


def assert_matches(engine: nn.Module, expected: dict[str, Tensor], *, rtol: float) -> None:
    """Norms and weighted sums of the engine's last pass equal those of ``expected``.

    Sums are compared under weights that single out each sample, so every entry of every
    per-sample gradient is. The tolerance is relative to the largest gradient of the sample: single
    entries may be differences of large numbers (a key bias has gradient zero).
    """
    norms = engine.per_unit_norms()
    size = len(next(iter(expected.values())))
    dtype = next(iter(expected.values())).dtype
    scale = torch.stack([row_norms(g) for g in expected.values()]).amax(0)
    assert (scale > 0).all(), "a test without gradients shows nothing"
    assert set(norms) <= set(expected)
    for name, gradient in expected.items():
        norm = norms.get(name, torch.zeros(size)).to(dtype)
        # sqrt(rtol): a norm from inner products loses half the digits of what cancels.
        error = (norm - row_norms(gradient)).abs()
        tolerance = rtol * (row_norms(gradient) + scale) + 1e-5 * scale
        assert (error <= tolerance).all(), f"norms of {name}: {error} > {tolerance}"
    for i, weights in enumerate(torch.eye(size, dtype=dtype)):
        for name, total in weighted_sum(engine, weights).items():
            error = (total - expected[name][i]).norm()
            tolerance = rtol * (expected[name][i].norm() + 0.1 * scale[i])
            assert error <= tolerance, f"{name}, sample {i}: {error} > {tolerance}"

"""Compares an engine with plain autograd on batches of one, before a run begins.

Receives an engine and the run's own loss on rows that stand in for private ones; returns nothing,
or an error that names the parameter and says what to do. A loss or collator that couples samples, a
parameter that nothing reads, and a layer whose gradients an engine gets wrong all show here.

Guarantees:
    Weights, module modes, gradients and `torch`'s global CPU generator are as before afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hf_dpmuon.grad_sample.engine import PerSampleEngine

__all__ = ["verify_per_sample_gradients"]

WEIGHT_SHIFT = 0.02  # a head of zeros, as fresh heads often are, would hide every fault behind it
RELATIVE_TOLERANCE = 1e-3  # of the parameter's own gradient; float32 rounding is far below
ABSOLUTE_TOLERANCE = 1e-5  # of the whole gradient, for parameters whose gradient nearly cancels


def verify_per_sample_gradients(
    engine: PerSampleEngine, summed_loss: Callable[[nn.Module, Sequence[int]], tuple[Tensor, int]]
) -> None:
    """Check that the gradient of row 0 is its own, whatever batch it is in.

    Args:
        engine: Around the plain model, with dropout or without.
        summed_loss: Given the engine or the plain model and the numbers of some of five rows,
            returns the loss summed over those rows, and how many they are.

    Raises:
        ValueError: If a trainable parameter is dead, a per-sample gradient is wrong, or one
            sample's gradient depends on the other samples.
    """
    parameters = {n: p for n, p in engine._module.named_parameters() if p.requires_grad}

    def gradient_of_row_0(rows: Sequence[int]) -> dict[str, Tensor]:
        engine.discard()
        torch.manual_seed(0)  # a collator may augment at random, each row from its own draws
        loss, size = summed_loss(engine, rows)
        loss.backward()  # type: ignore[no-untyped-call]
        first = torch.zeros(size, device=loss.device)
        first[0] = 1.0
        into = {name: torch.zeros_like(p) for name, p in parameters.items()}
        engine.add_weighted_sum(dict.fromkeys(engine.per_sample_norms(), first), into=into)
        return into

    with _moved_weights(list(parameters.values())), _without_dropout(engine):
        alone = _plain_gradient(engine, summed_loss, parameters)
        in_a_batch = gradient_of_row_0((0, 1, 2))
        in_another = gradient_of_row_0((0, 3, 4))
        engine.discard()
    norm = math.sqrt(sum(float(g.norm()) ** 2 for g in alone.values()))
    for name, gradient in alone.items():
        tolerance = RELATIVE_TOLERANCE * float(gradient.norm()) + ABSOLUTE_TOLERANCE * norm
        if not float((in_a_batch[name] - in_another[name]).norm()) <= tolerance:
            raise ValueError(
                f"the gradient of one sample with respect to {name} changes with the other "
                "samples of its batch, so no bound on one sample holds: use a collator without "
                "mixup or CutMix, and a loss that is a plain mean over rows."
            )
        if not float((in_a_batch[name] - gradient).norm()) <= tolerance:
            raise ValueError(
                f"the per-sample gradients of {name} differ from those of a batch of one; "
                "freeze it, or check that compute_loss returns a mean over rows."
            )


def _plain_gradient(
    engine: PerSampleEngine,
    summed_loss: Callable[[nn.Module, Sequence[int]], tuple[Tensor, int]],
    parameters: dict[str, nn.Parameter],
) -> dict[str, Tensor]:
    """Gradient of row 0 alone, by autograd and no engine."""
    engine.discard()
    engine.disable_hooks()
    torch.manual_seed(0)
    loss, _ = summed_loss(engine._module, (0,))
    loss.backward()  # type: ignore[no-untyped-call]
    engine.enable_hooks()
    dead = [name for name, p in parameters.items() if p.grad is None]
    if dead:
        raise ValueError(
            f"trainable parameters that the loss does not reach: {', '.join(dead)}; freeze them "
            "with requires_grad_(False) before the trainer is built."
        )
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


@contextmanager
def _moved_weights(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Shift the weights at random; put them, their gradients and the generator back."""
    kept = [p.detach().clone() for p in parameters]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            with torch.no_grad():
                for p in parameters:
                    p.add_(torch.randn_like(p), alpha=WEIGHT_SHIFT)
            yield
        finally:
            with torch.no_grad():
                for p, weight in zip(parameters, kept, strict=True):
                    p.copy_(weight)
                    p.grad = None


@contextmanager
def _without_dropout(engine: PerSampleEngine) -> Iterator[None]:
    """Only modules that own parameters stay in training mode, as some engines' hooks need."""
    modes = {module: module.training for module in engine.modules()}
    try:
        for module in modes:
            module.training = any(True for _ in module.parameters(recurse=False))
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode

"""Compares an engine with plain autograd on batches of one, before a run begins.

Receives an engine and the run's own loss on rows that stand in for private ones; returns nothing,
or an error that names the parameter or buffer and says what to do. A model, loss or collator that
couples samples, a parameter that nothing reads, a layer whose gradients an engine gets wrong, and
one that keeps statistics of its batches all show here. A loss is tried apart from its model, too,
on as many rows and as many kinds of labels as a run may have.

What these rows do not bring about stays unseen: coupling that begins at some value of the logits,
say.

Guarantees:
    Weights, buffers, module modes, gradients and `torch`'s global CPU generator are as before
    afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hf_dpmuon.grad_sample.engine import PerSampleEngine

__all__ = ["verify_per_sample_gradients", "verify_row_losses"]

WEIGHT_SHIFT = 0.02  # a head of zeros, as fresh heads often are, would hide every fault behind it
RELATIVE_TOLERANCE = 1e-3  # of the parameter's own gradient; float32 rounding is far below
ABSOLUTE_TOLERANCE = 1e-5  # of the whole gradient, for parameters whose gradient nearly cancels

# Several sizes, since a fault may show only where a batch is as large as something else; row 0 is
# the first, the last, and inside. Each batch shares with its partner row 0 and the size alone.
BATCHES: Sequence[tuple[Sequence[int], Sequence[int]]] = (
    ((1, 0), (2, 0)),
    ((0, 1, 2), (0, 3, 4)),
    ((1, 0, 2, 3), (4, 0, 1, 2)),
)

MOST_ROWS = max(len(rows) for rows, _ in BATCHES)
SEEDS_TRIED = 8
ROWS_COMPARED = 16  # of a large batch
LOGIT_SCALES = (1.0, 10.0)

SummedLoss = Callable[[nn.Module, Sequence[int]], tuple[Tensor, int]]


def verify_per_sample_gradients(
    engine: PerSampleEngine, summed_loss: SummedLoss, *, most_rows: int = MOST_ROWS
) -> None:
    """Check that the gradient of row 0 is its own, whatever batch it is in.

    That it does not change with the other rows is checked in training mode under equal dropout, and
    that it is right without dropout.

    Args:
        engine: Around the plain model, with dropout or without.
        summed_loss: Given the engine or the plain model and the numbers of some of five rows,
            returns the loss summed over those rows, and how many they are; where a row becomes
            several, these are consecutive.
        most_rows: Those of a batch; with one, nothing is compared but its gradient with autograd's.

    Raises:
        ValueError: If a trainable parameter is dead, a per-sample gradient is wrong, one sample's
            gradient depends on the other samples, or training changes the model's state.
    """
    parameters = {n: p for n, p in engine._module.named_parameters() if p.requires_grad}
    batches = [pair for pair in BATCHES if len(pair[0]) <= most_rows] or [((0,), (0,))]
    dead = set(parameters)

    def gradient_of_row_0(rows: Sequence[int], *, seed: int = 0) -> dict[str, Tensor]:
        engine.discard()
        torch.manual_seed(seed)  # a collator may augment at random, each row from its own draws
        loss, size = summed_loss(engine, rows)
        loss.backward()  # type: ignore[no-untyped-call]
        copies = size // len(rows)
        weights = torch.zeros(size, device=loss.device)
        weights[rows.index(0) * copies :][:copies] = 1.0
        into = {name: torch.zeros_like(p) for name, p in parameters.items()}
        reached = engine.per_unit_norms()
        dead.difference_update(reached)
        engine.add_weighted_sum(dict.fromkeys(reached, weights), into=into)
        engine.discard()
        return into

    def compare(a: dict[str, Tensor], b: dict[str, Tensor], message: str) -> None:
        norm = math.sqrt(sum(float(gradient.norm()) ** 2 for gradient in a.values()))
        for name, gradient in a.items():
            tolerance = RELATIVE_TOLERANCE * float(gradient.norm()) + ABSOLUTE_TOLERANCE * norm
            if not float((b[name] - gradient).norm()) <= tolerance:
                raise ValueError(message.format(name))

    with _moved_weights(list(parameters.values())), _restored_buffers(engine._module):
        with _modes(engine, lambda _: True):
            state = {name: t.clone() for name, t in _state(engine._module)}
            gradient_of_row_0(batches[0][0])
            _check_unchanged(state, engine._module)
            for seed in range(1, SEEDS_TRIED):  # a layer may be left out at random
                if dead:
                    gradient_of_row_0(batches[0][0], seed=seed)
            if dead:
                raise ValueError(DEAD.format(", ".join(n for n in parameters if n in dead)))
            for one, another in batches:
                compare(gradient_of_row_0(one), gradient_of_row_0(another), COUPLED)
        # Only modules that own parameters stay in training mode, as some engines' hooks need.
        with _modes(engine, lambda module: any(True for _ in module.parameters(recurse=False))):
            alone = _plain_gradient(engine, summed_loss, parameters)
            for rows, _ in batches:
                compare(alone, gradient_of_row_0(rows), WRONG)


def verify_row_losses(
    engine: PerSampleEngine,
    mean_loss: Callable[[PerSampleEngine, slice, Tensor], Tensor],
    *,
    labels: Sequence[Tensor],
) -> None:
    """Check that the loss of a row does not depend on the other rows of its batch.

    The model's outputs are replaced by random ones, so that a trial costs no forward pass.

    Args:
        engine: Around the plain model.
        mean_loss: Given the engine, some of R rows, and these rows' labels, returns their mean
            loss.
        labels: One or more kinds of labels, each of R rows. A kind is left out where the loss of
            a row of it, alone, is an error or not finite: it cannot occur in a run, either.

    Raises:
        ValueError: If the gradient of a row changes with the other rows.
    """
    count = len(labels[0])
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _restored_buffers(engine._module):
        with _modes(engine, lambda _: False):
            outputs: list[Any] = []
            handle = engine.register_forward_hook(lambda *call: outputs.append(call[2]))
            mean_loss(engine, slice(0, count), labels[0])
            handle.remove()
        leaves, structure = tree_flatten(outputs[0])
        generator = torch.Generator().manual_seed(0)
        are_of_rows = [_is_of_rows(leaf, count) for leaf in leaves]

    def gradient(rows: slice, of_rows: Tensor) -> list[Tensor]:
        """With respect to the outputs of these rows, for their summed loss."""
        chosen = [
            leaf[rows].detach().requires_grad_() if is_of_rows else leaf
            for leaf, is_of_rows in zip(random, are_of_rows, strict=True)
        ]
        wanted = [leaf for leaf, is_of_rows in zip(chosen, are_of_rows, strict=True) if is_of_rows]
        with torch.enable_grad():  # copies, which a loss may change in place
            given = [x.clone() if n else x for x, n in zip(chosen, are_of_rows, strict=True)]
        with _answering(engine, tree_unflatten(given, structure)), torch.enable_grad():
            torch.manual_seed(0)
            loss = mean_loss(engine, rows, of_rows) * len(of_rows)
            if not loss.requires_grad:
                return [torch.zeros_like(leaf) for leaf in wanted]
            return list(
                torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
            )

    with torch.random.fork_rng(devices=[]):
        for kind in labels:
            for scale in LOGIT_SCALES:
                random = [
                    scale * torch.randn(leaf.shape, generator=generator).to(leaf)
                    if is_of_rows
                    else leaf
                    for leaf, is_of_rows in zip(leaves, are_of_rows, strict=True)
                ]
                compared = range(0, count, max(1, count // ROWS_COMPARED))
                try:
                    alone = [gradient(slice(i, i + 1), kind[i : i + 1]) for i in compared]
                except Exception:  # of a loss that such outputs or labels are no input of
                    continue
                if not all(bool(g.isfinite().all()) for of_row in alone for g in of_row):
                    continue
                together = gradient(slice(0, count), kind)
                for i, of_row in zip(compared, alone, strict=True):
                    for own, among in zip(of_row, together, strict=True):
                        if not torch.allclose(own[0], among[i], rtol=1e-3, atol=1e-6):
                            raise ValueError(COUPLED_LOSS)


def _is_of_rows(leaf: Any, count: int) -> bool:
    return (
        isinstance(leaf, Tensor)
        and leaf.is_floating_point()
        and leaf.dim() > 0
        and leaf.shape[0] == count
    )


@contextmanager
def _answering(engine: PerSampleEngine, output: Any) -> Iterator[None]:
    """Let the engine return this output, whatever it is called with."""
    engine.forward = lambda *_, **__: output
    try:
        yield
    finally:
        del engine.forward


COUPLED_LOSS = (
    "the loss of one row changes with the other rows of its batch, so no bound on one sample "
    "holds: compute_loss must return the sum of the rows' own losses divided by the number of "
    "rows, not by a sum of weights or a count of known labels; weigh classes with class_weights."
)
COUPLED = (
    "the gradient of one sample with respect to {} changes with the other samples of its batch, so "
    "no bound on one sample holds: use a collator without mixup or CutMix, a model whose layers do "
    "not mix samples, and a loss that is a plain mean over rows."
)
DEAD = (
    "trainable parameters that the loss does not reach in training mode, so that noise alone would "
    "move them: {}; freeze them with requires_grad_(False) before the trainer is built."
)
WRONG = (
    "the per-sample gradients of {} differ from those of a batch of one; freeze it, or check that "
    "compute_loss returns a mean over rows."
)


def _plain_gradient(
    engine: PerSampleEngine,
    summed_loss: SummedLoss,
    parameters: dict[str, nn.Parameter],
) -> dict[str, Tensor]:
    """Gradient of row 0 alone, by autograd and no engine."""
    engine.discard()
    engine.disable_hooks()
    torch.manual_seed(0)
    loss, _ = summed_loss(engine._module, (0,))
    loss.backward()  # type: ignore[no-untyped-call]
    engine.enable_hooks()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()
    }


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


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _check_unchanged(before: dict[str, Tensor], model: nn.Module) -> None:
    """Raw statistics of private rows in a buffer would be saved with the model."""

    def equal(a: Tensor, b: Tensor | None) -> bool:
        return b is not None and a.shape == b.shape and bool(((a == b) | (a != a)).all())

    changed = [name for name, t in _state(model) if not equal(t, before.get(name))]
    if changed:
        raise ValueError(
            f"a forward pass in training mode changes {', '.join(changed)}, which no noise "
            "protects and which would be saved with the model: use GroupNorm or another layer "
            "without running statistics, or one that keeps them frozen in training mode, too "
            "(torchvision.ops.FrozenBatchNorm2d)."
        )


@contextmanager
def _restored_buffers(model: nn.Module) -> Iterator[None]:
    """Put back what a forward pass changes in buffers or frozen parameters, or adds to them."""
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    kept = [(t, t.clone()) for t in (*model.buffers(), *frozen)]
    try:
        yield
    finally:
        for module, owned in buffers:
            module._buffers.clear()
            module._buffers.update(owned)
        with torch.no_grad():
            for t, value in kept:
                t.copy_(value)


@contextmanager
def _modes(engine: PerSampleEngine, training: Callable[[nn.Module], bool]) -> Iterator[None]:
    """Put each module into training or eval mode for a while."""
    modes = {module: module.training for module in engine.modules()}
    try:
        for module in modes:
            module.training = training(module)
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode

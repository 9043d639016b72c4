"""Trials on rows of noise: an engine is verified, measured and chosen before a run begins.

Receives the shapes of a row, the run's collator and its loss; no private value is used. Returns an
engine around the model, or a sentence that says why there is none.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from hf_dpmuon.arguments import DPTrainingArguments
from hf_dpmuon.grad_sample import (
    ENGINES,
    PerSampleEngine,
    free_bytes,
    peak_bytes,
    verify_per_sample_gradients,
    verify_row_losses,
)
from hf_dpmuon.units import PrivacyUnits

__all__ = ["Trial", "build_engine"]

logger = logging.getLogger(__name__)

MOST_ROWS_TRIED = 256  # when a loss is verified
MOST_ROWS_TIMED = 8
# On top of what grad_sample_mode="auto" measures, since kernels take storage of their own.
MEMORY_MARGIN = 1.2
# Sums, noise, gradients, and two of the optimizer, each as large as all trainable parameters.
LASTING_COPIES = 5


@dataclass(frozen=True)
class Trial:
    """What a run does to a physical batch, tried on rows of noise.

    Attributes:
        row: A row of zeros in the shapes of the training data.
        batch: From rows to what the model and the loss take, on the device.
        loss: Mean over the rows of such a batch.
        autocast: As in training.
        loss_scale: As in training.
        num_classes: Those of the labels.
        physical_batch_size: Most rows of a physical batch.
        rows_of_unit: Fewest and most rows of one privacy unit in a step.
    """

    row: Mapping[str, Tensor]
    batch: Callable[[list[dict[str, Tensor]]], dict[str, Tensor]]
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    autocast: Callable[[], AbstractContextManager[Any]]
    loss_scale: float
    num_classes: int
    physical_batch_size: int
    rows_of_unit: tuple[int, int]

    @classmethod
    def of(
        cls,
        args: DPTrainingArguments,
        *,
        units: PrivacyUnits | None,
        max_examples_per_unit: int,
        **others: Any,
    ) -> Trial:
        """Make the trial of a run with these arguments."""
        assert args.loss_scale is not None
        fewest = args.augmentation_multiplicity
        most = 1 if units is None else min(units.largest, max_examples_per_unit)
        return cls(
            loss_scale=args.loss_scale,
            physical_batch_size=args.per_device_train_batch_size,
            rows_of_unit=(fewest, fewest * most),
            **others,
        )

    def verify(self, engine: PerSampleEngine) -> None:
        """Refuse an engine that is wrong on this model, collator and loss."""
        rows = self._rows((0, 1, 0, 1, 1))

        def summed_loss(model: nn.Module, selected: Sequence[int]) -> tuple[Tensor, int]:
            batch = self.batch([rows[i] for i in selected])
            size = len(batch["labels"])
            return self.loss(model, batch) * size, size

        verify_per_sample_gradients(engine, summed_loss, most_rows=self.physical_batch_size)

        # On more rows a loss may still do what it does not do here; the README says so.
        batch = self.batch(self._rows([0] * min(self.physical_batch_size, MOST_ROWS_TRIED)))

        def mean_loss(model: nn.Module, rows: slice, labels: Tensor) -> Tensor:
            return self.loss(model, {**{n: t[rows] for n, t in batch.items()}, "labels": labels})

        kinds = _kinds_of_labels(batch["labels"], classes=self.num_classes)
        verify_row_losses(engine, mean_loss, labels=kinds)

    def bytes_of_a_step(self, engine: PerSampleEngine) -> int:
        """Estimate the peak of a physical batch from three small ones, and all that outlives it.

        Each has one unit of most rows and others of fewest, which takes most memory: engines give
        all units the space of the largest. No batch has more rows than a physical one may have.
        """
        fewest, most = self.rows_of_unit
        small_units = max(0, (self.physical_batch_size - most) // fewest)
        counts = (1, 3, 5) if small_units > 5 else (small_units,)
        sums = _sums_of(engine)
        with torch.random.fork_rng():  # dropout
            peaks = [peak_bytes(partial(self._step, engine, sums, count)) for count in counts]
        curve = np.polyfit(counts, peaks, len(counts) - 1)
        if len(counts) > 1:
            curve[0] = max(curve[0], 0.0)
        lasting = LASTING_COPIES * sum(total.nbytes for total in sums.values())
        return int(MEMORY_MARGIN * np.polyval(curve, small_units)) + lasting

    def seconds_of_a_row(self, engine: PerSampleEngine) -> float:
        """Measure the second of two small batches; the first one warms up."""
        small_units = min(MOST_ROWS_TIMED, self.physical_batch_size) - 1
        sums = _sums_of(engine)
        with torch.random.fork_rng():  # dropout
            self._step(engine, sums, small_units)
            float(next(iter(sums.values())).sum())  # waits for the device
            start = time.perf_counter()
            self._step(engine, sums, small_units)
            float(next(iter(sums.values())).sum())
        return (time.perf_counter() - start) / (small_units + 1)

    def _step(self, engine: PerSampleEngine, sums: dict[str, Tensor], small_units: int) -> None:
        """One physical batch of a unit of most rows and others of fewest."""
        fewest, most = self.rows_of_unit
        rows_per_unit = torch.tensor([most] + [fewest] * small_units)
        size = int(rows_per_unit.sum())
        batch = self.batch(self._rows(([0, 1] * size)[:size]))
        if most > 1:
            units = torch.arange(small_units + 1).repeat_interleave(rows_per_unit)
            units = units.to(batch["labels"].device)
            engine.set_units(units, small_units + 1, reduction="mean")
        with self.autocast():
            loss = self.loss(engine, batch)
        (loss * (size * self.loss_scale)).backward()  # type: ignore[no-untyped-call]
        norms = engine.per_unit_norms()
        engine.add_weighted_sum({n: torch.ones_like(u) for n, u in norms.items()}, into=sums)
        engine.discard()

    def _rows(self, labels: Sequence[int]) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        return [_random_row_like(self.row, label, generator) for label in labels]


def build_engine(model: nn.Module, trial: Trial, *, mode: str, passes: int) -> PerSampleEngine:
    """Wrap the model in the engine that is asked for, or for which there is memory; verify it.

    The trial that tells of memory comes after verification, which refuses models that a
    forward pass changes.
    """
    engine = ENGINES["bookkeeping" if mode == "auto" else mode](model, passes=passes)
    trial.verify(engine)
    if mode != "auto" or passes > 1:  # ghost takes one pass only
        return engine
    device = next(model.parameters()).device
    needed, free = trial.bytes_of_a_step(engine), free_bytes(device)
    if device.type == "cpu":
        free //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    fits = all(gather_object([needed <= free]))
    mode = "bookkeeping" if fits else "ghost"
    logger.info(
        "grad_sample_mode: %s (bookkeeping needs about %.1f GB, and %.1f GB are free)",
        mode,
        needed / 1e9,
        free / 1e9,
    )
    if fits:
        return engine
    engine.to_standard_module()
    engine = ENGINES[mode](model, passes=passes)
    trial.verify(engine)
    return engine


def _sums_of(engine: PerSampleEngine) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) for name, p in engine._module.named_parameters()}


def _random_row_like(
    row: Mapping[str, Tensor], label: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """A row of noise with the shapes of ``row``.

    Some rows have blank margins, as scans do: a model may leave them out.
    """
    labels, pixels = row["labels"], row["pixel_values"]
    pixels = torch.rand(pixels.shape, generator=generator) * 2 - 1
    top, side = torch.randint(3, (2,), generator=generator).tolist()
    pixels[..., : pixels.shape[-2] * top // 4, :] = 0
    pixels[..., : pixels.shape[-1] * side // 4] = -1
    return {"pixel_values": pixels, "labels": torch.full_like(labels, label)}


def _kinds_of_labels(labels: Tensor, *, classes: int) -> list[Tensor]:
    """Random labels of every class; of several labels, 0 and 1, without and with missing ones."""
    generator = torch.Generator().manual_seed(1)
    if not labels.is_floating_point():
        random = torch.randint(classes, labels.shape, generator=generator)
        return [random.to(labels.dtype).to(labels.device)]
    whole = torch.randint(2, labels.shape, generator=generator).to(labels.dtype)
    missing = torch.rand(labels.shape, generator=generator) < 0.4
    return [whole.to(labels.device), whole.masked_fill(missing, torch.nan).to(labels.device)]

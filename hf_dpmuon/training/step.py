"""One private step: a draw becomes the private gradient in every ``p.grad`` and a ledger record.

Receives logical batches and the number of the step. Everything that a step needs is handed in, so
this room knows no base class and no arguments.

Guarantees:
    On return of ``take`` each ``p.grad`` is private, no per-sample or raw gradient is left, and the
    draw of noise is on disk in the ledger.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_dpmuon.arguments import DPTrainingArguments
from hf_dpmuon.callbacks import BudgetSpentError
from hf_dpmuon.filters import GradientFilter, moved_to
from hf_dpmuon.grad_sample import PerSampleEngine
from hf_dpmuon.mechanism import GaussianMechanism, NoiseEvent
from hf_dpmuon.randomness import keyed_generator, seeded_globals
from hf_dpmuon.run import PrivateRun
from hf_dpmuon.sampling import LogicalBatch, LogicalBatchLoader

__all__ = ["PrivateStep"]

logger = logging.getLogger(__name__)


@dataclass
class PrivateStep:
    """Sampling, clipping, noise, ledger and filter of one step, in this order.

    Attributes:
        mechanism: Around the engine of per-sample gradients.
        run: Ledger, budget and secrets.
        filter: Of the private gradients.
        parameters: The trainable ones, in the order of the filter.
        loader: Where a run that departs from an interrupted one draws anew.
        loss: Mean over the rows of a physical batch.
        prepare: Brings a physical batch to the device.
        autocast: To the compute type.
        loss_scale: Static, undone by the mechanism.
        rank: Number of this process.
        keep_loss: Whether ``take`` returns the raw mean loss and not 0.
    """

    mechanism: GaussianMechanism
    run: PrivateRun
    filter: GradientFilter
    parameters: list[nn.Parameter]
    loader: LogicalBatchLoader
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    prepare: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    autocast: Callable[[], AbstractContextManager[Any]]
    loss_scale: float
    rank: int
    keep_loss: bool

    @classmethod
    def of(
        cls,
        args: DPTrainingArguments,
        *,
        engine: PerSampleEngine,
        run: PrivateRun,
        **others: Any,
    ) -> PrivateStep:
        """Make the step of a run with these arguments, mechanism included."""
        assert args.loss_scale is not None
        mechanism = GaussianMechanism(
            engine,
            noise_multiplier=run.plan.noise_multiplier,
            max_grad_norm=args.per_sample_max_grad_norm,
            sample_rate=run.plan.sample_rate,
            num_units=run.plan.num_units,
            noise_key=run.noise_key,
            fixed_noise=args.noise_seed is not None,
            clipping=args.clipping,  # type: ignore[arg-type]
            loss_scale=args.loss_scale,
        )
        return cls(
            mechanism,
            run,
            loss_scale=args.loss_scale,
            rank=args.process_index,
            keep_loss=args.report_nonprivate_loss,
            **others,
        )

    def take(self, draw: LogicalBatch, *, step: int, votes: float) -> float:
        """Release the gradient of one draw; return 0, or the raw mean loss.

        Args:
            draw: One Poisson draw.
            step: Its number, from 1.
            votes: See ``GaussianMechanism.release``.

        Raises:
            BudgetSpentError: If no draw of noise is affordable.
        """
        if not self.run.may_take(step):
            raise BudgetSpentError("the privacy budget is spent")
        loss, event = self._release(draw, step, votes)
        if self.run.departs(event):
            for p in self.parameters:
                p.grad = None
            if self.run.remaining <= 0:
                raise BudgetSpentError(
                    f"step {step} differs from the interrupted run, and the budget has no draw left"
                )
            logger.warning("Step %d differs from the interrupted run: drawing afresh.", step)
            draw = self.loader.restart(self.run.draw_afresh())
            self.mechanism.noise_key = self.run.noise_key
            loss, event = self._release(draw, step, votes)
        self.run.record(event)
        private = [p.grad for p in self.parameters if p.grad is not None]
        for p, gradient in zip(self.parameters, self.filter.smooth(private), strict=True):
            p.grad = gradient
        return loss

    def _release(self, draw: LogicalBatch, step: int, votes: float) -> tuple[float, NoiseEvent]:
        """Clip and sum the gradients of a draw, add noise once; the filter is not asked yet."""
        engine = self.mechanism.module
        engine.train()
        self.mechanism.begin()
        loss_sum, rows = 0.0, 0
        points = self.filter.query_points()
        for index, physical_batch in enumerate(draw):
            batch = self.prepare(physical_batch.inputs)
            labels, size = batch["labels"], len(batch["labels"])
            if not labels.is_floating_point() and bool((labels < 0).any()):
                raise ValueError(
                    "train_dataset has labels below 0, such as -100 for a row to be ignored; "
                    "remove these rows, since a mean over the other rows would couple them."
                )
            seed = self._dropout_seed(step, index)
            devices = [labels.device.index or 0] if labels.is_cuda else []
            if physical_batch.unit_of_row is not None:
                unit_of_row = physical_batch.unit_of_row.to(labels.device)
                engine.set_units(unit_of_row, physical_batch.num_units, reduction="mean")
            for point in points:
                # Every evaluation of a sample sees the same dropout.
                with moved_to(self.parameters, point), seeded_globals(seed, devices=devices):
                    with self.autocast():
                        loss = self.loss(engine, batch)
                    # the engine wants the sum over samples, not their mean
                    scaled = loss * (size * point.coefficient * self.loss_scale)
                    scaled.backward()  # type: ignore[no-untyped-call]
                    if point is points[-1]:  # before the weights are back: ghost goes back again
                        self.mechanism.accumulate()
            if self.keep_loss:
                loss_sum, rows = loss_sum + loss.item() * size, rows + size
        return loss_sum / max(rows, 1), self.mechanism.release(step=step, votes=votes)

    def _dropout_seed(self, step: int, index: int) -> int:
        """A secret seed for what the model draws in a physical batch; the same in a replay.

        Under a public seed, one more row would move the masks of all that come after it, and with
        them the sum by more than its own clipped gradient.
        """
        use = f"dropout {step - 1} {self.rank} {index}"
        return int(keyed_generator(self.run.noise_key, use.encode()).integers(2**63))

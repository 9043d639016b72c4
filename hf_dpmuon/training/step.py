"""One private step: a draw becomes a private gradient for the optimizer and a ledger record.

Receives logical batches and the number of the step. Everything that a step needs is handed in: no
base class and no framework is known here.

Guarantees:
    On return of ``take`` the gate offers the private gradient, no per-sample or raw gradient is
    left, and the draw of noise is on disk in the ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from hf_dpmuon.accounting import NoiseEvent
from hf_dpmuon.filters import GradientFilter, moved_to
from hf_dpmuon.grad_sample import PerSampleEngine
from hf_dpmuon.mechanism import GaussianMechanism
from hf_dpmuon.randomness import keyed_generator, seeded_globals
from hf_dpmuon.sampling import LogicalBatch
from hf_dpmuon.training.release import ReleaseGate

if TYPE_CHECKING:  # a step needs no framework to run
    from hf_dpmuon.arguments import DPTrainingArguments
    from hf_dpmuon.plan import PrivacyPlan

__all__ = ["BudgetSpentError", "PrivateStep"]


class BudgetSpentError(Exception):
    """No further draw of noise is affordable."""


class _Run(Protocol):
    """Ledger, budget and secret keys; see ``run.PrivateRun``."""

    @property
    def plan(self) -> PrivacyPlan: ...
    def may_take(self, step: int) -> bool: ...
    def key_of(self, step: int) -> bytes: ...
    def record(self, event: NoiseEvent) -> None: ...


@dataclass
class PrivateStep:
    """Sampling, clipping, noise, ledger and filter of one step, in this order.

    Attributes:
        mechanism: Clips, sums and adds noise; holds the engine of per-sample gradients.
        run: Ledger, budget and secret keys.
        filter: Smooths the private gradients.
        gate: Offers the private gradients to the optimizer.
        loss: Returns the mean over the rows of a physical batch.
        prepare: Brings a physical batch to the device.
        autocast: Enters the compute type.
        loss_scale: A static factor, undone by the mechanism.
        rank: Number of this process.
        keep_loss: Whether ``take`` returns the raw mean loss and not 0.
    """

    mechanism: GaussianMechanism
    run: _Run
    filter: GradientFilter
    gate: ReleaseGate
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
        run: _Run,
        gate: ReleaseGate,
        **others: Any,
    ) -> PrivateStep:
        """Make the step of a run with these arguments, mechanism included; its gate is guarded."""
        assert args.loss_scale is not None
        mechanism = GaussianMechanism(
            engine,
            noise_multiplier=run.plan.noise_multiplier,
            max_grad_norm=args.per_sample_max_grad_norm,
            sample_rate=run.plan.sample_rate,
            num_units=run.plan.num_units,
            noise_key=b"",  # that of each step is set before it
            fixed_noise=args.noise_seed is not None,
            clipping=args.clipping,
            loss_scale=args.loss_scale,
        )
        step = cls(
            mechanism,
            run,
            gate=gate,
            loss_scale=args.loss_scale,
            rank=args.process_index,
            keep_loss=args.report_nonprivate_loss,
            **others,
        )
        gate.guard()
        return step

    def take(self, draw: LogicalBatch, *, step: int, stop_votes: float) -> float:
        """Release the gradient of one draw; return 0, or the raw mean loss.

        Args:
            draw: One Poisson draw.
            step: Its number, from 1.
            stop_votes: See ``GaussianMechanism.release``.

        Raises:
            BudgetSpentError: If no draw of noise is affordable.
            ValueError: If a repeated step is not the one that the ledger holds; nothing of it is
                left.
        """
        if not self.run.may_take(step):
            raise BudgetSpentError("the privacy budget is spent")
        self.mechanism.noise_key = self.run.key_of(step)
        parameters = self.gate.parameters
        try:
            loss, event = self._release(draw, step, stop_votes)
            self.run.record(event)
            private = [p.grad for p in parameters.values() if p.grad is not None]
        finally:
            for p in parameters.values():
                p.grad = None
        self.gate.publish(dict(zip(parameters, self.filter.smooth(private), strict=True)))
        return loss

    def _release(
        self, draw: LogicalBatch, step: int, stop_votes: float
    ) -> tuple[float, NoiseEvent]:
        """Clip and sum the gradients of a draw, add noise once; the filter is not asked yet."""
        engine = self.mechanism.module
        engine.train()
        self.mechanism.begin()
        loss_sum, rows = 0.0, 0
        points = self.filter.query_points()
        parameters = list(self.gate.parameters.values())
        for index, physical_batch in enumerate(draw):
            batch = self.prepare(physical_batch.inputs)
            labels, size = batch["labels"], len(batch["labels"])
            seed = self._dropout_seed(step, index)
            devices = [labels.device.index or 0] if labels.is_cuda else []
            if physical_batch.unit_of_row is not None:
                unit_of_row = physical_batch.unit_of_row.to(labels.device)
                engine.set_units(unit_of_row, physical_batch.num_units, reduction="mean")
            for point in points:
                # Every evaluation of a sample sees the same dropout.
                with moved_to(parameters, point), seeded_globals(seed, devices=devices):
                    with self.autocast():
                        loss = self.loss(engine, batch)
                    # the engine wants the sum over samples, not their mean
                    scaled = loss * (size * point.coefficient * self.loss_scale)
                    scaled.backward()  # type: ignore[no-untyped-call]
                    if point is points[-1]:  # before the weights are back: ghost goes back again
                        self.mechanism.accumulate()
            if self.keep_loss:
                loss_sum, rows = loss_sum + loss.item() * size, rows + size
        return loss_sum / max(rows, 1), self.mechanism.release(step=step, stop_votes=stop_votes)

    def _dropout_seed(self, step: int, index: int) -> int:
        """A secret seed for what the model draws in a physical batch; the same in a replay.

        Under a public seed, one more row would move the masks of all that come after it, and with
        them the sum by more than its own clipped gradient.
        """
        use = f"dropout {step - 1} {self.rank} {index}"
        return int(keyed_generator(self.run.key_of(step), use.encode()).integers(2**63))

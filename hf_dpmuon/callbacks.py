"""What a run shows after each step, and what ends it before its last one.

Receives questions to ask the run (what is spent, what is affordable, was it interrupted) and the
signals of the process; tells the base class's loop to show, save or stop. It sees no gradient.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from transformers import ProgressCallback, TrainerCallback
from transformers.trainer_callback import CallbackHandler

from hf_dpmuon.plan import PrivacyPlan
from hf_dpmuon.rounding import round_up_fixed

__all__ = ["ExpectedPasses", "Interrupt", "PrivacyProgressCallback", "StopCallback", "watch"]

logger = logging.getLogger(__name__)


class _Run(Protocol):
    """See ``run.PrivateRun``."""

    @property
    def plan(self) -> PrivacyPlan: ...
    def epsilon(self) -> float: ...
    def may_take(self, step: int) -> bool: ...


def watch(handler: CallbackHandler, run: _Run, is_interrupted: Callable[[], bool]) -> None:
    """Let a loop count expected passes, before all else, show epsilon, and stop when it has to."""
    if handler.pop_callback(ProgressCallback) is not None:
        handler.add_callback(PrivacyProgressCallback(run.epsilon))
    handler.add_callback(StopCallback(run.may_take, is_interrupted))
    handler.callbacks.insert(0, ExpectedPasses(run.plan.sample_rate))


class PrivacyProgressCallback(ProgressCallback):
    """The base class's progress bar, with the epsilon spent so far."""

    def __init__(self, epsilon: Callable[[], float]) -> None:
        super().__init__()
        self.epsilon = epsilon

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance the bar and show epsilon."""
        if self.training_bar is not None:
            self.training_bar.set_postfix(epsilon=round_up_fixed(self.epsilon()), refresh=False)
        super().on_step_end(args, state, control, **kwargs)  # type: ignore[no-untyped-call]


class ExpectedPasses(TrainerCallback):
    """Counts epochs as expected passes over the data, steps times q.

    The base class counts them in whole steps, of which one pass is the nearest number to 1 / q.
    """

    def __init__(self, sample_rate: float) -> None:
        self.sample_rate = sample_rate

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say how many passes there will be, and how many an interrupted run has made."""
        state.num_train_epochs = math.ceil(state.max_steps * self.sample_rate)
        state.epoch = state.global_step * self.sample_rate

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step."""
        state.epoch = state.global_step * self.sample_rate


class StopCallback(TrainerCallback):
    """Stops training once no further step is affordable, or when a signal asks for it."""

    def __init__(self, may_take: Callable[[int], bool], is_interrupted: Callable[[], bool]) -> None:
        self.may_take = may_take
        self.is_interrupted = is_interrupted

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Ask the loop to stop, and after a signal to save a checkpoint first."""
        if state.global_step >= state.max_steps:
            return control
        if self.is_interrupted():
            logger.warning("Interrupted after step %d: saving a checkpoint.", state.global_step)
            control.should_save = True
            control.should_training_stop = True
        elif not self.may_take(state.global_step + 1):
            logger.warning("Privacy budget spent after step %d: stopping.", state.global_step)
            control.should_training_stop = True
        return control


class Interrupt:
    """While entered, takes SIGTERM and SIGINT as requests to stop after the step.

    A launcher often sends a signal twice, to the group and through its agent, so that a repeat
    within ``GRACE`` seconds means no more; a later one acts at once.
    """

    GRACE = 10.0

    def __init__(self) -> None:
        self.requested = False
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        self.requested = False
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        for number in list(self._before):
            signal.signal(number, self._before.pop(number))

    def _request(self, number: int, _frame: Any) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self._first = True, now
        elif now - self._first > self.GRACE:
            signal.signal(number, self._before.pop(number))
            signal.raise_signal(number)

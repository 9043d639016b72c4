"""The learning-rate schedule: a warm-up starts at its second point, not at zero.

Receives what makes a schedule of so many steps; returns the schedule. At a learning rate of zero a
step would spend privacy and move nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from transformers.trainer_utils import SchedulerType

from hf_dpmuon.arguments import DPTrainingArguments

__all__ = ["build_schedule"]

STEERED = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)  # they know no warm-up


def build_schedule(create: Callable[[int], Any], args: DPTrainingArguments, num_steps: int) -> Any:
    """Make the schedule of ``num_steps`` steps, or of one more whose first point is skipped."""
    if args.lr_scheduler_type in STEERED or args.get_warmup_steps(num_steps) == 0:
        return create(num_steps)
    schedule = create(num_steps + 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        schedule.step()
    return schedule

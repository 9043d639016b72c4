"""The loader of a run's logical batches, from its arguments and plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from hf_dpmuon.arguments import DPTrainingArguments
from hf_dpmuon.batches import SeededRows
from hf_dpmuon.plan import PrivacyPlan, steps_per_epoch
from hf_dpmuon.sampling import LogicalBatchLoader, PoissonSampler
from hf_dpmuon.units import PrivacyUnits

__all__ = ["build_loader"]


def build_loader(
    dataset: Dataset[Any],
    collate_fn: Callable[[list[Any]], dict[str, Tensor]],
    *,
    args: DPTrainingArguments,
    plan: PrivacyPlan,
    generator_of: Callable[[int], np.random.Generator],
    first_draw: int,
    units: PrivacyUnits | None,
    max_examples_per_unit: int,
) -> LogicalBatchLoader:
    """Build what draws units, not rows, at the rate of the plan."""
    sampler = PoissonSampler(plan.num_units, sample_rate=plan.sample_rate)
    return LogicalBatchLoader(
        SeededRows(dataset, keep_failures=True),
        sampler=sampler,
        generator_of=generator_of,
        first_draw=first_draw,
        physical_batch_size=args.per_device_train_batch_size,
        collate_fn=collate_fn,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
        num_batches=steps_per_epoch(plan.sample_rate),
        rows_of_unit=None if units is None else units.rows_of_unit,
        max_rows_per_unit=max_examples_per_unit,
        augmentations=args.augmentation_multiplicity,
        rank=args.process_index,
        world_size=args.world_size,
    )

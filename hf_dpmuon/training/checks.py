"""What a run refuses before it starts, or in mid-run, one function a reason.

Receives what the user handed to the trainer; returns nothing, or one sentence that names it and
says what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import ConcatDataset, Subset
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.optimization import GreedyLR

from hf_dpmuon.arguments import DPTrainingArguments
from hf_dpmuon.data import ImageExamples, RepeatedUnit
from hf_dpmuon.units import PrivacyUnits

__all__ = [
    "check_backend",
    "check_callbacks",
    "check_datasets",
    "check_not_overridden",
    "check_optimizer",
    "check_scheduler",
    "check_units",
]


def check_not_overridden(kind: type, own: type, hooks: Iterable[str]) -> None:
    """Refuse a subclass that draws its samples otherwise."""
    for name in hooks:
        if getattr(own, name) is not getattr(kind, name):
            raise ValueError(
                f"{kind.__name__}.{name} replaces the sampling that the accountant assumes; remove "
                "it, and weight classes in the loss instead."
            )


def check_datasets(train_dataset: Any, eval_dataset: Any) -> None:
    """Refuse streams, nothing to train on, and training rows in the evaluation split."""
    if not hasattr(train_dataset, "__len__") or not hasattr(train_dataset, "__getitem__"):
        raise ValueError(
            "train_dataset must be map-style with a length: the number of privacy units must be "
            "known; load it without streaming."
        )
    if len(train_dataset) == 0:
        raise ValueError("train_dataset is empty; check the split's name and filters.")
    held_out = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    if any(_share_rows(one, train_dataset) for one in held_out):
        raise ValueError(
            "eval_dataset holds rows of train_dataset, whose un-noised metrics would be published "
            "with the model; evaluate on data that is not trained on."
        )


def check_units(
    units: PrivacyUnits | None,
    repeated_unit: RepeatedUnit | None,
    max_examples_per_unit: int,
    num_rows: int,
    args: DPTrainingArguments,
) -> None:
    """Refuse units that are not a partition of the rows, or too large for a physical batch."""
    if repeated_unit is not None and units is not None:
        raise ValueError("units and repeated_unit are both set; give the one that applies.")
    if max_examples_per_unit < 1:
        raise ValueError(f"max_examples_per_unit={max_examples_per_unit} must be >= 1.")
    rows_at_once = args.augmentation_multiplicity
    if units is not None:
        if units.num_rows != num_rows:
            raise ValueError(
                f"units has {units.num_rows} rows and train_dataset {num_rows}; make the units "
                "from the ids of just the rows that are trained on."
            )
        rows_at_once *= min(units.largest, max_examples_per_unit)
    if rows_at_once > args.per_device_train_batch_size:
        raise ValueError(
            f"per_device_train_batch_size={args.per_device_train_batch_size} is below the "
            f"{rows_at_once} rows of one privacy unit, which must be in memory together; raise it, "
            "or lower max_examples_per_unit or augmentation_multiplicity."
        )


def check_callbacks(callbacks: Iterable[TrainerCallback], args: DPTrainingArguments) -> None:
    """Refuse early stopping on data that is not declared public."""
    if not args.public_eval_split and any(isinstance(c, EarlyStoppingCallback) for c in callbacks):
        raise ValueError(
            "EarlyStoppingCallback lets the evaluation split choose the released model at no "
            "counted cost; set public_eval_split=True if that split is public data."
        )


def check_scheduler(scheduler: Any, args: DPTrainingArguments) -> None:
    """Refuse a schedule that results on data that is not declared public would steer."""
    steered = isinstance(scheduler, ReduceLROnPlateau | GreedyLR)
    if steered and not args.public_eval_split:
        raise ValueError(
            f"{type(scheduler).__name__} lets the evaluation split steer the learning rate at no "
            "counted cost; set public_eval_split=True if that split is public data, or hand in "
            "another scheduler."
        )


def check_backend(accelerator: Accelerator) -> None:
    """Refuse a launcher that compiles, and matrix products that round norms."""
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise ValueError(
            "the launcher's dynamo_backend compiles the model, which bypasses the engine of "
            "per-sample gradients; launch with --dynamo_backend no."
        )
    if torch.get_float32_matmul_precision() != "highest":
        raise ValueError(
            f"float32_matmul_precision={torch.get_float32_matmul_precision()!r} rounds norms "
            "and sums, which loosens the clipping bound; call "
            "torch.set_float32_matmul_precision('highest')."
        )


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer that does not hold each trainable parameter exactly once."""
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if sorted(held) == sorted(names):
        return
    missing = [name for key, name in names.items() if key not in held]
    frozen = [n for n, p in model.named_parameters() if id(p) in {*held} - {*names}]
    others = len(held) - len(names) + len(missing) - len(frozen)
    raise ValueError(
        "the optimizer must hold each trainable parameter of the model exactly once; "
        f"missing: {', '.join(missing) or 'none'}; not trainable: "
        f"{', '.join(frozen) or 'none'}; not of this model or repeated: {others}. Build it "
        "after the model is final."
    )


def _share_rows(dataset: Any, train_dataset: Any) -> bool:
    """Whether a data set holds training rows, perhaps otherwise prepared."""
    if isinstance(dataset, ConcatDataset):
        return any(_share_rows(part, train_dataset) for part in dataset.datasets)
    if isinstance(train_dataset, ConcatDataset):
        return any(_share_rows(dataset, part) for part in train_dataset.datasets)
    (root, rows), (train_root, train_rows) = _root(dataset), _root(train_dataset)
    if isinstance(root, ImageExamples) and isinstance(train_root, ImageExamples):
        same = root.fingerprint == train_root.fingerprint
    else:
        same = root is train_root
    return same and (rows is None or train_rows is None or not rows.isdisjoint(train_rows))


def _root(dataset: Any) -> tuple[Any, set[int] | None]:
    """The data set that a subset is of, and which rows of it; None for all."""
    rows: list[int] | None = None
    while isinstance(dataset, Subset):
        indices = [int(i) % len(dataset.dataset) for i in dataset.indices]  # type: ignore[arg-type]
        rows = indices if rows is None else [indices[i] for i in rows]
        dataset = dataset.dataset
    return dataset, None if rows is None else set(rows)

"""What a run refuses before it starts, or in mid-run, one function a reason.

Receives what the user handed to the trainer; returns nothing, or one sentence that names it and
says what to do instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tqdm import tqdm
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.optimization import GreedyLR

from hf_dpmuon.arguments import DPTrainingArguments
from hf_dpmuon.batches import RowError, RowWise, SeededRows, located
from hf_dpmuon.data import ImageExamples, RepeatedUnit, row_keys, storage_keys
from hf_dpmuon.units import PrivacyUnits

__all__ = [
    "check_arguments",
    "check_backend",
    "check_callbacks",
    "check_datasets",
    "check_repeats",
    "check_rows",
    "check_optimizer",
    "check_sampling",
    "check_scheduler",
    "check_still_there",
    "check_units",
    "evaluation_sets",
]


# What the base class takes, and why it is not taken here.
NOT_TAKEN = {
    "model_init": "would build a model anew for each trial of a search, whose cost no ledger "
    "counts; pass the model itself",
    "compute_loss_func": "gets a whole batch and could couple its rows; override compute_loss, "
    "which is checked before training",
    "optimizer_cls_and_kwargs": "is built before the trainable parameters are fixed; pass "
    "optimizers=(optimizer, scheduler) or set dp_optimizer",
    "tokenizer": "has no part in images; pass processing_class",
}


def check_arguments(args: object, others: Mapping[str, object]) -> DPTrainingArguments:
    """Refuse arguments that do not say what privacy costs, and what is not taken here."""
    if not isinstance(args, DPTrainingArguments):
        raise ValueError(
            f"args of type {type(args).__name__} must be DPTrainingArguments, which say what "
            "privacy may cost; make them with target_epsilon or noise_multiplier."
        )
    for name in others:
        reason = NOT_TAKEN.get(name, "is not known; see the arguments of DPTrainer")
        raise ValueError(f"{name} {reason}.")
    return args


def check_sampling(kind: type, own: type) -> None:
    """Refuse a subclass that draws its samples otherwise."""
    for name in ("get_train_dataloader", "_get_train_sampler", "get_batch_samples"):
        if getattr(own, name) is not getattr(kind, name):
            raise ValueError(
                f"{kind.__name__}.{name} replaces the sampling that the accountant assumes; remove "
                "it, and weight classes in the loss instead."
            )


def check_datasets(train_dataset: Any, eval_dataset: Any) -> None:
    """Refuse streams, nothing to train on, and training rows in the evaluation split."""
    if train_dataset is None:
        raise ValueError(
            "train_dataset is missing: the guarantee is about its rows; to evaluate only, use "
            "transformers.Trainer with the saved model."
        )
    if not hasattr(train_dataset, "__len__") or not hasattr(train_dataset, "__getitem__"):
        raise ValueError(
            "train_dataset must be map-style with a length: the number of privacy units must be "
            "known; load it without streaming."
        )
    if len(train_dataset) == 0:
        raise ValueError("train_dataset is empty; check the split's name and filters.")
    trained = storage_keys(train_dataset)
    held_out = evaluation_sets(eval_dataset).values()
    if any(not trained.isdisjoint(storage_keys(one)) for one in held_out):
        raise ValueError(
            "eval_dataset holds rows of train_dataset, or may do so, whose un-noised metrics would "
            "be published with the model; evaluate on data that is not trained on, and where a "
            "class of your own picks rows of a data set, let it wrap a torch Subset of these rows."
        )


def check_repeats(train_dataset: Any, units: PrivacyUnits | None) -> None:
    """Refuse a row that is there several times, unless all its places are in one unit."""
    keys = row_keys(train_dataset)
    if len(set(keys)) == len(keys):
        return
    if units is not None:
        owners: dict[Hashable, int] = {}
        of_row = {int(row): u for u, rows in enumerate(units.rows_of_unit) for row in rows}
        if all(owners.setdefault(key, of_row[row]) == of_row[row] for row, key in enumerate(keys)):
            return
    raise ValueError(
        f"train_dataset has {len(keys)} rows but only {len(set(keys))} of them are different, so "
        "that an image which is there several times would be protected as if it were there once; "
        "leave each row in once, and weight classes in the loss."
    )


def check_rows(
    train_dataset: Any,
    eval_dataset: Any,
    collator: object,
    *,
    units: PrivacyUnits | None,
    num_units: int,
    row: Mapping[str, Tensor],
    bar: bool,
) -> None:
    """Read every row before anything is spent: the data sets may be others than they were.

    Raises:
        ValueError: With the number of rows that cannot be used, but not which; or if the data sets
            are none that the plan was made for.
    """
    check_datasets(train_dataset, eval_dataset)
    check_repeats(train_dataset, units)
    planned = num_units if units is None else sum(map(len, units.rows_of_unit))
    if len(train_dataset) != planned:
        raise ValueError(
            f"train_dataset has {len(train_dataset)} rows, but the plan was made for {planned}; "
            "build a new trainer for other data."
        )
    assert isinstance(collator, RowWise)
    shape = row["pixel_values"].shape
    collator = RowWise(collator.collator, head=collator.head)  # which tells what is wrong
    reasons = _problems(SeededRows(train_dataset), collator, shape, bar="train" if bar else None)
    if reasons:
        counts = "; ".join(f"{count} have {reason}" for reason, count in reasons.most_common())
        raise ValueError(
            f"{sum(reasons.values())} of {len(train_dataset)} rows of train_dataset cannot be "
            f"used: {counts}. Mend or remove them, since N must be known before the first draw."
        )
    for name, one in evaluation_sets(eval_dataset).items():
        reasons = _problems(SeededRows(one), collator, shape, bar="evaluation" if bar else None)
        if reasons:
            reason, count = reasons.most_common(1)[0]
            raise ValueError(
                f"{count} of {len(one)} rows of {name} have {reason}; mend or remove them, or "
                "train without it: they would end the run after its budget is spent."
            )


def check_still_there(train_dataset: Any) -> None:
    """Refuse to draw from a data set that has gone, seen at its first row whatever is drawn."""
    try:
        train_dataset[0]
    except Exception as error:
        raise ValueError(
            f"train_dataset cannot be read any more ({type(error).__name__}); bring the images "
            "back, then resume from the last checkpoint."
        ) from None


def _problems(
    rows: SeededRows, collator: RowWise, shape: torch.Size, *, bar: str | None
) -> Counter[str]:
    """Why rows cannot be used, with how many; images that were read already are not read."""
    reasons = Counter[str]()
    labels: dict[int, list[Tensor]] = {}
    for index in tqdm(range(len(rows)), f"checking {bar} rows", disable=bar is None):
        try:
            examples, place = located(rows.dataset, index)
            if type(examples) is ImageExamples and examples.checked and index:
                if id(examples) not in labels:
                    labels[id(examples)] = examples.labels()
                collator.checked_labels(labels[id(examples)][place][None])
                continue
            found = collator([rows[index, 0]])["pixel_values"].shape[1:]
            if found != shape:
                reasons[f"the shape {tuple(found)}, not {tuple(shape)}"] += 1
        except RowError as error:
            reasons[error.reason] += 1
        except Exception as error:  # a data set may raise what it likes
            reasons[f"an image or label that raises {type(error).__name__} when it is read"] += 1
    return reasons


def evaluation_sets(eval_dataset: Any) -> dict[str, Any]:
    """The evaluation sets by a name for messages; none, one or several."""
    if eval_dataset is None:
        return {}
    if isinstance(eval_dataset, dict):
        return {f"eval_dataset[{name!r}]": one for name, one in eval_dataset.items()}
    return {"eval_dataset": eval_dataset}


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

"""What a trainer makes of what it is given, all of it checked.

Receives model, arguments and data; returns the folder that the model is saved in, the collator, the
loss, the shapes of a row and the private run. Of the private rows only shapes are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import EvalPrediction, PreTrainedModel

from hf_dpmuon.arguments import DPTrainingArguments
from hf_dpmuon.batches import Head, RowWise, processed, template
from hf_dpmuon.data import RepeatedUnit
from hf_dpmuon.metrics import EvaluationRecord, build_metrics
from hf_dpmuon.model_folder import ModelFolder
from hf_dpmuon.models import LoadedModel
from hf_dpmuon.run import PrivateRun
from hf_dpmuon.training import checks
from hf_dpmuon.training.losses import RowMeanLoss
from hf_dpmuon.units import PrivacyUnits
from hf_dpmuon.validation import validate_model

__all__ = ["Inputs"]

Metrics = Callable[[EvalPrediction], dict[str, float]]


@dataclass(frozen=True)
class Inputs:
    """The parts of a run that its inputs decide.

    Attributes:
        folder: Writes the model with report and card.
        collator: Sees one row at a time, and knows the head.
        row: The shapes of a row, filled with zeros.
        loss: The mean over rows.
        evaluations: The metrics, and those of the last evaluation.
        run: Plan, ledger and keys.
        given: Public settings on which the sums of a step depend, beside the arguments.
    """

    folder: ModelFolder
    collator: RowWise
    row: dict[str, Tensor]
    loss: RowMeanLoss
    evaluations: EvaluationRecord
    run: PrivateRun
    given: Mapping[str, object]

    @classmethod
    def of(
        cls,
        model: LoadedModel | PreTrainedModel,
        args: DPTrainingArguments,
        *,
        train_dataset: Any,
        eval_dataset: Any,
        data_collator: Callable[[list[Any]], Mapping[str, Tensor]] | None,
        processing_class: Any,
        compute_metrics: Metrics | None,
        units: PrivacyUnits | None,
        max_examples_per_unit: int,
        repeated_unit: RepeatedUnit | None,
        class_weights: Sequence[float] | None,
        base_model: str | None,
        dataset_name: str | None,
        own_loss: bool,
    ) -> Inputs:
        """Make the parts; see ``DPTrainer`` for what they are made of.

        ``own_loss`` says that a subclass computes the loss, whose labels are then its own.

        Raises:
            ValueError: If the model or the data cannot be trained on privately.
        """
        checks.check_datasets(train_dataset, eval_dataset)
        num_rows = len(train_dataset)
        checks.check_units(units, repeated_unit, max_examples_per_unit, num_rows, args)
        checks.check_repeats(train_dataset, units)
        if data_collator is None and processing_class is not None:
            data_collator = partial(processed, processor=processing_class)
        row = template(train_dataset, RowWise(data_collator))
        folder = ModelFolder.of(
            model,
            processing_class,
            args=args,
            base_model=base_model,
            dataset_name=dataset_name,
            num_channels=row["pixel_values"].shape[0],
            several_labels=row["labels"].is_floating_point(),
        )
        validate_model(folder.module)
        num_classes, multi_label = len(folder.label_names), folder.facts["multi_label"]
        head = None if own_loss else Head(num_classes, multi_label)
        collator = RowWise(data_collator, head=head)
        loss = RowMeanLoss(
            num_classes=num_classes,
            multi_label=multi_label,
            class_weights=class_weights,
            label_smoothing=args.label_smoothing_factor,
        )
        run = PrivateRun(
            args,
            num_rows=num_rows,
            label_names=folder.label_names,
            units=units,
            max_examples_per_unit=max_examples_per_unit,
            repeated_unit=repeated_unit,
            earlier=None if folder.origin is None else folder.origin.ledger,
        )
        metrics = build_metrics(folder.label_names, multi_label=multi_label)
        if not own_loss:
            metrics = _with_loss(metrics, loss)
        evaluations = EvaluationRecord(compute_metrics or metrics)
        row = template(train_dataset, collator)
        collator = RowWise(data_collator, head=head, stand_in=row)
        given = {
            "class_weights": class_weights,
            "max_examples_per_unit": None if units is None else max_examples_per_unit,
            "row": {name: tuple(value.shape) for name, value in row.items()},
        }
        return cls(folder, collator, row, loss, evaluations, run, given)


def _with_loss(metrics: Metrics, loss: RowMeanLoss) -> Metrics:
    """Add the run's own loss over all rows; the base class averages over uneven batches."""

    def computed(prediction: EvalPrediction) -> dict[str, float]:
        found = metrics(prediction)
        if not found:
            return found
        logits = torch.as_tensor(prediction.predictions).float()
        return {**found, "loss": float(loss(logits, torch.as_tensor(prediction.label_ids)))}

    return computed

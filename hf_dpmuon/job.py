"""A whole run: load data and model, train, evaluate, save, and say what was spent.

Receives the three groups of arguments; prints what the run costs, and leaves its folder.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import set_seed

from hf_dpmuon.arguments import DataArguments, DPTrainingArguments, ModelArguments
from hf_dpmuon.data import (
    ImageExamples,
    ImageSplits,
    RepeatedUnit,
    build_transforms,
    class_weights,
    load_image_dataset,
)
from hf_dpmuon.models import LoadedModel, load_model
from hf_dpmuon.rounding import round_up, round_up_fixed
from hf_dpmuon.scope import train_only
from hf_dpmuon.trainer import DPTrainer
from hf_dpmuon.units import PrivacyUnits

__all__ = ["Parts", "finetune", "load_parts"]

# One AUROC for each label, where there are several.
METRICS_SHOWN = ("eval_accuracy", "eval_balanced", "eval_f1", "eval_auroc", "eval_expected")

MOST_CLASSES_SHOWN = 50

logger = logging.getLogger(__name__)


def load_examples(
    splits: ImageSplits, loaded: LoadedModel, data_args: DataArguments
) -> tuple[ImageExamples, ImageExamples | None]:
    """Turn the splits into training and evaluation examples for this model."""

    def examples(split: object, *, train: bool) -> ImageExamples:
        return ImageExamples(
            split,
            image_column=splits.image_column,
            label_column=splits.label_column,
            transform=build_transforms(
                loaded.image_format,
                train=train,
                random_flip=data_args.random_flip,
                random_crop=data_args.random_crop,
            ),
            checked=True,
        )

    evaluation = None if splits.evaluation is None else examples(splits.evaluation, train=False)
    return examples(splits.train, train=True), evaluation


def check_output_folder(output_dir: Path, dataset_name: str) -> None:
    """Refuse an output folder inside the data, whose pictures would be a class of the next run."""
    data = Path(dataset_name).expanduser()
    if data.is_dir() and output_dir.resolve().is_relative_to(data.resolve()):
        raise ValueError(
            f"output_dir={str(output_dir)!r} lies in the data set {dataset_name!r}, whose images "
            "the pictures of this run would join; choose a folder outside of it."
        )


def described(label_names: Sequence[str], weights: Sequence[float] | None) -> str:
    """Classes with their weights, for people to compare; the first of very many."""
    names = [
        name if weights is None else f"{name} (weight {weights[index]:g})"
        for index, name in enumerate(label_names[:MOST_CLASSES_SHOWN])
    ]
    left = len(label_names) - len(names)
    return ", ".join(names) + (f" and {left} more" if left else "")


@dataclass(frozen=True)
class Parts:
    """What a run is made of, next to its arguments; see ``DPTrainer``."""

    loaded: LoadedModel
    train: ImageExamples
    evaluation: ImageExamples | None
    units: PrivacyUnits | None
    repeated_unit: RepeatedUnit | None
    class_weights: list[float] | None


def load_parts(model_args: ModelArguments, data_args: DataArguments) -> Parts:
    """Load data and model, and tell the console what was found."""
    splits = load_image_dataset(
        data_args.dataset_name,
        config_name=data_args.dataset_config_name,
        revision=data_args.dataset_revision,
        train_split=data_args.train_split,
        eval_split=data_args.eval_split,
        eval_fraction=data_args.eval_fraction,
        image_column=data_args.image_column,
        label_column=data_args.label_column,
        label_columns=data_args.label_columns,
        privacy_unit_column=data_args.privacy_unit_column,
        privacy_unit_pattern=data_args.privacy_unit_pattern,
        public_class_names=data_args.public_class_names,
        dicom_window=data_args.dicom_window,
        on_corrupt=data_args.on_corrupt,
    )
    loaded = load_model(
        model_args.model_name_or_path,
        label_names=splits.label_names,
        multi_label=splits.multi_label,
        image_size=model_args.image_size,
        revision=model_args.model_revision,
    )
    loaded = train_only(loaded, model_args.trainable, lora_rank=model_args.lora_rank)
    for note in (*splits.notes, *loaded.notes):
        logger.info(note)
    weights = None
    if data_args.class_weights is not None:
        weights = class_weights(
            data_args.class_weights, splits, public_class_counts=data_args.public_class_counts
        )
    logger.info("Classes, in the order of the head: %s", described(splits.label_names, weights))
    train, evaluation = load_examples(splits, loaded, data_args)
    return Parts(loaded, train, evaluation, splits.units, splits.repeated_unit, weights)


def finetune(
    model_args: ModelArguments, data_args: DataArguments, args: DPTrainingArguments
) -> None:
    """Load, train, evaluate, save, and say what was spent."""
    set_seed(args.seed)
    check_output_folder(Path(str(args.output_dir)), data_args.dataset_name)
    parts = load_parts(model_args, data_args)
    trainer = DPTrainer(
        parts.loaded,
        args,
        train_dataset=parts.train,
        eval_dataset=parts.evaluation,
        units=parts.units,
        max_examples_per_unit=data_args.max_examples_per_unit,
        repeated_unit=parts.repeated_unit,
        class_weights=parts.class_weights,
        base_model=model_args.model_name_or_path,
        dataset_name=data_args.dataset_name,
    )
    logger.info("Privacy plan: %s", trainer.plan)
    last = args.resume_from_checkpoint == "last"
    if args.do_train:
        trainer.train(resume_from_checkpoint=True if last else args.resume_from_checkpoint)
    say = print if trainer.is_world_process_zero() else logger.debug
    if trainer.interrupted:
        say(f"interrupted    --output_dir {args.output_dir} --resume_from_checkpoint last goes on")
        return
    metrics = trainer.evaluate() if args.do_eval and parts.evaluation is not None else {}
    for name, value in metrics.items():
        if name.startswith(METRICS_SHOWN):
            say(f"test {name.removeprefix('eval_').replace('_', ' ')}  {value:.4f}")
    if not args.do_train:
        return
    trainer.save_state()
    trainer.plot_confusion()
    trainer.plot_spectra()
    epsilon, delta = round_up_fixed(trainer.epsilon()), round_up(trainer.plan.delta)
    say(f"epsilon        {epsilon}  (delta {delta})")
    trainer.save_model()  # and pushes it under --push_to_hub
    say(f"saved in       {args.output_dir}")
    if args.push_to_hub:
        say(f"pushed to      {trainer.hub_model_id}")

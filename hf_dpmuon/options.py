"""Every option of ours: its name, its default, its choices and its help.

Receives nothing; the parser, the documentation and ``--help`` read it. No framework is loaded, so
that help is quick. What a value may be is checked by whoever uses it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args, get_origin, get_type_hints

from hf_dpmuon.accounting import Accountant, Clipping

__all__ = [
    "DataArguments",
    "Engine",
    "Filter",
    "ModelArguments",
    "Optimizer",
    "TrainingOptions",
    "check_choices",
    "choices",
]

Engine = Literal["bookkeeping", "ghost", "auto", "hooks"]
Optimizer = Literal["sgd", "adam", "muon", "muon_s"]
Filter = Literal["none", "doppler", "disk"]


def choices(kind: type) -> dict[str, tuple[str, ...]]:
    """The options of a group that take one of several names, with these names."""
    hints = get_type_hints(kind)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def check_choices(options: object, kind: type) -> None:
    """Refuse a value that is not one of its option's names.

    Raises:
        ValueError: If there is one.
    """
    for name, legal in choices(kind).items():
        if (value := vars(options)[name]) not in legal:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(legal)}.")


@dataclass
class ModelArguments:
    """Which pretrained model is fine-tuned.

    Attributes:
        model_name_or_path: Hub id, local folder, ``timm/<name>``, ``builtin:tiny-vit``, or one of
            the networks of ``networks``.
        model_revision: Branch, tag or commit on the Hub.
        image_size: Side of the input in pixels, where it differs from the model's own.
    """

    model_name_or_path: str = field(
        default="builtin:tiny-vit",
        metadata={
            "help": "Hub id, local folder, timm/<name>, builtin:tiny-vit, or a network to train "
            "from scratch: builtin:wrn-16-4, wrn-28-10, resnet-18-gn, nf-resnet-50."
        },
    )
    model_revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit of the model on the Hub."}
    )
    trainable: str = field(
        default="all",
        metadata={
            "help": "What is trained: all, head, bias, norm, lora, or last_n=K for the last K "
            "blocks; the head always is."
        },
    )
    lora_rank: int = field(default=8, metadata={"help": "Under trainable=lora: rank of adapters."})
    image_size: int | None = field(
        default=None, metadata={"help": "Input side in pixels, if not the model's own."}
    )


@dataclass
class DataArguments:
    """Which images are private, and how they are read.

    Attributes:
        dataset_name: Hub id, local folder or file, or ``builtin:digits``.
        dataset_config_name: Configuration of the data set on the Hub.
        dataset_revision: Branch, tag or commit on the Hub.
        train_split: The private split.
        eval_split: Split for evaluation; not covered by the guarantee.
        eval_fraction: Share of the train split's units to hold out instead.
        image_column: Column of images; found when there is only one.
        label_column: Column of labels; found when there is only one.
        label_columns: Columns of 0, 1 or blank, for several labels per image.
        privacy_unit_column: Column of ids, such as a patient's, whose rows are protected together.
        privacy_unit_pattern: Regular expression whose one named group is the id in that column.
        max_examples_per_unit: Most images of a drawn unit that a step uses.
        dicom_window: Center and width of the grey levels of DICOM files.
        public_class_names: Declares that class names that look like ids name nobody.
        on_corrupt: What to do with images that cannot be read: "refuse" or "drop".
        class_weights: Public weight of each class in the loss, or "balanced".
        public_class_counts: Whether the rows of each class may be counted for "balanced".
        random_flip: Horizontal flips in training.
        random_crop: Padded random crops in training.
    """

    dataset_name: str = field(
        default="builtin:digits",
        metadata={"help": "Hub id, local folder or file, or builtin:digits."},
    )
    dataset_config_name: str | None = field(
        default=None, metadata={"help": "Configuration of the data set."}
    )
    dataset_revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit of the data set on the Hub."}
    )
    train_split: str = field(default="train", metadata={"help": "The private split."})
    eval_split: str | None = field(
        default=None,
        metadata={"help": "Split for evaluation, not covered by the guarantee (found if unset)."},
    )
    eval_fraction: float | None = field(
        default=None,
        metadata={"help": "Share of the train split's units to hold out, if no split is named."},
    )
    image_column: str | None = field(
        default=None, metadata={"help": "Column of images (found if there is only one)."}
    )
    label_column: str | None = field(
        default=None, metadata={"help": "Column of labels (found if there is only one)."}
    )
    label_columns: list[str] | None = field(
        default=None,
        metadata={"help": "Instead, several columns of 0, 1 or blank: several labels per image."},
    )
    privacy_unit_column: str | None = field(
        default=None,
        metadata={
            "help": "Column of ids (patient, lesion), or with a pattern the column of images: all "
            "images of an id are protected as one."
        },
    )
    privacy_unit_pattern: str | None = field(
        default=None,
        metadata={
            "help": "Where ids are part of a text such as a path: a regular expression whose one "
            "named group is the id, as in (?P<patient>patient[0-9]+)."
        },
    )
    max_examples_per_unit: int = field(
        default=8,
        metadata={"help": "Most images of a drawn unit used in a step, drawn anew each step."},
    )
    dicom_window: list[float] | None = field(
        default=None,
        metadata={"help": "Center and width of DICOM grey levels (each file's own if unset)."},
    )
    public_class_names: bool = field(
        default=False,
        metadata={"help": "Declare that class names that look like ids or dates name nobody."},
    )
    on_corrupt: Literal["refuse", "drop"] = field(
        default="refuse",
        metadata={"help": "Images that cannot be read: refuse to start, or drop them first."},
    )
    class_weights: list[str] | None = field(
        default=None,
        metadata={
            "help": "Weight of each class in the loss, from a public source; or 'balanced', if "
            "--public_class_counts."
        },
    )
    public_class_counts: bool = field(
        default=False,
        metadata={"help": "Declare that the number of training rows of each class is public."},
    )
    random_flip: bool = field(
        default=True, metadata={"help": "Flip images left-right in training."}
    )
    random_crop: bool = field(
        default=True, metadata={"help": "Crop images after padding by 1/8 of their side."}
    )

    def __post_init__(self) -> None:
        """Check the values that can be checked without the data."""
        check_choices(self, DataArguments)
        if self.eval_fraction is not None and not 0 < self.eval_fraction < 1:
            raise ValueError(f"eval_fraction={self.eval_fraction} must be in (0, 1).")
        if self.eval_fraction is not None and self.eval_split is not None:
            raise ValueError(
                f"eval_fraction={self.eval_fraction} and eval_split={self.eval_split!r} are both "
                "set; set one of them."
            )
        if self.label_column is not None and self.label_columns is not None:
            raise ValueError(
                f"label_column={self.label_column!r} and label_columns={self.label_columns} are "
                "both set; set one of them."
            )
        if self.max_examples_per_unit < 1:
            raise ValueError(f"max_examples_per_unit={self.max_examples_per_unit} must be >= 1.")
        if self.dicom_window is not None and not (
            len(self.dicom_window) == 2
            and all(map(math.isfinite, self.dicom_window))
            and self.dicom_window[1] > 0
        ):
            raise ValueError(
                f"dicom_window={self.dicom_window} must be two numbers, a center and a width > 0."
            )


@dataclass
class TrainingOptions:
    """How a model is trained privately: our own options, and the base class's with our defaults."""

    target_epsilon: float | None = field(
        default=None,
        metadata={"help": "Privacy budget; sigma is calibrated to it (or give noise_multiplier)."},
    )
    target_delta: float | None = field(
        default=None, metadata={"help": "delta of the guarantee; 1/(10 N) if unset."}
    )
    noise_multiplier: float | None = field(
        default=None,
        metadata={"help": "sigma: noise std over per_sample_max_grad_norm (or target_epsilon)."},
    )
    loss_scale: float | None = field(
        default=None,
        metadata={
            "help": "Static factor of the loss under fp16 (1024 if unset), undone before clipping."
        },
    )
    per_sample_max_grad_norm: float = field(
        default=1.0, metadata={"help": "C: bound on the gradient norm of one privacy unit."}
    )
    clipping: Clipping = field(
        default="flat",
        metadata={"help": "How the bound is enforced."},
    )
    logical_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Expected number of privacy units in one optimizer step (q N); if unset, "
            "q is target_epsilon / 25, from 0.02 to 0.32."
        },
    )
    num_train_epochs: float | None = field(
        default=None,
        metadata={"help": "Expected passes over the data; if unset, they make 100 steps or more."},
    )
    per_device_train_batch_size: int = field(
        default=32,
        metadata={"help": "Physical batch: images in memory at once; changes nothing else."},
    )
    augmentation_multiplicity: int = field(
        default=1,
        metadata={
            "help": "K: augmentations of each drawn image whose gradients are averaged before "
            "clipping; costs K times the time, no privacy, and often gains accuracy."
        },
    )
    accountant: Accountant = field(
        default="rdp", metadata={"help": "Accountant of the reported epsilon."}
    )
    grad_sample_mode: Engine = field(
        default="bookkeeping",
        metadata={
            "help": "Engine of the per-sample gradients: bookkeeping is fast, ghost takes least "
            "memory, auto takes the first that fits, hooks is the reference."
        },
    )
    dp_optimizer: Optimizer = field(
        default="muon", metadata={"help": "Optimizer of the private gradient; see docs/methods.md."}
    )
    learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "Learning rate of matrices under muon and muon_s, of all parameters otherwise; "
            "if unset, it follows from noise, steps and shapes (see docs/methods.md)."
        },
    )
    vector_learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "Under muon, muon_s: learning rate of what is not orthogonalised; if unset, "
            "that of sgd."
        },
    )
    sgd_momentum: float | None = field(
        default=None,
        metadata={
            "help": "Momentum of DP-SGD; 0.9 if unset, but 0 behind a filter, which is momentum."
        },
    )
    muon_momentum: float | None = field(
        default=None,
        metadata={"help": "Momentum of spectral steps (muon 0.95, muon_s 0.9)."},
    )
    orthogonalize_head: bool = field(
        default=True,
        metadata={"help": "Under muon, muon_s: orthogonalise the classifier's matrix, too."},
    )
    orthogonalize_patch_embedding: bool = field(
        default=True,
        metadata={"help": "Under muon, muon_s: orthogonalise the patch embedding, too."},
    )
    ns_coefficients: str = field(
        default="quintic",
        metadata={
            "help": "Newton-Schulz table: quintic (the paper's), quintic_tuned or polar_express."
        },
    )
    ns_steps: int = field(default=5, metadata={"help": "Newton-Schulz iterations."})
    ns_bf16: bool = field(
        default=False, metadata={"help": "Newton-Schulz iterations in bfloat16; on CUDA only."}
    )
    adjust_lr_fn: str | None = field(
        default=None,
        metadata={
            "help": "Factor for rectangular matrices: paper (default of muon), original (of "
            "muon_s), match_rms_adamw or spectral_unclamped."
        },
    )
    spectral_map: str = field(
        default="newton_schulz",
        metadata={
            "help": "Direction under muon: newton_schulz, polar_express, svd, or one that knows "
            "the noise: known_noise_polar, shrink_frobenius, shrink_operator, hard_threshold, "
            "selective."
        },
    )
    correct_for_noise: bool = field(
        default=False,
        metadata={"help": "Clear adam's second moment, or muon_s's size, of the known noise."},
    )
    dp_filter: Filter = field(
        default="none", metadata={"help": "Filter of the private gradient, before the optimizer."}
    )
    doppler_coefficients: str = field(
        default="ema_0.9", metadata={"help": "Under doppler: name of the low-pass filter."}
    )
    disk_kappa: float = field(
        default=0.7,
        metadata={"help": "Under disk: gain in (0, 1]. The 1.5 of the paper is out of range."},
    )
    disk_gamma: float | None = field(
        default=None,
        metadata={
            "help": "Under disk: look-ahead > 0; (1 - kappa) / kappa if unset, which alone needs "
            "one gradient evaluation a step and not two."
        },
    )
    report_nonprivate_loss: bool = field(
        default=False,
        metadata={"help": "Log the raw training loss locally; it is NOT covered by the guarantee."},
    )
    spectral_every: float = field(
        default=0.1,
        metadata={
            "help": "Measure the singular values of the private momentum every so many steps; "
            "below 1, a share of all; 0 for never. Costs no privacy; see docs/diagnostics.md."
        },
    )
    noise_seed: int | None = field(
        default=None,
        metadata={"help": "Tests only: fixed noise and sampling; voids the guarantee."},
    )
    public_eval_split: bool = field(
        default=False,
        metadata={"help": "Declare that the evaluation split is public, so it may steer training."},
    )
    max_grad_norm: float = field(
        default=0.0, metadata={"help": "Must stay 0; see per_sample_max_grad_norm."}
    )
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={"help": "Folder of a checkpoint of this run, or 'last' (in output_dir)."},
    )
    lr_scheduler_type: str = field(
        default="cosine", metadata={"help": "Learning-rate schedule over logical steps."}
    )
    warmup_steps: float = field(
        default=0.05, metadata={"help": "Steps of linear warm-up; below 1, a share of all steps."}
    )
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Not needed: only images and labels reach the model."}
    )
    report_to: list[str] | None = field(
        default=None, metadata={"help": "Integrations to log to; they see private values only."}
    )
    hub_private_repo: bool | None = field(
        default=True, metadata={"help": "Whether a pushed repository is private."}
    )
    hub_license: str | None = field(
        default=None,
        metadata={"help": "Licence of the model, for its card, by the Hub's name (apache-2.0)."},
    )
    logging_steps: float = field(
        default=10, metadata={"help": "Log every so many logical steps; below 1, a share of all."}
    )

    do_train: bool = field(default=True, metadata={"help": "Train; else evaluate the model only."})
    do_eval: bool = field(
        default=True, metadata={"help": "Evaluate at the end, if there is a split to evaluate on."}
    )

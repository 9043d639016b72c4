"""Every knob: its meaning, its default, and the combinations that are refused.

Receives the command line and a YAML file; returns three checked dataclasses. Whatever would break
the privacy guarantee and can be seen from the arguments alone is refused here, in one sentence that
names the setting and says what to set instead.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import torch
import yaml
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers import HfArgumentParser, TrainingArguments
from transformers.integrations.integration_utils import get_available_reporting_integrations
from transformers.trainer_utils import HubStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames

from hf_dpmuon.accounting import Accountant
from hf_dpmuon.filters import LOW_PASS, GradientFilter, KalmanFilter, LowPassFilter
from hf_dpmuon.grad_sample import ENGINES
from hf_dpmuon.mechanism import Clipping
from hf_dpmuon.optim import (
    ADJUST_LR,
    DP_OPTIMIZERS,
    KnownNoise,
    check_method,
    create_optimizer,
)
from hf_dpmuon.spectral import COEFFICIENTS

__all__ = ["DPTrainingArguments", "DataArguments", "ModelArguments", "parse_arguments"]

# Learning rates of the paper's full fine-tuning of a ViT-S (Table "ViT-Small, CIFAR-100").
# DP-Muon-S steps in the units of DP-SGD.
LEARNING_RATES = {"sgd": 0.01, "adam": 3e-4, "muon": 2e-3, "muon_s": 0.01}
# Of which one says what the other would.
ALTERNATIVES = (
    ("target_epsilon", "noise_multiplier"),
    ("max_steps", "num_train_epochs"),
    ("eval_split", "eval_fraction"),
    ("label_column", "label_columns"),
)
DP_FILTERS = ("none", "doppler", "disk")
# What a method's optimizer is made of, beside its learning rates.
METHOD_SETTINGS = (
    "dp_optimizer",
    "orthogonalize_head",
    "orthogonalize_patch_embedding",
    "spectral_map",
    "ns_coefficients",
    "ns_steps",
    "ns_bf16",
    "adjust_lr",
    "muon_momentum",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
)


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
    on_corrupt: str = field(
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
        if self.on_corrupt not in ("refuse", "drop"):
            raise ValueError(f"on_corrupt={self.on_corrupt!r} must be 'refuse' or 'drop'.")
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
class DPTrainingArguments(TrainingArguments):
    """``TrainingArguments`` plus the privacy knobs; see each field's help.

    Different from ``TrainingArguments``: ``learning_rate`` defaults to the method's,
    ``lr_scheduler_type`` to cosine with 5 % warm-up, ``max_grad_norm`` to 0 (clipping is per
    sample), ``remove_unused_columns`` to False, ``hub_private_repo`` to True, ``report_to`` to
    none, ``output_dir`` to a new folder under ``outputs/``; ``per_device_train_batch_size`` is only
    how many images are in memory at once, and all steps and epochs count logical batches.

    Raises:
        ValueError: On any setting that would void the guarantee or have no effect.
    """

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
    clipping: str = field(
        default="flat",
        metadata={"help": "How the bound is enforced: flat, per_layer or automatic."},
    )
    logical_batch_size: int = field(
        default=1024,
        metadata={"help": "Expected number of privacy units in one optimizer step (q N)."},
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
    grad_sample_mode: str = field(
        default="bookkeeping",
        metadata={
            "help": "Engine of the per-sample gradients: bookkeeping (fast), ghost (least memory), "
            "auto (bookkeeping if the physical batch fits into free memory, else ghost) or hooks "
            "(the reference)."
        },
    )
    dp_optimizer: str = field(
        default="muon", metadata={"help": "sgd, adam, muon or muon_s; see docs/methods.md."}
    )
    learning_rate: float | None = field(  # type: ignore[assignment]
        default=None,
        metadata={
            "help": "Of matrices under muon and muon_s, of all otherwise; by default the method's "
            "(sgd 0.01, adam 3e-4, muon 2e-3, muon_s 0.01)."
        },
    )
    vector_learning_rate: float = field(
        default=0.01,
        metadata={"help": "Under muon, muon_s: of all that is not orthogonalised (DP-SGD)."},
    )
    sgd_momentum: float | None = field(
        default=None,
        metadata={
            "help": "Of DP-SGD steps; 0.9 if unset, and 0 behind a filter, which is momentum too."
        },
    )
    muon_momentum: float | None = field(
        default=None,
        metadata={"help": "Of spectral steps; 0.95 under muon and 0.9 under muon_s if unset."},
    )
    orthogonalize_head: bool = field(
        default=True,
        metadata={"help": "Under muon, muon_s: whether the classifier's matrix is, too."},
    )
    orthogonalize_patch_embedding: bool = field(
        default=True,
        metadata={"help": "Under muon, muon_s: whether the patch embedding is, too."},
    )
    ns_coefficients: str = field(
        default="keller",
        metadata={"help": "Newton-Schulz table: keller (the paper's), you or polar_express."},
    )
    ns_steps: int = field(default=5, metadata={"help": "Newton-Schulz iterations."})
    ns_bf16: bool = field(
        default=False, metadata={"help": "Newton-Schulz iterations in bfloat16; on CUDA only."}
    )
    adjust_lr: str | None = field(
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
    dp_filter: str = field(
        default="none", metadata={"help": "Filter of the private gradient: none, doppler or disk."}
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
    lr_scheduler_type: SchedulerType | str = field(
        default="cosine", metadata={"help": "Learning-rate schedule over logical steps."}
    )
    warmup_steps: float = field(
        default=0.05, metadata={"help": "Steps of linear warm-up; below 1, a share of all steps."}
    )
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Not needed: only images and labels reach the model."}
    )
    report_to: None | str | list[str] = field(  # noqa: RUF036 - the order HfArgumentParser reads
        default="none", metadata={"help": "Integrations to log to; they see private values only."}
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

    def __post_init__(self) -> None:
        """Fill in the method's defaults and refuse what cannot be private."""
        name_folder = self.output_dir is None
        if name_folder:
            self.output_dir = f"outputs/{datetime.now():%Y%m%d-%H%M%S}"
        self._check_output_dir()
        self._check_privacy()
        self._check_training_loop()
        self._check_launcher()
        super().__post_init__()  # type: ignore[no-untyped-call]
        if name_folder:  # clocks of several processes may differ
            (self.output_dir,) = broadcast_object_list([self.output_dir])
        if self.loss_scale is None:
            self.loss_scale = 1024.0 if self.mixed_precision == "fp16" else 1.0
        self.dataloader_pin_memory = self.dataloader_pin_memory and self.device.type == "cuda"
        self._check_resolved()

    def _check_output_dir(self) -> None:
        """Find out before the data is read whether anything could be saved."""
        folder = Path(str(self.output_dir)).absolute()
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not self.output_dir or not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise ValueError(
                f"output_dir={self.output_dir!r} cannot be made or written; name a folder that can."
            )

    def _check_privacy(self) -> None:
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            both = "both are set" if self.target_epsilon is not None else "neither is set"
            raise ValueError(
                f"exactly one of target_epsilon and noise_multiplier must be set, and {both}: give "
                "target_epsilon to have sigma calibrated, or noise_multiplier to fix it."
            )
        if self.target_epsilon is not None and not 0 < self.target_epsilon < float("inf"):
            raise ValueError(f"target_epsilon={self.target_epsilon} must be a finite number > 0.")
        if self.noise_multiplier is not None and not 0 <= self.noise_multiplier < float("inf"):
            raise ValueError(
                f"noise_multiplier={self.noise_multiplier} must be a finite number >= 0."
            )
        if self.target_delta is not None and not 0 < self.target_delta < 1:
            raise ValueError(
                f"target_delta={self.target_delta} must be in (0, 1/N); unset, it is 1/(10 N)."
            )
        if not 0 < self.per_sample_max_grad_norm < float("inf"):
            raise ValueError(
                f"per_sample_max_grad_norm={self.per_sample_max_grad_norm} must be a finite number "
                "> 0, for instance 1.0."
            )
        for name, number, least in (
            ("learning_rate", self.learning_rate, 0.0),
            ("vector_learning_rate", self.vector_learning_rate, 0.0),
            ("weight_decay", self.weight_decay, 0.0),
            ("per_device_train_batch_size", self.per_device_train_batch_size, 1),
            ("per_device_eval_batch_size", self.per_device_eval_batch_size, 1),
            ("dataloader_num_workers", self.dataloader_num_workers, 0),
        ):
            if number is not None and not least <= number < float("inf"):
                raise ValueError(f"{name}={number} must be a finite number >= {least}.")
        if self.max_steps < 1 and self.max_steps != -1:
            raise ValueError(f"max_steps={self.max_steps} must be >= 1, or -1 for whole epochs.")
        if not 0 < self.num_train_epochs < float("inf"):
            raise ValueError(f"num_train_epochs={self.num_train_epochs} must be > 0.")
        if not 0 <= self.label_smoothing_factor < 1:
            raise ValueError(
                f"label_smoothing_factor={self.label_smoothing_factor} must be in [0, 1)."
            )
        if self.hub_license is not None and not re.fullmatch(r"[a-z0-9.+-]+", self.hub_license):
            raise ValueError(
                f"hub_license={self.hub_license!r} must be a name that the Hub knows, such as "
                "apache-2.0, cc-by-nc-4.0 or other."
            )
        if self.logical_batch_size < 1:
            raise ValueError(f"logical_batch_size={self.logical_batch_size} must be >= 1.")
        if self.augmentation_multiplicity < 1:
            raise ValueError(
                f"augmentation_multiplicity={self.augmentation_multiplicity} must be >= 1."
            )
        for name, value, legal in (
            ("clipping", self.clipping, get_args(Clipping)),
            ("accountant", self.accountant, get_args(Accountant)),
            ("grad_sample_mode", self.grad_sample_mode, (*ENGINES, "auto")),
            ("dp_optimizer", self.dp_optimizer, DP_OPTIMIZERS),
            ("dp_filter", self.dp_filter, DP_FILTERS),
            ("doppler_coefficients", self.doppler_coefficients, tuple(LOW_PASS)),
            ("ns_coefficients", self.ns_coefficients, tuple(COEFFICIENTS)),
            ("adjust_lr", self.adjust_lr, (None, *ADJUST_LR)),
        ):
            if value not in legal:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(map(str, legal))}.")
        check_method(correct_for_noise=self.correct_for_noise, **self._method())
        for name, default, owner in (
            ("doppler_coefficients", "ema_0.9", "doppler"),
            ("disk_kappa", 0.7, "disk"),
            ("disk_gamma", None, "disk"),
        ):
            value = getattr(self, name)
            if value != default and self.dp_filter != owner:
                raise ValueError(
                    f"{name}={value!r} has no effect under dp_filter={self.dp_filter!r}; set "
                    f"dp_filter={owner!r} or leave it {default!r}."
                )
        if self.sgd_momentum is not None and self.dp_optimizer == "adam":
            raise ValueError(
                f"sgd_momentum={self.sgd_momentum} has no effect under dp_optimizer='adam'; leave "
                "it unset."
            )
        if self.learning_rate is None:
            self.learning_rate = LEARNING_RATES[self.dp_optimizer]
        if self.sgd_momentum is None:
            self.sgd_momentum = 0.9 if self.dp_filter == "none" else 0.0
        for name in ("sgd_momentum", "muon_momentum", "adam_beta1", "adam_beta2"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"{name}={value} must be in [0, 1).")
        if not self.adam_epsilon > 0:
            raise ValueError(f"adam_epsilon={self.adam_epsilon} must be > 0.")
        if self.ns_steps < 1:
            raise ValueError(f"ns_steps={self.ns_steps} must be >= 1.")
        evaluations = self.build_filter([]).evaluations
        if evaluations > 1 and self.grad_sample_mode == "ghost":
            raise ValueError(
                f"disk_gamma={self.disk_gamma} needs two gradient evaluations a step, whose norms "
                "grad_sample_mode='ghost' cannot combine; leave disk_gamma unset, or use "
                "'bookkeeping'."
            )

    def _method(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in METHOD_SETTINGS}

    def build_optimizer(self, model: nn.Module, noise: KnownNoise) -> torch.optim.Optimizer:
        """Build the optimizer of ``dp_optimizer`` for a model's trainable parameters.

        Raises:
            ValueError: If there is no matrix to orthogonalise.
        """
        assert self.learning_rate is not None
        assert self.sgd_momentum is not None
        return create_optimizer(
            model,
            learning_rate=self.learning_rate,
            vector_learning_rate=self.vector_learning_rate,
            weight_decay=self.weight_decay,
            sgd_momentum=self.sgd_momentum,
            noise=noise,
            correct_for_noise=self.correct_for_noise,
            **self._method(),
        )

    def build_filter(self, parameters: Sequence[Tensor]) -> GradientFilter:
        """Build the filter of ``dp_filter`` for these trainable parameters.

        Raises:
            ValueError: If one of its settings is out of range.
        """
        match self.dp_filter:
            case "doppler":
                return LowPassFilter.named(self.doppler_coefficients)
            case "disk":
                return KalmanFilter(parameters, kappa=self.disk_kappa, gamma=self.disk_gamma)
            case _:
                return GradientFilter()

    def _check_training_loop(self) -> None:
        refused = {
            "max_grad_norm": (
                self.max_grad_norm != 0,
                "would rescale the private gradient; leave it 0 and set per_sample_max_grad_norm",
            ),
            "gradient_accumulation_steps": (
                self.gradient_accumulation_steps != 1,
                "does not fit Poisson sampling; leave it 1 and set logical_batch_size (the size of "
                "a step) and per_device_train_batch_size (what fits into memory)",
            ),
            "train_sampling_strategy": (
                self.train_sampling_strategy != "random",
                "is not the Poisson sampling that the accountant assumes; leave it 'random'",
            ),
            "auto_find_batch_size": (
                self.auto_find_batch_size,
                "would touch data twice and count it once; set a smaller "
                "per_device_train_batch_size",
            ),
            "torch_compile": (
                self.torch_compile
                or self.torch_compile_backend is not None
                or self.torch_compile_mode is not None,
                "bypasses the hooks that compute per-sample gradients; leave it off",
            ),
            "deepspeed": (
                self.deepspeed is not None,
                "shards gradients before they are clipped; run without it",
            ),
            "fsdp": (
                bool(self.fsdp),
                "shards gradients before they are clipped; run without it",
            ),
            "parallelism_config": (
                self.parallelism_config is not None,
                "shards samples or gradients before they are clipped; run without it",
            ),
            "hub_strategy": (
                HubStrategy(self.hub_strategy)
                in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS),
                "would push optimizer and generator states; use 'end' or 'every_save'",
            ),
            "push_to_hub": (
                self.push_to_hub and (self.noise_seed is not None or self.noise_multiplier == 0),
                "would publish a model that no secret noise protects; leave it off, or leave "
                "noise_seed unset and noise_multiplier above 0",
            ),
            "hub_always_push": (
                self.hub_always_push,
                "has no effect: training goes on only after each push; leave it off",
            ),
            "loss_scale": (
                self.loss_scale is not None and not 0 < self.loss_scale < float("inf"),
                "must be a finite number > 0; unset, it is 1024 with fp16 and 1 otherwise",
            ),
            "activation_checkpointing": (
                bool(self.activation_checkpointing or self.gradient_checkpointing)
                and self.grad_sample_mode == "hooks",
                "recomputes layers behind the hooks; set grad_sample_mode='ghost'",
            ),
            "tf32": (
                bool(self.tf32),
                "rounds norms and sums to 10 bits, which loosens the clipping bound; leave it off",
            ),
            "optim": (
                self.optim != TrainingArguments.optim
                and OptimizerNames(self.optim) != OptimizerNames(TrainingArguments.optim),
                "has no effect here; choose dp_optimizer",
            ),
            "optim_args": (self.optim_args is not None, "has no effect here; choose dp_optimizer"),
            "optim_target_modules": (
                self.optim_target_modules is not None,
                "has no effect here; choose dp_optimizer",
            ),
            "data_seed": (
                self.data_seed is not None,
                "has no effect: samples are drawn from the system's entropy; leave it unset",
            ),
            "dataloader_drop_last": (
                self.dataloader_drop_last,
                "does not fit Poisson sampling; leave it off",
            ),
            "label_names": (
                self.label_names is not None,
                "has no effect: the label of a row is 'labels'; leave it unset",
            ),
            "skip_memory_metrics": (
                not self.skip_memory_metrics,
                "would log memory, which depends on the size of private batches; leave it on",
            ),
            "accelerator_config": (
                "num_steps" in str(self.accelerator_config),
                "must not accumulate gradients; set logical_batch_size",
            ),
            "include_num_input_tokens_seen": (
                self.include_num_input_tokens_seen not in ("no", False),
                "would log the size of private batches; leave it 'no'",
            ),
            "neftune_noise_alpha": (
                self.neftune_noise_alpha is not None,
                "is for language models; leave it unset",
            ),
            "use_liger_kernel": (
                self.use_liger_kernel,
                "replaces layers that per-sample gradients need; leave it off",
            ),
            "debug": (
                bool(self.debug) and "underflow_overflow" in str(self.debug),
                "prints raw activations of private images; leave it empty",
            ),
            "noise_seed": (
                self.noise_seed is not None and self.noise_seed < 0,
                "must be >= 0",
            ),
        }
        for name, (bad, reason) in refused.items():
            if bad:
                raise ValueError(f"{name}={vars(self)[name]!r} {reason}.")
        steered = {
            "load_best_model_at_end": self.load_best_model_at_end,
            "save_strategy": SaveStrategy(self.save_strategy) is SaveStrategy.BEST,
            "lr_scheduler_type": SchedulerType(self.lr_scheduler_type)
            in (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY),
        }
        for name, is_steered in steered.items():
            if is_steered and not self.public_eval_split:
                raise ValueError(
                    f"{name}={vars(self)[name]!r} lets the evaluation split choose the "
                    "released model at no counted cost; set public_eval_split=True if that split "
                    "is public data, or leave it off."
                )

    def _check_launcher(self) -> None:
        for variable, sharding in (
            ("ACCELERATE_USE_FSDP", "FSDP"),
            ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
            ("ACCELERATE_USE_PARALLELISM_CONFIG", "it"),
        ):
            if os.environ.get(variable, "false").lower() in ("1", "true"):
                raise ValueError(
                    f"{variable}={os.environ[variable]!r}: {sharding} shards gradients before "
                    "they are clipped; launch with --multi_gpu, one process a device."
                )
        if os.environ.get("WANDB_WATCH", "false") not in ("false", "parameters"):
            raise ValueError(
                f"WANDB_WATCH={os.environ['WANDB_WATCH']!r} would upload gradients that are not "
                "private; unset it."
            )

    def _check_resolved(self) -> None:
        if self.n_gpu > 1:
            raise ValueError(
                f"n_gpu={self.n_gpu} in one process would use nn.DataParallel, whose replicas the "
                "per-sample hooks cannot see; set CUDA_VISIBLE_DEVICES to one device."
            )
        if self.ns_bf16 and self.device.type != "cuda":
            raise ValueError(
                f"ns_bf16=True needs a CUDA device, and this run's is {self.device.type!r}; leave "
                "it off."
            )
        available = get_available_reporting_integrations()
        absent = [name for name in self.report_to or () if name not in available]
        if absent:
            raise ValueError(
                f"report_to={absent[0]!r} is not installed; install it, or set report_to to one of "
                f"none, {', '.join(available)}."
            )
        elsewhere = [name for name in self.report_to or () if name != "tensorboard"]
        if self.report_nonprivate_loss and elsewhere:
            raise ValueError(
                f"report_nonprivate_loss=True would send raw losses to {', '.join(elsewhere)}; "
                "leave it off, or set report_to='none'."
            )
        if self.mixed_precision not in ("no", "bf16", "fp16"):
            raise ValueError(
                f"mixed_precision={self.mixed_precision!r} is not supported; use bf16."
            )


def parse_arguments(
    argv: Sequence[str] | None = None,
) -> tuple[ModelArguments, DataArguments, DPTrainingArguments]:
    """Read ``--config FILE.yaml`` and the command line; the command line wins.

    An option on the command line also drops its alternative from the file: ``--eval_split`` the
    file's ``eval_fraction``, say.

    Args:
        argv: Arguments without the program's name; the process's own if None.

    Returns:
        The three checked groups of arguments.

    Raises:
        ValueError: If a key is unknown (named with the closest known one), the file cannot be read,
            or a combination is refused.
    """
    kinds = (ModelArguments, DataArguments, DPTrainingArguments)
    parser = HfArgumentParser(
        list(kinds),  # type: ignore[arg-type]
        description="Fine-tune a pretrained vision model with differential privacy.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--config", help="YAML file of defaults for the options below.")
    known = {f.name for kind in kinds for f in fields(kind) if f.init}
    config_only = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config_only.add_argument("--config")
    path = config_only.parse_known_args(argv)[0].config
    words = list(sys.argv[1:] if argv is None else argv)
    values: dict[str, Any] = {}
    in_file: dict[str, list[str]] = {}
    if path is not None:
        values = _read_config(Path(path), known)
        said = {word[2:].split("=")[0] for word in words if word.startswith("--")}
        for name, other in (*ALTERNATIVES, *(pair[::-1] for pair in ALTERNATIVES)):
            if name in said and other not in said:
                values.pop(other, None)
        # As words before the others, so that the same checks hold and the command line wins.
        in_file = {key: _as_words(key, value) for key, value in values.items()}
        words = [word for of_key in in_file.values() for word in of_key] + words
    try:
        for key, of_key in in_file.items():
            if parser.parse_known_args(of_key)[1]:
                raise ValueError(f"{key}={values[key]!r} in {path} must be a single value.")
        _, unknown = parser.parse_known_args(words)
        if unknown:
            raise ValueError(_unknown(unknown[0].lstrip("-").split("=")[0], known, "command line"))
        *groups, _ = parser.parse_args_into_dataclasses(args=words, look_for_args_file=False)
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}.") from error
    model, data, training = groups
    if data.eval_fraction is not None and training.public_eval_split:
        raise ValueError(
            f"public_eval_split=True declares public data, but eval_fraction={data.eval_fraction} "
            "holds out private rows of the training split; set one of the two."
        )
    return model, data, training


def _read_config(path: Path, known: set[str]) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"config={str(path)!r} cannot be read: {reason}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"config={str(path)!r} must be a YAML mapping of option: value.")
    for key in values:
        if key not in known:
            raise ValueError(_unknown(str(key), known, str(path)))
    return values


def _as_words(key: str, value: Any) -> list[str]:
    """A value of the file as it would stand on the command line; none for an empty one."""
    if value is None or value == []:
        return []
    if isinstance(value, list):
        if any(item is None or isinstance(item, bool) for item in value):
            raise ValueError(
                f"{key}={value!r} holds what YAML takes for {value!r}; put quotes around names "
                "such as no, yes, on, off and null."
            )
        return [f"--{key}", *map(str, value)]
    if value is False and key.endswith("_strategy"):  # YAML takes a bare no for false
        value = "no"
    return [f"--{key}={json.dumps(value) if isinstance(value, dict) else value}"]


def _unknown(key: str, known: set[str], where: str) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "see --help for the known ones."
    return f"unknown option {key!r} in {where}: {hint}"

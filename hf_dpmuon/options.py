"""Every option that we add or give another default: its name, default, choices and help.

Receives nothing; the parser, the documentation and ``--help`` read it. No framework is loaded, so
that help is quick. What a value may be is checked by whoever uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from hf_dpmuon.accounting import Accountant, Clipping

__all__ = [
    "GROUPS",
    "DataArguments",
    "Engine",
    "ModelArguments",
    "TrainingOptions",
    "check_at_least",
    "check_choices",
    "choices",
    "expert_options",
]

Engine = Literal["bookkeeping", "ghost", "auto", "hooks"]
Optimizer = Literal["sgd", "adam", "muon", "muon_s"]
Filter = Literal["none", "doppler", "disk"]
LowPass = Literal[
    "ema_0.9",
    "ema_0.9_averaged",
    "ema_0.9_sharpened",
    "ema_0.6",
    "ema_0.6_averaged",
    "ema_0.6_sharpened",
    "second_order",
]
LearningRateFactor = Literal["paper", "original", "match_rms_adamw", "spectral_unclamped"]
SpectralMap = Literal[
    "newton_schulz",
    "polar_express",
    "svd",
    "known_noise_polar",
    "shrink_frobenius",
    "shrink_operator",
    "hard_threshold",
    "selective",
]

T = TypeVar("T")
Expert = Annotated[T, "shown by --help-all only"]


def option(default: Any, text: str) -> Any:
    """A field with its help."""
    return field(default=default, metadata={"help": text})


@dataclass
class ModelArguments:
    """Which pretrained model is fine-tuned."""

    model_name_or_path: str = option(
        "builtin:tiny-vit",
        "Hub id, local folder, timm/<name>, or a network to train from scratch: builtin:wrn-16-4, "
        "wrn-28-10, resnet-18-gn, nf-resnet-50.",
    )
    trainable: str = option(
        "all",
        "What is trained: all, head, bias, norm, lora, or last_n=K for the last K blocks; the head "
        "always is.",
    )
    lora_rank: Expert[int] = option(8, "Under trainable=lora: rank of adapters.")
    model_revision: Expert[str | None] = option(None, "Branch, tag or commit of the model.")
    image_size: Expert[int | None] = option(None, "Input side in pixels, if not the model's own.")

    def __post_init__(self) -> None:
        """Refuse a setting that nothing would read."""
        if self.trainable != "lora":
            _refuse_set(self, "lora_rank", "trainable='lora'")


@dataclass
class DataArguments:
    """Which images are private, and how they are read."""

    dataset_name: str = option("builtin:digits", "Hub id, local folder or file.")
    dataset_config_name: Expert[str | None] = option(None, "Configuration of the data set.")
    dataset_revision: Expert[str | None] = option(None, "Branch, tag or commit of the data set.")
    train_split: str = option("train", "The private split.")
    eval_split: str | None = option(
        None, "Split for evaluation, not covered by the guarantee (found if unset)."
    )
    eval_fraction: float | None = option(
        None, "Instead, share of the training split's units to hold out."
    )
    image_column: Expert[str | None] = option(None, "Column of images (found if there is one).")
    label_column: str | None = option(None, "Column of labels (found if there is only one).")
    label_columns: list[str] | None = option(
        None, "Instead, several columns of 0, 1 or blank: several labels per image."
    )
    privacy_unit_column: str | None = option(
        None,
        "Column of ids (patient, lesion), or with a pattern the column of images: all images of an "
        "id are protected as one (unset, each image is).",
    )
    privacy_unit_pattern: Expert[str | None] = option(
        None,
        "Where ids are part of a text such as a path: a regular expression whose one named group "
        "is the id, as in (?P<patient>patient[0-9]+).",
    )
    max_examples_per_unit: Expert[int] = option(
        8, "With privacy_unit_column: most images of a drawn unit in a step, drawn anew each step."
    )
    dicom_window: Expert[list[float] | None] = option(
        None, "Center and width of DICOM grey levels (each file's own if unset)."
    )
    public_class_names: Expert[bool] = option(
        False, "Declare that class names that look like ids or dates name nobody."
    )
    on_corrupt: Expert[Literal["refuse", "drop"]] = option(
        "refuse", "Images that cannot be read: refuse to start, or drop them first."
    )
    class_weights: Expert[list[str] | None] = option(
        None,
        "Weight of each class in the loss, from a public source; or 'balanced', if "
        "public_class_counts.",
    )
    public_class_counts: Expert[bool] = option(
        False, "Declare that the number of training rows of each class is public."
    )
    random_flip: Expert[bool] = option(True, "Flip images left-right in training.")
    random_crop: Expert[bool] = option(True, "Crop images after padding by 1/8 of their side.")

    def __post_init__(self) -> None:
        """Check what nobody else does before the data is read."""
        check_choices(self, DataArguments)
        check_at_least(1, max_examples_per_unit=self.max_examples_per_unit)
        if self.privacy_unit_column is None:
            _refuse_set(self, "max_examples_per_unit", "privacy_unit_column")
        if self.class_weights is None:
            _refuse_set(self, "public_class_counts", "class_weights")


@dataclass
class PrivacyOptions:
    """What a run may cost, and what the guarantee rests on."""

    target_epsilon: float | None = option(
        None, "Privacy budget, to which sigma is calibrated; or give noise_multiplier."
    )
    noise_multiplier: float | None = option(
        None, "sigma: noise std over per_sample_max_grad_norm; or give target_epsilon."
    )
    target_delta: float | None = option(None, "delta of the guarantee; 1/(10 N) if unset.")
    logical_batch_size: int | None = option(
        None,
        "Expected number of privacy units in a step (q N); if unset, q is target_epsilon / 25, "
        "from 0.02 to 0.32.",
    )
    per_sample_max_grad_norm: float = option(
        1.0, "C: bound on the gradient norm of one privacy unit."
    )
    clipping: Expert[Clipping] = option("flat", "How the bound is enforced.")
    accountant: Accountant = option("rdp", "Accountant of the reported epsilon.")
    public_eval_split: Expert[bool] = option(
        False, "Declare that the evaluation split is public, so it may steer training."
    )
    report_nonprivate_loss: Expert[bool] = option(
        False, "Log the raw training loss locally; it is NOT covered by the guarantee."
    )
    spectral_every: Expert[float] = option(
        0.1,
        "Measure the singular values of the private momentum every so many steps; below 1, a share "
        "of all; 0 for never. Costs no privacy; see docs/diagnostics.md.",
    )
    noise_seed: Expert[int | None] = option(
        None, "Tests only: fixed noise and sampling; voids the guarantee."
    )


@dataclass
class MethodOptions:
    """How the private gradient moves the weights."""

    dp_optimizer: Optimizer = option("muon", "Optimizer; see docs/methods.md.")
    dp_filter: Filter = option("none", "Filter of the private gradient before the optimizer.")
    learning_rate: float | None = option(
        None,
        "Learning rate, under muon and muon_s that of matrices; if unset, it follows from noise, "
        "steps and shapes.",
    )
    vector_learning_rate: float | None = option(
        None, "Under muon, muon_s: that of all else; if unset, that of sgd."
    )
    weight_decay: float = option(0.0, "Decay of matrices.")
    lr_scheduler_type: str = option("cosine", "Learning-rate schedule over steps.")
    warmup_steps: float = option(0.05, "Steps of linear warm-up; below 1, a share of all.")
    augmentation_multiplicity: int = option(
        1,
        "K: augmentations of each drawn image whose gradients are averaged before clipping; costs "
        "K times the time, no privacy, and often gains accuracy.",
    )
    sgd_momentum: Expert[float | None] = option(
        None, "Momentum of DP-SGD; 0.9 if unset, but 0 behind a filter, which is momentum."
    )
    muon_momentum: Expert[float | None] = option(
        None, "Momentum of spectral steps; if unset, 0.95 of muon and 0.9 of muon_s."
    )
    orthogonalize_head: Expert[bool] = option(
        True, "Under muon, muon_s: orthogonalise the classifier's matrix, too."
    )
    orthogonalize_patch_embedding: Expert[bool] = option(
        True, "Under muon, muon_s: orthogonalise the patch embedding, too."
    )
    spectral_map: Expert[SpectralMap] = option(
        "newton_schulz", "Direction under muon; the last five know the noise."
    )
    ns_steps: Expert[int] = option(5, "Newton-Schulz iterations.")
    ns_coefficients: Expert[list[str] | str] = option(
        None,
        "Newton-Schulz table: quintic (the paper's; if unset), quintic_tuned or polar_express; or "
        "three numbers a b c, as torch.optim.Muon takes.",
    )
    ns_bf16: Expert[bool] = option(False, "Newton-Schulz iterations in bfloat16; on CUDA only.")
    adjust_lr_fn: Expert[LearningRateFactor | None] = option(
        None, "Factor for rectangular matrices; if unset, paper of muon and original of muon_s."
    )
    correct_for_noise: Expert[bool] = option(
        False, "Clear adam's second moment, or muon_s's size, of the known noise."
    )
    doppler_coefficients: Expert[LowPass] = option("ema_0.9", "Under doppler: low-pass filter.")
    disk_kappa: Expert[float] = option(
        0.7, "Under disk: gain in (0, 1]. The 1.5 of the paper is out of range."
    )
    disk_gamma: Expert[float | None] = option(
        None,
        "Under disk: look-ahead > 0; (1 - kappa) / kappa if unset, which alone needs one gradient "
        "evaluation a step and not two.",
    )


@dataclass
class RunOptions:
    """How long a run is, what it needs of the machine, and what it leaves."""

    output_dir: str | None = option(None, "Folder of the run (a new one under outputs/ if unset).")
    num_train_epochs: float | None = option(
        None, "Expected passes over the data; if unset, they make 100 steps or more."
    )
    max_steps: int = option(-1, "Steps, instead of epochs.")
    per_device_train_batch_size: int = option(32, "Images in memory at once; changes nothing else.")
    grad_sample_mode: Engine = option(
        "bookkeeping",
        "Per-sample gradients: bookkeeping is fast, ghost takes least memory, auto takes the first "
        "that fits, hooks is the reference.",
    )
    bf16: bool = option(False, "Autocast to bfloat16; weights, norms, sums and noise stay float32.")
    activation_checkpointing: bool | None = option(
        None, "Recompute activations to save memory (off)."
    )
    eval_strategy: Literal["no", "steps", "epoch"] = option("no", "When to evaluate in training.")
    save_strategy: Literal["no", "steps", "epoch", "best"] = option(
        "steps", "When to save a checkpoint."
    )
    save_steps: float = option(500, "Steps between two checkpoints.")
    resume_from_checkpoint: str | None = option(
        None, "Folder of a checkpoint of this run, or 'last' (in output_dir)."
    )
    logging_steps: float = option(10, "Steps between two logs; below 1, a share of all.")
    report_to: list[str] | None = option(
        None, "Trackers to log private values to: tensorboard, trackio, wandb, mlflow."
    )
    seed: int = option(42, "Seed of a new head's weights; no part of noise or sampling.")
    push_to_hub: bool = option(False, "Push the model to the Hub.")
    hub_model_id: str | None = option(None, "Name there (the output folder's if unset).")
    hub_private_repo: bool | None = option(True, "Whether a pushed repository is private.")
    hub_license: Expert[str | None] = option(
        None, "Licence of the model, for its card, by the Hub's name (apache-2.0)."
    )
    do_train: Expert[bool] = option(True, "Train; else evaluate the model only.")
    do_eval: Expert[bool] = option(True, "Evaluate at the end, if there is a split to evaluate on.")
    loss_scale: Expert[float | None] = option(
        None, "Static factor of the loss under fp16 (1024 if unset), undone before clipping."
    )
    max_grad_norm: Expert[float] = option(0.0, "Must stay 0; see per_sample_max_grad_norm.")
    remove_unused_columns: Expert[bool] = option(
        False, "Must stay off: only images and labels reach the model anyway."
    )


@dataclass
class TrainingOptions(RunOptions, MethodOptions, PrivacyOptions):
    """How a model is trained privately."""


GROUPS: dict[str, type] = {
    "Privacy": PrivacyOptions,
    "Data": DataArguments,
    "Model": ModelArguments,
    "Method": MethodOptions,
    "Run": RunOptions,
}


def choices(kind: type) -> dict[str, tuple[str | None, ...]]:
    """The options of a group that take one of several names, with these names."""
    found = {}
    for name, hint in get_type_hints(kind).items():
        for part in (hint, *get_args(hint)):
            if get_origin(part) is Literal:
                found[name] = (*([None] if NoneType in get_args(hint) else []), *get_args(part))
    return found


def expert_options(kind: type) -> set[str]:
    """The options of a group that few runs set."""
    hints = get_type_hints(kind, include_extras=True)
    return {name for name, hint in hints.items() if get_origin(hint) is Annotated}


def check_choices(options: object, kind: type) -> None:
    """Refuse a value that is not one of its option's names."""
    for name, legal in choices(kind).items():
        if (value := vars(options)[name]) not in legal:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(map(str, legal))}.")


def _refuse_set(options: ModelArguments | DataArguments, name: str, needed: str) -> None:
    """Refuse another value than the default where nothing reads it."""
    value, default = vars(options)[name], vars(type(options))[name]
    if value != default:
        raise ValueError(
            f"{name}={value!r} has no effect without {needed}; set that, or leave it {default!r}."
        )


def check_at_least(least: int, **numbers: float | None) -> None:
    """Refuse numbers, by name, that are below ``least`` or not finite."""
    for name, number in numbers.items():
        if number is not None and not least <= number < float("inf"):
            raise ValueError(f"{name}={number} must be a finite number >= {least}.")

"""The arguments of a run, and which of their combinations are refused.

Receives the options of a run; whatever would break the privacy guarantee and can be seen from them
alone is refused here, in one sentence that names the setting and says what to set instead. The
range of a value is checked by the room that uses it, which is asked here, before the data is read.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path

from accelerate.utils import broadcast_object_list
from transformers import HfArgumentParser, TrainingArguments
from transformers.integrations.integration_utils import get_available_reporting_integrations
from transformers.trainer_utils import HubStrategy, SaveStrategy, SchedulerType

from hf_dpmuon import parsing
from hf_dpmuon.mechanism import check_scales
from hf_dpmuon.methods import Method
from hf_dpmuon.options import (
    DataArguments,
    ModelArguments,
    TrainingOptions,
    check_at_least,
    check_choices,
)
from hf_dpmuon.plan import Budget, PrivacyPlan
from hf_dpmuon.randomness import new_key

__all__ = [
    "REFUSED",
    "DPTrainingArguments",
    "DataArguments",
    "ModelArguments",
    "help_all",
    "parse_arguments",
]

# What may be logged to, and the variable that would make it upload more than logs.
INTEGRATIONS = {
    "tensorboard": None,
    "trackio": None,
    "wandb": "WANDB_LOG_MODEL",
    "mlflow": "HF_MLFLOW_LOG_ARTIFACTS",
}
OFF = ("", "0", "false", "no", "none")
SHARDS = "shards gradients before they are clipped; run without it"
COMPILES = "bypasses the hooks that compute per-sample gradients; leave it off"
OTHER_OPTIMIZER = "has no effect here; choose dp_optimizer"

# Options that are refused at another value than their default, each with the reason ...
REFUSED = {
    "max_grad_norm": "would rescale the private gradient; leave it 0 and set "
    "per_sample_max_grad_norm",
    "gradient_accumulation_steps": "does not fit Poisson sampling; leave it 1 and set "
    "logical_batch_size (the size of a step) and per_device_train_batch_size (what fits into "
    "memory)",
    "train_sampling_strategy": "is not the Poisson sampling that the accountant assumes; leave it "
    "'random'",
    "auto_find_batch_size": "would touch data twice and count it once; set a smaller "
    "per_device_train_batch_size",
    "torch_compile": COMPILES,
    "torch_compile_backend": COMPILES,
    "torch_compile_mode": COMPILES,
    "deepspeed": SHARDS,
    "fsdp": SHARDS,
    "parallelism_config": SHARDS,
    "hub_strategy": "would push optimizer and generator states; use 'end' or 'every_save'",
    "push_to_hub": "would publish a model that no secret noise protects; leave it off, or leave "
    "noise_seed unset and noise_multiplier above 0",
    "hub_always_push": "has no effect: training goes on only after each push; leave it off",
    "activation_checkpointing": "recomputes layers behind the hooks; set grad_sample_mode='ghost'",
    "gradient_checkpointing": "recomputes layers behind the hooks; set grad_sample_mode='ghost'",
    "tf32": "rounds norms and sums to 10 bits, which loosens the clipping bound; leave it off",
    "optim": OTHER_OPTIMIZER,
    "optim_args": OTHER_OPTIMIZER,
    "optim_target_modules": OTHER_OPTIMIZER,
    "data_seed": "has no effect: samples are drawn from the system's entropy; leave it unset",
    "dataloader_drop_last": "does not fit Poisson sampling; leave it off",
    "remove_unused_columns": "has no effect: only images and labels reach the model; leave it off",
    "label_names": "has no effect: the label of a row is 'labels'; leave it unset",
    "skip_memory_metrics": "would log memory, which depends on the size of private batches; leave "
    "it on",
    "accelerator_config": "must not accumulate gradients; set logical_batch_size",
    "include_num_input_tokens_seen": "would log the size of private batches; leave it 'no'",
    "neftune_noise_alpha": "is for language models; leave it unset",
    "use_liger_kernel": "replaces layers that per-sample gradients need; leave it off",
    "debug": "prints raw activations of private images; leave it empty",
    "do_predict": "has no effect; leave it off, and predict from the saved model",
}
# ... except for those of which only some values are.
REFUSED_WHEN: dict[str, Callable[[DPTrainingArguments], bool]] = {
    "hub_strategy": lambda args: (
        HubStrategy(args.hub_strategy) in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)
    ),
    "push_to_hub": lambda args: (
        args.push_to_hub and (args.noise_seed is not None or args.noise_multiplier == 0)
    ),
    "activation_checkpointing": lambda args: (
        bool(args.activation_checkpointing) and args.grad_sample_mode == "hooks"
    ),
    "gradient_checkpointing": lambda args: (
        bool(args.gradient_checkpointing) and args.grad_sample_mode == "hooks"
    ),
    "include_num_input_tokens_seen": lambda args: (
        args.include_num_input_tokens_seen not in ("no", False)
    ),
    "accelerator_config": lambda args: "num_steps" in str(args.accelerator_config),
    "debug": lambda args: "underflow_overflow" in str(args.debug),
}


@dataclass
class DPTrainingArguments(TrainingOptions, TrainingArguments):  # type: ignore[misc]
    """``TrainingArguments`` plus the privacy knobs; docs/options.md has those that differ.

    ``per_device_train_batch_size`` is only how many images are in memory at once, and all steps and
    epochs count logical batches.

    Raises:
        ValueError: On any setting that would void the guarantee or have no effect.
    """

    def __post_init__(self) -> None:
        """Fill in the method's defaults and refuse what cannot be private."""
        name_folder = self.output_dir is None
        if name_folder:
            self.output_dir = f"outputs/{datetime.now():%Y%m%d-%H%M%S}"
        self._check_output_dir()
        self._check_values()
        self._check_refused()
        self._check_launcher()
        if self.report_to is None:
            self.report_to = ["none"]
        self.use_cpu |= os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
        super().__post_init__()  # type: ignore[no-untyped-call]
        if name_folder:  # clocks of several processes may differ
            (self.output_dir,) = broadcast_object_list([self.output_dir])
        if self.loss_scale is None:
            self.loss_scale = 1024.0 if self.mixed_precision == "fp16" else 1.0
        self.dataloader_pin_memory = self.dataloader_pin_memory and self.device.type == "cuda"
        self._check_resolved()

    @property
    def budget(self) -> Budget:
        """What is asked of the run."""
        return Budget.of(vars(self))

    @property
    def method(self) -> Method:
        """All settings of the method."""
        return Method.of(vars(self))

    def following(self, plan: PrivacyPlan) -> DPTrainingArguments:
        """Return a copy that has the batch and the length of the plan, where they are unset.

        The base class wants ``num_train_epochs`` set, and asks ``max_steps`` first.
        """
        settled = copy.copy(self)
        settled.logical_batch_size = plan.logical_batch_size
        if self.num_train_epochs is None:
            settled.num_train_epochs, settled.max_steps = plan.epochs, plan.steps
        return settled

    def _check_output_dir(self) -> None:
        """Find out before the data is read whether anything could be saved."""
        folder = Path(str(self.output_dir)).absolute()
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not self.output_dir or not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise ValueError(
                f"output_dir={self.output_dir!r} cannot be made or written; name a folder that can."
            )

    def _check_values(self) -> None:
        """Let the rooms that use the values check them."""
        check_choices(self, TrainingOptions)
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            both = "both are set" if self.target_epsilon is not None else "neither is set"
            raise ValueError(
                f"exactly one of target_epsilon and noise_multiplier must be set, and {both}: give "
                "target_epsilon to have sigma calibrated, or noise_multiplier to fix it."
            )
        assert self.budget
        method = self.method
        loss_scale = 1.0 if self.loss_scale is None else self.loss_scale
        check_scales(max_grad_norm=self.per_sample_max_grad_norm, loss_scale=loss_scale)
        new_key(self.noise_seed)
        check_at_least(
            1,
            per_device_train_batch_size=self.per_device_train_batch_size,
            per_device_eval_batch_size=self.per_device_eval_batch_size,
            augmentation_multiplicity=self.augmentation_multiplicity,
        )
        check_at_least(0, dataloader_num_workers=self.dataloader_num_workers)
        if not 0 <= self.label_smoothing_factor < 1:
            raise ValueError(
                f"label_smoothing_factor={self.label_smoothing_factor} must be in [0, 1)."
            )
        if self.hub_license is not None and not re.fullmatch(r"[a-z0-9.+-]+", self.hub_license):
            raise ValueError(
                f"hub_license={self.hub_license!r} must be a name that the Hub knows, such as "
                "apache-2.0, cc-by-nc-4.0 or other."
            )
        if not 0 <= self.spectral_every < float("inf"):
            raise ValueError(
                f"spectral_every={self.spectral_every} must be a number of steps, a share of all "
                "below 1, or 0 for never."
            )
        if method.filter([]).evaluations > 1 and self.grad_sample_mode == "ghost":
            raise ValueError(
                f"disk_gamma={self.disk_gamma} needs two gradient evaluations a step, whose norms "
                "grad_sample_mode='ghost' cannot combine; leave disk_gamma unset, or use "
                "'bookkeeping'."
            )

    def _check_refused(self) -> None:
        defaults = {option.name: option.default for option in fields(self)}
        for name, reason in REFUSED.items():
            value, default = vars(self)[name], defaults[name]
            of_some_values = REFUSED_WHEN.get(name)
            if of_some_values is None:
                is_refused = value != default and bool(value or default)  # None, False, "": alike
            else:
                is_refused = of_some_values(self)
            if is_refused:
                raise ValueError(f"{name}={value!r} {reason}.")
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

    def _check_integrations(self) -> None:
        """Allow those that are known to send logs, and nothing else that they could send."""
        # Looked up only where one is asked for: the look imports whole trackers.
        available = get_available_reporting_integrations() if self.report_to else []
        for name in self.report_to or ():
            if name not in INTEGRATIONS:
                raise ValueError(
                    f"report_to={name!r} may upload checkpoints or whole folders; set report_to to "
                    f"none or to one of {', '.join(INTEGRATIONS)}, which get logs only."
                )
            if name not in available:
                raise ValueError(
                    f"report_to={name!r} is not installed; install it, or set report_to to none or "
                    f"one of {', '.join(n for n in INTEGRATIONS if n in available)}."
                )
        for name, variable in INTEGRATIONS.items():
            value = "" if variable is None else os.environ.get(variable, "")
            if value.lower() not in OFF:
                raise ValueError(
                    f"{variable}={value!r} would make {name} upload whole checkpoints; unset it."
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
        self._check_integrations()
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


def help_all(program: str) -> str:
    """Every option of ours and of the base class, and which of them are refused and why."""
    ours = {option.name for option in fields(TrainingOptions)}
    base = {
        option.name: "" if option.name in REFUSED else " ".join(option.metadata["help"].split())
        for option in fields(TrainingArguments)
        if option.init and option.name not in ours
    }
    notes = {
        name: f"Refused{' at some values' if name in REFUSED_WHEN else ''}: it {reason}."
        for name, reason in REFUSED.items()
    }
    return parsing.full_help(program, base, notes)


def parse_arguments(
    argv: Sequence[str] | None = None, *, program: str = "hf-dpmuon finetune"
) -> tuple[ModelArguments, DataArguments, DPTrainingArguments]:
    """Read ``--config`` and the command line; see ``parsing.with_config``.

    ``--help`` and ``--help-all`` print and exit.

    Args:
        argv: Arguments without the program's name; the process's own if None.
        program: What the help calls the command.

    Returns:
        The three checked groups of arguments.

    Raises:
        ValueError: If an option is unknown, the file cannot be read, or a combination is refused.
    """
    argv = sys.argv[1:] if argv is None else argv
    parsing.answer_help(argv, program)
    if "--help-all" in argv:
        print(help_all(program))
        sys.exit(0)
    kinds = (ModelArguments, DataArguments, DPTrainingArguments)
    parser = HfArgumentParser(
        list(kinds),  # type: ignore[arg-type]
        allow_abbrev=False,
        exit_on_error=False,
        add_help=False,
    )
    parser.add_argument("--config")
    known = {f.name for kind in kinds for f in fields(kind) if f.init}
    parts = parsing.with_config(argv, known)
    try:
        for part in parts[:-1]:
            if parser.parse_known_args(part.words)[1]:
                raise ValueError(f"{part.where} must be a single value.")
        words = [word for part in parts for word in part.words]
        _, left = parser.parse_known_args(words)
        if left:
            word = left[0].lstrip("-").split("=")[0]
            raise ValueError(parsing.unknown(word, known, "command line"))
        *groups, _ = parser.parse_args_into_dataclasses(args=words, look_for_args_file=False)
    except argparse.ArgumentError as error:
        raise ValueError(f"{str(error).rstrip('.')}.") from error
    model, data, training = groups
    if data.eval_fraction is not None and training.public_eval_split:
        raise ValueError(
            f"public_eval_split=True declares public data, but eval_fraction={data.eval_fraction} "
            "holds out private rows of the training split; set one of the two."
        )
    return model, data, training

"""A saved model: its files, report and card, all of them or none.

Receives a loaded model, the ledger and public facts; writes the folder that ``hub`` may push.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate.optimizer import AcceleratedOptimizer
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    RepositoryNotFoundError,
)
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_utils import SchedulerType
from transformers.utils import SAFE_WEIGHTS_NAME

from hf_dpmuon import model_card
from hf_dpmuon.adapters import adapter_layers, merged, unwrapped
from hf_dpmuon.arguments import DPTrainingArguments
from hf_dpmuon.files import write_json, write_whole
from hf_dpmuon.ledger import LEDGER_FILE, PrivacyLedger
from hf_dpmuon.methods import FILTER_NAMES
from hf_dpmuon.models import LoadedModel, save_model, ties_written_out
from hf_dpmuon.rounding import round_up_fixed
from hf_dpmuon.validation import validate_model

__all__ = ["ModelFolder", "public_name", "recipe_of"]

logger = logging.getLogger(__name__)

SETTINGS = ("momentum", "betas", "eps", "weight_decay")  # of an optimizer, if they have an effect

# A name of the Hub, of timm or of this package.
PUBLIC_NAME = re.compile(r"(builtin:|timm/)?\w[\w.-]*(/\w[\w.-]*)?")

# The output folders of the trainers that a model was given to, in this process.
_RUNS: WeakKeyDictionary[nn.Module, list[Path]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Origin:
    """The private training that a model comes from, as its folder or repository states it.

    Attributes:
        report: That came with the model.
        ledger: Beside it, where it is still there.
        is_this_run: Whether the model is a checkpoint of the run that now goes on.
    """

    report: model_card.PrivacyReport
    ledger: PrivacyLedger | None
    is_this_run: bool

    @classmethod
    def of(cls, module: nn.Module, report_file: Path | None, output_dir: Path) -> Origin | None:
        """Find and verify what is known of a model: in this process, or beside its weights.

        Raises:
            ValueError: If the report cannot be read, or its ledger contradicts it.
        """
        runs = _RUNS.setdefault(module, [])
        trained = [run for run in runs if (run / LEDGER_FILE).is_file()]
        own = output_dir.resolve()
        runs.append(own)
        folder = trained[-1] if trained else report_file and report_file.parent
        if folder is None:
            return None
        file, path = folder / model_card.REPORT_FILE, folder / LEDGER_FILE
        ledger = PrivacyLedger.load(path) if path.is_file() else None
        report = model_card.read_report(file) if file.is_file() else None
        if trained:  # since when the model may have been saved, or not
            assert ledger is not None
            if len(ledger) == 0:
                return None
            earlier = [] if report is None else report.earlier
            report = model_card.privacy_report(ledger, earlier=earlier)
        assert report is not None
        # A run whose folder holds a ledger goes on with that, or is refused.
        is_own = folder.resolve() in {own, *own.glob("checkpoint-*")}
        if is_own and (own / LEDGER_FILE).is_file():
            return cls(report, None, True)
        if ledger is not None:
            model_card.verify_report(report, ledger)
        logger.warning(
            "The model was trained privately before: epsilon=%s for each %s of %d. The card will "
            "say so; where data is the same, the epsilons add up.",
            round_up_fixed(report.epsilon),
            report.privacy_unit,
            report.num_units,
        )
        return cls(report, ledger, False)

    def named(self, ledger: PrivacyLedger) -> list[model_card.EarlierTraining]:
        """What the report of the run with this ledger names of it."""
        if self.is_this_run:
            return self.report.earlier
        is_counted = self.ledger is not None and ledger.extends(self.ledger)
        return self.report.as_earlier(counted=is_counted)


@dataclass
class ModelFolder:
    """Writes a model's folder.

    Attributes:
        model: As it is saved.
        processor: Beside a plain ``PreTrainedModel``.
        facts: Those of the card that do not change in training; see ``build_model_card``.
        origin: The private training that the model comes from.
    """

    model: LoadedModel | PreTrainedModel
    processor: Any
    facts: dict[str, Any]
    origin: Origin | None = None

    @classmethod
    def of(
        cls,
        model: LoadedModel | PreTrainedModel,
        processor: Any,
        *,
        args: DPTrainingArguments,
        base_model: str | None,
        dataset_name: str | None,
        num_channels: int,
        several_labels: bool,
    ) -> ModelFolder:
        """Make one of what the trainer is given.

        A model whose configuration does not say what its labels are is one of several labels where
        the rows have several, as in ``transformers``.

        Raises:
            ValueError: If nobody knows how such a model is saved, or it came with a report that
                cannot be read, or that its ledger contradicts.
        """
        architecture = None
        if isinstance(model, LoadedModel):
            model = replace(model, model=unwrapped(model.model))
            processor, library = model.processor, model.library
            report_file = _report_of(model.source, model.revision)
            label_names, multi_label = model.label_names, model.multi_label
            architecture = vars(model.model).get("pretrained_cfg", {}).get("architecture")
        elif isinstance(inner := unwrapped(model), PreTrainedModel):
            model, library = inner, "transformers"
            report_file = _report_of(model.name_or_path)
            label_names = tuple(str(name) for name in (model.config.id2label or {}).values())
            if model.config.problem_type is None and several_labels:
                model.config.problem_type = "multi_label_classification"
            multi_label = model.config.problem_type == "multi_label_classification"
        else:
            validate_model(model)
            raise ValueError(
                f"model of type {type(model).__name__} is not known how to be saved; load it with "
                "load_model('timm/<name>', ...) and pass what that returns."
            )
        assert args.output_dir is not None
        module = model.model if isinstance(model, LoadedModel) else model
        origin = Origin.of(module, report_file, Path(args.output_dir))
        facts = {
            "base_model": public_name(base_model),
            "dataset": public_name(dataset_name),
            "label_names": label_names,
            "library": library,
            "license": args.hub_license,
            "multi_label": multi_label,
            "metrics_public": args.public_eval_split,
            "num_channels": num_channels,
            "architecture": architecture,
        }
        return cls(model, processor, facts, origin)

    @property
    def module(self) -> nn.Module:
        """The plain model."""
        return self.model.model if isinstance(self.model, LoadedModel) else self.model

    @property
    def label_names(self) -> tuple[str, ...]:
        """By output."""
        names: tuple[str, ...] = self.facts["label_names"]
        return names

    def save(self, folder: Path, ledger: PrivacyLedger | None, **now: Any) -> None:
        """Write weights, and with noise draws in the ledger report and card: all files or none."""
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".incomplete-") as name:
            staging = Path(name)
            if isinstance(self.model, LoadedModel):
                save_model(self.model, staging)
            else:
                plain = merged(self.model)
                assert isinstance(plain, PreTrainedModel)
                with ties_written_out(plain):
                    plain.save_pretrained(staging)
                if self.processor is not None:
                    self.processor.save_pretrained(staging)
            if ledger is not None and len(ledger) > 0:
                weights = model_card.hash_weights(staging)
                report = self.report(ledger, weights=weights)
                write_json(staging / model_card.REPORT_FILE, report.to_dict())
                self.write_card(staging, ledger, report, **now)
            stale = {*folder.glob("model-?????-of-?????.safetensors")}
            stale |= {folder / SAFE_WEIGHTS_NAME, folder / f"{SAFE_WEIGHTS_NAME}.index.json"}
            for path in staging.iterdir():
                os.replace(path, folder / path.name)
                stale.discard(folder / path.name)
            for path in stale:  # weights of a model that was saved here before, in other shards
                path.unlink(missing_ok=True)

    def report(
        self, ledger: PrivacyLedger, *, weights: dict[str, str] | None = None
    ) -> model_card.PrivacyReport:
        """What the ledger supports, and the report that came with the model."""
        earlier = [] if self.origin is None else self.origin.named(ledger)
        return model_card.privacy_report(ledger, weights=weights, earlier=earlier)

    def write_card(
        self,
        folder: Path,
        ledger: PrivacyLedger,
        report: model_card.PrivacyReport,
        *,
        with_plot: bool,
        **now: Any,
    ) -> None:
        """Write the card, and where it is asked for the plot of epsilon that it shows."""
        plot = folder / model_card.PLOT_FILE
        has_plot = with_plot and model_card.plot_epsilon(ledger, plot)
        card = model_card.build_model_card(report, has_plot=has_plot, **self.facts, **now)
        write_whole(folder / model_card.CARD_FILE, card.encode())


def _report_of(name: str | None, revision: str | None = None) -> Path | None:
    """Find what a private training of a model stated, in its folder or on the Hub."""
    if not name:
        return None
    if Path(name).is_dir():
        path = Path(name) / model_card.REPORT_FILE
        return path if path.is_file() else None
    name = name.removeprefix("timm/")
    if name.count("/") != 1:
        return None  # a model of this package or of timm, trained on public data
    try:
        return Path(hf_hub_download(name, model_card.REPORT_FILE, revision=revision))
    except (EntryNotFoundError, HFValidationError, RepositoryNotFoundError):
        return None


def public_name(name: str | None) -> str | None:
    """A name that may stand in a card: of the Hub, timm or this package, but no path."""
    is_name = name is not None and PUBLIC_NAME.fullmatch(name) is not None
    return name if is_name and name is not None and not Path(name).exists() else None


def recipe_of(
    args: DPTrainingArguments,
    *,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    model: nn.Module,
    class_weights: bool,
    steps: int,
) -> dict[str, Any]:
    """Return the public settings that had an effect, as a card names them.

    Args:
        args: The arguments of the run.
        optimizer: The one that moves the weights, whoever made it; None before there is one.
        scheduler: One that was handed in; None where the arguments name it.
        model: As it is trained.
        class_weights: Whether classes are weighted.
        steps: Number of steps that were planned.
    """
    rows: dict[str, Any] = {}
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if trained < total:
        lora = " (LoRA adapters, merged, and what is not frozen)" if adapter_layers(model) else ""
        rows["trained parameters"] = f"{trained:,} of {total:,}{lora}"
    if optimizer is not None:
        rows |= _describe_optimizer(optimizer, FILTER_NAMES[args.dp_filter])
    if args.dp_filter == "doppler":
        rows["filter coefficients"] = args.doppler_coefficients
    elif args.dp_filter == "disk":
        rows["filter gain (kappa)"] = f"{args.disk_kappa:g}"
        if args.disk_gamma is not None:
            rows["filter look-ahead (gamma)"] = f"{args.disk_gamma:g}"
    if scheduler is not None:
        rows["schedule"] = type(scheduler).__name__
    else:
        rows["schedule"] = SchedulerType(args.lr_scheduler_type).value
        if args.warmup_steps and rows["schedule"] != "constant":
            rows["warm-up"] = f"{args.warmup_steps:g}"
    rows["expected batch size"] = args.logical_batch_size
    rows["augmentations of an image in a step"] = args.augmentation_multiplicity
    if args.label_smoothing_factor:
        rows["label smoothing"] = f"{args.label_smoothing_factor:g}"
    return {**rows, "class weights": "yes" if class_weights else "none", "steps": steps}


def _describe_optimizer(optimizer: torch.optim.Optimizer, filter_name: str) -> dict[str, str]:
    """Method, as in the papers, learning rates and settings, from what the optimizer holds."""
    inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    name = type(inner).__name__.removeprefix("DP").replace("MuonS", "Muon-S")
    told: dict[str, dict[str, None]] = {}  # ordered sets
    rules = {group.get("rule", "") for group in inner.param_groups}
    for group in inner.param_groups:
        of_rule = f" of {group['rule']}" if len(rules) > 1 else ""
        rate = float(group.get("initial_lr", group["lr"]))
        told.setdefault(f"learning rate{of_rule}", {})[f"{rate:g}"] = None
        for setting in SETTINGS:
            if group.get(setting):
                label = f"{setting.replace('_', ' ')}{of_rule}"
                told.setdefault(label, {})[str(group[setting])] = None
    return {
        "method": f"{filter_name}-{name}",
        **{label: ", ".join(values) for label, values in told.items()},
    }

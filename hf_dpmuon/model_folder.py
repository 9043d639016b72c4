"""A saved model: its files, report and card, all of them or none.

Receives a loaded model, the ledger and public facts; writes the folder that ``hub`` may push.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME

from hf_dpmuon import model_card
from hf_dpmuon.arguments import DPTrainingArguments
from hf_dpmuon.files import write_json
from hf_dpmuon.ledger import PrivacyLedger
from hf_dpmuon.models import LoadedModel, save_model, ties_written_out, validate_model

__all__ = ["ModelFolder", "public_name"]

# Of the Hub, timm or this package.
PUBLIC_NAME = re.compile(r"(builtin:|timm/)?\w[\w.-]*(/\w[\w.-]*)?")


@dataclass
class ModelFolder:
    """Writes a model's folder.

    Attributes:
        model: As it is saved.
        processor: Beside a plain ``PreTrainedModel``.
        facts: Of the card that do not change in training; see ``build_model_card``.
    """

    model: LoadedModel | PreTrainedModel
    processor: Any
    facts: dict[str, Any]

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
            ValueError: If nobody knows how such a model is saved.
        """
        if isinstance(model, LoadedModel):
            processor, library = model.processor, model.library
            label_names, multi_label = model.label_names, model.multi_label
        elif isinstance(model, PreTrainedModel):
            library = "transformers"
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
        facts = {
            "base_model": public_name(base_model),
            "dataset": public_name(dataset_name),
            "label_names": label_names,
            "library": library,
            "license": args.hub_license,
            "multi_label": multi_label,
            "metrics_public": args.public_eval_split,
            "num_channels": num_channels,
        }
        return cls(model, processor, facts)

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
                with ties_written_out(self.model):
                    self.model.save_pretrained(staging)
                if self.processor is not None:
                    self.processor.save_pretrained(staging)
            if ledger is not None and len(ledger) > 0:
                weights = model_card.hash_weights(staging)
                report = model_card.privacy_report(ledger, weights=weights)
                write_json(staging / model_card.REPORT_FILE, report.to_dict())
                self.write_card(staging, ledger, report, **now)
            stale = {*folder.glob("model-?????-of-?????.safetensors")}
            stale |= {folder / SAFE_WEIGHTS_NAME, folder / f"{SAFE_WEIGHTS_NAME}.index.json"}
            for path in staging.iterdir():
                os.replace(path, folder / path.name)
                stale.discard(folder / path.name)
            for path in stale:  # weights of a model that was saved here before, in other shards
                path.unlink(missing_ok=True)

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
        (folder / model_card.CARD_FILE).write_text(card, encoding="utf-8")


def public_name(name: str | None) -> str | None:
    """A name that may stand in a card: of the Hub, timm or this package, but no path."""
    is_name = name is not None and PUBLIC_NAME.fullmatch(name) is not None
    return name if is_name and name is not None and not Path(name).exists() else None

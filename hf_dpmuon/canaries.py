"""Canaries: privacy units of known gradient, by which a run's own releases show what it gives away.

Receives the parts of a run. Adds privacy units to its data, of which a fair coin keeps each or
makes it blank, and to its model one linear layer, of which each canary moves two entries that
nobody else does, a weight and a bias. The run is trained as it would be: sampler, engine, clipping,
noise, ledger, processes. From the releases at these entries follow thousands of independent
membership tests, and from their errors a lower bound on epsilon, to be set beside the claimed one.

Guarantees:
    An audited run is another run than the one that it stands for: the ledger says that it gives no
    guarantee, it saves and pushes no model, and its report follows from coins, noise and settings,
    not from the user's data, whose gradients are zero where canaries are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset

from hf_dpmuon.accounting import epsilon_bound
from hf_dpmuon.arguments import DPTrainingArguments, parse_arguments
from hf_dpmuon.auditing import canary_scores, epsilon_lower_bounds
from hf_dpmuon.batches import RowWise, template
from hf_dpmuon.figures import draw_audit
from hf_dpmuon.files import write_json
from hf_dpmuon.filters import GradientFilter, QueryPoint
from hf_dpmuon.job import load_parts
from hf_dpmuon.ledger import PrivacyLedger
from hf_dpmuon.models import LoadedModel
from hf_dpmuon.randomness import keyed_generator, new_key
from hf_dpmuon.rounding import round_up_fixed
from hf_dpmuon.run import PrivateRun
from hf_dpmuon.trainer import DPTrainer
from hf_dpmuon.units import PrivacyUnits

__all__ = ["AuditTrainer", "audit", "described_audit"]

logger = logging.getLogger(__name__)

REPORT_FILE = "audit_report.json"
PLOT_FILE = "audit.png"
DELTAS = (0.01, 0.03, 0.1)  # beside the run's own
STEEP = 1e3  # gradient of a canary over the clipping bound: the clipped one is as large as may be
MOST_ROWS = 2  # of a canary, where units have several


class AuditTrainer(DPTrainer):
    """A ``DPTrainer`` whose data and model have canaries, and which keeps what is released of them.

    Args:
        model: What ``load_model`` returned.
        args: As of the run that is audited; its folder must be another.
        train_dataset: The private examples.
        canaries: n, how many units are added, present or blank.
        units: Which rows belong to each unit, as in ``DPTrainer``.
        max_examples_per_unit: As in ``DPTrainer``.
        **others: As in ``DPTrainer``.

    Attributes:
        is_member: Which canaries are there, by coins of the operating system.
    """

    def __init__(
        self,
        model: LoadedModel,
        args: DPTrainingArguments,
        *,
        train_dataset: Dataset[Any],
        canaries: int,
        units: PrivacyUnits | None = None,
        max_examples_per_unit: int = 8,
        **others: Any,
    ) -> None:
        if canaries < 40:
            raise ValueError(f"canaries={canaries} must be at least 40; thousands show more.")
        coins = keyed_generator(new_key(args.noise_seed), b"canaries").random(canaries) < 0.5
        (self.is_member,) = broadcast_object_list([coins])
        self._layer = nn.Linear(1, canaries)
        self._classes, self._several = len(model.label_names), model.multi_label
        rows = 1 if units is None else min(MOST_ROWS, units.largest, max_examples_per_unit)
        pixels = template(train_dataset, RowWise())["pixel_values"]
        added = _CanaryRows(self._labels(), pixels=pixels, rows=rows)
        self._recorder: _Recorder | None = None
        super().__init__(
            replace(
                model,
                model=_WithCanaries(model.model, self._layer),
                library="timm",  # its output are the logits
                processor=None,
                source="",
            ),
            args,
            train_dataset=ConcatDataset([train_dataset, added]),
            units=None if units is None else _more_units(units, canaries, rows),
            max_examples_per_unit=max_examples_per_unit,
            **others,
        )
        self.privacy_run.disclaim()

    def _labels(self) -> Tensor:
        """What marks a canary: a label beyond those of the data, the last one for a blank."""
        numbers = torch.arange(len(self.is_member))
        numbers[~torch.from_numpy(self.is_member)] = len(self.is_member)
        if self._several:
            return (2.0 + numbers)[:, None].expand(-1, self._classes)
        return self._classes + numbers

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The run's own loss of its rows, and a steep linear one of a canary's two entries."""
        labels = inputs["labels"]
        number = (labels[:, 0] - 2).nan_to_num(-1) if self._several else labels - self._classes
        number = number.long()
        is_own = number < 0
        logits, entries = model(inputs["pixel_values"]).float().tensor_split([self._classes], 1)
        shown = is_own[:, None] if self._several else is_own
        own = self._loss(torch.where(is_own[:, None], logits, 0.0), torch.where(shown, labels, 0))
        present = ~is_own & (number < entries.shape[1])
        entry = entries.gather(1, torch.where(present, number, 0)[:, None])[:, 0]
        steep = STEEP * max(1.0, self.args.per_sample_max_grad_norm)
        loss = own + steep * torch.where(present, entry, 0.0).mean()
        return (loss, {"loss": loss, "logits": logits}) if return_outputs else loss

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> tuple[nn.Module, Any]:
        prepared = super()._prepare_for_training(*args, **kwargs)
        assert self._step is not None
        names = {id(p): name for name, p in self._layer.named_parameters()}
        places = {
            names[id(p)]: place
            for place, p in enumerate(self._step.gate.parameters.values())
            if id(p) in names
        }
        self._recorder = _Recorder(self._step.filter, places)
        self._step.filter = self._recorder
        return prepared

    def releases(self) -> dict[str, npt.NDArray[np.float32]]:
        """The released sums at the canaries' entries in units of C, (T, n), by parameter."""
        assert self._recorder is not None, "train first"
        expected = self.plan.sample_rate * self.plan.num_units
        scale = expected / self.args.per_sample_max_grad_norm
        return {name: scale * np.stack(kept) for name, kept in self._recorder.kept.items()}

    def report(self, *, confidence: float = 0.95) -> dict[str, Any]:
        """What the canaries show beside what the ledger claims, in JSON's types."""
        ledger = self.privacy_run.ledger
        assert ledger is not None, "the main process reports"
        scores = canary_scores(
            self.releases(),
            noise_multiplier=self.plan.noise_multiplier,
            sample_rate=self.plan.sample_rate,
        )
        deltas = [self.plan.delta, *(d for d in DELTAS if d > self.plan.delta)]
        bounds = epsilon_lower_bounds(scores, self.is_member, deltas=deltas, confidence=confidence)
        rows = [
            {**asdict(bound), "claim": _claim(ledger, bound.delta, self.plan.accountant)}
            for bound in bounds
        ]
        return {
            "guarantee": False,
            "canaries": len(self.is_member),
            "confidence": confidence,
            "accountant": self.plan.accountant,
            "clipping": self.args.clipping,
            "noise_multiplier": self.plan.noise_multiplier,
            "sample_rate": self.plan.sample_rate,
            "noise_draws": len(ledger),
            "bounds": rows,
            "refuted": any(row["epsilon"] > row["claim"] for row in rows),
        }


class _WithCanaries(nn.Module):
    """A classifier, and beside its logits the outputs of the canaries' layer."""

    def __init__(self, model: nn.Module, layer: nn.Linear) -> None:
        super().__init__()
        self.model = model
        self.canaries = layer

    def forward(self, pixel_values: Tensor) -> Tensor:
        outputs = self.model(pixel_values)
        logits = outputs if isinstance(outputs, Tensor) else outputs.logits
        with torch.autocast(logits.device.type, enabled=False):
            one = logits[:, :1].detach().float() * 0 + 1
            return torch.cat([logits.float(), self.canaries(one)], 1)


class _CanaryRows(Dataset[dict[str, Tensor]]):
    """Grey images, with labels that no image has."""

    def __init__(self, labels: Tensor, *, pixels: Tensor, rows: int) -> None:
        self.labels = labels
        self.pixels = pixels
        self.rows = rows

    def __len__(self) -> int:
        return len(self.labels) * self.rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.pixels, "labels": self.labels[index // self.rows]}


def _more_units(units: PrivacyUnits, canaries: int, rows: int) -> PrivacyUnits:
    first = units.num_rows + rows * np.arange(canaries)
    added = tuple(np.arange(start, start + rows) for start in first)
    return PrivacyUnits(units.name, (*units.rows_of_unit, *added))


class _Recorder(GradientFilter):
    """A filter that keeps what it is given at some places."""

    def __init__(self, filter: GradientFilter, places: dict[str, int]) -> None:
        self._filter = filter
        self._places = places
        self.kept: dict[str, list[npt.NDArray[np.float32]]] = {name: [] for name in places}

    def query_points(self) -> list[QueryPoint]:
        return self._filter.query_points()

    def smooth(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        for name, place in self._places.items():
            self.kept[name].append(gradients[place].flatten().cpu().float().numpy().copy())
        return self._filter.smooth(gradients)


def _claim(ledger: PrivacyLedger, delta: float, accountant: str) -> float:
    return epsilon_bound(ledger.accounted, delta=delta, accountant=accountant).epsilon


def audit(
    config: Path, *, canaries: int, output_dir: Path | None = None, confidence: float = 0.95
) -> dict[str, Any]:
    """Audit the run that a YAML file describes, in a run of its own; return the report.

    Sampling rate, noise multiplier and steps are those of the run; units and batch are larger by
    the canaries.

    Args:
        config: As ``--config`` of a run takes it.
        canaries: n, how many units to add.
        output_dir: A new folder for ledger, report and picture; that of the run and ``-audit`` if
            None.
        confidence: That of all bounds together.

    Raises:
        ValueError: The run could not be trained, or has no noise.
    """
    words = ["--config", str(config)]
    model_args, data_args, args = parse_arguments(words)
    parts = load_parts(model_args, data_args)
    plan = PrivateRun(
        args,
        num_rows=len(parts.train),
        label_names=parts.loaded.label_names,
        units=parts.units,
        max_examples_per_unit=data_args.max_examples_per_unit,
    ).plan
    if not plan.noise_multiplier > 0:
        raise ValueError("noise_multiplier=0 claims nothing that an audit could refute.")
    folder = output_dir or Path(f"{args.output_dir}-audit")
    settings = {
        "output_dir": folder,
        "noise_multiplier": plan.noise_multiplier,
        "max_steps": plan.steps,
        "logical_batch_size": max(1, round(plan.sample_rate * (plan.num_units + canaries))),
        "save_strategy": "no",
        "eval_strategy": "no",
        "load_best_model_at_end": False,
        "push_to_hub": False,
        "report_to": "none",
    }
    if args.target_delta is not None:
        settings["target_delta"] = min(args.target_delta, 1 / (10 * (plan.num_units + canaries)))
    more = [f"--{name}={value}" for name, value in settings.items()]
    _, _, args = parse_arguments([*words, *more])
    trainer = AuditTrainer(
        parts.loaded,
        args,
        train_dataset=parts.train,
        canaries=canaries,
        units=parts.units,
        max_examples_per_unit=data_args.max_examples_per_unit,
        class_weights=parts.class_weights,
    )
    trainer.train()
    if not trainer.is_world_process_zero():
        return {}
    report = trainer.report(confidence=confidence)
    write_json(folder / REPORT_FILE, report)
    draw_audit(report["bounds"], confidence=confidence, path=folder / PLOT_FILE)
    return report


def described_audit(report: Mapping[str, Any]) -> str:
    """The report for people to read; empty in all processes but the main one."""
    if not report:
        return ""
    verdict = (
        "REFUTED: more was shown than is claimed."
        if report["refuted"]
        else "Not refuted: nothing was shown beyond what is claimed."
    )
    return "\n".join(
        [
            f"{report['canaries']} canaries, sigma {report['noise_multiplier']}, q "
            f"{report['sample_rate']:.4g}, {report['noise_draws']} draws, accountant "
            f"{report['accountant']}",
            "",
            f"{'delta':>10} {'claimed':>9} {'shown':>9}  by",
            *(
                f"{row['delta']:>10.2g} {round_up_fixed(row['claim']):>9} {row['epsilon']:>9.4f}  "
                f"{row['score']}"
                for row in report["bounds"]
            ),
            "",
            f"claimed: epsilon at most; shown: at least, at {report['confidence']:.0%} confidence.",
            verdict,
        ]
    )

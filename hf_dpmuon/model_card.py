"""The privacy report and the model card, from the ledger and public facts only.

Receives the ledger, never data, losses, seeds or paths; returns a JSON-ready report and Markdown.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from hf_dpmuon.ledger import PrivacyLedger

__all__ = ["PrivacyReport", "build_model_card", "privacy_report"]

TAGS = ("differential-privacy", "dp-muon", "hf-dpmuon")
PACKAGES = ("hf-dpmuon", "torch", "opacus", "transformers", "timm")


@dataclass(frozen=True)
class PrivacyReport:
    """What is guaranteed, and the facts that it follows from.

    Attributes:
        epsilon: Of all noise draws in the ledger together; infinite without noise.
        delta: Probability mass that epsilon leaves out.
        accountant: The one that produced epsilon.
        noise_multiplier: sigma of the last mechanism used.
        sample_rate: q of the last mechanism used.
        steps: Number of noise draws.
        mechanisms: All mechanisms used, in order, with their number of steps.
        per_sample_max_grad_norm: C.
        clipping: The rule that enforces C.
        privacy_unit: What one guarantee protects.
        adjacency: The neighbouring relation.
        guarantee: Whether the numbers are a guarantee at all (no fixed seed, some noise).
        versions: Of the software that made them.
    """

    epsilon: float
    delta: float
    accountant: str
    noise_multiplier: float
    sample_rate: float
    steps: int
    mechanisms: list[dict[str, float]]
    per_sample_max_grad_norm: float
    clipping: str
    privacy_unit: str
    adjacency: str
    guarantee: bool
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; an infinite epsilon is the string "inf"."""
        values = asdict(self)
        if self.epsilon == float("inf"):
            values["epsilon"] = "inf"
        return values


def privacy_report(ledger: PrivacyLedger) -> PrivacyReport:
    """Summarise a ledger with at least one noise draw."""
    facts = ledger.runs[-1]
    bound = ledger.epsilon()
    last = ledger.events[-1]
    return PrivacyReport(
        epsilon=bound.epsilon,
        delta=facts.delta,
        accountant=bound.accountant,
        noise_multiplier=last.noise_multiplier,
        sample_rate=last.sample_rate,
        steps=len(ledger),
        mechanisms=[asdict(event) for event in ledger.accounted],
        per_sample_max_grad_norm=last.max_grad_norm,
        clipping=last.clipping,
        privacy_unit=facts.privacy_unit,
        adjacency=facts.adjacency,
        guarantee=ledger.guarantee,
        versions={
            "python": platform.python_version(),
            **{package: version(package) for package in PACKAGES},
        },
    )


def build_model_card(
    report: PrivacyReport,
    *,
    base_model: str | None,
    dataset: str | None,
    label_names: Sequence[str],
    recipe: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> str:
    """Write the card of a privately fine-tuned classifier.

    Args:
        report: From ``privacy_report``.
        base_model: Public name of the pretrained model, or None for a local one.
        dataset: Public name of the private data set, or None for a local one.
        label_names: The classes.
        recipe: Public training settings, without seeds.
        metrics: Evaluation metrics; the card says that the guarantee does not cover them.

    Returns:
        Markdown with the Hub's metadata block.
    """
    lines = [
        "---",
        "pipeline_tag: image-classification",
        "tags:",
        *(f"- {tag}" for tag in TAGS),
        "---",
        "",
        "# Privately fine-tuned image classifier",
        "",
        f"Base model: {_quoted(base_model, 'model')}; fine-tuned on {_quoted(dataset, 'data set')} "
        f"({len(label_names)} classes: {', '.join(label_names)}).",
        "",
        "## Privacy",
        "",
        *_privacy_statement(report),
        "",
        "| | |",
        "|---|---|",
        f"| epsilon | {report.epsilon:.4f} |",
        f"| delta | {report.delta:.3g} |",
        f"| accountant | {report.accountant} |",
        f"| privacy unit | {report.privacy_unit} |",
        f"| adjacency | {report.adjacency} |",
        f"| noise multiplier (sigma) | {report.noise_multiplier:g} |",
        f"| sampling | Poisson, q = {report.sample_rate:g} |",
        f"| noise draws (steps) | {report.steps} |",
        f"| clipping | {report.clipping}, C = {report.per_sample_max_grad_norm:g} |",
        f"| a guarantee | {'yes' if report.guarantee else 'NO'} |",
        "",
        "Not covered: the choice of hyper-parameters on this data, evaluation data and the metrics "
        "computed on it, and training time, which depends on the size of random batches.",
        "",
        "## Evaluation",
        "",
        *(
            [f"- {name}: {value:.4f}" for name, value in sorted(metrics.items())]
            or ["No metrics were computed."]
        ),
        "",
        "Metrics come from data that the guarantee does not cover, unless that data is public.",
        "",
        "## Recipe",
        "",
        *(f"- {name}: {value}" for name, value in recipe.items()),
        "",
        "Software: " + ", ".join(f"{name} {v}" for name, v in report.versions.items()) + ".",
        "",
    ]
    return "\n".join(lines)


def _quoted(name: str | None, kind: str) -> str:
    return f"a local {kind}" if name is None else f"`{name}`"


def _privacy_statement(report: PrivacyReport) -> list[str]:
    if not report.guarantee:
        return [
            "**This model carries no privacy guarantee.** It was trained with fixed noise or "
            "without noise, for testing; the numbers below describe what the same settings would "
            "give with secret noise."
        ]
    return [
        f"This model is ({report.epsilon:.3g}, {report.delta:.3g})-differentially private for each "
        f"{report.privacy_unit} of the training data: whoever sees the model, and knows everything "
        f"else, sees almost the same whether or not that {report.privacy_unit} was used."
    ]

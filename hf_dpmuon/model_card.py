"""The privacy report and the model card, from the ledger and public facts only.

Receives the ledger, names, settings and evaluation metrics, never data, seeds or paths; returns a
JSON-ready report and Markdown with the Hub's metadata. The prose is in ``model_card_template.md``.

Guarantees:
    Every epsilon comes from the ledger. Numbers that bound a privacy cost are rounded up. Every
    value that the template shows passes ``plain``, so that no name, however written, adds
    structure, a link or an unseen character. A run without a guarantee, or with one that protects
    nobody, says so before anything else.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from jinja2 import Environment, StrictUndefined, Template

from hf_dpmuon.accounting import SampledGaussian
from hf_dpmuon.figures import draw_epsilon
from hf_dpmuon.ledger import PrivacyLedger
from hf_dpmuon.membership import membership_tpr, sharper_membership_tpr
from hf_dpmuon.rounding import percent_up, round_up, round_up_fixed

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

__all__ = [
    "EarlierTraining",
    "PrivacyReport",
    "build_model_card",
    "card_states",
    "epsilon_curve",
    "hash_weights",
    "plain",
    "plot_epsilon",
    "privacy_report",
    "read_report",
    "verify_report",
    "verify_weights",
]

REPORT_FILE = "privacy_report.json"
CARD_FILE = "README.md"
PLOT_FILE = "epsilon.png"
PIPELINE_TAG = "image-classification"
TAGS = ("dp-muon", "hf-dpmuon")
GUARANTEE_TAG = "differential-privacy"
PACKAGES = ("hf-dpmuon", "torch", "opacus", "transformers", "timm")
METRIC_TYPES = {"auroc": "roc_auc"}  # where the Hub's name is another than ours
MEMBERSHIP_FPR = 0.01
PROTECTING_TPR = 0.9999  # from here on, the bound on membership is 1 up to rounding
CURVE_POINTS = {"rdp": 100, "prv": 20}  # a PRV bound takes a tenth of a second

LIBRARIES = ("transformers", "timm")
TEMPLATE = Path(__file__).with_name("model_card_template.md")
STATED = "-differentially private for each "
BREAK = "<!-- -->"  # what Markdown shows as nothing, and links stop at


@dataclass(frozen=True)
class EarlierTraining:
    """A private training of the model that this one started from, as its report states it.

    Attributes:
        epsilon: That of all its draws.
        delta: Probability mass that epsilon leaves out.
        privacy_unit: What one guarantee protects.
        num_units: N of its data.
        steps: Number of its noise draws.
        guarantee: Whether its numbers are a guarantee.
        counted: Whether its draws are in the ledger of the report that names it.
    """

    epsilon: float
    delta: float
    privacy_unit: str
    num_units: int
    steps: int
    guarantee: bool
    counted: bool


@dataclass(frozen=True)
class PrivacyReport:
    """What is guaranteed, and the facts that it follows from.

    Attributes:
        epsilon: That of all noise draws in the ledger together; infinite without noise.
        delta: Probability mass that epsilon leaves out.
        accountant: The one that produced epsilon.
        accountant_version: The software that it comes from.
        noise_multiplier: sigma of the last mechanism used.
        sample_rate: q of the last mechanism used.
        steps: Number of noise draws.
        mechanisms: All mechanisms used, in order, with their number of steps.
        per_sample_max_grad_norm: C.
        clipping: The rule that enforces C.
        privacy_unit: What one guarantee protects.
        level: The same as an adjective, such as ``"patient-level"``.
        num_units: N, the number of privacy units, taken as public.
        max_examples_per_unit: The most examples of a drawn unit in one step, or None for all.
        adjacency: The neighbouring relation.
        largest_group: Where units share ids: the most units that share one, taken as public.
        group_name: What such an id stands for, such as ``"patient"``.
        group_epsilon: Epsilon for the largest group as a whole, at the same delta.
        membership_fpr: A false-positive rate of a test for membership.
        membership_tpr: The most true positives that a test can have at it, by epsilon and delta.
        sharper_membership_tpr: The same by all the epsilons that the ledger has at other deltas.
        runs: Number of starts and resumes in the ledger.
        draws_before_last_run: Noise draws made before the last of them.
        guarantee: Whether the numbers are a guarantee at all: no fixed seed, and noise enough for
            a finite epsilon.
        versions: Those of the software that made them.
        weights: SHA-256 of each file of weights that the report belongs to, by name.
        earlier: Private trainings before this one, where it started from a model of such.
    """

    epsilon: float
    delta: float
    accountant: str
    accountant_version: str
    noise_multiplier: float
    sample_rate: float
    steps: int
    mechanisms: list[dict[str, Any]]
    per_sample_max_grad_norm: float
    clipping: str
    privacy_unit: str
    level: str
    num_units: int
    max_examples_per_unit: int | None
    adjacency: str
    largest_group: int | None
    group_name: str | None
    group_epsilon: float | None
    membership_fpr: float
    membership_tpr: float
    sharper_membership_tpr: float
    runs: int
    draws_before_last_run: int
    guarantee: bool
    versions: dict[str, str]
    weights: dict[str, str] = field(default_factory=dict)
    earlier: list[EarlierTraining] = field(default_factory=list)

    @property
    def protects(self) -> bool:
        """Whether there is a guarantee, and one that a test for membership cannot get around."""
        return self.guarantee and self.sharper_membership_tpr < PROTECTING_TPR

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; an infinite epsilon is the string "inf"."""
        values: dict[str, Any] = _replaced(asdict(self), math.inf, "inf")
        return values

    def as_earlier(self, *, counted: bool) -> list[EarlierTraining]:
        """What the report of a training that started from this model names.

        Args:
            counted: Whether that training goes on with this one's ledger. If not, this report
                speaks for those whose draws it counts.
        """
        own = EarlierTraining(
            self.epsilon,
            self.delta,
            self.privacy_unit,
            self.num_units,
            self.steps,
            self.guarantee,
            counted,
        )
        return [*(entry for entry in self.earlier if counted or not entry.counted), own]


# What a field of the report may be in JSON, by its annotation.
JSON_TYPES: dict[str, tuple[type, ...]] = {
    "float": (float, int),
    "int": (int,),
    "str": (str,),
    "bool": (bool,),
    "float | None": (float, int, type(None)),
    "int | None": (int, type(None)),
    "str | None": (str, type(None)),
    "list[dict[str, Any]]": (list,),
    "dict[str, str]": (dict,),
    "list[EarlierTraining]": (list,),
}


def privacy_report(
    ledger: PrivacyLedger,
    *,
    weights: Mapping[str, str] | None = None,
    earlier: Sequence[EarlierTraining] = (),
) -> PrivacyReport:
    """Summarise a ledger.

    Args:
        ledger: That of the run that trained the model.
        weights: From ``hash_weights``, where the model is saved; without them it is not pushed.
        earlier: From ``PrivacyReport.as_earlier`` of the model that training started from.

    Raises:
        ValueError: If the ledger holds no noise draw.
    """
    if len(ledger) == 0:
        raise ValueError("ledger holds no noise draw and must hold at least one: train first.")
    facts, last, bound = ledger.runs[-1], ledger.events[-1], ledger.epsilon()
    group = max(ledger.runs, key=lambda run: run.largest_group or 0)
    group_size = group.largest_group or 1
    limits = [run.max_examples_per_unit for run in ledger.runs]
    return PrivacyReport(
        epsilon=bound.epsilon,
        delta=facts.delta,
        accountant=bound.accountant,
        accountant_version=f"opacus {version('opacus')}",
        noise_multiplier=last.noise_multiplier,
        sample_rate=last.sample_rate,
        steps=len(ledger),
        mechanisms=[asdict(event) for event in ledger.accounted],
        per_sample_max_grad_norm=last.max_grad_norm,
        clipping=last.clipping,
        privacy_unit=facts.privacy_unit,
        level=f"{facts.privacy_unit}-level",
        num_units=facts.num_units,
        max_examples_per_unit=None if None in limits else max(n for n in limits if n is not None),
        adjacency=facts.adjacency,
        largest_group=group_size if group_size > 1 else None,
        group_name=group.group_name if group_size > 1 else None,
        group_epsilon=ledger.group_epsilon(group_size) if group_size > 1 else None,
        membership_fpr=MEMBERSHIP_FPR,
        membership_tpr=membership_tpr(epsilon=bound.epsilon, delta=facts.delta, fpr=MEMBERSHIP_FPR),
        sharper_membership_tpr=sharper_membership_tpr(
            ledger.accounted, delta=facts.delta, fpr=MEMBERSHIP_FPR, accountant=facts.accountant
        ),
        runs=len(ledger.runs),
        draws_before_last_run=len(ledger) - ledger.draws_per_run[-1],
        guarantee=ledger.guarantee and math.isfinite(bound.epsilon),
        versions={
            "python": platform.python_version(),
            **{package: version(package) for package in PACKAGES},
        },
        weights=dict(weights or {}),
        earlier=list(earlier),
    )


def hash_weights(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Returns the SHA-256 of each ``*.safetensors`` in a folder, by name, read piece by piece."""
    hashes = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while piece := file.read(2**20):
                digest.update(piece)
        hashes[path.name] = digest.hexdigest()
    return hashes


def read_report(path: str | os.PathLike[str]) -> PrivacyReport:
    """Read a ``privacy_report.json``, which anybody may have written.

    Raises:
        ValueError: If it is no report of this version, or a value has the wrong type.
        FileNotFoundError: If there is no such file.
    """
    text = Path(path).read_bytes()
    try:
        values = json.loads(text, object_pairs_hook=_once)
        values = {"weights": {}, "earlier": [], **_replaced(values, "inf", math.inf)}
        values["earlier"] = [EarlierTraining(**entry) for entry in values["earlier"]]
        unlike = set(values) ^ {entry.name for entry in fields(PrivacyReport)}
        if unlike:
            raise ValueError(f"{min(unlike)} is missing or unknown")
        report = PrivacyReport(**values)
        for mechanism in report.mechanisms:
            SampledGaussian(**mechanism)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"path={os.fspath(path)} is not a privacy report of this version ({error})."
        ) from error
    _check_types(report, Path(path))
    for entry in report.earlier:
        _check_types(entry, Path(path))
    return report


def _check_types(stated: PrivacyReport | EarlierTraining, path: Path) -> None:
    for entry in fields(stated):
        value = vars(stated)[entry.name]
        types = JSON_TYPES[str(entry.type)]
        is_wrong_bool = isinstance(value, bool) and bool not in types
        is_nan = isinstance(value, float) and math.isnan(value)
        is_no_text = isinstance(value, dict) and not all(isinstance(v, str) for v in value.values())
        if not isinstance(value, types) or is_wrong_bool or is_nan or is_no_text:
            raise ValueError(f"{entry.name}={value!r} in {path} must be of type {entry.type}.")


def _replaced(value: Any, old: Any, new: Any) -> Any:
    """The value with ``new`` for ``old`` at any depth."""
    if isinstance(value, dict):
        return {name: _replaced(item, old, new) for name, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, old, new) for item in value]
    return new if value == old else value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name is there twice")
    return values


def verify_report(report: PrivacyReport, ledger: PrivacyLedger) -> PrivacyReport:
    """Compare a stated report with the one that the ledger supports, and return the latter.

    Raises:
        ValueError: If they differ in more than software versions; the first difference is named.
    """
    recomputed = privacy_report(ledger, weights=report.weights, earlier=report.earlier)
    stated = asdict(report)
    for name, value in asdict(recomputed).items():
        same = (
            math.isclose(stated[name], value, rel_tol=1e-6)  # another scipy may round differently
            if isinstance(value, float) and isinstance(stated[name], (int, float))
            else stated[name] == value
        )
        if not same and name not in ("versions", "accountant_version"):
            raise ValueError(
                f"{name}={stated[name]!r} in the privacy report must be {value!r}, as the ledger "
                "has it; the report is of another time, or was changed: save the model again."
            )
    return recomputed


def verify_weights(report: PrivacyReport, found: Mapping[str, str], folder: Path) -> None:
    """Compare the weights in a folder with those that a report belongs to.

    Args:
        report: That of the folder.
        found: From ``hash_weights``.
        folder: Named in the refusal.

    Raises:
        ValueError: If a file of weights is not the one in the report, or one is missing.
    """
    for name in sorted(found.keys() | report.weights.keys()):
        if found.get(name) != report.weights.get(name):
            raise ValueError(
                f"weights={name!r} in {folder} must be the file that the privacy report belongs "
                f"to, of SHA-256 {report.weights.get(name, 'not stated')}, and it is "
                f"{found.get(name, 'missing')}; save the model again with save_model, which "
                "writes both."
            )


def epsilon_curve(ledger: PrivacyLedger) -> list[tuple[int, float]]:
    """Returns (noise draws, epsilon after them) at about evenly spaced draws up to the last.

    Raises:
        ValueError: If the ledger holds no run.
    """
    points = CURVE_POINTS[ledger.runs[-1].accountant] if ledger.runs else 0
    draws = sorted({math.ceil(len(ledger) * i / points) for i in range(points + 1)})
    return [(n, ledger.epsilon_after(n).epsilon) for n in draws]


def plot_epsilon(ledger: PrivacyLedger, path: Path) -> bool:
    """Draw epsilon against the number of noise draws.

    Args:
        ledger: With at least one noise draw.
        path: The PNG file, ``epsilon.png`` where a card shall show it.

    Returns:
        Whether it was drawn: that needs matplotlib, the optional extra ``plots``.

    Raises:
        ValueError: If the ledger holds no run.
    """
    return draw_epsilon(epsilon_curve(ledger), delta=ledger.runs[-1].delta, path=path)


def build_model_card(
    report: PrivacyReport,
    *,
    base_model: str | None,
    dataset: str | None,
    label_names: Sequence[str],
    recipe: Mapping[str, Any],
    metrics: Mapping[str, float],
    library: str = "transformers",
    license: str | None = None,
    model_name: str | None = None,
    multi_label: bool = False,
    metrics_public: bool = False,
    has_plot: bool = False,
    num_channels: int = 3,
    architecture: str | None = None,
) -> str:
    """Write the card of a privately fine-tuned classifier.

    Args:
        report: From ``privacy_report``.
        base_model: Public name of the pretrained model, or None for a local one.
        dataset: Public name of the private data set, or None for a local one.
        label_names: The classes.
        recipe: Public training settings, without seeds.
        metrics: Evaluation metrics; what is not finite is left out.
        library: ``"transformers"`` or ``"timm"``: which one loads the model.
        license: The Hub's name of the model's licence; None leaves it to be stated.
        model_name: Title of the card.
        multi_label: Whether an image may have several labels.
        metrics_public: Whether the evaluation data is public, so that metrics reveal nothing.
        has_plot: Whether ``epsilon.png`` lies beside the card.
        num_channels: Number of channels of the model's images: 1 for greyscale.
        architecture: What timm calls it.

    Returns:
        Markdown with the Hub's metadata block.

    Raises:
        ValueError: If ``library`` is neither of the two.
    """
    if library not in LIBRARIES:
        raise ValueError(f"library={library!r} must be one of {', '.join(LIBRARIES)}.")
    title = one_line(model_name or "") or "Privately fine-tuned image classifier"
    finite = {one_line(n): float(v) for n, v in sorted(metrics.items()) if math.isfinite(v)}
    metadata = _metadata(
        report,
        base_model=base_model,
        dataset=dataset,
        metrics=finite,
        library=library,
        license=license,
        model_name=title,
    )
    text = _template().render(
        _report_values(report),
        title=title,
        base_model=base_model,
        dataset=dataset,
        label_names=label_names,
        recipe=recipe,
        metrics=finite,
        library=library,
        license=license,
        multi_label=multi_label,
        metrics_public=metrics_public,
        has_plot=has_plot,
        num_channels=num_channels,
        is_ours=(architecture or "").startswith("hf_dpmuon_"),
        date=datetime.now(timezone.utc).date(),
    )
    return f"---\n{metadata.to_yaml()}\n---\n\n{_without_empty_lines(text)}\n"


def card_states(report: PrivacyReport, text: str) -> bool:
    """Returns whether a card, edited or not, states this report's guarantee and no other.

    All that follows from the report alone must stand in it as it was written: the blocks of the
    template; of the metadata, the tag of a guarantee.
    """
    match = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    if match is None:
        return False
    try:
        is_tagged = GUARANTEE_TAG in yaml.safe_load(match[1])["tags"]
    except (yaml.YAMLError, TypeError, KeyError):
        return False
    template = _template()
    context = template.new_context(_report_values(report))
    stated = "\n\n".join("".join(block(context)) for block in template.blocks.values())
    paragraphs = text.split("\n\n")
    return (
        is_tagged == report.protects
        and all(paragraphs.count(p) == 1 for p in _without_empty_lines(stated).split("\n\n"))
        and text.count(STATED) == 1
    )


@cache
def _template() -> Template:
    environment = Environment(
        finalize=lambda value: plain(str(value)),  # every value that is shown, by construction
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # Markdown, not HTML
    )
    environment.filters |= {"up": round_up, "fixed": round_up_fixed, "percent": percent_up}
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def _report_values(report: PrivacyReport) -> dict[str, Any]:
    return {
        "report": report,
        "level": report.level[:1].upper() + report.level[1:],
        "group": report.group_name or "id",
        "false_alarms": f"{report.membership_fpr * 100:g}",
        "factor": None if report.epsilon > 20 else math.exp(report.epsilon),
    }


def _without_empty_lines(text: str) -> str:
    """The text with one empty line between paragraphs, where conditions left several."""
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _metadata(
    report: PrivacyReport,
    *,
    base_model: str | None,
    dataset: str | None,
    metrics: Mapping[str, float],
    library: str,
    license: str | None,
    model_name: str,
) -> ModelCardData:
    """The Hub's metadata; a base model that is no Hub id stands under a name of our own."""
    from huggingface_hub import EvalResult, ModelCardData

    is_id = _is_hub_id(dataset)
    other = None if base_model is None or _is_hub_id(base_model) else one_line(base_model)
    return ModelCardData(
        license=license,
        base_model=base_model if _is_hub_id(base_model) else None,
        datasets=[dataset] if dataset is not None and is_id else None,
        library_name=library,
        pipeline_tag=PIPELINE_TAG,
        tags=[*([GUARANTEE_TAG] if report.protects else []), *TAGS],
        model_name=model_name if metrics else None,  # the name of the results
        eval_results=[
            EvalResult(
                task_type=PIPELINE_TAG,
                dataset_type=dataset if dataset is not None and is_id else "local",
                dataset_name=one_line(dataset or "") or "a local data set",
                metric_type=METRIC_TYPES.get(name, name),
                metric_name=name,
                metric_value=value,
            )
            for name, value in metrics.items()
        ]
        or None,
        trained_from=other,
    )


def _is_hub_id(name: str | None) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def one_line(text: str) -> str:
    """The text with spaces for white space and controls, and names for what nobody sees.

    What turns the direction of writing, has no width or is no character, becomes ``[U+202E]``.
    """
    shown = "".join(
        " " if kind in ("Cc", "Zl", "Zp") else f"[U+{ord(c):04X}]" if kind in ("Cf", "Cs") else c
        for c, kind in ((c, unicodedata.category(c)) for c in text)
    )
    return " ".join(shown.split())


def plain(text: str) -> str:
    r"""One line of text that Markdown shows as it is, without links or mentions.

    >>> print(plain("a|b\n# c_d"))
    a\|b \# c_d
    """
    escaped = re.sub(r"([\\`*\[\]<>#|~$&{}!])", r"\\\1", one_line(text))
    escaped = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", escaped)
    return re.sub(r"@|:(?=//)|(?i:www)(?=\.)", rf"\g<0>{BREAK}", escaped)

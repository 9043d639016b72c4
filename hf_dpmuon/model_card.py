"""The privacy report and the model card, from the ledger and public facts only.

Receives the ledger, names, settings and evaluation metrics, never data, seeds or paths; returns a
JSON-ready report and Markdown with the Hub's metadata, and draws epsilon against the step.

Guarantees:
    Every epsilon comes from the ledger. Numbers that bound a privacy cost are rounded up. No name,
    however written, breaks the metadata or adds structure to the Markdown. A run without a
    guarantee, or with one that protects nobody, says so before anything else.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from hf_dpmuon.accounting import SampledGaussian
from hf_dpmuon.figures import draw_epsilon
from hf_dpmuon.ledger import PrivacyLedger
from hf_dpmuon.membership import membership_tpr, sharper_membership_tpr
from hf_dpmuon.rounding import percent_up, round_up, round_up_fixed

__all__ = [
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
MOST_NAMED_CLASSES = 100
CURVE_POINTS = {"rdp": 100, "prv": 20}  # a PRV bound takes a tenth of a second

ALMOST_NOTHING = 1.0  # the epsilon up to which two cases look almost the same

LIBRARIES = ("transformers", "timm", "hf_dpmuon")
LOADING = {
    "transformers": (
        "from transformers import pipeline",
        "",
        'classify = pipeline("image-classification", model="<this repository or folder>")',
        'print(classify("image.png"))',
    ),
    "greyscale": (
        "from PIL import Image",
        "from transformers import AutoImageProcessor, AutoModelForImageClassification",
        "",
        'name = "<this repository or folder>"',
        "processor = AutoImageProcessor.from_pretrained(name)",
        "model = AutoModelForImageClassification.from_pretrained(name)",
        'image = Image.open("image.png").convert("L")  # pipeline() would make it RGB',
        'print(model(**processor(image, return_tensors="pt")).logits.softmax(-1))',
    ),
    "timm": (
        "import timm",
        "",
        'model = timm.create_model("hf_hub:<this repository>", pretrained=True).eval()',
        "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))",
    ),
    "hf_dpmuon": (
        "from hf_dpmuon import load_model",
        "",
        'model = load_model("<this folder>", label_names=[...]).model.eval()',
    ),
}


@dataclass(frozen=True)
class PrivacyReport:
    """What is guaranteed, and the facts that it follows from.

    Attributes:
        epsilon: Of all noise draws in the ledger together; infinite without noise.
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
        versions: Of the software that made them.
        weights: SHA-256 of each file of weights that the report belongs to, by name.
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

    @property
    def protects(self) -> bool:
        """Whether there is a guarantee, and one that a test for membership cannot get around."""
        return self.guarantee and self.sharper_membership_tpr < PROTECTING_TPR

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; an infinite epsilon is the string "inf"."""
        return {name: "inf" if v == math.inf else v for name, v in asdict(self).items()}


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
}


def privacy_report(
    ledger: PrivacyLedger, *, weights: Mapping[str, str] | None = None
) -> PrivacyReport:
    """Summarise a ledger.

    Args:
        ledger: Of the run that trained the model.
        weights: From ``hash_weights``, where the model is saved; without them it is not pushed.

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
        values = {name: math.inf if v == "inf" else v for name, v in values.items()}
        values.setdefault("weights", {})
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
    for entry in fields(report):
        value = values[entry.name]
        types = JSON_TYPES[str(entry.type)]
        is_wrong_bool = isinstance(value, bool) and bool not in types
        is_nan = isinstance(value, float) and math.isnan(value)
        is_no_text = isinstance(value, dict) and not all(isinstance(v, str) for v in value.values())
        if not isinstance(value, types) or is_wrong_bool or is_nan or is_no_text:
            raise ValueError(
                f"{entry.name}={value!r} in {os.fspath(path)} must be of type {entry.type}."
            )
    return report


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
    recomputed = privacy_report(ledger, weights=report.weights)
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
        report: Of the folder.
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
) -> str:
    """Write the card of a privately fine-tuned classifier.

    Args:
        report: From ``privacy_report``.
        base_model: Public name of the pretrained model, or None for a local one.
        dataset: Public name of the private data set, or None for a local one.
        label_names: The classes.
        recipe: Public training settings, without seeds.
        metrics: Evaluation metrics; what is not finite is left out.
        library: ``"transformers"``, ``"timm"`` or ``"hf_dpmuon"``: which one loads the model.
        license: The Hub's name of the model's licence; None leaves it to be stated.
        model_name: Title of the card.
        multi_label: Whether an image may have several labels.
        metrics_public: Whether the evaluation data is public, so that metrics reveal nothing.
        has_plot: Whether ``epsilon.png`` lies beside the card.
        num_channels: Of the model's images: 1 for greyscale.

    Returns:
        Markdown with the Hub's metadata block.

    Raises:
        ValueError: If ``library`` is none of the three.
    """
    if library not in LIBRARIES:
        raise ValueError(f"library={library!r} must be one of {', '.join(LIBRARIES)}.")
    way = "greyscale" if library == "transformers" and num_channels == 1 else library
    title = _one_line(model_name or "") or "Privately fine-tuned image classifier"
    finite = {_one_line(n): float(v) for n, v in sorted(metrics.items()) if math.isfinite(v)}
    metadata = _metadata(
        report,
        base_model=base_model,
        dataset=dataset,
        metrics=finite,
        library=library,
        license=license,
        model_name=title,
    )
    names = ", ".join(plain(name) for name in label_names[:MOST_NAMED_CLASSES])
    if len(label_names) > MOST_NAMED_CLASSES:
        names += f" and {len(label_names) - MOST_NAMED_CLASSES} more"
    classes = (
        f" ({len(label_names)} {'labels' if multi_label else 'classes'}: {names})"
        if label_names
        else ""
    )
    software = ", ".join(f"{plain(n)} {plain(str(v))}" for n, v in report.versions.items())
    sections = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {plain(title)}",
        *_warning(report),
        f"An image classifier{', several labels per image' if multi_label else ''}: "
        f"{_named(base_model, 'model')}, fine-tuned on {_named(dataset, 'data set')}{classes} with "
        "differentially private training (hf-dpmuon).",
        "## Privacy",
        *_privacy_statement(report),
        _table(_privacy_facts(report)),
        *([f"![Epsilon after each step]({PLOT_FILE})"] if has_plot else []),
        "### What was counted, and what was not",
        _list(_scope(report)),
        "## Evaluation",
        *_evaluation(finite, metrics_public=metrics_public),
        "## Limits",
        _list(LIMITS),
        *(["## Recipe", _table(recipe)] if recipe else []),
        "## How to load",
        "```python\n" + "\n".join(LOADING[way]) + "\n```",
        "Images of more than 8 bits, and DICOM files, were brought to [0, 1] by their range or "
        "window in training; loaders that make them RGB clip them, so convert them first.",
        *([] if license else ["No licence was stated for this model; ask its publisher."]),
        f"Software: {software}.",
    ]
    return "\n\n".join(sections) + "\n"


def card_states(report: PrivacyReport, text: str) -> bool:
    """Returns whether a card, edited or not, states this report's guarantee and no other.

    All that follows from the report alone must stand in it as it was written: the warning, the
    statement, the table of facts and what was counted; of the metadata, the tag of a guarantee.
    """
    match = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    if match is None:
        return False
    try:
        is_tagged = GUARANTEE_TAG in yaml.safe_load(match[1])["tags"]
    except (yaml.YAMLError, TypeError, KeyError):
        return False
    paragraphs = text.split("\n\n")
    stated = [*_warning(report), *_privacy_statement(report)]
    stated += [_table(_privacy_facts(report)), _list(_scope(report))]
    return (
        is_tagged == report.protects
        and all(paragraphs.count(paragraph) == 1 for paragraph in stated)
        and text.count(STATED) == 1
    )


NO_GUARANTEE = (
    "**This model carries no privacy guarantee.** It was trained with fixed noise, without noise, "
    "or with too little for any epsilon; the numbers below describe what the same settings would "
    "give with secret noise."
)
STATED = "-differentially private for each "
LIMITS = (
    "The guarantee is for training by this software as it was run; it says nothing of whether the "
    "model is accurate, fair or fit for clinical use.",
    "It bounds what the model tells of one unit beyond what the rest of the data tells; what is "
    "true of people in general, the model may learn and reveal.",
    "The noise is drawn in float32 from a statistical, not a cryptographic generator.",
)


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
    """The Hub's metadata; names that are no Hub ids stand in the text only."""
    return ModelCardData(
        license=license,
        base_model=base_model if _is_hub_id(base_model) else None,
        datasets=[dataset] if dataset is not None and _is_hub_id(dataset) else None,
        library_name=library,
        pipeline_tag=PIPELINE_TAG,
        tags=[*([GUARANTEE_TAG] if report.protects else []), *TAGS],
        model_name=model_name if metrics else None,  # the name of the results
        eval_results=[
            EvalResult(
                task_type=PIPELINE_TAG,
                dataset_type=dataset if dataset is not None and _is_hub_id(dataset) else "local",
                dataset_name=_one_line(dataset or "") or "a local data set",
                metric_type=METRIC_TYPES.get(name, name),
                metric_name=name,
                metric_value=value,
            )
            for name, value in metrics.items()
        ]
        or None,
    )


def _warning(report: PrivacyReport) -> list[str]:
    """What a card says first where the numbers promise nothing."""
    if not report.guarantee:
        return [NO_GUARANTEE]
    if report.protects:
        return []
    return [
        "**This model protects nobody.** At an epsilon of "
        f"{round_up(report.epsilon)} an attacker who allows {report.membership_fpr * 100:g} % "
        f"false alarms may find {percent_up(report.sharper_membership_tpr)} of the members."
    ]


def _privacy_statement(report: PrivacyReport) -> list[str]:
    unit, level = plain(report.privacy_unit), plain(report.level[:1].upper() + report.level[1:])
    holds = "is" if report.guarantee else "would be"
    factor = "" if report.epsilon > 20 else f" = {round_up(math.exp(report.epsilon))}"
    almost = ""
    if report.epsilon <= ALMOST_NOTHING:
        almost = f"whoever sees it sees almost the same whether or not that {unit} was used; "
    paragraphs = [
        f"**{level} differential privacy.** This model {holds} "
        f"({round_up(report.epsilon)}, {round_up(report.delta)}){STATED}{unit} of "
        f"the training data: {almost}nothing that anyone concludes from the model about one "
        f"{unit}, knowing everything else, becomes more than exp(epsilon){factor} times as "
        "probable by its use, up to a probability delta.",
        "As a bound on membership inference: an attacker who allows "
        f"{report.membership_fpr * 100:g} % false alarms finds at most "
        f"{percent_up(report.membership_tpr)} of the members by epsilon and delta alone, and at "
        f"most {percent_up(report.sharper_membership_tpr)} by all that is known of the noise.",
    ]
    if report.group_epsilon is not None:
        group, size = plain(report.group_name or "id"), report.largest_group
        paragraphs.append(
            f"**{level}, not {group}-level.** One {group} has up to {size} {unit}s in the training "
            f"data; for all {size} together epsilon {holds} at most "
            f"{round_up(report.group_epsilon)} at the same delta (group privacy)."
        )
    return paragraphs


def _privacy_facts(report: PrivacyReport) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "epsilon": round_up_fixed(report.epsilon),
        "delta": round_up(report.delta),
        "privacy unit": f"{report.privacy_unit} ({report.level})",
    }
    if report.max_examples_per_unit is not None:
        facts[f"examples of one {report.privacy_unit} in a step"] = (
            f"at most {report.max_examples_per_unit}"
        )
    if report.group_epsilon is not None:
        facts[f"epsilon of {report.largest_group} {report.privacy_unit}s together"] = (
            round_up_fixed(report.group_epsilon)
        )
    return facts | {
        "adjacency": report.adjacency,
        "units (N)": report.num_units,
        "accountant": f"{report.accountant} ({report.accountant_version})",
        "noise multiplier (sigma)": report.noise_multiplier,
        "sampling": f"Poisson, q = {report.sample_rate:g}",
        "noise draws (steps)": report.steps,
        "clipping": f"{report.clipping}, C = {report.per_sample_max_grad_norm:g}",
        f"membership: true positives at {report.membership_fpr * 100:g} % false positives": (
            f"at most {percent_up(report.membership_tpr)} by epsilon and delta, "
            f"{percent_up(report.sharper_membership_tpr)} by all draws"
        ),
        "a guarantee": "yes" if report.guarantee else "NO",
    }


def _scope(report: PrivacyReport) -> list[str]:
    unit = plain(report.privacy_unit)
    earlier = (
        f" It was started or resumed {report.runs} times; the {report.draws_before_last_run} draws "
        "before the last time are among them."
        if report.runs > 1
        else ""
    )
    return [
        f"Counted: all {report.steps} noise draws of this model's ledger.{earlier}",
        "Not counted: other models trained on the same data, whose ledgers are their own; their "
        "epsilons add up.",
        "Not counted: hyper-parameters chosen by results on this data.",
        "Not counted: evaluation data, the metrics computed on it, and choices made by them.",
        "Not counted: the data of the pretrained model.",
        f"Taken as public: the number of {unit}s, the size of the largest group, names of classes "
        "and columns.",
        "Not covered: training time, which depends on the size of random batches.",
    ]


def _evaluation(metrics: Mapping[str, float], *, metrics_public: bool) -> list[str]:
    if not metrics:
        return ["No metrics were computed."]
    return [
        _table({name: f"{value:.4f}" for name, value in metrics.items()}),
        "These metrics were computed on public data."
        if metrics_public
        else "These metrics were computed on data that the guarantee does not cover.",
    ]


def _named(name: str | None, kind: str) -> str:
    return f"a local {kind}" if name is None else plain(name)


def _is_hub_id(name: str | None) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _table(rows: Mapping[str, Any]) -> str:
    lines = [f"| {plain(str(name))} | {plain(str(value))} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines])


def _list(items: Sequence[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _one_line(text: str) -> str:
    """The text with spaces where it had other white space or control characters."""
    return " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", text).split())


def plain(text: str) -> str:
    r"""One line of text that Markdown shows as it is.

    >>> print(plain("a|b\n# c_d"))
    a\|b \# c_d
    """
    escaped = re.sub(r"([\\`*\[\]<>#|~$&{}!])", r"\\\1", _one_line(text))
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", escaped)

"""The command ``hf-dpmuon``: plan a budget, advise on a run, train, check one, rebuild its card.

Receives command lines; prints text, or JSON with ``--json``, and writes the files it is told to.

Guarantees:
    Bad input of any kind ends with one sentence on stderr and exit code 2, and writes nothing. An
    epsilon of a run is printed only as its ledger gives it, or is marked as stated by others; no
    printed epsilon, delta or share of members is below the true one.
    ``--help`` loads no framework and ``budget`` nothing but the accountant.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from hf_dpmuon.ledger import PrivacyLedger
    from hf_dpmuon.model_card import PrivacyReport

__all__ = ["main"]

FPR = 0.01
FACTORS = (0.5, 1, 2, 4, 8, 16)  # of the batch size asked for
LARGEST_GAP = 0.05  # between the epochs of two rows that are compared


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["finetune"]:  # which has a parser of its own, that knows the YAML file
        from hf_dpmuon.finetune import launch

        return launch(words[1:], program="hf-dpmuon finetune", module=["hf_dpmuon.cli", "finetune"])
    options = _parser().parse_args(words)
    command: Callable[[argparse.Namespace], str] = options.command
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)  # such as a torn line in a ledger
        try:
            print(_printable(command(options), keep="\n"), flush=True)
        except BrokenPipeError:  # whoever reads, `head` say, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except (ValueError, OSError) as error:
            print(f"hf-dpmuon: {_printable(str(error), keep='')}", file=sys.stderr)
            return 2
    for note in notes:
        if issubclass(note.category, UserWarning) and "hf_dpmuon" in note.filename:
            print(f"note: {_printable(str(note.message), keep='')}", file=sys.stderr)
    return 0


class _Parser(argparse.ArgumentParser):
    """Refuses in one sentence, and explains on one screen."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            formatter_class=lambda prog: argparse.HelpFormatter(
                prog, width=80, max_help_position=26
            ),
            allow_abbrev=False,
            **kwargs,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hf-dpmuon", description="Differentially private fine-tuning.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    commands.add_parser("finetune", add_help=False, help="train, evaluate and save a private model")
    configs = commands.add_parser(
        "configs",
        help="the configurations that finetune knows by name",
        description="List the configurations that `hf-dpmuon finetune --config NAME` knows, or "
        "copy them into a folder, as files to begin from.",
    )
    configs.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help="copy them there")
    configs.set_defaults(command=_configs)
    budget = commands.add_parser(
        "budget",
        help="epsilon, sigma or steps from the other two",
        description="Give two of epsilon, sigma and steps (or epochs); get the third, for several "
        "batch sizes.",
    )
    budget.add_argument(
        "--num_units", type=int, required=True, metavar="N", help="number of privacy units"
    )
    budget.add_argument(
        "--logical_batch_size",
        type=int,
        default=1024,
        metavar="B",
        help="expected units in a step (1024)",
    )
    budget.add_argument("--epsilon", type=float, metavar="E", help="what the run may cost")
    budget.add_argument("--sigma", type=float, metavar="S", help="noise multiplier")
    length = budget.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, metavar="T", help="draws of noise")
    length.add_argument("--epochs", type=float, metavar="X", help="passes over the data")
    budget.add_argument("--delta", type=float, metavar="D", help="delta (1 / (10 N))")
    budget.add_argument(
        "--accountant",
        choices=("rdp", "prv", "pld"),
        default="rdp",
        help="(rdp)",
    )
    budget.add_argument("--plot", type=Path, metavar="PNG", help="picture of the table")
    budget.set_defaults(command=_budget)

    advice = commands.add_parser(
        "advise",
        help="method, batch, epochs and engine for a model",
        description="Compare batch sizes for a model and a number of units at an epsilon, and "
        "recommend a run. The model is tried on rows of noise; no data is read.",
    )
    advice.add_argument("--model", required=True, metavar="NAME", help="as model_name_or_path")
    advice.add_argument(
        "--num_units", "--units", type=int, required=True, metavar="N", help="privacy units"
    )
    advice.add_argument(
        "--epsilon",
        "--target-epsilon",
        type=float,
        required=True,
        metavar="E",
        help="what the run may cost",
    )
    advice.add_argument("--delta", type=float, metavar="D", help="delta (1 / (10 N))")
    advice.add_argument("--epochs", type=float, metavar="X", help="passes over the data")
    advice.add_argument("--classes", type=int, default=10, metavar="K", help="classes (10)")
    advice.add_argument(
        "--physical_batch_size", type=int, default=32, metavar="P", help="rows in memory (32)"
    )
    advice.add_argument("--plot", type=Path, metavar="PNG", help="picture of the table")
    advice.set_defaults(command=_advise)

    inspect = commands.add_parser(
        "inspect",
        help="the report of a run, verified against its ledger",
        description="Verify the ledger in a folder of a run or checkpoint, recompute the privacy "
        "report from it, and compare it with the one that is stored there, the weights with their "
        "hashes, and a checkpoint with the ledger of its run.",
    )
    inspect.set_defaults(command=_inspect)
    card = commands.add_parser(
        "card",
        help="the model card, rebuilt from ledger and report",
        description="Rebuild the model card from the ledger and the report in a folder. Names and "
        "metrics come from the metadata of its README.md; the recipe is known to the trainer only.",
    )
    card.add_argument("--output", type=Path, metavar="FILE", help="write it there")
    card.set_defaults(command=_card)
    audit = commands.add_parser(
        "audit",
        help="what a run's releases show, beside what it claims",
        description="Train the run that a YAML file describes once more, in a folder of its own, "
        "with canaries added, and bound epsilon from below by tests for their membership "
        "(guarantee: false; nothing is pushed).",
    )
    audit.add_argument("config", type=Path, metavar="RUN", help="the YAML file of the run")
    audit.add_argument(
        "--canaries", type=int, default=1000, metavar="N", help="privacy units to add (1000)"
    )
    audit.add_argument(
        "--confidence", type=float, default=0.95, metavar="P", help="in all bounds (0.95)"
    )
    audit.add_argument(
        "--output_dir", type=Path, metavar="DIR", help="a new folder (the run's, with -audit)"
    )
    audit.set_defaults(command=_audit)
    for command in (inspect, card):
        command.add_argument("path", type=Path, metavar="PATH", help="a folder, or a ledger file")
    for command in (budget, advice, inspect, card, audit):
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


# Configurations


def _configs(options: argparse.Namespace) -> str:
    from hf_dpmuon.files import write_whole
    from hf_dpmuon.parsing import shipped_configs

    texts = {name: path.read_text(encoding="utf-8") for name, path in shipped_configs().items()}
    if options.folder is None:
        heads = {name: text.split("\n", 1)[0].lstrip("# ") for name, text in texts.items()}
        return "\n".join(f"{name:<22} {head}" for name, head in heads.items())
    copies = {options.folder / f"{name}.yaml": text for name, text in texts.items()}
    there = [str(path) for path in copies if path.exists()]
    if there:
        raise ValueError(f"{', '.join(there)} would be overwritten; name another folder.")
    options.folder.mkdir(parents=True, exist_ok=True)
    for path, text in copies.items():
        write_whole(path, text.encode())
    return f"written to {options.folder}: {', '.join(path.name for path in copies)}"


# Budget


def _budget(options: argparse.Namespace) -> str:
    from hf_dpmuon.figures import draw_budgets
    from hf_dpmuon.membership import membership_tpr, sharper_membership_tpr
    from hf_dpmuon.plan import Budget, PrivacyPlan
    from hf_dpmuon.rounding import percent_up, round_up, round_up_fixed

    def solve(batch_size: int) -> PrivacyPlan:
        return Budget(
            logical_batch_size=batch_size,
            target_epsilon=options.epsilon,
            noise_multiplier=options.sigma,
            max_steps=options.steps,
            num_train_epochs=options.epochs,
            target_delta=options.delta,
            accountant=options.accountant,
        ).plan(options.num_units)

    asked = options.logical_batch_size
    plans = {asked: solve(asked)}
    for batch_size in {math.ceil(factor * asked) for factor in FACTORS} - {asked}:
        if batch_size <= options.num_units:
            with suppress(ValueError):  # what was asked for has no solution at this batch size
                plans[batch_size] = solve(batch_size)
    delta = plans[asked].delta
    rows = [
        {
            "logical_batch_size": batch_size,
            "sample_rate": plan.sample_rate,
            "steps": plan.steps,
            "epochs": plan.epochs,
            "sigma": plan.noise_multiplier,
            "epsilon": plan.epsilon,
            "membership_tpr": membership_tpr(epsilon=plan.epsilon, delta=delta, fpr=FPR),
            "sharper_membership_tpr": sharper_membership_tpr(
                [plan.draws], delta=delta, fpr=FPR, accountant=plan.accountant
            ),
            "noise_per_unit": plan.noise_multiplier / batch_size,
            "asked": batch_size == asked,
        }
        for batch_size, plan in sorted(plans.items())
    ]
    unlike = [] if options.epochs is None else _unlike(rows, options.epochs)
    if options.plot is not None:
        answer = (
            "epsilon" if options.epsilon is None else "sigma" if options.sigma is None else "steps"
        )
        if not draw_budgets(rows, answer, path=options.plot, joined=not unlike):
            raise ValueError(
                "--plot needs matplotlib, which must be installed: pip install 'hf-dpmuon[plots]'."
            )
    if options.json:
        return _json(
            {
                "num_units": options.num_units,
                "delta": delta,
                "accountant": options.accountant,
                "adjacency": "add or remove one",
                "plans": [
                    {name: "inf" if value == math.inf else value for name, value in row.items()}
                    for row in rows
                ],
            }
        )
    header = f"{'batch':>8} {'q':>10} {'steps':>8} {'epochs':>8} {'sigma':>9} {'epsilon':>9} "
    return "\n".join(
        [
            f"N = {options.num_units}, delta = {round_up(delta)}, accountant {options.accountant}, "
            "add or remove one",
            "",
            header + f"{'noise':>9} {'TPR':>7}",
            *(
                f"{'*' if r['asked'] else ' '}{r['logical_batch_size']:>7} "
                f"{r['sample_rate']:>10.4g} {r['steps']:>8} {r['epochs']:>8.4g} "
                f"{r['sigma']:>9.6g} {round_up_fixed(r['epsilon']):>9} "
                f"{r['noise_per_unit']:>9.3g} {percent_up(r['sharper_membership_tpr']):>7}"
                for r in rows
            ),
            "",
            "noise: its standard deviation in the mean gradient, in units of the clipping bound.",
            "TPR: the most members that a membership test finds at 1 % false alarms.",
            *unlike,
        ]
    )


def _unlike(rows: Sequence[Mapping[str, Any]], epochs: float) -> list[str]:
    """A sentence that names the rows whose whole steps are not the epochs asked for."""
    others = [
        f"{row['epochs']:.3g} at a batch of {row['logical_batch_size']}"
        for row in rows
        if abs(row["epochs"] / epochs - 1) > LARGEST_GAP
    ]
    if not others:
        return []
    return textwrap.wrap(
        f"Rows are not all alike: an epoch is a whole number of steps, so that --epochs {epochs:g} "
        f"are {', '.join(others)}; give --steps to compare otherwise.",
        width=100,
    )


# Advice


def _advise(options: argparse.Namespace) -> str:
    from hf_dpmuon.advice import advise
    from hf_dpmuon.figures import draw_budgets

    advice = advise(
        options.model,
        num_units=options.num_units,
        target_epsilon=options.epsilon,
        delta=options.delta,
        num_epochs=options.epochs,
        num_classes=options.classes,
        physical_batch_size=options.physical_batch_size,
    )
    values = advice.to_dict()
    rows = values["choices"]
    if options.plot is not None and not draw_budgets(
        rows, "threshold", path=options.plot, joined=True
    ):
        raise ValueError(
            "--plot needs matplotlib, which must be installed: pip install 'hf-dpmuon[plots]'."
        )
    if options.json:
        return _json(values)
    memory = ", ".join(f"{name} {size:.2g} GB" for name, size in advice.gigabytes.items())
    best = advice.logical_batch_size
    largest = next(c for c in advice.choices if c.logical_batch_size == best).thresholds
    return "\n".join(
        [
            f"{'batch':>8} {'steps':>8} {'epochs':>8} {'sigma':>9} {'noise':>9} {'detected':>9} "
            f"{'hours':>8}",
            *(
                f"{'*' if row['logical_batch_size'] == best else ' '}"
                f"{row['logical_batch_size']:>7} {row['steps']:>8} {row['epochs']:>8.4g} "
                f"{row['sigma']:>9.6g} {row['noise_per_unit']:>9.3g} {row['threshold']:>9.3g} "
                f"{row['hours']:>8.3g}"
                for row in rows
            ),
            "",
            "noise: its standard deviation in the mean gradient, in units of the clipping bound C.",
            "detected: from which singular value on a direction stands clear of it in DP-Muon's",
            f"momentum, median over the matrices; if all gradients agreed, {advice.strongest:.2g}.",
            "by shape at *: " + ", ".join(f"{name} {x:.3g}" for name, x in largest.items()),
            f"memory of {options.physical_batch_size} rows: {memory}",
            "",
            *textwrap.wrap(
                f"--dp_optimizer {advice.method} --logical_batch_size {best} --num_train_epochs "
                f"{advice.epochs:.4g} --grad_sample_mode {advice.engine}: {advice.reason}",
                width=100,
            ),
        ]
    )


# Inspect and card


def _inspect(options: argparse.Namespace) -> str:
    report, ledger, hashed = _load(options.path)
    _check_card(report, options.path if options.path.is_dir() else options.path.parent)
    runs = [] if ledger is None else list(zip(ledger.runs, ledger.draws_per_run, strict=True))
    ahead = None if ledger is None else _draws_ahead(ledger)
    if options.json:
        return _json(
            {
                "verified": ledger is not None,
                "weights_verified": hashed,
                "draws_of_the_run_ahead": ahead,
                "report": report.to_dict(),
                "runs": [{**asdict(facts), "draws": draws} for facts, draws in runs],
            }
        )
    values = report.to_dict()
    mechanisms, versions = values.pop("mechanisms"), values.pop("versions")
    del values["weights"], values["earlier"]
    sharper, looser, fpr = (
        values.pop(f"{name}membership_{rate}")
        for name, rate in (("sharper_", "tpr"), ("", "tpr"), ("", "fpr"))
    )
    lines = [
        "Not verifiable: there is no ledger here; these are the numbers as stated."
        if ledger is None
        else "Verified: these numbers follow from the ledger.",
        *(["The weights are those of the report."] if hashed else []),
        *([] if report.guarantee else ["NO GUARANTEE: fixed noise, none, or too little."]),
        *(["PROTECTS NOBODY."] if report.guarantee and not report.protects else []),
        *([] if ahead is None else [_said(ahead)]),
        "",
        *(f"{name:<26} {value}" for name, value in values.items() if value is not None),
        f"{'membership':<26} {sharper} of members found at most, at a share of {fpr} false alarms "
        f"(epsilon and delta alone say less: {looser} )",
        *(
            f"{'mechanism':<26} sigma {m['noise_multiplier']}, q {m['sample_rate']}, "
            f"{m['steps']} draws"
            for m in mechanisms
        ),
        *(
            f"{f'start {number}':<26} {facts.privacy_unit}, {facts.adjacency}, N "
            f"{facts.num_units}, delta {facts.delta}, {facts.accountant}, {draws} draws"
            + ("" if facts.guarantee else ", NO GUARANTEE")
            for number, (facts, draws) in enumerate(runs, start=1)
        ),
        *(
            f"{'earlier training':<26} epsilon {e.epsilon}, delta {e.delta}, {e.privacy_unit}, N "
            f"{e.num_units}, {e.steps} draws, {'counted' if e.counted else 'NOT COUNTED'}"
            + ("" if e.guarantee else ", NO GUARANTEE")
            for e in report.earlier
        ),
        f"{'versions':<26} {', '.join(f'{name} {v}' for name, v in versions.items())}",
    ]
    return "\n".join(_printable(line, keep="") for line in lines)


def _card(options: argparse.Namespace) -> str:
    from huggingface_hub import ModelCard

    from hf_dpmuon.files import write_whole
    from hf_dpmuon.model_card import PLOT_FILE, build_model_card

    report, ledger, _ = _load(options.path)
    if ledger is None:
        warnings.warn("there is no ledger here; the card has the numbers as stated.", stacklevel=1)
    folder = options.path if options.path.is_dir() else options.path.parent
    card = build_model_card(
        report, **_public_facts(folder), has_plot=(folder / PLOT_FILE).is_file()
    )
    if options.output is not None:
        write_whole(options.output, card.encode())
    metadata = ModelCard(card).data.to_dict()  # type: ignore[no-untyped-call]
    if options.json:
        return _json({"metadata": metadata, "card": card})
    return card.rstrip("\n") if options.output is None else f"written to {options.output}"


def _audit(options: argparse.Namespace) -> str:
    from hf_dpmuon.canaries import audit, described_audit

    report = audit(
        options.config,
        canaries=options.canaries,
        output_dir=options.output_dir,
        confidence=options.confidence,
    )
    return _json(report) if options.json else described_audit(report)


def _load(path: Path) -> tuple[PrivacyReport, PrivacyLedger | None, bool]:
    """The report of a folder, a ledger or a report file; verified where there is a ledger.

    Returns:
        The report, the ledger, and whether the weights beside them are those of the report.
    """
    from hf_dpmuon.ledger import LEDGER_FILE, PrivacyLedger
    from hf_dpmuon.model_card import (
        REPORT_FILE,
        hash_weights,
        privacy_report,
        read_report,
        verify_report,
        verify_weights,
    )

    if path.is_dir():
        ledger_path, report_path = path / LEDGER_FILE, path / REPORT_FILE
    elif path.name == REPORT_FILE:
        ledger_path, report_path = path.with_name(LEDGER_FILE), path
    else:
        ledger_path, report_path = path, path.with_name(REPORT_FILE)
    ledger = PrivacyLedger.load(ledger_path) if ledger_path.is_file() else None
    report = read_report(report_path) if report_path.is_file() else None
    if ledger is not None:
        report = privacy_report(ledger) if report is None else verify_report(report, ledger)
    if report is None:
        raise ValueError(
            f"path={path} must be a folder with {LEDGER_FILE} or {REPORT_FILE}, or such a file."
        )
    weights = hash_weights(report_path.parent) if report.weights else {}
    if weights:
        verify_weights(report, weights, report_path.parent)
    return report, ledger, bool(weights)


def _check_card(report: PrivacyReport, folder: Path) -> None:
    """Refuse a folder whose card states something else than its report.

    Raises:
        ValueError: It does.
    """
    from hf_dpmuon.model_card import CARD_FILE, REPORT_FILE, card_states

    card = folder / CARD_FILE
    if not (card.is_file() and (folder / REPORT_FILE).is_file()):
        return
    if not card_states(report, card.read_text(encoding="utf-8")):
        raise ValueError(
            f"{card} does not state what the report beside it does; write it again with "
            f"`hf-dpmuon card {folder} --output {card}`."
        )


def _draws_ahead(ledger: PrivacyLedger) -> int | None:
    """How many more draws the ledger of the run has than a checkpoint's; None for no checkpoint.

    Raises:
        ValueError: Neither ledger is the other at an earlier time.
    """
    from hf_dpmuon.ledger import PrivacyLedger

    folder = ledger.path.resolve().parent
    path = folder.parent / ledger.path.name
    if not folder.name.startswith("checkpoint-") or not path.is_file():
        return None
    of_run = PrivacyLedger.load(path)
    if not of_run.extends(ledger) and not ledger.extends(of_run):
        raise ValueError(
            f"{ledger.path} and {path} are not of one run; inspect each in a folder of its own."
        )
    return len(of_run) - len(ledger)


def _said(ahead: int) -> str:
    if ahead == 0:
        return "The ledger of the run, in the folder above, has the same draws."
    if ahead > 0:
        return (
            f"The ledger of the run, in the folder above, is {ahead} draws AHEAD of this "
            "checkpoint: going on from here counts them."
        )
    return (
        f"This checkpoint is {-ahead} draws AHEAD of the ledger of its run, in the folder above, "
        "which lost them."
    )


def _public_facts(folder: Path) -> dict[str, Any]:
    """What the card that lies in the folder, and the model's configuration, say of the model."""
    from hf_dpmuon.model_card import CARD_FILE, LIBRARIES

    config = _read(folder / "config.json", json.loads)
    labels = config.get("id2label") or config.get("label_names") or []
    metadata = _read(folder / CARD_FILE, _metadata)
    results = metadata.get("eval_results") or []
    libraries = [name for name in _texts(metadata.get("library_name")) if name in LIBRARIES]
    base_models = _texts(metadata.get("base_model")) or _texts(metadata.get("trained_from"))
    datasets = _texts(metadata.get("datasets")) or _texts([r.dataset_name for r in results])
    return {
        "base_model": next(iter(base_models), None),
        "dataset": next(iter(datasets), None),
        "label_names": _texts(list(labels.values()) if isinstance(labels, dict) else labels),
        "recipe": {},
        "metrics": {
            str(r.metric_name or r.metric_type): r.metric_value
            for r in results
            if isinstance(r.metric_value, (int, float))
        },
        "library": next(iter(libraries), "transformers"),
        "license": next(iter(_texts(metadata.get("license"))), None),
        "model_name": next(iter(_texts(metadata.get("model_name"))), None),
        "multi_label": config.get("problem_type") == "multi_label_classification",
        "architecture": next(iter(_texts(config.get("architecture"))), None),
        "num_channels": 1 if config.get("num_channels") == 1 else 3,
    }


def _read(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """A file's content, which anybody may have written; empty without the file.

    Raises:
        ValueError: It does not parse to a mapping.
    """
    if not path.is_file():
        return {}
    try:
        content = parse(path.read_text(encoding="utf-8"))
        return dict(**content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"path={path} must be readable and is not ({error}).") from error


def _metadata(card: str) -> dict[str, Any]:
    import yaml
    from huggingface_hub import ModelCard

    try:
        return vars(ModelCard(card).data)
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def _texts(value: Any) -> list[str]:
    return [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, str)]


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, allow_nan=False)


def _printable(text: str, *, keep: str) -> str:
    """The text without control characters, which a report of others could send to a terminal."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda c: c[0] if c[0] in keep else " ", text)


if __name__ == "__main__":
    sys.exit(main())

"""The command line and the YAML file: one way of reading words, whoever wrote them.

Receives words and a file; returns words for the parser of the arguments, or help. No framework is
loaded.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from hf_dpmuon.options import GROUPS, choices, expert_options

__all__ = [
    "DESCRIPTION",
    "Words",
    "answer_help",
    "full_help",
    "help_of",
    "option_of",
    "shipped_configs",
    "short_help",
    "unknown",
    "with_config",
]

DESCRIPTION = "Fine-tune a pretrained vision model with differential privacy."
# Pairs of which one says what the other would.
ALTERNATIVES = (
    ("target_epsilon", "noise_multiplier"),
    ("max_steps", "num_train_epochs"),
    ("eval_split", "eval_fraction"),
    ("label_column", "label_columns"),
)
# What people write, and what it is called here.
OTHER_NAMES = {
    "adjust_lr": "adjust_lr_fn",
    "batch_size": "logical_batch_size",
    "delta": "target_delta",
    "epochs": "num_train_epochs",
    "epsilon": "target_epsilon",
    "lr": "learning_rate",
    "max_grad_norm": "per_sample_max_grad_norm",
    "model": "model_name_or_path",
    "sigma": "noise_multiplier",
    "steps": "max_steps",
}
WIDTH = 100
LEAD = 32


@dataclass(frozen=True)
class Words:
    """Words of the command line, and where they are from."""

    words: list[str]
    where: str


def answer_help(argv: Sequence[str], program: str) -> None:
    """Print our options and exit, if ``--help`` is asked for."""
    if "-h" in argv or "--help" in argv:
        print(short_help(program))
        sys.exit(0)


def with_config(argv: Sequence[str], known: set[str]) -> list[Words]:
    """Put the options of ``--config`` before the words of the command line, which wins.

    An option on the command line also drops its alternative from the file: ``--eval_split`` the
    file's ``eval_fraction``, say.

    Args:
        argv: The words of the command line.
        known: Names of all options.

    Returns:
        Words in order, those of one option of the file together, and where they are from.

    Raises:
        ValueError: If a key is unknown (named with the closest known one) or the file cannot be
            read.
    """
    config_only = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config_only.add_argument("--config")
    config = config_only.parse_known_args(argv)[0].config
    path = None if config is None else _found(config)
    values = {} if path is None else _read_config(path, known)
    said = {option_of(word) for word in argv if word.startswith("--")}
    for name, other in (*ALTERNATIVES, *(pair[::-1] for pair in ALTERNATIVES)):
        if name in said and other not in said:
            values.pop(other, None)
    in_file = [
        Words(_as_words(key, value), f"{key}={value!r} in {path}") for key, value in values.items()
    ]
    return [*in_file, Words(list(argv), "command line")]


def short_help(program: str) -> str:
    """The options that most runs set, with their choices and defaults."""
    lines = _introduction(program, "--help-all shows all of them.")
    for title, kind in GROUPS.items():
        few = expert_options(kind)
        lines += ["", f"{title.lower()}:"]
        for option in fields(kind):
            if option.name not in few:
                lines += _entry(option.name, help_of(option, kind))
    return "\n".join(lines)


def full_help(program: str, base: Mapping[str, str], notes: Mapping[str, str]) -> str:
    """All options of ours, and those of the base class with their help.

    Args:
        program: What the user calls the command.
        base: Help of the base class's options that are not among ours.
        notes: What else is to be said of some options.
    """
    lines = _introduction(program, "Those of transformers.TrainingArguments are the last.")
    ours = {
        title: {option.name: help_of(option, kind) for option in fields(kind)}
        for title, kind in GROUPS.items()
    }
    for title, entries in (ours | {"transformers.TrainingArguments": base}).items():
        lines += ["", f"{title}:"]
        for name, text in entries.items():
            lines += _entry(name, f"{text} {notes.get(name, '')}".strip())
    return "\n".join(lines)


def help_of(option: Field[Any], kind: type, *, code: str = "") -> str:
    """The help of an option with its choices, each between two of ``code``."""
    text: str = option.metadata["help"]
    names = [f"{code}{name}{code}" for name in choices(kind).get(option.name, ()) if name]
    among = f" One of {', '.join(names)}." if names else ""
    shown = "" if code or option.default is None else f" ({option.default})"
    return f"{text}{among}{shown}"


def _introduction(program: str, last: str) -> list[str]:
    return [
        f"usage: {program} [--config FILE.yaml|NAME] [--OPTION VALUE ...]",
        DESCRIPTION,
        f"Options may stand in the YAML file, too; the command line wins. {last}",
    ]


def _entry(name: str, text: str) -> list[str]:
    lead = f"  --{name} ".ljust(LEAD)
    return textwrap.wrap(text, WIDTH, initial_indent=lead, subsequent_indent=" " * LEAD)


def option_of(word: str) -> str:
    """The name of an option in a word of the command line, in whichever spelling it is."""
    return word.lstrip("-").split("=")[0].replace("-", "_")


def shipped_configs() -> dict[str, Path]:
    """The configurations that come with the package, by name."""
    package = Path(__file__).parent
    # A wheel has them within the package, a checkout beside it.
    folder = next(
        path / "configs" for path in (package, package.parent) if (path / "configs").is_dir()
    )
    return {path.stem: path for path in sorted(folder.rglob("*.yaml"), key=lambda p: p.stem)}


def _found(config: str) -> Path:
    """The file that ``--config`` names: one of the user's, or else one that is shipped."""
    path, shipped = Path(config), shipped_configs()
    if path.exists() and not (path.is_dir() and config in shipped):
        return path
    if config not in shipped:
        raise ValueError(
            f"config={config!r} cannot be read: there is no such file, and those that are shipped "
            f"are {', '.join(shipped)}."
        )
    return shipped[config]


def _read_config(path: Path, known: set[str]) -> dict[str, Any]:
    """The options of a file as their text, so that YAML's guesses at types do not matter."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"config={str(path)!r} cannot be read: {reason}.") from error
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"config={str(path)!r} must be a YAML mapping of option: value.")
    values: dict[str, Any] = {}
    for key_node, node in root.value:
        key = str(key_node.value)
        if key not in known:
            raise ValueError(unknown(key, known, str(path)))
        if key in values:
            raise ValueError(f"{key!r} stands twice in {path}; leave one of them.")
        values[key] = _text_of(node)
    return values


def _text_of(node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        is_empty = node.tag == "tag:yaml.org,2002:null" and node.style is None
        return None if is_empty else node.value
    if isinstance(node, yaml.SequenceNode) and all(
        isinstance(item, yaml.ScalarNode) for item in node.value
    ):
        return [item.value for item in node.value]
    loader = yaml.SafeLoader("")
    return loader.construct_document(node)


def _as_words(key: str, value: Any) -> list[str]:
    """A value of the file as it would stand on the command line; none for an empty one."""
    if value is None or value == []:
        return []
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return [f"--{key}", *value]
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}"]


def unknown(key: str, known: set[str], where: str) -> str:
    """A sentence about an unknown option, with the one that may be meant."""
    meant = OTHER_NAMES.get(option_of(key))
    close = [meant] if meant is not None else difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "see --help for the known ones."
    return f"unknown option {key!r} in {where}: {hint}"

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
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from hf_dpmuon.options import DataArguments, ModelArguments, TrainingOptions, choices

__all__ = [
    "DESCRIPTION",
    "Words",
    "answer_help",
    "option_of",
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
# Options of the base class that most runs set, shown in the short help.
OFTEN_SET = {
    "output_dir": "Folder of the run (a new one under outputs/).",
    "max_steps": "Logical steps, instead of epochs.",
    "weight_decay": "Decay of matrices (0).",
    "bf16": "Autocast to bfloat16; weights, norms, sums and noise stay float32.",
    "activation_checkpointing": "Recompute activations to save memory.",
    "eval_strategy": "When to evaluate: no, steps or epoch (no).",
    "save_strategy": "When to save a checkpoint: no, steps or epoch (steps).",
    "save_steps": "Steps between two checkpoints (500).",
    "seed": "Seed of a new head's weights; it has no part in noise or sampling (42).",
    "push_to_hub": "Push the model to a private repository.",
    "hub_model_id": "Name of that repository (the output folder's).",
}
# Options of ours that repeat the base class's, with another default, or exist to be refused.
LESS_SHOWN = {"max_grad_norm", "remove_unused_columns", "loss_scale", "noise_seed"}
WIDTH = 100


@dataclass(frozen=True)
class Words:
    """Words of the command line, and where they are from."""

    words: list[str]
    where: str


def answer_help(argv: Sequence[str]) -> None:
    """Print our options and exit, if ``--help`` is asked for."""
    if "-h" in argv or "--help" in argv:
        print(short_help())
        sys.exit(0)


def with_config(argv: Sequence[str], known: set[str]) -> list[Words]:
    """Put the options of ``--config FILE.yaml`` before the words of the command line, which wins.

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
    path = config_only.parse_known_args(argv)[0].config
    values = {} if path is None else _read_config(Path(path), known)
    said = {option_of(word) for word in argv if word.startswith("--")}
    for name, other in (*ALTERNATIVES, *(pair[::-1] for pair in ALTERNATIVES)):
        if name in said and other not in said:
            values.pop(other, None)
    in_file = [
        Words(_as_words(key, value), f"{key}={value!r} in {path}") for key, value in values.items()
    ]
    return [*in_file, Words(list(argv), "command line")]


def short_help() -> str:
    """Our options with their choices, and the base class's that most runs set."""
    lines = [
        f"usage: finetune_vit.py [--config FILE.yaml] [--OPTION VALUE ...]   {DESCRIPTION}",
        "Options may stand in the YAML file, too; the command line wins. --help-all shows all of "
        "them.",
    ]
    groups: tuple[tuple[str, type], ...] = (
        ("privacy, method and training", TrainingOptions),
        ("data", DataArguments),
        ("model", ModelArguments),
    )
    for title, kind in groups:
        lines += ["", f"{title}:"]
        for option in fields(kind):
            if option.name not in LESS_SHOWN:
                lines += _entry(option.name, _help_of(option, kind))
    lines += ["", "of the base class, transformers.TrainingArguments:"]
    for name, text in OFTEN_SET.items():
        lines += _entry(name, text)
    return "\n".join(lines)


def _help_of(option: Field[Any], kind: type) -> str:
    text: str = option.metadata["help"]
    if option.name in (names := choices(kind)):
        text += f" One of {', '.join(names[option.name])}."
    if option.default is not MISSING and option.default not in (None, False):
        text += f" ({option.default})"
    return text


def _entry(name: str, text: str) -> list[str]:
    lead = f"  --{name} ".ljust(32)
    return textwrap.wrap(text, width=WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead))


def option_of(word: str) -> str:
    """The name of an option in a word of the command line, in whichever spelling it is."""
    return word.lstrip("-").split("=")[0].replace("-", "_")


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

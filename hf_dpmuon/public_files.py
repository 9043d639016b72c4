"""What of a saved model may leave: an allow-list of files, each of which is searched.

Receives a folder that ``DPTrainer.save_model`` wrote; returns the files of it that ``hub`` sends.

Guarantees:
    Nothing is returned but the files of ``PUSHED_FILES``, after their text was searched for local
    paths; and nothing at all unless the report states a guarantee of privacy that protects
    somebody. The report agrees with the ledger where there is one, the card with the report, and
    the weights are those that the report belongs to and no tensor more than their architecture
    has. The folder is only read.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd
from safetensors import SafetensorError, safe_open

from hf_dpmuon.ledger import LEDGER_FILE, PrivacyLedger
from hf_dpmuon.model_card import (
    BREAK,
    CARD_FILE,
    PLOT_FILE,
    REPORT_FILE,
    PrivacyReport,
    card_states,
    plain,
    read_report,
    verify_report,
    verify_weights,
)
from hf_dpmuon.models import unlike_architecture
from hf_dpmuon.rounding import percent_up, round_up, round_up_fixed

__all__ = ["PUSHED_FILES", "find_local_path", "public_files"]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# What may leave, and why.
PUSHED_FILES = {
    WEIGHTS: "the weights, which the mechanism made private",
    "model-?????-of-?????.safetensors": "the same in shards",
    INDEX: "which shard holds which weight",
    "config.json": "architecture and class names",
    "preprocessor_config.json": "how images are prepared",
    CARD_FILE: "the card, from the ledger and public facts",
    REPORT_FILE: "the privacy statement for machines",
    PLOT_FILE: "the plot of epsilon against steps",
}
# Class names are public, and may look like anything.
LABEL_KEYS = ("id2label", "label2id", "label_names")
ADDRESS = re.compile(r"https?://\S+")
LOCAL_PATH = re.compile(
    r"""(?<![\w/.<])/[\w.+@%-]+/[\w.+@%/\\-]+          # /home/miller/vit, also after a scheme
    | (?<![\w~])~(?:[A-Za-z_][\w.-]*)?/[\w.+@/-]+      # ~/vit, ~miller/vit
    | (?<![A-Za-z0-9])[A-Za-z]:[\\/]+[\w.+@/\\-]+      # C:\Users, C:/Users
    | (?<![\w\\])\\\\[\w.$-]+\\+[\w.$-]+               # \\server\share
    | (?<![\w/.])\.\.?[\\/][\w.+@/\\-]+                # ../patients
    | (?i:\b(?:file|smb|nfs|s3|gs):/+)\S+              # file:///home/miller/vit""",
    re.VERBOSE,
)
DATA_FILE = re.compile(  # patients/P001.png
    r"[/\\][^/\\\n]*\.(?:png|jpe?g|bmp|gif|tiff?|webp|dcm|dicom|nii|mha|mhd|nrrd|svs|ndpi|mrxs"
    r"|csv|tsv|xlsx?|parquet|arrow|feather|npy|npz|h5|hdf5|mat|jsonl|pkl|pickle|txt|tar|zip|tgz|gz"
    r"|db|sqlite)(?!\w)",
    re.IGNORECASE,
)
FORMATS = ("pt", "tf", "flax", "np")  # of safetensors
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_CHUNKS = {b"IHDR", b"PLTE", b"tRNS", b"gAMA", b"cHRM", b"sRGB", b"sBIT", b"pHYs"}
PNG_CHUNKS |= {b"IDAT", b"IEND"}  # pixels and their meaning: no text, no camera


def find_local_path(text: str) -> str | None:
    """Returns the first place of this machine or of its network that a text names, if any.

    >>> find_local_path("vit of /home/miller/vit"), find_local_path("https://huggingface.co/a/b")
    ('/home/miller/vit', None)
    """
    match = LOCAL_PATH.search(ADDRESS.sub("", text))
    return None if match is None else match[0]


def public_files(folder: Path) -> list[CommitOperationAdd]:
    """Return what of a folder may leave, as the commit takes it: all of it was checked.

    Raises:
        ValueError: If the folder holds no model with a guarantee of privacy, its files do not
            belong together, or a file names a local path or holds more than it should.
    """
    names = [
        path.name
        for path in sorted(folder.iterdir())
        if any(fnmatchcase(path.name, allowed) for allowed in PUSHED_FILES)
    ]
    for name in names:
        if not stat.S_ISREG((folder / name).lstat().st_mode):
            raise ValueError(
                f"{folder / name} is no regular file, and links are not followed; copy into its "
                "place what shall be pushed, or remove it."
            )
    for name in (REPORT_FILE, CARD_FILE, "config.json"):
        if name not in names:
            raise ValueError(
                f"{folder} has no {name}, and only a model that comes with its privacy statement "
                "is pushed; train it with DPTrainer and call save_model first."
            )
    report = _checked_report(folder)
    config = _parsed(folder / "config.json", (folder / "config.json").read_bytes())
    weights = [name for name in names if name.endswith(".safetensors")]
    _check_weights(folder, set(weights))
    labels = list(_class_names(config))
    files = [CommitOperationAdd(name, _checked_content(folder / name, labels)) for name in names]
    verify_weights(
        report,
        {f.path_in_repo: f.upload_info.sha256.hex() for f in files if f.path_in_repo in weights},
        folder,
    )
    _check_tensors(folder, weights)
    if not card_states(report, (folder / CARD_FILE).read_text(encoding="utf-8")):
        raise ValueError(
            f"{folder / CARD_FILE} does not state the guarantee of {REPORT_FILE} as it was "
            f"written there; save the model again, or run `hf-dpmuon card {folder} --output "
            f"{folder / CARD_FILE}`."
        )
    return files


def _checked_report(folder: Path) -> PrivacyReport:
    report = read_report(folder / REPORT_FILE)
    if (folder / LEDGER_FILE).exists():
        verify_report(report, PrivacyLedger.load(folder / LEDGER_FILE))
    if not report.guarantee:
        raise ValueError(
            f"{folder} holds a model without a guarantee of privacy (noise_seed was set, or "
            f"noise_multiplier={report.noise_multiplier:g} bounds no epsilon), which is not "
            "pushed; train it again without a seed and with more noise."
        )
    if not report.protects:
        raise ValueError(
            f"{folder} holds a model that protects nobody: epsilon="
            f"{round_up_fixed(report.epsilon)} at delta={round_up(report.delta)} bounds membership "
            f"at {report.membership_fpr * 100:g} % false alarms by "
            f"{percent_up(report.sharper_membership_tpr)} of the members; train it again with a "
            "larger noise_multiplier or a smaller target_epsilon."
        )
    return report


def _check_weights(folder: Path, found: set[str]) -> None:
    """Refuse weights that an earlier model left in the folder."""
    index = folder / INDEX
    own = {WEIGHTS}
    if index.is_file():
        own = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    if found != own:
        raise ValueError(
            f"{folder} holds the weights {', '.join(sorted(found)) or 'of no model'}, and its "
            f"model's are {', '.join(sorted(own))}; save the model into a new folder and push that."
        )


def _check_tensors(folder: Path, weights: list[str]) -> None:
    """Refuse tensors that the architecture does not have: a buffer may hold training data."""
    found: set[str] = set()
    for name in weights:
        with safe_open(folder / name, "pt") as file:
            found |= set(file.keys())
    try:
        unlike = unlike_architecture(folder, found)
    except Exception as error:  # whatever a library raises at a configuration of others
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{folder} holds weights that cannot be compared with the architecture in its "
            f"config.json, and so are not pushed ({reason}); save the model again with save_model."
        ) from error
    if unlike:
        raise ValueError(
            f"{folder} and the architecture in its config.json differ in the tensors "
            f"{', '.join(sorted(unlike))}, and a tensor beside the weights may hold data; register "
            "such buffers with persistent=False and save the model again."
        )


def _checked_content(path: Path, labels: list[str]) -> bytes | str:
    """What to send of a file: its text, read once and searched, or the path of its weights."""
    if path.suffix == ".safetensors":
        _check_metadata(path)
        return str(path)
    content = path.read_bytes()
    if path.suffix == ".json":
        found = next(_local_paths(_parsed(path, content), LABEL_KEYS), None)
    elif path.suffix == ".md":
        found = _local_path_in_card(content.decode("utf-8"), labels)
    else:
        found = None
        _check_png(path, content)
    if found is not None:
        raise ValueError(
            f"{path} names the local path {found!r}, which is not pushed; take it out and push "
            "the folder with hf_dpmuon.hub.push_folder."
        )
    return content


def _check_metadata(path: Path) -> None:
    try:
        with safe_open(path, "pt") as weights:
            metadata = weights.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}); save the model again.") from error
    extra = {name for name in metadata if name != "format" or metadata[name] not in FORMATS}
    if extra:
        raise ValueError(
            f"{path} holds {', '.join(sorted(extra))} beside the weights, which is not pushed; "
            "save the model again with save_model."
        )


def _check_png(path: Path, content: bytes) -> None:
    chunks, at = [], len(PNG_SIGNATURE)
    while at < len(content):
        chunks.append(content[at + 4 : at + 8])
        at += 12 + int.from_bytes(content[at : at + 4], "big")
    is_png = content.startswith(PNG_SIGNATURE) and chunks[-1:] == [b"IEND"]
    if not is_png or not PNG_CHUNKS.issuperset(chunks) or chunks.count(b"IEND") > 1:
        raise ValueError(
            f"{path} is no PNG of pixels alone, and nothing else is pushed under its name; remove "
            "it, or draw it again with plot_epsilon."
        )


def _parsed(path: Path, content: bytes) -> dict[str, Any]:
    try:
        return dict(**json.loads(content))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} must be a JSON object and is not ({error}); save the model again."
        ) from error


def _class_names(config: dict[str, Any]) -> Iterator[str]:
    for key in LABEL_KEYS:
        names = config.get(key) or []
        for name in [*names, *names.values()] if isinstance(names, dict) else names:
            if isinstance(name, str):
                yield name


def _local_path_in_card(text: str, labels: list[str]) -> str | None:
    for label in labels:
        if find_local_path(label) is not None:  # it stands in the card as well
            text = text.replace(plain(label), "")
    text = text.replace(BREAK, "")
    unescaped = re.sub(r"\\([^\w\s])", r"\1", text)
    return find_local_path(text) or find_local_path(unescaped)


def _local_paths(value: Any, exempt: tuple[str, ...] = ()) -> Iterator[str]:
    """Paths anywhere in a JSON value, but below the keys that are exempt at its top."""
    if isinstance(value, str):
        if (
            os.path.isabs(value)
            or find_local_path(value)
            or DATA_FILE.search(ADDRESS.sub("", value))
        ):
            yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _local_paths(key)
            if key not in exempt:
                yield from _local_paths(item)
    elif isinstance(value, list):
        for item in value:
            yield from _local_paths(item)

"""The one door to the Hub: a private repository, an allow-list of files, one commit.

Receives a folder that ``DPTrainer.save_model`` wrote and the name of a repository. Returns the
commit that holds the folder's public files.

Guarantees:
    * Of a folder nothing leaves but the files of ``PUSHED_FILES``, after their text was searched
      for local paths; and nothing at all unless its report states a guarantee of privacy.
    * The repository is private when it is made, before the first byte of a file is sent and again
      right before the commit, unless ``private=False`` was said.
    * A push is one commit or none. The folder is only read, and no remote file is deleted.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: of its own httpx
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
)
from safetensors import safe_open

from hf_dpmuon.model_card import CARD_FILE, PLOT_FILE, REPORT_FILE

__all__ = ["PUSHED_FILES", "PublicRepositoryError", "prepare_repository", "push_folder"]

logger = logging.getLogger(__name__)

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
LOCAL_PATH = re.compile(r"(?<![\w:/.<])(?:/[\w.+@-]+/|~/|[A-Za-z]:\\)[\w.+@/\\-]+")

TRANSIENT = (408, 429, 500, 502, 503, 504)
WAITS = (1.0, 2.0, 4.0)  # seconds before each further try

T = TypeVar("T")


class PublicRepositoryError(ValueError):
    """The repository is public, and nobody said that it may be."""


def prepare_repository(
    name: str, *, private: bool = True, token: str | None = None, revision: str | None = None
) -> str:
    """Make a repository for a model, or check that an existing one may be pushed to.

    Args:
        name: ``repository`` of the token's owner, or ``owner/repository``.
        private: Whether it is made private, and must be; its visibility is never changed.
        token: Of the Hub; by default that of ``HF_TOKEN`` or ``hf auth login``.
        revision: Branch to push to, which is made if it does not exist; by default ``main``.

    Returns:
        ``owner/repository``.

    Raises:
        PublicRepositoryError: If it exists and is public, but should be private.
        ValueError: If there is no token, no network or no permission.
    """
    if token is None and get_token() is None:
        raise ValueError(
            "push_to_hub needs a token of the Hub, and none was found; log in with `hf auth "
            "login`, set HF_TOKEN, or leave push_to_hub off."
        )
    api = HfApi(token=token)
    made = _ask(lambda: api.create_repo(name, private=private, exist_ok=True), name)
    _ask(lambda: _check_visibility(api, made.repo_id, private=private), name)
    if revision is not None:
        _ask(lambda: api.create_branch(made.repo_id, branch=revision, exist_ok=True), name)
    return str(made.repo_id)


def push_folder(
    folder: str | Path,
    name: str,
    *,
    private: bool = True,
    token: str | None = None,
    revision: str | None = None,
    message: str = "Upload a privately fine-tuned model",
) -> CommitInfo:
    """Push the public files of a saved model, as one commit.

    Args:
        folder: That ``save_model`` wrote; checkpoints in it stay behind.
        name: As in ``prepare_repository``, which is called first.
        private: As in ``prepare_repository``.
        token: As in ``prepare_repository``.
        revision: As in ``prepare_repository``.
        message: Of the commit.

    Returns:
        The commit.

    Raises:
        PublicRepositoryError: If the repository is or becomes public, but should be private.
        ValueError: If the folder holds no model with a guarantee of privacy, a file names a local
            path, or the Hub cannot be reached or refuses. The folder can be pushed again.
    """
    files = _public_files(Path(folder))
    repository = prepare_repository(name, private=private, token=token, revision=revision)
    api = HfApi(token=token)

    def commit() -> CommitInfo:
        _check_visibility(api, repository, private=private)
        api.preupload_lfs_files(repository, files, revision=revision, free_memory=False)
        _check_visibility(api, repository, private=private)  # an upload may have taken an hour
        return api.create_commit(repository, files, commit_message=message, revision=revision)

    pushed = _ask(commit, repository, folder=Path(folder))
    logger.info("Pushed %d files to %s.", len(files), repository)
    return pushed


# ---- what leaves ----


def _public_files(folder: Path) -> list[CommitOperationAdd]:
    _check_guarantee(folder)
    names = [
        path.name
        for path in sorted(folder.iterdir())
        if path.is_file() and any(fnmatchcase(path.name, allowed) for allowed in PUSHED_FILES)
    ]
    _check_weights(folder, {name for name in names if name.endswith(".safetensors")})
    return [CommitOperationAdd(name, _checked_content(folder / name)) for name in names]


def _check_guarantee(folder: Path) -> None:
    for name in (REPORT_FILE, CARD_FILE, "config.json"):
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder} has no {name}, and only a model that comes with its privacy statement "
                "is pushed; train it with DPTrainer and call save_model first."
            )
    if json.loads((folder / REPORT_FILE).read_text(encoding="utf-8")).get("guarantee") is not True:
        raise ValueError(
            f"{folder} holds a model without a guarantee of privacy (noise_seed was set, or "
            "noise_multiplier=0), which is not pushed; train it again without them."
        )


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


def _checked_content(path: Path) -> bytes | str:
    """What to send of a file: its text, read once and searched, or the path of its weights."""
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as weights:
            extra = set(weights.metadata() or {}) - {"format"}
        if extra:
            raise ValueError(
                f"{path} holds {', '.join(sorted(extra))} beside the weights, which is not pushed; "
                "save the model again with save_model."
            )
        return str(path)
    content = path.read_bytes()
    if path.suffix == ".json":
        found = next(_local_paths(json.loads(content)), None)
    elif path.suffix == ".md":
        match = LOCAL_PATH.search(content.decode("utf-8"))
        found = None if match is None else match[0]
    else:
        found = None
    if found is not None:
        raise ValueError(
            f"{path} names the local path {found!r}, which is not pushed; take it out and push "
            "the folder with hf_dpmuon.hub.push_folder."
        )
    return content


def _local_paths(value: Any) -> Iterator[str]:
    if isinstance(value, str) and (os.path.isabs(value) or LOCAL_PATH.search(value)):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in LABEL_KEYS:
                yield from _local_paths(item)
    elif isinstance(value, list):
        for item in value:
            yield from _local_paths(item)


# ---- what the Hub says ----


def _check_visibility(api: HfApi, repository: str, *, private: bool) -> None:
    if private and api.model_info(repository).private is not True:
        raise PublicRepositoryError(
            f"the repository {repository!r} is public, and hub_private_repo=False was not said; "
            "make it private, choose another hub_model_id, or set hub_private_repo=False."
        )


def _ask(request: Callable[[], T], repository: str, *, folder: Path | None = None) -> T:
    """Ask the Hub, again after a failure that may pass; put the final one into one sentence."""
    for wait in (*WAITS, None):
        try:
            return request()
        except PublicRepositoryError:
            raise
        except Exception as error:  # whatever the client raises, the folder can be pushed again
            if wait is None or not _may_pass(error):
                raise _explained(error, repository, folder) from error
            logger.warning("%s; asking the Hub again in %g s.", _reason(error), wait)
            time.sleep(wait)
    raise AssertionError("the last try returns or raises")


def _may_pass(error: Exception) -> bool:
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in TRANSIENT
    return isinstance(error, HTTPError)  # no answer at all


def _reason(error: Exception) -> str:
    said = str(error)
    if isinstance(error, HfHubHTTPError):
        response = error.response
        said = f"{response.status_code}: {error.server_message or response.reason_phrase}"
    return " ".join(said.split()).rstrip(". ") or type(error).__name__


def _explained(error: Exception, repository: str, folder: Path | None) -> ValueError:
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, HFValidationError):
        remedy = "set hub_model_id to 'owner/name' of letters, digits, '-', '_' and '.'"
    elif isinstance(error, OfflineModeIsEnabled):
        remedy = "set HF_HUB_OFFLINE=0"
    elif status in (401, 403):
        remedy = "log in with `hf auth login`, or set HF_TOKEN, as someone who may write there"
    elif isinstance(error, ValueError):
        remedy = "change what it names"
    else:
        remedy = "check the network and https://status.huggingface.co"
    again = "or leave push_to_hub off"
    if folder is not None:
        again = (
            f"and push again with hf_dpmuon.hub.push_folder({str(folder)!r}, {repository!r}): the "
            "folder is complete"
        )
    return ValueError(
        f"push_to_hub to {repository!r} at {HfApi().endpoint} failed ({_reason(error)}); "
        f"{remedy}, {again}."
    )

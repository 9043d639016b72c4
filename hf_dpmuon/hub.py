"""The one door to the Hub: a private repository and one commit of public files.

Receives a folder that ``DPTrainer.save_model`` wrote and the name of a repository. Returns the
commit that holds what ``public_files`` lets out of the folder.

Guarantees:
    * The repository is private when it is made, before the first byte of a file is sent, again
      right before the commit and after it, unless ``private=False`` was said.
    * A push is one commit or none. The folder is only read, and no remote file is deleted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from huggingface_hub import CommitInfo, HfApi, get_token
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: of its own httpx
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
)

from hf_dpmuon.public_files import public_files

__all__ = ["PublicRepositoryError", "prepare_repository", "push_folder"]

logger = logging.getLogger(__name__)

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
        token: That of the Hub; by default that of ``HF_TOKEN`` or ``hf auth login``.
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
        message: That of the commit.

    Returns:
        The commit.

    Raises:
        PublicRepositoryError: If the repository is or becomes public, but should be private.
        ValueError: If the folder holds no model with a guarantee of privacy, its files do not
            belong together, a file names a local path or holds more than it should, or the Hub
            cannot be reached or refuses. The folder can be pushed again.
    """
    files = public_files(Path(folder))
    repository = prepare_repository(name, private=private, token=token, revision=revision)
    api = HfApi(token=token)

    def commit() -> CommitInfo:
        _check_visibility(api, repository, private=private)
        api.preupload_lfs_files(repository, files, revision=revision, free_memory=False)
        _check_visibility(api, repository, private=private)  # an upload may have taken an hour
        return api.create_commit(repository, files, commit_message=message, revision=revision)

    pushed = _ask(commit, repository, folder=Path(folder))
    check = partial(_check_visibility, api, repository, private=private, pushed=True)
    _ask(check, repository, folder=Path(folder))
    logger.info("Pushed %d files to %s.", len(files), repository)
    return pushed


# ---- what the Hub says ----


def _check_visibility(api: HfApi, repository: str, *, private: bool, pushed: bool = False) -> None:
    if not private or api.model_info(repository).private is True:
        return
    if pushed:
        raise PublicRepositoryError(
            f"the repository {repository!r} became public while the model was pushed to it, and "
            "hub_private_repo=False was not said; make it private now at "
            f"{api.endpoint}/{repository}/settings, for others can see the model."
        )
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

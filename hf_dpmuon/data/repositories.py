"""A data set on the Hub becomes tables, or one sentence that says why it cannot be had.

Receives its id. Returns its splits, as `datasets` keeps them in its cache.

Guarantees:
    Not found, no permission, no network, no space and not readable are told apart, and what
    parsers say about rows is not passed on: it quotes them.
"""

import errno
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datasets

__all__ = ["read_repository"]

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def read_repository(
    name: str, *, config_name: str | None, revision: str | None
) -> "dict[str, datasets.Dataset]":
    """Return all splits.

    Raises:
        ValueError: They cannot be had.
    """
    import datasets

    try:
        builder = datasets.load_dataset_builder(name, name=config_name, revision=revision)
    except Exception as error:
        raise ValueError(_reason(error, name)) from None
    log = logging.getLogger("datasets")
    level = log.level
    log.setLevel(logging.CRITICAL)  # what it logs on the way to an error quotes rows as well
    try:
        builder.download_and_prepare()
        return dict(builder.as_dataset())
    except Exception as error:
        raise ValueError(_reason(error, name, has_rows=True)) from None
    finally:
        log.setLevel(level)


def _reason(error: Exception, name: str, *, has_rows: bool = False) -> str:
    """Return the sentence for an error of `datasets`, whose text may quote rows once it has any."""
    import datasets
    from huggingface_hub import errors

    http_error = errors.HTTPError  # type: ignore[attr-defined]  # of its httpx

    said = str(error).splitlines()[0] if str(error) and not has_rows else type(error).__name__
    text, causes = f"{error} {error.__cause__}", _chain(error)
    if any(isinstance(e, OSError) and e.errno == errno.ENOSPC for e in causes):
        return (
            f"data set {name!r} does not fit on the disk of the cache; make space, or set "
            "HF_HOME to a folder on another disk."
        )
    if "corresponds to no data" in text:
        return f"data set {name!r} has a split without rows; remove it or fill it."
    if any(isinstance(e, UnicodeDecodeError) for e in causes):
        return f"data set {name!r} is not encoded in UTF-8; save it as CSV UTF-8."
    if any(isinstance(e, errors.GatedRepoError) for e in causes) or "is a gated dataset" in text:
        return (
            f"data set {name!r} is gated: accept the terms on its page "
            f"{datasets.config.HF_ENDPOINT}/datasets/{name}, then {LOG_IN}."
        )
    answers = [e.response for e in causes if isinstance(e, errors.HfHubHTTPError)]
    codes = [a.status_code for a in answers if a is not None and a.status_code in (401, 403)]
    # A data set that is not found is a 401 too, to a client without a token.
    not_found = isinstance(error, datasets.exceptions.DatasetNotFoundError)
    if codes and not not_found:
        return (
            f"data set {name!r}: the Hub does not take the token of this computer, which is "
            f"wrong, expired or may not read it (HTTP {codes[0]}); {LOG_IN} to one that may."
        )
    if (
        isinstance(error, ConnectionError)
        or (isinstance(error, http_error) and not isinstance(error, errors.HfHubHTTPError))
        or "LocalEntryNotFoundError" in text
    ):
        return (
            f"data set {name!r} is no local path and the Hub cannot be reached, since there is "
            "no network or HF_HUB_OFFLINE is set; go online once, or name a local copy."
        )
    if not_found and "Revision" not in text:
        return (
            f"data set {name!r} is no local path and was not found on the Hub; check its "
            f"spelling, and if it is private, {LOG_IN}."
        )
    if "scripts are no longer supported" in text:
        return (
            f"data set {name!r} is loaded by a script of its own, which is no longer run; try "
            "the Hub's conversion with revision='refs/convert/parquet', or name a local copy."
        )
    return f"data set {name!r} cannot be loaded from the Hub ({said.rstrip('.')})."


def _chain(error: BaseException | None) -> list[BaseException]:
    """Return an error, what it was raised from, and so on."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found

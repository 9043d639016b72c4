"""The secret keys of a run's starts, in a folder that nothing uploads.

Receives the key of each start and the circumstances under which it draws; keeps them beside the
output folder, not in it, since libraries and people upload output folders whole.

Guarantees:
    The folder is readable by its owner only. A key is on disk before the first draw made with it,
    and serves steps that the ledger already holds, never new ones.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_dpmuon.files import FOR_OWNER, write_json

__all__ = ["SecretKeys", "StartKey"]

KEYS_FILE = "keys.json"
SUFFIX = ".secrets"


@dataclass(frozen=True)
class StartKey:
    """What a start of a run drew with.

    Attributes:
        key: The secret from which sampling, noise, dropout and augmentation are made.
        circumstances: The public facts on which the rounding of its sums depends.
    """

    key: bytes
    circumstances: dict[str, str]


class SecretKeys:
    """The keys of all starts of the run in an output folder.

    Args:
        output_dir: The output folder, which need not exist. ``folder`` is beside it, with the
            suffix ``.secrets``. It may be deleted at any time: a run that is resumed without it
            draws the steps after its checkpoint afresh, and counts them again.
    """

    def __init__(self, output_dir: Path) -> None:
        resolved = output_dir.resolve()
        if not resolved.name:
            raise ValueError(
                f"output_dir={str(output_dir)!r} has no folder beside it for secret keys; choose a "
                "folder below it."
            )
        if resolved.suffix == SUFFIX:
            raise ValueError(
                f"output_dir={str(output_dir)!r} must not end in {SUFFIX}, the name of the "
                "secret keys of another run."
            )
        self.folder = resolved.with_name(f"{resolved.name}{SUFFIX}")

    def of(self, start: str) -> StartKey | None:
        """Return the key of a start, by its chain value in the ledger; None if it is gone."""
        kept = self._read()["starts"].get(start)
        if kept is None:
            return None
        return StartKey(bytes.fromhex(kept["key"]), kept["circumstances"])

    def fits(self, partition: bytes) -> bool:
        """Return whether earlier starts had these privacy units, as far as is known."""
        return self._read()["partition"] in (None, _digest(partition))

    def add(self, start: str, key: StartKey, *, partition: bytes, is_first: bool) -> None:
        """Keep the key of a start that is about to draw.

        Args:
            start: Its chain value in the ledger.
            key: Its key.
            partition: Which rows are a unit.
            is_first: Whether the ledger is new; keys of another run in its place are dropped.
        """
        if self.folder.is_symlink():
            raise ValueError(
                f"{self.folder} is a link, so nobody can say who may read what it leads to; remove "
                "it, or choose another output_dir."
            )
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(self.folder, 0o700)
        starts = {} if is_first else self._read()["starts"]
        starts[start] = {"key": key.key.hex(), "circumstances": key.circumstances}
        kept = {"partition": _digest(partition), "starts": starts}
        write_json(self.folder / KEYS_FILE, kept, mode=FOR_OWNER)

    def _read(self) -> Mapping[str, Any]:
        path = self.folder / KEYS_FILE
        if not path.is_file():
            return {"partition": None, "starts": {}}
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            assert kept.keys() == {"partition", "starts"}
        except (ValueError, AssertionError, AttributeError) as error:
            raise ValueError(
                f"{path} is damaged; delete {self.folder}: steps after the checkpoint are then "
                "drawn afresh and counted again."
            ) from error
        return dict(kept)


def _digest(partition: bytes) -> str:
    return hashlib.sha256(partition).hexdigest()

"""Files that are whole, or as they were before.

Receives a path and its content; writes it under a temporary name, flushes it to the disk and
renames it. This is the only place that does.

Guarantees:
    A reader never sees half a file, also after a crash.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["sync_folder", "write_json", "write_whole"]

FOR_ALL, FOR_OWNER = 0o644, 0o600


def write_whole(path: Path, content: bytes, *, mode: int = FOR_ALL) -> None:
    """Write a file, replacing what is there.

    Args:
        path: The file; its folder exists.
        content: All of it.
        mode: Who may read it, once it has its name; before that its owner only.

    Raises:
        OSError: It could not be written; what was there still is.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    sync_folder(path.parent)


def write_json(path: Path, values: Mapping[str, Any], *, mode: int = FOR_ALL) -> None:
    """Write values as JSON; see ``write_whole``."""
    write_whole(path, json.dumps(values, indent=2).encode(), mode=mode)


def sync_folder(folder: Path) -> None:
    """Put a new name in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

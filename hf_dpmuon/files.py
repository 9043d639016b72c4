"""Files that are whole or as they were before.

Receives a path and its content; writes it under a temporary name and renames.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["write_json"]


def write_json(path: Path, values: Mapping[str, Any], *, secret: bool = False) -> None:
    """Write under a temporary name and rename, so that a reader never sees half a file."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(values, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o600 if secret else 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise

"""Columns of a table are found, and read without decoding any other.

Receives rows as `datasets` holds them. Returns stored values and names of columns.

Guarantees:
    A message names columns, row numbers and counts, never a value: values may be patient ids.
"""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets

__all__ = [
    "column_values",
    "find_image_column",
    "first_rows",
    "holds_images",
    "image_paths",
    "natural_order",
    "only",
    "quoted",
    "require_column",
]

ROWS_SHOWN = 5  # row numbers that a message names
PATHS_AT_ONCE = 256  # rows of a split of selected rows are copied, with their images


def column_values(split: "datasets.Dataset", name: str) -> list[Any]:
    """Return the stored values of a column, without decoding any other."""
    values: list[Any] = split.select_columns([name]).with_format("arrow")[:][name].to_pylist()
    return values


def image_paths(split: "datasets.Dataset", name: str) -> list[str | None]:
    """Return the stored path of every image of a column, without reading the bytes of any."""
    import pyarrow.compute  # type: ignore[import-untyped]

    batches = split.select_columns([name]).with_format("arrow").iter(batch_size=PATHS_AT_ONCE)
    return [
        path
        for batch in batches
        for path in pyarrow.compute.struct_field(batch[name], "path").to_pylist()
    ]


def natural_order(names: Iterable[str]) -> list[str]:
    """Return class names in the one order of folders and tables: 0, 1, 2, 10; a2, a10."""

    def key(name: str) -> tuple[list[str | int], str]:
        parts = re.split("([0-9]+)", name)  # every second one is a number
        return [int(part) if i % 2 else part for i, part in enumerate(parts)], name

    return sorted(names, key=key)


def first_rows(rows: Iterable[int]) -> str:
    """Return the first few row numbers, for a message."""
    return ", ".join(map(str, sorted(rows)[:ROWS_SHOWN]))


def quoted(names: Iterable[str]) -> str:
    """Return names as a list that can be copied."""
    return ", ".join(map(repr, names))


def require_column(splits: "dict[str, datasets.Dataset]", name: str, *, argument: str) -> None:
    """Refuse a column that a split lacks.

    Raises:
        ValueError: A split has no such column.
    """
    for split_name, split in splits.items():
        if name not in split.column_names:
            raise ValueError(
                f"{argument}={name!r} is missing from the split {split_name!r}; choose from "
                f"{quoted(split.column_names)}, and give all splits the same columns."
            )


def only(candidates: list[str], *, kind: str, columns: list[str]) -> str:
    """Return the one candidate.

    Raises:
        ValueError: There is none, or more than one.
    """
    if len(candidates) != 1:
        found = f"{len(candidates)} columns look like" if candidates else "no column looks like"
        raise ValueError(f"{found} the {kind}s; set {kind}_column to one of {quoted(columns)}.")
    return candidates[0]


def holds_images(feature: Any) -> bool:
    """Whether a column is one of images, or was one before a library wrote it that knows none."""
    import datasets

    is_struct = isinstance(feature, dict) and set(feature) == {"bytes", "path"}
    return is_struct or isinstance(feature, datasets.Image)


def find_image_column(splits: "dict[str, datasets.Dataset]", name: str | None) -> str:
    """Return the name of the column of images: the given one, or the only one of its type.

    Args:
        splits: The split to train on first.
        name: As the user gave it.

    Raises:
        ValueError: The column is missing, or more than one may be meant.
    """
    train = next(iter(splits.values()))
    if name is None:
        candidates = [column for column, feature in train.features.items() if holds_images(feature)]
        name = only(candidates, kind="image", columns=train.column_names)
    require_column(splits, name, argument="image_column")
    return name

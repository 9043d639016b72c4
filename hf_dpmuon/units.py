"""Privacy units: which rows of a data set belong to one person.

Receives ids as tables hold them; returns a partition of the rows. No id is kept.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Id", "PrivacyUnits", "canonical_id", "plain_ids"]

IntArray = npt.NDArray[np.int64]
Id = str | int  # of a privacy unit

# Blanks, control and format characters, and what else Unicode lets a display leave out.
_UNSEEN = {"Zs", "Zl", "Zp", "Cc", "Cf"}
_ASCII_UNSEEN = dict.fromkeys([*range(33), 127])  # the same of ASCII
_IGNORABLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]"
)
# What tables hold in place of an id, in canonical form.
_MISSING = {
    *("nan", "nat", "none", "null", "nil", "n/a", "n.a.", "na", "<na>", "#n/a", "#na"),
    *("unknown", "unk", "missing", "undefined"),
}


def canonical_id(unit: Id) -> str:
    """Returns what two spellings of one id have in common.

    Case, blanks and invisible characters do not count, nor do the forms in which Unicode has one
    character (NFKC), nor leading zeros where an id is all digits.
    """
    text = str(unit)
    while (folded := _fold(text)) != text:  # what is left may compose anew
        text = folded
    if text.isdecimal():
        return "".join(str(unicodedata.decimal(digit)) for digit in text).lstrip("0") or "0"
    return text


def _fold(text: str) -> str:
    if text.isascii():
        return text.lower().translate(_ASCII_UNSEEN)
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return "".join(c for c in _IGNORABLE.sub("", text) if unicodedata.category(c) not in _UNSEEN)


@runtime_checkable
class _Array(Protocol):
    """An array of numpy, torch, Arrow or pandas."""

    def tolist(self) -> Any: ...


def plain_ids(ids: object, *, argument: str = "ids") -> list[Id | None]:
    """Returns ids as plain text or plain whole numbers, None where one is missing.

    Missing are None, NaN, blanks, text without a letter or a digit, and words such as "unknown" or
    "n/a". Blanks around an id are dropped. Whole floats are numbers: a column of integers with gaps
    holds them.

    Args:
        ids: A sequence, an array or a tensor, with one id per row.
        argument: What a message calls them.

    Raises:
        ValueError: An id is neither text nor a whole number that its type holds exactly, or some
            are text and some are numbers.
    """
    # Elements of a tensor are objects that equal nothing but themselves.
    values = ids.tolist() if isinstance(ids, _Array) else ids
    if isinstance(values, str | bytes | bytearray) or not isinstance(values, Sequence):
        raise ValueError(
            f"{argument} is of type {type(ids).__name__}; give a list, an array or a tensor with "
            "one id per row."
        )
    exact_below = _exact_below(ids)
    plain: list[Id | None] = []
    kinds: set[str] = set()
    inexact = 0
    for value in values:
        limit = exact_below
        if isinstance(value, np.generic | np.ndarray | Tensor) and value.ndim == 0:
            limit = min(limit, _exact_below(value))
            value = value.item()
        unit: Id | None = None
        if isinstance(value, str):
            text = value.strip()
            unit = None if _says_missing(text) else text
        elif isinstance(value, int) and not isinstance(value, bool):
            unit = int(value)
        elif isinstance(value, float):
            if value.is_integer() and abs(value) < limit:
                unit = int(value)
            else:
                inexact += value == value
        elif value is not None:
            kinds.add(type(value).__name__)
        if unit is not None:
            kinds.add(type(unit).__name__)
        plain.append(unit)
    if len(kinds) > 1 or not kinds <= {"str", "int"}:
        raise ValueError(
            f"{argument} holds values of type {', '.join(sorted(kinds))}; write all ids as str or "
            "all as int."
        )
    if inexact:
        raise ValueError(
            f"{argument} holds {inexact} floats that are no exact whole numbers; write all ids as "
            "str or all as int."
        )
    return plain


def _exact_below(holder: object) -> float:
    """Returns up to where a float of this type tells each whole number from the next."""
    if isinstance(holder, Tensor) and holder.is_floating_point():
        return 2 / torch.finfo(holder.dtype).eps
    if isinstance(holder, np.ndarray | np.generic) and holder.dtype.kind == "f":
        return 2 / float(np.finfo(holder.dtype).eps)
    return 2.0**53


def _says_missing(text: str) -> bool:
    form = canonical_id(text)
    return form in _MISSING or not any(map(str.isalnum, form))


@dataclass(frozen=True, eq=False)
class PrivacyUnits:
    """Which rows of a data set belong to each privacy unit; a partition of all rows.

    Attributes:
        name: What a unit is, such as "patient".
        rows_of_unit: For each unit its rows, int64, at least one; each of the rows 0, 1, ... of
            the data set is in exactly one unit.

    Raises:
        ValueError: ``rows_of_unit`` is no such partition: a row of two units would be counted
            twice, and one of none would be protected by nothing.
    """

    name: str
    rows_of_unit: tuple[IntArray, ...]

    def __post_init__(self) -> None:
        if not self.rows_of_unit or not all(
            isinstance(rows, np.ndarray) and rows.dtype == np.int64 and rows.ndim == 1 and rows.size
            for rows in self.rows_of_unit
        ):
            raise ValueError(
                "rows_of_unit must be one int64 array of at least one row for each unit; make it "
                "with PrivacyUnits.from_ids."
            )
        rows = np.concatenate(self.rows_of_unit)
        if not np.array_equal(np.sort(rows), np.arange(len(rows))):
            raise ValueError(
                f"rows_of_unit has {len(rows)} rows in all, so each of 0 to {len(rows) - 1} must "
                "be in exactly one unit; make it with PrivacyUnits.from_ids."
            )

    @classmethod
    def from_ids(
        cls, ids: Sequence[object] | npt.NDArray[Any] | Tensor, *, name: str
    ) -> PrivacyUnits:
        """Groups rows that have the same id.

        Args:
            ids: One per row, all str or all int. Only which are equal is used; no id is kept.
            name: What a unit is, such as "patient".

        Raises:
            ValueError: An id is of another type, or missing (None, NaN, blank, or a word for it):
                such rows would be one unit or many. Or two ids are the same but for their spelling:
                one person would be two units.
        """
        plain = plain_ids(ids)
        rows: dict[Id, list[int]] = {}
        for row, unit in enumerate(plain):
            if unit is not None:
                rows.setdefault(unit, []).append(row)
        missing = len(plain) - sum(map(len, rows.values()))
        if missing:
            raise ValueError(
                f"{missing} of {len(plain)} rows have no {name} id, so nobody can say whose they "
                "are; fill the ids in, or remove these rows."
            )
        respelled = len(rows) - len(set(map(canonical_id, rows)))
        if respelled:
            raise ValueError(
                f"{respelled} {name} ids differ from others only in case, blanks, leading zeros or "
                "invisible characters; write each id in one way."
            )
        return cls(name, tuple(np.array(of_unit, dtype=np.int64) for of_unit in rows.values()))

    @property
    def num_rows(self) -> int:
        """Rows of all units together."""
        return sum(map(len, self.rows_of_unit))

    @property
    def largest(self) -> int:
        """Rows of the unit that has most of them."""
        return max(map(len, self.rows_of_unit))

    def to_bytes(self) -> bytes:
        """The partition, so that two can be compared by a digest."""
        rows = self.rows_of_unit
        return b"".join(len(of_unit).to_bytes(8, "big") + of_unit.tobytes() for of_unit in rows)

    def __len__(self) -> int:
        return len(self.rows_of_unit)

"""Rows of one person stay together: units of privacy, and splits that respect them.

Receives a column of ids. Returns which rows belong together; the ids themselves go nowhere.

Guarantees:
    * A row without an id, or a unit in both splits, is refused, with counts and no id.
    * A part held out for evaluation depends, for each unit, on that unit alone: whether one person
      is in the data decides nothing about where the others go.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_dpmuon.data.columns import column_values, require_column
from hf_dpmuon.sampling import PrivacyUnits

if TYPE_CHECKING:
    import datasets

__all__ = [
    "RepeatedUnit",
    "find_repeated_unit",
    "group_rows",
    "held_out",
    "repeated_unit_notes",
    "unit_ids",
    "unit_name",
]

# What has ids in medical tables, the person first.
PERSONS = ("patient", "person", "subject", "participant", "individual")
UNIT_NAMES = (
    *PERSONS,
    *("case", "study", "exam", "lesion", "eye"),
)
ID_SUFFIXES = ("id", "ids", "uid", "no", "nr", "num", "number", "key", "code")


@dataclass(frozen=True)
class RepeatedUnit:
    """A column that looks like ids, some of which own several training images.

    Attributes:
        column: Name of the column.
        name: What a unit is, such as "patient".
        largest: Training images of the unit that has most of them.
        pattern: Where the ids are part of a longer text: what finds them.
    """

    column: str
    name: str
    largest: int
    pattern: str | None = None


def unit_name(column: str) -> str:
    """Return what the ids of a column name: "patient" for patient_id, PatientID or patient.

    A column of another name is its own unit.
    """
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", column).lower()
    head, *tail = re.split(r"[^a-z0-9]+", words)
    known = head in UNIT_NAMES and (not tail or (len(tail) == 1 and tail[0] in ID_SUFFIXES))
    return head if known else column


def unit_ids(
    splits: "dict[str, datasets.Dataset]",
    column: str,
    *,
    pattern: str | None,
    other_columns: Sequence[str],
) -> dict[str, list[Hashable]]:
    """Return the id of every row of every split.

    Args:
        splits: The split to train on first.
        column: Name of the column of ids.
        pattern: Regular expression whose one named group is the id in a longer text.
        other_columns: Columns of images and labels, which are no ids.

    Raises:
        ValueError: The column is missing, not one of ids, or has rows without an id.
    """
    if column in other_columns:
        raise ValueError(
            f"privacy_unit_column={column!r} is a column of images or labels; name the one that "
            "says whose image a row is."
        )
    require_column(splits, column, argument="privacy_unit_column")
    kinds = {_kind(split, column) for split in splits.values()}
    if len(kinds) > 1 or None in kinds:
        types = ", ".join(f"{split.features[column]} in {name!r}" for name, split in splits.items())
        raise ValueError(
            f"privacy_unit_column={column!r} holds {types}; name a column with one id per row, of "
            "the same type (string or integer) in all splits."
        )
    ids = {name: _stripped(split, column) for name, split in splits.items()}
    if pattern is not None:
        within = _compiled(pattern)
        ids = {name: [_part(within, i) for i in of_rows] for name, of_rows in ids.items()}
    for name, of_rows in ids.items():
        missing = sum(map(_is_missing, of_rows))
        if missing:
            raise ValueError(
                f"privacy_unit_column={column!r} has no id{_matching(pattern)} in {missing} of "
                f"{len(of_rows)} rows of the split {name!r}, so nobody can say whose they are; "
                "fill the ids in, or remove these rows."
            )
    return ids


def group_rows(
    train: Sequence[Hashable],
    evaluation: Sequence[Hashable] | None,
    *,
    column: str,
    pattern: str | None,
) -> PrivacyUnits:
    """Return the units of the training rows, called by the pattern's group or by the column.

    Raises:
        ValueError: A unit is in the evaluation rows too.
    """
    known = set(train)
    shared = [i for i in evaluation or () if i in known]
    if shared:
        raise ValueError(
            f"privacy_unit_column={column!r}: {len(set(shared))} units are in the train and the "
            f"evaluation split, with {len(shared)} evaluation rows; split the data by unit, or "
            "leave eval_split unset and set eval_fraction."
        )
    name = unit_name(column) if pattern is None else next(iter(_compiled(pattern).groupindex))
    return PrivacyUnits.from_ids(train, name=name)


def find_repeated_unit(
    train: "datasets.Dataset", *, other_columns: Sequence[str]
) -> RepeatedUnit | None:
    """Return the first column of ids that repeat themselves, a person's before a lesion's.

    Ids that stand in a longer text, such as a path, are looked for last.
    """
    names = {
        column: unit_name(column)
        for column in train.column_names
        if column not in other_columns and unit_name(column).lower() in UNIT_NAMES
    }
    for column in sorted(names, key=lambda column: UNIT_NAMES.index(names[column].lower())):
        if _kind(train, column) is not None:
            counts = Counter(i for i in _stripped(train, column) if not _is_missing(i))
            largest = max(counts.values(), default=0)
            if largest > 1:
                return RepeatedUnit(column, names[column], largest)
    for column in train.column_names:
        if column not in other_columns and _kind(train, column) == "text":
            texts = _stripped(train, column)
            for name in PERSONS:
                pattern = f"(?i)(?P<{name}>{name}[-_ ]?[0-9]+)"
                within = re.compile(pattern)
                counts = Counter(part for text in texts if (part := _part(within, text)))
                largest = max(counts.values(), default=0)
                if largest > 1 and counts.total() == len(texts):
                    return RepeatedUnit(column, name, largest, pattern)
    return None


def repeated_unit_notes(
    repeated: RepeatedUnit | None,
    train: "datasets.Dataset",
    evaluation: "datasets.Dataset | None",
) -> list[str]:
    """Return what is not protected, and not measured well, as long as units are single rows."""
    if repeated is None:
        return []
    column, name, pattern = repeated.column, repeated.name, repeated.pattern
    how = f"--privacy_unit_column {column}"
    if pattern is not None:
        how += f" --privacy_unit_pattern '{pattern}'"
    notes = [
        f"the column {column!r} repeats itself, up to {repeated.largest} training images per "
        f"{name}, but each image is protected alone; to protect each {name}, set "
        f"{how}"
    ]
    if evaluation is not None and column in evaluation.column_names and _kind(evaluation, column):
        owners = [_stripped(split, column) for split in (train, evaluation)]
        if pattern is not None:
            owners = [[_part(re.compile(pattern), i) for i in of_split] for of_split in owners]
        known = {i for i in owners[0] if not _is_missing(i)}
        shared = sum(i in known for i in owners[1])
        if shared:
            notes.append(
                f"{shared} of {len(evaluation)} evaluation images share their {name} with training "
                "images; metrics on them say little"
            )
    return notes


def held_out(keys: Sequence[Hashable], fraction: float) -> tuple[list[int], list[int]]:
    """Divide rows into those to train on and those to evaluate on, by a public hash of their keys.

    Args:
        keys: One per row: the id of its unit, or a digest of its pixels. Rows of equal keys stay
            together.
        fraction: Expected share of the units that is held out, in (0, 1).

    Raises:
        ValueError: One of the two parts is empty.
    """
    parts: tuple[list[int], list[int]] = ([], [])
    for row, key in enumerate(keys):
        material = key if isinstance(key, bytes) else str(key).encode()
        digest = hashlib.blake2b(material, digest_size=8, person=b"evaluation").digest()
        parts[int.from_bytes(digest, "big") < fraction * 2**64].append(row)
    if not all(parts):
        raise ValueError(
            f"eval_fraction={fraction} leaves one of the two parts empty; choose another in (0, 1) "
            "or bring more data."
        )
    return parts


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        within = re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"privacy_unit_pattern={pattern!r} is no regular expression ({error})."
        ) from error
    if within.groups != 1 or len(within.groupindex) != 1:
        raise ValueError(
            f"privacy_unit_pattern={pattern!r} must have exactly one group, named for what it "
            "finds, such as (?P<patient>patient[0-9]+)."
        )
    return within


def _part(within: re.Pattern[str], text: Hashable) -> str | None:
    found = within.search(text) if isinstance(text, str) else None
    return found and found[1]


def _matching(pattern: str | None) -> str:
    return "" if pattern is None else f" that matches privacy_unit_pattern={pattern!r}"


def _kind(split: "datasets.Dataset", column: str) -> str | None:
    """Return whether ids are text or numbers, or None for what is no id."""
    import datasets

    feature = split.features[column]
    if isinstance(feature, datasets.ClassLabel):
        return "number"
    if not isinstance(feature, datasets.Value):
        return None
    if feature.dtype.endswith("string"):
        return "text"
    return "number" if feature.dtype.startswith(("int", "uint", "float")) else None


def _stripped(split: "datasets.Dataset", column: str) -> list[Hashable]:
    return [i.strip() if isinstance(i, str) else i for i in column_values(split, column)]


def _is_missing(unit: Hashable) -> bool:
    return unit is None or unit != unit or unit == ""

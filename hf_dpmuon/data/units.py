"""Rows of one person stay together: units of privacy, and splits that respect them.

Receives a column of ids, or of images whose paths hold ids. Returns which rows belong together; ids
and paths themselves go nowhere.

Guarantees:
    * A row without an id, a unit in both splits, or one id in two spellings is refused, with counts
      and no id.
    * A part held out for evaluation depends, for each unit, on that unit alone: whether one person
      is in the data decides nothing about where the others go.
"""

import hashlib
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_dpmuon.data.columns import column_values, image_paths, require_column
from hf_dpmuon.units import Id, PrivacyUnits, canonical_id, plain_ids

if TYPE_CHECKING:
    import datasets

__all__ = [
    "RepeatedUnit",
    "find_repeated_unit",
    "group_rows",
    "held_out",
    "looks_like_ids",
    "repeated_unit_notes",
    "unit_ids",
    "unit_name",
]

# What has ids in medical tables, the person first.
PERSONS = ("patient", "person", "subject", "participant", "individual", "donor")
# Ids of persons too, but a path has them of computers, and the last ones say nothing of the unit.
IN_COLUMNS_ONLY = ("client", "user")
NUMBERS = ("mrn", "pid")
UNIT_NAMES = (
    *(*PERSONS, *NUMBERS, *IN_COLUMNS_ONLY),
    *("case", "study", "exam", "lesion", "eye"),
)
ID_SUFFIXES = ("id", "ids", "uid", "no", "nr", "num", "number", "key", "code")
# Where `datasets` and the Hub's client keep copies: what comes before says nothing of an image.
OF_A_COPY = re.compile(
    r"\A(?:.*/snapshots/[0-9a-f]{40}|.*/downloads/extracted/[0-9a-f]+|hf://datasets/[^/]+/[^/]+)/"
)
ID_COLUMN = re.compile(rf"({'|'.join(UNIT_NAMES)})[^a-z0-9]*({'|'.join(ID_SUFFIXES)})?")


@dataclass(frozen=True)
class RepeatedUnit:
    """A column that looks like ids, some of which own several training images.

    Attributes:
        column: Name of the column of ids, or of images whose paths hold them.
        name: What a unit is, such as "patient".
        largest: Training images of the unit that has most of them, as far as ids are known.
        pattern: Where the ids are part of a longer text: what finds them.
        unknown: Training images without an id.
    """

    column: str
    name: str
    largest: int
    pattern: str | None = None
    unknown: int = 0


def unit_name(column: str) -> str:
    """Return what the ids of a column name: "patient" for patient_id, PatientID or patientid.

    A column of another name is its own unit.
    """
    known = _known_name(column)
    return column if known is None or known in NUMBERS else known


def looks_like_ids(column: str) -> bool:
    """Return whether a column is called after the ids of somebody or something.

    A bare "lesion" or "eye" may as well be what is seen.
    """
    found = ID_COLUMN.fullmatch(column.lower())
    return found is not None and (
        found[2] is not None or found[1] in (*PERSONS, *NUMBERS, *IN_COLUMNS_ONLY)
    )


def unit_ids(
    splits: "dict[str, datasets.Dataset]",
    column: str,
    *,
    pattern: str | None,
    other_columns: Sequence[str],
    roots: Sequence[str] = (),
) -> dict[str, list[Id]]:
    """Return the id of every row of every split.

    Args:
        splits: The split to train on first.
        column: Name of the column of ids, or of images, as opened by `datasets.Image`, whose paths
            hold the ids.
        pattern: Regular expression whose one named group is the id in a longer text.
        other_columns: Columns of images and labels, which are no ids.
        roots: Folders of the data set, which are cut off where a text begins with one.

    Raises:
        ValueError: The column is missing, not one of ids, or has rows without an id, among which
            are those that say "unknown" or the like.
    """
    train = next(iter(splits.values()))
    if column in train.column_names and _kind(train, column) == "path":
        if pattern is None:
            raise ValueError(
                f"privacy_unit_column={column!r} is the column of images; set privacy_unit_pattern "
                "too, to what finds the id in the path of each, such as "
                "(?P<patient>patient[0-9]+), or name the column that says whose image a row is."
            )
    elif column in other_columns:
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
    found = {name: _ids(split, column, pattern, roots) for name, split in splits.items()}
    ids = {name: [i for i in of_rows if i is not None] for name, of_rows in found.items()}
    for name, of_rows in found.items():
        missing = len(of_rows) - len(ids[name])
        if missing:
            remedy = (
                "fill the ids in" if pattern is None else "mend the pattern to find one in each"
            )
            raise ValueError(
                f"privacy_unit_column={column!r} has no id{_matching(pattern)} in {missing} of "
                f"{len(of_rows)} rows of the split {name!r}, so nobody can say whose they are; "
                f"{remedy}, or remove these rows."
            )
    return ids


def group_rows(
    train: Sequence[Id],
    evaluation: Sequence[Id] | None,
    *,
    column: str,
    pattern: str | None,
) -> PrivacyUnits:
    """Return the units of the training rows, called by the pattern's group or by the column.

    Raises:
        ValueError: A unit is in the evaluation rows too, however its id is spelled; an id is
            spelled in two ways; or there is only one unit.
    """
    known = set(map(canonical_id, train))
    shared = [form for form in map(canonical_id, evaluation or ()) if form in known]
    if shared:
        raise ValueError(
            f"privacy_unit_column={column!r}: {len(set(shared))} units are in the train and the "
            f"evaluation split, with {len(shared)} evaluation rows (the spelling of ids aside); "
            "split the data by unit, or leave eval_split unset and set eval_fraction."
        )
    name = unit_name(column) if pattern is None else next(iter(_compiled(pattern).groupindex))
    units = PrivacyUnits.from_ids(train, name=name)
    if len(units) == 1:
        raise ValueError(
            f"privacy_unit_column={column!r} holds one unit only{_matching(pattern)}, but at least "
            "two are needed; name a column that tells one unit from another."
        )
    return units


def find_repeated_unit(
    train: "datasets.Dataset", *, other_columns: Sequence[str], roots: Sequence[str] = ()
) -> RepeatedUnit | None:
    """Return the first column of ids that repeat themselves, a person's before a lesion's.

    Ids that stand in a longer text, such as the path of an image, are looked for last, and need
    only be in half of the rows: one stray row must not hide what the others show.
    """
    others = [column for column in train.column_names if column not in other_columns]
    names = {column: known for column in others if (known := _known_name(column)) is not None}
    for column in sorted(names, key=lambda column: UNIT_NAMES.index(names[column])):
        counts, unknown = _images_per_unit(train, column)
        largest = max(counts.values(), default=0)
        if largest > 1:
            return RepeatedUnit(column, unit_name(column), largest, unknown=unknown)
    paths = [column for column in train.column_names if _kind(train, column) == "path"]
    for column in (*(column for column in others if _kind(train, column) == "text"), *paths):
        texts = _texts(train, column)
        for name in PERSONS:
            pattern = f"(?i){name}[-_ ]?(?P<{name}>[0-9]+)"
            counts, unknown = _count(_parts(texts, pattern, column, roots))
            largest = max(counts.values(), default=0)
            if largest > 1 and counts.total() >= unknown:
                return RepeatedUnit(column, name, largest, pattern, unknown)
    return None


def repeated_unit_notes(
    repeated: RepeatedUnit | None,
    train: "datasets.Dataset",
    evaluation: "datasets.Dataset | None",
    roots: Sequence[str] = (),
) -> list[str]:
    """Return what is not protected, and not measured well, as long as units are single rows."""
    if repeated is None:
        return []
    column, name, pattern = repeated.column, repeated.name, repeated.pattern
    how = f"--privacy_unit_column {shlex.quote(column)}"
    if pattern is not None:
        how += f" --privacy_unit_pattern {shlex.quote(pattern)}"
    if repeated.unknown:
        how += f", after the ids of {repeated.unknown} images are filled in or these are removed"
        if pattern is not None:
            how += ", or the pattern is widened to find them"
    where = f"the column {column!r} repeats itself"
    if _kind(train, column) == "path":
        where = f"the paths of the images in the column {column!r} name each {name}"
    notes = [
        f"{where}, up to {repeated.largest} training images per "
        f"{name}, but each image is protected alone; to protect each {name}, set "
        f"{how}"
    ]
    if evaluation is not None and column in evaluation.column_names:
        known, _ = _images_per_unit(train, column, pattern, roots)
        seen, _ = _images_per_unit(evaluation, column, pattern, roots)
        shared = sum(count for form, count in seen.items() if form in known)
        if shared:
            notes.append(
                f"{shared} of {len(evaluation)} evaluation images share their {name} with training "
                "images; metrics on them say little"
            )
    return notes


def held_out(keys: Sequence[Id | bytes], fraction: float) -> tuple[list[int], list[int]]:
    """Divide rows into those to train on and those to evaluate on, by a public hash of their keys.

    Args:
        keys: One per row: the id of its unit, or a digest of its pixels. Rows of equal keys stay
            together, and so do those of one id in two spellings.
        fraction: Expected share of the units that is held out, in (0, 1).

    Raises:
        ValueError: One of the two parts is empty.
    """
    parts: tuple[list[int], list[int]] = ([], [])
    for row, key in enumerate(keys):
        material = key if isinstance(key, bytes) else canonical_id(key).encode()
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


def _part(within: re.Pattern[str], text: str) -> str | None:
    found = within.search(text)
    return found and found[1]


def _matching(pattern: str | None) -> str:
    return "" if pattern is None else f" that matches privacy_unit_pattern={pattern!r}"


def _known_name(column: str) -> str | None:
    """Return which of ``UNIT_NAMES`` a column names, if any: an image's id is none of them."""
    found = ID_COLUMN.fullmatch(column.lower())
    return found and found[1]


def _kind(split: "datasets.Dataset", column: str) -> str | None:
    """Return whether ids are text, numbers or in the paths of images, or None for what is no id."""
    import datasets

    feature = split.features[column]
    if isinstance(feature, datasets.ClassLabel):
        return "text"  # its names
    if isinstance(feature, datasets.Image):
        return "path"
    if not isinstance(feature, datasets.Value):
        return None
    if feature.dtype.endswith("string"):
        return "text"
    return "number" if feature.dtype.startswith(("int", "uint", "float")) else None


def _ids(
    split: "datasets.Dataset", column: str, pattern: str | None, roots: Sequence[str]
) -> list[Id | None]:
    """Return the id of each row, None where it is missing.

    Raises:
        ValueError: A value is no id.
    """
    texts = _texts(split, column)
    return texts if pattern is None else _parts(texts, pattern, column, roots)


def _parts(
    texts: list[Id | None], pattern: str, column: str, roots: Sequence[str]
) -> list[Id | None]:
    """Return what a pattern finds in each text, or in a path below its data set's folder."""
    within = _compiled(pattern)
    parts = [_part(within, _below(i, roots)) if isinstance(i, str) else None for i in texts]
    return plain_ids(parts, argument=f"privacy_unit_column={column!r}")


def _texts(split: "datasets.Dataset", column: str) -> list[Id | None]:
    """Return what is an id, or may hold one, of each row.

    Raises:
        ValueError: A value is no id.
    """
    import datasets

    feature = split.features[column]
    if isinstance(feature, datasets.Image):
        return list(image_paths(split, column))
    values: Any = column_values(split, column)
    if isinstance(feature, datasets.ClassLabel):  # -1 is its missing value
        named = dict(enumerate(feature.names))
        values = [named.get(value) for value in values]
    elif feature.dtype.startswith("float"):
        values = np.array(values, dtype=feature.dtype)  # which knows how exact it is
    return plain_ids(values, argument=f"privacy_unit_column={column!r}")


def _below(path: str, roots: Sequence[str]) -> str:
    """Return a path without the folder of the data set, whose name is no image's."""
    for root in sorted(roots, key=len, reverse=True):
        if path.startswith(f"{root.rstrip('/')}/"):
            return path[len(root.rstrip("/")) + 1 :]
    return OF_A_COPY.sub("", path, count=1)


def _images_per_unit(
    split: "datasets.Dataset", column: str, pattern: str | None = None, roots: Sequence[str] = ()
) -> tuple[Counter[str], int]:
    """Return the rows of each id that is known, and the rows without one.

    A column that holds no ids has none.
    """
    try:
        ids = _ids(split, column, pattern, roots) if _kind(split, column) else [None] * len(split)
    except ValueError:
        ids = [None] * len(split)
    return _count(ids)


def _count(ids: Sequence[Id | None]) -> tuple[Counter[str], int]:
    """Return the rows of each id that is known, and the rows without one."""
    counts = Counter(canonical_id(i) for i in ids if i is not None)
    return counts, len(ids) - counts.total()

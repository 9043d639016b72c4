"""Columns of labels become ids into one list of names, or one 0, 1 or NaN per name.

Receives the splits and which column, or columns, hold the labels. Returns the splits with one
column of labels, and the names.

Guarantees:
    * A row of one class has a label in `range(len(names))`; a row of several labels has
      `len(names)` numbers, each 0, 1 or NaN, where NaN says that nobody knows.
    * A label that is none of these is refused by its row number and never quoted.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_dpmuon.data.columns import (
    column_values,
    first_rows,
    natural_order,
    only,
    quoted,
    require_column,
)
from hf_dpmuon.data.units import PERSONS, looks_like_ids

if TYPE_CHECKING:
    import datasets

__all__ = ["Labels", "encode_labels", "label_notes", "refuse_personal_names"]

LABEL_COLUMNS = ("label", "labels", "cls")  # "cls" is what WebDataset calls it
MULTI_LABEL_COLUMN = "labels"  # where several columns are put together
UNCERTAIN = -1  # CheXpert's mark
WORDS = {
    "": math.nan,
    **dict.fromkeys(("unlabeled", "unknown"), math.nan),
    **dict.fromkeys(("uncertain",), float(UNCERTAIN)),
    **dict.fromkeys(("true", "yes", "present", "positive"), 1.0),
    **dict.fromkeys(("false", "no", "absent", "negative"), 0.0),
}

# A name of this form may be a patient's number, a date or an accession number.
OF_A_PERSON = re.compile(
    r"(?i).*([0-9]{5,}|[0-9]{2,4}[-_.][0-9]{1,2}[-_.][0-9]{1,4}).*"
    rf"|({'|'.join(PERSONS)})[-_ ]?[0-9]+"
)
MOST_CLASSES = 0.9  # of the rows
FEW_CLASSES = 10  # that even a tiny table may have
SEPARATORS = re.compile(r"[|;,]")

Splits = dict[str, "datasets.Dataset"]


@dataclass(frozen=True)
class Labels:
    """What the labels are.

    Attributes:
        column: Name of the one column that holds them.
        names: Class names by id, or label names by position.
        multi_label: Whether a row holds one number per name.
        notes: What a user should know, for the local console only.
    """

    column: str
    names: tuple[str, ...]
    multi_label: bool
    notes: tuple[str, ...] = ()


def encode_labels(
    splits: Splits,
    *,
    label_column: str | None,
    label_columns: Sequence[str] | None,
    image_column: str,
    privacy_unit_column: str | None = None,
) -> tuple[Splits, Labels]:
    """Replace the labels of every split by numbers.

    Args:
        splits: The split to train on first.
        label_column: One class per row as a `ClassLabel`, an int or a string; a list of 0 and 1
            per row; or a list of `ClassLabel`. Found when it is not named.
        label_columns: Several columns of 0 and 1, or of words such as "absent" and "present".
        image_column: Name of the column of images, which is no label unasked.
        privacy_unit_column: Name of the column of ids, which is none either.

    Raises:
        ValueError: A column is missing or ambiguous, or a label is missing or out of range.
    """
    import datasets

    if label_columns is not None:
        if not label_columns or len(set(label_columns)) < len(label_columns):
            raise ValueError(
                f"label_columns=[{quoted(label_columns)}] must name one or more columns, each once."
            )
        for column in label_columns:
            require_column(splits, column, argument="label_columns")
        return _join_columns(splits, tuple(label_columns))

    train = next(iter(splits.values()))
    others = [image_column]
    if privacy_unit_column is not None and privacy_unit_column not in LABEL_COLUMNS:
        others.append(privacy_unit_column)
    column = label_column or _find_label_column(train, others)
    require_column(splits, column, argument="label_column")
    features = [split.features[column] for split in splits.values()]
    are_lists = {isinstance(feature, (datasets.List, datasets.LargeList)) for feature in features}
    if are_lists == {False}:
        return _number_classes(splits, column)
    classes = [_classes(feature) for feature in features]
    if len(are_lists) > 1 or any(names != classes[0] for names in classes):
        raise ValueError(
            f"label_column={column!r} holds labels of another form in each split; give all splits "
            "the same columns."
        )
    if classes[0] is None:
        return _read_lists(splits, column)
    return _mark_classes(splits, column, classes[0])


def refuse_personal_names(labels: Labels, num_rows: int) -> None:
    """Refuse class names that may name persons, since a model publishes them.

    Args:
        labels: As encoded.
        num_rows: Rows of the split to train on.

    Raises:
        ValueError: A name has the form of an id or a date, or nearly every row has its own.
    """
    personal = sum(OF_A_PERSON.fullmatch(name) is not None for name in labels.names)
    count = len(labels.names)
    many = not labels.multi_label and count > max(FEW_CLASSES, MOST_CLASSES * num_rows)
    if personal or many:
        column = labels.column
        found = (
            f"{personal} of the {count} class names in the column {column!r} look like ids or dates"
            if personal
            else f"nearly each row has its own class name ({count} in the column {column!r})"
        )
        raise ValueError(
            f"{found}, and a model publishes them; use the level that holds classes (mel/1.png, "
            "not mel/patient/1.png, or another label_column), or declare that they name nobody "
            "with public_class_names=True."
        )


def label_notes(
    labels: Labels, train: "datasets.Dataset", evaluation: "datasets.Dataset | None"
) -> list[str]:
    """Return what is odd about the labels of the rows to train on.

    Raises:
        ValueError: They are all of one class.
    """
    values = column_values(train, labels.column)
    if not labels.multi_label:
        if len(set(values)) < 2:
            raise ValueError(
                "the split to train on holds one class only; training needs at least two classes "
                f"in the column {labels.column!r}."
            )
        tested = set() if evaluation is None else set(column_values(evaluation, labels.column))
        unseen = [labels.names[label] for label in sorted(tested - set(values))]
        if not unseen:
            return []
        classes = ", ".join(unseen)
        return [f"{len(unseen)} classes have no training image and cannot be learnt: {classes}"]
    notes = [f"{len(labels.names)} labels per image, each present, absent or not known"]
    unlabelled = sum(all(map(math.isnan, row)) for row in values)
    if unlabelled:
        notes.append(f"{unlabelled} training images have no known label; their loss is zero")
    constant = [
        name
        for name, column in zip(labels.names, zip(*values, strict=True), strict=True)
        if len({value for value in column if value == value}) < 2
    ]
    if constant:
        notes.append(
            f"{len(constant)} labels have only one value in training and cannot be learnt: "
            + ", ".join(constant)
        )
    return notes


def _find_label_column(train: "datasets.Dataset", others: Sequence[str]) -> str:
    import datasets

    columns = [column for column in train.column_names if column not in others]
    classes = [
        column
        for column in columns
        if isinstance(train.features[column], datasets.ClassLabel)
        or _classes(train.features[column]) is not None
    ]
    classes = [column for column in classes if not looks_like_ids(column)]
    # A lone column of strings is not taken: it may as well hold patient ids, and class names
    # are published with the model.
    candidates = classes or [column for column in columns if column in LABEL_COLUMNS]
    return only(candidates, kind="label", columns=columns)


def _classes(feature: Any) -> tuple[str, ...] | None:
    """Return the class names of a column of lists of classes, or None for another column."""
    import datasets

    if not isinstance(feature, (datasets.List, datasets.LargeList)):
        return None
    inner = feature.feature
    return tuple(inner.names) if isinstance(inner, datasets.ClassLabel) else None


# One class per row


def _number_classes(splits: Splits, column: str) -> tuple[Splits, Labels]:
    """Number the classes in the order of a `ClassLabel`, else in their natural order."""
    import datasets

    names = {name: _class_names(split, column, name) for name, split in splits.items()}
    found = {name for of_rows in names.values() for name in of_rows}
    feature = next(iter(splits.values())).features[column]
    if isinstance(feature, datasets.ClassLabel):
        label_names = [*feature.names, *sorted(found - set(feature.names))]
    else:
        label_names = natural_order(found)
    if len({name.strip() for name in label_names}) < len(label_names):
        raise ValueError(
            f"label_column={column!r} holds class names that differ in blanks around them only; "
            "write each class in one way."
        )
    sets = {tuple(sorted(map(str.strip, SEPARATORS.split(name)))) for name in label_names}
    if len(sets) < len(label_names):
        raise ValueError(
            f"label_column={column!r} holds the same labels in several orders, such as A|B and "
            "B|A; give each label a column of 0 and 1, and name these with label_columns."
        )
    ids = {name: label for label, name in enumerate(label_names)}
    numbers = {name: [ids[of_row] for of_row in of_rows] for name, of_rows in names.items()}
    return _put(splits, column, numbers), Labels(column, tuple(label_names), multi_label=False)


def _class_names(split: "datasets.Dataset", column: str, split_name: str) -> list[str]:
    """Return the class name of every row, or refuse the split."""
    import datasets

    feature = split.features[column]
    name_of: Callable[[Any], str | None]
    if isinstance(feature, datasets.ClassLabel):
        classes = feature.names

        def name_of(value: Any) -> str | None:
            return classes[value] if 0 <= value < len(classes) else None

    elif isinstance(feature, datasets.Value) and feature.dtype.endswith("string"):

        def name_of(value: Any) -> str | None:
            return value if value.strip() else None

    elif isinstance(feature, datasets.Value) and feature.dtype.startswith(
        ("int", "uint", "bool", "float")  # float: ints of which some are missing
    ):

        def name_of(value: Any) -> str | None:
            return str(int(value)) if value >= 0 and value == int(value) else None

    else:
        raise ValueError(
            f"label_column={column!r} holds {feature}; name a column with one class per row, as "
            "ints or strings, or with a list of 0 and 1."
        )
    values = column_values(split, column)
    names = [None if value is None or value != value else name_of(value) for value in values]
    bad = [row for row, name in enumerate(names) if name is None]
    if bad:
        raise ValueError(
            f"{len(bad)} labels of the split {split_name!r} are missing or out of range (first "
            f"rows: {first_rows(bad)}); label or remove these rows, or name another split."
        )
    return [name for name in names if name is not None]


# Several labels per row


def _join_columns(splits: Splits, columns: tuple[str, ...]) -> tuple[Splits, Labels]:
    uncertain = 0
    joined = {}
    for name, split in splits.items():
        numbers = []
        for column in columns:
            of_column, marked = _binary(_answers(split, column), column, name)
            numbers.append(of_column)
            uncertain += marked
        joined[name] = list(map(list, zip(*numbers, strict=True)))
    labels = Labels(MULTI_LABEL_COLUMN, columns, True, _uncertain_note(uncertain))
    return _put(splits, MULTI_LABEL_COLUMN, joined), labels


def _answers(split: "datasets.Dataset", column: str) -> list[Any]:
    """Return the values of a column, a `ClassLabel` in words: its 0 may stand for "unknown"."""
    import datasets

    values = column_values(split, column)
    feature = split.features[column]
    if not isinstance(feature, datasets.ClassLabel):
        return values
    return [None if value is None or value < 0 else feature.names[value] for value in values]


def _mark_classes(splits: Splits, column: str, names: tuple[str, ...]) -> tuple[Splits, Labels]:
    """Turn the lists of the classes that a row has into a 0 or 1 for every class."""
    marked = {}
    for name, split in splits.items():
        rows = column_values(split, column)
        legal = set(range(len(names)))
        bad = [row for row, of_row in enumerate(rows) if not legal.issuperset(of_row or ())]
        _refuse(bad, column, name)
        marked[name] = [
            [math.nan if row is None else float(label in row) for label in range(len(names))]
            for row in rows
        ]
    return _put(splits, column, marked), Labels(column, names, multi_label=True)


def _read_lists(splits: Splits, column: str) -> tuple[Splits, Labels]:
    """Read lists of 0 and 1: one class per row if every row has exactly one 1."""
    uncertain = 0
    rows: dict[str, list[list[float]]] = {}
    lengths = set()
    for name, split in splits.items():
        stored = column_values(split, column)
        lengths |= {len(row) for row in stored if row is not None}
        if len(lengths) != 1:
            raise ValueError(
                f"label_column={column!r} holds lists of {len(lengths)} lengths; make them one 0 "
                "or 1 per label, the same number in every row."
            )
        count = max(lengths)
        flat = [value for row in stored for value in (row or [None] * count)]
        numbers, marked = _binary(flat, column, name, per_row=count)
        rows[name] = [numbers[i : i + count] for i in range(0, len(numbers), count)]
        uncertain += marked
    names = tuple(map(str, range(max(lengths))))
    # One odd row decides between the two, so the note says which it became.
    is_multi = not all(sum(row) == 1 for of_split in rows.values() for row in of_split)
    kind = (
        f"{'several labels' if is_multi else 'one class'} per image, as "
        f"{'not all' if is_multi else 'all'} lists of {column!r} have exactly one 1; this is taken "
        "as public"
    )
    if is_multi:
        notes = (kind, *_uncertain_note(uncertain))
        return _put(splits, column, rows), Labels(column, names, True, notes)
    ids = {name: [row.index(1) for row in of_split] for name, of_split in rows.items()}
    return _put(splits, column, ids), Labels(column, names, False, (kind,))


def _binary(
    values: list[Any], column: str, split_name: str, *, per_row: int = 1
) -> tuple[list[float], int]:
    """Return 0, 1 or NaN for every value, and how many were marked as uncertain."""
    numbers = [_number(value) for value in values]
    _refuse(
        [i // per_row for i, number in enumerate(numbers) if number is None], column, split_name
    )
    known = [number for number in numbers if number is not None]
    return (
        [math.nan if number == UNCERTAIN else number for number in known],
        known.count(UNCERTAIN),
    )


def _number(value: Any) -> float | None:
    """Return 0, 1, UNCERTAIN or NaN, or None for what is no label."""
    if value is None:
        return math.nan
    if isinstance(value, str) and value.strip().lower() in WORDS:
        return WORDS[value.strip().lower()]
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if number != number or number in (0, 1, UNCERTAIN) else None


def _refuse(bad: list[int], column: str, split_name: str) -> None:
    if bad:
        raise ValueError(
            f"{len(bad)} labels of the column {column!r} in the split {split_name!r} are out of "
            f"range (first rows: {first_rows(set(bad))}); each must be 0, 1, blank, or -1 for "
            "uncertain (or a word such as absent, present, uncertain), or the number of a class."
        )


def _uncertain_note(count: int) -> tuple[str, ...]:
    return (f"{count} labels are uncertain (-1) and count as not known",) if count else ()


def _put(splits: Splits, column: str, values: dict[str, list[Any]]) -> Splits:
    """Return the splits with a column of these values in place of the old one, if there is one."""
    import datasets

    first = next(iter(values.values()))[0]
    feature = (
        datasets.List(datasets.Value("float32"))
        if isinstance(first, list)
        else datasets.Value("int64")
    )
    return {
        name: split.remove_columns([column] if column in split.column_names else []).add_column(
            column, values[name], feature=feature
        )
        for name, split in splits.items()
    }

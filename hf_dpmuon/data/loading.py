"""A data set becomes checked rows, grouped by privacy unit.

Receives the name of a data set, which columns mean what, and how to treat damaged images. Returns
the rows of each split and what was found out about them.

Guarantees:
    * Every image of a returned split was decoded once, so the number of rows is fixed before any
      sampling rate is computed from it: an unreadable image is refused, or dropped before the
      count when told to, and never replaced by another.
    * No privacy unit is in both splits.
    * Notes and refusals hold counts, row numbers and names of columns and classes, no id and no
      path of an image.
"""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Literal

import numpy as np
from tqdm.auto import tqdm

from hf_dpmuon.data.columns import find_image_column, first_rows, quoted
from hf_dpmuon.data.dicom import ImageKindError, Window
from hf_dpmuon.data.images import decode, open_rows
from hf_dpmuon.data.labels import encode_labels, label_notes, refuse_personal_names
from hf_dpmuon.data.sources import read_splits
from hf_dpmuon.data.units import (
    RepeatedUnit,
    find_repeated_unit,
    group_rows,
    held_out,
    repeated_unit_notes,
    unit_ids,
)
from hf_dpmuon.units import Id, PrivacyUnits

if TYPE_CHECKING:
    import datasets

__all__ = ["ImageSplits", "load_image_dataset"]

# Looked for in this order when none is named.
EVALUATION_SPLITS = ("validation", "valid", "val", "dev", "test")
FAINT = 0.1  # of the range of deep greyscale: below it, an image is nearly of one grey
HELD_OUT = "held out"  # name of the split that eval_fraction makes


@dataclass(frozen=True)
class ImageSplits:
    """Checked rows, and what was found out about them.

    Attributes:
        train: Rows to train on.
        evaluation: Rows to evaluate on, if the data set has any.
        label_names: Class names by label, or label names by position.
        image_column: Name of the column of images.
        label_column: Name of the column of labels: ints in `range(len(label_names))`, or lists of
            `len(label_names)` floats that are 0, 1, or NaN for what is not known.
        notes: What a user should know, with counts of private rows, for the local console only.
        multi_label: Whether a row has several labels.
        units: Whose rows the training rows are, where a column of ids was named.
        repeated_unit: The column that looks like ids with several rows each, where none was named.
    """

    train: "datasets.Dataset"
    evaluation: "datasets.Dataset | None"
    label_names: tuple[str, ...]
    image_column: str
    label_column: str
    notes: tuple[str, ...]
    multi_label: bool = False
    units: PrivacyUnits | None = None
    repeated_unit: RepeatedUnit | None = None


def load_image_dataset(
    name_or_path: str,
    *,
    config_name: str | None = None,
    revision: str | None = None,
    train_split: str = "train",
    eval_split: str | None = None,
    eval_fraction: float | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    label_columns: Sequence[str] | None = None,
    privacy_unit_column: str | None = None,
    privacy_unit_pattern: str | None = None,
    dicom_window: Sequence[float] | None = None,
    on_corrupt: Literal["refuse", "drop"] = "refuse",
    public_class_names: bool = False,
) -> ImageSplits:
    """Load a data set and check every image and label of it.

    Args:
        name_or_path: One of
            * a Hub id; a private or gated one needs `hf auth login` or HF_TOKEN;
            * a folder of class folders, with or without a folder per split above them, or with a
              `metadata.csv` beside the images; images may be DICOM files;
            * a parquet file, or a folder of them;
            * a CSV file with a column of image paths relative to it or to the folder above it, or
              a folder of such files: a single one is the train split, otherwise each is the split
              of its own name;
            * a WebDataset tar file, or a folder of them;
            * `builtin:digits`: the handwritten digits of scikit-learn.
        config_name: Configuration of a Hub data set.
        revision: Branch, tag or commit of a Hub data set.
        train_split: Split to train on.
        eval_split: Split to evaluate on; by default "validation", else "test", else none.
        eval_fraction: Instead of a split, hold out about this share of the privacy units of the
            train split, or of its distinct images. A public hash of each unit decides.
        image_column: Found by its type when not named.
        label_column: One class per row (a `ClassLabel`, ints or strings), or a list of 0 and 1, or
            of classes, per row. Found by its type, or by the name "label", "labels" or "cls".
        label_columns: Instead, several columns of 0 and 1, or of absent and present, blank where a
            label is not known; CheXpert's -1, or uncertain, counts as not known.
        privacy_unit_column: Column of ids: all rows of an id are one unit of privacy. With a
            pattern it may be the column of images, whose paths are looked at, below the data set's
            folder or as a table has them.
        privacy_unit_pattern: Where the ids are part of a longer text, such as a path: a regular
            expression whose one named group is the id and says what a unit is called.
        dicom_window: Center and width of the grey levels of DICOM files, in place of their own.
        public_class_names: Declares that class names which look like ids name nobody.
        on_corrupt: Whether unreadable images are refused, or dropped before rows are counted.

    Raises:
        ValueError: The data set cannot be found or read, an argument is out of range, a column is
            missing or ambiguous, a label or an id is missing or out of range, an image cannot be
            read, a unit is in both splits, or there is nothing to learn.
    """
    for argument, value in {
        "name_or_path": name_or_path,
        "config_name": config_name,
        "revision": revision,
        "train_split": train_split,
        "eval_split": eval_split,
        "image_column": image_column,
        "label_column": label_column,
        "privacy_unit_column": privacy_unit_column,
        "privacy_unit_pattern": privacy_unit_pattern,
    }.items():
        required = argument in ("name_or_path", "train_split")
        if not (isinstance(value, str) or (value is None and not required)):
            raise ValueError(f"{argument}={value!r} must be text{'' if required else ' or None'}.")
    if on_corrupt not in ("refuse", "drop"):
        raise ValueError(f"on_corrupt={on_corrupt!r} is unknown; use 'refuse' or 'drop'.")
    if eval_fraction is not None and not (_is_number(eval_fraction) and 0 < eval_fraction < 1):
        raise ValueError(f"eval_fraction={eval_fraction!r} must be in (0, 1).")
    if eval_fraction is not None and eval_split is not None:
        raise ValueError(
            f"eval_fraction={eval_fraction} and eval_split={eval_split!r} are both set; set one."
        )
    if privacy_unit_pattern is not None and privacy_unit_column is None:
        raise ValueError(
            f"privacy_unit_pattern={privacy_unit_pattern!r} needs a privacy_unit_column to look in."
        )
    if label_columns is not None and (
        isinstance(label_columns, str)
        or not isinstance(label_columns, Sequence)
        or not all(isinstance(column, str) for column in label_columns)
    ):
        raise ValueError(
            f"label_columns={label_columns!r} must be a list of names of columns, such as "
            "['Edema', 'Fracture']; name a single column of classes with label_column."
        )
    if label_column is not None and label_columns is not None:
        raise ValueError(
            f"label_column={label_column!r} and label_columns={quoted(label_columns)} are both "
            "set; name one column of labels, or several columns of 0 and 1."
        )
    if dicom_window is not None and not _is_window(dicom_window):
        raise ValueError(
            f"dicom_window={dicom_window!r} must be a center and a width > 0, two finite numbers."
        )
    window = None if dicom_window is None else (dicom_window[0], dicom_window[1])

    read = read_splits(
        name_or_path, config_name=config_name, revision=revision, image_column=image_column
    )
    tables, roots, notes = read.splits, read.roots, list(read.notes)
    if eval_fraction is None and eval_split is None:
        eval_split = next((s for s in EVALUATION_SPLITS if s in tables and s != train_split), None)
        notes.append(
            f"evaluating on the split {eval_split!r}"
            if eval_split
            else "the data set has no evaluation split"
        )
    splits = _choose(tables, train_split, eval_split)

    image_column = find_image_column(splits, image_column)
    splits, labels = encode_labels(
        splits,
        label_column=label_column,
        label_columns=label_columns,
        image_column=image_column,
        privacy_unit_column=privacy_unit_column,
    )
    notes += labels.notes
    if roots and not public_class_names:  # those of a data set on the Hub are public
        refuse_personal_names(labels, len(splits[train_split]))
    splits = {
        name: _with_opened_images(split, image_column, window) for name, split in splits.items()
    }
    no_ids = (image_column, labels.column, *(label_columns or ()))
    ids_of = partial(
        unit_ids,
        column=privacy_unit_column or "",
        pattern=privacy_unit_pattern,
        other_columns=no_ids,
        roots=roots,
    )

    def grouped() -> PrivacyUnits | None:
        if privacy_unit_column is None:
            return None
        ids = ids_of(splits)
        train_ids, eval_ids = ids[train_split], ids.get(eval_split or "")
        return group_rows(
            train_ids, eval_ids, column=privacy_unit_column, pattern=privacy_unit_pattern
        )

    grouped()  # before the images: their check takes time
    digests = {}
    for name in splits:
        splits[name], digests[name], seen = _check_images(
            splits[name], image_column, split_name=name, on_corrupt=on_corrupt
        )
        notes += seen
    if eval_fraction is not None:
        keys: Sequence[Id | bytes] = digests[train_split]
        if privacy_unit_column is not None:
            keys = ids_of(splits)[train_split]
        eval_split = HELD_OUT
        parts = dict(zip((train_split, eval_split), held_out(keys, eval_fraction), strict=True))
        whole, of_whole = splits[train_split], digests[train_split]
        splits = {name: whole.select(rows) for name, rows in parts.items()}
        digests = {name: [of_whole[row] for row in rows] for name, rows in parts.items()}
        notes.append(f"{len(parts[eval_split])} of {len(whole)} images are held out to evaluate on")

    train, evaluation = splits[train_split], splits.get(eval_split or "")
    notes += label_notes(labels, train, evaluation)
    units = grouped()
    repeated = None
    if units is not None:
        notes.append(
            f"{units.num_rows} training images of {len(units)} privacy units ({units.name})"
        )
    else:
        repeated = find_repeated_unit(train, other_columns=no_ids, roots=roots)
        notes += repeated_unit_notes(repeated, train, evaluation, roots)
    notes += _copies(digests[train_split], digests.get(eval_split or "", []), units)
    return ImageSplits(
        train=train,
        evaluation=evaluation,
        label_names=labels.names,
        image_column=image_column,
        label_column=labels.column,
        notes=tuple(notes),
        multi_label=labels.multi_label,
        units=units,
        repeated_unit=repeated,
    )


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_window(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) == 2
        and all(map(_is_number, value))
        and value[1] > 0
    )


def _choose(
    tables: "dict[str, datasets.Dataset]", train_split: str, eval_split: str | None
) -> "dict[str, datasets.Dataset]":
    """Return the split to train on and the one to evaluate on, in this order."""
    if eval_split == train_split:
        raise ValueError(
            f"eval_split={eval_split!r} is also the train split; name a split that is not trained "
            "on, or none."
        )
    names = [train_split] if eval_split is None else [train_split, eval_split]
    for name in names:
        if name not in tables:
            raise ValueError(
                f"split {name!r} is missing; choose from {', '.join(tables)} (tars and parquet "
                "files with train, test or val in their names are taken for splits)."
            )
        if len(tables[name]) == 0:
            raise ValueError(f"split {name!r} has no rows; choose from {', '.join(tables)}.")
    return {name: tables[name] for name in names}


def _with_opened_images(
    split: "datasets.Dataset", image_column: str, window: Window | None
) -> "datasets.Dataset":
    """Return the split so that a row that is asked for holds a Pillow image, DICOM or not."""
    import datasets

    try:
        split = split.cast_column(image_column, datasets.Image(decode=False))
    except (TypeError, ValueError, NotImplementedError):
        raise ValueError(
            f"image_column={image_column!r} holds {split.features[image_column]}, not images; name "
            "a column of images, of encoded bytes or of paths."
        ) from None
    return split.with_transform(partial(open_rows, image_column=image_column, window=window))


def _check_images(
    split: "datasets.Dataset",
    image_column: str,
    *,
    split_name: str,
    on_corrupt: Literal["refuse", "drop"],
) -> tuple["datasets.Dataset", list[bytes], list[str]]:
    """Decode every image.

    Returns:
        The rows that can be read, a digest of the pixels of each, and notes.
    """
    images = split.select_columns([image_column])
    digests: dict[int, bytes] = {}
    unreadable: dict[int, str] = {}
    faint = 0
    for row in tqdm(range(len(images)), desc=f"checking {split_name} images", unit="image"):
        try:
            image = decode(images[row][image_column])
        except ImportError as error:
            raise ValueError(str(error)) from error
        except Exception as error:  # decoders raise whatever they like on bad bytes
            # The text of other errors may hold a path, and a path an id.
            unreadable[row] = (
                str(error) if isinstance(error, ImageKindError) else type(error).__name__
            )
        else:
            if image.mode == "F":
                faint += bool(np.ptp(np.asarray(image)) < FAINT)
            pixels = f"{image.mode} {image.size} ".encode() + image.tobytes()
            digests[row] = hashlib.blake2b(pixels, digest_size=16).digest()
    notes = []
    if faint:
        notes.append(
            f"{faint} deep greyscale images of the split {split_name!r} use less than {FAINT:.0%} "
            "of their range and look flat; if they are DICOM, set --dicom_window"
        )
    if not unreadable:
        return split, list(digests.values()), notes
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(unreadable.values()).items())
    found = (
        f"{len(unreadable)} of {len(split)} images of the split {split_name!r} cannot be read "
        f"({kinds}; first rows: {first_rows(unreadable)})"
    )
    if set(unreadable.values()) == {FileNotFoundError.__name__}:
        raise ValueError(
            f"{found}; the paths of a table are relative to its folder, or to the folder above it: "
            "move the table there, or write whole paths."
        )
    if on_corrupt == "refuse":
        raise ValueError(f"{found}; repair them, or drop them with on_corrupt='drop'.")
    if not digests:
        raise ValueError(f"{found}; nothing is left of it.")
    notes.append(f"{found} and were dropped; {len(digests)} are left")
    return split.select(list(digests)), list(digests.values()), notes


def _copies(
    train: Sequence[bytes], evaluation: Sequence[bytes], units: PrivacyUnits | None
) -> list[str]:
    """Note how many images occur more than once, pixel by pixel."""
    notes = []
    copies = len(train) - len(set(train))
    if copies:
        notes.append(
            f"{copies} training images are exact copies of others; the guarantee of one does not "
            "cover the rest"
        )
    if copies and units is not None:
        units_of: dict[bytes, set[int]] = defaultdict(set)
        for unit, rows in enumerate(units.rows_of_unit):
            for row in rows.tolist():
                units_of[train[row]].add(unit)
        spread = sum(len(of_image) > 1 for of_image in units_of.values())
        if spread:
            notes.append(f"{spread} of the repeated images are in several units ({units.name})")
    known = set(train)
    seen = sum(digest in known for digest in evaluation)
    if seen:
        notes.append(
            f"{seen} of {len(evaluation)} evaluation images are exact copies of training images; "
            "metrics on them say little"
        )
    return notes

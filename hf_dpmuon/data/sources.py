"""A name becomes tables: a file, a folder, a data set on the Hub, or a built-in one.

Receives what the user called the data set. Returns its splits as `datasets` tables of known length,
in which images are not decoded yet, notes on what was left out, and the folders that its paths
begin with.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from hf_dpmuon.data.columns import column_values
from hf_dpmuon.data.folders import read_folder
from hf_dpmuon.data.repositories import read_repository
from hf_dpmuon.data.tables import READERS, Tables, read_tables

if TYPE_CHECKING:
    import datasets

__all__ = ["read_splits"]

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def read_splits(
    name_or_path: str,
    *,
    config_name: str | None,
    revision: str | None,
    image_column: str | None = None,
) -> Tables:
    """Return all splits of the data set, and how they were read.

    Args:
        name_or_path: As for `load_image_dataset`.
        config_name: Configuration of a Hub data set.
        revision: Branch, tag or commit of a Hub data set.
        image_column: That of a table, the column of paths to read as images; by default the columns
            whose files exist.

    Raises:
        ValueError: The data set cannot be found or read.
    """
    if not name_or_path.strip():
        raise ValueError(
            f"data set {name_or_path!r} has no name; give a folder, a file, or a data set on the "
            "Hub as owner/name."
        )
    if name_or_path.startswith("builtin:"):
        if name_or_path != "builtin:digits":
            raise ValueError(
                f"{name_or_path!r} is unknown; the built-in data set is builtin:digits."
            )
        return Tables(_load_digits())
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        read = read_folder(path.resolve(), image_column)
    elif path.is_file():
        if path.suffix.lower() not in READERS:
            raise ValueError(
                f"data set {name_or_path!r} cannot be read as images with labels; a single file "
                f"must end in {', '.join(READERS)}."
            )
        read = read_tables([("train", path.resolve())], image_column)
    elif name_or_path.startswith(("/", ".", "~")) or HUB_ID.fullmatch(name_or_path) is None:
        raise ValueError(
            f"data set {name_or_path!r} is no file or folder here; check its path, or name a data "
            "set on the Hub as owner/name."
        )
    else:
        splits = read_repository(name_or_path, config_name=config_name, revision=revision)
        read = Tables(splits)
    splits = {name: _flatten_json(split) for name, split in read.splits.items()}
    return Tables(splits, read.notes, read.roots)


def _flatten_json(split: "datasets.Dataset") -> "datasets.Dataset":
    """Turn the fields of WebDataset's `json` into columns, but those that have a column already."""
    if not isinstance(split.features.get("json"), dict):
        return split
    fields = [name for name in split.features["json"] if name not in split.column_names]
    values = column_values(split, "json")
    for name in fields:
        column = [value and value[name] for value in values]
        split = split.add_column(name, column, feature=split.features["json"][name])
    return split.remove_columns("json")


def _load_digits() -> dict[str, "datasets.Dataset"]:
    """Return scikit-learn's digits as 28 x 28 greyscale: 1437 to train on, 360 to test on.

    The 8 x 8 images are enlarged to 20 x 20 and padded, which is how Fashion-MNIST and MNIST
    place an object. The split is fixed and stratified by class.
    """
    import datasets
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    rows = train_test_split(
        np.arange(len(digits.target)), test_size=360, stratify=digits.target, random_state=0
    )
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=[str(digit) for digit in digits.target_names]),
        }
    )

    def enlarge(intensities: Any) -> Image.Image:
        small = Image.fromarray((intensities * (255 / 16)).round().astype(np.uint8))
        canvas = Image.new("L", (28, 28))
        canvas.paste(small.resize((20, 20), Image.Resampling.BILINEAR), (4, 4))
        return canvas

    return {
        name: datasets.Dataset.from_dict(
            {
                "image": [enlarge(digits.images[row]) for row in part],
                "label": [int(digits.target[row]) for row in part],
            },
            features=features,
        )
        for name, part in zip(("train", "test"), rows, strict=True)
    }

"""A name becomes tables: from the Hub, from folders and files, or built in.

Receives what the user called the data set. Returns its splits as `datasets` tables in which images
are not decoded yet, and notes on what was left out.

Guarantees:
    * A data set that cannot be had is refused in one sentence that tells not found, no permission,
      no network, no space and not readable apart. What parsers say about rows is not passed on:
      it quotes them.
    * Every split is a table of known length, never a stream.
"""

import errno
import logging
import mimetypes
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from hf_dpmuon.data.columns import column_values
from hf_dpmuon.data.dicom import is_dicom_file

if TYPE_CHECKING:
    import datasets

__all__ = ["read_splits"]

Splits = dict[str, "datasets.Dataset"]

DICOM_SUFFIXES = (".dcm", ".dicom")
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def read_splits(
    name_or_path: str, *, config_name: str | None, revision: str | None
) -> tuple[Splits, list[str]]:
    """Return all splits of the data set and notes on how they were read.

    Raises:
        ValueError: The data set cannot be found or read.
    """
    if name_or_path.startswith("builtin:"):
        if name_or_path != "builtin:digits":
            raise ValueError(
                f"{name_or_path!r} is unknown; the built-in data set is builtin:digits."
            )
        return _load_digits(), []
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        splits, notes = _read_folder(path.resolve())
    elif path.is_file():
        splits, notes = _read_file(path.resolve()), []
    elif name_or_path.startswith(("/", ".", "~")) or HUB_ID.fullmatch(name_or_path) is None:
        raise ValueError(
            f"data set {name_or_path!r} is no file or folder here; check its path, or name a data "
            "set on the Hub as owner/name."
        )
    else:
        splits, notes = _load(name_or_path, name=config_name, revision=revision), []
    return {name: _flatten_json(split) for name, split in splits.items()}, notes


def _load(source: str, *, shown: str | None = None, **options: Any) -> Splits:
    """Call `datasets`, and say in one sentence why it could not be had.

    Args:
        source: Hub id, folder, or name of a builder.
        shown: The local path, if it is one.
        options: As for `datasets.load_dataset_builder`.
    """
    import datasets

    try:
        builder = datasets.load_dataset_builder(source, **options)
    except Exception as error:
        raise ValueError(_reason(error, shown or source, is_local=shown is not None)) from None
    log = logging.getLogger("datasets")
    level = log.level
    log.setLevel(logging.CRITICAL)  # what it logs on the way to an error quotes rows as well
    try:
        builder.download_and_prepare()
        return dict(builder.as_dataset())
    except Exception as error:
        reason = _reason(error, shown or source, is_local=shown is not None, has_rows=True)
        raise ValueError(reason) from None
    finally:
        log.setLevel(level)


def _reason(error: Exception, source: str, *, is_local: bool, has_rows: bool = False) -> str:
    """Return the sentence for an error of `datasets`.

    Args:
        error: As raised.
        source: What the user called the data set.
        is_local: Whether it is a path.
        has_rows: Whether rows had been read, which the text of the error may then quote.
    """
    import datasets
    from huggingface_hub import errors

    http_error = errors.HTTPError  # type: ignore[attr-defined]  # of its httpx

    said = str(error).splitlines()[0] if str(error) and not has_rows else type(error).__name__
    text = f"{error} {error.__cause__}"
    if any(isinstance(e, OSError) and e.errno == errno.ENOSPC for e in (error, error.__cause__)):
        return (
            f"data set {source!r} does not fit on the disk of the cache; make space, or set "
            "HF_HOME to a folder on another disk."
        )
    if "corresponds to no data" in text:
        return f"data set {source!r} has a split without rows; remove it or fill it."
    if is_local:
        return f"data set {source!r} cannot be read as images with labels ({said})."
    if (
        isinstance(error, ConnectionError)
        or (isinstance(error, http_error) and not isinstance(error, errors.HfHubHTTPError))
        or "LocalEntryNotFoundError" in text
    ):
        return (
            f"data set {source!r} is no local path and the Hub cannot be reached, since there is "
            "no network or HF_HUB_OFFLINE is set; go online once, or name a local copy."
        )
    if isinstance(error, errors.GatedRepoError) or "is a gated dataset" in text:
        return (
            f"data set {source!r} is gated: accept the terms on its page "
            f"{datasets.config.HF_ENDPOINT}/datasets/{source}, then {LOG_IN}."
        )
    if isinstance(error, datasets.exceptions.DatasetNotFoundError) and "Revision" not in text:
        return (
            f"data set {source!r} is no local path and was not found on the Hub; check its "
            f"spelling, and if it is private, {LOG_IN}."
        )
    if "scripts are no longer supported" in text:
        return (
            f"data set {source!r} is loaded by a script of its own, which is no longer run; try "
            "the Hub's conversion with revision='refs/convert/parquet', or name a local copy."
        )
    return f"data set {source!r} cannot be loaded from the Hub ({said.rstrip('.')})."


def _read_file(path: Path) -> Splits:
    if path.suffix == ".csv":
        return {"train": _read_table(path)}
    builders = {".parquet": "parquet", ".tar": "webdataset"}
    if path.suffix not in builders:
        raise ValueError(
            f"data set {str(path)!r} cannot be read as images with labels; a single file must end "
            f"in .csv, {' or '.join(builders)}."
        )
    return _load(builders[path.suffix], shown=str(path), data_files={"train": str(path)})


def _read_folder(folder: Path) -> tuple[Splits, list[str]]:
    """Read tables if there are any, else tars and parquet files, else images."""
    tables = sorted(file for file in folder.glob("*.csv") if file.name not in METADATA)
    if tables:
        only_one = len(tables) == 1
        return {"train" if only_one else table.stem: _read_table(table) for table in tables}, []
    files = [
        file
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not any(part[0] == "." for part in file.relative_to(folder).parts)
    ]
    images = {file for file in files if _is_image(file)}
    if not images and all(file.suffix == ".parquet" for file in files):
        return _read_parquet(folder), []
    if not images or any(file.suffix == ".tar" for file in files):
        return _load(str(folder), shown=str(folder)), []
    metadata = [file for file in files if file.name in METADATA]
    if not metadata:
        splits = _read_class_folders(folder, images)
    elif all(file.suffix.lower() in _pillow_suffixes() for file in images):
        splits = _load("imagefolder", shown=str(folder), data_dir=str(folder))
    else:
        splits = _read_metadata(folder, metadata)
    return splits, _ignored(files, splits)


def _is_image(file: Path) -> bool:
    """Whether Pillow or pydicom may read it; DICOM files often have no suffix, or a number."""
    return file.suffix.lower() in (*_pillow_suffixes(), *DICOM_SUFFIXES) or is_dicom_file(file)


def _pillow_suffixes() -> list[str]:
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    suffixes: list[str] = ImageFolder.EXTENSIONS
    return suffixes


def _files_of_splits(folder: Path) -> list[tuple[str, list[Path]]]:
    """Return the files of each split, as `datasets` tells them apart by their names."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    found = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
    return [(str(split), sorted(map(Path, files))) for split, files in found.items()]


def _read_parquet(folder: Path) -> Splits:
    """Read each split by itself; together they would all get the class names of the first."""
    splits: Splits = {}
    for split, files in _files_of_splits(folder):
        paths = [str(file) for file in files]
        splits |= _load("parquet", shown=str(folder), data_files={split: paths})
    return splits


def _read_class_folders(folder: Path, images: set[Path]) -> Splits:
    """Read images whose class is the name of their folder; splits are found as `datasets` does.

    Unlike its `imagefolder` this takes DICOM files, and a class of any split keeps its name.
    """
    import datasets

    found = _files_of_splits(folder)
    files = {split: [file for file in of_split if file in images] for split, of_split in found}
    files = {split: of_split for split, of_split in files.items() if of_split}
    all_files = [file for of_split in files.values() for file in of_split]
    if len({len(file.parts) for file in all_files}) > 1:
        raise ValueError(
            f"data set {str(folder)!r} has images at several depths of its folders; put each into "
            "the folder of its class, or name the classes in a metadata.csv."
        )
    classes = sorted({file.parent.name for file in all_files})
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=classes)}
    )
    return {
        split: datasets.Dataset.from_dict(
            {
                "image": [str(file) for file in of_split],
                "label": [file.parent.name for file in of_split],
            },
            features=features,
        )
        for split, of_split in files.items()
    }


def _read_metadata(folder: Path, metadata: list[Path]) -> Splits:
    """Read DICOM files, which `imagefolder` does not know, by the `metadata.csv` beside them."""
    if any(file.suffix != ".csv" for file in metadata):
        raise ValueError(
            f"data set {str(folder)!r} has DICOM files and metadata of another form than CSV; "
            "write it as metadata.csv with a column file_name."
        )
    only_one = len(metadata) == 1
    return {"train" if only_one else file.parent.name: _read_table(file) for file in metadata}


def _read_table(table: Path) -> "datasets.Dataset":
    """Read a table in which one column holds the paths of images.

    They are relative to the table, or to the folder above it, as in CheXpert.
    """
    import datasets

    split = _load("csv", shown=str(table), data_files=str(table))["train"]
    for column, feature in split.features.items():
        if not (isinstance(feature, datasets.Value) and feature.dtype.endswith("string")):
            continue
        paths = column_values(split, column)
        first = next((path for path in paths if path), "")
        folders = (table.parent, table.parent.parent)
        folder = next((f for f in folders if (f / first).is_file()), table.parent)
        if first and _names_image(folder / first):
            name = "image" if column == "file_name" else column
            stored = [path and str(folder / path) for path in paths]
            split = split.remove_columns(column).add_column(name, stored)
            split = split.cast_column(name, datasets.Image())
    return split


def _names_image(file: Path) -> bool:
    if file.is_file():
        return _is_image(file)
    return file.suffix.lower() in (*_pillow_suffixes(), *DICOM_SUFFIXES)


def _ignored(files: list[Path], splits: Splits) -> list[str]:
    """Note the files of a folder that became no row."""
    import datasets

    read = {
        image["path"]
        for split in splits.values()
        for column, feature in split.features.items()
        if isinstance(feature, datasets.Image)
        for image in column_values(split, column)
        if image is not None
    }
    known = ("README.md", *METADATA)
    ignored = [file for file in files if str(file) not in read and file.name not in known]
    if not ignored:
        return []
    # The end of a name that is no usual suffix may be anything, a patient's name too.
    suffixes = (file.suffix.lower() for file in ignored)
    usual = {*mimetypes.types_map, *_pillow_suffixes(), *DICOM_SUFFIXES}
    counts = Counter(suffix if suffix in usual else "other" for suffix in suffixes)
    kinds = ", ".join(f"{count} {suffix}" for suffix, count in sorted(counts.items()))
    return [f"{len(ignored)} files of the folder became no example and were ignored ({kinds})"]


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

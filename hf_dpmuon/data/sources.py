"""A name becomes tables: from the Hub, from folders and files, or built in.

Receives what the user called the data set. Returns its splits as `datasets` tables in which images
are not decoded yet, notes on what was left out, and the folders that its paths begin with.

Guarantees:
    * A data set that cannot be had is refused in one sentence that tells not found, no permission,
      no network, no space and not readable apart. What parsers say about rows is not passed on:
      it quotes them.
    * Every split is a table of known length, never a stream.
"""

import atexit
import errno
import logging
import mimetypes
import os
import re
import shutil
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from hf_dpmuon.data.columns import column_values, image_paths, natural_order
from hf_dpmuon.data.dicom import DICOM_SUFFIXES, is_dicom_file

if TYPE_CHECKING:
    import datasets

__all__ = ["Tables", "read_splits"]

Splits = dict[str, "datasets.Dataset"]

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
GLOB = frozenset("*?[]{}")  # what `datasets` takes for patterns in paths
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
USUAL_SUFFIXES = (".png", ".jpg", ".jpeg", ".dcm", ".tif", ".tiff")  # which ids leave out
FILES_TRIED = 100  # of a column of text: whether it names files
# What the folder of a split is called, as `datasets` has it.
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "dev", "val"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}


@dataclass(frozen=True)
class Tables:
    """A data set as it was read.

    Attributes:
        splits: Its tables.
        notes: What was left out, with counts.
        roots: Folders that stored paths begin with. Their own names say nothing of an image.
    """

    splits: Splits
    notes: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()


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
        image_column: Of a CSV file, the column of paths to read as images; by default the columns
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
        read = _read_folder(path.resolve(), image_column)
    elif path.is_file():
        read = _read_file(path.resolve(), image_column)
    elif name_or_path.startswith(("/", ".", "~")) or HUB_ID.fullmatch(name_or_path) is None:
        raise ValueError(
            f"data set {name_or_path!r} is no file or folder here; check its path, or name a data "
            "set on the Hub as owner/name."
        )
    else:
        read = Tables(_load(name_or_path, name=config_name, revision=revision))
    splits = {name: _flatten_json(split) for name, split in read.splits.items()}
    return Tables(splits, read.notes, read.roots)


def _load(
    source: str, *, shown: str | None = None, said: str | None = None, **options: Any
) -> Splits:
    """Call `datasets`, and say in one sentence why it could not be had.

    Args:
        source: Hub id, folder, or name of a builder.
        shown: The local path that `datasets` gets, if it is one.
        said: What a message calls it, if that is another.
        options: As for `datasets.load_dataset_builder`.
    """
    import datasets

    is_local, called = (shown or said) is not None, said or shown or source
    if shown is not None:
        _check_plain(shown)
    if is_local:  # read anew each time, since a file may change under an equal date
        options["cache_dir"] = _private_cache()
    try:
        builder = datasets.load_dataset_builder(source, **options)
    except Exception as error:
        raise ValueError(_reason(error, called, is_local=is_local)) from None
    log = logging.getLogger("datasets")
    level = log.level
    log.setLevel(logging.CRITICAL)  # what it logs on the way to an error quotes rows as well
    try:
        builder.download_and_prepare()
        return dict(builder.as_dataset())
    except Exception as error:
        reason = _reason(error, called, is_local=is_local, has_rows=True)
        raise ValueError(reason) from None
    finally:
        log.setLevel(level)


def _check_plain(path: str) -> None:
    """Refuse a path in which `datasets`, which searches it, would look for a pattern."""
    if GLOB.intersection(path) or "::" in path:
        raise ValueError(
            f"data set {path!r} has one of *, ?, [, ], {{, }} or :: in its path, by which another "
            "file may be read; rename it."
        )


@cache
def _private_cache() -> str:
    """A folder that only its owner can read, and that is gone when the process ends."""
    import datasets

    parent = Path(datasets.config.HF_DATASETS_CACHE)
    parent.mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(dir=parent, prefix="private-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


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
    if any(isinstance(e, UnicodeDecodeError) for e in _chain(error)):
        return f"data set {source!r} is not encoded in UTF-8; save it as CSV UTF-8."
    if is_local:
        return f"data set {source!r} cannot be read as images with labels ({said})."
    if (
        any(isinstance(e, errors.GatedRepoError) for e in _chain(error))
        or "is a gated dataset" in text
    ):
        return (
            f"data set {source!r} is gated: accept the terms on its page "
            f"{datasets.config.HF_ENDPOINT}/datasets/{source}, then {LOG_IN}."
        )
    answers = [e.response for e in _chain(error) if isinstance(e, errors.HfHubHTTPError)]
    codes = [a.status_code for a in answers if a is not None and a.status_code in (401, 403)]
    # A data set that is not found is a 401 too, to a client without a token.
    not_found = isinstance(error, datasets.exceptions.DatasetNotFoundError)
    if codes and not not_found:
        return (
            f"data set {source!r}: the Hub does not take the token of this computer, which is "
            f"wrong, expired or may not read it (HTTP {codes[0]}); {LOG_IN} to one that may."
        )
    if (
        isinstance(error, ConnectionError)
        or (isinstance(error, http_error) and not isinstance(error, errors.HfHubHTTPError))
        or "LocalEntryNotFoundError" in text
    ):
        return (
            f"data set {source!r} is no local path and the Hub cannot be reached, since there is "
            "no network or HF_HUB_OFFLINE is set; go online once, or name a local copy."
        )
    if not_found and "Revision" not in text:
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


def _chain(error: BaseException | None) -> list[BaseException]:
    """Return an error, what it was raised from, and so on."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _read_file(path: Path, image_column: str | None) -> Tables:
    if path.suffix in (".csv", ".tsv"):
        return _read_tables([("train", path)], image_column)
    builders = {".parquet": "parquet", ".tar": "webdataset"}
    if path.suffix not in builders:
        raise ValueError(
            f"data set {str(path)!r} cannot be read as images with labels; a single file must end "
            f"in .csv, .tsv, {' or '.join(builders)}."
        )
    # Under a plain name: in that of the file, `datasets` would look for a pattern.
    plain = Path(_private_cache()) / f"{len(os.listdir(_private_cache()))}{path.suffix}"
    plain.symlink_to(path)
    splits = _load(builders[path.suffix], data_files={"train": str(plain)}, said=str(path))
    return Tables(splits, roots=(str(path.parent), str(plain.parent)))


def _read_folder(folder: Path, image_column: str | None) -> Tables:
    """Read tables if there are any, else tars and parquet files, else images."""
    tables = sorted(file for file in folder.glob("*.csv") if file.name not in METADATA)
    if tables:
        only_one = len(tables) == 1
        return _read_tables(
            [("train" if only_one else table.stem, table) for table in tables], image_column
        )
    below = sorted(folder.rglob("*"))
    links = sum(file.is_symlink() and file.is_dir() for file in below)
    if links:
        raise ValueError(
            f"data set {str(folder)!r} has {links} links to folders, which are not followed; put "
            "folders in their place."
        )
    files = [file for file in below if file.is_file() and not _is_hidden(file.relative_to(folder))]
    unreadable = sum(not _is_utf8(str(file)) for file in files)
    if unreadable:
        raise ValueError(
            f"data set {str(folder)!r} has {unreadable} files whose names are not UTF-8, as old "
            "archives have them; rename them, for instance with `convmv --notest -t utf-8`."
        )
    if not files:
        raise ValueError(
            f"data set {str(folder)!r} is a folder without files; put images into folders of their "
            "classes there, or a table, or name another."
        )
    roots = (str(folder),)
    images = {file for file in files if _is_image(file)}
    if not images and all(file.suffix == ".parquet" for file in files):
        return Tables(_read_parquet(folder), roots=roots)
    if not images or any(file.suffix == ".tar" for file in files):
        return Tables(_load(str(folder), shown=str(folder)), roots=roots)
    metadata = [file for file in files if file.name in METADATA]
    if not metadata:
        read = Tables(_read_class_folders(folder, images), roots=roots)
    elif all(file.suffix == ".csv" for file in metadata):
        read = _read_metadata(folder, metadata, image_column)
    elif all(file.suffix.lower() in _pillow_suffixes() for file in images):
        splits = _load("imagefolder", shown=str(folder), data_dir=str(folder))
        read = Tables(splits, roots=roots)
    else:
        raise ValueError(
            f"data set {str(folder)!r} has DICOM files and metadata of another form than CSV; "
            "write it as metadata.csv with a column file_name."
        )
    return Tables(read.splits, tuple(_ignored(files, read.splits)), (*read.roots, *roots))


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_image(file: Path) -> bool:
    """Whether Pillow or pydicom may read it; DICOM files often have no suffix, or a number."""
    return file.suffix.lower() in (*_pillow_suffixes(), *DICOM_SUFFIXES) or is_dicom_file(file)


def _pillow_suffixes() -> list[str]:
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    suffixes: list[str] = ImageFolder.EXTENSIONS
    return suffixes


def _read_parquet(folder: Path) -> Splits:
    """Read each split, as `datasets` tells them apart by names of files, by itself.

    Together they would all get the class names of the first.
    """
    from datasets.data_files import DataFilesDict, get_data_patterns

    _check_plain(str(folder))
    found = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
    splits: Splits = {}
    for split, files in found.items():
        data_files = {str(split): sorted(map(str, files))}
        splits |= _load("parquet", shown=str(folder), data_files=data_files)
    return splits


def _files_of_splits(folder: Path, images: Iterable[Path]) -> dict[str, list[Path]]:
    """Return the images of each split: the folders right below are splits if they are called so.

    `datasets` would take a class "stress-test", or an image "test_1.png", for the test split.
    """
    below = {image: image.relative_to(folder).parts for image in sorted(images)}
    level = 0
    while True:
        tops = {parts[level] for parts in below.values() if len(parts) > level + 1}
        holds_all = len(tops) == 1 and all(len(parts) > level + 2 for parts in below.values())
        if not holds_all or tops.pop().lower() in SPLIT_NAMES:
            break
        level += 1
    tops = {parts[level] for parts in below.values()}
    named = {top for top in tops if top.lower() in SPLIT_NAMES}
    with_classes = {parts[level] for parts in below.values() if len(parts) > level + 2}
    files: dict[str, list[Path]] = defaultdict(list)
    if named and (named == tops or named & with_classes):
        for image, parts in below.items():
            if parts[level] in named:
                files[SPLIT_NAMES[parts[level].lower()]].append(image)
        return files
    above = {part for parts in below.values() for part in parts[level:-2]}
    misnamed = [part for part in above if not SPLIT_NAMES.keys().isdisjoint(_words(part))]
    if misnamed:
        raise ValueError(
            f"data set {str(folder)!r} has {len(misnamed)} folders above those of its classes with "
            "train, test or val in their names; call folders of splits exactly train, validation "
            "or test and put them right below the data set, or rename them."
        )
    return {"train": list(below)}


def _is_hidden(file: Path) -> bool:
    """Whether `datasets` passes over a file, and so over what archives have of other systems."""
    folders = file.parent.parts
    return file.name[0] == "." or any(folder.startswith((".", "__")) for folder in folders)


def _words(name: str) -> list[str]:
    return re.split(r"[-._ 0-9]+", name.lower())


def _read_class_folders(folder: Path, images: set[Path]) -> Splits:
    """Read images whose class is the name of their folder.

    Unlike the `imagefolder` of `datasets` this takes DICOM files, and a class of any split keeps
    its name.
    """
    import datasets

    files = _files_of_splits(folder, images)
    all_files = [file for of_split in files.values() for file in of_split]
    if len({len(file.parts) for file in all_files}) > 1:
        raise ValueError(
            f"data set {str(folder)!r} has images at several depths of its folders; put each into "
            "the folder of its class, or name the classes in a metadata.csv."
        )
    classes = natural_order({file.parent.name for file in all_files})
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


def _read_metadata(folder: Path, metadata: list[Path], image_column: str | None) -> Tables:
    """Read images by each `metadata.csv` beside them; one in the folder of a split is its table.

    `imagefolder` would find splits in the names of images, and knows no DICOM file.
    """
    named = [(SPLIT_NAMES.get(file.parent.name.lower(), "train"), file) for file in metadata]
    if len(named) > 1:
        return _read_tables(named, image_column)
    read = _read_tables([("train", metadata[0])], image_column)
    table = read.splits["train"]
    if "image" not in table.column_names:
        return read
    rows: dict[str, list[int]] = defaultdict(list)
    for row, path in enumerate(image_paths(table, "image")):
        first = Path(os.path.relpath(path or folder, folder)).parts[0]
        rows[SPLIT_NAMES.get(first.lower(), "")].append(row)
    if "" in rows:
        return read
    return Tables({name: table.select(of_split) for name, of_split in rows.items()}, (), read.roots)


def _read_tables(tables: list[tuple[str, Path]], image_column: str | None) -> Tables:
    """Read the tables of each split, one after the other."""
    import datasets

    parts: dict[str, list[datasets.Dataset]] = defaultdict(list)
    roots: set[str] = set()
    for name, file in tables:
        table, root = _read_table(file, image_column)
        parts[name].append(table)
        roots.add(str(root))
    try:
        splits = {name: datasets.concatenate_datasets(part) for name, part in parts.items()}
    except (TypeError, ValueError):  # its text may quote what a column holds
        raise ValueError(
            f"data set {str(tables[0][1].parent)!r} has tables of one split with other columns or "
            "types; give them all the same."
        ) from None
    return Tables(splits, (), tuple(sorted(roots)))


def _read_csv(table: Path) -> "datasets.Dataset":
    """Read a table into memory; a copy of it in a cache would be readable by others."""
    import datasets
    import pandas as pd

    separator, skipped = "\t" if table.suffix == ".tsv" else ",", 0
    try:
        with table.open(encoding="utf-8-sig") as file:
            first = file.readline().strip().strip('"')
        if re.fullmatch("sep=.", first, re.IGNORECASE):  # as Excel writes it
            separator, skipped = first[-1], 1
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # values without a column
            frame = pd.read_csv(table, sep=separator, skiprows=skipped, index_col=False)
        # A comma at the end of each row is no column.
        empty = [c for c in frame if str(c).startswith("Unnamed: ") and frame[c].isna().all()]
        frame = frame.drop(columns=empty)
        split = datasets.Dataset.from_pandas(frame, preserve_index=False)
    except Exception as error:  # its text may quote what a row holds
        raise ValueError(_reason(error, str(table), is_local=True, has_rows=True)) from None
    if not len(split):
        raise ValueError(f"data set {str(table)!r} has a split without rows; remove it or fill it.")
    return split


def _read_table(table: Path, image_column: str | None) -> tuple["datasets.Dataset", Path]:
    """Read a table in which one column holds the paths of images.

    They are relative to the table, or to the folder above it, as in CheXpert. Only columns whose
    files exist become images, or the one that is named: other paths stay text, and may hold ids.

    Returns:
        The table, and the folder that its paths are relative to.
    """
    import datasets

    split = _read_csv(table)
    if len(split.column_names) == 1 and any(sep in split.column_names[0] for sep in ";\t|"):
        raise ValueError(
            f"data set {str(table)!r} has one column only, with semicolons, tabs or bars in its "
            "name; separate the columns of a CSV file by commas."
        )
    columns = [
        column
        for column, feature in split.features.items()
        if isinstance(feature, datasets.Value) and feature.dtype.endswith("string")
    ]
    values = {column: column_values(split, column) for column in columns}
    places = {
        column: next(filter(None, (_place_of(path, table) for path in _first(texts))), None)
        for column, texts in values.items()
    }
    if image_column == "image" and "image" not in columns:
        image_column = "file_name"  # which is called so below
    chosen = [column for column in columns if places[column] is not None]
    if image_column in columns or "file_name" in chosen:
        chosen = [image_column if image_column in columns else "file_name"]
    elif not chosen:  # files that are missing are said to be, where their names say what they are
        chosen = [c for c in columns if any(map(_has_image_suffix, _first(values[c])))]
    root = table.parent
    for column in chosen:
        root, suffix = places[column] or (table.parent, "")
        name = "image" if column == "file_name" and "image" not in columns else column
        stored = [path and f"{root / _with_slashes(path)}{suffix}" for path in values[column]]
        split = split.remove_columns(column).add_column(name, stored)
        split = split.cast_column(name, datasets.Image())
    return split, root


def _first(paths: list[str | None]) -> list[str]:
    return list(islice(filter(None, paths), FILES_TRIED))


def _place_of(path: str, table: Path) -> tuple[Path, str] | None:
    """Return the folder in which a path of a table is the file of an image, and what it lacks."""
    for folder in (table.parent, table.parent.parent):
        for suffix in ("", *USUAL_SUFFIXES):
            # unlike Path.is_file, this takes any text
            file = os.path.join(folder, _with_slashes(path) + suffix)
            if os.path.isfile(file) and _is_image(Path(file)):
                return folder, suffix
    return None


def _with_slashes(path: str) -> str:
    """A path as another system writes it, with this one's separators."""
    return path.replace("\\", "/") if os.sep == "/" else path


def _has_image_suffix(path: str) -> bool:
    return Path(path).suffix.lower() in (*_pillow_suffixes(), *DICOM_SUFFIXES)


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

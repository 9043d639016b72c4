"""A local file becomes a table: CSV, TSV, JSON lines, Parquet or a WebDataset tar.

Receives the paths of files and the splits that they belong to. Returns rows in memory, in which
images are encoded bytes, or paths.

Guarantees:
    * Just the file that is named is read, anew each time, and nothing is written anywhere.
    * Class names and types that `datasets` stored in a Parquet file are those of its columns.
    * What parsers say is not passed on: it quotes rows.
"""

import json
import os
import re
import tarfile
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from hf_dpmuon.data.columns import column_values, holds_images
from hf_dpmuon.data.dicom import DICOM_SUFFIXES, is_dicom_file

if TYPE_CHECKING:
    import datasets

__all__ = ["READERS", "Tables", "image_suffixes", "is_image", "read_tables"]

USUAL_SUFFIXES = (".png", ".jpg", ".jpeg", ".dcm", ".tif", ".tiff")  # which ids leave out
PATHS_TRIED = 100  # of a column of text: whether it names files
PEAK_PER_BYTE = 2.5  # memory that reading takes, by the size of a file; measured at most 2.3
IMAGES_AT_ONCE = 64  # of a tar: an array of Arrow holds 2 GB at most
MEMBER = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")  # of a tar: sample and field
# How a field of a tar is read, by its last suffix; others stay bytes.
FIELDS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
}


@dataclass(frozen=True)
class Tables:
    """A data set as it was read.

    Attributes:
        splits: Its tables.
        notes: What was left out, with counts.
        roots: Folders that stored paths begin with. Their own names say nothing of an image.
    """

    splits: "dict[str, datasets.Dataset]"
    notes: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()


def read_tables(files: list[tuple[str, Path]], image_column: str | None) -> Tables:
    """Read the files of each split, one after the other.

    Args:
        files: Each with the name of its split.
        image_column: The column of paths to read as images; by default those whose files exist.

    Raises:
        ValueError: A file cannot be read, or those of one split differ in columns or classes.
    """
    import datasets

    parts: dict[str, list[datasets.Dataset]] = defaultdict(list)
    roots: set[str] = set()
    for split, file in files:
        table, root = _with_images(_read(file), file, image_column)
        parts[split].append(table)
        roots.add(str(root))
    try:
        splits = {split: datasets.concatenate_datasets(part) for split, part in parts.items()}
    except (TypeError, ValueError):  # its text may quote what a column holds
        raise ValueError(
            f"data set {str(files[0][1].parent)!r} has tables of one split with other columns, "
            "types or class names; give them all the same."
        ) from None
    return Tables(splits, roots=tuple(sorted(roots)))


@cache
def image_suffixes() -> tuple[str, ...]:
    """Suffixes of the files that Pillow or pydicom may read."""
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    return (*ImageFolder.EXTENSIONS, *DICOM_SUFFIXES)


def is_image(file: Path) -> bool:
    """Whether it is called an image, or is DICOM, which often has no suffix or a number."""
    return file.suffix.lower() in image_suffixes() or is_dicom_file(file)


def _read(file: Path) -> "datasets.Dataset":
    import psutil

    needed, free = PEAK_PER_BYTE * file.stat().st_size, psutil.virtual_memory().available
    if needed > free:
        raise ValueError(
            f"data set {str(file)!r} takes about {needed / 2**30:.1f} GiB of memory to read, of "
            f"which {free / 2**30:.1f} GiB are free; unpack its images into files, which are read "
            "one by one."
        )
    try:
        split = READERS[file.suffix.lower()](file)
    except UnicodeDecodeError:
        raise ValueError(
            f"data set {str(file)!r} is not encoded in UTF-8; save it as CSV UTF-8."
        ) from None
    except Exception as error:  # its text may quote what a row holds
        raise ValueError(
            f"data set {str(file)!r} cannot be read as images with labels ({type(error).__name__})."
        ) from None
    if not len(split):
        raise ValueError(f"data set {str(file)!r} has a split without rows; remove it or fill it.")
    if len(split.column_names) == 1 and any(sep in split.column_names[0] for sep in ";\t|"):
        raise ValueError(
            f"data set {str(file)!r} has one column only, with semicolons, tabs or bars in its "
            "name; separate the columns of a CSV file by commas."
        )
    return split


def _read_csv(file: Path) -> "datasets.Dataset":
    import datasets
    import pandas as pd

    separator, skipped = "\t" if file.suffix.lower() == ".tsv" else ",", 0
    with file.open(encoding="utf-8-sig") as opened:
        first = opened.readline().strip().strip('"')
    if re.fullmatch("sep=.", first, re.IGNORECASE):  # as Excel writes it
        separator, skipped = first[-1], 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)  # values without a column
        frame = pd.read_csv(file, sep=separator, skiprows=skipped, index_col=False)
    # A comma at the end of each row is no column.
    empty = [c for c in frame if str(c).startswith("Unnamed: ") and frame[c].isna().all()]
    return datasets.Dataset.from_pandas(frame.drop(columns=empty), preserve_index=False)


def _read_json_lines(file: Path) -> "datasets.Dataset":
    import datasets

    with file.open(encoding="utf-8-sig") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    return datasets.Dataset.from_dict(
        {name: [row.get(name) for row in rows] for name in _names(rows)}
    )


def _read_parquet(file: Path) -> "datasets.Dataset":
    import datasets
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    with pa.OSFile(str(file)) as opened:
        table = pq.ParquetFile(opened).read()
    for place, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):  # a categorical of pandas
            plain = table.column(place).cast(field.type.value_type)
            table = table.set_column(place, field.name, plain)
    return datasets.Dataset(table, fingerprint=uuid4().hex)  # else that of a whole copy in memory


def _read_tar(file: Path) -> "datasets.Dataset":
    """Read the samples of a tar: files of one name, each with another suffix."""
    import datasets
    import pyarrow as pa

    samples: dict[str, dict[str, Any]] = defaultdict(dict)
    images: dict[str, datasets.Image] = {}
    with tarfile.open(file) as tar:
        for member in tar:
            named = MEMBER.fullmatch(member.name)
            content = tar.extractfile(member)
            if named is None or content is None:  # a hidden file, or a folder
                continue
            sample, field = named.groups()
            if field in samples[sample]:
                raise ValueError("a sample is there twice")
            suffix = field.rpartition(".")[2].lower()
            value = FIELDS.get(suffix, bytes)(content.read())
            if f".{suffix}" in image_suffixes():
                images[field] = datasets.Image()
                value = {"bytes": value, "path": member.name}
            samples[sample][field] = value
    rows = [{**fields, "__key__": sample} for sample, fields in samples.items()]
    columns = {}
    for name in _names(rows):
        values = [row.pop(name, None) for row in rows]
        at_once, kind = (IMAGES_AT_ONCE, images[name].pa_type) if name in images else (None, None)
        parts = range(0, len(values), at_once or len(values))
        columns[name] = pa.chunked_array(
            [pa.array(values[i : at_once and i + at_once], type=kind) for i in parts]
        )
    table = pa.table(columns)
    features = {**datasets.Features.from_arrow_schema(table.schema), **images}
    info = datasets.DatasetInfo(features=datasets.Features(features))
    return datasets.Dataset(table, info=info, fingerprint=uuid4().hex)


READERS: "dict[str, Callable[[Path], datasets.Dataset]]" = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
    ".tar": _read_tar,
}


def _names(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _with_images(
    split: "datasets.Dataset", file: Path, image_column: str | None
) -> "tuple[datasets.Dataset, Path]":
    """Turn columns of paths into images, in a table that holds none itself.

    Paths are relative to the table, or to the folder above it, as in CheXpert. Only columns whose
    files exist become images, or the one that is named: other paths stay text, and may hold ids.

    Returns:
        The table, and the folder that its paths are relative to.
    """
    import datasets

    root = file.parent
    if any(map(holds_images, split.features.values())):
        return split, root
    columns = [
        column
        for column, feature in split.features.items()
        if isinstance(feature, datasets.Value) and feature.dtype.endswith("string")
    ]
    values = {column: column_values(split, column) for column in columns}
    places = {
        column: next(filter(None, (_place_of(path, file) for path in _first(texts))), None)
        for column, texts in values.items()
    }
    if image_column == "image" and "image" not in columns:
        image_column = "file_name"  # which is called so below
    chosen = [column for column in columns if places[column] is not None]
    if image_column in columns or "file_name" in chosen:
        chosen = [image_column if image_column in columns else "file_name"]
    elif not chosen:  # files that are missing are said to be, where their names say what they are
        chosen = [c for c in columns if any(map(_has_image_suffix, _first(values[c])))]
    for column in chosen:
        root, suffix = places[column] or (file.parent, "")
        name = "image" if column == "file_name" and "image" not in columns else column
        stored = [path and f"{root / _with_slashes(path)}{suffix}" for path in values[column]]
        split = split.remove_columns(column).add_column(name, stored)
        split = split.cast_column(name, datasets.Image())
    return split, root


def _first(paths: list[str | None]) -> list[str]:
    return list(islice(filter(None, paths), PATHS_TRIED))


def _place_of(path: str, table: Path) -> tuple[Path, str] | None:
    """Return the folder in which a path of a table is the file of an image, and what it lacks."""
    for folder in (table.parent, table.parent.parent):
        for suffix in ("", *USUAL_SUFFIXES):
            # unlike Path.is_file, this takes any text
            file = os.path.join(folder, _with_slashes(path) + suffix)
            if os.path.isfile(file) and is_image(Path(file)):
                return folder, suffix
    return None


def _with_slashes(path: str) -> str:
    """A path as another system writes it, with this one's separators."""
    return path.replace("\\", "/") if os.sep == "/" else path


def _has_image_suffix(path: str) -> bool:
    return Path(path).suffix.lower() in image_suffixes()

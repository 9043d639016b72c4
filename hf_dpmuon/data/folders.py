"""A folder becomes tables: its files are told apart, and put into splits.

Receives a folder. Returns the tables of what it holds: tables of paths, Parquet files or tars,
images with metadata, or images in folders of their classes.

Guarantees:
    * Every file that is not hidden became rows or is counted in a note.
    * A split is what is called so in full: a class "stress-test" is none.
"""

import mimetypes
import os
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from hf_dpmuon.data.columns import image_paths, natural_order
from hf_dpmuon.data.tables import Tables, image_suffixes, is_image, read_tables

if TYPE_CHECKING:
    import datasets

__all__ = ["read_folder"]

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
OF_A_RUN = {"privacy_report.json", "privacy_ledger.jsonl", "trainer_state.json"}
# What the folder or the file of a split is called, as `datasets` has it.
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "dev", "val"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}


def read_folder(folder: Path, image_column: str | None) -> Tables:
    """Read the tables of a folder if there are any, else its tars or Parquet files, else images.

    Args:
        folder: Resolved.
        image_column: As for `read_tables`.

    Raises:
        ValueError: It is not clear what the data are, or they cannot be read.
    """
    files, notes = _files(folder)
    metadata = [file for file in files if file.name in METADATA]
    others = [file for file in files if file.name not in METADATA]
    tables = [f for f in others if f.suffix.lower() in (".csv", ".tsv") and f.parent == folder]
    packed = [f for f in others if f.suffix.lower() in (".parquet", ".tar")]
    images = [] if tables else [file for file in files if is_image(file)]
    if tables:
        used, alone = tables, len(tables) == 1
        read = read_tables([("train" if alone else t.stem, t) for t in tables], image_column)
    elif packed:
        kinds = {file.suffix.lower() for file in packed}
        if images or len(kinds) > 1:
            raise ValueError(
                f"data set {str(folder)!r} has {len(images)} images beside {len(packed)} files "
                f"that end in {' or '.join(sorted(kinds))}; move away what is not the data set, "
                "or name a folder or a file below it."
            )
        used = packed
        read = read_tables(_packed_splits(folder, packed), image_column)
    elif metadata:
        used = metadata
        read = _read_metadata(folder, metadata, image_column)
    elif images:
        used = []
        read = Tables(_read_class_folders(folder, images))
    else:
        raise ValueError(
            f"data set {str(folder)!r} has {len(files)} files, but no image, table, Parquet file "
            "or tar; name another folder."
        )
    notes += _ignored({*files} - {*used}, read.splits)
    return Tables(read.splits, tuple(notes), (*read.roots, str(folder)))


def _files(folder: Path) -> tuple[list[Path], list[str]]:
    """Return all files below, but hidden ones and those of training runs, and a note on these."""
    files: list[Path] = []
    closed: list[OSError] = []
    links = runs = 0
    for parent, folders, names in os.walk(folder, onerror=closed.append):
        here = Path(parent)
        if not OF_A_RUN.isdisjoint(names):  # its pictures would be a class
            runs += 1
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        links += sum((here / name).is_symlink() for name in folders)
        files += [here / name for name in names if name[0] != "."]
    if links:
        raise ValueError(
            f"data set {str(folder)!r} has {links} links to folders, which are not followed; put "
            "folders in their place."
        )
    if closed:
        raise ValueError(
            f"data set {str(folder)!r} has {len(closed)} folders that cannot be listed "
            f"({type(closed[0]).__name__}); give this user the right to read them."
        )
    unreadable = sum(not _is_utf8(str(file)) for file in files)
    if unreadable:
        raise ValueError(
            f"data set {str(folder)!r} has {unreadable} files whose names are not UTF-8, as old "
            "archives have them; rename them, for instance with `convmv --notest -t utf-8`."
        )
    if not files:
        found = f" other than {runs} folders of training runs" if runs else ""
        raise ValueError(
            f"data set {str(folder)!r} is a folder without files{found}; put images into folders "
            "of their classes there, or a table, or name another."
        )
    note = f"{runs} folders of training runs lie in the data set and were left out"
    return sorted(files), [note] if runs else []


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _words(name: str) -> list[str]:
    return re.split(r"[-._ 0-9]+", name.lower())


def _packed_splits(folder: Path, packed: list[Path]) -> list[tuple[str, Path]]:
    """Return files with their splits, which the names of files or of folders above say."""
    splits = []
    for file in packed:
        parts = file.relative_to(folder).with_suffix("").parts
        splits.append({SPLIT_NAMES.get(w, "") for part in parts for w in _words(part)} - {""})
    unclear = sum(len(named) > 1 for named in splits)
    if any(splits):
        unclear += sum(not named for named in splits)
    if unclear:
        raise ValueError(
            f"data set {str(folder)!r} has {len(packed)} tars or Parquet files, of which {unclear} "
            "name no split, or several; put exactly one of train, validation and test into the "
            "name of each file or of a folder above it, or name a single file."
        )
    return [(named.pop() if named else "train", f) for named, f in zip(splits, packed, strict=True)]


def _read_class_folders(folder: Path, images: list[Path]) -> "dict[str, datasets.Dataset]":
    """Read images whose class is the name of their folder; a class of any split keeps its name."""
    import datasets

    files = _image_splits(folder, images)
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


def _image_splits(folder: Path, images: list[Path]) -> dict[str, list[Path]]:
    """Return the images of each split: the folders right below are splits if they are called so."""
    below = {image: image.relative_to(folder).parts for image in images}
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
    return {"train": images}


def _read_metadata(folder: Path, metadata: list[Path], image_column: str | None) -> Tables:
    """Read images by each table beside them; one in the folder of a split is its table."""
    if len({file.suffix for file in metadata}) > 1:
        raise ValueError(
            f"data set {str(folder)!r} has metadata in {len({f.suffix for f in metadata})} forms, "
            f"which may tell of the same images; keep one of {', '.join(METADATA)}."
        )
    if len(metadata) > 1:
        names = [SPLIT_NAMES.get(file.parent.name.lower(), "train") for file in metadata]
        return read_tables(list(zip(names, metadata, strict=True)), image_column)
    read = read_tables([("train", metadata[0])], image_column)
    table = read.splits["train"]
    if "image" not in table.column_names:
        return read
    rows: dict[str, list[int]] = defaultdict(list)
    for row, path in enumerate(image_paths(table, "image")):
        first = Path(os.path.relpath(path or folder, folder)).parts[0]
        rows[SPLIT_NAMES.get(first.lower(), "")].append(row)
    if "" in rows:
        return read
    splits = {name: table.select(of_split) for name, of_split in rows.items()}
    return Tables(splits, roots=read.roots)


def _ignored(files: set[Path], splits: "dict[str, datasets.Dataset]") -> list[str]:
    """Note the files that became no row."""
    import datasets

    read = {
        path
        for split in splits.values()
        for column, feature in split.features.items()
        if isinstance(feature, datasets.Image)
        for path in image_paths(split, column)
    }
    ignored = [file for file in files if str(file) not in read and file.name != "README.md"]
    if not ignored:
        return []
    # The end of a name that is no usual suffix may be anything, a patient's name too.
    suffixes = (file.suffix.lower() for file in ignored)
    usual = {*mimetypes.types_map, *image_suffixes()}
    counts = Counter(suffix if suffix in usual else "other" for suffix in suffixes)
    kinds = ", ".join(f"{count} {suffix}" for suffix, count in sorted(counts.items()))
    return [f"{len(ignored)} files of the folder became no example and were ignored ({kinds})"]

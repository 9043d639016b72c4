"""Which row a row really is, through subsets, selections, files, concatenations and wrappers.

Receives data sets; returns keys for each row, of which two rows share one where they are the same
storage. No value is read but paths of images.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import ConcatDataset, Subset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from hf_dpmuon.data.columns import holds_images
from hf_dpmuon.data.examples import ImageExamples

if TYPE_CHECKING:
    import datasets

__all__ = ["row_keys", "storage_keys"]


Keys = tuple[Hashable, ...]


def row_keys(dataset: Any) -> Sequence[Keys]:
    """Return the keys of each row, one for each of its columns.

    Keys are places in files or buffers, where the storage is known (``datasets``, lists,
    ``TensorDataset``, ``ImageExamples``, image folders of torchvision). A data set of another kind
    that holds data sets has their rows: one by one where it is as long as one of them or as all
    together, several times where it is longer. Otherwise nobody knows which, and beside a key of
    their own its rows have one that is the set of all keys that they may have.

    Args:
        dataset: Map-style, with a length.
    """
    return _keys(dataset, frozenset())


def storage_keys(dataset: Any) -> set[Hashable]:
    """Return all keys that any row has, or may have."""
    return _flat(row_keys(dataset))


def _keys(dataset: Any, above: frozenset[int]) -> Sequence[Keys]:
    """Return the keys of each row; ``above`` are the data sets that hold this one."""
    import datasets
    from torchvision.datasets import DatasetFolder

    above |= {id(dataset)}
    if isinstance(dataset, Subset):
        keys = _keys(dataset.dataset, above)
        return [keys[int(index)] for index in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        return [key for part in dataset.datasets for key in _keys(part, above)]
    if isinstance(dataset, ImageExamples):
        return _keys(dataset.rows, above)
    if isinstance(dataset, TensorDataset):
        first = dataset.tensors[0]
        stride = first.stride(0) * first.element_size()
        return [((first.data_ptr() + stride * row,),) for row in range(len(first))]
    if isinstance(dataset, datasets.Dataset):
        return _table_keys(dataset)
    if isinstance(dataset, DatasetFolder):
        return [(str(Path(path).resolve()),) for path, _ in dataset.samples]
    if isinstance(dataset, list | tuple):
        return [(id(row),) for row in dataset]
    held = [_keys(part, above) for part in _held(dataset) if id(part) not in above]
    size, total = len(dataset), sum(map(len, held))
    if held and size >= total:
        one_by_one = [keys for of_part in held for keys in of_part]
        return [one_by_one[row % total] for row in range(size)]
    beside = [keys for keys in held if len(keys) == size] or [
        [((id(dataset), row),) for row in range(size)]
    ]
    others = _flat(keys for of_part in held if len(of_part) != size for keys in of_part)
    may_have = (frozenset(others),) if others else ()
    return [
        (*(key for keys in row for key in keys), *may_have) for row in zip(*beside, strict=True)
    ]


def _flat(rows: Iterable[Keys]) -> set[Hashable]:
    """Return all keys of some rows, of which some may be sets of keys."""
    found = {key for keys in rows for key in keys}
    return found.union(*(key for key in found if isinstance(key, frozenset)))


def _held(dataset: Any) -> list[Any]:
    """Return the data sets with rows among the attributes of another, and among their items."""
    import datasets

    values = [*vars(dataset).values()] if hasattr(dataset, "__dict__") else []
    for value in values[:]:
        if isinstance(value, Mapping | list | tuple):
            values += value.values() if isinstance(value, Mapping) else value
    kinds = TorchDataset | datasets.Dataset
    held = [one for one in values if isinstance(one, kinds) and hasattr(one, "__len__")]
    return list({id(one): one for one in held if len(one)}.values())


def _table_keys(table: datasets.Dataset) -> list[Keys]:
    """Keys of the rows of a ``datasets`` table, one for each column.

    A key is the file of an image, or else the column's buffer and the place in it.
    """
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    files = _mapped_files()
    columns: list[list[Hashable]] = []
    for name, column in zip(table.data.column_names, table.data.columns, strict=True):
        keys: list[Hashable] = []
        for chunk in column.chunks:
            address = next((b.address for b in chunk.buffers() if b is not None), id(table))
            origin = _origin(address, files)
            paths: list[str | None] = [None] * len(chunk)
            if holds_images(table.features[name]):
                has_no_bytes = pc.is_null(pc.struct_field(chunk, "bytes"))
                path = pc.struct_field(chunk, "path")
                paths = pc.if_else(has_no_bytes, path, None).to_pylist()
            keys += [path or (origin, chunk.offset + place) for place, path in enumerate(paths)]
        columns.append(keys)
    rows: list[Keys] = list(zip(*columns, strict=True))
    if table._indices is None:
        return rows
    return [rows[index] for index in table._indices.column(0).to_pylist()]


def _mapped_files() -> list[tuple[int, int, tuple[str, str, int]]]:
    """Start, end, and file with offset, of each file that is mapped into memory, on Linux."""
    path = Path("/proc/self/maps")
    if not path.is_file():
        return []
    mapped = []
    for line in path.read_text(errors="replace").splitlines():
        span, _, offset, device, inode = line.split(maxsplit=5)[:5]
        if inode != "0":
            start, end = (int(number, 16) for number in span.split("-"))
            mapped.append((start, end, (device, inode, int(offset, 16) - start)))
    return mapped


def _origin(address: int, files: list[tuple[int, int, tuple[str, str, int]]]) -> Hashable:
    """A place in a file, the same however often the file is opened; else the address."""
    for start, end, (device, inode, shift) in files:
        if start <= address < end:
            return device, inode, address + shift
    return address

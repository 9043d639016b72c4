"""Which row a row really is, through subsets, selections, shuffles, files and concatenations.

Receives data sets; returns keys for each row, of which two rows share one where they are the same
storage. No value is read.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import ConcatDataset, Subset, TensorDataset

from hf_dpmuon.data.examples import ImageExamples

if TYPE_CHECKING:
    import datasets

__all__ = ["row_keys"]


Keys = tuple[Hashable, ...]


def row_keys(dataset: Any) -> Sequence[Keys]:
    """Return the keys of each row, one for each of its columns.

    Keys are places in files or buffers, where the storage is known (``datasets``, lists,
    ``TensorDataset``, ``ImageExamples``), and otherwise the data set itself and the index.

    Args:
        dataset: Map-style, with a length.
    """
    if isinstance(dataset, Subset):
        keys = row_keys(dataset.dataset)
        return [keys[int(index)] for index in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        return [key for part in dataset.datasets for key in row_keys(part)]
    if isinstance(dataset, ImageExamples):
        return row_keys(dataset.rows)
    if isinstance(dataset, TensorDataset):
        first = dataset.tensors[0]
        stride = first.stride(0) * first.element_size()
        return [((first.data_ptr() + stride * row,),) for row in range(len(first))]
    if _is_table(dataset):
        return _table_keys(dataset)
    if isinstance(dataset, list | tuple):
        return [(id(row),) for row in dataset]
    return [((id(dataset), row),) for row in range(len(dataset))]


def _is_table(dataset: Any) -> bool:
    import datasets

    return isinstance(dataset, datasets.Dataset)


def _table_keys(table: datasets.Dataset) -> list[Keys]:
    """Keys of the rows of a ``datasets`` table: for each column its buffer, and the place in it."""
    files = _mapped_files()
    columns: list[list[Hashable]] = []
    for column in table.data.columns:
        keys: list[Hashable] = []
        for chunk in column.chunks:
            address = next((b.address for b in chunk.buffers() if b is not None), id(table))
            origin = _origin(address, files)
            keys += [(origin, chunk.offset + place) for place in range(len(chunk))]
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

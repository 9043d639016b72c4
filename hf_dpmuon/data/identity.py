"""Which row a row really is, through subsets, selections, shuffles and concatenations.

Receives data sets; returns a key for each row, equal where two rows are the same storage. No value
is read.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import ConcatDataset, Subset, TensorDataset

from hf_dpmuon.data.examples import ImageExamples

if TYPE_CHECKING:
    import datasets

__all__ = ["row_keys"]


def row_keys(dataset: Any) -> Sequence[Hashable]:
    """Return a key for each row.

    Keys are addresses of buffers and places in them, where the storage is known (``datasets``,
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
        return [("address", first.data_ptr() + stride * row) for row in range(len(first))]
    if _is_table(dataset):
        return _table_keys(dataset)
    return [(id(dataset), row) for row in range(len(dataset))]


def _is_table(dataset: Any) -> bool:
    import datasets

    return isinstance(dataset, datasets.Dataset)


def _table_keys(table: datasets.Dataset) -> list[Hashable]:
    """Keys of the rows of a ``datasets`` table: its first column's buffers, and places in them."""
    keys: list[Hashable] = []
    for chunk in table.data.column(0).chunks:
        address = next((b.address for b in chunk.buffers() if b is not None), id(table))
        keys += [(address, chunk.offset + place) for place in range(len(chunk))]
    if table._indices is None:
        return keys
    return [keys[index] for index in table._indices.column(0).to_pylist()]

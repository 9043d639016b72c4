"""Private rows on their way to the model: one at a time, under secret randomness.

Receives a user's data set and collator; returns the batches that the trainer's loop asks for.

Guarantees:
    Whatever a data set or a collator draws from the global generators of ``torch``, ``numpy`` and
    ``random`` for a row of a step comes from that row's own secret seed: neither a public seed nor
    the other rows of the draw decide it. The global generators are as before afterwards. A
    collator sees one row at a time, so it cannot mix rows, and returns one row for it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from hf_dpmuon.data import ImageExamples
from hf_dpmuon.randomness import seeded_globals
from hf_dpmuon.sampling import LogicalBatch, LogicalBatchLoader

__all__ = ["LogicalBatches", "RowWise", "SeededRows"]


@dataclass(frozen=True)
class _SeededRow:
    """A row and the secret seed that is left for its collator."""

    row: Any
    seed: int


class SeededRows(Dataset[_SeededRow]):
    """A map-style data set, indexed by (row, secret seed).

    Args:
        dataset: `ImageExamples`, or subsets and concatenations of them, which take their
            augmentation from the seed by themselves; or any other data set, whose random
            augmentation is seeded from outside.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, key: tuple[int, int]) -> _SeededRow:
        index, seed = key
        dataset, row = _located(self.dataset, index)
        if isinstance(dataset, ImageExamples):
            return _SeededRow(dataset[row, seed], seed)
        with seeded_globals(seed):
            return _SeededRow(self.dataset[index], seed)


def _located(dataset: Dataset[Any], row: int) -> tuple[Dataset[Any], int]:
    """The data set that torch's own subsets and concatenations take a row from, and which it is."""
    if type(dataset) is Subset:
        return _located(dataset.dataset, int(dataset.indices[row]))
    if type(dataset) is ConcatDataset:
        part = bisect_right(dataset.cumulative_sizes, row)
        before = dataset.cumulative_sizes[part - 1] if part else 0
        return _located(dataset.datasets[part], row - before)
    return dataset, row


class RowWise:
    """A collator that sees one row at a time, so that none can mix rows (MixUp, CutMix, padding).

    Only what is a tensor of rows in its batches is kept.

    Args:
        collator: Makes a batch of a list of rows; here always of one row.

    Raises:
        ValueError: In a call, if the collator makes several rows of one, each of which would have
            a clipping bound of its own.
    """

    def __init__(self, collator: Callable[[list[Any]], Mapping[str, Tensor]]) -> None:
        self.collator = collator

    def __call__(self, rows: list[Any]) -> dict[str, Tensor]:
        """Concatenate the batches of one."""
        batches = [self._alone(row) for row in rows]
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def _alone(self, row: Any) -> Mapping[str, Tensor]:
        if isinstance(row, _SeededRow):
            with seeded_globals(row.seed ^ 1):  # not what the data set drew
                return self._alone(row.row)
        made = self.collator([row])
        batch = {name: t for name, t in made.items() if isinstance(t, Tensor) and t.dim() > 0}
        counts = {name: len(t) for name, t in batch.items() if len(t) != 1}
        if counts:
            raise ValueError(
                f"data_collator makes {next(iter(counts.values()))} rows of one in "
                f"{next(iter(counts))!r}, each of which would have a clipping bound of its own; "
                "return one, and set augmentation_multiplicity for several views of an image."
            )
        return batch


class LogicalBatches(Dataset[LogicalBatch]):
    """The stream of draws as a map-style dataset, as the base class's loop wants it.

    When the base class "skips" batches to resume, it skips these indices and no draws: the draws
    go on from the restored generator.
    """

    def __init__(self, loader: LogicalBatchLoader) -> None:
        self.loader = loader
        self._batches: Iterator[LogicalBatch] = iter(())

    def as_loader(self) -> DataLoader[Any]:
        """What the base class iterates over, one logical batch at a time."""
        return DataLoader(
            self,
            batch_size=1,
            collate_fn=_only,
            generator=torch.Generator(),  # else each epoch takes a seed from the global generator
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __getitem__(self, index: int) -> LogicalBatch:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def _only(items: list[LogicalBatch]) -> LogicalBatch:
    (item,) = items
    return item

"""Private rows on their way to the model: one at a time, under secret randomness.

Receives a user's data set and collator; returns the batches that the trainer's loop asks for.

Guarantees:
    Whatever a data set or a collator draws from the global generators of ``torch``, ``numpy`` and
    ``random`` for a row of a step comes from that row's own secret seed: neither a public seed nor
    the other rows of the draw decide it. The global generators are as before afterwards. A
    collator sees one row at a time, so it cannot mix rows, and returns one row for it, whose label
    is one of the model's head.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from hf_dpmuon.data import ImageExamples, collate
from hf_dpmuon.randomness import seeded_globals
from hf_dpmuon.sampling import LogicalBatch, LogicalBatchLoader

__all__ = [
    "DrawDataset",
    "Head",
    "RowError",
    "RowWise",
    "SeededRows",
    "located",
    "processed",
    "template",
]


@dataclass(frozen=True)
class _SeededRow:
    """A row and the secret seed that is left for its collator."""

    row: Any
    seed: int


class SeededRows(Dataset[_SeededRow]):
    """A map-style data set, indexed by (row, secret seed).

    Args:
        dataset: Any map-style data set. `ImageExamples`, or subsets and concatenations of them,
            take the seed of their augmentation, too.
        keep_failures: Whether a row that cannot be read is handed on as a failure, for `RowWise`
            to replace, and does not raise: which rows were drawn is private.
    """

    def __init__(self, dataset: Dataset[Any], *, keep_failures: bool = False) -> None:
        self.dataset = dataset
        self.keep_failures = keep_failures

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, key: tuple[int, int]) -> _SeededRow:
        index, seed = key
        dataset, row = located(self.dataset, index)
        with seeded_globals(seed):  # whoever the data set is, its transform may be anybody's
            ours = isinstance(dataset, ImageExamples)
            try:
                return _SeededRow(dataset[(row, seed) if ours else row], seed)
            except Exception as error:  # a data set may raise what it likes
                if not self.keep_failures:
                    raise
                return _SeededRow(error, seed)


def located(dataset: Dataset[Any], row: int) -> tuple[Dataset[Any], int]:
    """The data set that torch's own subsets and concatenations take a row from, and which it is."""
    if type(dataset) is Subset:
        return located(dataset.dataset, int(dataset.indices[row]))
    if type(dataset) is ConcatDataset:
        part = bisect_right(dataset.cumulative_sizes, row)
        before = dataset.cumulative_sizes[part - 1] if part else 0
        return located(dataset.datasets[part], row - before)
    return dataset, row


@dataclass(frozen=True)
class Head:
    """What a model's head asks of the labels of a row.

    Attributes:
        num_classes: K, the number of its outputs.
        multi_label: Whether a row has K labels, each 0, 1 or NaN for unknown, and not one of K.
    """

    num_classes: int
    multi_label: bool

    def checked(self, labels: Tensor) -> Tensor:
        """Return the labels of one row as the loss takes them: int64 (1,) or float32 (1, K).

        Raises:
            RowError: If they are not labels of this head.
        """
        if self.multi_label:
            if labels.shape != (1, self.num_classes):
                raise RowError(f"labels that are not {self.num_classes} numbers")
            labels = labels.float()
            if not bool(((labels == 0) | (labels == 1) | labels.isnan()).all()):
                raise RowError("labels that are neither 0, 1 nor NaN (for unknown)")
            return labels
        if labels.numel() != 1 or labels.is_floating_point() or labels.is_complex():
            raise RowError("a label that is not a single whole number")
        labels = labels.reshape(1).long()
        if not 0 <= int(labels) < self.num_classes:
            raise RowError(f"a label outside 0 to {self.num_classes - 1}")
        return labels


class RowError(ValueError):
    """What is wrong with a row; without its number, since which rows are drawn is private."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"a row has {reason}; each row must have pixel_values (channels, height, width), or "
            "one Pillow image where a processing_class is given, and labels of the model's head."
        )
        self.reason = reason


class RowWise:
    """A collator that sees one row at a time, so that none can mix rows (MixUp, CutMix, padding).

    Only images and labels are kept. ``label`` is another name for ``labels``.

    Args:
        collator: Makes a batch of a list of rows; here always of one row. By default it takes rows
            that are mappings or pairs of an image and a label.
        head: What the labels are checked against; rows without labels pass then, too, but those of
            a step.
        stand_in: The shapes of a row. A row of a step that cannot be used then becomes one that is
            not finite, which weighs nothing: a run that stopped would tell that it was drawn.

    Raises:
        ValueError: In a call, if the collator makes several rows of one, each of which would have
            a clipping bound of its own; or ``RowError``.
    """

    def __init__(
        self,
        collator: Callable[[list[Any]], Mapping[str, Tensor]] | None = None,
        *,
        head: Head | None = None,
        stand_in: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.collator = collator
        self.head = head
        self.stand_in = stand_in

    def __call__(self, rows: list[Any]) -> dict[str, Tensor]:
        """Concatenate the batches of one."""
        batches = [self._alone(row) for row in rows]
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def _alone(self, row: Any) -> dict[str, Tensor]:
        if isinstance(row, _SeededRow):
            try:
                return self._of_a_step(row)
            except Exception:
                if self.stand_in is None:
                    raise
                batch = {name: tensor[None] for name, tensor in self.stand_in.items()}
                return {**batch, "pixel_values": batch["pixel_values"] * torch.nan}
        made = _batch_of(row) if self.collator is None else self.collator([row])
        batch = {
            "labels" if name == "label" else name: tensor
            for name, tensor in made.items()
            if name in ("pixel_values", "labels", "label") and isinstance(tensor, Tensor)
        }
        for name in ("labels", "label"):
            if name in made and made[name] is not None and "labels" not in batch:
                raise RowError(f"a label of type {type(made[name]).__name__}")
        if "pixel_values" not in batch:
            raise RowError(f"no pixel_values ({', '.join(map(str, made)) or 'nothing'} instead)")
        for name, tensor in batch.items():
            if tensor.dim() == 0 or len(tensor) != 1:
                rows = len(tensor) if tensor.dim() else 0
                raise ValueError(
                    f"data_collator makes {rows} rows of one in {name!r}, each of which would have "
                    "a clipping bound of its own; return one, and set augmentation_multiplicity "
                    "for several views of an image."
                )
        if "labels" in batch:
            batch["labels"] = self.checked_labels(batch["labels"])
        return batch

    def _of_a_step(self, row: _SeededRow) -> dict[str, Tensor]:
        if isinstance(row.row, Exception):
            raise row.row
        # Seeding takes time, and our own collators draw nothing for a plain dict of tensors.
        ours = self.collator is None or self.collator is collate
        is_plain = type(row.row) is dict and all(type(v) is Tensor for v in row.row.values())
        # another seed than the data set's
        with nullcontext() if ours and is_plain else seeded_globals(row.seed ^ 1):
            batch = self._alone(row.row)
        if "labels" not in batch:
            raise RowError("no label")
        if self.stand_in is not None and any(
            batch[name].shape[1:] != tensor.shape for name, tensor in self.stand_in.items()
        ):
            raise RowError("another shape")
        return batch

    def checked_labels(self, labels: Tensor) -> Tensor:
        """Return the labels of one row as the loss takes them.

        Raises:
            RowError: If the head, or without one any loss, cannot take them.
        """
        if self.head is not None:
            return self.head.checked(labels)
        if not labels.is_floating_point() and bool((labels < 0).any()):
            raise RowError("labels below 0, such as -100 for a row to be ignored")
        return labels


def template(dataset: Dataset[Any], collator: RowWise) -> dict[str, Tensor]:
    """The shapes of a row, filled with zeros: of the private row nothing else is used.

    Raises:
        ValueError: If the rows cannot be used, or a row is not the same each time that it is asked
            for under the same seed.
    """
    seeded = SeededRows(dataset)
    first, again = (collator([seeded[0, 0]]) for _ in range(2))
    for name, tensor in first.items():
        same = tensor.shape == again[name].shape and torch.equal(
            tensor.nan_to_num(), again[name].nan_to_num()
        )
        if not same:
            raise ValueError(
                f"train_dataset gives other {name} for the same row under the same seed, so its "
                "augmentation depends on what was drawn before; draw from the global generators of "
                "torch, numpy or random, which are seeded for each row, and from no other."
            )
    return {name: torch.zeros_like(tensor[0]) for name, tensor in first.items()}


def _batch_of(row: Any) -> dict[str, Any]:
    if isinstance(row, Mapping):
        values = dict(row)
    elif isinstance(row, tuple | list) and len(row) == 2:
        values = {"pixel_values": row[0], "labels": row[1]}
    else:
        raise RowError(f"the type {type(row).__name__}")
    return {
        name: torch.as_tensor(value)[None]
        if isinstance(value, Tensor | np.ndarray | np.generic | int | float | list)
        and name in ("pixel_values", "labels", "label")
        else value
        for name, value in values.items()
    }


def processed(rows: list[Any], *, processor: Any) -> dict[str, Any]:
    """Make a batch of one row, whose only image an image processor turns into pixel values.

    A row that has pixel values already, or not just one image, is left as it is.
    """
    (row,) = rows
    batch = _batch_of(row)
    images = [value for value in batch.values() if isinstance(value, Image.Image)]
    if "pixel_values" not in batch and len(images) == 1:
        mode = "L" if len(processor.image_mean) == 1 else "RGB"
        made = processor(images=images[0].convert(mode), return_tensors="pt")
        batch["pixel_values"] = made["pixel_values"]
    return batch


class DrawDataset(Dataset[LogicalBatch]):
    """The stream of draws as a map-style dataset, as the base class's loop wants it.

    When the base class "skips" batches to resume, it skips these indices and no draws: the draws
    go on from the restored generator.

    Args:
        loader: Makes the draws.
        probe: Raises if the data set is gone; asked before each draw, whatever is drawn.
    """

    def __init__(self, loader: LogicalBatchLoader, *, probe: Callable[[], object]) -> None:
        self.loader = loader
        self._probe = probe
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
        self._probe()
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def _only(items: list[LogicalBatch]) -> LogicalBatch:
    (item,) = items
    return item

"""Which privacy units join each step, and the secret randomness behind it.

Receives the number of units, the sampling rate and a data set; returns logical batches, each one
Poisson draw and each exactly one optimizer step, cut lazily into physical batches that fit in
memory.

Guarantees:
    Every unit joins every draw independently with probability ``sample_rate``, whatever the
    physical batch size, the number of workers, interruptions and epochs. An empty draw is a draw.
    Each draw has a secret generator of its own, which is never one of the global generators of
    ``torch``, ``numpy`` or ``random``.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

__all__ = [
    "PoissonSampler",
    "LogicalBatch",
    "LogicalBatchLoader",
    "PhysicalBatch",
]

IntArray = npt.NDArray[np.int64]
Key = tuple[int, int]  # (row, augmentation seed)

_SEED_BITS = 63  # an augmentation seed fits in a signed 64-bit integer


class PoissonSampler:
    """The law by which privacy units join a draw.

    Args:
        num_units: N >= 1.
        sample_rate: Probability q in (0, 1] with which each unit joins each draw.

    Raises:
        ValueError: A value lies outside its range.

    Guarantees:
        Each of the N units is in a draw with probability q, independently of all other units and
        draws. (q is a float64, and a geometric variate is exact to float64 rounding.)
    """

    def __init__(self, num_units: int, *, sample_rate: float) -> None:
        if num_units < 1:
            raise ValueError(f"num_units={num_units} must be >= 1.")
        if not 0 < sample_rate <= 1:
            raise ValueError(f"sample_rate={sample_rate} must be in (0, 1].")
        self.num_units = num_units
        self.sample_rate = sample_rate

    def draw(self, generator: np.random.Generator) -> IntArray:
        """Returns the units of one draw, ascending and distinct; often of length 0 if q N is small.

        The gaps between successive members of a Bernoulli process are geometric, so time and memory
        are O(q N), not O(N).

        Args:
            generator: A secret generator that nothing else uses.
        """
        mean = self.num_units * self.sample_rate
        chunk = int(mean + 4 * mean**0.5) + 8  # one chunk is nearly always enough
        pieces = []
        last = -1
        while last < self.num_units:
            gaps = generator.geometric(self.sample_rate, size=chunk)
            # A gap beyond the end is the end; without the cut a tiny q would overflow the sum.
            units = last + np.cumsum(np.minimum(gaps, self.num_units + 1))
            pieces.append(units)
            last = int(units[-1])
        drawn: IntArray = np.concatenate(pieces)
        return drawn[: np.searchsorted(drawn, self.num_units)]


class _KeyedDataset(Protocol):
    def __getitem__(self, key: Key, /) -> Any: ...


@dataclass(frozen=True)
class PhysicalBatch:
    """Rows of one draw that are in memory together; all rows of a unit are in one of them.

    Attributes:
        inputs: What ``collate_fn`` made of the rows.
        unit_of_row: For each row, the number of its unit within this batch, int64 of shape (B,);
            None where each row is a unit of its own.
        num_units: Number of units in this batch.
    """

    inputs: Any
    unit_of_row: Tensor | None
    num_units: int


class LogicalBatch:
    """One Poisson draw: iterate it, once, for its physical batches.

    It yields no batch at all for an empty draw, which is a step like any other. The size of a draw
    is private data: there is no ``len``, and ``repr`` does not tell. Whoever counts the rows while
    iterating must not publish the count.
    """

    def __init__(self, pull: Callable[[], Any], layouts: Sequence["_Layout"] = ()) -> None:
        self._pull_one = pull
        self._remaining = deque(layouts)
        self._started = False

    def __iter__(self) -> Iterator[PhysicalBatch]:
        if self._started:
            raise RuntimeError("a LogicalBatch can be iterated only once; its rows are not kept.")
        self._started = True
        return self._pull()

    def _pull(self) -> Iterator[PhysicalBatch]:
        while self._remaining:
            inputs = self._pull_one()
            layout = self._remaining.popleft()
            yield PhysicalBatch(inputs, layout.unit_of_row(), layout.num_units)

    @property
    def _consumed(self) -> bool:
        return not self._remaining


class LogicalBatchLoader:
    """Yields logical batches, whose physical batches come from one ordinary ``DataLoader``.

    The draws form one endless stream, numbered from ``first_draw``: workers prefetch across logical
    batches and epochs, each epoch takes the next ``num_batches`` draws, and no draw is skipped or
    repeated when an epoch is left early. Memory does not grow with the logical batch beyond the
    keys of its rows.

    Args:
        dataset: Indexed with ``(row, augmentation_seed)``, where the seed is a fresh 63-bit integer
            per drawn row. A data set that takes its augmentation from that seed does not depend on
            the number of workers and repeats itself on resume.
        sampler: The law of the draws.
        generator_of: The secret generator of a draw, from its number, the same each time it is
            asked for: a stream that starts at a draw repeats that draw, whatever came before.
        physical_batch_size: Most rows in one physical batch, >= 1. It never changes a result.
        collate_fn: Makes a batch from a list of what ``dataset`` returns.
        num_batches: Logical batches in one pass of ``iter``; the length, >= 1.
        num_workers: As in ``DataLoader``.
        pin_memory: As in ``DataLoader``.
        rows_of_unit: Rows of each unit of ``sampler``, where a unit is not a row: the images of a
            patient, say.
        max_rows_per_unit: Most rows of a drawn unit that are used, chosen anew in each draw.
        augmentations: How often each row is used in a draw, each time with another seed.
        first_draw: Number of the first draw that is handed out.
        rank: This process's number; it gets every ``world_size``-th unit of each draw.
        world_size: Number of processes. All must have equal generators.

    Raises:
        ValueError: A value lies outside its range.

    Guarantees:
        Rows of two draws never meet in a batch. Asking for a logical batch before the last one was
        used up is an error, not a silent loss of rows: a step on a part of its draw would be
        private, yet not the step that was asked for.
    """

    def __init__(
        self,
        dataset: _KeyedDataset,
        *,
        sampler: PoissonSampler,
        generator_of: Callable[[int], np.random.Generator],
        physical_batch_size: int,
        collate_fn: Callable[[list[Any]], Any],
        num_batches: int,
        num_workers: int = 0,
        pin_memory: bool = False,
        rows_of_unit: Sequence[IntArray] | None = None,
        max_rows_per_unit: int | None = None,
        augmentations: int = 1,
        first_draw: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if physical_batch_size < 1:
            raise ValueError(f"physical_batch_size={physical_batch_size} must be >= 1.")
        if num_batches < 1:
            raise ValueError(f"num_batches={num_batches} must be >= 1.")
        if augmentations < 1:
            raise ValueError(f"augmentations={augmentations} must be >= 1.")
        if max_rows_per_unit is not None and max_rows_per_unit < 1:
            raise ValueError(f"max_rows_per_unit={max_rows_per_unit} must be >= 1.")
        if rows_of_unit is not None and len(rows_of_unit) != sampler.num_units:
            raise ValueError(
                f"rows_of_unit names {len(rows_of_unit)} units, but the sampler draws from "
                f"{sampler.num_units}."
            )
        self.dataset = dataset
        self.sampler = sampler
        self.num_batches = num_batches
        self._next_draw = first_draw
        self._draws = _DrawQueue(
            sampler,
            generator_of,
            physical_batch_size,
            first_draw=first_draw,
            rows_of_unit=rows_of_unit,
            max_rows_per_unit=max_rows_per_unit,
            augmentations=augmentations,
            stripe=slice(rank, None, world_size),
        )
        self._loader: DataLoader[Any] = DataLoader(
            dataset,  # type: ignore[arg-type]  # a map from keys, not from integers
            batch_sampler=self._draws,
            collate_fn=partial(_collate_unless_empty, collate_fn),
            num_workers=num_workers,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # else torch takes worker seeds from its global generator
        )
        self._physical_batches: Iterator[Any] | None = None
        self._current = LogicalBatch(self._pull)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[LogicalBatch]:
        for _ in range(self.num_batches):
            yield self._next()

    def _next(self) -> LogicalBatch:
        if not self._current._consumed:
            raise RuntimeError(
                "the last LogicalBatch was not iterated to its end; use up all its physical "
                "batches before asking for the next."
            )
        if self._physical_batches is None:
            self._physical_batches = iter(self._loader)
        layouts = self._draws.hand_out()
        self._next_draw += 1
        if not layouts:
            self._pull()  # the place-holder of an empty draw
        self._current = LogicalBatch(self._pull, layouts)
        return self._current

    def _pull(self) -> Any:
        if self._physical_batches is None:
            raise RuntimeError("the loader was closed; ask for the next logical batch first.")
        return next(self._physical_batches)

    def close(self) -> None:
        """Ends the workers and forgets what they fetched; the stream goes on where it stands.

        Nothing else holds the workers, so they end here and not in some later garbage collection,
        which finds their queues closed and waits five seconds for each.
        """
        self._draws.go_to(self._next_draw)
        self._physical_batches = None
        self._current = LogicalBatch(self._pull)


@dataclass(frozen=True)
class _Layout:
    """How many rows each unit of a physical batch has; None where it is one each."""

    rows_per_unit: tuple[int, ...] | None
    num_units: int

    def unit_of_row(self) -> Tensor | None:
        if self.rows_per_unit is None:
            return None
        units = torch.arange(self.num_units)
        return units.repeat_interleave(torch.tensor(self.rows_per_unit, dtype=torch.int64))


class _DrawQueue(Sampler[list[Key]]):
    """The endless batch sampler, and for each draw what the main process must know of it.

    ``DataLoader`` runs ahead of the trainer by its prefetch, so the layouts of draws wait here
    until they are handed out. An empty draw sends one empty list of keys as a place-holder; without
    it, prefetching would draw on until it finds a row.

    Every process makes the whole draw and keeps its stripe of the units, so that no unit is drawn
    twice or left out.
    """

    def __init__(
        self,
        sampler: PoissonSampler,
        generator_of: Callable[[int], np.random.Generator],
        physical_batch_size: int,
        *,
        first_draw: int,
        rows_of_unit: Sequence[IntArray] | None,
        max_rows_per_unit: int | None,
        augmentations: int,
        stripe: slice,
    ) -> None:
        self._sampler = sampler
        self._generator_of = generator_of
        self._number = first_draw
        self._size = physical_batch_size
        self._rows_of_unit = rows_of_unit
        self._max_rows = max_rows_per_unit
        self._augmentations = augmentations
        self._stripe = stripe
        self._unloaded: deque[tuple[IntArray, IntArray]] = deque()
        self._waiting: deque[list[_Layout]] = deque()

    def __iter__(self) -> Iterator[list[Key]]:
        while True:
            while not self._unloaded:
                self._draw()
            rows, seeds = self._unloaded.popleft()
            yield list(zip(rows.tolist(), seeds.tolist(), strict=True))

    def hand_out(self) -> list[_Layout]:
        """Returns the layouts of the next draw's batches."""
        if not self._waiting:
            self._draw()
        return self._waiting.popleft()

    def go_to(self, number: int) -> None:
        """Forgets the draws made ahead; the next one made is that of this number."""
        self._number = number
        self._unloaded.clear()
        self._waiting.clear()

    def _draw(self) -> None:
        generator = self._generator_of(self._number)
        self._number += 1
        units = self._sampler.draw(generator)
        if self._rows_of_unit is None and self._augmentations == 1:
            batches = self._one_row_each(units, generator)
        else:
            batches = self._several_rows_each(units, generator)
        keys = [batch for batch, _ in batches]
        self._unloaded.extend(keys or [(units[:0], units[:0])])
        self._waiting.append([layout for _, layout in batches])

    def _one_row_each(
        self, rows: IntArray, generator: np.random.Generator
    ) -> list[tuple[tuple[IntArray, IntArray], _Layout]]:
        seeds = _seeds(generator, len(rows))[self._stripe]
        rows = rows[self._stripe]
        pieces = [slice(i, i + self._size) for i in range(0, len(rows), self._size)]
        return [((rows[p], seeds[p]), _Layout(None, len(rows[p]))) for p in pieces]

    def _several_rows_each(
        self, units: IntArray, generator: np.random.Generator
    ) -> list[tuple[tuple[IntArray, IntArray], _Layout]]:
        chosen = [
            np.repeat(self._rows(unit, generator), self._augmentations) for unit in units.tolist()
        ]
        seeds = [_seeds(generator, len(rows)) for rows in chosen]
        batches: list[list[tuple[IntArray, IntArray]]] = []
        room = 0
        for rows, of_rows in zip(chosen[self._stripe], seeds[self._stripe], strict=True):
            if len(rows) > room:
                batches.append([])
                room = self._size
            batches[-1].append((rows, of_rows))
            room -= len(rows)
        return [
            (
                (np.concatenate([r for r, _ in batch]), np.concatenate([s for _, s in batch])),
                _Layout(tuple(len(r) for r, _ in batch), len(batch)),
            )
            for batch in batches
        ]

    def _rows(self, unit: int, generator: np.random.Generator) -> IntArray:
        if self._rows_of_unit is None:
            return np.array([unit], dtype=np.int64)
        rows = self._rows_of_unit[unit]
        if self._max_rows is None or len(rows) <= self._max_rows:
            return rows
        return np.sort(generator.choice(rows, self._max_rows, replace=False))


def _seeds(generator: np.random.Generator, count: int) -> IntArray:
    return generator.integers(0, 2**_SEED_BITS, size=count, dtype=np.int64)


def _collate_unless_empty(collate_fn: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    return collate_fn(samples) if samples else None

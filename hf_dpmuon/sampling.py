"""Which privacy units join each step, and the secret randomness behind it.

Receives the number of units, the sampling rate and a data set; returns logical batches, each one
Poisson draw and each exactly one optimizer step, cut lazily into physical batches that fit in
memory.

Guarantees:
    Every unit joins every draw independently with probability ``sample_rate``, whatever the
    physical batch size, the number of workers, interruptions and epochs. An empty draw is a draw.
    The randomness is seeded by the operating system, is never shared with the global generators of
    ``torch``, ``numpy`` or ``random``, and resumes to the bit.

What the guarantee leaves out: Philox is a statistical generator, not a cryptographic one. Its
128-bit key is beyond search, but nothing proves that somebody who sees part of its output (exact
noise, that is exact sums) cannot foretell the rest.
"""

import hashlib
import re
import secrets
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

__all__ = [
    "secret_generator",
    "generator_state",
    "restore_generator",
    "keyed_generator",
    "Id",
    "canonical_id",
    "plain_ids",
    "PrivacyUnits",
    "PoissonSampler",
    "LogicalBatch",
    "LogicalBatchLoader",
    "PhysicalBatch",
]

IntArray = npt.NDArray[np.int64]
Key = tuple[int, int]  # (row, augmentation seed)
Id = str | int  # of a privacy unit

_STREAMS = {"noise": 0, "sampling": 1}
_SEED_BITS = 63  # an augmentation seed fits in a signed 64-bit integer

# Blanks, control and format characters, and what else Unicode lets a display leave out.
_UNSEEN = {"Zs", "Zl", "Zp", "Cc", "Cf"}
_ASCII_UNSEEN = dict.fromkeys([*range(33), 127])  # the same of ASCII
_IGNORABLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]"
)
# What tables hold in place of an id, in canonical form.
_MISSING = {
    *("nan", "nat", "none", "null", "nil", "n/a", "n.a.", "na", "<na>", "#n/a", "#na"),
    *("unknown", "unk", "missing", "undefined"),
}


def secret_generator(
    seed: int | None = None, *, stream: Literal["noise", "sampling"] = "noise"
) -> np.random.Generator:
    """Returns a generator for one of the two secret streams.

    ``torch.Generator`` on a CPU keeps only 32 bits of its seed, few enough to try them all; this is
    Philox with a 128-bit key.

    Args:
        seed: For tests only, >= 0. A run with a seed is reproducible by anybody who knows the seed
            and so carries no privacy guarantee. Without one, the operating system gives 256 bits.
        stream: The streams of one seed are independent of each other.

    Raises:
        ValueError: ``seed`` is negative or ``stream`` unknown.
    """
    if seed is not None and seed < 0:
        raise ValueError(f"seed={seed} must be >= 0.")
    if stream not in _STREAMS:
        raise ValueError(f"stream={stream!r} must be one of {sorted(_STREAMS)}.")
    entropy = secrets.randbits(256) if seed is None else seed
    key = np.random.SeedSequence(entropy, spawn_key=(_STREAMS[stream],))
    return np.random.Generator(np.random.Philox(key))


def generator_state(generator: np.random.Generator) -> dict[str, Any]:
    """Returns the state of a secret generator as plain JSON values; a secret like the generator."""
    state = generator.bit_generator.state
    return {
        **state,
        "state": {name: array.tolist() for name, array in state["state"].items()},
        "buffer": state["buffer"].tolist(),
    }


def restore_generator(generator: np.random.Generator, state: dict[str, Any]) -> None:
    """Puts a generator into a state of :func:`generator_state`; its next draws are the same bits.

    Raises:
        ValueError: The state is not that of a Philox generator.
    """
    if state.get("bit_generator") != "Philox":
        raise ValueError(f"state['bit_generator']={state.get('bit_generator')!r} must be 'Philox'.")
    generator.bit_generator.state = {
        **state,
        "state": {name: np.array(words, dtype=np.uint64) for name, words in state["state"].items()},
        "buffer": np.array(state["buffer"], dtype=np.uint64),
    }


def keyed_generator(*material: bytes) -> np.random.Generator:
    """A generator whose stream is fixed by a secret key and what it is used for.

    Args:
        material: The key first, then the use. Equal material gives the equal stream, and any other
            an independent one (SHA-256 as a pseudo-random function).
    """
    lengths = b"".join(len(part).to_bytes(8, "big") for part in material)
    digest = hashlib.sha256(lengths + b"".join(material)).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "big")))


def canonical_id(unit: Id) -> str:
    """Returns what two spellings of one id have in common.

    Case, blanks and invisible characters do not count, nor do the forms in which Unicode has one
    character (NFKC), nor leading zeros where an id is all digits.
    """
    text = str(unit)
    while (folded := _fold(text)) != text:  # what is left may compose anew
        text = folded
    if text.isdecimal():
        return "".join(str(unicodedata.decimal(digit)) for digit in text).lstrip("0") or "0"
    return text


def _fold(text: str) -> str:
    if text.isascii():
        return text.lower().translate(_ASCII_UNSEEN)
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return "".join(c for c in _IGNORABLE.sub("", text) if unicodedata.category(c) not in _UNSEEN)


@runtime_checkable
class _Array(Protocol):
    """Of numpy, torch, Arrow or pandas."""

    def tolist(self) -> Any: ...


def plain_ids(ids: object, *, argument: str = "ids") -> list[Id | None]:
    """Returns ids as plain text or plain whole numbers, None where one is missing.

    Missing are None, NaN, blanks, text without a letter or a digit, and words such as "unknown" or
    "n/a". Blanks around an id are dropped. Whole floats are numbers: a column of integers with gaps
    holds them.

    Args:
        ids: A sequence, an array or a tensor, with one id per row.
        argument: What a message calls them.

    Raises:
        ValueError: An id is neither text nor a whole number that its type holds exactly, or some
            are text and some are numbers.
    """
    # Elements of a tensor are objects that equal nothing but themselves.
    values = ids.tolist() if isinstance(ids, _Array) else ids
    if isinstance(values, str | bytes | bytearray) or not isinstance(values, Sequence):
        raise ValueError(
            f"{argument} is of type {type(ids).__name__}; give a list, an array or a tensor with "
            "one id per row."
        )
    exact_below = _exact_below(ids)
    plain: list[Id | None] = []
    kinds: set[str] = set()
    inexact = 0
    for value in values:
        limit = exact_below
        if isinstance(value, np.generic | np.ndarray | Tensor) and value.ndim == 0:
            limit = min(limit, _exact_below(value))
            value = value.item()
        unit: Id | None = None
        if isinstance(value, str):
            text = value.strip()
            unit = None if _says_missing(text) else text
        elif isinstance(value, int) and not isinstance(value, bool):
            unit = int(value)
        elif isinstance(value, float):
            if value.is_integer() and abs(value) < limit:
                unit = int(value)
            else:
                inexact += value == value
        elif value is not None:
            kinds.add(type(value).__name__)
        if unit is not None:
            kinds.add(type(unit).__name__)
        plain.append(unit)
    if len(kinds) > 1 or not kinds <= {"str", "int"}:
        raise ValueError(
            f"{argument} holds values of type {', '.join(sorted(kinds))}; write all ids as str or "
            "all as int."
        )
    if inexact:
        raise ValueError(
            f"{argument} holds {inexact} floats that are no exact whole numbers; write all ids as "
            "str or all as int."
        )
    return plain


def _exact_below(holder: object) -> float:
    """Returns up to where a float of this type tells each whole number from the next."""
    if isinstance(holder, Tensor) and holder.is_floating_point():
        return 2 / torch.finfo(holder.dtype).eps
    if isinstance(holder, np.ndarray | np.generic) and holder.dtype.kind == "f":
        return 2 / float(np.finfo(holder.dtype).eps)
    return 2.0**53


def _says_missing(text: str) -> bool:
    form = canonical_id(text)
    return form in _MISSING or not any(map(str.isalnum, form))


@dataclass(frozen=True, eq=False)
class PrivacyUnits:
    """Which rows of a data set belong to each privacy unit; a partition of all rows.

    Attributes:
        name: What a unit is, such as "patient".
        rows_of_unit: For each unit its rows, int64, at least one; each of the rows 0, 1, ... of
            the data set is in exactly one unit.

    Raises:
        ValueError: ``rows_of_unit`` is no such partition: a row of two units would be counted
            twice, and one of none would be protected by nothing.
    """

    name: str
    rows_of_unit: tuple[IntArray, ...]

    def __post_init__(self) -> None:
        if not self.rows_of_unit or not all(
            isinstance(rows, np.ndarray) and rows.dtype == np.int64 and rows.ndim == 1 and rows.size
            for rows in self.rows_of_unit
        ):
            raise ValueError(
                "rows_of_unit must be one int64 array of at least one row for each unit; make it "
                "with PrivacyUnits.from_ids."
            )
        rows = np.concatenate(self.rows_of_unit)
        if not np.array_equal(np.sort(rows), np.arange(len(rows))):
            raise ValueError(
                f"rows_of_unit has {len(rows)} rows in all, so each of 0 to {len(rows) - 1} must "
                "be in exactly one unit; make it with PrivacyUnits.from_ids."
            )

    @classmethod
    def from_ids(
        cls, ids: Sequence[object] | npt.NDArray[Any] | Tensor, *, name: str
    ) -> "PrivacyUnits":
        """Groups rows that have the same id.

        Args:
            ids: One per row, all str or all int. Only which are equal is used; no id is kept.
            name: What a unit is, such as "patient".

        Raises:
            ValueError: An id is of another type, or missing (None, NaN, blank, or a word for it):
                such rows would be one unit or many. Or two ids are the same but for their spelling:
                one person would be two units.
        """
        plain = plain_ids(ids)
        rows: dict[Id, list[int]] = {}
        for row, unit in enumerate(plain):
            if unit is not None:
                rows.setdefault(unit, []).append(row)
        missing = len(plain) - sum(map(len, rows.values()))
        if missing:
            raise ValueError(
                f"{missing} of {len(plain)} rows have no {name} id, so nobody can say whose they "
                "are; fill the ids in, or remove these rows."
            )
        respelled = len(rows) - len(set(map(canonical_id, rows)))
        if respelled:
            raise ValueError(
                f"{respelled} {name} ids differ from others only in case, blanks, leading zeros or "
                "invisible characters; write each id in one way."
            )
        return cls(name, tuple(np.array(of_unit, dtype=np.int64) for of_unit in rows.values()))

    @property
    def num_rows(self) -> int:
        """Rows of all units together."""
        return sum(map(len, self.rows_of_unit))

    @property
    def largest(self) -> int:
        """Rows of the unit that has most of them."""
        return max(map(len, self.rows_of_unit))

    def __len__(self) -> int:
        return len(self.rows_of_unit)


class PoissonSampler:
    """Draws sets of privacy units.

    Args:
        num_units: N >= 1.
        sample_rate: Probability q in (0, 1] with which each unit joins each draw.
        generator: A secret generator that nothing else uses.

    Raises:
        ValueError: A value lies outside its range.

    Guarantees:
        Each of the N units is in a draw with probability q, independently of all other units and
        draws. (q is a float64, and a geometric variate is exact to float64 rounding.)
    """

    def __init__(
        self, num_units: int, *, sample_rate: float, generator: np.random.Generator
    ) -> None:
        if num_units < 1:
            raise ValueError(f"num_units={num_units} must be >= 1.")
        if not 0 < sample_rate <= 1:
            raise ValueError(f"sample_rate={sample_rate} must be in (0, 1].")
        self.num_units = num_units
        self.sample_rate = sample_rate
        self.generator = generator

    def draw(self) -> IntArray:
        """Returns the units of one draw, ascending and distinct; often of length 0 if q N is small.

        The gaps between successive members of a Bernoulli process are geometric, so time and memory
        are O(q N), not O(N).
        """
        mean = self.num_units * self.sample_rate
        chunk = int(mean + 4 * mean**0.5) + 8  # one chunk is nearly always enough
        pieces = []
        last = -1
        while last < self.num_units:
            gaps = self.generator.geometric(self.sample_rate, size=chunk)
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

    The draws form one endless stream: workers prefetch across logical batches and epochs, each
    epoch takes the next ``num_batches`` draws, and no draw is skipped or repeated when an epoch is
    left early. Memory does not grow with the logical batch beyond the keys of its rows.

    Args:
        dataset: Indexed with ``(row, augmentation_seed)``, where the seed is a fresh 63-bit integer
            per drawn row. A data set that takes its augmentation from that seed does not depend on
            the number of workers and repeats itself on resume.
        sampler: Draws the rows; from here on nothing else may use it or its generator.
        physical_batch_size: Most rows in one physical batch, >= 1. It never changes a result.
        collate_fn: Makes a batch from a list of what ``dataset`` returns.
        num_batches: Logical batches in one pass of ``iter``; the length, >= 1.
        num_workers: As in ``DataLoader``.
        pin_memory: As in ``DataLoader``.
        rows_of_unit: Rows of each unit of ``sampler``, where a unit is not a row: the images of a
            patient, say.
        max_rows_per_unit: Most rows of a drawn unit that are used, chosen anew in each draw.
        augmentations: How often each row is used in a draw, each time with another seed.
        rank: This process's number; it gets every ``world_size``-th unit of each draw.
        world_size: Number of processes. All must have generators in the same state.

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
        physical_batch_size: int,
        collate_fn: Callable[[list[Any]], Any],
        num_batches: int,
        num_workers: int = 0,
        pin_memory: bool = False,
        rows_of_unit: Sequence[IntArray] | None = None,
        max_rows_per_unit: int | None = None,
        augmentations: int = 1,
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
        self._draws = _DrawQueue(
            sampler,
            physical_batch_size,
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
        self._state = generator_state(sampler.generator)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[LogicalBatch]:
        for _ in range(self.num_batches):
            yield self._next()

    def state_dict(self) -> dict[str, Any]:
        """Returns, as plain JSON values, where the stream stands after the last batch handed out.

        It holds the secret state of the sampling generator: keep it local and unreadable to others.
        """
        return {"generator": self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues a stream: the next logical batch is the one that would have come next.

        Raises:
            ValueError: The state is not one of :meth:`state_dict`.
        """
        if "generator" not in state:
            raise ValueError(f"state has keys {sorted(state)}; must be one of state_dict().")
        restore_generator(self.sampler.generator, state["generator"])
        self._draws.clear()
        self._physical_batches = None
        self._current = LogicalBatch(self._pull)
        self._state = generator_state(self.sampler.generator)

    def _next(self) -> LogicalBatch:
        if not self._current._consumed:
            raise RuntimeError(
                "the last LogicalBatch was not iterated to its end; use up all its physical "
                "batches before asking for the next."
            )
        if self._physical_batches is None:
            self._physical_batches = iter(self._loader)
        layouts, self._state = self._draws.hand_out()
        if not layouts:
            self._pull()  # the place-holder of an empty draw
        self._current = LogicalBatch(self._pull, layouts)
        return self._current

    def _pull(self) -> Any:
        if self._physical_batches is None:
            raise RuntimeError("the loader was closed; ask for the next logical batch first.")
        return next(self._physical_batches)

    def restart(self, generator_state: dict[str, Any]) -> LogicalBatch:
        """Forgets the draws made ahead, and goes on from another state of the generator.

        Returns:
            The first logical batch of the new stream.
        """
        self.load_state_dict({"generator": generator_state})
        return self._next()

    def close(self) -> None:
        """Ends the workers and forgets what they fetched; the stream goes on from `state_dict`.

        Nothing else holds the workers, so they end here and not in some later garbage collection,
        which finds their queues closed and waits five seconds for each.
        """
        self.load_state_dict(self.state_dict())


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

    ``DataLoader`` runs ahead of the trainer by its prefetch, so draws wait here until they are
    handed out, each with the generator's state just after it. An empty draw sends one empty list
    of keys as a place-holder; without it, prefetching would draw on until it finds a row.

    Every process makes the whole draw and keeps its stripe of the units, so that all generators
    stay in step and no unit is drawn twice or left out.
    """

    def __init__(
        self,
        sampler: PoissonSampler,
        physical_batch_size: int,
        *,
        rows_of_unit: Sequence[IntArray] | None,
        max_rows_per_unit: int | None,
        augmentations: int,
        stripe: slice,
    ) -> None:
        self._sampler = sampler
        self._size = physical_batch_size
        self._rows_of_unit = rows_of_unit
        self._max_rows = max_rows_per_unit
        self._augmentations = augmentations
        self._stripe = stripe
        self._unloaded: deque[tuple[IntArray, IntArray]] = deque()
        self._waiting: deque[tuple[list[_Layout], dict[str, Any]]] = deque()

    def __iter__(self) -> Iterator[list[Key]]:
        while True:
            while not self._unloaded:
                self._draw()
            rows, seeds = self._unloaded.popleft()
            yield list(zip(rows.tolist(), seeds.tolist(), strict=True))

    def hand_out(self) -> tuple[list[_Layout], dict[str, Any]]:
        """Returns the layouts of the next draw's batches, and the generator's state after it."""
        if not self._waiting:
            self._draw()
        return self._waiting.popleft()

    def clear(self) -> None:
        self._unloaded.clear()
        self._waiting.clear()

    def _draw(self) -> None:
        units = self._sampler.draw()
        if self._rows_of_unit is None and self._augmentations == 1:
            batches = self._one_row_each(units)
        else:
            batches = self._several_rows_each(units)
        keys = [batch for batch, _ in batches]
        self._unloaded.extend(keys or [(units[:0], units[:0])])
        layouts = [layout for _, layout in batches]
        self._waiting.append((layouts, generator_state(self._sampler.generator)))

    def _seeds(self, count: int) -> IntArray:
        return self._sampler.generator.integers(0, 2**_SEED_BITS, size=count, dtype=np.int64)

    def _one_row_each(self, rows: IntArray) -> list[tuple[tuple[IntArray, IntArray], _Layout]]:
        seeds = self._seeds(len(rows))[self._stripe]
        rows = rows[self._stripe]
        pieces = [slice(i, i + self._size) for i in range(0, len(rows), self._size)]
        return [((rows[p], seeds[p]), _Layout(None, len(rows[p]))) for p in pieces]

    def _several_rows_each(
        self, units: IntArray
    ) -> list[tuple[tuple[IntArray, IntArray], _Layout]]:
        chosen = [np.repeat(self._rows(unit), self._augmentations) for unit in units.tolist()]
        seeds = [self._seeds(len(rows)) for rows in chosen]
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

    def _rows(self, unit: int) -> IntArray:
        if self._rows_of_unit is None:
            return np.array([unit], dtype=np.int64)
        rows = self._rows_of_unit[unit]
        if self._max_rows is None or len(rows) <= self._max_rows:
            return rows
        return np.sort(self._sampler.generator.choice(rows, self._max_rows, replace=False))


def _collate_unless_empty(collate_fn: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    return collate_fn(samples) if samples else None

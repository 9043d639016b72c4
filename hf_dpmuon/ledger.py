"""The record of every noise draw, and the only source of a reported epsilon.

Receives the facts of a run and one event per noise draw, before the weights move; keeps them in
``privacy_ledger.jsonl``, and returns what all of them together cost.

A line is canonical JSON: sorted keys, no spaces, and ``chain``, the SHA-256 of the line before's
chain and this line without its own. There are two kinds: ``"run"``, the facts of one (re)start,
and ``"noise"``, one draw.

Guarantees:
    When ``record`` returns, the event is on the disk. A ledger that was changed, or lost a line
    other than its last ones, does not load, and all runs of one protect the same unit under the
    same adjacency. A crash leaves at most one torn line at the end, whose noise never moved
    weights; it is recognised and dropped. The chain finds accidents and edits; it does not stop
    somebody who rewrites the whole file.
"""

import hashlib
import json
import os
import warnings
from bisect import bisect_right
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hf_dpmuon.accounting import (
    EpsilonBound,
    NoiseEvent,
    SampledGaussian,
    epsilon_bound,
)
from hf_dpmuon.files import FOR_OWNER, sync_folder, write_whole
from hf_dpmuon.group_privacy import group_epsilon

__all__ = ["RunFacts", "PrivacyLedger"]

LEDGER_FILE = "privacy_ledger.jsonl"

_GENESIS = "0" * 64


@dataclass(frozen=True)
class RunFacts:
    """What a run states about its privacy; every start and resume writes its own.

    Args:
        delta: In (0, 1).
        accountant: ``"rdp"`` or ``"prv"``.
        privacy_unit: What is protected, such as ``"image"``.
        adjacency: The neighbouring relation, such as ``"add_remove_one"``.
        guarantee: False where something voids the guarantee, such as a fixed noise seed.
        num_units: Number of privacy units, taken as public.
        largest_group: Where a unit is one row although rows share ids: the largest number of rows
            that share one, taken as public.
        group_name: What such an id stands for, such as ``"patient"``.
        max_examples_per_unit: The most rows of a drawn unit that one step uses.

    Raises:
        ValueError: A value is outside its range.
    """

    delta: float
    accountant: str
    privacy_unit: str
    adjacency: str
    guarantee: bool
    num_units: int
    largest_group: int | None = None
    group_name: str | None = None
    max_examples_per_unit: int | None = None

    def __post_init__(self) -> None:
        for name, count in (
            ("num_units", self.num_units),
            ("largest_group", self.largest_group),
            ("max_examples_per_unit", self.max_examples_per_unit),
        ):
            if count is not None and count < 1:
                raise ValueError(f"{name}={count} must be >= 1.")
        epsilon_bound([], delta=self.delta, accountant=self.accountant)  # checks the other two


class PrivacyLedger:
    """An append-only file of runs and noise draws; ``create`` or ``load`` one.

    ``len`` is the number of noise draws.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._runs: list[RunFacts] = []
        self._starts: list[int] = []  # draws before each run
        self._start_heads: list[str] = []  # chain value of the line of each run
        self._events: list[NoiseEvent] = []
        self._segments: list[SampledGaussian] = []
        self._chain: list[str] = []
        self._size = 0  # bytes of whole lines
        self._torn = 0  # bytes after them

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> "PrivacyLedger":
        """Starts an empty ledger, readable by its owner only.

        Raises:
            ValueError: The file exists.
        """
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise ValueError(
                f"path={os.fspath(path)} already holds a ledger; resume that run or choose another "
                "output folder."
            ) from None
        os.close(descriptor)
        sync_folder(Path(path).parent)
        return cls(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "PrivacyLedger":
        """Reads and verifies a ledger. The file stays as it is until the next append.

        Warns:
            UserWarning: The last line was torn by a crash and is dropped.

        Raises:
            ValueError: A line was changed, removed, inserted, repeated or moved; it is named. Or
                two runs differ in privacy unit or adjacency.
            FileNotFoundError: There is no such file.
        """
        ledger = cls(path)
        *lines, rest = ledger.path.read_bytes().split(b"\n")
        if lines and not rest and not _is_json(lines[-1]):
            rest = lines.pop() + b"\n"
        for number, line in enumerate(lines, start=1):
            ledger._read_line(line, number)
        if rest:
            ledger._torn = len(rest)
            warnings.warn(
                f"line {len(lines) + 1} of {ledger.path} is torn and was dropped: the run was "
                "interrupted while writing it, before its noise moved any weight.",
                stacklevel=2,
            )
        return ledger

    def open_run(self, facts: RunFacts) -> None:
        """Appends the facts of a start or resume; they hold for :meth:`epsilon` from now on.

        Raises:
            ValueError: An earlier run protects another unit, or under another adjacency; the
                ledger is as before.
            OSError: The line could not be written; the ledger is as before.
            RuntimeError: Somebody else wrote to the file since this ledger was loaded.
        """
        self._check_run(facts)
        self._append({"kind": "run", **asdict(facts)})
        self._start(facts, self.head)

    def record(self, event: NoiseEvent) -> None:
        """Puts a noise draw on the disk; to be called before the weights move.

        Every call counts. Whether a release is one that was recorded before, and so free, is for
        the caller to know: equal values do not prove it.

        Raises:
            ValueError: No run is open, or the event's noise or sampling rate is outside its range.
            OSError: The line could not be written; the ledger is as before.
        """
        if not self._runs:
            raise ValueError("no run is open in this ledger; call open_run before record.")
        mechanism = _mechanism(event)
        self._append({"kind": "noise", **asdict(event)})
        self._count(event, mechanism)

    @property
    def runs(self) -> tuple[RunFacts, ...]:
        """Facts of every start and resume, in order."""
        return tuple(self._runs)

    @property
    def draws_per_run(self) -> tuple[int, ...]:
        """Number of noise draws of every start and resume, in order."""
        ends = [*self._starts, len(self)][1:]
        return tuple(end - start for start, end in zip(self._starts, ends, strict=True))

    @property
    def events(self) -> tuple[NoiseEvent, ...]:
        """Every noise draw, in order."""
        return tuple(self._events)

    @property
    def accounted(self) -> list[SampledGaussian]:
        """The noise draws as the accountant takes them, runs of equal ones folded."""
        return list(self._segments)

    def epsilon(self) -> EpsilonBound:
        """Returns what all draws together cost at the last run's delta, by its accountant.

        Raises:
            ValueError: The ledger holds no run.
        """
        return self.epsilon_at(self._facts.delta)

    def epsilon_at(self, delta: float) -> EpsilonBound:
        """Returns what all draws together cost at another delta, by the last run's accountant.

        Raises:
            ValueError: The ledger holds no run, or ``delta`` is outside (0, 1).
        """
        return epsilon_bound(self._segments, delta=delta, accountant=self._facts.accountant)

    def epsilon_after(self, draws: int) -> EpsilonBound:
        """Returns what the first ``draws`` draws cost at the last run's delta, by its accountant.

        Raises:
            ValueError: The ledger holds no run, or fewer draws.
        """
        if not 0 <= draws <= len(self):
            raise ValueError(f"draws={draws} must be in [0, {len(self)}].")
        segments, left = [], draws
        for segment in self._segments:
            segments.append(replace(segment, steps=min(left, segment.steps)))
            left -= segments[-1].steps
        facts = self._facts
        return epsilon_bound(segments, delta=facts.delta, accountant=facts.accountant)

    def group_epsilon(self, group_size: int) -> float:
        """Returns epsilon for ``group_size`` units together, at the last run's delta.

        Raises:
            ValueError: The ledger holds no run, or ``group_size`` is below 1.
        """
        facts = self._facts
        accountant = "pld" if facts.accountant == "pld" else "rdp"
        return group_epsilon(
            self._segments, group_size=group_size, delta=facts.delta, accountant=accountant
        )

    @property
    def guarantee(self) -> bool:
        """Whether the epsilon may be claimed: every run said so, and every draw had noise."""
        claimed = bool(self._runs) and all(facts.guarantee for facts in self._runs)
        return claimed and all(segment.noise_multiplier > 0 for segment in self._segments)

    @property
    def head(self) -> str:
        """The chain value of the last line, which stands for the whole ledger."""
        return self._chain[-1] if self._chain else _GENESIS

    def start_of(self, draw: int) -> str:
        """The chain value of the line of the start that made a draw, which stands for that start.

        Args:
            draw: Index of the draw, from 0.
        """
        return self._start_heads[bisect_right(self._starts, draw) - 1]

    def __len__(self) -> int:
        return len(self._events)

    def extends(self, other: "PrivacyLedger") -> bool:
        """Returns whether the other ledger is this one at an earlier time, or now."""
        return self._chain[: len(other._chain)] == other._chain

    def copy_to(self, path: str | os.PathLike[str]) -> None:
        """Writes a copy, whole or not at all, replacing what is there.

        Raises:
            OSError: The copy could not be written; what was there still is.
        """
        path = Path(path)
        with open(self.path, "rb") as source:
            whole_lines = source.read(self._size)
        write_whole(path, whole_lines, mode=FOR_OWNER)

    @property
    def _facts(self) -> RunFacts:
        if not self._runs:
            raise ValueError("no run is open in this ledger, so it has neither delta nor epsilon.")
        return self._runs[-1]

    def _check_run(self, facts: RunFacts) -> None:
        """Draws on different units do not add up to an epsilon of either."""
        for first in self._runs[:1]:
            for name, before, now in (
                ("privacy_unit", first.privacy_unit, facts.privacy_unit),
                ("adjacency", first.adjacency, facts.adjacency),
            ):
                if before != now:
                    raise ValueError(
                        f"{name}={now!r} must be {before!r}, as in the earlier runs of "
                        f"{self.path}; start a new ledger in another output folder."
                    )

    def _start(self, facts: RunFacts, head: str) -> None:
        self._runs.append(facts)
        self._start_heads.append(head)
        self._starts.append(len(self._events))

    def _count(self, event: NoiseEvent, mechanism: SampledGaussian) -> None:
        self._events.append(event)
        last = self._segments[-1] if self._segments else None
        if last and (last.noise_multiplier, last.sample_rate) == (
            mechanism.noise_multiplier,
            mechanism.sample_rate,
        ):
            self._segments[-1] = SampledGaussian(
                last.noise_multiplier, last.sample_rate, last.steps + 1
            )
        else:
            self._segments.append(mechanism)

    def _read_line(self, line: bytes, number: int) -> None:
        try:
            content = json.loads(line)
            chain = content.pop("chain")
            if line != _encode(content, chain) or chain != _link(self.head, content):
                raise ValueError("it does not continue the chain")
            match content.pop("kind"):
                case "run":
                    entry: RunFacts | NoiseEvent = RunFacts(**content)
                case "noise":
                    entry = NoiseEvent(**content)
                    mechanism = _mechanism(entry)
                case kind:
                    raise ValueError(f"its kind is {kind!r}")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"line {number} of {self.path} is not as it was written ({error}), or a line "
                "before it is missing; no epsilon can be reported from this ledger."
            ) from error
        if isinstance(entry, RunFacts):
            self._check_run(entry)
            self._start(entry, chain)
        else:
            self._count(entry, mechanism)
        self._chain.append(chain)
        self._size += len(line) + 1

    def _append(self, content: dict[str, Any]) -> None:
        chain = _link(self.head, content)
        line = _encode(content, chain) + b"\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            size = os.fstat(descriptor).st_size
            if size != self._size + self._torn:
                raise RuntimeError(
                    f"{self.path} has {size} bytes, not the {self._size + self._torn} that this "
                    "run left there; is another run writing to the same output folder?"
                )
            if self._torn:
                os.ftruncate(descriptor, self._size)
                self._torn = 0
            try:
                _write_all(descriptor, line)
                os.fsync(descriptor)
            except BaseException:
                os.ftruncate(descriptor, self._size)
                raise
        finally:
            os.close(descriptor)
        self._chain.append(chain)
        self._size += len(line)


def _mechanism(event: NoiseEvent) -> SampledGaussian:
    return SampledGaussian(event.noise_multiplier, event.sample_rate)


def _link(previous: str, content: dict[str, Any]) -> str:
    return hashlib.sha256(previous.encode() + _canonical(content)).hexdigest()


def _encode(content: dict[str, Any], chain: str) -> bytes:
    return _canonical({**content, "chain": chain})


def _canonical(content: dict[str, Any]) -> bytes:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _write_all(descriptor: int, data: bytes) -> None:
    """``os.write`` to the end: a nearly full disk takes a part without an error."""
    while data:
        data = data[os.write(descriptor, data) :]

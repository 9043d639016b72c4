"""One private run: its plan, what it has spent and may still spend, across stops and processes.

Receives arguments and the number of privacy units, then one event per noise draw; keeps the ledger,
the secret keys and the budget, and writes and reads what a checkpoint must hold of them.

Guarantees:
    A draw of noise is in the ledger before ``record`` returns, and no draw is recorded that would
    pass the budget. Steps that an interrupted run took after a checkpoint are all repeated, bit by
    bit and at no further cost, or all drawn afresh and counted; which of the two is decided from
    public facts before a row is drawn. With several processes the main one keeps ledger and keys,
    and all of them sample and decide alike.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from accelerate.utils import broadcast_object_list

from hf_dpmuon.accounting import NoiseEvent
from hf_dpmuon.arguments import DPTrainingArguments
from hf_dpmuon.data import RepeatedUnit
from hf_dpmuon.files import write_json
from hf_dpmuon.keys import SecretKeys, StartKey
from hf_dpmuon.ledger import LEDGER_FILE, PrivacyLedger, RunFacts
from hf_dpmuon.plan import FEWEST_STEPS, affordable_steps
from hf_dpmuon.randomness import keyed_generator, new_key
from hf_dpmuon.units import PrivacyUnits

__all__ = ["PrivateRun"]

logger = logging.getLogger(__name__)

STATE_FILE = "privacy_state.json"
STATE_KEYS = {"step", "num_units", "settings", "label_names", "pending"}
OPTIMIZER_FILE = "optimizer.pt"
ADJACENCY = "add or remove one"

NOISE_SETTINGS = ("per_sample_max_grad_norm", "logical_batch_size")

T = TypeVar("T")


@dataclass(frozen=True)
class _Replay:
    """A step that an interrupted run took after the checkpoint: its release and its key."""

    event: NoiseEvent
    key: bytes


class PrivateRun:
    """Ledger, secret keys and budget of one run.

    Args:
        args: The run's arguments; ``output_dir`` holds the ledger.
        num_rows: Number of rows of the training data.
        label_names: Names of the classes, in the order of the head's outputs.
        units: Which rows belong together; each is a unit if None.
        max_examples_per_unit: Most rows of a drawn unit in a step.
        repeated_unit: Ids that several rows share although each row is a unit, for the report.
        earlier: The ledger that came with the model. This run goes on with it if it protects as
            many units of the same name, which then are taken to be the same ones.

    Attributes:
        plan: What the accountant assumes.
        ledger: The ledger, in the main process once ``open`` was called; None elsewhere.
        remaining: How many more draws the budget allows.
    """

    def __init__(
        self,
        args: DPTrainingArguments,
        *,
        num_rows: int,
        label_names: Sequence[str],
        units: PrivacyUnits | None,
        max_examples_per_unit: int,
        repeated_unit: RepeatedUnit | None = None,
        earlier: PrivacyLedger | None = None,
    ) -> None:
        assert args.output_dir is not None
        num_units = num_rows if units is None else len(units)
        unit = "image" if units is None else units.name
        same = (unit, num_units, ADJACENCY)
        self._earlier = earlier if earlier is not None and _of(earlier) == same else None
        spent = [] if self._earlier is None else self._earlier.accounted
        self.plan = args.budget.plan(num_units, spent=spent)
        self.args = args.following(self.plan)
        has_length = args.max_steps > 0 or args.num_train_epochs is not None
        if args.logical_batch_size is None or not has_length:
            logger.info(
                "By default: %d steps of %d expected units, %.3g passes over all %d.",
                self.plan.steps,
                self.plan.logical_batch_size,
                self.plan.epochs,
                num_units,
            )
        if args.learning_rate is None and self.plan.steps < FEWEST_STEPS:
            logger.warning(
                "%d steps are fewer than the %d with which the default learning rates were tried; "
                "set more num_train_epochs or a smaller logical_batch_size, or leave both unset.",
                self.plan.steps,
                FEWEST_STEPS,
            )
        self.folder = Path(args.output_dir)
        self.ledger: PrivacyLedger | None = None
        self.remaining = self.plan.steps
        self._label_names = tuple(label_names)
        self._partition = b"" if units is None else units.to_bytes()
        self._is_main = args.process_index == 0
        self._facts = RunFacts(
            delta=self.plan.delta,
            accountant=args.accountant,
            privacy_unit=unit,
            adjacency=ADJACENCY,
            guarantee=args.noise_seed is None and self.plan.noise_multiplier > 0,
            num_units=num_units,
            largest_group=None if repeated_unit is None else repeated_unit.largest,
            group_name=None if repeated_unit is None else repeated_unit.name,
            max_examples_per_unit=None if units is None else max_examples_per_unit,
        )
        self._keys = SecretKeys(self.folder)
        self._key = b""
        self._pending: list[int] = []  # draws in the ledger that the checkpoint has not made
        self._replays: dict[int, _Replay] = {}

    def disclaim(self) -> None:
        """Let the ledger say that this run gives no guarantee; called before ``open``."""
        self._facts = replace(self._facts, guarantee=False)

    # ---- budget ----

    def epsilon(self) -> float:
        """Epsilon spent so far, from the ledger; 0 before the run is open."""
        return 0.0 if self.ledger is None else self.ledger.epsilon().epsilon

    def spent(self, *, in_full: bool) -> dict[str, float]:
        """What a log says of the cost so far: epsilon, and in full all that it rests on."""
        if self.ledger is None or len(self.ledger) == 0:
            return {}
        if not in_full:
            return {"epsilon": self.epsilon()}
        return {
            "epsilon": self.epsilon(),
            "delta": self.plan.delta,
            "noise_multiplier": self.plan.noise_multiplier,
            "sample_rate": self.plan.sample_rate,
            "noise_draws": len(self.ledger),
        }

    def may_take(self, step: int) -> bool:
        """Whether the budget allows this step, or its draw was already counted."""
        return self.remaining > 0 or step in self._replays

    def record(self, event: NoiseEvent) -> None:
        """Put a draw of noise on the disk, before the weights move; one that is there stays one.

        Raises:
            ValueError: If a repeated step is not the one that the ledger holds.
            RuntimeError: If it is a new draw and the budget is spent. Nothing is recorded.
        """
        replay = self._replays.get(event.step)
        if replay is not None:
            if event != replay.event:
                raise ValueError(
                    f"step {event.step} gives another gradient than before the interruption, with "
                    "the settings, machine and libraries of then: the training data, their "
                    "preparation or the code of the model or the loss have changed. Nothing was "
                    f"released; change them back, or delete {self._keys.folder} to have the steps "
                    "after the checkpoint drawn afresh and counted again."
                )
            return
        if self.remaining <= 0:
            raise RuntimeError("the privacy budget is spent; no further step may be taken.")
        if self.ledger is not None:
            self.ledger.record(event)
        self.remaining -= 1

    # ---- secret randomness ----

    def key_of(self, step: int) -> bytes:
        """The secret key of a step, the same in every process.

        A step that the ledger holds has the key it was drawn with; any other has the key that this
        start took from the operating system, which no checkpoint, copy or backup shares.
        """
        return self._replays[step].key if step in self._replays else self._key

    def sampling_generator(self, step: int) -> np.random.Generator:
        """The generator of the draw of a step, and of the seeds of its rows."""
        return keyed_generator(self.key_of(step), b"sampling", str(step).encode())

    # ---- start and resume ----

    def prepare(self, checkpoint: Path | None) -> None:
        """Get ready to train: check the folder, or restore a checkpoint; count what is left.

        Raises:
            ValueError: If the folder already holds another run's ledger, or the checkpoint does
                not fit this run.
        """
        is_second = self.on_main_process(lambda: self.ledger is not None)
        self._pending = []
        if checkpoint is not None:
            self._pending = self.on_main_process(lambda: self._restore(checkpoint))
        elif not is_second:
            self.on_main_process(self._check_folder_is_new)
        # A second run of this trainer counts its steps from 1 again; its draws are new ones.
        seed = None if is_second and checkpoint is None else self.args.noise_seed
        self._key = self.on_main_process(lambda: new_key(seed))
        self._replays = {}
        self.remaining = self.on_main_process(self._count_remaining)

    def may_start(self) -> bool:
        """Whether a first step can be affordable: by the budget, or since it may be a replay."""
        return self.remaining > 0 or bool(self._pending)

    def open(self, circumstances: dict[str, str], *, is_repeatable: bool) -> None:
        """Start the ledger's record of this run; nothing was written before.

        Whether steps after the checkpoint are repeated or drawn afresh is decided here, before any
        row is drawn, from facts that do not depend on the rows.

        Args:
            circumstances: The public facts on which rounding depends.
            is_repeatable: Whether the device sums in the same order each time.
        """
        now = StartKey(self._key, {**circumstances, "plan": str(self.plan)})
        self._replays = self.on_main_process(lambda: self._open(now, is_repeatable))
        if not self._replays:
            self._pending = []

    def _open(self, now: StartKey, is_repeatable: bool) -> dict[int, _Replay]:
        is_first = self.ledger is None
        if self.ledger is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / LEDGER_FILE
            if self._earlier is None:
                self.ledger = PrivacyLedger.create(path)
            else:
                self._earlier.copy_to(path)
                self.ledger = PrivacyLedger.load(path)
                logger.warning(
                    "The model comes with a ledger of as many units of the same name: this run "
                    "goes on with it, and epsilon starts at %.4f.",
                    self.epsilon(),
                )
        replays = self._decide_replays(now.circumstances, is_repeatable)
        self.ledger.open_run(self._facts)
        self._keys.add(self.ledger.head, now, partition=self._partition, is_first=is_first)
        return replays

    def _decide_replays(
        self, circumstances: dict[str, str], is_repeatable: bool
    ) -> dict[int, _Replay]:
        """All steps after the checkpoint are repeated, or none is."""
        assert self.ledger is not None
        if not self._pending:
            return {}
        events = [self.ledger.events[index] for index in self._pending]
        starts = [self._keys.of(self.ledger.start_of(index)) for index in self._pending]
        kept = [start for start in starts if start is not None]
        changed = sorted(
            name
            for start in kept
            for name in circumstances.keys() | start.circumstances.keys()
            if circumstances.get(name) != start.circumstances.get(name)
        )
        if len(kept) == len(starts) and not changed and is_repeatable:
            return {e.step: _Replay(e, start.key) for e, start in zip(events, kept, strict=True)}
        if changed:
            reason = f"{changed[0]} is another"
        else:
            reason = "their keys are gone" if is_repeatable else "the device does not repeat itself"
        logger.warning(
            "%d steps were taken after the checkpoint. They are drawn afresh and counted again, "
            "since %s.",
            len(events),
            reason,
        )
        return {}

    def _count_remaining(self) -> int:
        if self.args.target_epsilon is None:
            return self.plan.steps
        spent = self._earlier if self.ledger is None else self.ledger
        return affordable_steps(
            [] if spent is None else spent.accounted,
            noise_multiplier=self.plan.noise_multiplier,
            sample_rate=self.plan.sample_rate,
            target_epsilon=self.args.target_epsilon,
            delta=self.plan.delta,
            accountant=self.args.accountant,
            limit=self.plan.steps,
        )

    def _check_folder_is_new(self) -> None:
        if (self.folder / LEDGER_FILE).exists():
            resume = "pass --resume_from_checkpoint last to go on with that run, or "
            if not any(self.folder.glob("checkpoint-*")):
                resume = ""  # it wrote none
            raise ValueError(
                f"output_dir={str(self.folder)!r} already holds a privacy ledger; {resume}choose "
                "another output_dir."
            )

    def _restore(self, checkpoint: Path) -> list[int]:
        """Read a checkpoint in the main process; return the ledger's draws that it lacks."""
        for name in (LEDGER_FILE, STATE_FILE, OPTIMIZER_FILE):
            if not (checkpoint / name).is_file():
                raise ValueError(
                    f"checkpoint {checkpoint} has no {name}, without which it cannot be resumed; "
                    "start again from the pretrained model."
                )
        state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        absent = sorted(STATE_KEYS - state.keys())
        if absent:
            raise ValueError(
                f"{checkpoint / STATE_FILE} lacks {', '.join(absent)}: it is damaged, or of an "
                "earlier version; start again from the pretrained model."
            )
        if state["num_units"] != self.plan.num_units:
            raise ValueError(
                f"checkpoint {checkpoint} was trained on {state['num_units']} privacy units and "
                f"the data now has {self.plan.num_units}; resume with the same data."
            )
        self._check_settings(checkpoint, state["settings"])
        at_checkpoint = PrivacyLedger.load(checkpoint / LEDGER_FILE)
        unit = at_checkpoint.runs[-1].privacy_unit
        if unit != self._facts.privacy_unit:
            raise ValueError(
                f"checkpoint {checkpoint} protects each {unit} and this run would protect each "
                f"{self._facts.privacy_unit}; resume with the same privacy_unit_column."
            )
        if state["label_names"] != list(self._label_names):
            raise ValueError(
                f"checkpoint {checkpoint} has the classes {', '.join(state['label_names'])} and "
                f"this run has {', '.join(self._label_names)}, in this order; resume with the same "
                "names in the same order."
            )
        if not SecretKeys(checkpoint.parent).fits(self._partition):
            raise ValueError(
                f"checkpoint {checkpoint} was trained on other privacy units than this data has; "
                "resume with the same data and privacy_unit_column."
            )
        if checkpoint.resolve().parent != self.folder.resolve():
            self.ledger = self._adopt(at_checkpoint)
            return []
        path = self.folder / LEDGER_FILE
        if not path.exists():
            raise ValueError(
                f"{path} is missing: steps after {checkpoint} would go uncounted; start again "
                "from the pretrained model."
            )
        ledger = PrivacyLedger.load(path)
        if not ledger.extends(at_checkpoint):
            raise ValueError(
                f"{path} does not continue the ledger of {checkpoint}; one of them belongs to "
                "another run or was changed."
            )
        self.ledger = ledger
        return _continuation(
            ledger.events, state["pending"], since=len(at_checkpoint), step=state["step"]
        )

    def _check_settings(self, checkpoint: Path, saved: Mapping[str, Any]) -> None:
        """Refuse settings that the optimizer's and filter's saved state would override.

        What the accountant can compose (sigma, sampling rate, bound, delta) may change.
        """
        now = json.loads(json.dumps(self._settings()))  # as it was saved
        changed = [name for name in now if now[name] != saved.get(name)]
        if changed:
            name = changed[0]
            raise ValueError(
                f"{name}={now[name]!r}, but checkpoint {checkpoint} was made with "
                f"{saved.get(name)!r}, which its optimizer state fixes; resume with that, or start "
                "a new run."
            )

    def _settings(self) -> dict[str, Any]:
        arguments, settings = vars(self.args), asdict(self.args.method)
        if self.args.method.knows_noise:
            # Momentum holds old noise, whose level is then part of the method.
            settings |= {name: arguments[name] for name in NOISE_SETTINGS}
            settings["noise_multiplier"] = self.plan.noise_multiplier
        return settings

    def _adopt(self, at_checkpoint: PrivacyLedger) -> PrivacyLedger:
        """Go on with a copy of a checkpoint's ledger in a new folder."""
        path = self.folder / LEDGER_FILE
        if path.exists():
            raise ValueError(
                f"output_dir={str(self.folder)!r} already holds another run's ledger; choose a "
                "new output_dir, or the one that the checkpoint lies in."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        at_checkpoint.copy_to(path)
        logger.warning("Resuming in another folder: steps after the checkpoint are not repeated.")
        return PrivacyLedger.load(path)

    def save(self, checkpoint: Path, *, step: int) -> None:
        """Write into a checkpoint what ``prepare`` reads. It holds no secret."""
        assert self.ledger is not None, "the process that saves is the one that keeps the ledger"
        self.ledger.copy_to(checkpoint / LEDGER_FILE)
        events = self.ledger.events
        state = {
            "step": step,
            "num_units": self.plan.num_units,
            "settings": self._settings(),
            "label_names": list(self._label_names),
            # A run that is repeating an interrupted one has not reached the end of its ledger.
            "pending": [index for index in self._pending if events[index].step > step],
        }
        write_json(checkpoint / STATE_FILE, state)

    def on_main_process(self, make: Callable[[], T]) -> T:
        """Run in the main process; hand its result, or its refusal, to all processes."""
        outcome: list[Any] = [None, None]
        if self._is_main:
            try:
                outcome[0] = make()
            except Exception as error:  # whatever it is, no process may wait for ever
                outcome[1] = error
        result, refusal = broadcast_object_list(outcome)
        if refusal is not None:
            raise refusal
        value: T = result
        return value


def _of(ledger: PrivacyLedger) -> tuple[str, int, str]:
    """What a ledger protects, and how many of them."""
    last = ledger.runs[-1]
    return last.privacy_unit, last.num_units, last.adjacency


def _continuation(
    events: Sequence[NoiseEvent], pending: Sequence[int], *, since: int, step: int
) -> list[int]:
    """Which draws in a ledger go on from a checkpoint.

    Args:
        events: All draws of the ledger.
        pending: Those that the checkpoint's own run was about to repeat.
        since: How many of them the checkpoint's ledger has.
        step: The checkpoint's step.

    Returns:
        Indices, ascending by step. A start that drew steps afresh replaces those from there on; one
        that went back before the checkpoint ends the list.
    """
    chosen = list(pending)
    for index in range(since, len(events)):
        if events[index].step <= step:
            break
        chosen = [i for i in chosen if events[i].step < events[index].step] + [index]
    return chosen

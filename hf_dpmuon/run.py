"""One private run: its plan, what it has spent and may still spend, across stops and processes.

Receives arguments and the number of privacy units, then one event per noise draw; keeps the ledger,
the secret generators and the budget, and writes and reads what a checkpoint must hold of them.

Guarantees:
    A draw of noise is in the ledger before ``record`` returns, and no draw is recorded that would
    pass the budget. A checkpoint resumes with the draws and the noise that would have come next, or
    not at all. With several processes the main one keeps ledger and noise, and all of them sample
    and decide alike.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list

from hf_dpmuon.accounting import affordable_steps, calibrate_noise_multiplier, num_steps
from hf_dpmuon.arguments import METHOD_SETTINGS, DPTrainingArguments
from hf_dpmuon.data import RepeatedUnit
from hf_dpmuon.ledger import LEDGER_FILE, PrivacyLedger, RunFacts
from hf_dpmuon.mechanism import NoiseEvent
from hf_dpmuon.randomness import generator_state, restore_generator, secret_generator
from hf_dpmuon.spectral import NOISE_AWARE_MAPS
from hf_dpmuon.units import PrivacyUnits

__all__ = ["PrivacyPlan", "PrivateRun", "write_json"]

logger = logging.getLogger(__name__)

STATE_FILE = "privacy_state.json"
STATE_KEYS = {"num_units", "settings", "noise_key", "partition", "sampling", "replays"}
OPTIMIZER_FILE = "optimizer.pt"
ADJACENCY = "add or remove one"

FIXED_SETTINGS = (
    *METHOD_SETTINGS,
    "dp_filter",
    "learning_rate",
    "vector_learning_rate",
    "weight_decay",
    "correct_for_noise",
    "sgd_momentum",
    "doppler_coefficients",
    "disk_kappa",
    "disk_gamma",
)
NOISE_SETTINGS = ("per_sample_max_grad_norm", "logical_batch_size")

T = TypeVar("T")


@dataclass(frozen=True)
class PrivacyPlan:
    """The run as the accountant sees it, fixed before the first image is used.

    Attributes:
        num_units: N, the number of privacy units.
        sample_rate: q = logical_batch_size / N, exact.
        steps: T, the number of logical steps.
        delta: Of the guarantee.
        noise_multiplier: sigma.
    """

    num_units: int
    sample_rate: float
    steps: int
    delta: float
    noise_multiplier: float

    def noise_std(self, max_grad_norm: float) -> float:
        """Of the noise in each entry of a release."""
        return self.noise_multiplier * max_grad_norm / (self.sample_rate * self.num_units)

    @classmethod
    def from_arguments(cls, args: DPTrainingArguments, *, num_units: int) -> PrivacyPlan:
        """Derive the plan from the arguments and the number of privacy units.

        Raises:
            ValueError: If q would exceed 1, or delta is not below 1/N.
        """
        sample_rate = args.logical_batch_size / num_units
        if sample_rate > 1:
            raise ValueError(
                f"logical_batch_size={args.logical_batch_size} exceeds the {num_units} privacy "
                f"units of the training data; set at most {num_units}."
            )
        delta = 1 / (10 * num_units) if args.target_delta is None else args.target_delta
        if not 0 < delta < 1 / num_units:
            raise ValueError(
                f"target_delta={delta} must be below 1/N = {1 / num_units:.3g}, or a guarantee "
                "could publish one record in full; leave it unset for 1/(10 N)."
            )
        steps = (
            args.max_steps
            if args.max_steps > 0
            else num_steps(num_epochs=args.num_train_epochs, sample_rate=sample_rate)
        )
        if args.noise_multiplier is not None:
            sigma = args.noise_multiplier
        else:
            assert args.target_epsilon is not None
            sigma = calibrate_noise_multiplier(
                target_epsilon=args.target_epsilon,
                target_delta=delta,
                sample_rate=sample_rate,
                steps=steps,
                accountant=args.accountant,
            )
        return cls(
            num_units=num_units,
            sample_rate=sample_rate,
            steps=steps,
            delta=delta,
            noise_multiplier=sigma,
        )


@dataclass(frozen=True)
class _Restored:
    """What all processes must know of a checkpoint.

    Attributes:
        sampling: State of the sampling generator.
        noise_key: Secret key of the noise.
        replays: By step, what was already released after the checkpoint.
    """

    sampling: dict[str, Any]
    noise_key: bytes
    replays: dict[int, NoiseEvent]


class PrivateRun:
    """Ledger, secret generators and budget of one run.

    Args:
        args: The run's arguments; ``output_dir`` holds the ledger.
        num_rows: Of the training data.
        units: Which rows belong together; each is a unit if None.
        max_examples_per_unit: Most rows of a drawn unit in a step.
        repeated_unit: Ids that several rows share although each row is a unit, for the report.

    Attributes:
        plan: What the accountant assumes.
        ledger: The ledger, in the main process once ``open`` was called; None elsewhere.
        noise_key: Secret key of the noise, the same in every process.
        sampling_generator: In the same state in every process.
        remaining: How many more draws the budget allows.
    """

    def __init__(
        self,
        args: DPTrainingArguments,
        *,
        num_rows: int,
        units: PrivacyUnits | None,
        max_examples_per_unit: int,
        repeated_unit: RepeatedUnit | None = None,
    ) -> None:
        assert args.output_dir is not None
        num_units = num_rows if units is None else len(units)
        self.plan = PrivacyPlan.from_arguments(args, num_units=num_units)
        self.folder = Path(args.output_dir)
        self.ledger: PrivacyLedger | None = None
        self.remaining = self.plan.steps
        self._args = args
        self._partition = b"" if units is None else units.to_bytes()
        self._is_main = args.process_index == 0
        self._facts = RunFacts(
            delta=self.plan.delta,
            accountant=args.accountant,
            privacy_unit="image" if units is None else units.name,
            adjacency=ADJACENCY,
            guarantee=args.noise_seed is None and self.plan.noise_multiplier > 0,
            num_units=num_units,
            largest_group=None if repeated_unit is None else repeated_unit.largest,
            group_name=None if repeated_unit is None else repeated_unit.name,
            max_examples_per_unit=None if units is None else max_examples_per_unit,
        )
        self._replays: dict[int, NoiseEvent] = {}
        self.sampling_generator = secret_generator(args.noise_seed)
        self.noise_key = (
            secrets.token_bytes(32)
            if args.noise_seed is None
            else args.noise_seed.to_bytes(32, "big")
        )
        self.noise_key, sampling = self.from_main(self._secrets)
        restore_generator(self.sampling_generator, sampling)

    def _secrets(self) -> tuple[bytes, dict[str, Any]]:
        return self.noise_key, generator_state(self.sampling_generator)

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

    def is_replay(self, event: NoiseEvent) -> bool:
        """Whether an interrupted run made this very release after the resumed checkpoint."""
        return self._replays.get(event.step) == event

    def departs(self, event: NoiseEvent) -> bool:
        """Whether the run no longer repeats what an interrupted run did at this step.

        Its draw is then one that was recorded with another sum. Two releases on one draw are not
        two independent draws, as which they would be counted: the caller must drop the draw.
        """
        return event.step in self._replays and not self.is_replay(event)

    def draw_afresh(self) -> dict[str, Any]:
        """Forget what an interrupted run did; take new secrets.

        Returns:
            The new state of the sampling generator. ``noise_key`` is new, too: on another stream
            of draws two equal sums (of two empty draws, say) are two releases, not one.
        """
        self._replays = {}
        self.noise_key, state = self.from_main(
            lambda: (secrets.token_bytes(32), generator_state(secret_generator()))
        )
        return state

    def record(self, event: NoiseEvent) -> None:
        """Put a draw of noise on the disk, before the weights move.

        Raises:
            RuntimeError: If it is a new draw and the budget is spent; nothing is recorded.
        """
        if self.is_replay(event):
            return
        if self.remaining <= 0:
            raise RuntimeError("the privacy budget is spent; no further step may be taken.")
        if self.ledger is not None:
            self.ledger.record(event)
        self.remaining -= 1

    # ---- start and resume ----

    def prepare(self, checkpoint: Path | None) -> None:
        """Get ready to train: check the folder, or restore a checkpoint; count what is left.

        Raises:
            ValueError: If the folder already holds another run's ledger, or the checkpoint does
                not fit this run.
        """
        if checkpoint is not None:
            restored = self.from_main(lambda: self._restore(checkpoint))
            self.noise_key = restored.noise_key
            self._replays = restored.replays
            restore_generator(self.sampling_generator, restored.sampling)
        elif self.from_main(lambda: self.ledger is not None):
            # A second run of this trainer: its steps count from 1 again, its draws go on.
            restore_generator(self.sampling_generator, self.draw_afresh())
        else:
            self.from_main(self._check_folder_is_new)
        self.remaining = self.from_main(self._count_remaining)

    def open(self) -> None:
        """Start the ledger's record of this run; nothing was written before."""
        self.from_main(self._open)

    def _open(self) -> None:
        if self.ledger is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.ledger = PrivacyLedger.create(self.folder / LEDGER_FILE)
        self.ledger.open_run(self._facts)

    def _count_remaining(self) -> int:
        if self._args.target_epsilon is None:
            return self.plan.steps
        return affordable_steps(
            [] if self.ledger is None else self.ledger.accounted,
            noise_multiplier=self.plan.noise_multiplier,
            sample_rate=self.plan.sample_rate,
            target_epsilon=self._args.target_epsilon,
            delta=self.plan.delta,
            accountant=self._args.accountant,
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

    def _restore(self, checkpoint: Path) -> _Restored:
        """Read a checkpoint in the main process, which keeps the ledger."""
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
        if state["partition"] != self._partition_digest(state["noise_key"]):
            raise ValueError(
                f"checkpoint {checkpoint} was trained on other privacy units than this data has; "
                "resume with the same data and privacy_unit_column."
            )
        if checkpoint.resolve().parent != self.folder.resolve():
            self.ledger = self._adopt(at_checkpoint)
            return _Restored(generator_state(secret_generator()), secrets.token_bytes(32), {})
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
        later = [NoiseEvent(**event) for event in state["replays"]]
        later += ledger.events[len(at_checkpoint) :]
        return _Restored(
            sampling=state["sampling"]["generator"],
            noise_key=bytes.fromhex(state["noise_key"]),
            replays={event.step: event for event in later},
        )

    def _check_settings(self, checkpoint: Path, saved: Mapping[str, Any]) -> None:
        """Refuse settings that the optimizer's and filter's saved state would override.

        What the accountant can compose (sigma, sampling rate, bound, delta) may change.
        """
        now = self._settings()
        changed = [name for name in now if now[name] != saved.get(name)]
        if changed:
            name = changed[0]
            raise ValueError(
                f"{name}={now[name]!r}, but checkpoint {checkpoint} was made with "
                f"{saved.get(name)!r}, which its optimizer state fixes; resume with that, or start "
                "a new run."
            )

    def _settings(self) -> dict[str, Any]:
        arguments = vars(self._args)
        settings = {name: arguments[name] for name in FIXED_SETTINGS}
        if self._args.spectral_map in NOISE_AWARE_MAPS or self._args.correct_for_noise:
            # Momentum holds old noise, whose level is then part of the method.
            settings |= {name: arguments[name] for name in NOISE_SETTINGS}
            settings["noise_multiplier"] = self.plan.noise_multiplier
        return settings

    def _adopt(self, at_checkpoint: PrivacyLedger) -> PrivacyLedger:
        """Go on with a copy of a checkpoint's ledger in a new folder, with secrets of its own.

        The original run may go on elsewhere, with the secrets that the checkpoint holds.
        """
        path = self.folder / LEDGER_FILE
        if path.exists():
            raise ValueError(
                f"output_dir={str(self.folder)!r} already holds another run's ledger; choose a "
                "new output_dir, or the one that the checkpoint lies in."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        at_checkpoint.copy_to(path)
        logger.warning("Resuming in another folder: samples and noise are drawn afresh.")
        return PrivacyLedger.load(path)

    def save(
        self,
        checkpoint: Path,
        *,
        step: int,
        sampling_state: Mapping[str, Any],
    ) -> None:
        """Write into a checkpoint what ``prepare`` reads; the generators' states stay secret."""
        assert self.ledger is not None, "the process that saves is the one that keeps the ledger"
        self.ledger.copy_to(checkpoint / LEDGER_FILE)
        state = {
            "step": step,
            "num_units": self.plan.num_units,
            "settings": self._settings(),
            "noise_key": self.noise_key.hex(),
            "partition": self._partition_digest(self.noise_key.hex()),
            "sampling": sampling_state,
            # A run that is repeating an interrupted one has not reached the end of its ledger.
            "replays": [asdict(e) for number, e in self._replays.items() if number > step],
        }
        write_json(checkpoint / STATE_FILE, state, secret=True)

    def _partition_digest(self, key: str) -> str:
        """Keyed, so that it tells nobody else whose rows belong together."""
        return hmac.new(bytes.fromhex(key), self._partition, "sha256").hexdigest()

    def from_main(self, make: Callable[[], T]) -> T:
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


def write_json(path: Path, values: Mapping[str, Any], *, secret: bool = False) -> None:
    """Write under a temporary name and rename, so that a reader never sees half a file."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(values, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o600 if secret else 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise

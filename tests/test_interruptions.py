"""A run killed at any moment resumes to the same end; its ledger never counts too few draws."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from support import DPTrainer, largest_difference, trainer_of, weights

from hf_dpmuon import optim, sampling
from hf_dpmuon import run as run_room
from hf_dpmuon.grad_sample import BookKeepingGradSampleModule
from hf_dpmuon.ledger import PrivacyLedger

STEPS = 8
TARGET = 5.0
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": 2,
    "noise_multiplier": None,
    "target_epsilon": TARGET,
}


def in_a_process(work: Callable[[], None], *, kill_after: float | None = None) -> int:
    """Fork, run, perhaps kill -9; return the exit code, negative for a signal."""

    def child() -> None:
        torch.set_num_threads(1)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        work()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(timeout=kill_after if kill_after is not None else 120)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode


class Counting(DPTrainer):
    """Tells another process how many releases moved the weights."""

    moved: Any

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(model)
        optimizer.register_step_post_hook(lambda *_: self.tell())
        return optimizer

    def tell(self) -> None:
        self.moved.value += 1


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    trainer = trainer_of(tmp_path_factory.mktemp("whole"), **SETTINGS)
    trainer.train()
    return weights(trainer.model)


def train(folder: Path, moved: Any, *, resume: bool = False, save: Path | None = None) -> None:
    trainer = trainer_of(folder, kind=Counting, **SETTINGS)
    trainer.moved = moved
    trainer.train(resume_from_checkpoint=resume)
    if save is not None:
        torch.save(weights(trainer.model), save)


def check_recovery(folder: Path, moved: Any, expected: dict[str, torch.Tensor]) -> str:
    """What the folder of a killed run allows: a resume to the same end, or a refusal."""
    path = folder / "privacy_ledger.jsonl"
    if not path.exists():
        assert moved.value == 0
        return "nothing was spent"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a torn last line is recognised, with a warning
        assert len(PrivacyLedger.load(path)) >= moved.value
    if not list(folder.glob("checkpoint-*")):
        trainer = trainer_of(folder, **SETTINGS)
        with pytest.raises(ValueError, match="already holds a privacy ledger"):
            trainer.train()
        with pytest.raises(ValueError, match="no checkpoint"):
            trainer.train(resume_from_checkpoint=True)
        return "refused"
    result = folder / "weights.pt"
    assert in_a_process(lambda: train(folder, moved, resume=True, save=result)) == 0
    assert largest_difference(torch.load(result), expected) == 0
    ledger = PrivacyLedger.load(path)
    assert sorted(event.step for event in ledger.events) == list(range(1, STEPS + 1))
    assert ledger.epsilon().epsilon <= TARGET
    return "resumed"


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(
    function: Callable[..., Any], *, armed: Callable[[], bool], before: bool
) -> Callable[..., Any]:
    """The function, whose caller is killed just before or after its first call when armed."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        is_last = armed()
        if before and is_last:
            die()
        result = function(*args, **kwargs)
        if is_last:
            die()
        return result

    return wrapped


# Where the process dies, at the first call after how many moves of the weights, before or after.
PLACES = {
    "in the sampler": (sampling.PoissonSampler, "draw", 3, False),
    "between two physical batches": (BookKeepingGradSampleModule, "add_weighted_sum", 3, False),
    "in the backward pass": (BookKeepingGradSampleModule, "_receive", 5, True),
    "before the ledger": (PrivacyLedger, "record", 5, True),
    "between ledger and weights": (PrivacyLedger, "record", 5, False),
    "in the optimizer": (optim, "sgd_update", 5, False),
    "before a checkpoint's ledger": (run_room.PrivateRun, "save", 4, True),
    "in a checkpoint's state": (run_room, "write_json", 4, True),
    "before a checkpoint's name": (run_room.PrivateRun, "save", 4, False),
    "in the first checkpoint": (run_room.PrivateRun, "save", 2, True),
}


@pytest.mark.parametrize("place", PLACES)
def test_killed_at_a_chosen_place(tmp_path, monkeypatch, uninterrupted, place):
    owner, name, moves, before = PLACES[place]
    moved = multiprocessing.get_context("fork").Value("i", 0)

    def work() -> None:
        function = dying(vars(owner)[name], armed=lambda: moved.value >= moves, before=before)
        monkeypatch.setattr(owner, name, function)
        train(tmp_path, moved)

    assert in_a_process(work) == -signal.SIGKILL
    outcome = check_recovery(tmp_path, moved, uninterrupted)
    assert outcome == ("refused" if place == "in the first checkpoint" else "resumed")


@pytest.mark.parametrize("moves", [3, 5, 7])
def test_with_real_secrets_a_killed_run_repeats_its_releases_and_counts_them_once(
    tmp_path, monkeypatch, moves
):
    # Twice: the second time it dies while it repeats what it did before.
    secret = {**SETTINGS, "noise_seed": None}
    moved = multiprocessing.get_context("fork").Value("i", 0)

    def work(resume: bool) -> None:
        function = dying(
            PrivacyLedger.record if not resume else run_room.PrivateRun.record,
            armed=lambda: moved.value >= moves,
            before=False,
        )
        owner = PrivacyLedger if not resume else run_room.PrivateRun
        monkeypatch.setattr(owner, "record", function)
        trainer = trainer_of(tmp_path, kind=Counting, **secret)
        trainer.moved = moved
        trainer.train(resume_from_checkpoint=resume)

    assert in_a_process(lambda: work(False)) == -signal.SIGKILL
    recorded = PrivacyLedger.load(tmp_path / "privacy_ledger.jsonl").events
    moved.value = moves - 1
    assert in_a_process(lambda: work(True)) == -signal.SIGKILL
    trainer = trainer_of(tmp_path, **secret)
    trainer.train(resume_from_checkpoint=True)
    events = trainer.ledger.events
    assert events[: len(recorded)] == recorded
    assert [event.step for event in events] == list(range(1, STEPS + 1))
    assert trainer.ledger.guarantee
    assert trainer.epsilon() <= TARGET


def test_killed_at_twenty_random_moments(tmp_path, uninterrupted):
    start = time.monotonic()
    unused = multiprocessing.get_context("fork").Value("i", 0)
    assert in_a_process(lambda: train(tmp_path / "timed", unused)) == 0
    duration = time.monotonic() - start
    moments = duration * np.random.default_rng(0).uniform(0.2, 1.0, size=20)
    outcomes = []
    for number, moment in enumerate(moments):
        folder = tmp_path / str(number)
        moved = multiprocessing.get_context("fork").Value("i", 0)
        code = in_a_process(lambda f=folder, m=moved: train(f, m), kill_after=float(moment))
        assert code in (0, -signal.SIGKILL)
        outcomes.append(check_recovery(folder, moved, uninterrupted))
    assert "resumed" in outcomes

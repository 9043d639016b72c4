"""Several processes: one draw, one collective a step, and the weights of a single process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import (
    Images,
    N,
    Spy,
    fixed_draw,
    in_processes,
    largest_difference,
    tiny_vit,
    trainer_of,
    weights,
)

from hf_dpmuon import optim
from hf_dpmuon.ledger import PrivacyLedger
from hf_dpmuon.trainer import DPTrainer


def plain(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def back(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def train(folder: Path, **settings: Any) -> Callable[[int], Any]:
    def work(rank: int) -> Any:
        trainer = trainer_of(folder, kind=Spy, **settings)
        trainer.train(resume_from_checkpoint=settings.get("resume_from_checkpoint"))
        assert trainer.args.world_size == int(os.environ["WORLD_SIZE"])
        return (
            plain(weights(trainer.model)),
            [plain(release) for release in trainer.releases],
            trainer.lr_scheduler.last_epoch,
            trainer.evaluate()["eval_accuracy"],
        )

    return work


@pytest.fixture(autouse=True)
def ledger_in_the_main_process_only(monkeypatch):
    """Spy reads the ledger's file in each step, which other processes have no part in."""
    monkeypatch.setattr(
        Spy,
        "count_records",
        lambda self: 0 if self.ledger is None else len(PrivacyLedger.load(self.ledger.path)),
    )


def draws(steps: int, batch: int, size: int = N) -> list[np.ndarray]:
    rate = batch / size
    return [fixed_draw(size, seed=7, step=t + 1, sample_rate=rate)[0] for t in range(steps)]


@pytest.mark.parametrize("mode", ["bookkeeping", "ghost", "hooks"])
def test_any_number_of_processes_gives_the_same_weights(tmp_path, mode):
    # Cases 52, 55: unequal stripes, ranks with different numbers of physical batches.
    settings = {
        "max_steps": 5,
        "grad_sample_mode": mode,
        "per_device_train_batch_size": 2,
        "warmup_steps": 0,
    }
    alone = trainer_of(tmp_path / "1", **settings)
    alone.train()
    for world_size in (2, 4):
        results = in_processes(world_size, train(tmp_path / str(world_size), **settings))
        for got, releases, scheduled, _ in results:
            assert largest_difference(back(got), weights(alone.model)) < 1e-6
            assert largest_difference(back(got), back(results[0][0])) == 0  # to the bit
            for mine, first in zip(releases, results[0][1], strict=True):
                assert largest_difference(back(mine), back(first)) == 0
            assert scheduled == 5
        assert len({accuracy for *_, accuracy in results}) == 1
        ledger = PrivacyLedger.load(tmp_path / str(world_size) / "privacy_ledger.jsonl")
        assert len(ledger) == 5


def test_evaluation_counts_each_row_once_in_any_number_of_processes(tmp_path):
    def evaluate(rank: int) -> dict[str, float]:
        trainer = trainer_of(tmp_path, per_device_eval_batch_size=3)
        metrics = trainer.evaluate()  # 10 rows: not divisible by 2, 3 or 4
        return {name: metrics[name] for name in ("eval_loss", "eval_accuracy")}

    alone = evaluate(0)
    for world_size in (2, 4):
        for metrics in in_processes(world_size, evaluate):
            assert metrics == pytest.approx(alone, rel=1e-5)


def test_empty_stripes_and_empty_draws_do_not_hang(tmp_path):
    # Case 53.
    sizes = [len(rows) for rows in draws(12, 1)]
    assert 0 in sizes
    assert 1 in sizes
    settings = {"max_steps": 12, "logical_batch_size": 1}
    alone = trainer_of(tmp_path / "1", **settings)
    alone.train()
    for got, *_ in in_processes(4, train(tmp_path / "4", **settings)):
        assert largest_difference(back(got), weights(alone.model)) < 1e-6


def test_released_noise_has_the_claimed_scale_in_every_process(tmp_path):
    settings = {
        "max_steps": 1,
        "per_sample_max_grad_norm": 1e-9,
        "noise_multiplier": 3e9,
        "noise_seed": None,
    }
    for _, releases, *_ in in_processes(2, train(tmp_path, **settings)):
        entries = np.concatenate([g.ravel() for g in releases[0].values()])
        assert entries.std() == pytest.approx(3 / 8, rel=0.05)


def test_processes_draw_alike_from_secret_entropy(tmp_path):
    results = in_processes(3, train(tmp_path, noise_seed=None))
    for got, *_ in results:
        assert largest_difference(back(got), back(results[0][0])) == 0


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_resumes_on_another_number_of_processes(tmp_path, before, after):
    whole = trainer_of(tmp_path / "whole", max_steps=4)
    whole.train()
    folder = tmp_path / "parts"

    class Stopped(Spy):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self.state.global_step == 2:
                raise KeyboardInterrupt
            return super().training_step(*args, **kwargs)

    def until_step_2(rank: int) -> None:
        trainer = trainer_of(folder, kind=Stopped, max_steps=4, save_strategy="steps", save_steps=2)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()

    in_processes(before, until_step_2)
    results = in_processes(
        after,
        train(folder, max_steps=4, resume_from_checkpoint=str(folder / "checkpoint-2")),
    )
    for got, *_ in results:
        assert largest_difference(back(got), weights(whole.model)) < 1e-5


def test_processes_that_depart_from_an_interrupted_run_draw_alike(tmp_path):
    settings = {"noise_seed": None, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer_of(tmp_path, **settings).train()  # alone: two processes round otherwise
    results = in_processes(
        2,
        train(tmp_path, **settings, resume_from_checkpoint=str(tmp_path / "checkpoint-2")),
    )
    assert largest_difference(back(results[0][0]), back(results[1][0])) == 0
    events = PrivacyLedger.load(tmp_path / "privacy_ledger.jsonl").events
    assert [event.step for event in events] == [1, 2, 3, 4, 3, 4]


def test_a_refusal_in_the_main_process_ends_all_of_them(tmp_path):
    trainer_of(tmp_path).train()

    def work(rank: int) -> str:
        with pytest.raises(ValueError, match="already holds") as refusal:
            trainer_of(tmp_path).train()
        return str(refusal.value)

    assert len(set(in_processes(2, work))) == 1


def test_models_that_differ_at_the_start_become_the_main_process_s(tmp_path):
    def work(rank: int) -> Any:
        trainer = trainer_of(tmp_path, tiny_vit(seed=rank), max_steps=1)
        trainer.train()
        return plain(weights(trainer.model))

    results = in_processes(2, work)
    assert largest_difference(back(results[0]), back(results[1])) == 0


class AfterTheCheck(DPTrainer):
    """Forgets the rows that the check before a run has read."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.train_dataset.used.clear()
        return super().create_optimizer(model)


def test_images_are_split_and_none_is_used_twice(tmp_path):
    # Cases 49, 50, 56: the union over processes is the one global draw.
    class Recording(Images):
        used: list[int]

        def __getitem__(self, row: int) -> dict[str, Any]:
            self.used.append(row)
            return super().__getitem__(row)

    def work(rank: int) -> list[int]:
        data = Recording()
        data.used = []
        trainer = trainer_of(tmp_path, train_dataset=data, max_steps=3, kind=AfterTheCheck)
        trainer.train()
        return data.used

    used = in_processes(2, work)
    expected = np.concatenate(draws(3, 8))
    probes = [0] * 2 * 3  # each process looks at the first row before each draw
    assert sorted(used[0] + used[1]) == sorted([*expected.tolist(), *probes])


def test_matrices_are_mapped_by_one_process_each(tmp_path, monkeypatch):
    mapped = optim.spectral_map

    def work(rank: int) -> int:
        count = 0

        def counting(stack: torch.Tensor, **settings: Any) -> torch.Tensor:
            nonlocal count
            count += len(stack)
            return mapped(stack, **settings)

        monkeypatch.setattr(optim, "spectral_map", counting)
        trainer_of(tmp_path, max_steps=1).train()
        return count

    matrices = sum(p.ndim >= 2 for p in tiny_vit().parameters()) - 2  # but the tokens
    counts = in_processes(2, work)
    assert sum(counts) == matrices
    assert min(counts) >= matrices // 3

"""Memory of a logical step does not grow with the logical batch."""

from __future__ import annotations

import multiprocessing
import resource
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from support import Images, trainer_of


class Endless(Images):
    """As many images as asked for, made when they are read."""

    def __init__(self, size: int) -> None:
        super().__init__(8)
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> dict[str, Any]:
        return super().__getitem__(row % 8)


def peak_mib(folder: Path, logical: int) -> float:
    """Peak resident memory of a process that takes one logical step."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()

    def child() -> None:
        torch.set_num_threads(1)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        trainer = trainer_of(
            folder,
            train_dataset=Endless(2 * logical),
            logical_batch_size=logical,
            per_device_train_batch_size=32,
            max_steps=1,
        )
        trainer.train()
        results.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)

    process = context.Process(target=child)
    process.start()
    peak: float = results.get(timeout=120)
    process.join()
    return peak


def test_peak_memory_is_flat_from_64_to_4096(tmp_path):
    # Case 101.
    small, large = (peak_mib(tmp_path / str(size), size) for size in (64, 4096))
    assert large < 1.05 * small

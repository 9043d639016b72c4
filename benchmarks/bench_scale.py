"""Where the time of a private step goes, against processes, logical batch and size of the data.

    python benchmarks/bench_scale.py --report benchmarks/reports

Shares: one process runs `DPTrainer` on random images with the parts of a step timed by wrapping
them: sampling and loading, forward and backward, clipping and summing, reduction and noise, filter
and optimizer. With ``--processes 2`` the same run is forked over gloo. Sampler: `PoissonSampler`
alone draws from up to ten million units. Times are wall clock; ratios within one run are what to
read.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import platform
import resource
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from torch.utils.data import Dataset

from hf_dpmuon import DPTrainer, DPTrainingArguments, PoissonSampler, load_model
from hf_dpmuon.mechanism import GaussianMechanism
from hf_dpmuon.randomness import keyed_generator
from hf_dpmuon.sampling import LogicalBatch

PARTS = ("sampling and loading", "forward and backward", "clipping", "reduction and noise", "rest")


class RandomImages(Dataset[dict[str, Tensor]]):
    """As many grey images of noise as asked for, without keeping them."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(row)
        return {
            "pixel_values": torch.randn(1, 28, 28, generator=generator),
            "labels": torch.tensor(row % 10),
        }


def timed(seconds: dict[str, float], part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which adds its time to a part."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[part] += time.perf_counter() - start

    return wrapper


def time_steps(
    *, logical: int, physical: int, units: int, steps: int, mode: str
) -> dict[str, float]:
    """Seconds of each part of a step, averaged over a run, the first step left out."""
    seconds: dict[str, float] = defaultdict(float)
    marks: list[float] = []

    class TimedTrainer(DPTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            if self.state.global_step == 1:
                seconds.clear()
                marks.append(time.perf_counter())
            return super().training_step(*args, **kwargs)

    accumulate, release = GaussianMechanism.accumulate, GaussianMechanism.release
    pull = LogicalBatch._pull
    GaussianMechanism.accumulate = timed(seconds, "clipping", accumulate)  # type: ignore[method-assign]
    GaussianMechanism.release = timed(seconds, "reduction and noise", release)  # type: ignore[method-assign]

    def timed_pull(self: LogicalBatch) -> Any:
        batches = pull(self)
        following = timed(seconds, "sampling and loading", lambda: next(batches, None))
        while (batch := following()) is not None:
            yield batch

    LogicalBatch._pull = timed_pull  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = TimedTrainer(
                load_model("builtin:tiny-vit", label_names=tuple("0123456789")),
                DPTrainingArguments(
                    folder,
                    noise_multiplier=1.0,
                    logical_batch_size=logical,
                    per_device_train_batch_size=physical,
                    max_steps=steps + 1,
                    grad_sample_mode=mode,
                    use_cpu=True,
                    disable_tqdm=True,
                    save_strategy="no",
                    logging_strategy="no",
                    noise_seed=0,
                ),
                train_dataset=RandomImages(units),
            )
            compute_loss = trainer.compute_loss
            trainer.compute_loss = timed(seconds, "forward", compute_loss)  # type: ignore[method-assign]
            backward = torch.Tensor.backward
            torch.Tensor.backward = timed(seconds, "backward", backward)  # type: ignore[method-assign]
            try:
                trainer.train()
            finally:
                torch.Tensor.backward = backward  # type: ignore[method-assign]
        total = time.perf_counter() - marks[0]
    finally:
        GaussianMechanism.accumulate = accumulate  # type: ignore[method-assign]
        GaussianMechanism.release = release  # type: ignore[method-assign]
        LogicalBatch._pull = pull  # type: ignore[method-assign]
    seconds["forward and backward"] = seconds.pop("forward", 0.0) + seconds.pop("backward", 0.0)
    seconds["rest"] = total - sum(seconds.values())
    return {part: seconds[part] / steps for part in PARTS}


def in_processes(count: int, work: Callable[[], Any]) -> Any:
    """Run in so many processes over gloo, one thread each.

    Returns:
        What the first process returned, and its peak resident memory in MiB.
    """
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def child(rank: int) -> None:
        torch.set_num_threads(1)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        if count > 1:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(count),
                LOCAL_WORLD_SIZE=str(count),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                ACCELERATE_USE_CPU="true",
            )
        result = work()
        if rank == 0:
            results.put((result, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))

    processes = [context.Process(target=child, args=(rank,)) for rank in range(count)]
    for process in processes:
        process.start()
    result = results.get(timeout=600)
    for process in processes:
        process.join(timeout=30)
    return result


def row(cells: list[object]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def plot(measured: list[tuple[int, int, dict[str, float]]], path: Path) -> None:
    """Draw seconds of a step against the logical batch, stacked by part; needs matplotlib."""
    from matplotlib import pyplot

    counts = sorted({count for count, _, _ in measured})
    figure, axes = pyplot.subplots(1, len(counts), sharey=True, figsize=(5 * len(counts), 4))
    for axis, count in zip([axes] if len(counts) == 1 else axes, counts, strict=True):
        runs = sorted((logical, parts) for c, logical, parts in measured if c == count)
        below = [0.0] * len(runs)
        for part in PARTS:
            heights = [parts[part] for _, parts in runs]
            axis.bar([str(logical) for logical, _ in runs], heights, bottom=below, label=part)
            below = [low + height for low, height in zip(below, heights, strict=True)]
        axis.set_title(f"{count} process{'es' if count > 1 else ''}")
        axis.set_xlabel("logical batch size")
        axis.set_yscale("symlog", linthresh=0.1)
    figure.axes[0].set_ylabel("seconds a step")
    figure.axes[0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"saved in {path}")


def main() -> None:
    """Measure, print Markdown, and save it if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--logical", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--physical", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--units", type=int, nargs="+", default=[10**3, 10**5, 10**7])
    parser.add_argument("--mode", default="bookkeeping", help="grad_sample_mode")
    parser.add_argument("--report", type=Path, help="folder for a dated report")
    options = parser.parse_args()

    lines = [
        f"# Scale of a private step, {datetime.date.today()}",
        "",
        f"`python benchmarks/bench_scale.py`, {platform.machine()}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}, ViT of 0.8 M parameters at 28 px, physical batch "
        f"{options.physical}, {options.mode}, one thread a process.",
        "",
        "## Seconds of a step, by part",
        "",
        row(["processes", "logical batch", *PARTS, "total", "images/s", "peak MiB"]),
        row(["---"] * (len(PARTS) + 5)),
    ]
    measured: list[tuple[int, int, dict[str, float]]] = []
    for count in options.processes:
        for logical in options.logical:
            parts, peak = in_processes(
                count,
                lambda size=logical: time_steps(
                    logical=size,
                    physical=options.physical,
                    units=16 * size,
                    steps=options.steps,
                    mode=options.mode,
                ),
            )
            total = sum(parts.values())
            shares = [f"{parts[p]:.3f} ({parts[p] / total:.0%})" for p in PARTS]
            speed = f"{logical / total:.0f}"
            lines.append(row([count, logical, *shares, f"{total:.3f}", speed, f"{peak:.0f}"]))
            measured.append((count, logical, parts))
            print(lines[-1], flush=True)
    lines += ["", "## Seconds of a draw alone", "", row(["units N", "q N", "seconds"])]
    lines.append(row(["---"] * 3))
    for units in options.units:
        for expected in (64, 1024, 16384):
            if expected > units:
                continue
            sampler = PoissonSampler(units, sample_rate=expected / units)
            generator = keyed_generator(b"benchmark", str(units).encode())
            times = []
            for _ in range(5):
                start = time.perf_counter()
                sampler.draw(generator)
                times.append(time.perf_counter() - start)
            lines.append(row([f"{units:,}", f"{expected:,}", f"{statistics.median(times):.5f}"]))
    text = "\n".join(lines) + "\n"
    print(text)
    if options.report is not None:
        options.report.mkdir(parents=True, exist_ok=True)
        path = options.report / f"scale_cpu_{datetime.date.today()}.md"
        path.write_text(text, encoding="utf-8")
        print(f"saved in {path}")
        plot(measured, path.with_suffix(".png"))


if __name__ == "__main__":
    main()

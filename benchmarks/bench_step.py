"""Time and peak memory of one training step under each per-sample gradient engine.

    python benchmarks/bench_step.py --model vit-ti-32 --batch-size 32 --repeats 7
    python benchmarks/bench_step.py --model vit-s-224 --batch-size 8 16 --report benchmarks/reports

A step is forward, backward, and, but for ``plain``, norms, flat clipping and the clipped sum: what
is done for each physical batch. Noise and optimizer are left out, being once for a logical batch.

Time: all engines live in one process and take turns; the median of each is reported, and its ratio
to the plain step. On the CPU it is processor time, which other processes disturb less.

Memory: peak of one engine in a process of its own, net of what the process held before the step
(model, images, and sums of an engine are in the baseline); on the CPU it is resident memory, with
tensors allocated so that they are returned to the system when freed. The largest batch for 8 GB is
in proportion.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

from hf_dpmuon.grad_sample import (
    BookKeepingGradSampleModule,
    GhostGradSampleModule,
    HooksGradSampleModule,
    PerSampleEngine,
)

MODELS = {
    "vit-ti-32": {"hidden_size": 192, "num_attention_heads": 3, "image_size": 32, "patch_size": 4},
    "vit-s-224": {"hidden_size": 384, "num_attention_heads": 6, "image_size": 224},
    "vit-b-224": {"hidden_size": 768, "num_attention_heads": 12, "image_size": 224},
}
MAX_GRAD_NORM = 1.0
NUM_CLASSES = 10
Step = Callable[[Tensor, Tensor], object]


def build_model(name: str) -> nn.Module:
    """A ViT with random weights, as HF configures it."""
    torch.manual_seed(0)
    settings = MODELS[name]
    config = ViTConfig(
        **settings, intermediate_size=4 * settings["hidden_size"], num_labels=NUM_CLASSES
    )
    return ViTForImageClassification(config).train()


def plain(model: nn.Module) -> Step:
    """What a step without privacy does."""

    def step(images: Tensor, labels: Tensor) -> None:
        F.cross_entropy(model(images).logits, labels).backward()
        model.zero_grad()

    return step


def ours(engine_class: type[PerSampleEngine]) -> Callable[[nn.Module], Step]:
    """The step of one of our engines."""

    def build(model: nn.Module) -> Step:
        engine = engine_class(model)
        sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

        def step(images: Tensor, labels: Tensor) -> None:
            F.cross_entropy(engine(images).logits, labels, reduction="sum").backward()
            norms = engine.per_unit_norms()
            total = torch.linalg.vector_norm(torch.stack(list(norms.values())), dim=0)
            factor = (MAX_GRAD_NORM / total).clamp(max=1.0)
            engine.add_weighted_sum(dict.fromkeys(norms, factor), into=sums)
            engine.discard()

        return step

    return build


def opacus_optimizer(kind: type, model: nn.Module) -> torch.optim.Optimizer:
    """Opacus' optimizer without noise, of which only the clipping is used."""
    return kind(
        torch.optim.SGD(model.parameters(), lr=0.0),
        noise_multiplier=0.0,
        max_grad_norm=MAX_GRAD_NORM,
        expected_batch_size=1,
    )


def opacus_hooks(model: nn.Module) -> Step:
    """The step of a user of `GradSampleModule` and `DPOptimizer`."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    engine = GradSampleModule(model)
    optimizer = opacus_optimizer(DPOptimizer, model)

    def step(images: Tensor, labels: Tensor) -> None:
        F.cross_entropy(engine(images).logits, labels).backward()
        optimizer.clip_and_accumulate()
        optimizer.zero_grad()

    return step


def opacus_ghost(model: nn.Module) -> Step:
    """The step of a user of Opacus' fast gradient clipping."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers.optimizer_fast_gradient_clipping import (
        DPOptimizerFastGradientClipping,
    )
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    engine = GradSampleModuleFastGradientClipping(model, max_grad_norm=MAX_GRAD_NORM)
    optimizer = opacus_optimizer(DPOptimizerFastGradientClipping, model)
    criterion = DPLossFastGradientClipping(engine, optimizer, nn.CrossEntropyLoss())

    def step(images: Tensor, labels: Tensor) -> None:
        criterion(engine(images).logits, labels).backward()
        optimizer.accumulate()
        optimizer.zero_grad()

    return step


def checkpointed(build: Callable[[nn.Module], Step]) -> Callable[[nn.Module], Step]:
    """The same step with activations recomputed in the backward pass."""

    def build_checkpointed(model: nn.Module) -> Step:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return build(model)

    return build_checkpointed


ENGINES: dict[str, Callable[[nn.Module], Step]] = {
    "plain": plain,
    "opacus hooks": opacus_hooks,
    "opacus ghost": opacus_ghost,
    "ours hooks": ours(HooksGradSampleModule),
    "ours bookkeeping": ours(BookKeepingGradSampleModule),
    "ours ghost": ours(GhostGradSampleModule),
    "plain, checkpointed": checkpointed(plain),
    "ours ghost, checkpointed": checkpointed(ours(GhostGradSampleModule)),
}


def random_batch(name: str, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images without meaning."""
    side = MODELS[name]["image_size"]
    images = torch.randn(size, 3, side, side, generator=torch.Generator().manual_seed(0))
    return images.to(device), torch.arange(size, device=device) % NUM_CLASSES


def measure_times(
    name: str, engines: list[str], size: int, repeats: int, device: torch.device
) -> dict[str, float]:
    """Median seconds of a step, engines taking turns."""
    model = build_model(name).to(device)
    steps = {engine: ENGINES[engine](copy.deepcopy(model)) for engine in engines}
    batch = random_batch(name, size, device)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    times: dict[str, list[float]] = {engine: [] for engine in engines}
    for repeat in range(repeats + 1):  # the first round warms up
        for engine, step in steps.items():
            gc.collect()
            start = clock()
            step(*batch)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if repeat:
                times[engine].append(clock() - start)
    return {engine: statistics.median(values) for engine, values in times.items()}


def resident_bytes(key: str) -> int:
    """VmRSS (now) or VmHWM (peak since the last reset) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def measure_memory(name: str, engine: str, size: int, device: torch.device) -> int:
    """Peak bytes of a step beyond what is held between steps."""
    step = ENGINES[engine](build_model(name).to(device))
    step(*random_batch(name, 1, device))  # libraries load and sums are allocated
    batch = random_batch(name, size, device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(*batch)
        return torch.cuda.max_memory_allocated() - before
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    step(*batch)
    return resident_bytes("VmHWM") - before


def measure_memory_apart(name: str, engine: str, size: int, device: str) -> int:
    """``measure_memory`` in a process of its own."""
    command = [sys.executable, __file__, "--model", name, "--batch-size", str(size)]
    command += ["--device", device, "--memory-of", engine]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return int(json.loads(result.stdout.splitlines()[-1]))


def table(arguments: argparse.Namespace, size: int) -> list[str]:
    """Rows of Markdown for one physical batch."""
    device = torch.device(arguments.device)
    times = measure_times(arguments.model, arguments.engines, size, arguments.repeats, device)
    memory = {
        engine: measure_memory_apart(arguments.model, engine, size, arguments.device)
        for engine in arguments.engines
    }
    rows = [
        f"### {arguments.model}, physical batch {size}",
        "",
        "| engine | s / step | time / plain | peak MB | memory / plain | batch in 8 GB |",
        "|---|---|---|---|---|---|",
    ]
    rows += [
        f"| {engine} | {times[engine]:.4f} | {times[engine] / times['plain']:.2f} "
        f"| {memory[engine] / 1e6:.0f} | {memory[engine] / memory['plain']:.2f} "
        f"| {int(8e9 / memory[engine] * size)} |"
        for engine in arguments.engines
    ]
    return [*rows, ""]


def hardware(device: str) -> str:
    """What the numbers hold for."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    model = next(
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    return f"{model}, {torch.get_num_threads()} threads"


def main() -> None:
    """Read the command line and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="vit-ti-32")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[32])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--report", type=Path, help="append the tables to a report in this folder")
    parser.add_argument("--memory-of", choices=ENGINES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        (size,) = arguments.batch_size
        device = torch.device(arguments.device)
        print(measure_memory(arguments.model, arguments.memory_of, size, device))
        return
    if "plain" not in arguments.engines:
        parser.error("--engines must contain plain, which the others are compared with")
    lines = [line for size in arguments.batch_size for line in table(arguments, size)]
    print("\n".join(lines))
    if arguments.report:
        today = datetime.date.today().isoformat()
        path = arguments.report / f"step_{arguments.device}_{today}.md"
        if not path.exists():
            lines = [
                f"# Time and memory of a step, {today}",
                "",
                f"{hardware(arguments.device)}; torch {torch.__version__}, "
                f"Python {platform.python_version()}; `{Path(__file__).name}`, "
                f"medians of {arguments.repeats} interleaved repetitions, fp32.",
                "",
                *lines,
            ]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as report:
            report.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

"""The public facts on which the rounding of a step's sums depends.

Receives the settings of a run and its engine; returns facts that two starts can be
compared by. No data enters.

Guarantees:
    Starts with equal facts make equal sums of equal rows, on a device that repeats itself.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hf_dpmuon.arguments import DPTrainingArguments
from hf_dpmuon.grad_sample import PerSampleEngine

__all__ = ["circumstances", "is_repeatable"]

LIBRARIES = ("accelerate", "numpy", "opacus", "pillow", "timm", "torch", "torchvision")
# Arguments that move no weight: where things are written, shown and sent, and when.
HARMLESS = {
    *("output_dir", "run_name", "project", "report_to", "resume_from_checkpoint", "do_train"),
    *("do_eval", "do_predict", "disable_tqdm", "eval_delay", "eval_on_start", "eval_steps"),
    *("eval_strategy", "per_device_eval_batch_size", "push_to_hub", "save_total_limit"),
    *("accelerator_config", "dataloader_num_workers", "dataloader_prefetch_factor"),
    *("dataloader_pin_memory", "dataloader_persistent_workers", "report_nonprivate_loss"),
}
HARMLESS_PREFIXES = ("hub_", "log_", "logging_", "save_", "trackio_", "include_")


def circumstances(
    args: DPTrainingArguments, *, engine: PerSampleEngine, given: Mapping[str, object]
) -> dict[str, str]:
    """Return settings, engine, processes, threads, device and versions, each as text.

    Args:
        args: The arguments of the run.
        engine: That of per-sample gradients, chosen by now.
        given: What else the trainer was given, by name, in a form that has a text.
    """
    settings: dict[str, Any] = args.to_dict()  # type: ignore[no-untyped-call]
    facts = {
        f"argument {name}": str(value)
        for name, value in settings.items()
        if name not in HARMLESS and not name.startswith(HARMLESS_PREFIXES)
    }
    facts |= {f"setting {name}": str(value) for name, value in given.items()}
    trained = [name for name, p in engine.named_parameters() if p.requires_grad]
    facts |= {f"version of {name}": version(name) for name in (*LIBRARIES, "transformers")}
    return facts | {
        "engine": type(engine).__name__,
        "trained parameters": " ".join(trained),
        "processes": str(args.world_size),
        "threads": str(torch.get_num_threads()),
        "device": _device(args.device),
        "processor": f"{_processor()} {torch.backends.cpu.get_cpu_capability()}",
        "python": platform.python_version(),
    }


def is_repeatable(args: DPTrainingArguments) -> bool:
    """Whether the device sums in the same order each time; a GPU does only when told to."""
    return args.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    return f"{torch.cuda.get_device_name(device)} with CUDA {torch.version.cuda}"


def _processor() -> str:
    """Model name of the processor, which Python leaves empty on Linux."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return platform.processor()
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()

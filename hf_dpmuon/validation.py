"""Validation: whether every trainable parameter of a model can be clipped and noised.

Receives any module; returns nothing, or refuses it with all its problems at once.
"""

from itertools import pairwise

import torch
from torch import nn

from hf_dpmuon.adapters import adapter_problems

__all__ = ["validate_model"]

MIXING = nn.modules.batchnorm._BatchNorm
PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def validate_model(model: nn.Module) -> None:
    """Refuse a model of which not every trainable parameter can be clipped and noised.

    What needs a batch to be seen (parameters off the forward path, samples coupled by the loss,
    buffers that a custom layer updates) is left to the trainer.

    Raises:
        ValueError: All problems at once, each with what to do instead.
    """
    modules = {path or "(root)": module for path, module in model.named_modules()}
    parameters = dict(model.named_parameters())
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    ordinary = {
        name: p for name, p in trainable.items() if p.layout is torch.strided and not p.is_complex()
    }
    problems = list(adapter_problems(model))
    if any(
        "_orig_mod" in path.split(".") or module._compiled_call_impl is not None
        for path, module in modules.items()
    ):
        problems.append("it was compiled, which bypasses per-sample hooks: pass it uncompiled")
    if not trainable:
        problems.append("no parameter is trainable: call requires_grad_(True) on those to train")
    named = {
        "{} is wrapped for data parallelism: pass the module inside": [
            path for path, module in modules.items() if isinstance(module, PARALLEL)
        ],
        "BatchNorm mixes samples in {}: replace it by GroupNorm (as builtin:resnet-18-gn has it), "
        "or freeze it (torchvision.ops.FrozenBatchNorm2d)": [
            path for path, module in modules.items() if isinstance(module, MIXING)
        ],
        "training updates buffers of {} with raw statistics: remove spectral norms and set "
        "track_running_stats=False": [
            path for path, module in modules.items() if _updates_buffers(module)
        ],
        "{} are complex or sparse: make them real and dense, or freeze them": [
            name for name in trainable if name not in ordinary
        ],
        "{} are not fp32: call model.float() and use bf16=True for speed": [
            f"{name} ({p.dtype})"
            for name, p in ordinary.items()
            if p.dtype not in (torch.float32, torch.float64)
        ],
        "{} share memory, but are two parameters: assign one to both modules": _overlaps(trainable),
        "{} have no storage (meta device): load the weights first": [
            name for name, p in parameters.items() if p.is_meta
        ],
    }
    problems += [said.format(", ".join(sorted(names))) for said, names in named.items() if names]
    if problems:
        raise ValueError("the model cannot be trained privately: " + "; ".join(problems) + ".")


def _updates_buffers(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return module.track_running_stats
    return isinstance(module, nn.utils.parametrizations._SpectralNorm)


def _overlaps(parameters: dict[str, nn.Parameter]) -> list[str]:
    """Name pairs of parameters of which one starts within the other."""
    placed = sorted(
        (p.data_ptr(), p.nbytes, name)
        for name, p in parameters.items()
        if not p.is_meta and p.layout is torch.strided
    )
    return [
        f"{name} and {other}"
        for (start, size, name), (next_start, _, other) in pairwise(placed)
        if start + size > next_start
    ]

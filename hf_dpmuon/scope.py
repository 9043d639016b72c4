"""Which part of a pretrained model is trained; the rest is frozen, and costs no noise.

Receives a loaded model and the name of a part; returns the model with the rest frozen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from hf_dpmuon.adapters import add_lora
from hf_dpmuon.models import LoadedModel
from hf_dpmuon.roles import ParameterRole, parameter_roles

__all__ = ["train_only"]

MATRICES = (ParameterRole.MATRIX, ParameterRole.FUSED_QKV, ParameterRole.FUSED_PAIR)
LAST_BLOCKS = re.compile(r"last_n=([1-9][0-9]*)")
PARTS = "all, head, bias, norm, lora, or last_n=K for the last K blocks"


def train_only(loaded: LoadedModel, part: str, *, lora_rank: int) -> LoadedModel:
    """Freeze what is not part of ``part``; the classifier head is part of each.

    ============ ==============================================================================
    all          every parameter that the logits depend on
    head         the classifier's layers alone
    bias         all biases (BitFit, Ben Zaken et al. 2022)
    norm         gains and biases of the norms
    lora         new adapters beside the matrices of the blocks; see ``adapters.add_lora``
    last_n=K     the last K blocks, and whatever comes after them
    ============ ==============================================================================

    Args:
        loaded: Its model is changed in place. What is frozen already stays frozen.
        part: One of these.
        lora_rank: That of the adapters.

    Raises:
        ValueError: If there is no such part, in general or in this model.
    """
    if part == "all":
        return loaded
    model, roles = loaded.model, parameter_roles(loaded.model)
    if ParameterRole.HEAD not in roles.values():
        raise ValueError(
            f"trainable={part!r}: the head of a {type(model).__name__} is not known; use "
            "trainable='all', or freeze layers yourself."
        )
    kept = {p for p in model.parameters() if p.requires_grad}
    if part == "lora":
        linear = {path for path, m in model.named_modules() if isinstance(m, nn.Linear)}
        weights = (name.removesuffix(".weight") for name, role in roles.items() if role in MATRICES)
        add_lora(model, sorted(linear.intersection(weights)), rank=lora_rank)
    is_trained = _rule(part, model, roles)
    for name, p in model.named_parameters():
        is_head = roles.get(name) is ParameterRole.HEAD
        is_new = name not in roles and "lora_" in name
        p.requires_grad_((p in kept or is_new) and (is_head or is_trained(name)))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    rank = f" of rank {lora_rank}" if part == "lora" else ""
    parts = "head" if part == "head" else f"{part}{rank} and head"
    note = f"trained: {parts}, {trained:,} of {total:,} parameters"
    return replace(loaded, notes=(*loaded.notes, note))


def _rule(part: str, model: nn.Module, roles: dict[str, ParameterRole]) -> Callable[[str], bool]:
    """Whether a parameter of this name is trained, beside the head."""
    match part:
        case "head":
            return lambda name: False
        case "bias":
            return lambda name: name.endswith("bias")
        case "norm":
            return lambda name: roles[name] is ParameterRole.NORM
        case "lora":
            return lambda name: "lora_" in name
    found = LAST_BLOCKS.fullmatch(part)
    if found is None:
        raise ValueError(f"trainable={part!r} must be {PARTS}.")
    last = _last_blocks(model, int(found[1]))
    return lambda name: name in last


def _last_blocks(model: nn.Module, count: int) -> set[str]:
    """Names of the parameters of the last blocks and of all that is registered after them."""
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    alike = [m for m in lists if len(m) > 1 and len({type(child) for child in m}) == 1]
    kind = type(max(alike, key=len)[0]) if alike else None
    blocks = [path for path, m in model.named_modules() if kind is not None and type(m) is kind]
    if count > len(blocks):
        raise ValueError(f"trainable='last_n={count}' must be at most {len(blocks)}, its blocks.")
    names = [name for name, _ in model.named_parameters()]
    first = next(i for i, name in enumerate(names) if name.startswith(f"{blocks[-count]}."))
    return set(names[first:])

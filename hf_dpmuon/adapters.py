"""LoRA: low-rank adapters of peft beside frozen matrices, as layers of the model that is trained.

Receives models that may hold layers of peft; says which of them can be trained privately, and
returns the plain model that a trained one amounts to. peft is an extra, and is loaded only where
there is a layer of it.

Guarantees:
    The model with its adapters merged has the architecture that it had before and, up to rounding,
    the same logits. Nothing of a merged model names an adapter.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["add_lora", "adapter_layers", "adapter_problems", "merged", "unwrapped"]


def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """Layers of peft by their path in the model; empty for a model without."""
    return {path: m for path, m in model.named_modules() if _is_of_peft(m)}


def add_lora(model: nn.Module, layers: list[str], *, rank: int) -> None:
    """Put an adapter of this rank beside each of these linear layers, which are frozen.

    An adapter adds ``B A x`` to what its layer returns (Hu et al. 2022, arXiv 2106.09685), without
    a further factor. B starts at zero, so that the logits are the same at first.

    Args:
        model: Plain; changed in place.
        layers: Paths of linear layers.
        rank: At least 1.

    Raises:
        ValueError: If the rank is below 1, or peft is not installed.
    """
    if rank < 1:
        raise ValueError(f"lora_rank={rank} must be at least 1.")
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError(
            "trainable='lora' needs the package peft; install it with "
            "`pip install 'hf-dpmuon[lora]'`."
        ) from error
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=layers)
    inject_adapter_in_model(config, model)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model that ``get_peft_model`` wrapped, its adapters in it; others as they are."""
    if not _is_of_peft(model):
        return model
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        raise ValueError(
            f"the model is a {type(model).__name__} of peft, which is not supported; pass the "
            "plain model, or one with LoRA adapters."
        )
    inner: nn.Module = model.get_base_model()
    return inner


def adapter_problems(model: nn.Module) -> Iterator[str]:
    """Why layers of peft cannot be trained privately and saved: kinds that were never tried."""
    layers = adapter_layers(model)
    if not layers:
        return
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    names = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    strange, several, idle, tied = [], [], [], []
    for path, layer in layers.items():
        is_plain = (
            isinstance(layer, LoraLayer)
            and isinstance(layer.get_base_layer(), (nn.Linear, nn.Conv2d))
            and not (layer.lora_variant or layer.lora_bias.get(*layer.active_adapters[:1], False))
        )
        if not is_plain and not isinstance(layer, ModulesToSaveWrapper):
            strange.append(path or "(root)")
        elif len(layer.active_adapters) > 1:
            several.append(path)
        elif layer.disable_adapters or (isinstance(layer, LoraLayer) and layer.merged):
            idle.append(path)
        elif isinstance(layer, LoraLayer) and names[id(layer.get_base_layer().weight)] > 1:
            tied.append(path)
    if tied:
        yield (
            f"{', '.join(sorted(tied))} have adapters beside a weight that others share, into "
            "which they cannot be merged: leave these layers out of target_modules"
        )
    if strange:
        yield (
            f"{', '.join(sorted(strange))} of peft are no plain LoRA on a linear layer or a "
            "two-dimensional convolution (DoRA, other tuners): use plain LoRA"
        )
    if several:
        yield f"{', '.join(sorted(several))} have several active adapters: activate one"
    if idle:
        yield f"{', '.join(sorted(idle))} have disabled or merged adapters: enable or unmerge them"


def merged(model: nn.Module) -> nn.Module:
    """Return the plain model that this one amounts to: a copy, or itself without adapters."""
    if not adapter_layers(model):
        return model
    from peft.tuners.lora import LoraLayer

    plain = copy.deepcopy(model)
    for path, layer in adapter_layers(plain).items():
        if isinstance(layer, LoraLayer):
            layer.merge(safe_merge=True)
            inner = layer.get_base_layer()
        else:  # a layer that is trained whole, beside the one that it replaces
            inner = layer.modules_to_save[layer.active_adapters[0]]
        parent, _, name = path.rpartition(".")
        setattr(plain.get_submodule(parent), name, inner)
    for trace in ("peft_config", "_hf_peft_config_loaded"):
        vars(plain).pop(trace, None)
    return plain


def _is_of_peft(module: nn.Module) -> bool:
    return type(module).__module__.startswith("peft.")

"""Roles: what each parameter is to a model, by the type and place of the module that owns it.

Receives a model; returns the role of every parameter, from which a method knows how to use its
gradient.
"""

from enum import Enum
from typing import Protocol, runtime_checkable

from torch import nn
from transformers import PreTrainedModel

__all__ = ["BLOCKS", "ParameterRole", "head_parameters", "parameter_roles"]


class ParameterRole(str, Enum):
    """What a parameter is to the model, which decides how its gradient is used."""

    MATRIX = "matrix"  # weight of a linear layer
    FUSED_QKV = "fused_qkv"  # three matrices in one, stacked along the outputs
    FUSED_PAIR = "fused_pair"  # two: key and value, or query and key
    CONV = "conv"  # weight of a convolution
    PATCH_EMBEDDING = "patch_embedding"  # the convolution that reads the image, with its bias
    HEAD = "head"  # the linear layers that give the logits, with their biases
    EMBEDDING = "embedding"  # class and other tokens, position tables
    SCALE = "scale"  # LayerScale, and the gains of convolutions with standardised weights
    NORM = "norm"
    BIAS = "bias"


# How many matrices a parameter stacks.
BLOCKS = {ParameterRole.FUSED_QKV: 3, ParameterRole.FUSED_PAIR: 2}


@runtime_checkable
class _HasClassifier(Protocol):
    """What every timm model answers."""

    def get_classifier(self) -> nn.Module | tuple[nn.Module, ...]: ...


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def parameter_roles(model: nn.Module) -> dict[str, ParameterRole]:
    """Return the role of every parameter, by the type and place of the module that owns it.

    A module that is neither of HF nor of timm has no head: its linear layers are matrices. A
    parameter of two or more dimensions that belongs to none of torch's layers is an embedding.
    """
    heads = _head_layers(model)
    stem = next((module for module in model.modules() if isinstance(module, CONVOLUTIONS)), None)
    fused = {
        child: role
        for module in model.modules()
        for child_name, child in module.named_children()
        if isinstance(child, nn.Linear) and (role := _fused_role(child_name, child))
    }
    roles = {}
    for path, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            if module in heads:
                role = ParameterRole.HEAD
            elif module is stem and not _is_gain(name, p):
                role = ParameterRole.PATCH_EMBEDDING
            elif module in fused and p.ndim == 2:
                role = fused[module]
            else:
                role = _role_in(module, name, p)
            roles[f"{path}.{name}" if path else name] = role
    return {name: roles[name] for name, _ in model.named_parameters()}


def _role_in(module: nn.Module, name: str, p: nn.Parameter) -> ParameterRole:
    """Return the role of a parameter that its owner's type alone decides."""
    if isinstance(module, NORMS):
        return ParameterRole.NORM
    if isinstance(module, nn.MultiheadAttention) and name == "in_proj_weight":
        return ParameterRole.FUSED_QKV
    if isinstance(module, CONVOLUTIONS) and _is_gain(name, p):
        return ParameterRole.SCALE
    if p.ndim >= 2:
        if isinstance(module, nn.Linear):
            return ParameterRole.MATRIX
        return ParameterRole.CONV if isinstance(module, CONVOLUTIONS) else ParameterRole.EMBEDDING
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is not None and weight.ndim == 1:  # a norm that timm or HF wrote itself
        return ParameterRole.NORM
    return ParameterRole.BIAS if name.endswith("bias") else ParameterRole.SCALE


def _fused_role(name: str, layer: nn.Linear) -> ParameterRole | None:
    """Return what a linear layer of timm's attentions holds, by its name and its size."""
    pair = name in ("kv", "qk") or (name == "qkv" and layer.out_features == 2 * layer.in_features)
    if pair and layer.out_features % 2 == 0:
        return ParameterRole.FUSED_PAIR
    whole = name == "qkv" and layer.out_features % 3 == 0
    return ParameterRole.FUSED_QKV if whole else None


def _is_gain(name: str, p: nn.Parameter) -> bool:
    """Whether a convolution with this parameter scales its weight by it, an entry an output."""
    return name != "weight" and p.ndim >= 2 and p.numel() == len(p)


def _head_layers(model: nn.Module) -> set[nn.Module]:
    """Return the linear layers that turn features into logits."""
    if isinstance(model, PreTrainedModel):
        for child in model.children():
            if isinstance(child, _HasClassifier):  # timm's model, in HF's wrapper of it
                return _head_layers(child)
        if model.base_model is model:
            return set()
        outside = set(model.modules()) - set(model.base_model.modules())
    elif isinstance(model, _HasClassifier):
        classifier = model.get_classifier()
        heads = classifier if isinstance(classifier, tuple) else (classifier,)
        outside = {module for head in heads for module in head.modules()}
    else:
        outside = set()
    return {module for module in outside if isinstance(module, nn.Linear)}


def head_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters of the head."""
    return {name for name, role in parameter_roles(model).items() if role is ParameterRole.HEAD}

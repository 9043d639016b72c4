"""Activation checkpointing for models that the base class does not know how to ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from torch import nn
from transformers import PreTrainedModel

from hf_dpmuon.arguments import DPTrainingArguments

__all__ = ["recomputing"]


@runtime_checkable
class _Checkpoints(Protocol):
    """What timm's models answer."""

    def set_grad_checkpointing(self, enable: bool = True) -> None: ...


@contextmanager
def recomputing(model: nn.Module, args: DPTrainingArguments) -> Iterator[None]:
    """Let a model that is not Hugging Face's recompute its activations, if the arguments say so.

    Raises:
        ValueError: If the model does not know how.
    """
    asked = args.activation_checkpointing
    if not asked or isinstance(model, PreTrainedModel):
        yield
        return
    try:
        assert isinstance(model, _Checkpoints)
        model.set_grad_checkpointing(True)
    except (AssertionError, NotImplementedError):  # timm's own refusals are assertions
        raise ValueError(
            f"activation_checkpointing=True: {type(model).__name__} does not know how to "
            "recompute activations; leave it out, or use grad_sample_mode='ghost' to save memory."
        ) from None
    args.activation_checkpointing = False  # the base class would look for a method of its own
    try:
        yield
    finally:
        args.activation_checkpointing = asked
        model.set_grad_checkpointing(False)

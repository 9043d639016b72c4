"""Activation checkpointing for models that the base class does not know how to ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from hf_dpmuon.arguments import DPTrainingArguments
from hf_dpmuon.models import set_activation_checkpointing

__all__ = ["recomputing"]


@contextmanager
def recomputing(model: nn.Module, args: DPTrainingArguments) -> Iterator[None]:
    """Let a model that is not Hugging Face's recompute its activations, if the arguments say so."""
    asked = args.activation_checkpointing
    if not asked or isinstance(model, PreTrainedModel):
        yield
        return
    set_activation_checkpointing(model, True)
    args.activation_checkpointing = False  # the base class would look for a method of its own
    try:
        yield
    finally:
        args.activation_checkpointing = asked
        set_activation_checkpointing(model, False)

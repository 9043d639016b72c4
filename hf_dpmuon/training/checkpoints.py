"""Checkpoints that are whole or absent.

Receives folders; finds, recovers, completes and reads the checkpoints in them.

Guarantees:
    A folder called ``checkpoint-N`` holds all of a checkpoint. Every weight of one is loaded, or
    none.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import SAFE_WEIGHTS_NAME

from hf_dpmuon.adapters import adapter_layers
from hf_dpmuon.filters import GradientFilter

__all__ = [
    "STAGING",
    "find_checkpoint",
    "load_filter",
    "load_weights",
    "publish",
    "recover_replaced",
    "save_adapters",
    "save_filter",
    "staged",
    "state_of",
]

STAGING = ".incomplete-checkpoint"
FILTER_FILE = "gradient_filter.pt"
ADAPTERS_FILE = "adapters.pt"


def find_checkpoint(folder: Path, resume: str | bool | None) -> Path | None:
    """Return the checkpoint to resume from: the one that is named, or for True the last one."""
    if resume is None or resume is False:
        return None
    if resume is True:
        found = get_last_checkpoint(str(folder)) if folder.is_dir() else None
        if found is None:
            raise ValueError(
                f"resume_from_checkpoint: output_dir={str(folder)!r} holds no checkpoint to go on "
                "from; choose another output_dir and start anew."
            )
        return Path(found)
    if not os.path.isdir(resume):
        raise ValueError(f"resume_from_checkpoint={resume!r} is not a folder.")
    return Path(resume)


def recover_replaced(folder: Path) -> None:
    """Put back a checkpoint whose replacement was interrupted between two renames."""
    for kept in (folder / STAGING).glob("replaced-*"):
        final = folder / kept.name.removeprefix("replaced-")
        if not final.exists():
            os.replace(kept, final)


@contextmanager
def staged(folder: Path, name: str, *, is_main: bool) -> Iterator[Path]:
    """Let a checkpoint be written under a temporary name; clean up and explain if it cannot be."""
    if is_main:
        shutil.rmtree(folder / STAGING, ignore_errors=True)  # of an interrupted run
    try:
        yield folder / STAGING / name
    except (OSError, RuntimeError, SafetensorError) as error:  # each library has its own
        shutil.rmtree(folder / STAGING, ignore_errors=True)
        reason = (
            isinstance(error, OSError) and error.strerror
        ) or "the disk took only a part of it"
        if get_last_checkpoint(str(folder)) is None:
            advice = (
                "start again with an output_dir that has space: this run has no checkpoint to go "
                "on from, and its ledger keeps what was spent"
            )
        else:
            advice = (
                "free space, then pass --resume_from_checkpoint last to go on from the checkpoint "
                "before it"
            )
        raise ValueError(f"{name} could not be written ({reason}); {advice}.") from error


def publish(checkpoint: Path, state: TrainerState) -> None:
    """Rename a staged checkpoint, whole now, to its final name."""
    state.save_to_json(str(checkpoint / TRAINER_STATE_NAME))
    final = checkpoint.parents[1] / checkpoint.name
    if final.exists():  # of an earlier run through this step
        os.replace(final, checkpoint.with_name(f"replaced-{checkpoint.name}"))
    os.replace(checkpoint, final)
    shutil.rmtree(checkpoint.parent)


def state_of(checkpoint: Path) -> TrainerState:
    """Return the base class's state in a checkpoint."""
    state: TrainerState = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    return state


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Load every weight of a checkpoint, or fail.

    The base class compares the keys in the file, which ``save_pretrained`` may have renamed,
    with those in memory, and goes on with the pretrained weights where they differ.
    """
    if adapter_layers(model):
        _load_adapters(model, checkpoint)
        return
    if isinstance(model, PreTrainedModel):
        state = type(model).from_pretrained(checkpoint, dtype=torch.float32).state_dict()
    else:
        state = load_file(checkpoint / SAFE_WEIGHTS_NAME)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip().rstrip(".")
        raise ValueError(
            f"checkpoint {checkpoint} holds another model than this run's ({reason}); resume with "
            "the model, image_size and number of classes that it was made with."
        ) from error


def save_adapters(model: nn.Module, checkpoint: Path) -> None:
    """Write what is trained of a model with adapters, since its weights are saved merged."""
    if adapter_layers(model):
        torch.save(
            {"trained": _trained(model), "frozen": _frozen_digest(model)},
            checkpoint / ADAPTERS_FILE,
        )


def _load_adapters(model: nn.Module, checkpoint: Path) -> None:
    path = checkpoint / ADAPTERS_FILE
    saved = torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else {}
    own = _trained(model)
    shapes = {name: value.shape for name, value in saved.get("trained", {}).items()}
    if shapes != {name: p.shape for name, p in own.items()}:
        raise ValueError(
            f"checkpoint {checkpoint} has other adapters than this run's; resume with the model, "
            "trainable and lora_rank that it was made with."
        )
    if saved["frozen"] != _frozen_digest(model):
        raise ValueError(
            f"checkpoint {checkpoint} was made with other frozen weights than this run's; resume "
            "with the model and model_revision that it was made with."
        )
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(saved["trained"][name])


def _trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def _frozen_digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, p in model.named_parameters():
        if not p.requires_grad:
            digest.update(name.encode())
            digest.update(p.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def save_filter(filter: GradientFilter, checkpoint: Path) -> None:
    """Write what a filter keeps of past gradients, if it does."""
    if filter.state_dict():
        torch.save(filter.state_dict(), checkpoint / FILTER_FILE)


def load_filter(filter: GradientFilter, checkpoint: Path, device: torch.device) -> None:
    """Read what ``save_filter`` wrote."""
    if not filter.state_dict():
        return
    if not (checkpoint / FILTER_FILE).exists():
        raise ValueError(
            f"checkpoint {checkpoint} has no {FILTER_FILE}, the past gradients that a dp_filter "
            "goes on from; take another checkpoint."
        )
    filter.load_state_dict(
        torch.load(checkpoint / FILTER_FILE, map_location=device, weights_only=True)
    )

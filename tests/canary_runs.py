"""An audited run of the real trainer, small; and faults to plant in it, each in one part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support import Images, arguments, as_loaded
from torch import Tensor, nn

from hf_dpmuon import mechanism as mechanism_room
from hf_dpmuon.canaries import AuditTrainer
from hf_dpmuon.grad_sample import PerSampleEngine
from hf_dpmuon.ledger import PrivacyLedger
from hf_dpmuon.mechanism import GaussianMechanism
from hf_dpmuon.sampling import PoissonSampler
from hf_dpmuon.units import PrivacyUnits

ROWS = 20  # that are no canaries


class Small(nn.Module):
    """The least that is a classifier of images."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.mean((2, 3)))


def audited(
    folder: Path,
    *,
    canaries: int,
    sample_rate: float,
    sigma: float,
    steps: int,
    model: nn.Module | None = None,
    rows_per_unit: int = 1,
    **settings: Any,
) -> AuditTrainer:
    """Train with canaries, under the tightest accountant that is always installed."""
    units = None
    if rows_per_unit > 1:
        units = PrivacyUnits("patient", tuple(np.arange(ROWS).reshape(-1, rows_per_unit)))
    num_units = canaries + (ROWS if units is None else len(units))
    trainer = AuditTrainer(
        as_loaded(Small() if model is None else model),
        arguments(
            folder,
            **{
                "noise_multiplier": sigma,
                "logical_batch_size": round(sample_rate * num_units),
                "max_steps": steps,
                "per_device_train_batch_size": 512,
                "accountant": "prv",
                "dp_optimizer": "sgd",
                "logging_steps": 1000,
                **settings,
            },
        ),
        train_dataset=Images(ROWS),
        canaries=canaries,
        units=units,
    )
    trainer.train()
    return trainer


def _noise(change: Callable[..., Any]) -> Callable[[Any], None]:
    """A fault in the noise: ``change(draw, mechanism, step)`` yields one array a parameter."""

    def plant(monkeypatch: Any) -> None:
        draw = GaussianMechanism._noise
        monkeypatch.setattr(GaussianMechanism, "_noise", lambda m, step: change(draw, m, step))

    return plant


def _clipping(change: Callable[..., dict[str, Tensor]]) -> Callable[[Any], None]:
    """A fault in the factors: ``change(clip, norms, settings)``."""

    def plant(monkeypatch: Any) -> None:
        clip = mechanism_room.clip_factors
        monkeypatch.setattr(
            mechanism_room, "clip_factors", lambda norms, **how: change(clip, norms, how)
        )

    return plant


def _twice_the_rate(monkeypatch: Any) -> None:
    make = PoissonSampler.__init__
    monkeypatch.setattr(
        PoissonSampler,
        "__init__",
        lambda self, n, *, sample_rate: make(self, n, sample_rate=2 * sample_rate),
    )


def _half_the_rate_recorded(monkeypatch: Any) -> None:
    record = PrivacyLedger.record
    monkeypatch.setattr(
        PrivacyLedger,
        "record",
        lambda self, event: record(self, replace(event, sample_rate=event.sample_rate / 2)),
    )


def _every_other_draw_recorded(monkeypatch: Any) -> None:
    record = PrivacyLedger.record
    monkeypatch.setattr(
        PrivacyLedger, "record", lambda self, event: event.step % 2 and record(self, event)
    )


def _units_ignored(monkeypatch: Any) -> None:
    monkeypatch.setattr(PerSampleEngine, "set_units", lambda *_, **__: None)


FAULTS: dict[str, Callable[[Any], None]] = {
    "half the noise": _noise(lambda draw, m, step: (z / 2 for z in draw(m, step))),
    "noise on matrices only": _noise(
        lambda draw, m, step: (z * (z.ndim > 1) for z in draw(m, step))
    ),
    "the same noise in each step": _noise(lambda draw, m, step: draw(m, 1)),
    "the same noise in each pair of steps": _noise(lambda draw, m, step: draw(m, (step + 1) // 2)),
    "no noise in one step": _noise(lambda draw, m, step: (z * (step != 3) for z in draw(m, step))),
    "no clipping": _clipping(
        lambda clip, norms, how: {name: torch.ones_like(norm) for name, norm in norms.items()}
    ),
    "clipping at 2 C": _clipping(
        lambda clip, norms, how: clip(norms, **{**how, "max_grad_norm": 2 * how["max_grad_norm"]})
    ),
    "clipping each tensor at C": _clipping(
        lambda clip, norms, how: {k: clip({k: n}, **how)[k] for k, n in norms.items()}
    ),
    "draws at twice the rate": _twice_the_rate,
    "half the rate in the ledger": _half_the_rate_recorded,
    "every other draw in the ledger": _every_other_draw_recorded,
    "each image of a unit clipped alone": _units_ignored,
}

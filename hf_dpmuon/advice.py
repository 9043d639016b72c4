"""Advice before a run: which method, batch, length and engine, from public facts alone.

Receives the name of a model, the number of privacy units and what they may cost; tries the model on
rows of noise. No private row is read, so advice costs no privacy.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpmuon.grad_sample import ENGINES, free_bytes
from hf_dpmuon.known_noise import lookahead, variance_factor
from hf_dpmuon.methods import matrix_shapes
from hf_dpmuon.models import LoadedModel, load_model
from hf_dpmuon.plan import Budget, PrivacyPlan, default_batch_size
from hf_dpmuon.random_matrix import detection_threshold
from hf_dpmuon.training.trial import Trial

__all__ = ["Advice", "Choice", "advise"]

BATCH_SIZES = tuple(2**power for power in range(8, 16))  # 256 to 32768
MOMENTUM = 0.95  # DP-Muon's
ENGINES_COMPARED = ("bookkeeping", "ghost")  # in the order of preference


@dataclass(frozen=True)
class Choice:
    """A logical batch size, and what follows from it; noise and signal in units of C.

    Attributes:
        logical_batch_size: B.
        steps: Number of draws.
        epochs: Passes over the data.
        sigma: Noise multiplier.
        noise_per_unit: Noise in every entry of a private mean gradient.
        thresholds: Per shape of matrix, the smallest singular value of the mean gradient that can
            be detected in DP-Muon's momentum while the gradient stays the same.
        threshold: Their median over all matrices.
        hours: What all gradients take on this machine, in the engine that is recommended.
    """

    logical_batch_size: int
    steps: int
    epochs: float
    sigma: float
    noise_per_unit: float
    thresholds: dict[str, float]
    threshold: float
    hours: float


@dataclass(frozen=True)
class Advice:
    """Choices, and the one that is recommended.

    Attributes:
        num_units: N.
        epsilon: What the run may cost.
        delta: The delta of the guarantee.
        strongest: Singular value that each matrix would have if all gradients were alike and had
            equal parts in all matrices: C / sqrt(number of matrices), in units of C.
        gigabytes: Memory of a physical batch by engine, with all that outlives it.
        choices: In ascending order of the batch size.
        method: Recommended ``dp_optimizer``.
        logical_batch_size: Recommended.
        epochs: Recommended.
        engine: Recommended ``grad_sample_mode``.
        reason: For all of it, in one sentence.
    """

    num_units: int
    epsilon: float
    delta: float
    strongest: float
    gigabytes: dict[str, float]
    choices: list[Choice]
    method: str
    logical_batch_size: int
    epochs: float
    engine: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return asdict(self)


def advise(
    model: str,
    *,
    num_units: int,
    target_epsilon: float,
    delta: float | None = None,
    num_epochs: float | None = None,
    num_classes: int = 10,
    physical_batch_size: int = 32,
    accountant: str = "rdp",
) -> Advice:
    """Compare the logical batch sizes 256 to 32768, and recommend a run.

    The batch is the one next to the default of a run, ``plan.default_batch_size``. DP-Muon is
    recommended where a gradient on which all units agree could be detected at all; whether theirs
    do is private, and the spectral report of the run tells (``diagnostics``).

    Args:
        model: As ``load_model`` takes it.
        num_units: N, at least 256.
        target_epsilon: What the run may cost.
        delta: 1 / (10 N) if None.
        num_epochs: Passes over the data; by default those of a run.
        num_classes: Those of the data.
        physical_batch_size: Rows in memory at once.
        accountant: What composes the steps.

    Raises:
        ValueError: A value lies outside its range, or the model cannot be loaded or trained.
    """
    if num_units < BATCH_SIZES[0]:
        raise ValueError(f"num_units={num_units} must be >= {BATCH_SIZES[0]}, the smallest batch.")
    if physical_batch_size < 1:
        raise ValueError(f"physical_batch_size={physical_batch_size} must be >= 1.")
    plans = {
        size: Budget(
            logical_batch_size=size,
            target_epsilon=target_epsilon,
            num_train_epochs=num_epochs,
            target_delta=delta,
            accountant=accountant,
        ).plan(num_units)
        for size in BATCH_SIZES
        if size <= num_units
    }
    loaded = load_model(model, label_names=tuple(str(label) for label in range(num_classes)))
    shapes = matrix_shapes(loaded.model)
    gigabytes, seconds, free = _tried(loaded, num_classes, physical_batch_size)
    fitting = [name for name in ENGINES_COMPARED if gigabytes[name] <= free]
    engine = (fitting or ENGINES_COMPARED[-1:])[0]
    averaging = math.sqrt(variance_factor([lookahead(MOMENTUM)]))  # its gain is 1

    def choice(size: int, plan: PrivacyPlan) -> Choice:
        noise = plan.noise_std(1.0)
        limits = [noise * averaging * detection_threshold(*shape) for shape in shapes]
        return Choice(
            logical_batch_size=size,
            steps=plan.steps,
            epochs=plan.epochs,
            sigma=plan.noise_multiplier,
            noise_per_unit=noise,
            thresholds={f"{m} x {n}": x for (m, n), x in zip(shapes, limits, strict=True)},
            threshold=median(limits),
            hours=seconds[engine] * plan.epochs * num_units / 3600,
        )

    choices = [choice(size, plan) for size, plan in plans.items()]
    wanted = default_batch_size(num_units, target_epsilon, num_epochs)
    best = min(choices, key=lambda c: abs(math.log(c.logical_batch_size / wanted)))
    strongest = 1 / math.sqrt(len(shapes))
    method = "muon" if best.threshold < strongest else "sgd"
    means = "can" if method == "muon" else "cannot"
    return Advice(
        num_units=num_units,
        epsilon=target_epsilon,
        delta=next(iter(plans.values())).delta,
        strongest=strongest,
        gigabytes=gigabytes,
        choices=choices,
        method=method,
        logical_batch_size=best.logical_batch_size,
        epochs=best.epochs,
        engine=engine,
        reason=(
            f"{method}, since at {best.logical_batch_size} units a step a gradient on which all "
            f"agree ({strongest:.2g} C in a matrix) {means} be detected in the noise (from "
            f"{best.threshold:.2g} C on); {best.logical_batch_size}, since larger batches lower "
            f"the noise little at this epsilon; {engine}, since a physical batch takes "
            f"{gigabytes[engine]:.2g} GB of {free:.2g} GB that are free."
        ),
    )


def _tried(
    loaded: LoadedModel, num_classes: int, physical_batch_size: int
) -> tuple[dict[str, float], dict[str, float], float]:
    """Gigabytes of a physical batch and seconds of a row by engine, and free gigabytes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    image = loaded.image_format
    trial = Trial(
        row={
            "pixel_values": torch.zeros(image.num_channels, image.height, image.width),
            "labels": torch.tensor(0),
        },
        batch=lambda rows: {key: torch.stack([r[key] for r in rows]).to(device) for key in rows[0]},
        loss=_mean_loss,
        autocast=nullcontext,
        loss_scale=1.0,
        num_classes=num_classes,
        physical_batch_size=physical_batch_size,
        rows_of_unit=(1, 1),
    )
    model = loaded.model.to(device).train()
    gigabytes, seconds = {}, {}
    for name in ENGINES_COMPARED:
        engine = ENGINES[name](model)
        try:
            gigabytes[name] = trial.bytes_of_a_step(engine) / 1e9
            seconds[name] = trial.seconds_of_a_row(engine)
        finally:
            engine.to_standard_module()
    return gigabytes, seconds, free_bytes(device) / 1e9


def _mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    outputs = model(batch["pixel_values"])
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    return nn.functional.cross_entropy(logits, batch["labels"])

"""One unit more moves the sum of a step by at most C, whatever it holds and however it is taken.

The real step (`PrivateStep.take`) runs twice under identical randomness and without noise, on a
draw and on the same draw with one unit more.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hf_dpmuon.filters import GradientFilter, KalmanFilter, LowPassFilter
from hf_dpmuon.grad_sample import ENGINES
from hf_dpmuon.mechanism import GaussianMechanism
from hf_dpmuon.sampling import PhysicalBatch
from hf_dpmuon.training.losses import RowMeanLoss
from hf_dpmuon.training.release import ReleaseGate
from hf_dpmuon.training.step import PrivateStep

CLASSES = 3
FILTERS = {
    "none": lambda _: GradientFilter(),
    "doppler": lambda _: LowPassFilter(),
    "disk": lambda parameters: KalmanFilter(parameters, kappa=0.7),
    "disk, two evaluations": lambda parameters: KalmanFilter(parameters, kappa=0.7, gamma=1.0),
}


class Network(nn.Module):
    """A convolution, a norm, a bare parameter and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 4, 4)
        self.place = nn.Parameter(torch.zeros(1, 4, 6))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.place
        return self.head(self.norm(tokens).mean(1))


@dataclass(frozen=True)
class Unit:
    """Its images, several where it is a patient's or one is augmented."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Way:
    """How a step is taken."""

    engine: str
    clipping: str
    filter: str
    bf16: bool
    loss_scale: float
    several_labels: bool
    bound: float
    units_per_batch: int


def unit(generator: torch.Generator, rows: int, power: float, *, several: bool) -> Unit:
    images = torch.randn(rows, 3, 8, 8, generator=generator).double() * 10.0**power
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    if several:
        labels = torch.randint(2, (rows, CLASSES), generator=generator).float()
        labels[torch.rand(labels.shape, generator=generator) < 0.2] = torch.nan
    return Unit(images.float(), labels)


def draw_of(units: Sequence[Unit], way: Way) -> list[PhysicalBatch]:
    size = way.units_per_batch
    batches = []
    for part in (units[i : i + size] for i in range(0, len(units), size)):
        counts = torch.tensor([len(u.labels) for u in part])
        inputs = {
            "pixel_values": torch.cat([u.images for u in part]),
            "labels": torch.cat([u.labels for u in part]),
        }
        owner = torch.arange(len(part)).repeat_interleave(counts)
        batches.append(PhysicalBatch(inputs, owner, len(part)))
    return batches


def summed(way: Way, first: Sequence[Unit], second: Sequence[Unit]) -> Tensor:
    """The un-noised sum of a second step, after a first one that moved the weights."""
    torch.manual_seed(0)
    model = Network().train()
    parameters = dict(model.named_parameters())
    smoothing = FILTERS[way.filter](list(parameters.values()))
    engine = ENGINES[way.engine](model, passes=smoothing.evaluations)
    mechanism = GaussianMechanism(
        engine,
        noise_multiplier=0.0,
        max_grad_norm=way.bound,
        sample_rate=1.0,
        num_units=1,  # the release is the sum
        noise_key=b"",
        clipping=way.clipping,
        loss_scale=way.loss_scale,
    )
    seen: list[Tensor] = []

    def record(_: object) -> None:
        seen.append(torch.cat([p.grad.double().flatten() for p in parameters.values()]))

    loss = RowMeanLoss(num_classes=CLASSES, multi_label=way.several_labels)
    step = PrivateStep(
        mechanism,
        SimpleNamespace(plan=None, may_take=lambda _: True, key_of=lambda _: b"key", record=record),
        smoothing,
        ReleaseGate(parameters),
        loss=lambda module, inputs: loss(module(inputs["pixel_values"]).float(), inputs["labels"]),
        prepare=lambda inputs: inputs,
        autocast=(lambda: torch.autocast("cpu", dtype=torch.bfloat16))
        if way.bf16
        else contextlib.nullcontext,
        loss_scale=way.loss_scale,
        rank=0,
        keep_loss=False,
    )
    for number, units in enumerate((first, second), start=1):
        step.take(draw_of(units, way), step=number, stop_votes=0.0)
        with torch.no_grad():
            for p, g in zip(parameters.values(), step.gate.gradients.values(), strict=True):
                p -= 0.1 * g
    engine.close()
    return seen[1]


ways = st.builds(
    Way,
    engine=st.sampled_from(sorted(ENGINES)),
    clipping=st.sampled_from(["flat", "per_layer", "automatic"]),
    filter=st.sampled_from(sorted(FILTERS)),
    bf16=st.booleans(),
    loss_scale=st.sampled_from([1.0, 1024.0, 1e-6]),
    several_labels=st.booleans(),
    bound=st.sampled_from([1e-3, 0.1, 1.0, 50.0]),
    units_per_batch=st.integers(1, 3),
).filter(lambda way: not (way.engine == "ghost" and "two" in way.filter))

PLAIN = Way("bookkeeping", "flat", "none", False, 1.0, False, 0.1, 2)


@given(
    way=ways,
    seed=st.integers(0, 2**31),
    others=st.integers(0, 3),
    place=st.integers(0, 3),
    rows=st.integers(1, 4),
    power=st.floats(-40, 38),
    odd=st.sampled_from([None, None, None, math.nan, math.inf, -math.inf]),
)
@example(way=PLAIN, seed=0, others=0, place=0, rows=1, power=0.0, odd=None)
@example(way=PLAIN, seed=0, others=3, place=1, rows=3, power=19.5, odd=None)
@example(way=PLAIN, seed=0, others=3, place=1, rows=2, power=0.0, odd=math.nan)
@settings(deadline=None, max_examples=40)
def test_one_unit_more_moves_the_sum_of_a_step_by_at_most_c(
    way, seed, others, place, rows, power, odd
):
    generator = torch.Generator().manual_seed(seed)
    several = way.several_labels
    first = [unit(generator, 2, 0.0, several=several) for _ in range(2)]
    without = [unit(generator, 1 + i % 2, 0.0, several=several) for i in range(others)]
    one = unit(generator, rows, power, several=several)
    if odd is not None:
        one.images[0, 0, 0, 0] = odd
    with_it = [*without[:place], one, *without[place:]]
    moved = summed(way, first, with_it) - summed(way, first, without)
    assert bool(moved.isfinite().all())
    # what float32 rounds off the others' share when one is added to them
    rounding = 1e-6 * (1 + others) * way.bound
    assert float(moved.norm()) <= way.bound * (1 + 1e-5) + rounding
    if odd is not None:
        assert float(moved.norm()) <= rounding


def test_the_bound_is_reached():
    """Else a test that everything is below it would show nothing."""
    generator = torch.Generator().manual_seed(0)
    units = [unit(generator, 2, 0.0, several=False) for _ in range(3)]
    for engine in ENGINES:
        way = Way(engine, "flat", "none", False, 1.0, False, 1e-3, 2)
        moved = summed(way, units, units) - summed(way, units, units[1:])
        np.testing.assert_allclose(float(moved.norm()), 1e-3, rtol=1e-4)

"""Patients as privacy units, several labels of one image, and class weights, in whole steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import NUM_CLASSES, tiny_vit
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from hf_dpmuon import DPTrainer, DPTrainingArguments
from hf_dpmuon.units import PrivacyUnits

PATIENTS = ["a", "b", "a", "c", "c", "a", "d", "c", "c", "e", "b", "a"]  # 4, 2, 4, 1, 1 images


class Scans(Dataset[dict[str, Tensor]]):
    """Random images with one label each, or with several of which some are missing."""

    def __init__(self, size: int = len(PATIENTS), *, several: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(size, 3, 8, 8, generator=generator)
        self.labels = torch.randint(NUM_CLASSES, (size,), generator=generator)
        if several:
            self.labels = torch.randint(2, (size, NUM_CLASSES), generator=generator).float()
            self.labels[torch.rand(size, NUM_CLASSES, generator=generator) < 0.4] = torch.nan
            self.labels[0] = torch.nan
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.asked.append(index)
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


class Releases(DPTrainer):
    """Keeps each private gradient."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.release = {n: p.grad.clone() for n, p in self.model.named_parameters()}
        return loss


def trainer_of(
    folder: Path,
    scans: Scans,
    *,
    patients: list[str] | None = PATIENTS,
    model: nn.Module | None = None,
    max_examples_per_unit: int = 8,
    class_weights: list[float] | None = None,
    **settings: Any,
) -> Releases:
    units = None if patients is None else PrivacyUnits.from_ids(patients, name="patient")
    defaults = {
        "noise_multiplier": 0.0,
        "logical_batch_size": len(scans) if units is None else len(units),  # q = 1
        "per_device_train_batch_size": 8,
        "max_steps": 1,
        "noise_seed": 3,
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    return Releases(
        tiny_vit() if model is None else model,
        DPTrainingArguments(str(folder), **{**defaults, **settings}),
        train_dataset=scans,
        units=units,
        max_examples_per_unit=max_examples_per_unit,
        class_weights=class_weights,
    )


def several_label_vit() -> nn.Module:
    model = tiny_vit()
    model.config.problem_type = "multi_label_classification"
    return model


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


def gradient_of(model: nn.Module, loss: Tensor) -> Tensor:
    named = dict(model.named_parameters())
    return flat(dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True)))


def clipped(gradient: Tensor, bound: float) -> Tensor:
    return gradient * min(1.0, bound / float(gradient.norm()))


# ---- patients ----


@pytest.mark.parametrize("mode", ["bookkeeping", "ghost", "hooks"])
def test_the_mean_gradient_of_a_patient_is_clipped_as_one(tmp_path, mode):
    scans, model = Scans(), tiny_vit().train()
    total = torch.zeros(())
    for patient in sorted(set(PATIENTS)):
        rows = [row for row, owner in enumerate(PATIENTS) if owner == patient]
        logits = model(scans.images[rows]).logits
        total = total + clipped(
            gradient_of(model, F.cross_entropy(logits, scans.labels[rows])), 0.5
        )
    trainer = trainer_of(tmp_path, scans, per_sample_max_grad_norm=0.5, grad_sample_mode=mode)
    trainer.train()
    expected = total / len(set(PATIENTS))
    torch.testing.assert_close(flat(trainer.release), expected, rtol=1e-4, atol=1e-6)


def test_a_patient_with_many_images_moves_the_sum_by_no_more_than_the_bound(tmp_path):
    """Removing one patient removes at most C, where image-level clipping would remove 4 C."""
    bound, kept = 0.1, [row for row, owner in enumerate(PATIENTS) if owner != "a"]
    scans, fewer = Scans(), Scans(len(kept))
    fewer.images, fewer.labels = scans.images[kept], scans.labels[kept]
    whole = trainer_of(tmp_path / "whole", scans, per_sample_max_grad_norm=bound)
    less = trainer_of(
        tmp_path / "less",
        fewer,
        patients=[PATIENTS[row] for row in kept],
        per_sample_max_grad_norm=bound,
    )
    whole.train()
    less.train()
    moved = flat(whole.release) * len(whole.units) - flat(less.release) * len(less.units)
    assert 0.5 * bound < float(moved.norm()) <= bound * (1 + 1e-4)


def test_the_accountant_counts_patients_and_the_report_names_them(tmp_path):
    trainer = trainer_of(tmp_path, Scans(), noise_multiplier=1.0, logical_batch_size=2, max_steps=3)
    assert trainer.plan.num_units == len(set(PATIENTS))
    assert trainer.plan.sample_rate == 2 / len(set(PATIENTS))
    trainer.train()
    trainer.save_model()
    report = json.loads((tmp_path / "privacy_report.json").read_text())
    assert report["privacy_unit"] == "patient"
    assert trainer.ledger.runs[-1].num_units == len(set(PATIENTS))


def test_at_most_so_many_images_of_a_patient_are_used_and_others_each_time(tmp_path):
    scans = Scans()
    steps = 8
    trainer = trainer_of(tmp_path, scans, max_examples_per_unit=2, max_steps=steps)
    trainer.train()
    asked = scans.asked[4 + len(PATIENTS) :]  # shape and labels are looked at first
    for patient in set(PATIENTS):
        owned = [row for row, owner in enumerate(PATIENTS) if owner == patient]
        uses = [row for row in asked if row in owned]
        probes = steps if 0 in owned else 0  # the first row is looked at before each draw
        assert len(uses) - probes == steps * min(2, len(owned))
        assert set(uses) == set(owned)


def test_units_that_do_not_fit_the_rows_are_refused(tmp_path):
    with pytest.raises(ValueError, match="units has 11 rows and train_dataset 12"):
        trainer_of(tmp_path, Scans(), patients=PATIENTS[1:])


@pytest.mark.parametrize(
    "settings",
    [
        {"per_device_train_batch_size": 3},
        {"augmentation_multiplicity": 3},
        {"augmentation_multiplicity": 9, "patients": None},
    ],
)
def test_a_unit_that_does_not_fit_into_memory_is_refused_before_it_is_drawn(tmp_path, settings):
    with pytest.raises(ValueError, match="of one privacy unit, which must be in memory together"):
        trainer_of(tmp_path, Scans(), **settings)


def test_a_run_does_not_go_on_with_another_unit_of_privacy(tmp_path):
    """The counts agree (five studies, five patients), so that only the unit itself can tell."""
    trainer_of(tmp_path, Scans(), max_steps=1, save_strategy="steps", save_steps=1).train()
    images = trainer_of(tmp_path, Scans(5), patients=None, max_steps=2)
    with pytest.raises(ValueError, match="protects each patient and this run would protect each"):
        images.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


# ---- several labels ----


@pytest.mark.parametrize("weights", [None, [1.0, 3.0, 0.5]])
def test_missing_labels_are_left_out_entry_by_entry(tmp_path, weights):
    scans, model = Scans(several=True), several_label_vit().train()
    total = torch.zeros(())
    for image, labels in zip(scans.images, scans.labels, strict=True):
        known = [k for k in range(NUM_CLASSES) if not labels[k].isnan()]
        if not known:
            continue
        probabilities = model(image[None]).logits[0].sigmoid()
        losses = [
            -torch.log(probabilities[k]) * (1.0 if weights is None else weights[k])
            if labels[k] == 1
            else -torch.log(1 - probabilities[k])
            for k in known
        ]
        total = total + clipped(gradient_of(model, torch.stack(losses).mean()), 0.5)
    trainer = trainer_of(
        tmp_path,
        scans,
        patients=None,
        model=several_label_vit(),
        class_weights=weights,
        per_sample_max_grad_norm=0.5,
    )
    trainer.train()
    expected = total / len(scans)
    torch.testing.assert_close(flat(trainer.release), expected, rtol=1e-4, atol=1e-6)


def test_an_image_without_any_label_leaves_no_trace(tmp_path):
    releases = []
    for value in (0.0, 5.0):
        scans = Scans(several=True)
        scans.images[0] = value  # all of its labels are missing
        trainer = trainer_of(tmp_path / str(value), scans, patients=None, model=several_label_vit())
        trainer.train()
        releases.append(flat(trainer.release))
    assert torch.equal(*releases)
    assert releases[0].isfinite().all()


def test_label_smoothing_of_several_labels_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0\.1 is for one label"):
        trainer_of(
            tmp_path,
            Scans(several=True),
            patients=None,
            model=several_label_vit(),
            label_smoothing_factor=0.1,
        )


# ---- class weights ----


def test_class_weights_multiply_each_image_s_loss_and_couple_none(tmp_path):
    scans, weights, model = Scans(), [0.2, 1.0, 4.0], tiny_vit().train()
    total = torch.zeros(())
    for image, label in zip(scans.images, scans.labels, strict=True):
        loss = weights[int(label)] * F.cross_entropy(model(image[None]).logits, label[None])
        total = total + clipped(gradient_of(model, loss), 0.5)
    trainer = trainer_of(
        tmp_path, scans, patients=None, class_weights=weights, per_sample_max_grad_norm=0.5
    )
    trainer.train()
    expected = total / len(scans)
    torch.testing.assert_close(flat(trainer.release), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.0, 0.0, 1.0], [1.0, float("nan"), 1.0]])
def test_class_weights_must_fit_the_classes(tmp_path, weights):
    with pytest.raises(ValueError, match=r"class_weights=.* must be 3 finite numbers > 0"):
        trainer_of(tmp_path, Scans(), class_weights=weights)

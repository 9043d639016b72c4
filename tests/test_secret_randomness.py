"""Dropout and augmentation of private rows come from the system's entropy, row by row.

Under a public seed, the masks of all rows behind an added one would move, and with them the sum by
many times the clipping bound.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_vit
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from hf_dpmuon import DPTrainer, DPTrainingArguments
from hf_dpmuon.batches import RowWise, SeededRows
from hf_dpmuon.data import ImageExamples, build_transforms, collate, load_image_dataset
from hf_dpmuon.models import load_model
from hf_dpmuon.randomness import seeded_globals


class Augmented(Dataset[dict[str, Tensor]]):
    """Images that draw from every global generator."""

    def __init__(self, *, augment: bool = True) -> None:
        self.images = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        self.augment = augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image = self.images[index]
        if self.augment:
            shift = torch.rand(()) + random.random() + float(np.random.rand())
            image = image + shift
        return {"pixel_values": image, "labels": torch.tensor(index % 3)}


class Releases(DPTrainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.release = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        return loss


def release_of(
    folder: Path, *, dropout: float = 0.0, augment: bool = False, **settings: Any
) -> Tensor:
    """The sum of all rows without noise: only dropout and augmentation can differ."""
    args = DPTrainingArguments(
        str(folder),
        **{
            "noise_multiplier": 0.0,
            "logical_batch_size": 24,
            "per_device_train_batch_size": 5,
            "max_steps": 2,
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "no",
            **settings,
        },
    )
    trainer = Releases(tiny_vit(dropout=dropout), args, train_dataset=Augmented(augment=augment))
    trainer.train()
    return trainer.release


@pytest.mark.parametrize(
    "random_part", [{"dropout": 0.3}, {"augment": True}], ids=["dropout", "augmentation"]
)
def test_a_public_seed_decides_neither_dropout_nor_augmentation(tmp_path, random_part):
    one, two = (release_of(tmp_path / str(i), seed=1, **random_part) for i in range(2))
    assert float((one - two).norm()) > 1e-3 * float(one.norm())
    without = [release_of(tmp_path / f"plain{seed}", seed=seed) for seed in (1, 2)]
    torch.testing.assert_close(*without, rtol=1e-4, atol=1e-6)  # nothing else was random


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fixed_noise_seed_fixes_them_for_any_number_of_workers(tmp_path, workers):
    several = {"augment": True, "dropout": 0.3, "noise_seed": 4}
    alone = release_of(tmp_path / "alone", seed=1, **several)
    again = release_of(tmp_path / "again", seed=2, dataloader_num_workers=workers, **several)
    torch.testing.assert_close(alone, again, rtol=0, atol=0)


def test_a_row_s_augmentation_does_not_depend_on_the_rows_before_it():
    rows = SeededRows(Augmented())
    collate = RowWise()
    whole = collate([rows[(i, 100 + i)] for i in range(4)])["pixel_values"]
    for i in (3, 0, 2):
        assert torch.equal(collate([rows[(i, 100 + i)]])["pixel_values"][0], whole[i])
    assert not torch.equal(rows[(1, 7)].row["pixel_values"], rows[(1, 8)].row["pixel_values"])


def test_a_collator_that_draws_is_seeded_row_by_row():
    rows = SeededRows(Augmented(augment=False))
    collate = RowWise(
        lambda batch: {
            "pixel_values": batch[0]["pixel_values"][None] + torch.rand(()),
            "labels": batch[0]["labels"][None],
        }
    )
    whole = collate([rows[(i, 100 + i)] for i in range(4)])["pixel_values"]
    assert torch.equal(collate([rows[(2, 102)]])["pixel_values"][0], whole[2])


class LazyRow(dict[str, Any]):
    """A row that draws when it is read."""

    def __getitem__(self, name: str) -> Tensor:
        return torch.rand(3, 4, 4) if name == "pixel_values" else torch.tensor(1)

    def items(self) -> Any:
        return [(name, self[name]) for name in self]


@pytest.mark.parametrize("collator", [None, collate], ids=["default", "ours"])
def test_our_collators_draw_nothing_that_the_rows_seed_does_not_decide(collator):
    plain = {"pixel_values": torch.ones(3, 4, 4), "labels": torch.tensor(1)}
    before = torch.get_rng_state()
    RowWise(collator)([SeededRows([plain])[0, 7]])
    assert torch.equal(torch.get_rng_state(), before)
    seeded = SeededRows([LazyRow(plain)])
    first = RowWise(collator)([seeded[0, 7]])["pixel_values"]
    torch.rand(1)  # what others draw in between
    assert torch.equal(RowWise(collator)([seeded[0, 7]])["pixel_values"], first)


def test_the_global_generators_are_put_back():
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    expected = (torch.rand(2).tolist(), np.random.rand(), random.random())
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    with seeded_globals(2**62 + 5):
        inside = (torch.rand(2).tolist(), np.random.rand(), random.random())
    assert (torch.rand(2).tolist(), np.random.rand(), random.random()) == expected
    assert inside != expected


def test_a_collator_that_makes_several_rows_of_one_is_refused(tmp_path):
    """Each would be clipped alone: one image would move the sum by several times the bound."""

    def views(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        images = torch.stack([row["pixel_values"] for row in rows])
        labels = torch.stack([row["labels"] for row in rows])
        return {
            "pixel_values": torch.cat([images, images.flip(-1)]),
            "labels": torch.cat([labels, labels]),
        }

    args = DPTrainingArguments(
        str(tmp_path), noise_multiplier=1.0, logical_batch_size=4, max_steps=1, use_cpu=True
    )
    with pytest.raises(ValueError, match="data_collator makes 2 rows of one"):
        DPTrainer(tiny_vit(), args, train_dataset=Augmented(augment=False), data_collator=views)
    assert not (tmp_path / "privacy_ledger.jsonl").exists()


@pytest.mark.parametrize("wrapped", ["plain", "subset", "concatenation"])
def test_our_examples_are_augmented_by_their_seed_however_they_are_wrapped(wrapped):
    splits = load_image_dataset("builtin:digits")
    image_format = load_model("builtin:tiny-vit", label_names=splits.label_names).image_format
    examples = ImageExamples(
        splits.train.select(range(4)),
        image_column=splits.image_column,
        label_column=splits.label_column,
        transform=build_transforms(image_format, train=True),
    )
    dataset: Dataset[Any] = {
        "plain": examples,
        "subset": Subset(Subset(examples, [0, 3, 2]), [1, 1]),
        "concatenation": ConcatDataset([Subset(examples, [0, 1]), examples]),
    }[wrapped]
    row = {"plain": 3, "subset": 1, "concatenation": 5}[wrapped]
    rows = SeededRows(dataset)
    for seed in range(5):
        drawn = rows[row, seed].row["pixel_values"]
        assert torch.equal(drawn, examples[3, seed]["pixel_values"])
    assert len({rows[row, seed].row["pixel_values"].numpy().tobytes() for seed in range(20)}) > 3


def test_what_is_no_tensor_of_rows_stays_behind():
    collate = RowWise(
        lambda batch: {
            "pixel_values": torch.stack([row["pixel_values"] for row in batch]),
            "names": ["a"] * len(batch),
            "scale": torch.tensor(2.0),
        }
    )
    batch = collate([{"pixel_values": torch.zeros(3)} for _ in range(2)])
    assert set(batch) == {"pixel_values"}

"""Whatever data set and collator come in: a row is one row, seeded alone, with its label."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from image_tables import class_folders
from PIL import Image
from support import Images, arguments, largest_difference, tiny_vit, trainer_of, weights
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset
from torchvision.datasets import ImageFolder
from transformers import ViTImageProcessor

from hf_dpmuon.batches import Head, RowError
from hf_dpmuon.data import ImageExamples, load_image_dataset, row_keys
from hf_dpmuon.trainer import DPTrainer
from hf_dpmuon.training.checks import check_datasets, check_repeats

ROWS = 12


def table(size: int = ROWS, **columns: Any) -> datasets.Dataset:
    pixels = np.random.default_rng(0).normal(size=(size, 3, 8, 8)).astype(np.float32)
    rows = {"pixel_values": pixels.tolist(), "labels": [i % 3 for i in range(size)], **columns}
    return datasets.Dataset.from_dict(rows).with_format("torch")


def trained(folder: Path, data: Any, *, kind: type = DPTrainer, **settings: Any) -> DPTrainer:
    collator = settings.pop("data_collator", None)
    evaluation = settings.pop("eval_dataset", None)
    trainer = kind(
        settings.pop("model", None) or tiny_vit(),
        arguments(folder, **{"logical_batch_size": 4, "max_steps": 1, **settings}),
        train_dataset=data,
        eval_dataset=evaluation,
        data_collator=collator,
    )
    trainer.train()
    return trainer


# ---- 202: the seeds of a row ----


class Erased(ImageExamples):
    """Our examples with an augmentation of somebody's own, drawn from the global generators."""

    def __getitem__(self, row: Any) -> dict[str, Tensor]:
        example = super().__getitem__(row)
        noise = torch.rand(()) + random.random() + float(np.random.rand())
        return {**example, "pixel_values": example["pixel_values"] * noise}


def examples(kind: str, *, without_last: bool) -> Dataset[Any]:
    """Twelve images, the last of which may be one that contributes nothing (it is not finite)."""
    splits = load_image_dataset("builtin:digits")
    rows = splits.train.filter(lambda label: label < 3, input_columns=splits.label_column)
    rows = rows.select(range(ROWS))
    last = np.array(rows[ROWS - 1][splits.image_column])

    def plain(image: Any, generator: Any) -> Tensor:
        pixels = np.array(image.convert("L").resize((8, 8)), dtype=np.float32) / 16
        gone = without_last and np.array_equal(np.array(image), last)
        return torch.from_numpy(pixels * (np.nan if gone else 1.0)).expand(3, -1, -1)

    def drawing(image: Any, generator: Any) -> Tensor:
        return plain(image, generator) + torch.rand(3, 8, 8) + random.random() + np.random.rand()

    of = {"image_column": splits.image_column, "label_column": splits.label_column}
    if kind == "transform":
        return ImageExamples(rows, transform=drawing, **of)
    if kind == "subclass":
        return Erased(rows, transform=plain, **of)
    if kind == "subset":
        return Subset(Erased(rows, transform=plain, **of), range(ROWS))
    return rows.with_transform(
        lambda batch: {
            "pixel_values": [
                drawing(opened(stored["bytes"]), None) for stored in batch[splits.image_column]
            ],
            "labels": batch[splits.label_column],
        }
    )


def opened(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content))


class Sums(DPTrainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.sum = torch.cat([p.grad.flatten() for p in self.model.parameters()]) * ROWS
        return loss


@pytest.mark.parametrize("kind", ["transform", "subclass", "subset", "with_transform"])
def test_k202_one_row_more_moves_the_sum_by_at_most_c(tmp_path, kind):
    """Case 202: under public seeds, one row less moved it by 8.75 C."""
    C, sums = 0.1, []
    for without_last in (False, True):
        trainer = Sums(
            tiny_vit(),
            arguments(
                tmp_path / str(without_last),
                noise_multiplier=0.0,
                per_sample_max_grad_norm=C,
                logical_batch_size=ROWS,  # all rows are drawn
                max_steps=1,
            ),
            train_dataset=examples(kind, without_last=without_last),
        )
        trainer.train()
        sums.append(trainer.sum)
    assert 0.9 * C <= float((sums[0] - sums[1]).norm()) <= C * (1 + 1e-4)


def test_an_augmentation_with_a_generator_of_its_own_is_refused(tmp_path):
    class Own(Images):
        generator = np.random.default_rng(0)

        def __getitem__(self, row: int) -> dict[str, Any]:
            example = super().__getitem__(row)
            return {**example, "pixel_values": example["pixel_values"] + self.generator.normal()}

    with pytest.raises(ValueError, match="other pixel_values for the same row under the same seed"):
        trainer_of(tmp_path, train_dataset=Own())


# ---- 210 and 211: identity of rows ----


def overlapping(rows: datasets.Dataset) -> dict[str, tuple[Any, Any]]:
    images, labels = torch.randn(ROWS, 3, 8, 8), torch.arange(ROWS) % 3
    other = table(6)
    return {
        "select": (rows, rows.select(range(5))),
        "shuffle": (rows, rows.shuffle(seed=1)),
        "format": (rows, rows.with_format("numpy")),
        "concatenated": (rows, ConcatDataset([other, rows.select([11])])),
        "subset": (Subset(rows, range(6)), Subset(rows, [5])),
        "one of several": (rows, {"a": other, "b": rows.select(range(2))}),
        "tensors": (TensorDataset(images, labels), TensorDataset(images[3:5], labels[3:5])),
        "columns": (rows, rows.select_columns(["labels", "pixel_values"]).select([2])),
        "another label": (rows, rows.remove_columns("labels").add_column("labels", [0] * ROWS)),
        "slice of a list": ((listed := [rows[i] for i in range(ROWS)]), listed[:3]),
    }


@pytest.mark.parametrize("kind", overlapping(table()))
def test_k210_training_rows_in_an_evaluation_set_are_refused(tmp_path, kind):
    train, evaluation = overlapping(table())[kind]
    with pytest.raises(ValueError, match="eval_dataset holds rows of train_dataset"):
        trained(tmp_path, train, eval_dataset=evaluation)


class Wraps(Dataset[Any]):
    """Rows of another data set, under whatever name and in whatever order."""

    def __init__(self, rows: list[int] | None = None, size: int | None = None, **held: Any) -> None:
        vars(self).update(held)
        self.first = next(iter(held.values()))
        self.first = self.first[0] if isinstance(self.first, list) else self.first
        self.rows = list(range(len(self.first))) if rows is None else rows
        self.size = size or len(self.rows)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> Any:
        return self.first[self.rows[row % len(self.rows)]]


WRAPPED: dict[str, Any] = {
    "all rows": lambda d: Wraps(dataset=d),
    "some rows": lambda d: Wraps([1, 2, 3], dataset=d),
    "under another name": lambda d: Wraps([1, 2], inner=d),
    "twice wrapped": lambda d: Wraps([2], outer=Wraps([1, 2], base=d)),
    "in a list": lambda d: Wraps(parts=[d, table(6)]),
    "in a subset": lambda d: Subset(Wraps(data=d), [1]),
    "StackDataset": lambda d: StackDataset(image=d, other=d),
    "two parts": lambda d: Wraps(size=ROWS + 6, parts=[d, table(6)]),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_k210_training_rows_within_any_wrapper_are_refused(tmp_path, kind):
    rows = table()
    for train, evaluation in ((rows, WRAPPED[kind](rows)), (WRAPPED[kind](rows), rows.select([1]))):
        with pytest.raises(ValueError, match="eval_dataset holds rows of train_dataset, or may do"):
            check_datasets(train, evaluation)


def test_wrappers_of_two_subsets_are_not_the_same():
    rows = table(24)
    for wrap in (lambda d: Wraps(dataset=d), lambda d: Wraps(parts=[d, table(3)], size=15)):
        halves = wrap(Subset(rows, range(12))), wrap(Subset(rows, range(12, 24)))
        check_datasets(*halves)
        check_repeats(halves[0], None)
    check_repeats(Wraps([3, 5], dataset=rows), None)
    check_datasets(Wraps(rows=[0], dataset=rows), Wraps(rows=[0], dataset=table()))


@pytest.mark.parametrize("times", [2, 3])
def test_k211_a_wrapper_that_repeats_rows_is_refused(times):
    rows = table()
    for repeated in (
        Wraps(size=times * ROWS, dataset=rows),
        Wraps(inner=ConcatDataset([rows] * times)),
        Wraps(size=times * 2 * ROWS, parts=[rows, table()]),
    ):
        with pytest.raises(
            ValueError, match=r"train_dataset has \d+ rows but only \d+ of them are"
        ):
            check_repeats(repeated, None)


def test_k210_a_data_set_that_holds_itself_has_an_end():
    rows = table()
    one, other = Wraps([1], dataset=rows), Wraps([2], dataset=rows)
    one.sibling, other.sibling, one.me = other, one, one
    with pytest.raises(ValueError, match="holds rows of train_dataset"):
        check_datasets(one, other)


def test_k210_a_folder_that_is_read_twice_is_the_same(tmp_path):
    class_folders(tmp_path / "x", {"a": 2, "b": 2})
    for read in (
        ImageFolder,
        lambda folder: load_image_dataset(folder).train,
        lambda folder: datasets.load_dataset("imagefolder", data_dir=folder, split="train"),
    ):
        one, other = (read(str(tmp_path / "x")) for _ in range(2))
        with pytest.raises(ValueError, match="holds rows of train_dataset"):
            check_datasets(one, Subset(other, [1]))
        check_datasets(Subset(one, [0, 2]), Subset(other, [1, 3]))


def test_k210_our_examples_of_selected_rows_are_refused(tmp_path):
    splits = load_image_dataset("builtin:digits")
    of = {"image_column": splits.image_column, "label_column": splits.label_column}
    one, other = (
        ImageExamples(rows, transform=lambda image, generator: torch.zeros(3, 8, 8), **of)
        for rows in (splits.train, splits.train.select(range(50, 60)))
    )
    assert set(row_keys(other)) < set(row_keys(one))


def test_k216_images_that_nobody_has_read_are_read_before_the_first_draw(tmp_path):
    splits = load_image_dataset("builtin:digits")
    rows = splits.train.select(range(ROWS))
    of = {"image_column": splits.image_column, "label_column": splits.label_column}

    def broken(image: Any, generator: Any) -> Tensor:
        if np.array_equal(np.array(image), np.array(rows[7][splits.image_column])):
            raise OSError("secret/path/mrs-miller.png")
        return torch.zeros(3, 8, 8)

    model = tiny_vit()
    model.classifier = torch.nn.Linear(16, 10)
    model.config.id2label = dict(enumerate("0123456789"))
    with pytest.raises(ValueError, match="1 of 12 rows of train_dataset cannot be used") as caught:
        trained(tmp_path, ImageExamples(rows, transform=broken, **of), model=model)
    assert "miller" not in str(caught.value)


def test_k210_a_table_that_is_opened_twice_is_the_same(tmp_path):
    table(24).save_to_disk(tmp_path / "set")
    one, other = (datasets.load_from_disk(tmp_path / "set") for _ in range(2))
    with pytest.raises(ValueError, match="eval_dataset holds rows of train_dataset"):
        trained(tmp_path / "a", one, eval_dataset=other.select(range(4)))
    parts = one.train_test_split(test_size=0.5, seed=0)
    again = datasets.load_from_disk(tmp_path / "set").train_test_split(test_size=0.5, seed=0)
    trained(tmp_path / "b", parts["train"], eval_dataset=again["test"])


def test_rows_of_two_halves_are_not_the_same(tmp_path):
    rows = table(24)
    parts = rows.train_test_split(test_size=0.5, seed=0)
    trained(tmp_path / "a", parts["train"], eval_dataset=parts["test"])
    trained(tmp_path / "b", Subset(rows, range(12)), eval_dataset=Subset(rows, range(12, 24)))
    trained(tmp_path / "c", Images(), eval_dataset=Images(seed=3))


@pytest.mark.parametrize(
    "repeated",
    [
        lambda d: Subset(d, [0] * 12 + list(range(ROWS))),
        lambda d: ConcatDataset([d, d]),
        lambda d: d.select([*range(ROWS), 3]),
        lambda d: ConcatDataset([d, Subset(d, [1])]),
        lambda d: datasets.concatenate_datasets([d, d.select([4])]),
        lambda d: (listed := [d[i] for i in range(ROWS)]) + listed[:2],
    ],
    ids=["subset", "twice", "select", "and a subset", "concatenate_datasets", "list"],
)
def test_k211_a_row_that_is_there_several_times_is_refused(tmp_path, repeated):
    with pytest.raises(ValueError, match=r"train_dataset has \d+ rows but only 12 of them are"):
        trained(tmp_path, repeated(table()))


# ---- 216 and 221: labels ----


class Labelled(Images):
    def __init__(self, label: Any, *, at: int = 5) -> None:
        super().__init__(ROWS)
        self.label, self.at = label, at

    def __getitem__(self, row: int) -> dict[str, Any]:
        example = super().__getitem__(row)
        if row == self.at:
            if isinstance(self.label, Exception):
                raise self.label
            example["labels"] = self.label
        return example


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        (torch.tensor(255), "1 have a label outside 0 to 2"),
        (-1, "1 have a label outside 0 to 2"),
        (torch.tensor(1.0), "1 have a label that is not a single whole number"),
        (torch.tensor([0, 1]), "1 have a label that is not a single whole number"),
        (None, "1 have no label"),
        (OSError("scan-of-mrs-miller.png"), "1 have an image or label that raises OSError"),
    ],
    ids=str,
)
def test_k216_bad_rows_are_counted_before_the_first_draw(tmp_path, label, reason):
    with pytest.raises(ValueError, match=f"1 of 12 rows of train_dataset.*{reason}") as caught:
        trained(tmp_path, Labelled(label))
    assert "miller" not in str(caught.value)
    assert not (tmp_path / "privacy_ledger.jsonl").exists()


class Failing(Images):
    """A row that cannot be read, or is another, from some moment on."""

    def __init__(self, how: str) -> None:
        super().__init__(ROWS)
        self.how, self.reads = how, 0

    def __getitem__(self, row: int) -> dict[str, Any]:
        example = super().__getitem__(row)
        self.reads += row == 5
        if row != 5 or self.reads <= 1:  # the check before the run finds nothing
            return example
        if self.how == "raises":
            raise OSError("secret/path/mrs-miller.png")
        if self.how == "label":
            return {**example, "labels": torch.tensor(9)}
        if self.how == "shape":
            return {**example, "pixel_values": torch.zeros(3, 4, 4)}
        return {**example, "pixel_values": example["pixel_values"] * torch.nan}


@pytest.mark.parametrize("how", ["raises", "label", "shape", "not finite"])
@pytest.mark.parametrize("workers", [0, 1])
def test_k216_a_row_that_fails_at_a_draw_weighs_nothing_and_tells_nothing(tmp_path, how, workers):
    settings = {"noise_multiplier": 0.0, "logical_batch_size": ROWS, "kind": Sums}
    failing = trained(tmp_path / "a", Failing(how), dataloader_num_workers=workers, **settings)
    without = Images(ROWS)
    without.pixels[5] = torch.nan
    expected = trained(tmp_path / "b", without, **settings)
    assert len(failing.ledger) == 1
    torch.testing.assert_close(failing.sum, expected.sum)


def test_a_data_set_that_is_gone_stops_the_run_whatever_is_drawn(tmp_path):
    class Gone(Images):
        gone = False

        def __getitem__(self, row: int) -> dict[str, Any]:
            if self.gone:
                raise OSError("secret/path/mrs-miller.png")
            return super().__getitem__(row)

    class Loses(DPTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            self.train_dataset.gone = True
            return loss

    with pytest.raises(ValueError, match=r"cannot be read any more \(OSError\)") as caught:
        trained(tmp_path, Gone(ROWS), kind=Loses, max_steps=3)
    assert "miller" not in str(caught.value)


@pytest.mark.parametrize(
    "label",
    [
        np.int32(2),
        np.int64(2),
        2,
        torch.tensor([2], dtype=torch.int32),
        torch.tensor(2).to(torch.uint8),
    ],
    ids=lambda label: str(type(label)),
)
def test_k221_one_class_number_in_any_form_is_that_class(tmp_path, label):
    assert Head(3, False).checked(torch.as_tensor(label)[None]).tolist() == [2]
    assert Head(3, False).checked(torch.as_tensor(label)[None]).dtype == torch.int64


def test_k221_several_labels_make_a_model_of_several_labels_as_in_transformers(tmp_path):
    class MultiHot(Images):
        def __getitem__(self, row: int) -> dict[str, Any]:
            return {**super().__getitem__(row), "labels": torch.tensor([1.0, 0.0, float(row % 2)])}

    trainer = trained(tmp_path / "a", MultiHot(ROWS), report_nonprivate_loss=True)
    assert trainer.model.config.problem_type == "multi_label_classification"
    batch = trainer.data_collator([MultiHot(ROWS)[1]])
    logits = trainer.model(batch["pixel_values"]).logits
    expected = F.binary_cross_entropy_with_logits(logits, batch["labels"])
    assert float(trainer.compute_loss(trainer.model, batch)) == pytest.approx(float(expected))
    single = tiny_vit()
    single.config.problem_type = "single_label_classification"
    with pytest.raises(ValueError, match="not a single whole number"):
        trained(tmp_path / "b", MultiHot(ROWS), model=single)


@pytest.mark.parametrize("value", [0.5, 2.0, -1.0, float("inf")])
def test_a_label_of_several_is_zero_one_or_unknown(value):
    head = Head(3, True)
    assert head.checked(torch.tensor([[0.0, 1.0, float("nan")]])).shape == (1, 3)
    with pytest.raises(RowError, match="neither 0, 1 nor NaN"):
        head.checked(torch.tensor([[0.0, 1.0, value]]))


# ---- 252: rows of other people's making ----


def pair(row: int) -> tuple[Tensor, int]:
    return Images(ROWS)[row]["pixel_values"], int(Images(ROWS)[row]["labels"])


class Of(Dataset[Any]):
    def __init__(self, make: Any) -> None:
        self.make = make

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        return self.make(*pair(row))


def recipe(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The collator of the image-classification example of transformers."""
    pixel_values = torch.stack([row["pixel_values"] for row in rows])
    return {"pixel_values": pixel_values, "labels": torch.tensor([row["label"] for row in rows])}


FORMS: dict[str, tuple[Any, Any]] = {
    "label": (Of(lambda image, label: {"pixel_values": image, "label": label}), None),
    "tuples": (Of(lambda image, label: (image, label)), None),
    "lists of arrays": (Of(lambda image, label: [image.numpy(), np.int32(label)]), None),
    "recipe": (Of(lambda image, label: {"pixel_values": image, "label": label, "id": "x"}), recipe),
    "collator says label": (
        Of(lambda image, label: (image, label)),
        lambda rows: {
            "pixel_values": torch.stack([image for image, _ in rows]),
            "label": torch.tensor([label for _, label in rows]),
        },
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_k252_rows_in_other_forms_train_and_evaluate_alike(tmp_path, form):
    plain = trained(tmp_path / "plain", Images(ROWS), eval_dataset=Images(ROWS, seed=1))
    data, collator = FORMS[form]
    trainer = trained(tmp_path / "a", data, data_collator=collator)
    assert largest_difference(weights(plain.model), weights(trainer.model)) == 0
    assert trainer.evaluate(data)["eval_accuracy"] == plain.evaluate(Images(ROWS))["eval_accuracy"]


def test_k252_unlabelled_rows_are_predicted(tmp_path):
    trainer = trained(tmp_path, Images(ROWS))
    bare = [{"pixel_values": Images(ROWS)[row]["pixel_values"]} for row in range(4)]
    predictions = trainer.predict(bare).predictions
    with torch.no_grad():
        logits = trainer.model(torch.stack([row["pixel_values"] for row in bare])).logits
    assert torch.allclose(torch.from_numpy(predictions), logits)


def test_k252_an_evaluation_set_that_cannot_be_used_is_refused_before_a_draw(tmp_path):
    with pytest.raises(ValueError, match="no pixel_values"):
        trained(tmp_path / "a", Images(ROWS), eval_dataset=[{"image": 1, "labels": 0}])
    late = [{"pixel_values": torch.zeros(3, 8, 8), "labels": label} for label in (0, 1, 2, 3)]
    with pytest.raises(ValueError, match="1 of 4 rows of eval_dataset have a label outside"):
        trained(tmp_path / "d", Images(ROWS), eval_dataset=late)
    with pytest.raises(ValueError, match=r"rows of eval_dataset have the shape \(3, 4, 4\)"):
        trained(
            tmp_path / "b",
            Images(ROWS),
            eval_dataset=[{"pixel_values": torch.zeros(3, 4, 4), "labels": 0}],
        )
    with pytest.raises(ValueError, match="label outside 0 to 2"):
        trained(
            tmp_path / "c",
            Images(ROWS),
            eval_dataset={"x": [{"pixel_values": torch.zeros(3, 8, 8), "labels": 7}]},
        )
    assert not list(tmp_path.rglob("privacy_ledger.jsonl"))


class Raw(Dataset[Any]):
    """Pillow images of one mode, as a user of ``Trainer`` has them, or what a processor makes."""

    def __init__(self, mode: str, processor: Any = None) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, (ROWS, 10, 12, 4), dtype=np.uint8)
        self.images = [Image.fromarray(one, "RGBA").convert(mode) for one in pixels]
        self.processor = processor

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Any]:
        image = self.images[row]
        if self.processor is None:
            return {"image": image, "label": row % 3, "patient": "x"}
        made = self.processor(images=image.convert("RGB"), return_tensors="pt")
        return {"pixel_values": made["pixel_values"][0], "labels": row % 3}


def processor_of(**settings: Any) -> ViTImageProcessor:
    return ViTImageProcessor(**{"size": {"height": 8, "width": 8}, **settings})


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "1"])
def test_k252_raw_images_train_with_the_processor_that_is_given(tmp_path, mode):
    runs = [
        DPTrainer(
            tiny_vit(),
            arguments(tmp_path / str(i), logical_batch_size=4, max_steps=1),
            train_dataset=data,
            processing_class=processor_of(),
        )
        for i, data in enumerate((Raw(mode), Raw(mode, processor_of())))
    ]
    for trainer in runs:
        trainer.train()
    assert largest_difference(*(weights(trainer.model) for trainer in runs)) == 0
    accuracies = [trainer.evaluate(Raw(mode))["eval_accuracy"] for trainer in runs]
    assert accuracies[0] == accuracies[1]


def test_k252_raw_images_of_a_table_train_a_greyscale_model(tmp_path):
    rows = load_image_dataset("builtin:digits").train.filter(
        lambda label: label < 3, input_columns="label"
    )
    processor = processor_of(image_mean=[0.5], image_std=[0.5])
    trainer = DPTrainer(
        tiny_vit(num_channels=1),
        arguments(tmp_path, logical_batch_size=4, max_steps=1),
        train_dataset=rows.select(range(ROWS)),
        eval_dataset=rows.select(range(ROWS, 2 * ROWS)),
        processing_class=processor,
    )
    trainer.train()
    expected = processor(images=rows[0]["image"], return_tensors="pt")["pixel_values"]
    assert torch.equal(trainer.data_collator([rows[0]])["pixel_values"], expected)
    assert len(trainer.ledger) == 1


@pytest.mark.parametrize("extra", [{}, {"other": Image.new("L", (4, 4))}])
def test_raw_images_without_one_to_choose_are_refused_in_one_sentence(tmp_path, extra):
    row = {"image": Image.new("RGB", (8, 8)), "label": 1, **extra}
    with pytest.raises(ValueError, match=r"no pixel_values .*one Pillow image where a processing"):
        DPTrainer(
            tiny_vit(),
            arguments(tmp_path),
            train_dataset=[dict(row) for _ in range(ROWS)],
            processing_class=processor_of() if extra else None,
        )


def test_raw_images_without_a_transform_are_refused_in_one_sentence(tmp_path):
    raw = load_image_dataset("builtin:digits").train.select(range(ROWS))
    with pytest.raises(ValueError, match="a row has no pixel_values"):
        trained(tmp_path, raw)

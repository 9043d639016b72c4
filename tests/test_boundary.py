"""What must not slip past the private step: coupled losses, foreign parameters, raw metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import NUM_CLASSES, Images, arguments, fails_to_train, tiny_vit, trainer_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, Dataset, Subset
from transformers import EarlyStoppingCallback, TrainerCallback

from hf_dpmuon.arguments import parse_arguments
from hf_dpmuon.data import ImageExamples, build_transforms, load_image_dataset
from hf_dpmuon.model_folder import public_name as _public_name
from hf_dpmuon.models import load_model
from hf_dpmuon.trainer import DPTrainer
from hf_dpmuon.units import PrivacyUnits

# ---- losses that couple rows ----


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def known_answers(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    known = ~labels.isnan()
    losses = F.binary_cross_entropy_with_logits(logits, labels.nan_to_num(), reduction="none")
    return losses * known, known


WEIGHTS = torch.tensor([1.0, 1.0, 5.0])  # equal for two classes: a third one must be tried
COUPLED = {
    "weighted mean": lambda o, y: F.cross_entropy(o, y, weight=WEIGHTS),
    "ignored class": lambda o, y: F.cross_entropy(o, y, ignore_index=2),
    "rows left out": lambda o, y: F.cross_entropy(o[y != 2], y[y != 2]),
    "hard rows of many": lambda o, y: cross_entropies(o, y).topk(min(16, len(y))).values.mean(),
    "share of classes": lambda o, y: F.cross_entropy(o, y) * len(y.unique()),
}
COUPLED_ANSWERS = {
    "mean of known": lambda o, y: known_answers(o, y)[0].sum() / known_answers(o, y)[1].sum(),
    "known only": lambda o, y: F.binary_cross_entropy_with_logits(o[~y.isnan()], y[~y.isnan()]),
    "balanced in the batch": lambda o, y: F.binary_cross_entropy_with_logits(
        o, y.nan_to_num(), pos_weight=((y == 0).sum(0) + 1) / ((y == 1).sum(0) + 1)
    ),
}


def with_margin(logits: Tensor, labels: Tensor) -> Tensor:
    logits[torch.arange(len(labels)), labels] -= 0.35
    return F.cross_entropy(logits.div_(0.5), labels)


SEPARATE = {
    "changes in place": with_margin,
    "probabilities": lambda o, y: F.binary_cross_entropy(
        o.softmax(-1), F.one_hot(y, NUM_CLASSES).float()
    ),
    "mean": F.cross_entropy,
    "weighted rows": lambda o, y: (cross_entropies(o, y) * WEIGHTS[y]).mean(),
    "focal": lambda o, y: (
        (1 - torch.exp(-cross_entropies(o, y))) ** 2 * cross_entropies(o, y)
    ).mean(),
    "squares": lambda o, y: (o - F.one_hot(y, NUM_CLASSES)).square().mean(),
}


class Answers(Images):
    """Several labels per image, some of them missing."""

    def __getitem__(self, row: int) -> dict[str, Any]:
        example = super().__getitem__(row)
        labels = F.one_hot(example["labels"], NUM_CLASSES).float()
        labels[row % NUM_CLASSES] = torch.nan
        return {**example, "labels": labels}


def with_loss(loss: Any) -> type[DPTrainer]:
    class Custom(DPTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return loss(model(inputs["pixel_values"]).logits.float(), inputs["labels"])

    return Custom


@pytest.mark.parametrize("name", COUPLED)
def test_losses_that_couple_rows_are_refused(tmp_path, name):
    trainer = trainer_of(tmp_path, kind=with_loss(COUPLED[name]), per_device_train_batch_size=32)
    fails_to_train(trainer, "other (rows|samples) of its batch")


@pytest.mark.parametrize("name", COUPLED_ANSWERS)
def test_losses_that_couple_rows_by_their_missing_labels_are_refused(tmp_path, name):
    trainer = trainer_of(tmp_path, kind=with_loss(COUPLED_ANSWERS[name]), train_dataset=Answers())
    fails_to_train(trainer, "other (rows|samples) of its batch")


@pytest.mark.parametrize("name", SEPARATE)
def test_losses_of_each_row_alone_pass(tmp_path, name):
    trainer_of(
        tmp_path, kind=with_loss(SEPARATE[name]), max_steps=1, per_device_train_batch_size=32
    ).train()


def test_a_loss_that_takes_no_missing_labels_is_not_asked_about_them(tmp_path):
    class Whole(Answers):
        def __getitem__(self, row: int) -> dict[str, Any]:
            example = super().__getitem__(row)
            return {**example, "labels": example["labels"].nan_to_num()}

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        assert not labels.isnan().any()
        return F.binary_cross_entropy_with_logits(logits, labels)

    trainer_of(tmp_path, kind=with_loss(loss), train_dataset=Whole(), max_steps=1).train()


def test_a_row_to_be_ignored_stops_the_run(tmp_path):
    """Torch's mean would leave it out of the divisor, and so couple the others."""
    images = Images()
    images.labels[3] = -100
    trainer = trainer_of(
        tmp_path,
        kind=with_loss(F.cross_entropy),
        train_dataset=images,
        logical_batch_size=len(images),
        max_steps=1,
    )
    with pytest.raises(ValueError, match="labels below 0"):
        trainer.train()


class DropsBlankTokens(nn.Module):
    """Averages the pixels that are not blank, gathered from the whole batch at once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_vit()
        self.config = self.inner.config
        self.embed = nn.Linear(3, 3)

    def forward(self, images: Tensor) -> Any:
        pixels = images.flatten(2).mT
        kept = (pixels != 0).any(-1)
        rows = torch.tanh(self.embed(pixels[kept]))
        sums = torch.zeros(len(images), 3).index_add(0, kept.nonzero()[:, 0], rows)
        shift = sums / kept.sum(1, keepdim=True).clamp(min=1)
        return self.inner(images + shift[:, :, None, None])


def test_models_that_leave_blank_parts_out_are_tried_with_blank_parts(tmp_path):
    trainer = trainer_of(tmp_path)
    with pytest.raises((ValueError, NotImplementedError)):
        trainer._wrap_model(DropsBlankTokens())


# ---- parameters that are not the model's ----


class WithTemperature(DPTrainer):
    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        self.temperature = nn.Parameter(torch.tensor(1.0))
        optimizer = super().create_optimizer(model)
        optimizer.add_param_group({**optimizer.param_groups[0], "params": [self.temperature]})
        return optimizer

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        logits = model(inputs["pixel_values"]).logits
        return F.cross_entropy(logits * getattr(self, "temperature", 1.0), inputs["labels"])


def test_an_optimizer_made_later_holds_no_parameter_but_the_model_s(tmp_path):
    trainer = trainer_of(tmp_path, kind=WithTemperature, dp_optimizer="sgd")
    fails_to_train(trainer, "the optimizer must hold each trainable parameter")


def test_a_parameter_added_to_the_optimizer_in_mid_run_stops_it(tmp_path):
    class Adds(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                groups = kwargs["optimizer"].param_groups
                groups.append({**groups[0], "params": [nn.Parameter(torch.zeros(2))]})

    trainer = trainer_of(tmp_path, callbacks=[Adds()], dp_optimizer="sgd")
    with pytest.raises(ValueError, match="the optimizer must hold each trainable parameter"):
        trainer.train()
    assert len(trainer.ledger) == 1


# ---- training data is not evaluated in public ----


@pytest.mark.parametrize("how", ["itself", "subset", "from the end", "concatenation", "dict"])
def test_training_rows_are_no_evaluation_split(tmp_path, how):
    train: Dataset[Any] = Images()
    evaluation: Any = {
        "itself": train,
        "subset": Subset(train, [1, 2]),
        "from the end": Subset(train, [-1]),
        "concatenation": ConcatDataset([Images(8, seed=3), Subset(train, [4])]),
        "dict": {"other": Images(8, seed=3), "train": train},
    }[how]
    with pytest.raises(ValueError, match="eval_dataset holds rows of train_dataset"):
        DPTrainer(tiny_vit(), arguments(tmp_path), train_dataset=train, eval_dataset=evaluation)


def test_k210_training_rows_are_none_later_either(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.train()
    trainer.eval_dataset = Subset(trainer.train_dataset, [3])
    with pytest.raises(ValueError, match="eval_dataset holds rows of train_dataset"):
        trainer.evaluate()


@pytest.mark.parametrize("change", ["repeats", "more rows", "fewer rows", "repeats in place"])
def test_k211_a_data_set_that_is_replaced_passes_the_same_door(tmp_path, change):
    rows = [Images()[row] for row in range(24)]
    trainer = trainer_of(tmp_path, train_dataset=rows)
    if change == "repeats in place":
        rows[:] = rows[:1] * 24
    else:
        trainer.train_dataset = {
            "repeats": Subset(Images(), [0] * 24),
            "more rows": Images(240),
            "fewer rows": Images(23),
        }[change]
    message = "are different" if "repeats" in change else "the plan was made for 24"
    fails_to_train(trainer, message)


def test_disjoint_subsets_of_one_data_set_are_two_splits(tmp_path):
    whole = Images(40)
    parts = Subset(whole, range(30)), Subset(whole, range(30, 40))
    DPTrainer(tiny_vit(), arguments(tmp_path), train_dataset=parts[0], eval_dataset=parts[1])
    overlapping = Subset(whole, range(29, 40))
    with pytest.raises(ValueError, match="eval_dataset holds rows"):
        DPTrainer(tiny_vit(), arguments(tmp_path), train_dataset=parts[0], eval_dataset=overlapping)


def test_the_training_split_prepared_for_evaluation_is_still_the_training_split(tmp_path):
    splits = load_image_dataset("builtin:digits")
    loaded = load_model("builtin:tiny-vit", label_names=splits.label_names)

    def examples(split: Any, train: bool) -> ImageExamples:
        transform = build_transforms(loaded.image_format, train=train)
        columns = {"image_column": splits.image_column, "label_column": splits.label_column}
        return ImageExamples(split, transform=transform, **columns)

    args = arguments(tmp_path)
    with pytest.raises(ValueError, match="eval_dataset holds rows"):
        DPTrainer(
            loaded,
            args,
            train_dataset=examples(splits.train, True),
            eval_dataset=examples(splits.train, False),
        )
    DPTrainer(
        loaded,
        args,
        train_dataset=examples(splits.train, True),
        eval_dataset=examples(splits.evaluation, False),
    )


def test_metrics_of_another_data_set_and_of_another_model_stay_out_of_the_card(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=1)
    trainer.evaluate()
    assert trainer.eval_metrics
    trainer.train()
    assert not trainer.eval_metrics  # they were of the untrained model
    trainer.evaluate(trainer.train_dataset)
    trainer.predict(trainer.train_dataset)
    assert not trainer.eval_metrics
    assert not trainer.plot_confusion()
    trainer.save_model()
    assert "accuracy" not in (tmp_path / "README.md").read_text().lower()
    trainer.evaluate()
    trainer.evaluate(trainer.train_dataset)
    assert trainer.eval_metrics["accuracy"] == pytest.approx(trainer.evaluate()["eval_accuracy"])


def test_held_out_private_rows_are_not_declared_public(tmp_path):
    options = ["--target_epsilon=8", "--use_cpu", f"--output_dir={tmp_path}"]
    with pytest.raises(ValueError, match="holds out private rows of the training split"):
        parse_arguments([*options, "--eval_fraction=0.2", "--public_eval_split"])


def test_early_stopping_added_later_is_refused(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.add_callback(EarlyStoppingCallback())
    fails_to_train(trainer, "public_eval_split=True")


# ---- resuming, files, names ----


def test_a_run_does_not_go_on_with_other_patients(tmp_path):
    """As many of them, and by the same name: only who owns which rows tells."""

    def trainer(owners: list[int]) -> DPTrainer:
        return DPTrainer(
            tiny_vit(),
            arguments(tmp_path, max_steps=4, save_strategy="steps", save_steps=2),
            train_dataset=Images(24),
            units=PrivacyUnits.from_ids(owners, name="patient"),
        )

    trainer([i // 2 for i in range(24)]).train()
    others = trainer([i % 12 for i in range(24)])
    with pytest.raises(ValueError, match="other privacy units than this data has"):
        others.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    trainer([i // 2 for i in range(24)]).train(str(tmp_path / "checkpoint-2"))


def test_k201_no_byte_of_a_checkpoint_or_output_folder_is_a_key(tmp_path):
    """Case 201: whatever an integration, a push or a copy takes along holds no secret."""
    folder = tmp_path / "run"
    trainer_of(folder, max_steps=2, save_strategy="steps", save_steps=1, noise_seed=None).train()
    starts = json.loads((tmp_path / "run.secrets" / "keys.json").read_text())["starts"]
    (key,) = [start["key"] for start in starts.values()]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {"optimizer.pt", "privacy_state.json", "model.safetensors"} <= {p.name for p in files}
    assert not [path.name for path in files if path.name.startswith("rng_state")]
    for path in files:
        content = path.read_bytes()
        assert key.encode() not in content, path
        assert bytes.fromhex(key) not in content, path


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("google/vit-base-patch16-224-in21k", True),
        ("timm/vit_small_patch14_dinov2.lvd142m", True),
        ("timm/owner/repository", True),
        ("builtin:tiny-vit", True),
        ("~/hospital", False),
        ("/data/hospital", False),
        ("./hospital", False),
        ("../hospital/scans", False),
        ("file:///home/hospital", False),
        ("s3://bucket/patients", False),
        (r"C:\Users\hospital", False),
        ("a/b/c", False),
        (None, False),
    ],
)
def test_only_names_of_the_hub_and_of_this_package_are_public(name, public):
    assert _public_name(name) == (name if public else None)


def test_a_name_that_is_a_local_folder_is_not_public(tmp_path, monkeypatch):
    (Path(tmp_path) / "hospital" / "scans").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert _public_name("hospital/scans") is None


@pytest.mark.parametrize("absent", ["step", "pending", "label_names"])
def test_a_state_of_an_earlier_version_is_refused_in_one_sentence(tmp_path, absent):
    trainer_of(tmp_path, max_steps=2, save_strategy="steps", save_steps=1).train()
    path = tmp_path / "checkpoint-1" / "privacy_state.json"
    state = json.loads(path.read_text())
    del state[absent]
    path.write_text(json.dumps(state))
    with pytest.raises(ValueError, match=f"lacks {absent}"):
        trainer_of(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_saved_model_leaves_no_shard_of_the_one_before(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=1)
    trainer.train()
    trainer.model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    trainer.save_model()
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]

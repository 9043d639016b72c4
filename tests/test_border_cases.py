"""Small inputs at the border of the trainer: each works, or is refused in one sentence."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from image_tables import class_folders
from support import Images, arguments, forked, script, tiny_vit, trainer_of
from torch.nn import functional as F
from transformers import TrainingArguments

from hf_dpmuon.data import ImageExamples, ImageFormat, build_transforms, load_image_dataset
from hf_dpmuon.optim import DPMuon
from hf_dpmuon.spectral import newton_schulz
from hf_dpmuon.trainer import DPTrainer


class Doubled(DPTrainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        logits = model(inputs["pixel_values"]).logits
        loss = 2 * F.cross_entropy(logits, inputs["labels"])
        return (loss, {"loss": loss, "logits": logits}) if return_outputs else loss


@pytest.mark.parametrize("kind", ["smoothed", "weighted", "own"])
def test_k234_the_evaluation_loss_is_the_run_s_own(tmp_path, kind):
    evaluation = Images(10, seed=1)
    trainer = (Doubled if kind == "own" else DPTrainer)(
        tiny_vit(),
        arguments(tmp_path, label_smoothing_factor=0.2 if kind == "smoothed" else 0.0),
        train_dataset=Images(),
        eval_dataset=evaluation,
        class_weights=[0.2, 1.0, 3.0] if kind == "weighted" else None,
    )
    metrics = trainer.evaluate()
    pixels = torch.stack([row["pixel_values"] for row in evaluation])
    labels = torch.stack([row["labels"] for row in evaluation])
    with torch.no_grad():
        logits = trainer.model(pixels).logits
    plain = F.cross_entropy(logits, labels)
    weights = torch.tensor([0.2, 1.0, 3.0])
    expected = {
        "smoothed": F.cross_entropy(logits, labels, label_smoothing=0.2),
        "weighted": (F.cross_entropy(logits, labels, reduction="none") * weights[labels]).mean(),
        "own": 2 * plain,
    }[kind]
    assert metrics["eval_loss"] == pytest.approx(float(expected), rel=1e-5)
    assert metrics["eval_cross_entropy"] == pytest.approx(float(plain), rel=1e-5)


def test_k236_the_script_trains_only_if_it_is_asked_to(tmp_path):
    options = ("--do_train=False", f"--output_dir={tmp_path / 'run'}", "--use_cpu=True")
    done = script("--config=configs/quickstart.yaml", *options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "test accuracy" in done.stdout
    assert "epsilon  " not in done.stdout
    assert not list((tmp_path / "run").glob("privacy_*"))


@pytest.mark.parametrize("names", [("b", "a", "c"), ("a", "b", "d")], ids="".join)
def test_k245_a_checkpoint_of_other_classes_is_refused(tmp_path, names):
    model = tiny_vit()
    model.config.id2label = dict(enumerate("abc"))
    trainer_of(tmp_path, model, save_strategy="steps", save_steps=2).train()
    renamed = tiny_vit()
    renamed.config.id2label = dict(enumerate(names))
    with pytest.raises(ValueError, match=r"has the classes a, b, c and this run has"):
        trainer_of(tmp_path, renamed).train(resume_from_checkpoint=True)


def on_folder(output: Path, data: Path) -> DPTrainer:
    """A trainer on the class folders of ``data``, with a model of just these classes."""
    splits = load_image_dataset(str(data))
    model = tiny_vit()
    model.config.id2label = dict(enumerate(splits.label_names))
    image_format = ImageFormat(8, 8, 3, (0.5,) * 3, (0.5,) * 3, "bilinear")
    train = ImageExamples(
        splits.train,
        image_column=splits.image_column,
        label_column=splits.label_column,
        transform=build_transforms(image_format, train=True),
        checked=True,
    )
    settings = {"logical_batch_size": 2, "save_strategy": "steps", "save_steps": 1}
    return trainer_of(output, model, train_dataset=train, max_steps=1, **settings)


def test_k245_a_class_folder_renamed_after_a_checkpoint_is_refused(tmp_path):
    """Case 245: rows of the head took other names; a new name may also move the others."""
    data = class_folders(tmp_path / "data", {"mel": 2, "nev": 2, "vasc": 2})
    on_folder(tmp_path / "run", data).train()
    for name in ("ack", "mel2", "zoster"):
        renamed = (data / "mel").rename(data / name)
        with pytest.raises(ValueError, match="has the classes mel, nev, vasc and this run has"):
            on_folder(tmp_path / "run", data).train(resume_from_checkpoint=True)
        renamed.rename(data / "mel")
    on_folder(tmp_path / "run", data).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    "args", [None, TrainingArguments("unused", use_cpu=True), {"max_steps": 1}]
)
def test_k253_arguments_without_a_price_are_refused(args):
    with pytest.raises(ValueError, match="must be DPTrainingArguments") as refusal:
        DPTrainer(tiny_vit(), args, train_dataset=Images())
    assert "\n" not in str(refusal.value)


def test_every_group_is_warmed_up(tmp_path):
    """A mutant that leaves the vectors out of the schedule fails here."""
    rates = []

    class Rates(DPTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            rates.append([group["lr"] for group in self.optimizer.param_groups])
            return super().training_step(*args, **kwargs)

    settings = {"learning_rate": 0.1, "vector_learning_rate": 0.3, "warmup_steps": 0.3}
    trainer_of(tmp_path, kind=Rates, dp_optimizer="muon", max_steps=10, **settings).train()
    assert len(rates[0]) > 1
    for of_step in rates:
        matrices, vectors = of_step[0], of_step[-1]
        assert vectors == pytest.approx(3 * matrices)
    assert rates[0][-1] == pytest.approx(0.3 / 4)


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy"])
def test_k254_schedules_that_know_no_warm_up_work_with_the_default_one(tmp_path, schedule):
    trainer = trainer_of(
        tmp_path,
        lr_scheduler_type=schedule,
        public_eval_split=True,
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer.train()
    assert len(trainer.ledger) == 4


def test_k261_a_checkpoint_of_another_image_size_is_refused_in_one_sentence(tmp_path):
    trainer_of(tmp_path, tiny_vit(), save_strategy="steps", save_steps=2).train()

    class Larger(Images):
        def __init__(self) -> None:
            super().__init__()
            self.pixels = torch.randn(len(self.labels), 3, 12, 12)

    before = (tmp_path / "privacy_ledger.jsonl").read_bytes()
    trainer = DPTrainer(
        tiny_vit(image_size=12),
        arguments(tmp_path, max_steps=8, save_strategy="steps", save_steps=2),
        train_dataset=Larger(),
    )
    with pytest.raises(ValueError, match="holds another model than this run's") as refusal:
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "\n" not in str(refusal.value)
    assert (tmp_path / "privacy_ledger.jsonl").read_bytes() == before


@pytest.mark.parametrize("first", [True, False])
def test_k262_a_full_disk_ends_with_advice_that_holds(tmp_path, monkeypatch, first):
    trainer = trainer_of(tmp_path, save_strategy="steps", save_steps=2)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    save = trainer.privacy_run.save

    def sometimes(checkpoint: Path, *, step: int) -> None:
        (full if first or step == 4 else save)(checkpoint, step=step)

    monkeypatch.setattr(trainer.privacy_run, "save", sometimes)
    advice = "start again with an output_dir that has space" if first else "resume_from_checkpoint"
    with pytest.raises(ValueError, match=f"No space left on device.*{advice}"):
        trainer.train()
    if not first:  # the advice holds
        again = trainer_of(tmp_path, save_strategy="steps", save_steps=2)
        again.train(resume_from_checkpoint=True)
        assert again.state.global_step == 4


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model_init", "search"),
        ("compute_loss_func", "override compute_loss"),
        ("optimizer_cls_and_kwargs", "set dp_optimizer"),
        ("tokenizer", "processing_class"),
        ("datasets", "is not known"),
    ],
)
def test_k264_what_is_not_taken_is_refused_with_the_reason(tmp_path, name, reason):
    with pytest.raises(ValueError, match=f"^{name} .*{reason}"):
        DPTrainer(tiny_vit(), arguments(tmp_path), train_dataset=Images(), **{name: object()})


def test_k264_logits_are_preprocessed_for_metrics_and_a_trainer_needs_rows(tmp_path):
    shapes = []
    trainer = DPTrainer(
        tiny_vit(),
        arguments(tmp_path),
        train_dataset=Images(),
        eval_dataset=Images(10, seed=1),
        preprocess_logits_for_metrics=lambda logits, labels: (shapes.append(logits.shape), logits)[
            1
        ],
    )
    trainer.evaluate()
    assert shapes
    with pytest.raises(ValueError, match="train_dataset is missing"):
        DPTrainer(tiny_vit(), arguments(tmp_path))


def test_k265_names_of_torch_s_muon_are_taken():
    matrix = torch.nn.Parameter(torch.randn(4, 6))
    ours = DPMuon(
        [{"params": [matrix]}],
        ns_coefficients=(3.4445, -4.7750, 2.0315),
        adjust_lr_fn="match_rms_adamw",
        eps=1e-7,
    )
    tiny = 1e-9 * torch.randn(4, 6)
    lifted, left = newton_schulz(tiny), newton_schulz(tiny, eps=1e-7)
    assert float(lifted.norm()) > 1
    assert 0 < float(left.norm()) < 484.876 * float(tiny.norm()) / 1e-7 * 1.01  # slope at 0
    assert torch.equal(newton_schulz(1e3 * tiny, eps=1e-7), newton_schulz(1e3 * tiny))
    named = DPMuon([{"params": [matrix]}], ns_coefficients="quintic")
    assert ours.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw"
    assert named.param_groups[0]["ns_coefficients"] == "quintic"
    for bad in ((1.0, 2.0), (1.0, 2.0, float("inf")), "keller"):
        with pytest.raises(ValueError, match="ns_coefficients="):
            DPMuon([{"params": [matrix]}], ns_coefficients=bad)


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_k201_what_a_tracker_writes_holds_no_secret_no_raw_loss_and_no_time(
    tmp_path, monkeypatch, tracker
):
    """The real trackers, offline: every byte they write is searched."""
    home = tmp_path / "home"
    home.mkdir()
    environment = {
        "HOME": str(home),
        "PATH": "/usr/bin:/bin",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path / "tracked"),
        "WANDB_SILENT": "true",
        "TRACKIO_DIR": str(tmp_path / "tracked"),
        "MLFLOW_TRACKING_URI": f"file:{tmp_path / 'tracked' / 'mlflow'}",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TENSORBOARD_LOGGING_DIR": str(tmp_path / "tracked"),
    }

    def work() -> None:
        trainer_of(
            tmp_path / "run",
            report_to=[tracker],
            noise_seed=None,
            save_strategy="steps",
            save_steps=2,
            eval_strategy="steps",
            eval_steps=2,
        ).train()

    (tmp_path / "tracked").mkdir()
    done = forked(work, environment)
    assert done.returncode == 0, done.stderr[-2000:]
    starts = json.loads((tmp_path / "run.secrets" / "keys.json").read_text())["starts"]
    files = [path for path in (tmp_path / "tracked").rglob("*") if path.is_file()]
    written = b"\n".join(str(path).encode() + path.read_bytes() for path in files)
    assert b"epsilon" in written  # one does see what was written
    (key,) = [start["key"] for start in starts.values()]
    for secret in (key.encode(), bytes.fromhex(key), b"train_loss", b"train_runtime", b"patient-"):
        assert secret not in written, secret

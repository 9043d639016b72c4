"""Laws of the trainer: the privacy boundary, the full step, what is logged, saved and resumed."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from support import (
    TINY_MODELS,
    Images,
    N,
    Recording,
    Spy,
    arguments,
    as_loaded,
    checkpointed,
    fails_to_train,
    fixed_draw,
    fixed_noise,
    keys_of,
    largest_difference,
    tiny_dinov2,
    tiny_vit,
    trainer_of,
    weights,
)
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForImageClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_dpmuon.accounting import SampledGaussian, compute_epsilon, epsilon_bound
from hf_dpmuon.data import ImageExamples
from hf_dpmuon.grad_sample import ENGINES
from hf_dpmuon.ledger import PrivacyLedger
from hf_dpmuon.spectral import newton_schulz
from hf_dpmuon.trainer import DPTrainer

# ---- the step ----


def by_hand(
    model: nn.Module, *, steps: int, sigma: float, C: float, rule: str, lrs: list[float]
) -> None:
    """Sampling, loop of ones, clip, sum, noise, divide, momentum, polar, step: in plain code."""
    data, batch = Images(), 8
    buffers = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for step in range(steps):
        rows, _ = fixed_draw(N, seed=7, step=step + 1, sample_rate=batch / N)
        total = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        for row in rows:
            model.zero_grad()
            example = data[int(row)]
            logits = model(example["pixel_values"][None]).logits
            F.cross_entropy(logits, example["labels"][None]).backward()
            norm = math.sqrt(sum(float(p.grad.double().norm()) ** 2 for p in model.parameters()))
            for n, p in model.named_parameters():
                total[n] += p.grad * min(1.0, C / norm)
        for n, p in model.named_parameters():
            drawn = fixed_noise(
                n, p.shape, seed=7, step=step + 1, sigma=sigma, C=C, batch=float(batch)
            )
            g = (total[n] + sigma * C * drawn) / batch
            if (
                rule == "muon"
                and p.ndim >= 2
                and not any(token in n for token in ("cls_token", "position_embeddings"))
            ):
                buffers[n] = 0.95 * buffers[n] + 0.05 * g
                lookahead = (0.05 * g + 0.95 * buffers[n]).flatten(1)
                m, k = lookahead.shape
                direction = newton_schulz(lookahead) * math.sqrt(min(4, max(1, m / k)))
                update = direction.view_as(p)
            else:
                update = buffers[n] = 0.9 * buffers[n] + g
            with torch.no_grad():
                p -= lrs[step] * update


@pytest.mark.parametrize("mode", ENGINES)
@pytest.mark.parametrize("rule", ["muon", "sgd"])
def test_training_equals_a_by_hand_oracle(tmp_path, rule, mode):
    model = tiny_vit()
    trainer = trainer_of(
        tmp_path,
        dp_optimizer=rule,
        grad_sample_mode=mode,
        lr_scheduler_type="constant",
        warmup_steps=0,
    )
    trainer.train()
    by_hand(model, steps=4, sigma=1.0, C=1.0, rule=rule, lrs=[0.1] * 4)
    assert largest_difference(weights(trainer.model), weights(model)) < 1e-6


@pytest.mark.parametrize("rule", ["muon", "sgd"])
def test_the_learning_rate_of_each_step_is_the_schedule_s(tmp_path, rule):
    # Case 47: check the weights, not the log.
    model = tiny_vit()
    trainer = trainer_of(tmp_path, dp_optimizer=rule, lr_scheduler_type="linear", warmup_steps=0)
    trainer.train()
    by_hand(model, steps=4, sigma=1.0, C=1.0, rule=rule, lrs=[0.1, 0.075, 0.05, 0.025])
    assert largest_difference(weights(trainer.model), weights(model)) < 1e-6


def test_the_physical_batch_size_changes_nothing(tmp_path):
    runs = []
    for size in (1, 7, 64):
        trainer = trainer_of(tmp_path / str(size), per_device_train_batch_size=size)
        trainer.train()
        runs.append(weights(trainer.model))
    assert largest_difference(runs[0], runs[1]) < 1e-6
    assert largest_difference(runs[0], runs[2]) < 1e-6


def test_workers_change_nothing(tmp_path):
    runs = []
    for workers in (0, 2):
        trainer = trainer_of(tmp_path / str(workers), dataloader_num_workers=workers)
        trainer.train()
        runs.append(weights(trainer.model))
    assert largest_difference(*runs) == 0


def test_without_noise_and_with_a_vanishing_bound_the_weights_stay(tmp_path):
    before = weights(tiny_vit())
    trainer = trainer_of(
        tmp_path, noise_multiplier=0.0, per_sample_max_grad_norm=1e-12, dp_optimizer="sgd"
    )
    trainer.train()
    assert largest_difference(before, weights(trainer.model)) < 1e-9


def test_without_noise_and_bound_it_is_a_plain_trainer(tmp_path):
    # q = 1, so the logical batch is the data set and the expected size is the real one.
    settings = {"lr_scheduler_type": "constant", "warmup_steps": 0}
    ours = trainer_of(
        tmp_path / "ours",
        noise_multiplier=0.0,
        per_sample_max_grad_norm=1e12,
        logical_batch_size=N,
        dp_optimizer="sgd",
        **settings,
    )
    ours.train()
    plain = tiny_vit()
    Trainer(
        plain,
        TrainingArguments(
            str(tmp_path / "plain"),
            per_device_train_batch_size=N,
            max_steps=4,
            learning_rate=0.1,
            max_grad_norm=0,
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            report_to="none",
            **settings,
        ),
        train_dataset=[
            {k: v for k, v in row.items() if k != "patient"}
            for row in map(Images().__getitem__, range(N))
        ],
        optimizers=(torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), None),
    ).train()
    assert largest_difference(weights(ours.model), weights(plain)) < 1e-5


@pytest.mark.parametrize("mode", ENGINES)
@pytest.mark.parametrize("kind", TINY_MODELS)
def test_every_kind_of_model_trains_and_every_parameter_moves(tmp_path, kind, mode):
    # Case 17: no trainable parameter may be left out silently.
    model = TINY_MODELS[kind](dropout=0.1)
    before = weights(model)
    handed: Any = as_loaded(model) if kind == "timm_vit" else model
    trainer = trainer_of(tmp_path, handed, kind=Spy, max_steps=2, grad_sample_mode=mode)
    trainer.train()
    after = weights(trainer.model)
    assert all(not torch.equal(before[n], after[n]) for n in before)
    assert trainer.evaluate()["eval_accuracy"] >= 0


class Augmented(ImageExamples):
    """Images that are shifted by noise of their augmentation seed."""

    def __init__(self) -> None:
        self.images = Images()
        self.rows = list(range(len(self.images)))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: Any) -> dict[str, Any]:
        row, seed = key if isinstance(key, tuple) else (key, 0)
        example = self.images[row]
        noise = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(seed))
        return {"pixel_values": example["pixel_values"] + noise, "labels": example["labels"]}


@pytest.mark.parametrize("C", [0.5, 1e3])
@pytest.mark.parametrize("mode", ENGINES)
def test_augmentations_of_an_image_are_averaged_before_clipping(tmp_path, mode, C):
    # De et al. 2022: the mean gradient of K augmentations is one sample's gradient.
    K = 3
    trainer = trainer_of(
        tmp_path,
        kind=Spy,
        train_dataset=Augmented(),
        augmentation_multiplicity=K,
        per_sample_max_grad_norm=C,
        noise_multiplier=0.0,
        max_steps=1,
        grad_sample_mode=mode,
    )
    trainer.train()
    rows, generator = fixed_draw(N, seed=7, step=1, sample_rate=8 / N)
    model, data = tiny_vit(), Augmented()
    expected = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for row in rows.tolist():
        seeds = generator.integers(0, 2**63, size=K, dtype=np.int64)
        examples = [data[row, seed] for seed in seeds.tolist()]
        model.zero_grad()
        x = torch.stack([example["pixel_values"] for example in examples])
        labels = torch.stack([example["labels"] for example in examples])
        F.cross_entropy(model(x).logits, labels).backward()
        norm = math.sqrt(sum(float(p.grad.norm()) ** 2 for p in model.parameters()))
        for n, p in model.named_parameters():
            expected[n] += p.grad * min(1.0, C / norm) / 8
    assert largest_difference(trainer.releases[0], expected) < 1e-6


# ---- the boundary ----


def test_nothing_raw_is_left_and_the_ledger_is_written_when_the_step_returns(tmp_path):
    trainer = trainer_of(tmp_path, kind=Spy)
    trainer.train()  # Spy asserts the rest inside training_step
    assert trainer.ledger_lengths == [1, 2, 3, 4]


def test_an_empty_draw_is_a_step_of_noise_alone(tmp_path):
    # Case 23: q N = 0.05, so all of these draws are empty with the fixed seed.
    trainer = trainer_of(
        tmp_path,
        kind=Spy,
        logical_batch_size=1,
        train_dataset=Images(2000),
        max_steps=40,
        warmup_steps=0,
    )
    draws = [fixed_draw(2000, seed=7, step=t, sample_rate=1 / 2000)[0] for t in range(1, 41)]
    sizes = [len(rows) for rows in draws]
    assert 0 in sizes
    trainer.train()
    assert trainer.state.global_step == 40
    assert len(trainer.ledger) == 40
    assert trainer.lr_scheduler.last_epoch == 40
    empty = torch.cat([g.flatten() for g in trainer.releases[sizes.index(0)].values()])
    assert float(empty.std()) == pytest.approx(1.0, rel=0.05)  # sigma C / (q N) = 1


def test_two_runs_with_one_seed_have_different_noise_and_data_draws(tmp_path):
    # Case 127: args.seed is 42 for everybody.
    runs = []
    for name in "ab":
        trainer = trainer_of(tmp_path / name, kind=Spy, noise_seed=None, max_steps=1)
        trainer.train()
        assert trainer.ledger.guarantee
        runs.append(trainer.releases[0])
    assert all(not torch.equal(runs[0][n], runs[1][n]) for n in runs[0])


def test_the_global_generators_are_not_touched_by_noise_and_sampling(tmp_path):
    draws = []
    for q in (1, 20):
        torch.manual_seed(0)
        np.random.seed(0)
        trainer = trainer_of(tmp_path / str(q), logical_batch_size=q)
        trainer.train()
        draws.append((float(torch.rand(())), float(np.random.rand())))
    assert draws[0] == draws[1]


def test_the_raw_loss_is_nowhere(tmp_path):
    trainer = trainer_of(tmp_path, save_strategy="steps", save_steps=2)
    output = trainer.train()
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("train", output.metrics)
    assert math.isnan(output.training_loss)
    keys = {key for entry in trainer.state.log_history for key in entry}
    assert "epsilon" in keys
    assert "signal_to_noise" in keys
    assert not [key for key in {*keys, *output.metrics} if "loss" in key]
    for path in tmp_path.rglob("*"):
        if path.suffix in {".json", ".jsonl", ".md"}:
            assert "loss" not in path.read_text(), path
    assert not list(tmp_path.rglob("training_args.bin"))
    assert trainer.state.total_flos == 0


def test_the_raw_loss_is_logged_locally_when_asked_for_by_its_name(tmp_path):
    trainer = trainer_of(tmp_path, report_nonprivate_loss=True)
    output = trainer.train()
    logged = [e["nonprivate_loss"] for e in trainer.state.log_history if "nonprivate_loss" in e]
    assert len(logged) == 4
    assert output.training_loss == pytest.approx(np.mean(logged))
    trainer.save_model()
    assert "loss" not in (tmp_path / "README.md").read_text()


# ---- epsilon ----


def test_epsilon_is_the_same_in_log_state_report_card_and_accountant(tmp_path):
    trainer = trainer_of(tmp_path, noise_multiplier=None, target_epsilon=4.0)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    plan = trainer.plan
    expected = compute_epsilon(
        noise_multiplier=plan.noise_multiplier,
        sample_rate=8 / N,
        steps=4,
        delta=1 / (10 * N),
    )
    assert 0.995 * 4 <= expected <= 4
    report = json.loads((tmp_path / "privacy_report.json").read_text())
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    last = state["log_history"][-1]
    assert report["epsilon"] == last["epsilon"] == trainer.epsilon() == expected
    assert report["delta"] == last["delta"] == plan.delta
    assert report["noise_multiplier"] == last["noise_multiplier"] == plan.noise_multiplier
    assert report["sample_rate"] == last["sample_rate"] == 8 / N
    assert report["steps"] == last["noise_draws"] == 4
    assert report["guarantee"] is False  # the fixed noise seed
    assert f"| epsilon | {expected:.4f} |" in (tmp_path / "README.md").read_text()


def test_without_noise_epsilon_is_infinite_and_no_guarantee_is_claimed(tmp_path):
    trainer = trainer_of(tmp_path, noise_multiplier=0.0, noise_seed=None)
    trainer.train()
    trainer.save_model()
    report = json.loads((tmp_path / "privacy_report.json").read_text())
    assert report["epsilon"] == "inf"
    assert report["guarantee"] is False
    assert "no privacy guarantee" in (tmp_path / "README.md").read_text()


def test_epochs_count_logical_steps(tmp_path):
    # Case 28: T = epochs * steps per epoch, whatever the split into physical batches.
    trainer = trainer_of(tmp_path, max_steps=-1, num_train_epochs=2)
    trainer.train()
    assert trainer.state.global_step == len(trainer.ledger) == trainer.plan.steps == 2 * 3
    assert trainer.state.epoch == 2.0


@pytest.mark.parametrize(("batch", "steps"), [(17, 5), (24, 2), (5, 7)])
def test_an_epoch_is_an_expected_pass(tmp_path, batch, steps):
    """In log, state and checkpoint; a pass at q = .71 is 1.4 steps and not one."""
    seen = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append((state.epoch, state.num_train_epochs))

    settings = {"logical_batch_size": batch, "save_strategy": "steps", "save_steps": 2}
    trainer = trainer_of(tmp_path, max_steps=steps, callbacks=[Watch()], **settings)
    trainer.train()
    passes = [step * batch / 24 for step in range(1, steps + 1)]
    logged = [entry["epoch"] for entry in trainer.state.log_history]
    assert logged[:steps] == pytest.approx(passes)
    assert seen == [(pytest.approx(n), math.ceil(passes[-1])) for n in passes]
    saved = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert saved["epoch"] == pytest.approx(passes[1])


@pytest.mark.parametrize("more", [{}, {"max_steps": 8}], ids=["finished", "budget spent"])
def test_a_resume_that_may_take_no_step_leaves_the_saved_model_as_it_is(tmp_path, more):
    settings = {
        "noise_multiplier": None,
        "target_epsilon": 4.0,
        "save_strategy": "steps",
        "save_steps": 4,
        "noise_seed": None,
    }
    first = trainer_of(tmp_path, **settings)
    first.train()
    first.save_model()
    sigma = first.plan.noise_multiplier
    if more:  # the same mechanism for more steps than the budget allows
        settings |= {"target_epsilon": None, "noise_multiplier": sigma, **more}
    second = trainer_of(tmp_path, tiny_vit(seed=9), **settings)
    second.args.target_epsilon = 4.0
    output = second.train(resume_from_checkpoint=True)
    second.save_model()
    saved = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert largest_difference(weights(saved), weights(first.model)) == 0
    assert output.global_step == second.state.global_step == 4
    assert len(second.ledger) == 4


def rows_of(trainer: DPTrainer, **settings: Any) -> list[int]:
    """Rows that a run asks for."""
    trainer.train_dataset.asked.clear()
    trainer.train(**settings)
    return list(trainer.train_dataset.asked)


def test_a_checkpoint_saved_in_mid_replay_remembers_what_is_still_to_be_repeated(tmp_path):
    settings = {"noise_seed": None, "max_steps": 8, "save_strategy": "steps", "save_steps": 2}
    trainer_of(tmp_path, **settings).train()

    class Stopped(DPTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            if self.state.global_step == 4:
                raise KeyboardInterrupt
            return super().training_step(*args, **kwargs)

    replaying = trainer_of(tmp_path, kind=Stopped, **settings)
    with pytest.raises(KeyboardInterrupt):
        replaying.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(replaying.ledger) == 8
    same = trainer_of(tmp_path, **settings)
    same.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert len(same.ledger) == 8  # all of it was repeated and nothing counted again
    other = trainer_of(tmp_path, **{**settings, "noise_multiplier": 2.0})
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert len(other.ledger) == 12  # departed: steps 5 to 8 on fresh draws


def test_a_second_run_of_a_trainer_never_repeats_draws(tmp_path):
    checkpoint = checkpointed(tmp_path, noise_seed=None, max_steps=8)
    data = Recording()
    trainer = trainer_of(tmp_path, train_dataset=data, noise_seed=None, max_steps=8)
    first = rows_of(trainer, resume_from_checkpoint=str(checkpoint))
    second = rows_of(trainer)
    assert len(trainer.ledger) == 8 + 8
    assert not set(zip(first, first[1:], first[2:], strict=False)) >= set(
        zip(second, second[1:], second[2:], strict=False)
    )


def test_equal_sums_of_two_passes_are_two_releases(tmp_path):
    # q N = 1: many draws are empty, and an empty draw is an empty draw.
    trainer = trainer_of(
        tmp_path, logical_batch_size=1, train_dataset=Images(500), max_steps=12, noise_seed=None
    )
    for _ in range(3):
        trainer.train()
    assert len(trainer.ledger) == 36
    assert len({event.digest for event in trainer.ledger.events}) == 36


def test_a_departure_without_budget_stops_cleanly(tmp_path):
    settings = {
        "noise_multiplier": None,
        "target_epsilon": 4.0,
        "save_strategy": "steps",
        "save_steps": 2,
        "noise_seed": None,
    }
    trainer_of(tmp_path, **settings).train()
    other = trainer_of(tmp_path, per_sample_max_grad_norm=0.5, **settings)
    before = AutoModelForImageClassification.from_pretrained(tmp_path / "checkpoint-2")
    output = other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert output.global_step == 2
    assert len(other.ledger) == 4
    assert other.epsilon() <= 4.0
    assert largest_difference(weights(before), weights(other.model)) == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"dp_optimizer": "sgd"},
        {"dp_filter": "doppler"},
        {"learning_rate": 0.2},
        {"ns_steps": 4},
        {"spectral_map": "svd"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_settings_that_saved_state_would_override_are_refused_on_resume(tmp_path, changed):
    checkpoint = checkpointed(tmp_path)
    (name,) = changed
    trainer = trainer_of(tmp_path, **changed)
    with pytest.raises(ValueError, match=name):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert len(PrivacyLedger.load(tmp_path / "privacy_ledger.jsonl")) == 4
    with pytest.raises(ValueError, match="already holds a privacy ledger"):
        trainer.train()  # a refused resume leaves no trace in the trainer


def test_training_stops_before_the_budget_is_passed(tmp_path):
    first = trainer_of(
        tmp_path,
        noise_multiplier=None,
        target_epsilon=4.0,
        save_strategy="steps",
        save_steps=4,
        noise_seed=None,
    )
    first.train()
    saved = weights(first.model)
    more = trainer_of(
        tmp_path, noise_multiplier=1.0, target_epsilon=None, max_steps=8, noise_seed=None
    )
    more.args.target_epsilon = 4.0
    output = more.train(resume_from_checkpoint=True)
    assert output.metrics["epsilon"] <= 4.0
    assert len(PrivacyLedger.load(tmp_path / "privacy_ledger.jsonl")) == 4
    assert largest_difference(saved, weights(first.model)) == 0


def test_a_second_call_of_train_composes_and_stops_at_the_budget(tmp_path):
    trainer = trainer_of(
        tmp_path, noise_multiplier=None, target_epsilon=4.0, dp_optimizer="sgd", noise_seed=None
    )
    trainer.train()
    before = weights(trainer.model)
    trainer.train()
    assert len(trainer.ledger) == 4
    assert trainer.epsilon() <= 4.0
    assert largest_difference(before, weights(trainer.model)) == 0


# ---- save and resume ----


def test_a_saved_model_loads_without_missing_keys_and_gives_equal_logits(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.train()
    trainer.save_model()
    loaded, info = AutoModelForImageClassification.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    x = Images().pixels
    assert torch.equal(loaded.eval()(x).logits, trainer.model.eval()(x).logits)
    assert loaded.state_dict().keys() == tiny_vit().state_dict().keys()


@pytest.mark.parametrize("rule", ["muon", "sgd"])
@pytest.mark.parametrize("workers", [0, 2])
def test_five_steps_and_five_equal_ten(tmp_path, rule, workers):
    settings: dict[str, Any] = {
        "dp_optimizer": rule,
        "max_steps": 10,
        "dataloader_num_workers": workers,
        "noise_multiplier": None,
        "target_epsilon": 6.0,
    }
    whole = trainer_of(tmp_path / "whole", tiny_vit(dropout=0.1), **settings)
    whole.train()

    class Interrupted(DPTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            if self.state.global_step == 7:  # two steps after the checkpoint
                raise KeyboardInterrupt
            return super().training_step(*args, **kwargs)

    folder = tmp_path / "parts"
    parts: dict[str, Any] = {**settings, "save_strategy": "steps", "save_steps": 5}
    first = trainer_of(folder, tiny_vit(dropout=0.1), kind=Interrupted, **parts)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert len(PrivacyLedger.load(folder / "privacy_ledger.jsonl")) == 7
    second = trainer_of(folder, tiny_vit(dropout=0.1), **parts)
    second.train(resume_from_checkpoint=True)
    assert largest_difference(weights(whole.model), weights(second.model)) == 0
    assert len(second.ledger) == 10
    assert second.epsilon() == whole.epsilon()
    assert second.state.epoch == whole.state.epoch
    assert second.lr_scheduler.get_last_lr() == whole.lr_scheduler.get_last_lr()


def test_the_best_model_is_restored_whole(tmp_path):
    # Case 76: restored weights are those of the best checkpoint, and all steps are counted.
    trainer = trainer_of(
        tmp_path,
        load_best_model_at_end=True,
        public_eval_split=True,
        metric_for_best_model="accuracy",
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
    )
    trainer.train()
    best = AutoModelForImageClassification.from_pretrained(trainer.state.best_model_checkpoint)
    assert largest_difference(weights(best), weights(trainer.model)) == 0
    assert len(trainer.ledger) == 4


def test_a_timm_model_resumes_and_reloads_through_timm(tmp_path):
    import timm

    whole = trainer_of(tmp_path / "whole", as_loaded(TINY_MODELS["timm_vit"]()))
    whole.train()
    folder = tmp_path / "parts"
    trainer_of(
        folder, as_loaded(TINY_MODELS["timm_vit"]()), save_strategy="steps", save_steps=2
    ).train()
    second = trainer_of(folder, as_loaded(TINY_MODELS["timm_vit"]()))
    second.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert largest_difference(weights(whole.model), weights(second.model)) == 0
    second.save_model()
    x = Images().pixels
    loaded = timm.create_model(
        f"local-dir:{folder}",
        pretrained=True,
        img_size=8,
        embed_dim=16,
        depth=2,
        num_heads=2,
        mlp_ratio=2,
        init_values=0.5,
        reg_tokens=2,
        patch_size=4,
    )
    assert torch.equal(loaded.eval()(x), second.model.eval()(x))


def test_a_run_that_departs_from_an_interrupted_one_draws_samples_and_noise_afresh(tmp_path):
    # Two releases on one draw of samples cost more than two on independent draws.
    checkpointed(tmp_path, noise_seed=None)
    ledger = PrivacyLedger.load(tmp_path / "privacy_ledger.jsonl")
    assert len(ledger) == 4
    rows = []
    for C in (1.0, 0.5):  # the second sums something else from step 3 on
        folder = tmp_path / str(C)
        shutil.copytree(tmp_path, folder, ignore=shutil.ignore_patterns("1.0*", "0.5*"))
        shutil.copytree(keys_of(tmp_path), keys_of(folder))
        data = Recording()
        other = trainer_of(folder, train_dataset=data, noise_seed=None, per_sample_max_grad_norm=C)
        other.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        rows.append(data.asked)
        if C == 1.0:
            assert other.ledger.events == ledger.events  # the same releases: nothing to count
        else:
            assert len(other.ledger) == 6  # both draws of steps 3 and 4
            assert other.ledger.guarantee
    assert rows[0] != rows[1][: len(rows[0])]


def test_copies_of_a_folder_never_share_noise(tmp_path):
    # Two copies that go on with other settings would otherwise leave raw sums when subtracted.
    checkpointed(tmp_path / "a", noise_seed=None, max_steps=2)
    releases = []
    for name, C in (("b", 1.0), ("c", 0.9)):
        shutil.copytree(tmp_path / "a", tmp_path / name)
        trainer = trainer_of(
            tmp_path / name, kind=Spy, noise_seed=None, max_steps=3, per_sample_max_grad_norm=C
        )
        trainer.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-2"))
        releases.append(torch.cat([g.flatten() for g in trainer.releases[-1].values()]))
    std = 1.0 / 8  # sigma C / (q N)
    assert float((releases[0] - releases[1]).std()) == pytest.approx(std * 2**0.5, rel=0.1)


def test_resuming_in_another_folder_draws_samples_and_noise_afresh(tmp_path):
    checkpoint = checkpointed(tmp_path / "a", noise_seed=None)
    data, other = Recording(), Recording()
    trainer = trainer_of(tmp_path / "b", train_dataset=data, noise_seed=None)
    original = PrivacyLedger.load(tmp_path / "a" / "privacy_ledger.jsonl")
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert len(trainer.ledger) == 4
    assert trainer.ledger.events[:2] == original.events[:2]
    assert trainer.ledger.events[2].digest != original.events[2].digest
    trainer_of(tmp_path / "a", train_dataset=other, noise_seed=None).train(
        resume_from_checkpoint=str(checkpoint)
    )
    assert data.asked != other.asked


@pytest.mark.parametrize("name", ["privacy_ledger.jsonl", "privacy_state.json", "optimizer.pt"])
def test_a_checkpoint_without_its_ledger_or_state_is_refused(tmp_path, name):
    # Case 68.
    checkpoint = checkpointed(tmp_path)
    (checkpoint / name).unlink()
    with pytest.raises(ValueError, match=name):
        trainer_of(tmp_path).train(resume_from_checkpoint=str(checkpoint))


def test_a_lost_or_foreign_ledger_is_refused(tmp_path):
    checkpoint = checkpointed(tmp_path / "a")
    checkpointed(tmp_path / "b", noise_seed=8)
    ledger = tmp_path / "a" / "privacy_ledger.jsonl"
    shutil.copy(tmp_path / "b" / "privacy_ledger.jsonl", ledger)
    with pytest.raises(ValueError, match="another run"):
        trainer_of(tmp_path / "a").train(resume_from_checkpoint=str(checkpoint))
    ledger.unlink()
    with pytest.raises(ValueError, match="missing"):
        trainer_of(tmp_path / "a").train(resume_from_checkpoint=str(checkpoint))


def test_resuming_with_data_of_another_size_is_refused(tmp_path):
    checkpoint = checkpointed(tmp_path)
    with pytest.raises(ValueError, match="24 privacy units"):
        trainer_of(tmp_path, train_dataset=Images(N + 1)).train(
            resume_from_checkpoint=str(checkpoint)
        )


def test_changed_settings_on_resume_are_composed_segment_by_segment(tmp_path):
    class Stopped(DPTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            if self.state.global_step == 2:
                raise KeyboardInterrupt
            return super().training_step(*args, **kwargs)

    first = trainer_of(tmp_path, kind=Stopped, save_strategy="steps", save_steps=2)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    second = trainer_of(
        tmp_path, noise_multiplier=2.0, logical_batch_size=6, target_delta=1e-3, noise_seed=None
    )
    second.train(resume_from_checkpoint=True)
    segments = [SampledGaussian(1.0, 8 / N, 2), SampledGaussian(2.0, 6 / N, 2)]
    assert second.ledger.accounted == segments
    assert second.epsilon() == epsilon_bound(segments, delta=1e-3).epsilon
    assert not second.ledger.guarantee  # its first segment had a fixed seed
    second.save_model()
    report = json.loads((tmp_path / "privacy_report.json").read_text())
    assert [m["steps"] for m in report["mechanisms"]] == [2, 2]


def test_every_tensor_file_of_a_checkpoint_loads_without_pickled_code(tmp_path):
    # Case 71.
    checkpoint = checkpointed(tmp_path, dp_filter="doppler")
    for name in ("optimizer.pt", "scheduler.pt", "gradient_filter.pt"):
        torch.load(checkpoint / name, weights_only=True)


def test_a_new_run_in_a_used_folder_is_refused(tmp_path):
    trainer_of(tmp_path).train()
    with pytest.raises(ValueError, match="already holds a privacy ledger"):
        trainer_of(tmp_path).train()


def test_resume_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint"):
        trainer_of(tmp_path).train(resume_from_checkpoint=True)


def test_keys_are_readable_by_their_owner_only_and_beside_the_output_folder(tmp_path):
    checkpointed(tmp_path / "a")
    assert keys_of(tmp_path / "a").stat().st_mode & 0o777 == 0o700
    (file,) = keys_of(tmp_path / "a").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    trainer = trainer_of(tmp_path / "other")
    trainer.train()
    trainer.save_model()
    assert {p.name for p in (tmp_path / "other").iterdir()} == {
        "epsilon.png",
        "README.md",
        "README.local.md",
        "config.json",
        "model.safetensors",
        "privacy_ledger.jsonl",
        "privacy_report.json",
        "spectral_report.json",
    }


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(tmp_path, number):
    whole = trainer_of(tmp_path / "whole")
    whole.train()

    class Signalled(DPTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            if self.state.global_step == 1:
                os.kill(os.getpid(), number)
                os.kill(os.getpid(), number)  # a launcher may send it twice
            return super().training_step(*args, **kwargs)

    before = signal.getsignal(number)
    first = trainer_of(tmp_path / "parts", kind=Signalled)
    first.train()
    assert first.interrupted
    assert first.state.global_step == 2  # the step in which the signal came
    assert signal.getsignal(number) is before
    second = trainer_of(tmp_path / "parts")
    second.train(resume_from_checkpoint=True)
    assert not second.interrupted
    assert largest_difference(weights(whole.model), weights(second.model)) == 0


def test_a_checkpoint_is_whole_or_not_there(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path, save_strategy="steps", save_steps=2)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer.privacy_run, "save", full)
    with pytest.raises(ValueError, match=r"checkpoint-2 could not be written .*No space"):
        trainer.train()
    assert not list(tmp_path.glob("*checkpoint*"))
    again = trainer_of(tmp_path / "b", save_strategy="steps", save_steps=2, save_total_limit=1)
    again.train()
    assert [p.name for p in (tmp_path / "b").glob("*checkpoint*")] == ["checkpoint-4"]


def test_a_checkpoint_whose_replacement_was_interrupted_is_put_back(tmp_path):
    checkpoint = checkpointed(tmp_path, save_total_limit=1, max_steps=2)
    staging = tmp_path / ".incomplete-checkpoint"
    staging.mkdir()
    checkpoint.rename(staging / f"replaced-{checkpoint.name}")
    trainer = trainer_of(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4
    assert checkpoint.is_dir()


def test_rounded_matrix_products_are_refused(tmp_path):
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(ValueError, match="float32_matmul_precision='medium'"):
            trainer_of(tmp_path)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_checkpoint_of_an_earlier_pass_through_the_step_is_replaced(tmp_path):
    checkpoint = checkpointed(tmp_path)
    second = trainer_of(tmp_path, save_strategy="steps", save_steps=2)
    second.train(resume_from_checkpoint=str(checkpoint))
    third = trainer_of(tmp_path, max_steps=5)
    third.train(resume_from_checkpoint=True)
    assert third.state.global_step == 5


# ---- mixed precision ----


@pytest.mark.parametrize("mode", ENGINES)
def test_bf16_releases_are_near_those_of_float32_and_clipped_to_the_bound(tmp_path, mode):
    releases = []
    for name, settings in (("fp32", {}), ("bf16", {"bf16": True})):
        trainer = trainer_of(
            tmp_path / name,
            kind=Spy,
            max_steps=1,
            noise_multiplier=0.0,
            grad_sample_mode=mode,
            per_sample_max_grad_norm=0.5,
            **settings,
        )
        trainer.train()
        assert all(p.dtype is torch.float32 for p in trainer.model.parameters())
        assert all(g.dtype is torch.float32 for g in trainer.releases[0].values())
        releases.append(torch.cat([g.flatten() for g in trainer.releases[0].values()]))
    exact, rounded = releases
    assert float(rounded.norm()) * 8 <= 0.5 * N * (1 + 1e-5)
    assert 0 < float((exact - rounded).norm()) < 2e-2 * float(exact.norm())


@pytest.mark.parametrize("mode", ENGINES)
def test_the_loss_scale_of_fp16_changes_nothing(tmp_path, mode):
    # Cases 61, 62: unscaled before clipping.
    runs = []
    for scale in (1.0, 65536.0):
        trainer = trainer_of(
            tmp_path / str(scale), max_steps=2, loss_scale=scale, grad_sample_mode=mode
        )
        trainer.train()
        runs.append(weights(trainer.model))
    assert largest_difference(*runs) < 1e-6


def test_fp16_trains_and_an_overflowing_sample_contributes_nothing(tmp_path):
    # Case 64: the step is taken and counted; nothing is skipped.
    trainer = trainer_of(tmp_path, fp16=True, loss_scale=2.0**40)
    trainer.train()
    assert trainer.state.global_step == len(trainer.ledger) == 4
    assert trainer.accelerator.scaler is None
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_bf16_weights_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"float32|fp32"):
        trainer_of(tmp_path, tiny_vit().to(torch.bfloat16))


# ---- refusals at set-up ----


class ContrastiveTrainer(DPTrainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        logits = model(inputs["pixel_values"]).logits
        return (logits - logits.mean(0, keepdim=True)).square().mean()


class SummedTrainer(DPTrainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        logits = model(inputs["pixel_values"]).logits
        return F.cross_entropy(logits, inputs["labels"], reduction="sum")


@pytest.mark.parametrize("mode", ENGINES)
def test_a_loss_that_couples_samples_is_refused(tmp_path, mode):
    # Case 125.
    fails_to_train(
        trainer_of(tmp_path, kind=ContrastiveTrainer, grad_sample_mode=mode),
        "changes with the other samples",
    )


@pytest.mark.parametrize("mode", ENGINES)
def test_a_loss_that_is_no_mean_is_refused(tmp_path, mode):
    fails_to_train(trainer_of(tmp_path, kind=SummedTrainer, grad_sample_mode=mode), "batch of one")


def test_a_collator_never_sees_two_rows_and_so_cannot_mix_them(tmp_path):
    def mixup(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        x = torch.stack([row["pixel_values"] for row in rows])
        labels = torch.stack([row["labels"] for row in rows])
        return {"pixel_values": 0.7 * x + 0.3 * x.flip(0), "labels": labels}

    runs = []
    for name, collator in (("mixed", mixup), ("plain", None)):
        trainer = DPTrainer(
            tiny_vit(),
            arguments(tmp_path / name),
            train_dataset=Images(),
            data_collator=collator,
        )
        trainer.train()
        runs.append(weights(trainer.model))
    assert largest_difference(*runs) < 1e-6


@pytest.mark.parametrize("mode", ENGINES)
def test_dead_parameters_are_refused_by_name(tmp_path, mode):
    # Case 10.
    model = tiny_dinov2(use_mask_token=True)
    fails_to_train(trainer_of(tmp_path, model, grad_sample_mode=mode), "mask_token")


def test_the_check_moves_no_weight_and_no_generator(tmp_path):
    model = tiny_vit()
    before = weights(model)
    trainer = trainer_of(tmp_path, model)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    trainer._wrap_model(model)
    assert torch.equal(torch.rand(3), expected)
    assert largest_difference(before, weights(model)) == 0
    assert all(p.grad is None for p in model.parameters())


def test_custom_samplers_are_refused(tmp_path):
    # Case 31.
    class Weighted(DPTrainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return None

    class Inheriting(Weighted):
        pass

    for kind in (Weighted, Inheriting):
        with pytest.raises(ValueError, match="_get_train_sampler"):
            trainer_of(tmp_path, kind=kind)


def test_an_optimizer_over_other_parameters_is_refused(tmp_path):
    # Case 121.
    model = tiny_vit()
    stale = torch.optim.SGD(tiny_vit().parameters(), lr=0.1)
    trainer = trainer_of(tmp_path, model, optimizers=(stale, None))
    with pytest.raises(ValueError, match="the optimizer must hold each trainable parameter"):
        trainer.train()
    assert not (tmp_path / "privacy_ledger.jsonl").exists()


def test_an_optimizer_of_one_s_own_is_used(tmp_path):
    model = tiny_vit()
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = trainer_of(tmp_path, model, optimizers=(mine, None), kind=Spy)
    trainer.train()
    assert trainer.optimizer.optimizer is mine


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logical_batch_size": N + 1}, "logical_batch_size"),
        ({"target_delta": 1 / N}, "delta="),
    ],
)
def test_a_plan_that_cannot_be_private_is_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, **settings)


def test_a_stream_or_an_empty_split_is_refused(tmp_path):
    def stream() -> Any:
        yield from ()

    with pytest.raises(ValueError, match="streaming"):
        trainer_of(tmp_path, train_dataset=stream())
    with pytest.raises(ValueError, match="empty"):
        trainer_of(tmp_path, train_dataset=Images(0))


def test_early_stopping_on_an_undeclared_split_is_refused(tmp_path):
    with pytest.raises(ValueError, match="EarlyStoppingCallback"):
        trainer_of(tmp_path, callbacks=[EarlyStoppingCallback()])


def test_a_launcher_that_compiles_is_refused(tmp_path, monkeypatch):
    # Case 104.
    AcceleratorState._reset_state()
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    try:
        with pytest.raises(ValueError, match="dynamo_backend no"):
            trainer_of(tmp_path)
    finally:
        AcceleratorState._reset_state()


def test_no_path_and_no_patient_stands_in_the_card(tmp_path):
    secret = tmp_path / "cohort_smith"
    secret.mkdir()
    trainer = DPTrainer(
        tiny_vit(),
        arguments(tmp_path / "run"),
        train_dataset=Images(),
        base_model=str(secret),
        dataset_name=str(secret),
    )
    trainer.train()
    trainer.save_model()
    card = (tmp_path / "run" / "README.md").read_text()
    assert "cohort_smith" not in card
    assert "a local data set" in card
    assert "LABEL_0, LABEL_1, LABEL_2" in card


def test_no_step_is_wasted_on_a_learning_rate_of_zero(tmp_path):
    for schedule in ("cosine", "linear", "constant_with_warmup"):
        trainer = trainer_of(
            tmp_path / schedule, max_steps=10, warmup_steps=0.3, lr_scheduler_type=schedule
        )
        trainer.train()
        rates = [e["learning_rate"] for e in trainer.state.log_history if "learning_rate" in e]
        assert len(rates) == 10
        assert min(rates[:-1]) > 0
        assert rates[0] == pytest.approx(0.1 / 4)
        assert max(rates) == pytest.approx(0.1)


def test_searching_is_refused(tmp_path):
    trainer = trainer_of(tmp_path)
    with pytest.raises(ValueError, match="hyperparameter_search"):
        trainer.hyperparameter_search()


# ---- evaluation and misuse between steps ----


def test_evaluation_in_mid_run_changes_nothing(tmp_path):
    # Case 103.
    runs = []
    for name, settings in (("with", {"eval_strategy": "steps", "eval_steps": 1}), ("without", {})):
        trainer = trainer_of(tmp_path / name, tiny_vit(dropout=0.1), **settings)
        trainer.train()
        runs.append(weights(trainer.model))
    assert largest_difference(*runs) == 0


def test_a_backward_pass_between_steps_is_dropped(tmp_path):
    # Case 106.
    class Meddling(DPTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            self.model(torch.ones(4, 3, 8, 8)).logits.sum().backward()
            return super().training_step(*args, **kwargs)

    runs = []
    for kind in (DPTrainer, Meddling):
        trainer = trainer_of(tmp_path / kind.__name__, kind=kind)
        trainer.train()
        runs.append(weights(trainer.model))
    assert largest_difference(*runs) == 0


def test_freezing_in_mid_run_is_refused(tmp_path):
    # Case 7.
    class Freezing(DPTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            if self.state.global_step == 2:
                self.model.vit.embeddings.cls_token.requires_grad_(False)
            return super().training_step(*args, **kwargs)

    with pytest.raises(ValueError, match=r"not trainable: vit\.embeddings\.cls_token"):
        trainer_of(tmp_path, kind=Freezing).train()


def test_plain_python_objects_survive_training(tmp_path):
    # Case 74: the model keeps no hooks that break a copy of its state.
    trainer = trainer_of(tmp_path)
    trainer.train()
    state = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    fresh = tiny_vit(seed=3)
    fresh.load_state_dict(state)
    x = Images().pixels
    assert torch.equal(fresh.eval()(x).logits, trainer.model.eval()(x).logits)

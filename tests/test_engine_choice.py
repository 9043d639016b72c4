"""What a step will need is foretold from two small ones, and the engine chosen by it."""

from __future__ import annotations

import copy
import gc
import logging

import pytest
import torch
from support import Noise, tiny_vit
from torch.nn import functional as F
from transformers import TrainerCallback, ViTConfig, ViTForImageClassification

from hf_dpmuon import DPTrainer, DPTrainingArguments
from hf_dpmuon.grad_sample import (
    BookKeepingGradSampleModule,
    GhostGradSampleModule,
    free_bytes,
    memory,
    peak_bytes,
)
from hf_dpmuon.training.trial import Trial, build_engine


def test_the_peak_is_that_of_what_lives_together():
    def work() -> torch.Tensor:
        first = torch.zeros(1000)  # 4000 bytes
        view = first[10:].view(-1, 10)  # none of its own
        second = first + 1  # 8000 together
        del first, view
        third = torch.cat([second, second])  # 12000 together
        del second
        return third.add_(1)  # in place

    assert peak_bytes(work) == 12_000


def test_tensors_from_before_do_not_count():
    held = torch.zeros(10_000)
    assert peak_bytes(lambda: held.mul_(2)) == 0


@pytest.mark.parametrize("engine_class", [BookKeepingGradSampleModule, GhostGradSampleModule])
def test_a_step_s_peak_grows_by_the_same_with_each_row(engine_class):
    """So that two small batches tell of a large one."""
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=128,
        image_size=32,
        patch_size=4,
        num_labels=3,
    )
    engine = engine_class(ViTForImageClassification(config).train())
    sums = {name: torch.zeros_like(p) for name, p in engine._module.named_parameters()}

    def step(size: int) -> None:
        images, labels = torch.randn(size, 3, 32, 32), torch.zeros(size, dtype=torch.int64)
        F.cross_entropy(engine(images).logits, labels, reduction="sum").backward()
        norms = engine.per_unit_norms()
        engine.add_weighted_sum({n: torch.ones_like(u) for n, u in norms.items()}, into=sums)
        engine.discard()
        gc.collect()

    two, four, sixteen = (peak_bytes(lambda size=size: step(size)) for size in (2, 4, 16))
    assert two + (four - two) / 2 * 14 == pytest.approx(sixteen, rel=0.05)


def test_the_limit_of_a_container_counts(tmp_path, monkeypatch):
    free = free_bytes(torch.device("cpu"))
    assert free > 0
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    (tmp_path / "memory.current").write_text("600\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert free_bytes(torch.device("cpu")) == 400
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(torch.device("cpu")) > 400


@pytest.fixture
def built(monkeypatch) -> list[type]:
    """The kinds of engine that trainers train with."""
    kinds = []

    def noted(*args, **settings):
        engine = build_engine(*args, **settings)
        kinds.append(type(engine))
        return engine

    monkeypatch.setattr("hf_dpmuon.trainer.build_engine", noted)
    return kinds


def trained_with(folder, mode: str, model=None, callbacks=(), **settings) -> DPTrainer:
    args = DPTrainingArguments(
        str(folder),
        **{
            "grad_sample_mode": mode,
            "noise_multiplier": 1.0,
            "logical_batch_size": 8,
            "per_device_train_batch_size": 4,
            "max_steps": 2,
            "noise_seed": 1,
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "no",
            **settings,
        },
    )
    trainer = DPTrainer(model or tiny_vit(), args, train_dataset=Noise(), callbacks=list(callbacks))
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("free", "chosen"), [(10**12, BookKeepingGradSampleModule), (10**5, GhostGradSampleModule)]
)
def test_auto_takes_the_fast_engine_where_it_fits_and_trains_the_same(
    tmp_path, monkeypatch, caplog, built, free, chosen
):
    monkeypatch.setattr("hf_dpmuon.training.trial.free_bytes", lambda device: free)
    with caplog.at_level(logging.INFO, "hf_dpmuon.training.trial"):
        auto = trained_with(tmp_path / "auto", "auto")
    assert built == [chosen]
    assert "bookkeeping needs about" in caplog.text
    named = trained_with(tmp_path / "named", "bookkeeping")
    for ours, theirs in zip(auto.model.parameters(), named.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_what_is_needed_grows_with_the_physical_batch(tmp_path, monkeypatch):
    needed = []
    monkeypatch.setattr("hf_dpmuon.training.trial.free_bytes", lambda device: 0)
    estimate = Trial.bytes_of_a_step

    def noted(self, engine) -> int:
        needed.append(estimate(self, engine))
        return needed[-1]

    monkeypatch.setattr(Trial, "bytes_of_a_step", noted)
    for size in (2, 4, 8):
        trained_with(tmp_path / str(size), "auto", per_device_train_batch_size=size, max_steps=1)
    small, middle, large = needed
    assert large - middle == pytest.approx(2 * (middle - small), rel=1e-3)


def test_two_evaluations_a_step_leave_no_choice(tmp_path, monkeypatch, built):
    monkeypatch.setattr("hf_dpmuon.training.trial.free_bytes", lambda device: 0)
    trained_with(tmp_path, "auto", dp_filter="disk", disk_gamma=0.9)
    assert built == [BookKeepingGradSampleModule]


@pytest.mark.parametrize("mode", ["auto", "bookkeeping", "ghost", "hooks"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_k244_no_batch_of_a_run_has_more_rows_than_the_physical_one(tmp_path, mode, size):
    """Case 244: neither in the check before a run, nor in the estimate, nor in training."""
    seen = []
    model = tiny_vit()
    model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    trained_with(tmp_path, mode, model=model, per_device_train_batch_size=size, max_steps=1)
    assert seen
    assert max(seen) == size


@pytest.mark.parametrize("mode", ["bookkeeping", "ghost", "hooks"])
@pytest.mark.parametrize("fails", [False, True])
def test_k257_the_engine_leaves_the_model_with_the_end_of_training(tmp_path, mode, fails):
    """Case 257: also after an error; the model is saved, copied and trained again as any other."""
    model = tiny_vit()
    before = {name: set(vars(module)) for name, module in model.named_modules() if name}
    if fails:
        with pytest.raises(RuntimeError, match="stop here"):
            trained_with(tmp_path / "a", mode, model=model, callbacks=[Fails()])
    else:
        trained_with(tmp_path / "a", mode, model=model)
    assert {name: set(vars(module)) for name, module in model.named_modules() if name} == before
    assert not any(
        hooks
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    )
    for p in model.parameters():
        assert p.grad is None
        assert not getattr(p, "grad_sample", None)
    copied = copy.deepcopy(model)
    torch.save(copied, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(loaded.eval()(images).logits, model.eval()(images).logits)
    trained_with(tmp_path / "b", "bookkeeping", model=model)


class Fails(TrainerCallback):
    """Stops a run in mid-step."""

    def on_step_end(self, *_, **__):
        raise RuntimeError("stop here")

"""Releases alone move weights; public facts decide on replays; the engine leaves the model."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    Images,
    Spy,
    arguments,
    checkpointed,
    keys_of,
    largest_difference,
    tiny_vit,
    trainer_of,
    weights,
)
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import TrainerCallback
from transformers.optimization import GreedyLR

from hf_dpmuon.ledger import PrivacyLedger
from hf_dpmuon.sampling import PoissonSampler
from hf_dpmuon.trainer import DPTrainer


class Before(TrainerCallback):
    """Does something between the release and the optimizer's step."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.act(kwargs["model"], kwargs["optimizer"])


def raw_backward(model: torch.nn.Module, _: Any) -> None:
    row = Images()[0]
    model(row["pixel_values"][None]).logits.sum().backward()


def raw_gradient(model: torch.nn.Module, _: Any) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)


def raw_in_place(model: torch.nn.Module, _: Any) -> None:
    for p in model.parameters():
        p.grad.add_(5.0)


def raw_away(model: torch.nn.Module, _: Any) -> None:
    model.zero_grad()


@pytest.mark.parametrize("act", [raw_backward, raw_gradient, raw_in_place, raw_away])
def test_k207_nothing_added_to_a_gradient_after_its_release_moves_a_weight(tmp_path, act):
    plain = trainer_of(tmp_path / "plain")
    plain.train()
    meddled = trainer_of(tmp_path / "meddled", callbacks=[Before(act)])
    meddled.train()
    assert largest_difference(weights(plain.model), weights(meddled.model)) == 0


@pytest.mark.parametrize("when", ["on_train_begin", "on_step_begin", "on_pre_optimizer_step"])
def test_k207_another_optimizer_steps_on_the_release_too(tmp_path, when):
    """A callback puts an optimizer of its own in the place of the run's, and goes backward."""

    def trained(folder: Path, act: Any) -> dict[str, torch.Tensor]:
        class Swaps(Before):
            def swap(self, *_: Any, **__: Any) -> None:
                if self.trainer.state.global_step == 0:
                    own = torch.optim.SGD(self.trainer.model.parameters(), lr=0.1)
                    self.trainer.optimizer = self.trainer.accelerator.prepare(own)

        callback = Swaps(act)
        if when == "on_pre_optimizer_step":
            first = callback.act

            def both(model: torch.nn.Module, optimizer: Any) -> None:
                callback.swap()
                first(model, optimizer)

            callback.act = both
        else:
            setattr(callback, when, callback.swap)
        callback.trainer = trainer_of(folder, callbacks=[callback])
        callback.trainer.train()
        return weights(callback.trainer.model)

    plain = trained(tmp_path / "plain", lambda *_: None)
    meddled = trained(tmp_path / "meddled", raw_backward)
    assert largest_difference(plain, meddled) == 0


def test_k207_an_optimizer_of_its_own_steps_once_a_release(tmp_path):
    def steps(model: torch.nn.Module, _: Any) -> None:
        own = torch.optim.SGD(model.parameters(), lr=1.0)
        own.step()

    trainer = trainer_of(tmp_path, callbacks=[Before(steps)])
    with pytest.raises(RuntimeError, match="without a private gradient"):
        trainer.train()


def test_optimizers_of_other_models_step_as_ever(tmp_path):
    other = torch.nn.Linear(2, 2)
    before = weights(other)

    def steps(*_: Any) -> None:
        other(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(other.parameters(), lr=1.0).step()

    trainer_of(tmp_path, callbacks=[Before(steps)]).train()
    assert largest_difference(before, weights(other)) > 0


def test_a_callback_may_edit_the_release_itself(tmp_path):
    def nothing(*_: Any) -> None:
        for gradient in trainer.private_gradients.values():
            gradient.zero_()

    trainer = trainer_of(tmp_path, callbacks=[Before(nothing)], dp_optimizer="sgd")
    before = weights(trainer.model)
    trainer.train()
    assert trainer.private_gradients is None
    assert largest_difference(before, weights(trainer.model)) == 0
    assert len(trainer.ledger) == 4


class NoStep(DPTrainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        for physical in inputs:
            model(physical.inputs["pixel_values"]).logits.sum().backward()
        return torch.tensor(0.0)


class TwoSteps(DPTrainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        self.optimizer.step()
        return loss


class WithClosure(DPTrainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        self.optimizer.step(lambda: raw_backward(self.model, None))
        return loss


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (NoStep, "without a private gradient"),
        (TwoSteps, "without a private gradient"),
        (WithClosure, "closure"),
    ],
)
def test_k208_a_step_that_is_no_release_stops_the_run(tmp_path, kind, message):
    trainer = trainer_of(tmp_path, kind=kind)
    before = weights(trainer.model)
    with pytest.raises(RuntimeError, match=message):
        trainer.train()
    assert len(trainer.ledger) <= 1
    if kind is NoStep:
        assert largest_difference(before, weights(trainer.model)) == 0


@pytest.mark.parametrize("scheduler", [ReduceLROnPlateau, GreedyLR])
def test_k209_a_scheduler_that_an_undeclared_split_steers_is_refused(tmp_path, scheduler):
    model = tiny_vit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=f"{scheduler.__name__} lets the evaluation split"):
        trainer_of(tmp_path, model, optimizers=(optimizer, scheduler(optimizer)))
    trainer_of(
        tmp_path, model, optimizers=(optimizer, scheduler(optimizer)), public_eval_split=True
    )


def test_k217_no_log_says_how_long_a_step_took(tmp_path):
    trainer = trainer_of(tmp_path)
    output = trainer.train()
    said = {key for log in trainer.state.log_history for key in log} | output.metrics.keys()
    assert {"epsilon", "noise_draws", "learning_rate"} <= said
    assert not {key for key in said if "runtime" in key or "per_second" in key or "flos" in key}


# ---- replays ----

SECRET = {"noise_seed": None, "max_steps": 6}


def blank(real: bool) -> Images:
    """Blank rows, of which one may be real."""
    data = Images()
    data.pixels = torch.zeros_like(data.pixels)
    if real:
        data.pixels[3] = Images().pixels[3]
    return data


def resumed(folder: Path, data: Images, **changed: Any) -> DPTrainer:
    trainer = trainer_of(folder, train_dataset=data, **{**SECRET, **changed})
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return trainer


CHANGES = [
    {},
    {"per_device_train_batch_size": 1},
    {"grad_sample_mode": "ghost"},
    {"grad_sample_mode": "hooks"},
    {"per_sample_max_grad_norm": 0.5},
    {"clipping": "automatic"},
    {"dataloader_num_workers": 1},
]


@pytest.mark.parametrize("changed", CHANGES, ids=str)
def test_k203_steps_and_epsilon_of_a_resumed_run_do_not_depend_on_a_row(tmp_path, changed):
    spent = []
    for real in (False, True):
        folder = tmp_path / str(real)
        trainer_of(
            folder, train_dataset=blank(real), save_strategy="steps", save_steps=2, **SECRET
        ).train()
        trainer = resumed(folder, blank(real), **changed)
        spent.append((len(trainer.ledger), trainer.epsilon()))
    assert spent[0] == spent[1]
    repeats = changed.keys() <= {"dataloader_num_workers"}  # which changes no sum
    assert spent[0][0] == (6 if repeats else 10)


@pytest.mark.parametrize("data", ["of one class", "of all"])
def test_k203_settings_of_the_trainer_are_public_facts(tmp_path, data):
    """Class weights that only some rows notice decide for all rows alike."""
    rows = Images()
    if data == "of one class":
        rows.labels = torch.zeros_like(rows.labels)
    settings = {"train_dataset": rows, "save_strategy": "steps", "save_steps": 2, **SECRET}
    trainer_of(tmp_path, **settings).train()
    again = DPTrainer(
        tiny_vit(),
        arguments(tmp_path, **{k: v for k, v in settings.items() if k != "train_dataset"}),
        train_dataset=rows,
        class_weights=[1.0, 3.0, 1.0],
    )
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(again.ledger) == 10


def test_a_replay_that_differs_under_equal_facts_is_an_error_before_its_release(tmp_path):
    trainer_of(tmp_path, save_strategy="steps", save_steps=2, **SECRET).train()
    before = PrivacyLedger.load(tmp_path / "privacy_ledger.jsonl").events
    trainer = trainer_of(tmp_path, train_dataset=blank(real=True), **SECRET)
    with pytest.raises(ValueError, match=r"training data.*delete .*secrets"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(p.grad is None for p in trainer.model.parameters())
    assert PrivacyLedger.load(tmp_path / "privacy_ledger.jsonl").events == before
    shutil.rmtree(keys_of(tmp_path))
    trainer = resumed(tmp_path, blank(real=True))
    assert len(trainer.ledger) == 10


def test_a_device_that_does_not_repeat_itself_draws_afresh(tmp_path, monkeypatch):
    trainer_of(tmp_path, save_strategy="steps", save_steps=2, **SECRET).train()
    monkeypatch.setattr("hf_dpmuon.trainer.is_repeatable", lambda args: False)
    assert len(resumed(tmp_path, Images()).ledger) == 10


def test_a_start_that_drew_afresh_is_itself_repeated(tmp_path):
    trainer_of(tmp_path, save_strategy="steps", save_steps=2, **SECRET).train()
    shutil.rmtree(keys_of(tmp_path))

    class Killed(DPTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 4:
                raise KeyboardInterrupt
            return super().training_step(*args, **kwargs)

    killed = trainer_of(tmp_path, kind=Killed, **SECRET)
    with pytest.raises(KeyboardInterrupt):
        killed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [event.step for event in killed.ledger.events] == [1, 2, 3, 4, 5, 6, 3, 4]
    last = resumed(tmp_path, Images())
    assert [event.step for event in last.ledger.events] == [1, 2, 3, 4, 5, 6, 3, 4, 5, 6]


# ---- secrets ----


def test_sampling_does_not_come_from_the_public_seed(tmp_path, monkeypatch):
    """Two runs with one ``seed`` draw other rows; a mutant that samples from it fails here."""
    drawn: list[list[int]] = []
    draw = PoissonSampler.draw

    def noted(self: PoissonSampler, generator: Any) -> Any:
        rows = draw(self, generator)
        drawn[-1] += rows.tolist()
        return rows

    monkeypatch.setattr(PoissonSampler, "draw", noted)
    for name in "ab":
        drawn.append([])
        trainer_of(tmp_path / name, seed=3, noise_seed=None, max_steps=6).train()
    assert drawn[0] != drawn[1]
    drawn.clear()
    for name, seed in (("c", 1), ("d", 2)):  # with a fixed noise seed, the public one is nothing
        drawn.append([])
        trainer_of(tmp_path / name, seed=seed, max_steps=6).train()
    assert drawn[0] == drawn[1]


def test_steps_drawn_afresh_have_another_key_than_before(tmp_path):
    trainer_of(tmp_path / "a", save_strategy="steps", save_steps=2, **SECRET).train()
    again = resumed(tmp_path / "a", Images(), per_sample_max_grad_norm=0.5)
    events = again.ledger.events
    by_step = [event.step for event in events]
    assert by_step == [1, 2, 3, 4, 5, 6, 3, 4, 5, 6]
    starts = json.loads((keys_of(tmp_path / "a") / "keys.json").read_text())["starts"]
    keys = [starts[again.ledger.start_of(draw)]["key"] for draw in (2, 6)]
    assert keys[0] != keys[1]
    assert bytes.fromhex(keys[1]) == again.privacy_run.key_of(7)


def test_k204_copies_of_a_folder_share_no_draw_beyond_the_ledger(tmp_path):
    """Case 204: with the keys copied, too, each copy goes on by a key of its own."""
    checkpointed(tmp_path / "a", noise_seed=None, max_steps=2)
    digests, keys = [], []
    for name in "bcd":
        shutil.copytree(tmp_path / "a", tmp_path / name)
        shutil.copytree(keys_of(tmp_path / "a"), keys_of(tmp_path / name))
        trainer = trainer_of(tmp_path / name, kind=Spy, noise_seed=None, max_steps=6)
        trainer.train(resume_from_checkpoint=True)
        digests.append([event.digest for event in trainer.ledger.events[2:]])
        starts = json.loads((keys_of(tmp_path / name) / "keys.json").read_text())["starts"]
        keys.append({start["key"] for start in starts.values()})
    assert len({digest for of_copy in digests for digest in of_copy}) == 12
    shared = set.intersection(*keys)
    assert len(shared) == 1  # that of the steps that all of them repeat
    assert len(set.union(*keys)) == 4


def test_keys_are_not_kept_behind_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    keys_of(tmp_path / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a link"):
        trainer_of(tmp_path / "a").train()


def test_keys_of_another_run_do_not_lie_in_an_output_folder(tmp_path):
    with pytest.raises(ValueError, match=r"must not end in .secrets"):
        trainer_of(tmp_path / "run.secrets")


def test_damaged_keys_are_named(tmp_path):
    checkpointed(tmp_path / "a", noise_seed=None)
    (keys_of(tmp_path / "a") / "keys.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged; delete"):
        trainer_of(tmp_path / "a", noise_seed=None).train(resume_from_checkpoint=True)


def test_keys_of_a_run_that_was_deleted_are_dropped(tmp_path):
    checkpointed(tmp_path / "a", noise_seed=None)
    shutil.rmtree(tmp_path / "a")
    trainer_of(tmp_path / "a", noise_seed=None).train()
    starts = json.loads((keys_of(tmp_path / "a") / "keys.json").read_text())["starts"]
    assert len(starts) == 1


# ---- the trainable set, and the end of training ----


@pytest.mark.parametrize("filter", ["none", "doppler", "disk"])
def test_k235_k251_the_trainable_set_is_that_of_the_start_of_training(tmp_path, filter):
    model = tiny_vit()
    model.vit.requires_grad_(False)
    trainer = trainer_of(tmp_path, model, dp_filter=filter)
    model.vit.layers.requires_grad_(True)  # unfrozen after the trainer was built
    model.vit.embeddings.cls_token.requires_grad_(False)
    model.classifier = torch.nn.Linear(16, 3)  # a new head
    before = weights(model)
    trainer.train()
    after = weights(model)
    for name, p in model.named_parameters():
        moved = not torch.equal(before[name], after[name])
        assert moved == p.requires_grad, name
    assert len(trainer.ledger) == 4


def failing(model: torch.nn.Module, _: Any) -> None:
    raise OSError("broken")


@pytest.mark.parametrize("ends_badly", [False, True])
def test_k257_the_engine_leaves_the_model_when_training_ends(tmp_path, ends_badly):
    callbacks = [Before(failing)] if ends_badly else []
    trainer = trainer_of(tmp_path / "a", callbacks=callbacks)
    if ends_badly:
        with pytest.raises(OSError, match="broken"):
            trainer.train()
    else:
        trainer.train()
    model = trainer.model
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._backward_hooks
        assert not module._forward_pre_hooks
    for p in model.parameters():
        assert not hasattr(p, "grad_sample")
        assert not p._backward_hooks
    assert largest_difference(weights(copy.deepcopy(model)), weights(model)) == 0
    pickle.loads(pickle.dumps(model))
    torch.save(model, tmp_path / "model.pt")
    second = trainer_of(tmp_path / "b", model)
    second.train()
    assert second.state.global_step == 4
    assert second.ledger.extends(trainer.ledger)  # since the model is the same

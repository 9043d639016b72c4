"""Rates, batch and length where none are set: laws of the rule, and oracles by simulation."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from statistics import mean

import pytest
import torch
from support import Images, arguments, tiny_vit, trainer_of
from torch import nn

from hf_dpmuon.default_rates import Course
from hf_dpmuon.known_noise import KnownNoise, ema, heavy_ball
from hf_dpmuon.methods import Method, create_optimizer
from hf_dpmuon.plan import FEWEST_STEPS, default_batch_size, default_steps, num_steps

COURSE = Course([(32, 64)] * 9, steps=60, max_grad_norm=1.0, noise=KnownNoise(0.05))


class OneLayer(nn.Module):
    """A matrix and a bias, as a head is trained alone."""

    def __init__(self, rows: int = 48, columns: int = 96) -> None:
        super().__init__()
        self.layer = nn.Linear(columns, rows)


def rates_of(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """By rule."""
    return {group["rule"]: group["lr"] for group in optimizer.param_groups}


# ---- The rule ----


@pytest.mark.parametrize(("steps", "share"), [(30, 1), (100, 1), (400, 1 / 2), (10_000, 1 / 10)])
def test_a_spectral_step_is_shorter_only_in_runs_of_more_than_100_steps(steps, share):
    rate = replace(COURSE, steps=steps).spectral_rate
    assert rate == pytest.approx(share / 3 / math.sqrt(9), rel=5e-3)


@pytest.mark.parametrize("matrices", [5, 26, 74])
def test_the_squared_steps_of_all_matrices_add_up_to_the_same(matrices):
    rate = replace(COURSE, shapes=[(32, 64)] * matrices).spectral_rate
    assert matrices * rate**2 == pytest.approx(1 / 9, rel=1e-2)
    assert replace(COURSE, shapes=[(32, 64)]).spectral_rate == 0.15  # one alone takes less


def test_a_rate_in_units_of_the_gradient_falls_with_the_noise_and_is_held_by_the_bound():
    momentum = heavy_ball(0.9)

    def rate(std: float, bound: float = 1.0) -> float:
        course = replace(COURSE, noise=KnownNoise(std), max_grad_norm=bound)
        return course.gradient_rate(momentum)

    assert rate(0.1) == pytest.approx(rate(0.05) / 2, rel=1e-2)
    assert rate(0.0) == rate(1e-9) > rate(0.05)
    assert rate(0.0, bound=0.5) == pytest.approx(2 * rate(0.0), rel=1e-2)
    # A run in other units of the gradient is the same run.
    assert rate(0.5, bound=10.0) == pytest.approx(rate(0.05) / 10, rel=1e-2)


def test_momentum_does_not_change_how_far_equal_gradients_lead_at_the_bound():
    quiet = replace(COURSE, noise=KnownNoise(0.0), steps=1000)
    assert quiet.gradient_rate(heavy_ball(0.0)) == pytest.approx(
        10 * quiet.gradient_rate(heavy_ball(0.9)), rel=1e-2
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"dp_optimizer": "muon"},
        {"dp_optimizer": "muon", "spectral_map": "svd"},
        {"dp_optimizer": "muon_s"},
        {"dp_optimizer": "sgd"},
        {"dp_optimizer": "sgd", "sgd_momentum": 0.0},
        {"dp_optimizer": "adam"},
        {"dp_optimizer": "sgd", "dp_filter": "doppler"},
        {"dp_optimizer": "adam", "dp_filter": "disk"},
    ],
    ids=str,
)
def test_a_step_of_pure_noise_moves_a_matrix_by_the_stated_spectral_norm(settings):
    """The oracle is the optimizer itself, fed with noise behind its filter."""
    torch.manual_seed(0)
    model = OneLayer()
    method = Method(**settings)
    parameters = list(model.parameters())
    filter = method.filter(parameters)
    noise = KnownNoise(0.05, filter.response)
    optimizer = method.optimizer(model, noise, steps=80, max_grad_norm=1e-6)
    moved = []
    for step in range(80):
        before = model.layer.weight.detach().clone()
        released = [0.05 * torch.randn_like(p) for p in parameters]
        for p, gradient in zip(parameters, filter.smooth(released), strict=True):
            p.grad = gradient
        optimizer.step()
        if step >= 40:
            moved.append(float(torch.linalg.matrix_norm(model.layer.weight.detach() - before, 2)))
    assert mean(moved) == pytest.approx(0.15, rel=0.2)


def test_frozen_parameters_and_tokens_do_not_count_as_matrices():
    noise = KnownNoise(0.05)
    whole = rates_of(create_optimizer(tiny_vit(), noise=noise, steps=60))["muon"]
    matrices = 2 * 6 + 2  # query, key, value, output, and two of the perceptron; patches and head
    assert whole == pytest.approx(1 / 3 / math.sqrt(matrices), rel=5e-3)
    head_only = tiny_vit()
    for name, p in head_only.named_parameters():
        p.requires_grad_(name.startswith("classifier"))
    assert rates_of(create_optimizer(head_only, noise=noise, steps=60))["muon"] == 0.15


@pytest.mark.parametrize("dp_optimizer", ["sgd", "adam"])
def test_vectors_alone_have_a_default_rate_too(dp_optimizer):
    model = tiny_vit()
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    optimizer = create_optimizer(model, dp_optimizer=dp_optimizer, noise=KnownNoise(0.05), steps=60)
    assert 0 < rates_of(optimizer)[dp_optimizer] < 1


# ---- In a run ----


UNSET = {"learning_rate": None, "vector_learning_rate": None}


def test_default_rates_are_the_rule_s_and_do_not_depend_on_the_rows(tmp_path):
    bright = Images()
    bright.pixels *= 100
    found = []
    for number, rows in enumerate((Images(), Images(seed=5), bright)):
        trainer = trainer_of(tmp_path / str(number), train_dataset=rows, **UNSET)
        found.append(rates_of(trainer.create_optimizer()))
    assert found[0] == found[1] == found[2]
    plan = trainer.plan
    noise = KnownNoise(plan.noise_std(1.0))
    assert found[0] == rates_of(create_optimizer(tiny_vit(), noise=noise, steps=plan.steps))


@pytest.mark.parametrize(
    ("name", "rule"), [("learning_rate", "muon"), ("vector_learning_rate", "sgd")]
)
def test_a_rate_that_is_set_stays_and_the_other_is_the_default(tmp_path, name, rule):
    default, mixed = (
        rates_of(trainer_of(tmp_path / str(i), **{**UNSET, **given}).create_optimizer())
        for i, given in enumerate(({}, {name: 0.017}))
    )
    assert mixed == {**default, rule: 0.017}


def test_default_rates_are_in_the_routing_and_in_the_card(tmp_path, caplog):
    trainer = trainer_of(tmp_path, **UNSET)
    with caplog.at_level(logging.INFO, logger="hf_dpmuon"):
        rates = rates_of(trainer.create_optimizer())
    recipe = trainer.card_facts()["recipe"]
    assert recipe["learning rate of muon"] == f"{rates['muon']:g}"
    assert recipe["learning rate of sgd"] == f"{rates['sgd']:g}"
    assert all(f"{rate:g}" in caplog.text for rate in rates.values())


@pytest.mark.parametrize("given", [{}, {"noise": KnownNoise(0.1)}, {"steps": 9}])
@pytest.mark.parametrize("settings", [{}, {"learning_rate": 0.1}, {"dp_optimizer": "adam"}])
def test_a_default_rate_without_the_facts_it_follows_from_is_refused(given, settings):
    with pytest.raises(ValueError, match=r"learning_rate is unset, .* noise=KnownNoise"):
        create_optimizer(tiny_vit(), **given, **settings)


# ---- Batch and length ----


@pytest.mark.parametrize("num_units", [1, 30, 3000, 10**6])
@pytest.mark.parametrize("epsilon", [0.1, 2.0, 8.0, 100.0, None])
def test_a_run_without_a_length_never_has_fewer_steps_than_the_rates_need(num_units, epsilon):
    batch = default_batch_size(num_units, epsilon)
    assert 1 <= batch <= num_units
    assert default_steps(batch / num_units, epsilon) >= 100 > FEWEST_STEPS
    for other in {1, num_units // 2, num_units} - {0}:
        assert default_steps(other / num_units, epsilon) >= 100


def test_a_smaller_batch_gets_more_steps_and_not_fewer_passes():
    batch = default_batch_size(3000, 8.0)
    small = batch // 10
    epochs = [default_steps(b / 3000, 8.0) * b / 3000 for b in (batch, small)]
    assert epochs[0] == pytest.approx(epochs[1], rel=1e-2)


@pytest.mark.parametrize("epochs", [1, 3, 10])
def test_few_passes_are_cut_into_small_steps(epochs):
    batch = default_batch_size(3000, 8.0, epochs)
    assert num_steps(num_epochs=epochs, sample_rate=batch / 3000) >= 98


def test_batch_and_length_of_a_run_follow_from_units_and_budget(tmp_path, caplog):
    unset = {"logical_batch_size": None, "max_steps": -1}
    with caplog.at_level(logging.INFO, logger="hf_dpmuon"):
        trainer = trainer_of(tmp_path, **unset, noise_multiplier=None, target_epsilon=8.0)
    plan = trainer.plan
    assert plan.logical_batch_size == default_batch_size(plan.num_units, 8.0)
    assert (trainer.args.logical_batch_size, trainer.args.max_steps) == (
        plan.logical_batch_size,
        plan.steps,
    )
    assert f"{plan.steps} steps of {plan.logical_batch_size} expected units" in caplog.text


def test_the_arguments_of_one_run_do_not_settle_the_next(tmp_path):
    from hf_dpmuon.trainer import DPTrainer

    args = arguments(tmp_path, logical_batch_size=None, max_steps=-1)
    sizes = [
        DPTrainer(tiny_vit(), args, train_dataset=Images(size)).plan.logical_batch_size
        for size in (20, 40)
    ]
    assert sizes[1] == 2 * sizes[0]


def test_steps_too_few_for_the_default_rates_are_said_at_the_start(tmp_path, caplog):
    trainer_of(tmp_path / "set", max_steps=9)
    trainer_of(tmp_path / "long", max_steps=FEWEST_STEPS, **UNSET)
    assert "fewer than" not in caplog.text
    trainer_of(tmp_path / "short", max_steps=9, **UNSET)
    assert "9 steps are fewer than the 30" in caplog.text


def test_a_momentum_that_starts_at_zero_is_what_adam_divides_by():
    """Three steps: the bias-corrected first moment of noise, by its definition."""
    weights = torch.tensor([0.1 * 0.9**k for k in range(3)], dtype=torch.float64)
    share = float(weights.square().sum().sqrt() / weights.sum())
    course = replace(COURSE, steps=3)
    width = math.sqrt(32) + math.sqrt(64)
    expected = course.spectral_rate / (share * width)
    assert course.adam_rate(0.9, correct_for_noise=False) == pytest.approx(expected, rel=5e-3)
    assert ema(0.9).apply([1.0] * 3)[-1] == pytest.approx(float(weights.sum()))

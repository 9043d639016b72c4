"""Every method end to end: full steps against plain code, resuming, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from support import (
    Images,
    N,
    arguments,
    fixed_draw,
    fixed_noise,
    largest_difference,
    tiny_vit,
    trainer_of,
    weights,
)
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dpmuon.arguments import parse_arguments
from hf_dpmuon.mechanism import GaussianMechanism
from hf_dpmuon.spectral import newton_schulz, spectral_norm

METHODS = {  # the paper's eight: dp_optimizer, dp_filter
    "dpsgd": ("sgd", "none"),
    "dpadam": ("adam", "none"),
    "dpmuon": ("muon", "none"),
    "dpmuon_s": ("muon_s", "none"),
    "disk_sgd": ("sgd", "disk"),
    "doppler_sgd": ("sgd", "doppler"),
    "disk_muon": ("muon", "disk"),
    "doppler_muon": ("muon", "doppler"),
}
BATCH = 8
KAPPA = 0.6


def clipped_sum(
    model: nn.Module, rows: np.ndarray, points: list[tuple[float, list[Tensor]]], bound: float
) -> list[Tensor]:
    """One sample and one point at a time: the sum of the clipped combinations."""
    data, parameters = Images(), list(model.parameters())
    own = [p.detach().clone() for p in parameters]
    total = [torch.zeros_like(p) for p in parameters]
    for row in rows:
        example = data[int(row)]
        combined = [torch.zeros_like(p) for p in parameters]
        for coefficient, x in points:
            with torch.no_grad():
                for p, value in zip(parameters, x, strict=True):
                    p.copy_(value)
            model.zero_grad()
            logits = model(example["pixel_values"][None]).logits
            F.cross_entropy(logits, example["labels"][None]).backward()
            for sum_, p in zip(combined, parameters, strict=True):
                sum_ += coefficient * p.grad
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in combined))
        for sum_, g in zip(total, combined, strict=True):
            sum_ += g * min(1.0, bound / norm)
    with torch.no_grad():
        for p, value in zip(parameters, own, strict=True):
            p.copy_(value)
    return total


def is_matrix(name: str, p: Tensor) -> bool:
    return p.ndim >= 2 and "cls_token" not in name and "position_embeddings" not in name


def step_by_hand(
    model: nn.Module, dp_optimizer: str, lr: float, sgd_momentum: float
) -> Callable[[int, list], None]:
    """The optimizer's step in plain code, or torch's own."""
    named = dict(model.named_parameters())
    buffers = {name: torch.zeros_like(p) for name, p in named.items()}
    if dp_optimizer == "adam":
        adam = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)

    def step(t: int, gradients: list[Tensor]) -> None:
        if dp_optimizer == "adam":
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.grad = g
            adam.step()
            return
        for (name, p), g in zip(named.items(), gradients, strict=True):
            if is_matrix(name, p) and dp_optimizer == "muon":
                buffers[name] = 0.95 * buffers[name] + 0.05 * g
                M = (0.05 * g + 0.95 * buffers[name]).flatten(1)
                factor = math.sqrt(min(4, max(1, M.shape[0] / M.shape[1])))
                update = factor * newton_schulz(M)
            elif is_matrix(name, p) and dp_optimizer == "muon_s":
                buffers[name] = 0.9 * buffers[name] + g
                M = buffers[name].flatten(1)
                factor = math.sqrt(max(1, M.shape[0] / M.shape[1]))
                update = factor * spectral_norm(M) * newton_schulz(M)
            else:
                update = buffers[name] = sgd_momentum * buffers[name] + g
            with torch.no_grad():
                p -= lr * update.view_as(p)

    return step


def train_by_hand(
    model: nn.Module,
    *,
    dp_optimizer: str,
    dp_filter: str,
    steps: int,
    lr: float = 0.1,
    gamma: float | None = None,
    bound: float = 1.0,
) -> None:
    optimizer_step = step_by_hand(model, dp_optimizer, lr, 0.9 if dp_filter == "none" else 0.0)
    x_before: list[Tensor] | None = None
    filtered: list[Tensor] = []
    for t in range(1, steps + 1):
        x = [p.detach().clone() for p in model.parameters()]
        points = [(1.0, x)]
        if dp_filter == "disk" and x_before is not None:
            length = (1 - KAPPA) / KAPPA if gamma is None else gamma
            c = (1 - KAPPA) / (KAPPA * length)
            ahead = [now + length * (now - old) for now, old in zip(x, x_before, strict=True)]
            points = [(c, ahead), (1 - c, x)]
        rows, _ = fixed_draw(N, seed=7, step=t, sample_rate=BATCH / N)
        sums = clipped_sum(model, rows, points, bound)
        release = []
        for (name, p), total in zip(model.named_parameters(), sums, strict=True):
            drawn = fixed_noise(
                name, p.shape, seed=7, step=t, sigma=1.0, C=bound, batch=float(BATCH)
            )
            release.append((total + bound * drawn) / BATCH)
        if not filtered:
            filtered = [torch.zeros_like(g) if dp_filter == "doppler" else g for g in release]
        if dp_filter == "doppler":
            filtered = [0.9 * m + 0.1 * g for m, g in zip(filtered, release, strict=True)]
            gradients = [m / (1 - 0.9**t) for m in filtered]
        elif dp_filter == "disk":
            if t > 1:
                filtered = [
                    (1 - KAPPA) * old + KAPPA * g for old, g in zip(filtered, release, strict=True)
                ]
            gradients = filtered
        else:
            gradients = release
        x_before = x
        optimizer_step(t, gradients)


@pytest.mark.parametrize(("dp_optimizer", "dp_filter"), METHODS.values(), ids=METHODS)
def test_every_method_trains_as_plain_code_does(tmp_path, dp_optimizer, dp_filter):
    lr = 0.01 if dp_optimizer == "adam" else 0.1
    model = tiny_vit()
    trainer = trainer_of(
        tmp_path,
        dp_optimizer=dp_optimizer,
        dp_filter=dp_filter,
        **({"disk_kappa": KAPPA} if dp_filter == "disk" else {}),
        learning_rate=lr,
        **({"vector_learning_rate": lr} if dp_optimizer in ("muon", "muon_s") else {}),
        lr_scheduler_type="constant",
        warmup_steps=0,
    )
    trainer.train()
    train_by_hand(model, dp_optimizer=dp_optimizer, dp_filter=dp_filter, steps=4, lr=lr)
    # Adam divides by the root of a second moment, which in the first steps may be close to 0.
    tolerance = 1e-5 if dp_optimizer == "adam" else 2e-6
    assert largest_difference(weights(trainer.model), weights(model)) < tolerance


@pytest.mark.parametrize("bound", [1.0, 1e3])
@pytest.mark.parametrize("gamma", [None, 0.4])
@pytest.mark.parametrize("mode", ["hooks", "bookkeeping", "ghost"])
def test_the_combination_of_each_sample_is_what_is_clipped(tmp_path, mode, gamma, bound):
    """With the large bound nothing is clipped, and a sum of two clipped gradients would agree."""
    settings = {"grad_sample_mode": mode, "disk_gamma": gamma, "disk_kappa": KAPPA}
    settings |= {"dp_optimizer": "sgd", "dp_filter": "disk", "per_sample_max_grad_norm": bound}
    settings |= {"lr_scheduler_type": "constant", "warmup_steps": 0, "max_steps": 3}
    lr = 0.1 / bound
    if mode == "ghost" and gamma is not None:
        with pytest.raises(ValueError, match=r"disk_gamma=0\.4 needs two gradient evaluations"):
            trainer_of(tmp_path, **settings)
        return
    model = tiny_vit()
    trainer = trainer_of(tmp_path, learning_rate=lr, **settings)
    trainer.train()
    train_by_hand(
        model, dp_optimizer="sgd", dp_filter="disk", steps=3, lr=lr, gamma=gamma, bound=bound
    )
    assert largest_difference(weights(trainer.model), weights(model)) < 2e-6


@pytest.mark.parametrize(("dp_optimizer", "dp_filter"), METHODS.values(), ids=METHODS)
def test_a_resumed_run_of_every_method_equals_an_uninterrupted_one(
    tmp_path, dp_optimizer, dp_filter
):
    settings = {"dp_optimizer": dp_optimizer, "dp_filter": dp_filter}
    settings |= {"disk_gamma": 0.3} if dp_filter == "disk" else {}
    settings |= {"save_strategy": "steps", "save_steps": 2}
    whole = trainer_of(tmp_path, **settings)
    whole.train()
    again = trainer_of(tmp_path, model=tiny_vit(seed=3), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert largest_difference(weights(whole.model), weights(again.model)) == 0
    assert again.epsilon() == whole.epsilon()


def test_a_checkpoint_without_the_filter_s_state_is_refused(tmp_path):
    trainer_of(tmp_path, dp_filter="doppler", save_strategy="steps", save_steps=2).train()
    (tmp_path / "checkpoint-2" / "gradient_filter.pt").unlink()
    again = trainer_of(tmp_path, dp_filter="doppler")
    with pytest.raises(ValueError, match=r"has no gradient_filter.pt.* dp_filter goes on from"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_every_method_moves_the_weights_its_own_way(tmp_path):
    ends = {}
    for name, (dp_optimizer, dp_filter) in METHODS.items():
        trainer = trainer_of(
            tmp_path / name, dp_optimizer=dp_optimizer, dp_filter=dp_filter, max_steps=3
        )
        trainer.train()
        ends[name] = weights(trainer.model)
    for one in ends:
        for other in ends:
            assert one == other or largest_difference(ends[one], ends[other]) > 1e-4, (one, other)


def test_the_optimizer_knows_the_noise_that_the_mechanism_draws(tmp_path, monkeypatch):
    trainer = trainer_of(
        tmp_path, spectral_map="selective", dp_filter="doppler", per_sample_max_grad_norm=0.3
    )
    stds = []
    monkeypatch.setattr(
        GaussianMechanism, "begin", lambda self, begin=GaussianMechanism.begin: (
            stds.append(self.noise_std), begin(self)
        )
    )  # fmt: skip
    trainer.train()
    noise = trainer.optimizer.optimizer.noise
    assert noise.std == pytest.approx(stds[0])
    assert noise.filter == trainer._trained.filter.response
    assert noise.variance(10**4) == pytest.approx(noise.std**2 * 0.1 / 1.9, rel=1e-6)


def test_dropout_is_the_same_at_every_query_point(tmp_path):
    """Else the finite difference of DiSK would be one of masks."""
    calls = []
    model = tiny_vit(dropout=0.5)
    trainer = trainer_of(
        tmp_path, model, dp_filter="disk", disk_gamma=0.3, max_steps=2, learning_rate=0.0,
        vector_learning_rate=0.0, per_device_train_batch_size=64,
    )  # fmt: skip
    own = trainer.compute_loss

    def spy(model, inputs, *args, **kwargs):
        loss = own(model, inputs, *args, **kwargs)
        calls.append((trainer.state.global_step, loss.item()))
        return loss

    trainer.compute_loss = spy
    trainer.train()
    first, *second = [loss for step, loss in calls if step in (0, 1)][-3:]
    assert second[0] == second[1]  # the weights did not move, so only masks could tell them apart
    assert first != second[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dp_optimizer": "lion"}, r"dp_optimizer='lion' must be one of sgd, adam, muon, muon_s"),
        ({"dp_filter": "kalman"}, r"dp_filter='kalman' must be one of none, doppler, disk"),
        ({"doppler_coefficients": "x"}, r"doppler_coefficients='x' must be one of ema_0.9"),
        ({"dp_filter": "disk", "disk_kappa": 1.5}, r"kappa=1.5 must be in \(0, 1\]"),
        ({"dp_filter": "disk", "disk_gamma": -1.0}, r"gamma=-1.0 must be a finite number > 0"),
        ({"ns_coefficients": "x"}, r"ns_coefficients='x' must be one of quintic"),
        ({"sgd_momentum": 1.0}, r"sgd_momentum=1.0 must be in \[0, 1\)"),
        ({"ns_steps": 0}, r"ns_steps=0 must be >= 1"),
        ({"adjust_lr_fn": "x"}, r"adjust_lr_fn='x' must be one of None, paper"),
        ({"spectral_map": "x"}, r"spectral_map='x' must be one of newton_schulz"),
        ({"spectral_map": "svd", "dp_optimizer": "adam"}, r"spectral_map='svd' has no effect"),
        ({"correct_for_noise": True}, r"correct_for_noise=True has no effect under"),
        ({"muon_momentum": 1.0}, r"muon_momentum=1.0 must be in \[0, 1\)"),
        ({"dp_optimizer": "adam", "adam_beta1": 1.0}, r"adam_beta1=1.0 must be in \[0, 1\)"),
        ({"dp_optimizer": "adam", "adam_beta2": -0.1}, r"adam_beta2=-0.1 must be in \[0, 1\)"),
        ({"dp_optimizer": "adam", "adam_epsilon": 0.0}, r"adam_epsilon=0.0 must be > 0"),
        ({"ns_bf16": True}, r"ns_bf16=True needs a CUDA device, and this run's is 'cpu'"),
    ],
)
def test_settings_of_a_method_are_refused_by_name_and_range(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, **settings)


FILTERED = ("doppler", "disk")
# Options of a method, at a value away from the default, and the methods on which they act.
OPTIONS = {
    "vector_learning_rate": (0.2, {"muon", "muon_s"}),
    "orthogonalize_head": (False, {"muon", "muon_s"}),
    "orthogonalize_patch_embedding": (False, {"muon", "muon_s"}),
    "adjust_lr_fn": ("match_rms_adamw", {"muon", "muon_s"}),
    "muon_momentum": (0.5, {"muon", "muon_s"}),
    "ns_steps": (2, {"muon", "muon_s"}),
    "ns_coefficients": ("quintic_tuned", {"muon", "muon_s"}),
    "ns_bf16": (True, set()),  # on a CPU
    "spectral_map": ("svd", {"muon"}),
    "correct_for_noise": (True, {"adam", "muon_s"}),
    "adam_beta1": (0.5, {"adam"}),
    "adam_beta2": (0.5, {"adam"}),
    "adam_epsilon": (1e-3, {"adam"}),
    "sgd_momentum": (0.5, {"sgd", "muon", "muon_s"}),
    "weight_decay": (0.1, {"sgd", "adam", "muon", "muon_s"}),
    "doppler_coefficients": ("second_order", {"doppler"}),
    "disk_kappa": (0.3, {"disk"}),
    "disk_gamma": (0.2, {"disk"}),
}


def short_run(folder: Path, **settings: object) -> dict[str, Tensor]:
    """Weights of three steps, at a constant learning rate; the first is alike under any filter."""
    settings = {"max_steps": 3, "lr_scheduler_type": "constant", "warmup_steps": 0, **settings}
    trainer = trainer_of(folder, **settings)
    trainer.train()
    return weights(trainer.model)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, object], dict[str, Tensor]]:
    """Weights of a run without further options, one for each method."""
    ran: dict[tuple[str, object], dict[str, Tensor]] = {}

    def weights_of(name: str, value: object) -> dict[str, Tensor]:
        if (name, value) not in ran:
            ran[name, value] = short_run(tmp_path_factory.mktemp("plain"), **{name: value})
        return ran[name, value]

    return weights_of


CHOICES = {"dp_optimizer": ("sgd", "adam", "muon", "muon_s"), "dp_filter": ("none", *FILTERED)}


@pytest.mark.parametrize(
    ("choice", "method", "option"),
    [
        (choice, method, option)
        for choice, methods in CHOICES.items()
        for option in OPTIONS
        if (choice == "dp_filter") == option.startswith(FILTERED)
        for method in methods
    ],
)
def test_every_option_either_acts_or_is_refused(tmp_path, plain, choice, method, option):
    """An option that is taken and does nothing lets a sweep compare a run with itself."""
    value, acts_on = OPTIONS[option]
    if method not in acts_on:
        with pytest.raises(ValueError, match=f"{option}=") as refusal:
            trainer_of(tmp_path, **{choice: method, option: value})
        assert "has no effect under" in str(refusal.value) or option == "ns_bf16"
        assert str(refusal.value).endswith(".")
        return
    changed = short_run(tmp_path, **{choice: method, option: value})
    assert largest_difference(plain(choice, method), changed) > 1e-7


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        (
            {"spectral_map": "polar_express", "ns_coefficients": "quintic_tuned"},
            "ns_coefficients='quintic_tuned'",
        ),
        (
            {"spectral_map": "svd", "ns_coefficients": "quintic_tuned"},
            "ns_coefficients='quintic_tuned'",
        ),
        ({"spectral_map": "known_noise_polar", "ns_steps": 3}, "ns_steps=3"),
        ({"spectral_map": "shrink_operator", "ns_bf16": True}, "ns_bf16=True"),
    ],
)
def test_options_of_an_iteration_are_refused_where_none_runs(tmp_path, settings, option):
    with pytest.raises(ValueError, match=f"{option} has no effect under spectral_map="):
        trainer_of(tmp_path, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"spectral_map": "polar_express", "ns_steps": 8},
        {"spectral_map": "selective", "ns_coefficients": "quintic_tuned"},
    ],
)
def test_options_of_an_iteration_reach_the_maps_that_iterate(tmp_path, settings):
    common = {"spectral_map": settings["spectral_map"], "noise_multiplier": 1e-3}
    plain = short_run(tmp_path / "plain", **common)
    changed = short_run(tmp_path / "changed", **{**common, **settings})
    assert largest_difference(plain, changed) > 1e-6


TRIPLE = (3.4445, -4.775, 2.0315)  # the quintic table's


@pytest.mark.parametrize("given", [TRIPLE, list(TRIPLE), [str(n) for n in TRIPLE], ["quintic"]])
def test_coefficients_may_be_three_numbers(tmp_path, given):
    assert arguments(tmp_path, ns_coefficients=given).method.ns_coefficients in (TRIPLE, "quintic")


@pytest.mark.parametrize("words", [["1", "2"], ["a", "b", "c"], ["nan", "1", "1"], ["sextic"]])
def test_coefficients_that_are_no_table_are_refused(tmp_path, words):
    with pytest.raises(ValueError, match="ns_coefficients="):
        arguments(tmp_path, ns_coefficients=words)


def test_a_run_of_three_coefficients_resumes(tmp_path):
    """The settings of a checkpoint are JSON, which knows no tuples."""
    settings = {"ns_coefficients": TRIPLE, "save_strategy": "steps", "save_steps": 2}
    trainer_of(tmp_path, max_steps=2, **settings).train()
    again = trainer_of(tmp_path, max_steps=3, **settings)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3


CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_config_on_the_quickstart_data(name, tmp_path):
    path = CONFIGS / f"{name}.yaml"
    arguments = ["--config", str(path), "--output_dir", str(tmp_path), "--use_cpu", "true"]
    model, data, training = parse_arguments(arguments)
    assert (training.dp_optimizer, training.dp_filter) == METHODS[name]
    quickstart = yaml.safe_load((CONFIGS / "quickstart.yaml").read_text())
    assert model.model_name_or_path == quickstart["model_name_or_path"]
    assert data.dataset_name == quickstart["dataset_name"]
    assert training.target_epsilon == quickstart["target_epsilon"]

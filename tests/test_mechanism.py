"""Laws of the Gaussian mechanism: sensitivity, noise, division, and what may never happen."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.optimizers import DPOptimizer
from scipy import stats
from support import fixed_noise
from torch import Tensor, nn

from hf_dpmuon.accounting import NoiseEvent
from hf_dpmuon.grad_sample import HooksGradSampleModule
from hf_dpmuon.mechanism import GaussianMechanism, clip_factors

CLIPPING = ["flat", "per_layer", "automatic"]


def two_tensors(*, width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 3), nn.Tanh(), nn.Linear(3, 2))


def mechanism_of(
    model: nn.Module, *, sigma: float = 0.0, C: float = 1.0, q: float = 0.5, N: int = 8, **kwargs
) -> GaussianMechanism:
    return GaussianMechanism(
        HooksGradSampleModule(model),
        noise_multiplier=sigma,
        max_grad_norm=C,
        sample_rate=q,
        num_units=N,
        noise_key=kwargs.pop("noise_key", b"key"),
        **kwargs,
    )


def backward(mechanism: GaussianMechanism, x: Tensor) -> None:
    mechanism.module(x).square().sum().backward()


def released(mechanism: GaussianMechanism) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in mechanism.module._module.named_parameters()}


def loop_of_one(model: nn.Module, x: Tensor) -> list[dict[str, Tensor]]:
    gradients = []
    for row in x:
        model.zero_grad()
        model(row[None]).square().sum().backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    model.zero_grad()
    return gradients


@given(
    norms=st.lists(
        st.lists(st.floats(0, 2**60, width=32), min_size=3, max_size=3), min_size=1, max_size=6
    ),
    C=st.floats(1e-6, 1e6),
    clipping=st.sampled_from(CLIPPING),
)
@settings(deadline=None)
def test_no_sample_contributes_more_than_the_bound(norms, C, clipping):
    by_parameter = {str(i): torch.tensor(row) for i, row in enumerate(norms)}
    factors = clip_factors(
        by_parameter, max_grad_norm=C, clipping=clipping, num_layers=len(by_parameter)
    )
    clipped = torch.stack([factors[n].double() * by_parameter[n].double() for n in by_parameter])
    assert clipped.isfinite().all()
    assert (clipped.norm(dim=0) <= C * (1 + 1e-5)).all()


def test_flat_clipping_scales_all_tensors_of_a_sample_by_one_factor():
    # Case 22: norms 3 and 4 are a vector of norm 5, clipped to 0.6 and 0.8.
    norms = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    factors = clip_factors(norms, max_grad_norm=1.0, clipping="flat", num_layers=2)
    assert torch.allclose(factors["a"] * 3, torch.tensor([0.6]))
    assert torch.allclose(factors["b"] * 4, torch.tensor([0.8]))


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_a_gradient_within_the_bound_is_left_as_it_is(clipping):
    norms = {"a": torch.tensor([0.0, 1e-30, 0.3, 0.5]), "b": torch.tensor([0.0, 0.4, 0.0, 0.5])}
    factors = clip_factors(norms, max_grad_norm=1.0, clipping=clipping, num_layers=2)
    assert all(torch.equal(factor, torch.ones(4)) for factor in factors.values())


@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_takes_all_parameters_of_its_sample_with_it(bad, clipping):
    norms = {"a": torch.tensor([bad, 0.1]), "b": torch.tensor([0.1, 0.1])}
    factors = clip_factors(norms, max_grad_norm=1.0, clipping=clipping, num_layers=2)
    for factor in factors.values():
        assert factor[0] == 0
        assert factor[1] > 0


def test_per_layer_bounds_compose_to_the_whole_bound_also_when_a_layer_is_not_reached():
    norms = {"a": torch.tensor([30.0]), "b": torch.tensor([40.0])}
    factors = clip_factors(norms, max_grad_norm=1.0, clipping="per_layer", num_layers=4)
    assert torch.allclose(factors["a"] * 30, torch.tensor([0.5]))
    assert torch.allclose(factors["b"] * 40, torch.tensor([0.5]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_sample_that_is_not_finite_contributes_exactly_zero(bad):
    model = two_tensors()
    x = torch.randn(4, 4)
    mechanism = mechanism_of(model, q=1.0, N=1)
    backward(mechanism, x)
    mechanism.accumulate()
    mechanism.release(step=1)
    without = released(mechanism)

    mechanism.begin()
    backward(mechanism, torch.cat([x, torch.full((1, 4), bad)]))
    mechanism.accumulate()
    mechanism.release(step=2)
    for name, gradient in released(mechanism).items():
        assert torch.allclose(gradient, without[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("clipping", CLIPPING)
def test_release_equals_a_loop_of_batches_of_one(clipping):
    model, C = two_tensors(), 0.7
    x = torch.randn(5, 4) * torch.tensor([0.1, 1, 2, 4, 8])[:, None]
    layers = len(list(model.parameters()))
    expected = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for gradient in loop_of_one(model, x):
        total = math.sqrt(sum(float(g.norm()) ** 2 for g in gradient.values()))
        for name, g in gradient.items():
            factor = {
                "flat": min(1.0, C / total),
                "per_layer": min(1.0, C / math.sqrt(layers) / float(g.norm())),
                "automatic": C / (total + 0.01),
            }[clipping]
            expected[name] += factor * g / 4.0
    mechanism = mechanism_of(model, C=C, q=0.5, N=8, clipping=clipping)
    for chunk in (x[:2], x[2:]):
        backward(mechanism, chunk)
        mechanism.accumulate()
    mechanism.release(step=1)
    for name, gradient in released(mechanism).items():
        assert torch.allclose(gradient, expected[name], rtol=1e-5, atol=1e-7)


def test_release_equals_opacus_dp_optimizer_on_the_same_gradients_and_noise():
    model, x = two_tensors(), torch.randn(6, 4)
    mechanism = mechanism_of(
        model, sigma=1.3, C=0.8, q=0.5, N=8, noise_key=(3).to_bytes(32, "big"), fixed_noise=True
    )
    backward(mechanism, x)
    samples = [p.grad_sample.clone() for p in model.parameters()]
    mechanism.accumulate()
    mechanism.release(step=1)
    ours = [p.grad.clone() for p in model.parameters()]

    reference = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=0.8,
        expected_batch_size=4,
    )
    for p, sample in zip(model.parameters(), samples, strict=True):
        p.grad_sample = sample
    reference.pre_step()
    for (name, p), mine in zip(model.named_parameters(), ours, strict=True):
        drawn = fixed_noise(name, p.shape, seed=3, step=1, sigma=1.3, C=0.8, batch=4.0)
        assert torch.allclose(mine, p.grad + 1.3 * 0.8 * drawn / 4, rtol=1e-4, atol=1e-6)


def test_noise_has_the_claimed_scale_and_not_two_thirds_or_three_halves_of_it():
    model = nn.Linear(400, 300)  # 120,300 entries
    sigma, C, q, N = 1.7, 0.3, 0.25, 40
    mechanism = mechanism_of(model, sigma=sigma, C=C, q=q, N=N, noise_key=b"11")
    mechanism.release(step=1)
    entries = torch.cat([p.grad.flatten() for p in model.parameters()]).double().numpy() * q * N
    assert abs(entries.std() / (sigma * C) - 1) < 0.02
    for factor, accepted in ((1.0, True), (2 / 3, False), (3 / 2, False)):
        result = stats.kstest(entries, "norm", args=(0, sigma * C * factor))
        assert bool(result.pvalue > 1e-3) is accepted, (factor, result.pvalue)


def test_noise_is_drawn_once_however_many_physical_batches_there_are():
    # Cases 43, 44: zero gradients, B = 64, so the release is noise of std 1/64 for any split.
    for pieces in (0, 1, 4):
        model = nn.Linear(300, 300, bias=False)
        mechanism = mechanism_of(model, sigma=1.0, q=0.5, N=128, noise_key=b"5")
        for _ in range(pieces):
            backward(mechanism, torch.zeros(3, 300))
            mechanism.accumulate()
        mechanism.release(step=1)
        assert float(model.weight.grad.std()) * 64 == pytest.approx(1.0, rel=0.02)


def test_noise_is_independent_across_steps_and_parameters():
    model = nn.Sequential(nn.Linear(200, 200, bias=False), nn.Linear(200, 200, bias=False))
    mechanism = mechanism_of(model, sigma=1.0, q=1.0, N=1, noise_key=b"6")
    draws = []
    for step in (1, 2):
        mechanism.release(step=step)
        draws += [p.grad.flatten().clone() for p in model.parameters()]
    correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(4)
    assert float(correlation.abs().max()) < 5 / math.sqrt(200 * 200)


def test_a_vanishing_bound_without_noise_releases_nothing():
    # Case 20: autograd's own gradient must not be mixed in.
    model = two_tensors()
    mechanism = mechanism_of(model, C=1e-12)
    backward(mechanism, torch.randn(5, 4))
    mechanism.accumulate()
    mechanism.release(step=1)
    assert max(float(g.abs().max()) for g in released(mechanism).values()) < 1e-9


def test_begin_drops_a_foreign_or_failed_backward_pass():
    model, x = two_tensors(), torch.randn(5, 4)
    mechanism = mechanism_of(model)
    backward(mechanism, x)
    mechanism.accumulate()  # a logical batch that failed half-way
    model(x).sum().backward()  # and a pass that the caller made by hand
    mechanism.begin()
    mechanism.release(step=1)
    assert all(float(g.abs().max()) == 0 for g in released(mechanism).values())


def test_accumulate_leaves_no_raw_gradient():
    model = two_tensors()
    mechanism = mechanism_of(model)
    backward(mechanism, torch.randn(5, 4))
    mechanism.accumulate()
    assert all(p.grad is None and p.grad_sample is None for p in model.parameters())


def test_a_parameter_that_was_not_reached_is_noised_all_the_same():
    model = two_tensors()
    mechanism = mechanism_of(model, sigma=1.0, noise_key=b"1")
    mechanism.module._module[0](torch.randn(5, 4)).sum().backward()
    mechanism.accumulate()
    mechanism.release(step=1)
    assert float(model[2].weight.grad.abs().min()) > 0


@pytest.mark.parametrize("change", ["freeze", "unfreeze"])
def test_a_changed_trainable_set_is_refused_by_name(change):
    # Case 7: freezing or unfreezing after privacy was set up.
    model = two_tensors()
    model[0].weight.requires_grad_(change == "freeze")
    mechanism = mechanism_of(model)
    model[0].weight.requires_grad_(change == "unfreeze")
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        mechanism.release(step=1)


def release_of(x: Tensor, *, step: int = 1, **settings: Any) -> tuple[NoiseEvent, Tensor]:
    mechanism = mechanism_of(two_tensors(), **{"sigma": 1.0, **settings})
    backward(mechanism, x)
    mechanism.accumulate()
    event = mechanism.release(step=step)
    return event, torch.cat([g.flatten() for g in released(mechanism).values()])


def test_the_same_step_on_the_same_sum_is_the_same_release():
    x = torch.randn(5, 4)
    first, again = release_of(x), release_of(x)
    assert again[0] == first[0]
    assert torch.equal(again[1], first[1])


@pytest.mark.parametrize(
    "changed",
    [
        {"x": "smallest possible change"},
        {"step": 2},
        {"C": 0.9},
        {"sigma": 1.1},
        {"N": 9},
        {"noise_key": b"other"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_noise_is_never_used_for_another_release(changed):
    # Two releases with one noise could be subtracted to leave a raw difference of sums.
    x = torch.randn(5, 4)
    first = release_of(x)
    if "x" in changed:
        changed = {}
        x = x.clone()
        x[0, 0] = torch.nextafter(x[0, 0], torch.tensor(torch.inf)) + 1e-6
    second = release_of(x, **changed)
    assert second[0].digest != first[0].digest
    # The noises have standard deviation 1/4 in each of 23 entries; raw sums differ by far less
    # than independent noises do, and the noise left over is not the scaled old one.
    difference = second[1] - first[1]
    assert float(difference.norm()) > 0.25 * math.sqrt(2 * 23) / 2
    assert abs(float(torch.corrcoef(torch.stack([first[1], second[1]]))[0, 1])) < 0.8


def test_a_backward_hook_that_could_see_raw_gradients_is_refused():
    model = two_tensors()
    mechanism = mechanism_of(model)
    handle = model[0].weight.register_hook(lambda gradient: None)
    with pytest.raises(RuntimeError, match=r"0\.weight has a backward hook"):
        mechanism.begin()
    handle.remove()
    mechanism.begin()


def test_loss_scale_is_undone_before_clipping():
    # Cases 61, 62.
    x, releases = torch.randn(5, 4), []
    for scale in (1.0, 65536.0):
        mechanism = mechanism_of(two_tensors(), loss_scale=scale, C=0.5)
        (mechanism.module(x).square().sum() * scale).backward()
        mechanism.accumulate()
        mechanism.release(step=1)
        releases.append(released(mechanism))
    for name in releases[0]:
        assert torch.allclose(releases[0][name], releases[1][name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sigma", -1.0),
        ("sigma", math.nan),
        ("C", 0.0),
        ("q", 0.0),
        ("q", 1.5),
        ("N", 0),
        ("clipping", "global"),
    ],
)
def test_values_outside_their_range_are_refused(name, value):
    with pytest.raises(ValueError, match=str(value)):
        mechanism_of(two_tensors(), **{name: value})

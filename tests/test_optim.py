"""Laws and oracles of the optimizers: what one step does to the weights, and to nothing else."""

import copy
import math

import pytest
import torch
from accelerate import Accelerator
from support import TINY_MODELS, tiny_vit
from torch import nn
from torch.optim import _muon

from hf_dpmuon.filters import KalmanFilter, LowPassFilter
from hf_dpmuon.known_noise import KnownNoise, ema, heavy_ball, lookahead, variance_factor
from hf_dpmuon.methods import create_optimizer, routing_table
from hf_dpmuon.optim import ADJUST_LR, DPSGD, DPAdam, DPMuon, DPMuonS
from hf_dpmuon.spectral import SPECTRAL_MAPS, newton_schulz, scaled_polar, spectral_map

SHAPES = [(6, 4), (4, 6), (5, 5), (12, 2), (6, 4)]


def parameters(shapes=SHAPES, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(params, *, seed):
    generator = torch.Generator().manual_seed(1000 + seed)
    for p in params:
        p.grad = 1e-3 * torch.randn(p.shape, generator=generator, dtype=p.dtype)


def take_steps(optimizer, params, *, steps=4, first=0):
    for step in range(first, first + steps):
        set_gradients(params, seed=step)
        optimizer.step()


def assert_same(left, right, **tolerance):
    for one, other in zip(left, right, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def float32_newton_schulz(grad, ns_coefficients, ns_steps, eps):
    """``torch.optim.Muon``'s own iteration without its cast to bfloat16."""
    X = grad.mT if grad.size(0) > grad.size(1) else grad
    X = X / X.norm().clamp(min=eps)
    a, b, c = ns_coefficients
    for _ in range(ns_steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if grad.size(0) > grad.size(1) else X


# Equal to torch where settings coincide


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_dp_sgd_is_torch_sgd(momentum, weight_decay):
    ours, theirs = parameters(), parameters()
    settings = {"lr": 0.1, "momentum": momentum, "weight_decay": weight_decay}
    take_steps(DPSGD(ours, **settings), ours)
    take_steps(torch.optim.SGD(theirs, **settings), theirs)
    assert_same(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_dp_muon_is_torch_muon_in_single_precision(weight_decay, monkeypatch):
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", float32_newton_schulz)
    shapes = [(6, 4), (4, 6), (5, 5), (6, 4)]  # no aspect above 4: torch has no cap
    ours, theirs = parameters(shapes), parameters(shapes)
    settings = {"lr": 0.05, "momentum": 0.95, "weight_decay": weight_decay}
    take_steps(DPMuon(ours, **settings), ours)
    take_steps(torch.optim.Muon(theirs, **settings), theirs)
    assert_same(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw", "spectral_unclamped"])
def test_factors_and_momentum_are_those_of_torch_muon(adjust, nesterov, monkeypatch):
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", float32_newton_schulz)
    ours, theirs = parameters(), parameters()
    settings = {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.0, "nesterov": nesterov}
    take_steps(DPMuon(ours, adjust_lr_fn=adjust, **settings), ours)
    take_steps(torch.optim.Muon(theirs, adjust_lr_fn=adjust, **settings), theirs)
    assert_same(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
def test_dp_adam_is_torch_adamw(betas, weight_decay):
    ours, theirs = parameters(), parameters()
    settings = {"lr": 0.01, "betas": betas, "weight_decay": weight_decay}
    take_steps(DPAdam(ours, **settings), ours)
    take_steps(torch.optim.AdamW(theirs, **settings), theirs)
    assert_same(ours, theirs, rtol=1e-5, atol=1e-6)
    if not weight_decay:
        plain = parameters()
        take_steps(torch.optim.Adam(plain, lr=0.01, betas=betas), plain)
        assert_same(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("late", [1, 3])
def test_a_parameter_whose_gradients_start_late_is_stepped_as_by_torch(late):
    """Its own steps are counted: the corrections of the moments are those of its first step."""
    for build, reference in (
        (lambda ps: DPAdam(ps, lr=0.01), lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0)),
        (lambda ps: DPSGD(ps, lr=0.01), lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9)),
    ):
        ours, theirs = parameters(), parameters()
        for params, optimizer in ((ours, build(ours)), (theirs, reference(theirs))):
            for step in range(6):
                set_gradients(params, seed=step)
                if step < late or step == 4:
                    params[1].grad = None
                optimizer.step()
        assert_same(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adam_corrected", "muon_s_corrected", "muon_known_noise_polar"])
def test_a_late_parameter_has_the_noise_level_of_its_own_steps(name):
    params, alone = parameters([(12, 16), (12, 16)]), parameters([(12, 16), (12, 16)])[1:]
    optimizer = FAMILY[name](params)
    for step in range(2):
        set_gradients(params, seed=step)
        params[1].grad = None
        optimizer.step()
    reference = FAMILY[name](alone)
    for step in range(3):
        set_gradients(params, seed=5 + step)
        alone[0].grad = params[1].grad.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(params[1], alone[0], rtol=1e-5, atol=1e-6)


# By hand


def test_dp_muon_follows_its_formula():
    (p,) = parameters([(12, 2)])
    W, M, beta, lr, decay = p.detach().clone(), torch.zeros(12, 2), 0.8, 0.05, 0.1
    optimizer = DPMuon([p], lr=lr, momentum=beta, weight_decay=decay)
    for step in range(4):
        take_steps(optimizer, [p], steps=1, first=step)
        G = p.grad
        M = beta * M + (1 - beta) * G
        lookahead = (1 - beta) * G + beta * M
        W = (1 - lr * decay) * W - lr * math.sqrt(4.0) * newton_schulz(lookahead)
        torch.testing.assert_close(p.detach(), W, rtol=1e-5, atol=1e-6)


def test_dp_muon_s_follows_its_formula():
    (p,) = parameters([(12, 3)])
    W, M, beta, lr, decay = p.detach().clone(), torch.zeros(12, 3), 0.8, 0.05, 0.1
    optimizer = DPMuonS([p], lr=lr, momentum=beta, weight_decay=decay)
    for step in range(4):
        take_steps(optimizer, [p], steps=1, first=step)
        M = beta * M + p.grad
        sigma = torch.linalg.matrix_norm(M, ord=2)
        W = (1 - lr * decay) * W - lr * 2.0 * sigma * newton_schulz(M)
        torch.testing.assert_close(p.detach(), W, rtol=1e-4, atol=1e-6)


def test_dp_muon_s_keeps_the_size_of_the_gradient_and_dp_muon_drops_it():
    step = {}
    for name, build in (("muon", DPMuon), ("muon_s", DPMuonS)):
        for size in (1.0, 7.0):
            (p,) = [nn.Parameter(torch.zeros(6, 6))]
            set_gradients([p], seed=0)
            p.grad *= size
            build([p], lr=1.0).step()
            step[name, size] = p.detach().clone()
    torch.testing.assert_close(step["muon", 7.0], step["muon", 1.0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step["muon_s", 7.0], 7 * step["muon_s", 1.0], rtol=1e-4, atol=1e-6)


# What is known of the noise


NOISES = {
    "none": KnownNoise(1e-3),
    "doppler": KnownNoise(1e-3, LowPassFilter.named("second_order").response),
    "disk": KnownNoise(1e-3, KalmanFilter([], kappa=0.4).response),
}


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_dp_adam_subtracts_the_variance_of_the_filtered_noise(noise):
    """By hand, with the average of what each step's noise adds to the second moment."""
    (p,) = parameters([(5, 4)])
    W, m, v, known = p.detach().clone(), torch.zeros(5, 4), torch.zeros(5, 4), 0.0
    (b1, b2), lr, floor = (0.9, 0.7), 0.01, 0.05
    optimizer = DPAdam([p], lr=lr, betas=(b1, b2), noise=noise, noise_floor=floor)
    for t in range(1, 6):
        take_steps(optimizer, [p], steps=1, first=t)
        m = b1 * m + (1 - b1) * p.grad
        v = b2 * v + (1 - b2) * p.grad**2
        known = b2 * known + (1 - b2) * 1e-6 * variance_factor([noise.filter], t)
        phi = known / (1 - b2**t)
        corrected = (v / (1 - b2**t) - phi).clamp(min=floor * phi)
        W -= lr * (m / (1 - b1**t)) / (corrected.sqrt() + 1e-8)
        torch.testing.assert_close(p.detach(), W, rtol=1e-4, atol=1e-6)


def test_the_corrected_second_moment_of_signal_and_noise_is_that_of_the_signal():
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.zeros(1000))
    plain, corrected = (DPAdam([p], lr=0.0, noise=n) for n in (None, KnownNoise(0.5)))
    filter_ = LowPassFilter()
    filtered = DPAdam([p], lr=0.0, noise=KnownNoise(0.5, filter_.response))
    for _ in range(400):
        release = 0.3 + 0.5 * torch.randn(1000, generator=generator)
        p.grad = release
        plain.step()
        corrected.step()
        (p.grad,) = filter_.smooth([release])
        filtered.step()
    for optimizer, left in ((plain, 0.25), (corrected, 0.0), (filtered, 0.0)):
        fade = 1 - 0.999**400
        v = optimizer.state[p]["exp_avg_sq"].mean().item() / fade
        assert v - optimizer.state[p].get("noise_average", 0.0) / fade == pytest.approx(
            0.09 + left, abs=0.01
        )


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
@pytest.mark.parametrize("name", ["known_noise_polar", "selective"])
def test_dp_muon_gives_its_map_the_noise_level_of_the_momentum(name, noise):
    (p,) = parameters([(12, 16)])
    optimizer = DPMuon([p], lr=0.1, momentum=0.8, spectral_map=name, noise=noise)
    M = torch.zeros(12, 16)
    for t in range(1, 5):
        before = p.detach().clone()
        set_gradients([p], seed=t)
        p.grad[0] += 8e-3  # two directions stand out, unequally
        p.grad[1, ::2] += 9e-3
        optimizer.step()
        M = torch.lerp(M, p.grad, 0.2)
        std = 1e-3 * math.sqrt(variance_factor([noise.filter, lookahead(0.8)], t))
        direction = spectral_map(torch.lerp(p.grad, M, 0.8), name=name, noise_std=std)
        torch.testing.assert_close(p.detach(), before - 0.1 * direction, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [0.0, 8e-3])
def test_dp_muon_s_clears_its_size_of_the_noise(size):
    """Below the edge of the noise the raw direction is left, at what the noise can hide."""
    p = nn.Parameter(torch.zeros(24, 32))
    noise = KnownNoise(1e-3)
    optimizer = DPMuonS([p], lr=1.0, momentum=0.5, noise=noise)
    M, W = torch.zeros(24, 32), torch.zeros(24, 32)
    for t in range(1, 4):
        set_gradients([p], seed=t)
        p.grad[0] += size
        optimizer.step()
        M = 0.5 * M + p.grad
        std = 1e-3 * math.sqrt(variance_factor([heavy_ball(0.5)], t))
        W -= scaled_polar(M, noise_std=std)
    torch.testing.assert_close(p.detach(), W, rtol=1e-4, atol=1e-6)
    sigma = torch.linalg.matrix_norm(M, ord=2).item()
    step = scaled_polar(M, noise_std=std)
    if size:
        assert torch.nn.functional.cosine_similarity(
            step.flatten(), newton_schulz(M).flatten(), dim=0
        ) == pytest.approx(1, abs=1e-5)
        assert torch.linalg.matrix_norm(step, ord=2) < 1.14 * sigma
    else:
        expected = M * std * (24 * 32) ** 0.25 / sigma
        torch.testing.assert_close(step, expected, rtol=0.03, atol=0)


@pytest.mark.parametrize(
    ("shape", "factor"),
    [((768, 3072), 1.0), ((3072, 768), 2.0), ((1536, 384), 2.0), ((100, 1), 2.0), ((6, 3), 2**0.5)],
)
def test_scale_of_the_paper_is_capped_at_aspect_four(shape, factor):
    assert ADJUST_LR["paper"](*shape) == pytest.approx(factor)


def test_a_convolution_is_the_matrix_of_its_outputs_by_everything_else():
    """Its scale is that of (out, in kh kw): 1 here, where the last two dimensions give sqrt(3)."""
    flat, kernel = parameters([(8, 12)])[0], nn.Parameter(parameters([(8, 12)])[0].view(8, 4, 3, 1))
    take_steps(DPMuon([flat], lr=0.1), [flat])
    take_steps(DPMuon([kernel], lr=0.1), [kernel])
    torch.testing.assert_close(kernel.view(8, 12), flat)


def test_a_fused_weight_is_three_matrices():
    fused = nn.Parameter(parameters([(12, 5)])[0].detach())
    parts = [nn.Parameter(block.clone()) for block in fused.detach().chunk(3)]
    set_gradients([fused], seed=0)
    for part, gradient in zip(parts, fused.grad.chunk(3), strict=True):
        part.grad = gradient.clone()
    DPMuon([{"params": [fused], "blocks": 3}], lr=0.1).step()
    DPMuon(parts, lr=0.1).step()
    torch.testing.assert_close(fused.detach(), torch.cat([p.detach() for p in parts]))
    whole = nn.Parameter(parameters([(12, 5)])[0].detach())
    set_gradients([whole], seed=0)
    DPMuon([whole], lr=0.1).step()
    assert (whole - fused).abs().max() > 1e-3  # one matrix of 12 rows is something else


def test_every_direction_of_the_update_has_nearly_the_same_length():
    """What orthogonalisation is for: had it silently not run, values would span a decade."""
    (p,) = parameters([(32, 64)])
    before = p.detach().clone()
    spread = torch.logspace(0, -1.5, 32)
    p.grad = torch.diag(spread) @ torch.linalg.qr(torch.randn(64, 32))[0].mT
    DPMuon([p], lr=1.0).step()
    values = torch.linalg.svdvals(before - p.detach())
    assert values.min() > 0.67
    assert values.max() < 1.14


# The model's parameters in groups


@pytest.mark.parametrize("dp_optimizer", ["sgd", "adam", "muon", "muon_s"])
@pytest.mark.parametrize("architecture", TINY_MODELS)
def test_groups_hold_each_trainable_parameter_once(architecture, dp_optimizer):
    model = TINY_MODELS[architecture]()
    frozen = next(p for p in model.parameters() if p.ndim == 2)
    frozen.requires_grad_(False)
    rates = {"learning_rate": 0.1}
    if dp_optimizer in ("muon", "muon_s"):
        rates["vector_learning_rate"] = 0.1
    optimizer = create_optimizer(model, dp_optimizer=dp_optimizer, **rates)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p is not frozen)


@pytest.mark.parametrize("architecture", TINY_MODELS)
def test_only_matrices_are_orthogonalised(architecture):
    model = TINY_MODELS[architecture]()
    optimizer = create_optimizer(
        model, dp_optimizer="muon", learning_rate=0.1, vector_learning_rate=0.3
    )
    vectors = {id(p) for g in optimizer.param_groups if g["rule"] == "sgd" for p in g["params"]}
    for name, p in model.named_parameters():
        linear_or_conv = p.ndim in (2, 4)
        assert (id(p) in vectors) != linear_or_conv, name
    no_head = create_optimizer(
        model,
        dp_optimizer="muon",
        learning_rate=0.1,
        vector_learning_rate=0.3,
        orthogonalize_head=False,
        orthogonalize_patch_embedding=False,
    )
    vectors = {id(p) for g in no_head.param_groups if g["rule"] == "sgd" for p in g["params"]}
    matrices = [p for p in model.parameters() if p.ndim == 2]
    assert sum(id(p) in vectors for p in matrices) in (1, 2)  # DeiT may have two heads
    assert all(id(p) in vectors for p in model.parameters() if p.ndim == 4)


@pytest.mark.parametrize("dp_optimizer", ["sgd", "adam", "muon", "muon_s"])
def test_hugging_face_and_timm_copies_of_one_model_take_the_same_step(dp_optimizer):
    import timm

    hf = tiny_vit()
    twin = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2,
        mlp_ratio=2, num_classes=3,
    )  # fmt: skip
    with torch.no_grad():
        for name, p in twin.named_parameters():
            p.copy_(_of_timm_name(hf, name, lambda q: q.detach()))
    for model in (hf, twin):
        model.zero_grad()
    optimizers = [
        create_optimizer(
            model,
            dp_optimizer=dp_optimizer,
            learning_rate=0.05,
            weight_decay=0.01,
            **({"vector_learning_rate": 0.05} if dp_optimizer in ("muon", "muon_s") else {}),
        )
        for model in (hf, twin)
    ]
    for step in range(3):
        set_gradients(hf.parameters(), seed=step)
        for name, p in twin.named_parameters():
            p.grad = _of_timm_name(hf, name, lambda q: q.grad).clone()
        for optimizer in optimizers:
            optimizer.step()
    for name, p in twin.named_parameters():
        expected = _of_timm_name(hf, name, lambda q: q.detach())
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-5, msg=name)


def _of_timm_name(hf, name, read):
    """What ``read`` takes from the parameters of the HF model that timm calls ``name``."""
    known = {
        "cls_token": "vit.embeddings.cls_token",
        "pos_embed": "vit.embeddings.position_embeddings",
        "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
        "norm": "vit.layernorm",
        "head": "classifier",
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        "attn.proj": "attention.o_proj",
        "mlp.fc1": "mlp.fc1",
        "mlp.fc2": "mlp.fc2",
    }
    by_name = dict(hf.named_parameters())
    if name in known:
        return read(by_name[known[name]])
    stem, leaf = name.rsplit(".", 1)
    if not stem.startswith("blocks."):
        return read(by_name[f"{known[stem]}.{leaf}"])
    _, block, module = stem.split(".", 2)
    prefix = f"vit.layers.{block}"
    if module == "attn.qkv":
        return torch.cat([read(by_name[f"{prefix}.attention.{x}_proj.{leaf}"]) for x in "qkv"])
    return read(by_name[f"{prefix}.{known[module]}.{leaf}"])


def test_the_table_of_routes_counts_every_entry():
    model = tiny_vit()
    model.classifier.bias.requires_grad_(False)
    optimizer = create_optimizer(
        model, dp_optimizer="muon", learning_rate=0.1, vector_learning_rate=0.3
    )
    rows = [line.split() for line in routing_table(model, optimizer).splitlines()[1:]]
    entries = sum(int(row[2].replace(",", "")) for row in rows)
    assert entries == sum(p.numel() for p in model.parameters())
    assert sum(int(row[1]) for row in rows) == len(list(model.parameters()))
    assert {row[3] for row in rows} == {"muon", "sgd", "-"}


def test_every_group_follows_the_schedule_from_its_own_base():
    model = tiny_vit()
    optimizer = create_optimizer(
        model, dp_optimizer="muon", learning_rate=0.1, vector_learning_rate=0.3
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    bases = [group["lr"] for group in optimizer.param_groups]
    assert {0.1, 0.3} == set(bases)
    set_gradients(model.parameters(), seed=0)
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [base / 2 for base in bases]


# What a step leaves alone


NOISE = KnownNoise(8e-4)  # of gradients of 1e-3 an entry
FAMILY = {
    "sgd": lambda ps: DPSGD(ps, lr=0.1),
    "adam": lambda ps: DPAdam(ps, lr=0.1),
    "adam_corrected": lambda ps: DPAdam(ps, lr=0.1, noise=NOISE),
    "muon_s": lambda ps: DPMuonS(ps, lr=0.1),
    "muon_s_corrected": lambda ps: DPMuonS(ps, lr=0.1, noise=NOISE),
    "muon_you": lambda ps: DPMuon(ps, lr=0.1, ns_coefficients="quintic_tuned"),
    "muon_without_nesterov": lambda ps: DPMuon(ps, lr=0.1, nesterov=False),
    **{
        f"muon_{name}": lambda ps, name=name: DPMuon(ps, lr=0.1, spectral_map=name, noise=NOISE)
        for name in sorted(SPECTRAL_MAPS)
    },
}


@pytest.fixture(params=FAMILY)
def build(request):
    return FAMILY[request.param]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_read_only(build, dtype):
    params = [nn.Parameter(p.detach().to(dtype)) for p in parameters()]
    optimizer = build(params)
    set_gradients(params, seed=0)
    before = [p.grad.clone() for p in params]
    optimizer.step()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(params, before, strict=True))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_momentum_buffer_is_the_average_that_it_is_said_to_be(dtype, nesterov):
    """Without nesterov it is the buffer itself that is orthogonalised."""
    (p,) = [nn.Parameter(torch.zeros(4, 6, dtype=dtype))]
    optimizer = DPMuon([p], lr=0.1, momentum=0.5, nesterov=nesterov)
    M = torch.zeros(4, 6, dtype=dtype)
    for step in range(3):
        set_gradients([p], seed=step)
        optimizer.step()
        M = torch.lerp(M, p.grad, 0.5)
        assert torch.equal(optimizer.state[p]["momentum_buffer"], M)


def strided(shape, layout):
    """A parameter of that layout in memory, and its contiguous twin."""
    twin = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    if layout == "channels_last":
        p = twin.detach().clone().contiguous(memory_format=torch.channels_last)
    elif layout == "transposed":
        p = twin.detach().clone().transpose(0, 1).contiguous().transpose(0, 1)
    else:  # a slice of a wider tensor
        p = torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2].copy_(twin.detach())
    assert not p.is_contiguous()
    return nn.Parameter(p), twin


@pytest.mark.parametrize("gradient_layout", ["same", "contiguous"])
@pytest.mark.parametrize("layout", ["channels_last", "transposed", "slice"])
def test_the_layout_in_memory_changes_no_step(build, layout, gradient_layout):
    p, twin = strided((6, 4, 3, 3), layout)
    strides = p.stride()
    for params in ([p], [twin]):
        optimizer = build(params)
        for step in range(3):
            set_gradients(params, seed=step)
            if gradient_layout == "same" and params[0] is p:
                params[0].grad = torch.empty_like(p).copy_(params[0].grad)
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.1
            optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        set_gradients(params, seed=9)
        optimizer.step()
    assert p.stride() == strides
    torch.testing.assert_close(p.detach(), twin.detach(), rtol=1e-4, atol=1e-5)


def test_a_zero_gradient_moves_nothing(build):
    params = parameters()
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.zeros_like(p)
    build(params).step()
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))


def test_a_closure_is_refused(build):
    with pytest.raises(ValueError, match="closure"):
        build(parameters()).step(lambda: 0.0)


def test_resuming_in_lock_step_changes_no_bit(build, tmp_path):
    params = parameters()
    optimizer = build(params)
    take_steps(optimizer, params, steps=3)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    twin = build(twins)
    twin.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    take_steps(optimizer, params, steps=3, first=3)
    take_steps(twin, twins, steps=3, first=3)
    assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))


OTHERS = {
    "momentum": lambda ps: DPMuon(ps, lr=0.1, momentum=0.5),
    "nesterov": lambda ps: DPMuon(ps, lr=0.1, nesterov=False),
    "weight_decay": lambda ps: DPMuon(ps, lr=0.1, weight_decay=0.1),
    "ns_steps": lambda ps: DPMuon(ps, lr=0.1, ns_steps=3),
    "ns_coefficients": lambda ps: DPMuon(ps, lr=0.1, ns_coefficients="quintic_tuned"),
    "adjust_lr_fn": lambda ps: DPMuon(ps, lr=0.1, adjust_lr_fn="original"),
    "spectral_map": lambda ps: DPMuon(ps, lr=0.1, spectral_map="svd"),
    "blocks": lambda ps: DPMuon([{"params": ps, "blocks": 2}], lr=0.1),
    "rule": lambda ps: DPMuon([{"params": ps, "rule": "sgd"}], lr=0.1),
}
EVEN = [(6, 4), (4, 6)]


@pytest.mark.parametrize("name", OTHERS)
def test_the_state_of_an_optimizer_with_another_setting_is_refused(name):
    """Torch would put the saved setting in place of the one that was asked for, without a word."""
    params, twins = parameters(EVEN), parameters(EVEN)
    saved, new = DPMuon(params, lr=0.1), OTHERS[name](twins)
    take_steps(saved, params)
    for one, other in ((saved, new), (new, saved)):
        before = [{k: v for k, v in g.items() if k != "params"} for g in other.param_groups]
        with pytest.raises(ValueError, match=rf"{name}=.* in group 0 where this optimizer has"):
            other.load_state_dict(one.state_dict())
        after = [{k: v for k, v in g.items() if k != "params"} for g in other.param_groups]
        assert after == before


def test_the_state_of_another_method_or_model_is_refused():
    built = {name: (ps := parameters(EVEN), build(ps)) for name, build in FAMILY.items()}
    for params, optimizer in built.values():
        take_steps(optimizer, params)
    for name, (_, optimizer) in built.items():
        for other, (_, theirs) in built.items():
            if name == other:
                optimizer.load_state_dict(theirs.state_dict())
            elif {name, other} != {"muon_s", "muon_s_corrected"}:  # which only a constant parts
                with pytest.raises(ValueError, match=r"the saved state (has|is of) .*; build it"):
                    optimizer.load_state_dict(theirs.state_dict())
    saved = built["sgd"][1].state_dict()
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters, this optimizer of \[3\]"):
        DPSGD(parameters(SHAPES[:3]), lr=0.1).load_state_dict(saved)
    with pytest.raises(
        ValueError, match=r"lacks 'momentum_buffer' of a parameter of shape \(5, 4\)"
    ):
        DPSGD(parameters([(5, 4), (4, 6)]), lr=0.1).load_state_dict(saved)
    theirs = parameters(EVEN)
    adamw = torch.optim.AdamW(theirs)
    take_steps(adamw, theirs)
    with pytest.raises(ValueError, match="the saved state has"):
        DPAdam(parameters(EVEN)).load_state_dict(adamw.state_dict())


def test_a_state_that_lacks_a_buffer_is_refused(build):
    params = parameters()
    optimizer = build(params)
    params[-1].grad = None
    take_steps(optimizer, params[:-1])
    whole = optimizer.state_dict()
    build(parameters()).load_state_dict(copy.deepcopy(whole))
    for index in (0, len(params) - 1):
        for entry in whole["state"][0].keys() - {"noise_average"}:
            cut = copy.deepcopy(whole)
            del cut["state"][index][entry]
            with pytest.raises(ValueError, match=f"lacks '{entry}' of a parameter of shape"):
                build(parameters()).load_state_dict(cut)
        cut = copy.deepcopy(whole)
        del cut["state"][index]
        with pytest.raises(ValueError, match="lacks 'steps' of a parameter of shape"):
            build(parameters()).load_state_dict(cut)


def test_a_loaded_optimizer_keeps_its_constants_and_takes_the_saved_learning_rate():
    params, twins = parameters(), parameters()
    saved = DPMuon(params, lr=0.1, spectral_map="selective", noise=KnownNoise(1.0))
    take_steps(saved, params)
    twin = DPMuon(
        twins, lr=0.3, spectral_map="selective", noise=KnownNoise(2.0), ns_dtype=torch.bfloat16
    )
    twin.load_state_dict(saved.state_dict())
    assert twin.noise == KnownNoise(2.0)
    assert twin.ns_dtype is torch.bfloat16
    assert [group["lr"] for group in twin.param_groups] == [0.1]


@pytest.mark.parametrize("optimizer", [DPMuon, DPMuonS])
def test_the_type_of_the_iteration_reaches_it(optimizer):
    moved = []
    for dtype in (torch.float32, torch.bfloat16):
        (p,) = parameters([(12, 16)])
        take_steps(optimizer([p], lr=1.0, ns_dtype=dtype), [p], steps=1)
        moved.append(p.detach().clone() - parameters([(12, 16)])[0].detach())
    difference = (moved[0] - moved[1]).norm() / moved[0].norm()
    assert 1e-4 < difference < 0.1


def test_the_default_factor_of_dp_muon_s_has_no_cap():
    """That of DP-Muon has: a matrix of aspect 6 tells them apart."""
    (p,) = [nn.Parameter(torch.zeros(12, 2))]
    set_gradients([p], seed=0)
    DPMuonS([p], lr=1.0).step()
    torch.testing.assert_close(-p.detach(), 6**0.5 * scaled_polar(p.grad))
    (p,) = [nn.Parameter(torch.zeros(12, 2))]
    set_gradients([p], seed=0)
    DPMuon([p], lr=1.0).step()
    torch.testing.assert_close(-p.detach(), 4**0.5 * newton_schulz(p.grad))


def test_without_look_ahead_the_noise_is_that_of_the_average():
    (p,) = [nn.Parameter(torch.zeros(12, 16))]
    optimizer = DPMuon(
        [p], lr=1.0, momentum=0.8, nesterov=False, spectral_map="known_noise_polar",
        noise=KnownNoise(1e-3),
    )  # fmt: skip
    M = torch.zeros(12, 16)
    for t in range(1, 4):
        set_gradients([p], seed=t)
        p.grad[0] += 5e-3  # two directions stand out, unequally
        p.grad[1, ::2] += 9e-3
        before = p.detach().clone()
        optimizer.step()
        M = torch.lerp(M, p.grad, 0.2)
        images = {
            response.__name__: spectral_map(
                M,
                name="known_noise_polar",
                noise_std=1e-3 * math.sqrt(variance_factor([response(0.8)], t)),
            )
            for response in (ema, lookahead)
        }
        torch.testing.assert_close(before - p.detach(), images["ema"], rtol=1e-4, atol=1e-6)
    assert (images["ema"] - images["lookahead"]).norm() > 1e-2


def test_accelerate_wraps_it_before_any_step(build):
    params, twins = parameters(), parameters()
    optimizer = build(params)
    wrapped = Accelerator(cpu=True).prepare_optimizer(copy.copy(optimizer))
    take_steps(wrapped, params)
    take_steps(build(twins), twins)
    assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))


def test_same_gradients_give_the_same_bits(build):
    params, twins = parameters(), parameters()
    take_steps(build(params), params)
    take_steps(build(twins), twins)
    assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))


def test_each_method_takes_its_own_step():
    """No two methods move the same weights alike: none has silently become another."""
    moved = {}
    for name, build in FAMILY.items():
        params = parameters([(12, 16), (6, 8)])
        optimizer = build(params)
        for step in range(3):
            set_gradients(params, seed=step)
            params[0].grad += torch.linspace(0, 2e-3, 12)[:, None]  # a signal in noise
            params[1].grad *= 0.5  # noise only
            before = [p.detach().clone() for p in params]
            optimizer.step()
        steps = [(p - old).detach().flatten() for p, old in zip(params, before, strict=True)]
        moved[name] = torch.cat(steps)
    names = list(moved)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            difference = (moved[one] - moved[other]).norm()
            assert difference > 1e-3 * moved[one].norm(), (one, other)


def test_spectral_steps_have_the_stated_spectra():
    """Of the last update over its factor: flat, or as large as the gradient, or of low rank."""
    values = {}
    for name in FAMILY:
        (p,) = parameters([(12, 16)])
        optimizer = FAMILY[name]([p])
        set_gradients([p], seed=1)
        p.grad += 2e-3
        before = p.detach().clone()
        optimizer.step()
        values[name] = torch.linalg.svdvals(before - p.detach()) / 0.1
    assert values["muon_svd"].tolist() == pytest.approx([1.0] * 12, abs=1e-3)
    assert 0.67 < values["muon_newton_schulz"].min() < values["muon_newton_schulz"].max() < 1.21
    assert values["muon_you"].max() - values["muon_you"].min() < 0.1
    for name in ("known_noise_polar", "shrink_frobenius", "shrink_operator", "hard_threshold"):
        assert values[f"muon_{name}"].max() <= 1.0001
        assert values[f"muon_{name}"].min() < 0.5
    sigma = torch.linalg.matrix_norm(p.grad, ord=2)
    assert 0.67 * sigma < values["muon_s"].min() < values["muon_s"].max() < 1.21 * sigma
    assert values["sgd"].max() / values["sgd"].min() > 10


@pytest.mark.parametrize("name", sorted(SPECTRAL_MAPS))
def test_an_optimizer_survives_a_copy_with_its_constants(name):
    params = parameters()
    optimizer = FAMILY[f"muon_{name}"](params)
    twin = copy.deepcopy(optimizer)
    twins = [p for group in twin.param_groups for p in group["params"]]
    take_steps(optimizer, params)
    take_steps(twin, twins)
    assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))
    state = optimizer.state_dict()
    assert "noise" not in state["param_groups"][0]


def test_optimizer_state_is_as_small_as_said():
    for name, copies in (("sgd", 1), ("adam", 2), ("muon_newton_schulz", 1), ("muon_s", 1)):
        params = parameters()
        optimizer = FAMILY[name](params)
        take_steps(optimizer, params, steps=2)
        held = sum(
            t.numel()
            for state in optimizer.state.values()
            for t in state.values()
            if torch.is_tensor(t)
        )
        assert held == copies * sum(p.numel() for p in params), name


# Misuse


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: DPSGD(parameters(), lr=-1.0), r"lr=-1.0 must be in \[0"),
        (lambda: DPSGD(parameters(), momentum=1.0), r"momentum=1.0 must be in \[0.0, 1.0\)"),
        (lambda: DPMuon(parameters(), weight_decay=-0.1), r"weight_decay=-0.1 must be"),
        (lambda: DPMuon(parameters([(3,)])), r"shape \(3,\) is no matrix"),
        (lambda: DPMuonS(parameters([(3,)])), r"shape \(3,\) is no matrix"),
        (lambda: DPAdam(parameters(), betas=(0.9, 1.0)), r"betas=1.0 must be in \[0.0, 1.0\)"),
        (lambda: DPAdam(parameters(), eps=0.0), r"eps=0.0 must be > 0"),
        (lambda: DPAdam(parameters(), noise_floor=-1.0), r"noise_floor=-1.0 must be in"),
        (lambda: KnownNoise(-1.0), r"std=-1.0 must be in"),
        (lambda: DPMuon(parameters(), ns_steps=0), r"ns_steps=0 must be >= 1"),
        (lambda: DPMuon(parameters(), ns_coefficients="us"), r"'us' must be one of quintic"),
        (
            lambda: DPMuon(parameters(), adjust_lr_fn="rms"),
            r"'rms' must be one of match",
        ),
        (lambda: DPMuon(parameters(), spectral_map="qr"), r"spectral_map='qr' must be one of"),
        (lambda: DPMuon(parameters(), spectral_map="selective"), r"needs noise=KnownNoise"),
        (lambda: DPMuon([{"params": parameters(), "blocks": 5}]), r"into blocks=5 equal matrices"),
        (lambda: DPMuon([{"params": parameters(), "rule": "adam"}]), r"rule='adam' must be one of"),
    ],
)
def test_misuse_is_refused_by_name_and_range(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("make", "group", "message"),
    [
        (lambda ps: DPMuon(ps), {"params": parameters([(3,)])}, r"shape \(3,\) is no matrix"),
        (lambda ps: DPMuonS(ps), {"params": parameters([(3,)])}, r"shape \(3,\) is no matrix"),
        (lambda ps: DPMuon(ps), {"lr": -1.0}, r"lr=-1.0 must be in"),
        (lambda ps: DPMuon(ps), {"lr": math.nan}, r"lr=nan must be in"),
        (lambda ps: DPSGD(ps), {"momentum": 2.0}, r"momentum=2.0 must be in"),
        (lambda ps: DPSGD(ps), {"weight_decay": -1.0}, r"weight_decay=-1.0 must be in"),
        (lambda ps: DPSGD(ps), {"rule": "muon"}, r"rule='muon' must be one of sgd"),
        (lambda ps: DPAdam(ps), {"rule": "sgd"}, r"rule='sgd' must be one of adam"),
        (lambda ps: DPAdam(ps), {"betas": (0.9, 1.0)}, r"betas=1.0 must be in"),
        (lambda ps: DPAdam(ps), {"eps": 0.0}, r"eps=0.0 must be > 0"),
        (lambda ps: DPMuon(ps), {"rule": "muon_s"}, r"rule='muon_s' must be one of muon, sgd"),
        (lambda ps: DPMuon(ps), {"ns_steps": 0}, r"ns_steps=0 must be >= 1"),
        (lambda ps: DPMuon(ps), {"blocks": 0}, r"blocks=0 must be >= 1"),
        (lambda ps: DPMuon(ps), {"blocks": 5}, r"blocks=5 equal matrices"),
        (lambda ps: DPMuon(ps), {"adjust_lr_fn": "x"}, r"adjust_lr_fn='x' must be one of"),
        (lambda ps: DPMuon(ps), {"ns_coefficients": "x"}, r"ns_coefficients='x' must be one of"),
        (lambda ps: DPMuon(ps), {"spectral_map": "x"}, r"spectral_map='x' must be one of"),
        (lambda ps: DPMuon(ps), {"spectral_map": "selective"}, r"needs noise=KnownNoise"),
    ],
)
def test_a_group_that_is_added_is_checked_as_the_first_ones_are(make, group, message):
    params, added = parameters(), {"params": parameters([(4, 4)], seed=1), **group}
    optimizer = make(params)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(added)
    assert len(optimizer.param_groups) == 1  # the refused group is not left behind
    take_steps(optimizer, params)
    with pytest.raises(ValueError, match=message):
        make([{"params": params}, added])
    optimizer.add_param_group({"params": parameters([(4, 4)], seed=1)})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dp_optimizer": "adagrad"}, r"dp_optimizer='adagrad' must be one of sgd, adam, "),
        ({"dp_optimizer": "sgd", "spectral_map": "svd"}, r"spectral_map='svd' has no effect"),
        ({"dp_optimizer": "muon_s", "spectral_map": "svd"}, r"spectral_map='svd' has no effect"),
        ({"dp_optimizer": "muon", "correct_for_noise": True}, r"correct_for_noise=True has no"),
        ({"dp_optimizer": "adam", "correct_for_noise": True}, r"needs noise=KnownNoise"),
        (
            {
                "dp_optimizer": "muon",
                "vector_learning_rate": 0.1,
                "spectral_map": "selective",
            },
            r"needs noise=KnownNoise",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        create_optimizer(tiny_vit(), learning_rate=0.1, **settings)


def test_a_known_noise_level_reaches_only_what_uses_it():
    noise = KnownNoise(1e-3)

    def build(**settings):
        return create_optimizer(tiny_vit(), learning_rate=0.1, noise=noise, steps=10, **settings)

    assert build(dp_optimizer="adam").noise is None
    assert build(dp_optimizer="adam", correct_for_noise=True).noise is noise
    assert build(dp_optimizer="muon_s").noise is None
    assert build(dp_optimizer="muon_s", correct_for_noise=True).noise is noise
    assert build(dp_optimizer="muon", spectral_map="selective").noise is noise
    assert build(dp_optimizer="muon", spectral_map="svd").noise is None


def test_muon_without_a_matrix_is_refused():
    model = tiny_vit()
    for p in model.parameters():
        p.requires_grad_(p.ndim == 1)
    for name in ("muon", "muon_s"):
        with pytest.raises(ValueError, match="found no trainable matrix"):
            create_optimizer(model, dp_optimizer=name, learning_rate=0.1, vector_learning_rate=0.1)

"""Laws and oracles of the optimizers: what one step does to the weights, and to nothing else."""

import copy
import math

import pytest
import torch
from accelerate import Accelerator
from conftest import TINY_MODELS, tiny_vit
from torch import nn
from torch.optim import _muon

from hf_dpmuon.optim import DPSGD, DPMuon, create_optimizer, muon_scale, routing_table
from hf_dpmuon.spectral import newton_schulz

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


@pytest.mark.parametrize(
    ("shape", "factor"),
    [((768, 3072), 1.0), ((3072, 768), 2.0), ((1536, 384), 2.0), ((100, 1), 2.0), ((6, 3), 2**0.5)],
)
def test_scale_of_the_paper_is_capped_at_aspect_four(shape, factor):
    assert muon_scale(*shape) == pytest.approx(factor)


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


@pytest.mark.parametrize("dp_optimizer", ["sgd", "muon"])
@pytest.mark.parametrize("architecture", TINY_MODELS)
def test_groups_hold_each_trainable_parameter_once(architecture, dp_optimizer):
    model = TINY_MODELS[architecture]()
    frozen = next(p for p in model.parameters() if p.ndim == 2)
    frozen.requires_grad_(False)
    optimizer = create_optimizer(
        model, dp_optimizer=dp_optimizer, learning_rate=0.1, vector_learning_rate=0.3
    )
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


@pytest.mark.parametrize("dp_optimizer", ["sgd", "muon"])
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
            vector_learning_rate=0.2,
            weight_decay=0.01,
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


FAMILY = {
    "sgd": lambda ps: DPSGD(ps, lr=0.1),
    "muon": lambda ps: DPMuon(ps, lr=0.1),
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_momentum_buffer_is_the_average_that_it_is_said_to_be(dtype):
    (p,) = [nn.Parameter(torch.zeros(4, 6, dtype=dtype))]
    optimizer = DPMuon([p], lr=0.1, momentum=0.5)
    M = torch.zeros(4, 6, dtype=dtype)
    for step in range(3):
        set_gradients([p], seed=step)
        optimizer.step()
        M = torch.lerp(M, p.grad, 0.5)
        assert torch.equal(optimizer.state[p]["momentum_buffer"], M)


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
    moved = {}
    for name, build in FAMILY.items():
        params = parameters([(6, 8)])
        take_steps(build(params), params, steps=2)
        start = parameters([(6, 8)])[0]
        moved[name] = nn.functional.normalize((params[0] - start).detach().flatten(), dim=0)
    names = list(moved)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert moved[one] @ moved[other] < 0.9999, (one, other)


# Misuse


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: DPSGD(parameters(), lr=-1.0), r"lr=-1.0 must be in \[0"),
        (lambda: DPSGD(parameters(), momentum=1.0), r"momentum=1.0 must be in \[0.0, 1.0\)"),
        (lambda: DPMuon(parameters(), weight_decay=-0.1), r"weight_decay=-0.1 must be"),
        (lambda: DPMuon(parameters([(3,)])), r"shape \(3,\) is no matrix"),
    ],
)
def test_misuse_is_refused_by_name_and_range(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="dp_optimizer='adagrad' must be"):
        create_optimizer(
            tiny_vit(), dp_optimizer="adagrad", learning_rate=0.1, vector_learning_rate=0.1
        )


def test_muon_without_a_matrix_is_refused():
    model = tiny_vit()
    for p in model.parameters():
        p.requires_grad_(p.ndim == 1)
    with pytest.raises(ValueError, match="found no trainable matrix"):
        create_optimizer(model, dp_optimizer="muon", learning_rate=0.1, vector_learning_rate=0.1)

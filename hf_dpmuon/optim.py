"""Optimizers on gradients that are already private: momentum, direction, step.

Receives ``p.grad`` as the mechanism and the filter left it, and, where a method wants it, the
public level of the noise in it; moves the weights. Nothing here clips or draws noise, so everything
here is post-processing. ``p.grad`` is read, never written.

Each method is a pure ``*_update`` function on lists of tensors; the classes hold state and call it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from hf_dpmuon.known_noise import (
    NO_FILTER,
    KnownNoise,
    LinearResponse,
    ema,
    heavy_ball,
    lookahead,
)
from hf_dpmuon.spectral import (
    NOISE_AWARE_MAPS,
    SPECTRAL_MAPS,
    Triple,
    coefficient_table,
    scaled_polar,
    spectral_map,
)

__all__ = [
    "ADJUST_LR",
    "DPSGD",
    "DPAdam",
    "DPMuon",
    "DPMuonS",
    "momenta_after",
]

CACHE_ENTRIES = 1 << 18  # on a CPU, entries of a stack of matrices: a core's cache

# Factors on the learning rate of an m x n matrix. The paper's is `original` with a cap, which its
# summary states ("rectangular scaling"); the others are those of torch.optim.Muon.
ADJUST_LR: dict[str, Callable[[int, int], float]] = {
    "paper": lambda m, n: math.sqrt(min(4.0, max(1.0, m / n))),
    "original": lambda m, n: math.sqrt(max(1.0, m / n)),
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    "spectral_unclamped": lambda m, n: math.sqrt(m / n),
}


def _check(name: str, value: float, *, low: float, high: float = math.inf) -> None:
    if not low <= value < high:
        raise ValueError(f"{name}={value} must be in [{low}, {high}).")


def _check_name(name: str, value: str, legal: Iterable[str]) -> None:
    if value not in legal:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(sorted(legal))}.")


# ---- Updates: lists of tensors in, lists of tensors changed in place ----


def sgd_update(
    parameters: list[Tensor],
    gradients: list[Tensor],
    buffers: list[Tensor],
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
) -> None:
    """Heavy-ball step in place: M <- beta M + g + wd W;  W <- W - lr M (as ``torch.optim.SGD``)."""
    heavy_ball_update(gradients, buffers, momentum=momentum)
    if weight_decay:
        torch._foreach_add_(buffers, parameters, alpha=weight_decay)
    torch._foreach_add_(parameters, buffers, alpha=-lr)


def adam_update(
    parameters: list[Tensor],
    gradients: list[Tensor],
    first_moments: list[Tensor],
    second_moments: list[Tensor],
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    noise_variance: float = 0.0,
    noise_floor: float = 0.0,
) -> None:
    """AdamW step in place (as ``torch.optim.AdamW``), less the noise's part of the second moment.

    The denominator is sqrt(max(v_hat - noise_variance, noise_floor)) + eps (DP-AdamBC, arXiv
    2312.14334; decoupled decay, arXiv 2511.07843).
    """
    torch._foreach_mul_(parameters, 1 - lr * weight_decay)
    torch._foreach_lerp_(first_moments, gradients, 1 - betas[0])
    torch._foreach_mul_(second_moments, betas[1])
    torch._foreach_addcmul_(second_moments, gradients, gradients, 1 - betas[1])
    denominators = torch._foreach_div(second_moments, 1 - betas[1] ** step)
    if noise_variance:
        torch._foreach_sub_(denominators, noise_variance)
        torch._foreach_clamp_min_(denominators, noise_floor)
    torch._foreach_sqrt_(denominators)
    torch._foreach_add_(denominators, eps)
    torch._foreach_addcdiv_(
        parameters, first_moments, denominators, value=-lr / (1 - betas[0] ** step)
    )


def average_update(
    gradients: list[Tensor], buffers: list[Tensor], *, momentum: float, nesterov: bool
) -> list[Tensor]:
    """M <- beta M + (1 - beta) g in place; return (1 - beta) g + beta M, or M without nesterov.

    Without nesterov the result is the buffers themselves: to be read, not written.
    """
    torch._foreach_lerp_(buffers, gradients, 1 - momentum)
    return list(torch._foreach_lerp(gradients, buffers, momentum)) if nesterov else buffers


def heavy_ball_update(
    gradients: list[Tensor], buffers: list[Tensor], *, momentum: float
) -> list[Tensor]:
    """M <- beta M + g in place; return the buffers: to be read, not written."""
    torch._foreach_mul_(buffers, momentum)
    torch._foreach_add_(buffers, gradients)
    return buffers


def muon_update(
    parameters: list[Tensor],
    gradients: list[Tensor],
    buffers: list[Tensor],
    *,
    momentum: Momentum,
    direction: Callable[[Tensor], Tensor],
    lr: float,
    weight_decay: float,
    adjust_lr_fn: str,
    blocks: int,
) -> None:
    """Step of every matrix along its mapped momentum: W <- (1 - lr wd) W - lr factor map(M).

    Matrices of one shape go through ``direction`` as one stack, which on a CPU is cut into pieces
    of a core's cache. With several processes each maps its share of the stacks, then one sum over
    processes hands all directions to all of them: each has one owner, the others add zeros.

    Args:
        parameters: With two or more dimensions; each is the matrix of its first by all others.
        gradients: The same shapes; read only.
        buffers: Momentum buffers of the same shapes, contiguous.
        momentum: Updates the buffers in place from the gradients; returns what is mapped.
        direction: From a stack (k, m, n) to a new one.
        lr: Learning rate.
        weight_decay: Decoupled.
        adjust_lr_fn: A key of ``ADJUST_LR``.
        blocks: Number of matrices that each parameter stacks along its first dimension.
    """
    weights = [p.contiguous() for p in parameters]  # copies only where a layout is another
    targets, M = _matrices(weights, blocks), _matrices(buffers, blocks)
    G = _matrices([gradient.contiguous() for gradient in gradients], blocks)
    if weight_decay:
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
    processes = distributed.get_world_size() if distributed.is_initialized() else 1
    rank = distributed.get_rank() if processes > 1 else 0
    shared, steps = _zeros_like(targets) if processes > 1 else (None, [])
    for number, part in enumerate(_same_shape(targets, shares=processes)):
        momenta = momentum([G[i] for i in part], [M[i] for i in part])
        if number % processes != rank:
            continue
        directions = direction(torch.stack(momenta) if len(part) > 1 else momenta[0][None])
        directions.mul_(-lr * ADJUST_LR[adjust_lr_fn](*directions.shape[1:]))
        torch._foreach_add_([(steps or targets)[i] for i in part], list(directions))
    if shared is not None:
        distributed.all_reduce(shared)
        torch._foreach_add_(targets, steps)
    for p, moved in zip(parameters, weights, strict=True):
        if not p.is_contiguous():
            p.copy_(moved)


def _matrices(tensors: list[Tensor], blocks: int) -> list[Tensor]:
    """Views of the matrices in each tensor: its first dimension, cut in blocks, by all others."""
    return [block for t in tensors for block in t.view(len(t), -1).chunk(blocks)]


def _zeros_like(matrices: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """One vector of zeros, and views of it in the shapes of the matrices."""
    sizes = [matrix.numel() for matrix in matrices]
    flat = matrices[0].new_zeros(sum(sizes))
    pieces = zip(torch.split(flat, sizes), matrices, strict=True)
    return flat, [piece.view(matrix.shape) for piece, matrix in pieces]


def _same_shape(matrices: list[Tensor], *, shares: int) -> Iterator[list[int]]:
    """Indices of matrices to stack: all of one shape, or a share of them, or fewer on a CPU."""
    by_shape: dict[torch.Size, list[int]] = {}
    for index, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(index)
    for shape, indices in by_shape.items():
        of_a_share = -(-len(indices) // shares)
        of_a_cache = max(1, CACHE_ENTRIES // shape.numel())
        size = of_a_share if matrices[0].is_cuda else min(of_a_share, of_a_cache)
        for start in range(0, len(indices), size):
            yield indices[start : start + size]


# ---- Optimizers ----


BUFFERS = {  # what each rule keeps of a parameter
    "sgd": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "muon": ("momentum_buffer",),
    "muon_s": ("momentum_buffer",),
}
Momentum = Callable[[list[Tensor], list[Tensor]], list[Tensor]]
OF_THE_RUN = frozenset({"params", "lr"})  # entries of a group that a checkpoint brings


def _named(group: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: group[name] for name in names}


class _PrivateOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` whose groups name their ``rule``, and whose steps are counted.

    Steps are counted for each parameter, from its first gradient on.

    Attributes:
        rules: What the ``rule`` of a group may be.
        noise: Public level of the noise in the gradients, or None. A constant of the run, like the
            other attributes: copied and pickled with the optimizer, not part of its state dict.
    """

    rules: frozenset[str] = frozenset({"sgd"})
    noise: KnownNoise | None = None
    noise_floor = 0.0
    ns_dtype = torch.float32

    def __init__(self, groups: Iterable[Any], defaults: dict[str, Any]) -> None:
        super().__init__(groups, {"weight_decay": 0.0, **defaults})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, unless one of its settings is out of range.

        Raises:
            ValueError: If one is.
        """
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        _check_name("rule", group["rule"], self.rules)
        _check("lr", group["lr"], low=0.0)
        _check("weight_decay", group["weight_decay"], low=0.0)
        if group["rule"] != "adam":
            _check("momentum", group["momentum"], low=0.0, high=1.0)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move the weights along the private gradients.

        Raises:
            ValueError: If a closure is given: it would evaluate a gradient that is not private.
        """
        if closure is not None:
            raise ValueError(
                "step(closure) is not supported: the closure's gradient would bypass the privacy "
                "mechanism; call step() after the trainer has released the gradient."
            )
        for group in self.param_groups:
            by_steps: dict[int, list[Tensor]] = {}
            for p in group["params"]:
                state = self.state[p] or self._begin(p, group["rule"])
                if p.grad is not None:
                    state["steps"] += 1
                    by_steps.setdefault(state["steps"], []).append(p)
            for steps, parameters in by_steps.items():
                self._step_group(group, parameters, steps)

    def _begin(self, p: Tensor, rule: str) -> dict[str, Any]:
        layout = torch.preserve_format if rule in ("sgd", "adam") else torch.contiguous_format
        state: dict[str, Any] = self.state[p]
        state["steps"] = 0
        for name in BUFFERS[rule]:
            state[name] = torch.zeros_like(p, memory_format=layout)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from ``state_dict()`` of an optimizer with the same settings; keep one's own.

        Only learning rates, which schedules change, and what steps have left are read.

        Raises:
            ValueError: If a setting is another there, or a parameter's state is missing or not of
                its rule and shape; the optimizer is as it was.
        """
        saved, own = state_dict["param_groups"], self.param_groups
        counts = [[len(group["params"]) for group in groups] for groups in (saved, own)]
        if counts[0] != counts[1]:
            raise ValueError(
                f"the saved state is of groups of {counts[0]} parameters, this optimizer of "
                f"{counts[1]}; build it for the same model with the settings of the saved run."
            )
        for number, (theirs, ours) in enumerate(zip(saved, own, strict=True)):
            for name in sorted((self.defaults.keys() & ours.keys()) - OF_THE_RUN):
                there, here = theirs.get(name), ours[name]
                if (tuple(there) if isinstance(there, list) else there) != here:
                    raise ValueError(
                        f"the saved state has {name}={there!r} in group {number} where this "
                        f"optimizer has {here!r}; build it with the settings of the saved run."
                    )
            for key, p in zip(theirs["params"], ours["params"], strict=True):
                if state_dict["state"]:
                    self._check_saved(state_dict["state"].get(key, {}), p, ours["rule"], number)
        super().load_state_dict(state_dict)

    def _check_saved(self, saved: dict[str, Any], p: Tensor, rule: str, group: int) -> None:
        for name in ("steps", *BUFFERS[rule]):
            shape = p.shape if name in BUFFERS[rule] else None
            if name not in saved or getattr(saved[name], "shape", None) != shape:
                raise ValueError(
                    f"the saved state lacks {name!r} of a parameter of shape {tuple(p.shape)} in "
                    f"group {group}; it is damaged, or of another optimizer or model."
                )

    def __getstate__(self) -> dict[str, Any]:
        constants = {
            "noise": self.noise,
            "noise_floor": self.noise_floor,
            "ns_dtype": self.ns_dtype,
        }
        return {**super().__getstate__(), **constants}

    def _tensors(self, group: dict[str, Any], parameters: list[Tensor]) -> list[list[Tensor]]:
        """The first arguments of an update: parameters, gradients, and what its rule keeps."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        kept = [[self.state[p][name] for p in parameters] for name in BUFFERS[group["rule"]]]
        return [parameters, gradients, *kept]

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor], steps: int) -> None:
        """Step ``parameters`` of one group that all take their step of this number, from 1."""
        settings = _named(group, "lr", "momentum", "weight_decay")
        sgd_update(*self._tensors(group, parameters), **settings)

    def _momentum(self, group: dict[str, Any]) -> tuple[Momentum, LinearResponse]:
        """The momentum of a group, and what it does to the noise."""
        beta = group["momentum"]
        return partial(heavy_ball_update, momentum=beta), heavy_ball(beta)


@torch.no_grad()
def momenta_after(
    optimizer: torch.optim.Optimizer, gradients: Mapping[Tensor, Tensor], *, step: int
) -> Iterator[tuple[Tensor, Tensor, LinearResponse, int]]:
    """What a step on private gradients would move along, before any map; nothing is changed.

    Args:
        optimizer: One of this module; of another only the gradients themselves are known.
        gradients: By parameter; of any of them.
        step: Number of the step, from 1, where the optimizer counts none of its own.

    Yields:
        Parameter, its momentum, what that makes of noise, and the number of the step.
    """
    if not isinstance(optimizer, _PrivateOptimizer):
        yield from ((p, gradient, NO_FILTER, step) for p, gradient in gradients.items())
        return
    for group in optimizer.param_groups:
        update, response = optimizer._momentum(group)
        for p in group["params"]:
            if p not in gradients:
                continue
            state = optimizer.state.get(p)
            buffer = state[BUFFERS[group["rule"]][0]] if state else torch.zeros_like(p)
            (momentum,) = update([gradients[p]], [buffer.clone()])
            yield p, momentum, response, (state["steps"] if state else 0) + 1


class DPSGD(_PrivateOptimizer):
    """DP-SGD with heavy-ball momentum (Abadi et al. 2016); the step of ``torch.optim.SGD``.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate, >= 0.
        momentum: beta in [0, 1).
        weight_decay: Coupled L2 penalty, >= 0.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"rule": "sgd", "lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults)


class DPAdam(_PrivateOptimizer):
    """DP-Adam with decoupled weight decay; the step of ``torch.optim.AdamW``.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate, >= 0.
        betas: Those of the first and second moment, each in [0, 1).
        eps: Added to the denominator, > 0.
        weight_decay: Decoupled, >= 0.
        noise: If given, the part of the second moment that is noise is subtracted (DP-AdamBC),
            with the variance that the filter leaves.
        noise_floor: What the corrected second moment is at least, as a share of that variance. The
            default is about three standard errors of the second moment of pure noise at
            beta_2 = .999, so that an entry that is all noise does not divide by almost nothing.
    """

    rules = frozenset({"adam"})

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        noise: KnownNoise | None = None,
        noise_floor: float = 0.1,
    ) -> None:
        _check("noise_floor", noise_floor, low=0.0)
        defaults = {"rule": "adam", "lr": lr, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})
        self.noise = noise
        self.noise_floor = noise_floor

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        group["betas"] = tuple(group["betas"])
        for beta in group["betas"]:
            _check("betas", beta, low=0.0, high=1.0)
        if not group["eps"] > 0:
            raise ValueError(f"eps={group['eps']} must be > 0.")

    def _momentum(self, group: dict[str, Any]) -> tuple[Momentum, LinearResponse]:
        beta = group["betas"][0]
        return partial(average_update, momentum=beta, nesterov=False), ema(beta)

    def _check_saved(self, saved: dict[str, Any], p: Tensor, rule: str, group: int) -> None:
        super()._check_saved(saved, p, rule, group)
        if saved["steps"] and ("noise_average" in saved) != (self.noise is not None):
            there, here = ("without", "with") if self.noise is not None else ("with", "without")
            raise ValueError(
                f"the saved state is of DPAdam {there} a known noise, this optimizer is {here} it; "
                "build it with the settings of the saved run."
            )

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor], steps: int) -> None:
        beta, variance = group["betas"][1], 0.0
        if self.noise is not None:  # the same average as the second moment's, of its noise
            average = beta * self.state[parameters[0]].get("noise_average", 0.0)
            average += (1 - beta) * self.noise.variance(steps)
            for p in parameters:
                self.state[p]["noise_average"] = average
            variance = average / (1 - beta**steps)
        adam_update(
            *self._tensors(group, parameters),
            **_named(group, "lr", "betas", "eps", "weight_decay"),
            step=steps,
            noise_variance=variance,
            noise_floor=self.noise_floor * variance,
        )


class _MatrixOptimizer(_PrivateOptimizer):
    """Spectral steps in groups whose ``rule`` is the class's own, DP-SGD in groups of "sgd"."""

    def __init__(
        self,
        params: Iterable[Any],
        noise: KnownNoise | None,
        ns_dtype: torch.dtype,
        **defaults: Any,
    ) -> None:
        self.noise = noise  # before the groups, whose maps may need it
        self.ns_dtype = ns_dtype
        if ns_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"ns_dtype={ns_dtype} must be torch.float32 or torch.bfloat16.")
        super().__init__(params, {"blocks": 1, **defaults})

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        _check_name("adjust_lr_fn", group["adjust_lr_fn"], ADJUST_LR)
        coefficient_table(group["ns_coefficients"])
        for name in ("ns_steps", "blocks"):
            if group[name] < 1:
                raise ValueError(f"{name}={group[name]} must be >= 1.")
        if group["rule"] == "sgd":
            return
        for p in group["params"]:
            if p.ndim < 2:
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} is no matrix and cannot be "
                    "orthogonalised; give its group rule='sgd'."
                )
            if len(p) % group["blocks"]:
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} cannot be cut into "
                    f"blocks={group['blocks']} equal matrices."
                )

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor], steps: int) -> None:
        if group["rule"] == "sgd":
            super()._step_group(group, parameters, steps)
            return
        momentum, response = self._momentum(group)
        muon_update(
            *self._tensors(group, parameters),
            **_named(group, "lr", "weight_decay", "adjust_lr_fn", "blocks"),
            momentum=momentum,
            direction=partial(
                self._direction(group),
                steps=group["ns_steps"],
                coefficients=group["ns_coefficients"],
                noise_std=None if self.noise is None else self.noise.std_after(response, steps),
                dtype=self.ns_dtype,
            ),
        )

    def _direction(self, group: dict[str, Any]) -> Callable[..., Tensor]:
        """The map from momentum to direction."""
        raise NotImplementedError


class DPMuon(_MatrixOptimizer):
    """DP-Muon (Shanmugam et al., ECCV 2026, section 3) on matrices, DP-SGD on the rest.

    For each m x n matrix of a group with ``rule="muon"``: the Nesterov average Mhat of the private
    gradients, W <- (1 - lr wd) W - lr sqrt(min(4, max(1, m/n))) NS(Mhat). A convolution kernel is
    the matrix (out, in * kh * kw); a fused query-key-value weight (``blocks=3``) is three matrices.
    A group with ``rule="sgd"`` takes the step of ``DPSGD``.

    Args:
        params: Parameter groups, each with ``rule`` and, for "muon", ``blocks`` (default 1).
        lr: In units of spectral norm per step for matrices.
        momentum: beta of the average, in [0, 1).
        nesterov: Whether the average looks ahead (the paper's does).
        weight_decay: Decoupled, >= 0, of matrices.
        ns_steps: Newton-Schulz iterations.
        ns_coefficients: Name of a coefficient table, or one triple (a, b, c) for all steps.
        adjust_lr_fn: Name of the factor for rectangular matrices, a key of ``ADJUST_LR``.
        spectral_map: Name of the direction; see ``spectral.spectral_map``.
        eps: Norm below which the momentum is not normalised; see ``spectral.newton_schulz``.
        noise: Public level of the noise, for the maps that use it.
        ns_dtype: That of the iteration: float32, or bfloat16 for speed on CUDA.

    Raises:
        ValueError: If a value is out of range, or the map needs a noise level and has none.
    """

    rules = frozenset({"sgd", "muon"})

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 2e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        ns_coefficients: str | Triple = "quintic",
        adjust_lr_fn: str = "paper",
        spectral_map: str = "newton_schulz",
        eps: float = 0.0,
        noise: KnownNoise | None = None,
        ns_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(
            params,
            noise,
            ns_dtype,
            rule="muon",
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            ns_steps=ns_steps,
            ns_coefficients=ns_coefficients,
            adjust_lr_fn=adjust_lr_fn,
            spectral_map=spectral_map,
            eps=eps,
        )

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        _check_name("spectral_map", group["spectral_map"], SPECTRAL_MAPS)
        _check("eps", group["eps"], low=0.0)
        if group["spectral_map"] in NOISE_AWARE_MAPS and self.noise is None:
            raise ValueError(
                f"spectral_map={group['spectral_map']!r} needs noise=KnownNoise(std), the known "
                "level of the noise in the gradients."
            )

    def _momentum(self, group: dict[str, Any]) -> tuple[Momentum, LinearResponse]:
        if group["rule"] == "sgd":
            return super()._momentum(group)
        beta, nesterov = group["momentum"], group["nesterov"]
        response = lookahead(beta) if nesterov else ema(beta)
        return partial(average_update, momentum=beta, nesterov=nesterov), response

    def _direction(self, group: dict[str, Any]) -> Callable[..., Tensor]:
        return partial(spectral_map, name=group["spectral_map"], eps=group["eps"])


class DPMuonS(_MatrixOptimizer):
    """DP-Muon-S (the paper, section 3): DP-Muon whose step keeps the gradient's size.

    For each m x n matrix of a group with ``rule="muon_s"``: M <- beta M + g, no look-ahead;
    W <- (1 - lr wd) W - lr sqrt(max(1, m/n)) sigma_1(M) NS(M). What is not named below is as in
    ``DPMuon``.

    Args:
        params: Parameter groups, each with ``rule`` and, for "muon_s", ``blocks`` (default 1).
        lr: In units of the gradient for matrices, as in DP-SGD with momentum.
        momentum: beta in [0, 1).
        noise: If given, sigma_1 is cleared of what noise adds to it (``spectral.scaled_polar``).
    """

    rules = frozenset({"sgd", "muon_s"})

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        ns_coefficients: str | Triple = "quintic",
        adjust_lr_fn: str = "original",
        noise: KnownNoise | None = None,
        ns_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(
            params,
            noise,
            ns_dtype,
            rule="muon_s",
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            ns_steps=ns_steps,
            ns_coefficients=ns_coefficients,
            adjust_lr_fn=adjust_lr_fn,
        )

    def _direction(self, group: dict[str, Any]) -> Callable[..., Tensor]:
        return scaled_polar

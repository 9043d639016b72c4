"""Optimizers on gradients that are already private: momentum, direction, step.

Receives ``p.grad`` as the mechanism left it; moves the weights. Nothing here knows of clipping or
noise, so everything here is post-processing. ``p.grad`` is read, never written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpmuon.models import ParameterRole, parameter_roles
from hf_dpmuon.spectral import newton_schulz

__all__ = ["DPSGD", "DPMuon", "create_optimizer", "routing_table"]

MAX_ASPECT = 4.0  # cap of m/n in the scale of DP-Muon, from the paper's summary


def _check(name: str, value: float, *, low: float, high: float = math.inf) -> None:
    if not low <= value < high:
        raise ValueError(f"{name}={value} must be in [{low}, {high}).")


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
    torch._foreach_mul_(buffers, momentum)
    torch._foreach_add_(buffers, gradients)
    if weight_decay:
        torch._foreach_add_(buffers, parameters, alpha=weight_decay)
    torch._foreach_add_(parameters, buffers, alpha=-lr)


def muon_lookahead(
    gradients: list[Tensor], buffers: list[Tensor], *, momentum: float
) -> tuple[Tensor, ...]:
    """Nesterov average of the paper: M <- beta M + (1-beta) g in place; return (1-beta) g + beta M.

    The buffers are read by the returned tensors' computation only; they share no storage with them.
    """
    torch._foreach_lerp_(buffers, gradients, 1 - momentum)
    return torch._foreach_lerp(gradients, buffers, momentum)


def muon_scale(rows: int, columns: int) -> float:
    """sqrt(min(4, max(1, m/n))) of an m x n matrix (paper's summary, "rectangular scaling")."""
    return math.sqrt(min(MAX_ASPECT, max(1.0, rows / columns)))


def orthogonalize(matrices: list[Tensor], *, steps: int, coefficients: str) -> list[Tensor]:
    """Newton-Schulz of many matrices: those of one shape (or its transpose) in one product."""
    by_shape: dict[tuple[int, int], list[int]] = {}
    for index, matrix in enumerate(matrices):
        rows, columns = matrix.shape
        by_shape.setdefault((min(rows, columns), max(rows, columns)), []).append(index)
    result = list(matrices)
    for (rows, _), indices in by_shape.items():
        wide = [matrices[i] if matrices[i].shape[0] == rows else matrices[i].mT for i in indices]
        mapped = newton_schulz(torch.stack(wide), steps=steps, coefficients=coefficients)
        for i, X in zip(indices, mapped, strict=True):
            result[i] = X if matrices[i].shape[0] == rows else X.mT
    return result


class _PrivateOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` whose groups name their ``rule``: "sgd" or "muon"."""

    def __init__(self, groups: Iterable[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        for group in self.param_groups:
            _check("lr", group["lr"], low=0.0)
            _check("momentum", group["momentum"], low=0.0, high=1.0)
            _check("weight_decay", group["weight_decay"], low=0.0)

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
            parameters = [p for p in group["params"] if p.grad is not None]
            for p in parameters:
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            if parameters:
                self._step_group(
                    group,
                    parameters,
                    [p.grad for p in parameters],
                    [self.state[p]["momentum_buffer"] for p in parameters],
                )

    def _step_group(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        buffers: list[Tensor],
    ) -> None:
        sgd_update(
            parameters,
            gradients,
            buffers,
            lr=group["lr"],
            momentum=group["momentum"],
            weight_decay=group["weight_decay"],
        )


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
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults)


class DPMuon(_PrivateOptimizer):
    """DP-Muon (Shanmugam et al., ECCV 2026, section 3) on matrices, DP-SGD on the rest.

    For each m x n matrix of a group with ``rule="muon"``: the Nesterov average Mhat of the private
    gradients, W <- (1 - lr wd) W - lr sqrt(min(4, max(1, m/n))) NS(Mhat). A convolution kernel is
    the matrix (out, in * kh * kw); a fused query-key-value weight (``blocks=3``) is three matrices.
    A group with ``rule="sgd"`` takes the step of ``DPSGD``.

    Args:
        params: Parameter groups, each with ``rule`` and, for "muon", ``blocks`` (default 1).
        lr: In units of spectral norm per step for matrices.
        momentum: beta of the Nesterov average, in [0, 1).
        weight_decay: Decoupled, >= 0.
        ns_steps: Newton-Schulz iterations.
        ns_coefficients: Name of the coefficient table.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 2e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        ns_coefficients: str = "keller",
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "ns_steps": ns_steps,
            "ns_coefficients": ns_coefficients,
            "rule": "muon",
            "blocks": 1,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            if group["rule"] == "muon":
                for p in group["params"]:
                    if p.ndim < 2:
                        raise ValueError(
                            f"a parameter of shape {tuple(p.shape)} is no matrix and cannot be "
                            "orthogonalised; give its group rule='sgd'."
                        )

    def _step_group(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        buffers: list[Tensor],
    ) -> None:
        if group["rule"] == "sgd":
            super()._step_group(group, parameters, gradients, buffers)
            return
        lookahead = muon_lookahead(gradients, buffers, momentum=group["momentum"])
        blocks: int = group["blocks"]
        matrices = [block for M in lookahead for block in M.reshape(len(M), -1).chunk(blocks)]
        directions = orthogonalize(
            matrices, steps=group["ns_steps"], coefficients=group["ns_coefficients"]
        )
        targets = [block for p in parameters for block in p.view(len(p), -1).chunk(blocks)]
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        for target, direction in zip(targets, directions, strict=True):
            target.add_(direction, alpha=-group["lr"] * muon_scale(*direction.shape))


MATRIX_ROLES = frozenset({ParameterRole.MATRIX, ParameterRole.FUSED_QKV, ParameterRole.CONV})


def create_optimizer(
    model: nn.Module,
    *,
    dp_optimizer: str = "muon",
    learning_rate: float,
    vector_learning_rate: float,
    weight_decay: float = 0.0,
    orthogonalize_head: bool = True,
    orthogonalize_patch_embedding: bool = True,
) -> torch.optim.Optimizer:
    """Sort the trainable parameters of ``model`` into groups and build their optimizer.

    Args:
        model: The classifier.
        dp_optimizer: "muon" (DP-Muon on matrices, DP-SGD on the rest) or "sgd" (DP-SGD on all).
        learning_rate: Of the matrices under "muon", of everything under "sgd".
        vector_learning_rate: Of everything that "muon" does not orthogonalise.
        weight_decay: Of matrices only.
        orthogonalize_head: Whether "muon" treats the classifier's matrix as one (the paper does).
        orthogonalize_patch_embedding: The same for the patch embedding.

    Returns:
        An optimizer whose groups hold each trainable parameter exactly once.

    Raises:
        ValueError: If ``dp_optimizer`` is unknown, or "muon" finds no matrix to orthogonalise.
    """
    roles = parameter_roles(model)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrix_roles = set(MATRIX_ROLES)
    if orthogonalize_head or dp_optimizer != "muon":
        matrix_roles.add(ParameterRole.HEAD)
    if orthogonalize_patch_embedding or dp_optimizer != "muon":
        matrix_roles.add(ParameterRole.PATCH_EMBEDDING)
    fused, matrices, vectors = [], [], []
    for name, p in trainable.items():
        if roles[name] not in matrix_roles or p.ndim < 2:
            vectors.append(p)
        elif roles[name] is ParameterRole.FUSED_QKV:
            fused.append(p)
        else:
            matrices.append(p)
    optimizer: torch.optim.Optimizer
    match dp_optimizer:
        case "sgd":
            groups = [
                {"params": matrices + fused, "weight_decay": weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ]
            optimizer = DPSGD([g for g in groups if g["params"]], lr=learning_rate)
        case "muon":
            if not matrices + fused:
                raise ValueError(
                    "dp_optimizer='muon' found no trainable matrix to orthogonalise in this model; "
                    "unfreeze its linear layers or set dp_optimizer='sgd'."
                )
            groups = [
                {"params": matrices, "weight_decay": weight_decay},
                {"params": fused, "weight_decay": weight_decay, "blocks": 3},
                {"params": vectors, "rule": "sgd", "lr": vector_learning_rate, "momentum": 0.9},
            ]
            optimizer = DPMuon([g for g in groups if g["params"]], lr=learning_rate)
        case _:
            raise ValueError(f"dp_optimizer={dp_optimizer!r} must be 'muon' or 'sgd'.")
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert len(grouped) == len(set(grouped)) == len(trainable), "groups must partition the model"
    return optimizer


def routing_table(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Lines that say which rule moves which parameters, for people to check before they train."""
    roles = parameter_roles(model)
    names = {id(p): name for name, p in model.named_parameters()}
    rows = []
    for group in optimizer.param_groups:
        rule = group.get("rule", "sgd")
        by_role: dict[str, list[Tensor]] = {}
        for p in group["params"]:
            by_role.setdefault(roles[names[id(p)]].value, []).append(p)
        rows += [
            (role, str(len(ps)), f"{sum(p.numel() for p in ps):,}", rule, f"{group['lr']:g}")
            for role, ps in by_role.items()
        ]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    if frozen:
        rows.append(("(frozen)", str(len(frozen)), f"{sum(p.numel() for p in frozen):,}", "-", "-"))
    header = ("role", "tensors", "entries", "rule", "lr")
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    )

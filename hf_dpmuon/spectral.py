"""Spectral maps: a private matrix to (an approximation of) its polar factor.

Receives matrices that are already private (momentum buffers), returns new tensors; inputs are never
written to. Everything here is post-processing and free of privacy cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["COEFFICIENTS", "Coefficients", "newton_schulz", "polar_factor"]

TINY = 1e-30  # a norm below this is a zero matrix: zero in, zero out


@dataclass(frozen=True)
class Coefficients:
    """Quintic iteration X <- a X + b (X X^T) X + c (X X^T)^2 X, one (a, b, c) a step.

    Attributes:
        steps: The triples in order; the last one repeats when more steps are asked for.
        safety: The input is divided by this times its Frobenius norm.
        source: Where the numbers come from.
    """

    steps: tuple[tuple[float, float, float], ...]
    safety: float
    source: str


COEFFICIENTS = {
    "keller": Coefficients(
        steps=((3.4445, -4.7750, 2.0315),),
        safety=1.0,
        source="Keller Jordan, Muon (2024); the paper's choice. Lands in [0.68, 1.13], no fixpoint",
    ),
}


def newton_schulz(matrix: Tensor, *, steps: int = 5, coefficients: str = "keller") -> Tensor:
    """Approximate the polar factor U V^T of each matrix U S V^T by a quintic iteration.

    Args:
        matrix: Shape (..., m, n); leading dimensions are a batch of independent matrices.
        steps: Number of iterations, at least 1.
        coefficients: Name of a row of ``COEFFICIENTS``.

    Returns:
        A new tensor of the same shape and type. Singular values land near 1, singular vectors stay;
        a zero matrix gives zero. Computed in float32.

    Raises:
        ValueError: If ``matrix`` has fewer than two dimensions, ``steps`` < 1, or the name is
            unknown.
    """
    if matrix.ndim < 2:
        raise ValueError(f"matrix of shape {tuple(matrix.shape)} must have at least 2 dimensions.")
    if steps < 1:
        raise ValueError(f"steps={steps} must be >= 1.")
    if coefficients not in COEFFICIENTS:
        raise ValueError(f"coefficients={coefficients!r} must be one of {sorted(COEFFICIENTS)}.")
    table = COEFFICIENTS[coefficients]
    tall = matrix.shape[-2] > matrix.shape[-1]
    X = (matrix.mT if tall else matrix).to(torch.float32, copy=True)
    shape = X.shape
    X = X.flatten(0, -3) if X.ndim > 2 else X[None]
    norm = torch.linalg.matrix_norm(X, keepdim=True)
    X /= (table.safety * norm).clamp(min=TINY)
    for step in range(steps):
        a, b, c = table.steps[min(step, len(table.steps) - 1)]
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    X = X.reshape(shape)
    return (X.mT if tall else X).to(matrix.dtype)


def polar_factor(matrix: Tensor) -> Tensor:
    """Exact polar factor U V^T by singular value decomposition; the oracle of the iterations.

    Args:
        matrix: Shape (..., m, n).

    Returns:
        A new tensor of the same shape and type. Directions of a zero singular value (to rounding)
        are left out, so a zero matrix gives zero.
    """
    U, S, Vh = torch.linalg.svd(matrix.float(), full_matrices=False)
    smallest = S[..., :1] * max(matrix.shape[-2:]) * torch.finfo(S.dtype).eps
    kept = ((smallest < S) & (S > TINY)).to(S.dtype)
    return ((U * kept[..., None, :]) @ Vh).to(matrix.dtype)

"""Spectral maps: a private matrix to a direction made of its singular vectors.

Receives matrices that are already private (momentum buffers) and public constants: a map's name, a
coefficient table, the known standard deviation of the noise in every entry. Returns new tensors;
inputs are never written to. Everything here is post-processing and free of privacy cost.

What is known of the singular values of signal and noise, and the notation, is in ``random_matrix``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hf_dpmuon.random_matrix import (
    detection_gate,
    detection_threshold,
    polar_weights,
    shrink_singular_values,
)

__all__ = [
    "COEFFICIENTS",
    "Triple",
    "coefficient_table",
    "Coefficients",
    "newton_schulz",
    "polar_factor",
    "spectral_norm",
    "NOISE_AWARE_MAPS",
    "SPECTRAL_MAPS",
    "spectral_map",
    "scaled_polar",
]

Triple = tuple[float, float, float]

SMALLEST = torch.finfo(torch.float32).tiny  # keeps zero by zero at zero

# ---- Newton-Schulz ----


@dataclass(frozen=True)
class Coefficients:
    """Quintic iteration X <- a X + b (X X^T) X + c (X X^T)^2 X, one (a, b, c) a step.

    Attributes:
        steps: The triples in order; the last one repeats when more steps are asked for.
        safety: f >= 1 keeps rounding from leaving the interval that the triples are made for: the
            input is divided by f times its Frobenius norm, and each triple but the last becomes
            (a / f, b / f^3, c / f^5).
        source: Where the numbers come from.
    """

    steps: tuple[Triple, ...]
    safety: float
    source: str

    def triples(self, steps: int) -> list[Triple]:
        """Return the (a, b, c) of each of ``steps`` iterations."""
        f = self.safety
        rows = [self.steps[min(step, len(self.steps) - 1)] for step in range(steps)]
        return [(a / f, b / f**3, c / f**5) for a, b, c in rows[:-1]] + rows[-1:]


COEFFICIENTS = {
    "quintic": Coefficients(
        steps=((3.4445, -4.7750, 2.0315),),
        safety=1.0,
        source="Keller Jordan, Muon (2024); the paper's choice. Lands in [0.68, 1.13], no fixpoint",
    ),
    "quintic_tuned": Coefficients(
        steps=(
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        safety=1.0,
        source="YouJiacheng, modded-nanogpt (2025). Five steps land in [0.98, 1.03]",
    ),
    "polar_express": Coefficients(
        steps=(
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
            (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
            (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
            (1.875, -1.25, 0.375),
        ),
        safety=1.01,
        source="Amsel et al. 2025 (arXiv 2505.16932), degree 5, l = 1e-3. Eight steps converge",
    ),
}

RENAMED = {"keller": "quintic", "you": "quintic_tuned"}

MIN_ASPECT = 2.0  # from which iterating on the Gram matrix costs less than on the matrix
# Rounding of the Gram matrix grows with the square of the map's slope at 0: below this slope it
# stays under 1e6 * 6e-8 of the largest eigenvalue in float32.
MAX_GRAM_SLOPE = 1e3
SPLIT_ROWS = 512  # on a CPU, rows from which a quarter of a symmetric product is worth skipping


def coefficient_table(coefficients: str | Triple) -> Coefficients:
    """Return a table by its name, or that of one triple (a, b, c) for all steps.

    Raises:
        ValueError: If the name is unknown, or there are not three finite numbers.
    """
    if isinstance(coefficients, str):
        if coefficients in RENAMED:
            raise ValueError(
                f"ns_coefficients={coefficients!r} is called {RENAMED[coefficients]!r} now."
            )
        if coefficients not in COEFFICIENTS:
            raise ValueError(
                f"ns_coefficients={coefficients!r} must be one of {', '.join(COEFFICIENTS)}, or "
                "three numbers."
            )
        return COEFFICIENTS[coefficients]
    if len(coefficients) != 3 or not all(map(math.isfinite, coefficients)):
        raise ValueError(f"ns_coefficients={coefficients!r} must be three finite numbers.")
    a, b, c = coefficients
    return Coefficients(steps=((a, b, c),), safety=1.0, source="the caller")


def newton_schulz(
    matrix: Tensor,
    *,
    steps: int = 5,
    coefficients: str | Triple = "quintic",
    eps: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Approximate the polar factor U V^T of each matrix U S V^T by a quintic iteration.

    Args:
        matrix: Shape (..., m, n); leading dimensions are a batch of independent matrices.
        steps: Number of iterations, at least 1. More do not help with "quintic".
        coefficients: Name of a row of ``COEFFICIENTS``, or one triple for all steps.
        eps: Frobenius norm below which a matrix is not brought up to norm 1, as in
            ``torch.optim.Muon``; by default every matrix but zero is.
        dtype: That of the iteration: float32, or bfloat16 for speed on CUDA. Norms are float32.

    Returns:
        A new tensor of the shape and type of ``matrix``. Singular values land near 1, singular
        vectors stay; a zero matrix gives zero, whatever else is in its batch.

    Raises:
        ValueError: If ``matrix`` has fewer than two dimensions, ``steps`` < 1, the name is unknown
            or the type is neither of the two.
    """
    _check_matrix(matrix)
    if steps < 1:
        raise ValueError(f"steps={steps} must be >= 1.")
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype={dtype} must be torch.float32 or torch.bfloat16.")
    table = coefficient_table(coefficients)
    triples = table.triples(steps)
    if not matrix.numel():
        return matrix.clone()
    stack = matrix.flatten(0, -3) if matrix.ndim > 2 else matrix[None]
    X, norm = _at_unit_norm(stack)
    if eps > 0:
        X.mul_((norm / norm.clamp(min=eps)).to(X.dtype))
    if table.safety != 1:
        X.div_(table.safety)
    return _iterate(X.to(dtype), triples).to(matrix.dtype).view(matrix.shape)


def _at_unit_norm(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Each matrix at Frobenius norm 1 in float32 (zero stays zero), and its norm in float64.

    Entries are divided by the largest first: squares of what is as small as the momentum after many
    zero gradients, or as large as 1e20, do not exist in float32.
    """
    X = matrix if matrix.dtype is torch.float64 else matrix.float()
    largest, least = (f((-2, -1), keepdim=True) for f in (X.amax, X.amin))
    peak = torch.maximum(largest, -least)  # on a CPU ten times as fast as the norm of order inf
    X = (X / torch.where(peak > 0, peak, 1.0)).float()
    norm = torch.linalg.matrix_norm(X, keepdim=True)  # at least 1, or 0
    return X.div_(norm.clamp(min=1.0)), peak.double() * norm.double()


def _iterate(stack: Tensor, triples: list[Triple]) -> Tensor:
    """Apply the quintic steps to matrices X, a stack (k, m, n), of norms at most 1.

    Every step multiplies X by P = a I + b R + c R^2 on its short side, where R is its Gram matrix
    there. Applied at once, that is the textbook iteration. Where X is far from square the factors
    are multiplied up in Q instead, with R following as R <- P R P, so that only small matrices are
    touched (Gram form, Dao-AILab 2025).
    """
    X = stack
    tall = X.shape[-2] > X.shape[-1]
    aspect = max(X.shape[-2:]) / max(1, min(X.shape[-2:]))
    gram_form = aspect >= MIN_ASPECT and X.dtype is torch.float32
    R = _gram(X)
    Q: Tensor | None = None
    slope = 1.0
    for step, (a, b, c) in enumerate(triples, start=1):
        P = _symmetric_product(R, R).mul_(c).add_(R, alpha=b)
        P.diagonal(dim1=-2, dim2=-1).add_(a)
        Q = P if Q is None else _symmetric_product(Q, P)
        slope *= a
        if gram_form and step < len(triples) and slope <= MAX_GRAM_SLOPE:
            R = _symmetric_product(_symmetric_product(R, P), P)
            continue
        X, Q, slope = X @ Q if tall else Q @ X, None, 1.0
        if step < len(triples):
            R = _gram(X)
    return X


def _gram(stack: Tensor) -> Tensor:
    """X X^T, or X^T X where that is the smaller one."""
    if stack.shape[-2] > stack.shape[-1]:
        return _symmetric_product(stack.mT, stack)
    return _symmetric_product(stack, stack.mT)


def _symmetric_product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right``, (k, m, m), known to be symmetric: one block is only mirrored."""
    m = left.shape[-2]
    if left.is_cuda or m < SPLIT_ROWS:
        return left @ right
    half = m // 2
    product = left.new_empty(len(left), m, m)
    product[:, :half, :half].baddbmm_(left[:, :half], right[:, :, :half], beta=0)
    product[:, half:].baddbmm_(left[:, half:], right, beta=0)
    product[:, :half, half:] = product[:, half:, :half].mT
    return product


def _check_matrix(matrix: Tensor) -> None:
    if matrix.ndim < 2:
        raise ValueError(f"matrix of shape {tuple(matrix.shape)} must have at least 2 dimensions.")


def polar_factor(matrix: Tensor) -> Tensor:
    """Exact polar factor U V^T by singular value decomposition; the oracle of the iterations.

    Args:
        matrix: Shape (..., m, n).

    Returns:
        A new tensor of the same shape and type. Directions of a zero singular value (to rounding)
        are left out, so a zero matrix gives zero.
    """
    _check_matrix(matrix)
    if not matrix.numel():
        return matrix.clone()
    U, S, Vh = torch.linalg.svd(_at_unit_norm(matrix)[0], full_matrices=False)
    smallest = S[..., :1] * max(matrix.shape[-2:]) * torch.finfo(S.dtype).eps
    kept = (smallest < S).to(S.dtype)
    factor: Tensor = (U * kept[..., None, :]) @ Vh
    return factor.to(matrix.dtype)


def spectral_norm(matrix: Tensor, *, iterations: int = 32) -> Tensor:
    """Largest singular value by power iteration, the best of four fixed pseudo-random starts.

    A start along an axis or a row could stay in the invariant subspace that it lies in, which a
    matrix of blocks has; a dense random vector has a part in every subspace.

    Args:
        matrix: Shape (..., m, n).
        iterations: Products with X X^T; 32 leave about 2 % on pure noise, whose values lie dense,
            and rounding where one value stands out.

    Returns:
        Shape (..., 1, 1), float32; never above the true value, nor above half of the largest
        number. Zero for a zero matrix.

    Raises:
        ValueError: If ``matrix`` has fewer than two dimensions or ``iterations`` < 1.
    """
    _check_matrix(matrix)
    if iterations < 1:
        raise ValueError(f"iterations={iterations} must be >= 1.")
    if not matrix.numel():
        return matrix.new_zeros((*matrix.shape[:-2], 1, 1), dtype=torch.float32)
    X, norm = _at_unit_norm(matrix)
    X = X.mT if X.shape[-2] > X.shape[-1] else X
    R = X @ X.mT
    u = _starts(R.shape[-1], R.device)
    for _ in range(iterations):
        u = R @ torch.nn.functional.normalize(u, dim=-2, eps=SMALLEST)
    u = torch.nn.functional.normalize(u, dim=-2, eps=SMALLEST)
    values = torch.linalg.vector_norm(X.mT @ u, dim=-2, keepdim=True)
    value: Tensor = norm * values.amax(dim=-1, keepdim=True)
    return value.clamp(max=torch.finfo(torch.float32).max / 2).float()


@lru_cache(maxsize=64)
def _starts(rows: int, device: torch.device) -> Tensor:
    """Four fixed vectors that lie in no matrix's eigenspace by design: sines of squares."""
    numbers = torch.arange(1, 4 * rows + 1, dtype=torch.float64)
    return numbers.square().sin().view(rows, 4).to(device, torch.float32)


# ---- Maps by name ----

NOISE_AWARE_MAPS = frozenset(
    {"known_noise_polar", "shrink_frobenius", "shrink_operator", "hard_threshold", "selective"}
)
SPECTRAL_MAPS = frozenset({"newton_schulz", "polar_express", "svd"}) | NOISE_AWARE_MAPS


def spectral_map(
    matrix: Tensor,
    *,
    name: str = "newton_schulz",
    steps: int = 5,
    coefficients: str | Triple = "quintic",
    eps: float = 0.0,
    noise_std: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Direction of a step along each private matrix Y = U diag(y) V^T.

    ================= ==============================================================================
    newton_schulz     approximate U V^T from ``coefficients``
    polar_express     the same from the table of that name
    svd               exact U V^T
    known_noise_polar U diag(c_L c_R) V^T, the least-squares estimate of the clean polar factor
    shrink_frobenius  U diag(shrunk) V^T at spectral norm 1, likewise shrink_operator and
                      hard_threshold; see ``shrink_singular_values``
    selective         newton_schulz where a signal is detected, else Y at the Frobenius norm of
                      U V^T, sqrt(min(m, n))
    ================= ==============================================================================

    A signal is detected where y_1 clears ``detection_gate``, which pure noise does in 1 % of draws.
    Where known_noise_polar and the shrinkers detect nothing, Y at Frobenius norm 1, which is that
    of one direction fully detected; where they detect something, the result is at least as large: a
    shorter one, of few and uncertain directions, is stretched to norm 1.

    Args:
        matrix: Shape (..., m, n).
        name: One of ``SPECTRAL_MAPS``.
        steps: Newton-Schulz iterations.
        coefficients: Table of newton_schulz.
        eps: See ``newton_schulz``; of that map only.
        noise_std: s, known standard deviation of the noise in every entry of ``matrix``; needed by
            ``NOISE_AWARE_MAPS`` and ignored by the others.
        dtype: That of the Newton-Schulz iteration.

    Returns:
        A new tensor of the same shape and type; zero exactly where the matrix is.

    Raises:
        ValueError: If an argument is out of range or a known noise level is missing.
    """
    if name not in SPECTRAL_MAPS:
        raise ValueError(
            f"spectral_map={name!r} must be one of {', '.join(sorted(SPECTRAL_MAPS))}."
        )
    if name == "newton_schulz":
        return newton_schulz(matrix, steps=steps, coefficients=coefficients, eps=eps, dtype=dtype)
    if name == "polar_express":
        return newton_schulz(matrix, steps=steps, coefficients="polar_express", dtype=dtype)
    if name == "svd":
        return polar_factor(matrix)
    if noise_std is None:
        raise ValueError(f"spectral_map={name!r} needs noise_std, the known level of the noise.")
    _check_matrix(matrix)
    if not matrix.numel():
        return matrix.clone()
    rows, columns = matrix.shape[-2:]
    gate = noise_std * detection_gate(rows, columns)
    raw, norm = _at_unit_norm(matrix)
    if name == "selective":
        direction = newton_schulz(raw, steps=steps, coefficients=coefficients, dtype=dtype)
        gram = raw @ raw.mT if rows <= columns else raw.mT @ raw
        leading = torch.linalg.eigvalsh(gram)[..., -1:, None].clamp(min=0).sqrt() * norm
        direction = torch.where(leading > gate, direction, raw * math.sqrt(min(rows, columns)))
        return direction.to(matrix.dtype)
    U, S, Vh = torch.linalg.svd(raw, full_matrices=False)
    values = S * norm[..., 0]  # in float64
    if name == "known_noise_polar":
        weights = polar_weights(values, rows=rows, columns=columns, noise_std=noise_std)
    else:
        rule = name.removeprefix("shrink_").removesuffix("_threshold")
        weights = shrink_singular_values(
            values, rows=rows, columns=columns, noise_std=noise_std, rule=rule
        )
        weights = weights / torch.where(weights > 0, weights, 1.0)[..., :1]
    detected = (values[..., :1] > gate) & (weights[..., :1] > 0)
    size = torch.linalg.vector_norm(weights, dim=-1, keepdim=True)
    weights = weights / torch.where(detected, size.clamp(max=1.0), 1.0)
    direction = (U * weights.float()[..., None, :]) @ Vh
    return torch.where(detected[..., None], direction, raw).to(matrix.dtype)


def scaled_polar(
    matrix: Tensor,
    *,
    steps: int = 5,
    coefficients: str | Triple = "quintic",
    noise_std: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Direction of DP-Muon-S: the largest singular value times the approximate polar factor.

    Noise raises the largest singular value. With ``noise_std`` it is replaced by the estimate of
    the clean one, the operator shrinker of ``shrink_singular_values``; where it does not clear
    ``detection_gate``, the direction is the matrix itself at spectral norm s (m n)^(1/4), the
    largest that noise hides.

    Args:
        matrix: Shape (..., m, n).
        steps: Newton-Schulz iterations.
        coefficients: Their table.
        noise_std: s, known standard deviation of the noise in every entry, or None.
        dtype: That of the Newton-Schulz iteration.

    Returns:
        A new tensor of the same shape and type; zero where the matrix is.
    """
    norm = spectral_norm(matrix)
    direction = newton_schulz(matrix, steps=steps, coefficients=coefficients, dtype=dtype)
    if noise_std is None:
        return (direction * norm).to(matrix.dtype)
    if not matrix.numel():
        return matrix.clone()
    rows, columns = matrix.shape[-2:]
    clean = shrink_singular_values(
        norm, rows=rows, columns=columns, noise_std=noise_std, rule="operator"
    ).float()
    raw, size = _at_unit_norm(matrix)
    share = torch.where(norm > 0, norm / size, 1.0)  # of the leading value in the Frobenius norm
    hidden = raw * (noise_std * detection_threshold(rows, columns) / share).float()
    detected = norm > noise_std * detection_gate(rows, columns)
    return torch.where(detected, direction * clean, hidden).to(matrix.dtype)

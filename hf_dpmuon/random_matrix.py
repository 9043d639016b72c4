"""What random-matrix theory says of a matrix of signal and noise whose noise level is known.

Receives numbers and private singular values; returns numbers. Nothing here sees a gradient, and all
of it is post-processing.

Notation: an m x n matrix, m <= n, is Y = X + s Z with Z of independent standard normal entries;
beta = m / n, and singular values of Y and X are y and x, in units of s sqrt(n) where a function
says so. What is known of y, x and their vectors as m, n grow is in Benaych-Georges and Nadakuditi
(2012, arXiv 1103.2221) and Gavish and Donoho (2014, arXiv 1305.5870; 2017, arXiv 1405.7511):

=========================== ====================================================================
noise alone                 y in [1 - sqrt(beta), 1 + sqrt(beta)], of Marchenko-Pastur density
x <= beta^(1/4)             y at the edge of the noise, vectors without any part of the signal's
x > beta^(1/4)              y^2 = (x + 1/x) (x + beta/x), above the edge
overlap, m-dimensional      c_L^2 = (x^4 - beta) / (x^4 + beta x^2)
overlap, n-dimensional      c_R^2 = (x^4 - beta) / (x^4 + x^2)
=========================== ====================================================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dpmuon.known_noise import LinearResponse, constant_gain, variance_factor

__all__ = [
    "SHRINKERS",
    "bulk_density",
    "detection_gate",
    "detection_threshold",
    "effective_rank",
    "noise_edge",
    "overlaps",
    "polar_weights",
    "recovery_batch_size",
    "shrink_singular_values",
]

# Quantiles of the Tracy-Widom law of real matrices, by the probability of a false alarm.
TRACY_WIDOM = {0.05: 0.9793, 0.01: 2.0234}


def detection_gate(rows: int, columns: int, *, false_alarm: float = 0.01) -> float:
    """Singular value, in units of s, that pure noise exceeds with probability ``false_alarm``.

    sqrt(mu + q tau) with mu = (sqrt(m-1) + sqrt(n))^2, tau = (sqrt(m-1) + sqrt(n))
    (1/sqrt(m-1) + 1/sqrt(n))^(1/3) (Johnstone 2001). The bare edge of the bulk, sqrt(m) + sqrt(n),
    is exceeded in 14 to 15 % of draws.

    Args:
        rows: Either dimension, >= 1.
        columns: The other one, >= 1.
        false_alarm: 0.05 or 0.01.

    Raises:
        ValueError: If a dimension is below 1 or the probability is not tabulated.
    """
    if min(rows, columns) < 1:
        raise ValueError(f"rows={rows} and columns={columns} must be >= 1.")
    if false_alarm not in TRACY_WIDOM:
        raise ValueError(f"false_alarm={false_alarm} must be one of {sorted(TRACY_WIDOM)}.")
    # A vector's norm has no such law; taking its one entry as two keeps the gate above the noise.
    m, n = max(2, min(rows, columns)), max(rows, columns)
    edge = math.sqrt(m - 1) + math.sqrt(n)
    tau = edge * (1 / math.sqrt(m - 1) + 1 / math.sqrt(n)) ** (1 / 3)
    return math.sqrt(edge**2 + TRACY_WIDOM[false_alarm] * tau)


def noise_edge(rows: int, columns: int) -> float:
    """Largest singular value of noise alone, in units of s: sqrt(m) + sqrt(n) as both grow.

    It is an upper bound of the mean at any size (Gordon), about 1 % above it at 384 x 384.
    """
    return math.sqrt(rows) + math.sqrt(columns)


def detection_threshold(rows: int, columns: int) -> float:
    """Largest singular value x, in units of s, that noise hides: (m n)^(1/4) (BBP transition).

    At most half of ``noise_edge``: a signal below the edge of the noise may well be detected.
    """
    return math.sqrt(math.sqrt(rows * columns))


def recovery_batch_size(
    signal: float,
    *,
    rows: int,
    columns: int,
    noise_multiplier: float,
    max_grad_norm: float = 1.0,
    responses: Sequence[LinearResponse] = (),
) -> int:
    """Smallest logical batch size at which a direction of the gradient is detectable.

    B > sigma C (m n)^(1/4) / x for one release: the noise of the mean gradient is s = sigma C / B,
    and what is detectable exceeds ``detection_threshold``. Averages over time divide s by
    gain / sqrt(variance factor), 5.7 for DP-Muon's look-ahead at beta = .95, if the gradient stays
    the same meanwhile. (The paper's condition, B > sigma C (sqrt(m) + sqrt(n)) / gap, asks for at
    least twice as much, and leaves averages out.) sigma itself grows with B at a fixed epsilon.

    Args:
        signal: x > 0, the direction's singular value in the mean of the clipped gradients.
        rows: Either dimension of the matrix.
        columns: The other one.
        noise_multiplier: sigma >= 0.
        max_grad_norm: C > 0.
        responses: Filter and momentum that are orthogonalised, in their steady state.

    Raises:
        ValueError: ``signal`` is not above 0.
    """
    if not signal > 0:
        raise ValueError(f"signal={signal} must be > 0.")
    noise = noise_multiplier * max_grad_norm * detection_threshold(rows, columns)
    noise *= math.sqrt(variance_factor(responses)) / constant_gain(responses)
    return math.floor(noise / signal) + 1


def bulk_density(values: Tensor, *, rows: int, columns: int, noise_std: float) -> Tensor:
    """Marchenko-Pastur density of the singular values of noise alone, at ``values``.

    sqrt((b^2 - y^2) (y^2 - a^2)) / (pi beta y) with y in units of s sqrt(n), a = 1 - sqrt(beta) and
    b = 1 + sqrt(beta); it integrates to 1 over the min(m, n) values.

    Args:
        values: Any shape, in the units of ``noise_std``.
        rows: Either dimension of the matrix, >= 1.
        columns: The other one.
        noise_std: s > 0.

    Returns:
        Density per unit of ``values``, float64; 0 outside the bulk.
    """
    y, beta, unit = _in_units_of_noise(values, rows, columns, noise_std)
    low, high = 1 - math.sqrt(beta), 1 + math.sqrt(beta)
    inside = (high**2 - y.square()).clamp(min=0) * (y.square() - low**2).clamp(min=0)
    return inside.sqrt() / (math.pi * beta * y.clamp(min=1e-12) * unit)


def effective_rank(values: Tensor) -> float:
    """Exponential of the entropy of the values as shares of their sum (Roy and Vetterli 2007).

    It is r for r equal values, and 0 where all are 0.
    """
    total = values.double().sum()
    if total == 0:
        return 0.0
    return float(torch.special.entr(values.double() / total).sum().exp())


def _clean_value(y: Tensor, beta: float) -> Tensor:
    """The x of a noisy y >= 1 + sqrt(beta), both in units of s sqrt(n)."""
    t = y.square() - beta - 1
    return ((t + (t.square() - 4 * beta).clamp(min=0).sqrt()) / 2).sqrt()


def _frobenius(y: Tensor, beta: float) -> Tensor:
    t = y.square() - beta - 1
    return (t.square() - 4 * beta).clamp(min=0).sqrt() / y


def _nuclear(y: Tensor, beta: float) -> Tensor:
    x = _clean_value(y, beta)
    return ((x**4 - beta - math.sqrt(beta) * x * y) / (x.square() * y)).clamp(min=0)


def _hard(y: Tensor, beta: float) -> Tensor:
    threshold = math.sqrt(
        2 * (beta + 1) + 8 * beta / ((beta + 1) + math.sqrt(beta**2 + 14 * beta + 1))
    )
    return torch.where(y > threshold, y, 0.0)


# Each maps noisy values y >= 1 + sqrt(beta), in units of s sqrt(n), to estimates of clean ones.
SHRINKERS = {
    "frobenius": _frobenius,  # least expected squared error (Gavish and Donoho 2017)
    "operator": _clean_value,  # least error in spectral norm (the same)
    "nuclear": _nuclear,  # least error in nuclear norm (the same)
    "hard": _hard,  # the best threshold that keeps y as it is (Gavish and Donoho 2014)
}


def shrink_singular_values(
    values: Tensor, *, rows: int, columns: int, noise_std: float, rule: str = "frobenius"
) -> Tensor:
    """Estimate the singular values of X from those of Y = X + s Z, s known.

    Args:
        values: Shape (..., k), in the units of ``noise_std``, >= 0.
        rows: Either dimension of the matrix, >= 1.
        columns: The other one.
        noise_std: s >= 0, the noise's standard deviation in every entry.
        rule: A key of ``SHRINKERS``.

    Returns:
        Shape (..., k), float64. Zero for values within the bulk of the noise; the values themselves
        if ``noise_std`` is 0.

    Raises:
        ValueError: If the rule is unknown, or an argument is out of range.
    """
    if rule not in SHRINKERS:
        raise ValueError(f"rule={rule!r} must be one of {', '.join(SHRINKERS)}.")
    y, beta, unit = _in_units_of_noise(values, rows, columns, noise_std)
    if unit == 0:
        return y
    above = y > 1 + math.sqrt(beta)
    return torch.where(above, SHRINKERS[rule](y.clamp(min=1 + math.sqrt(beta)), beta), 0.0) * unit


def overlaps(values: Tensor, *, rows: int, columns: int, noise_std: float) -> tuple[Tensor, Tensor]:
    """Cosines between the singular vectors of Y and those of X, from the values of Y alone.

    Args and errors are those of ``shrink_singular_values``.

    Returns:
        Overlaps of the left (``rows``-dimensional) and right vectors, each of shape (..., k) and
        float64, in [0, 1]; 0 within the bulk.
    """
    y, beta, unit = _in_units_of_noise(values, rows, columns, noise_std)
    if unit == 0:
        sure = (y > y[..., :1] * max(rows, columns) * torch.finfo(torch.float32).eps).double()
        return sure, sure
    above = (y > 1 + math.sqrt(beta)).double()
    x = _clean_value(y.clamp(min=1 + math.sqrt(beta)), beta)
    signal = (x**4 - beta).clamp(min=0)
    short = above * (signal / (x**4 + beta * x**2)).sqrt()
    long = above * (signal / (x**4 + x**2)).sqrt()
    return (short, long) if rows <= columns else (long, short)


def polar_weights(values: Tensor, *, rows: int, columns: int, noise_std: float) -> Tensor:
    """Weights w of the noisy singular vectors that best estimate the *clean* polar factor.

    The sum of u_i v_i^T over the clean vectors, estimated by the sum of w_i uh_i vh_i^T over the
    noisy ones with least squared error: w = c_L c_R, the product of both ``overlaps``.
    """
    left, right = overlaps(values, rows=rows, columns=columns, noise_std=noise_std)
    return left * right


def _in_units_of_noise(
    values: Tensor, rows: int, columns: int, noise_std: float
) -> tuple[Tensor, float, float]:
    """Values in units of s sqrt(n) (as they are if s is 0), beta, and that unit."""
    if min(rows, columns) < 1:
        raise ValueError(f"rows={rows} and columns={columns} must be >= 1.")
    if not (math.isfinite(noise_std) and noise_std >= 0):
        raise ValueError(f"noise_std={noise_std} must be a finite number >= 0.")
    unit = noise_std * math.sqrt(max(rows, columns))
    return values.double() / (unit or 1.0), min(rows, columns) / max(rows, columns), unit

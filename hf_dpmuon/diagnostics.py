"""What the known noise level says about a private gradient.

Receives private values and public constants only; everything here is post-processing.
"""

from __future__ import annotations

import math

__all__ = ["signal_to_noise"]


def signal_to_noise(*, gradient_norm: float, noise_std: float, num_entries: int) -> float:
    """Estimate |G| / |N| of a private gradient G + N whose noise level is known.

    E|G + N|^2 = |G|^2 + d s^2 with d entries of noise of standard deviation s, so the signal is
    what the observed norm has beyond the noise's; where it has nothing beyond, the estimate is 0.

    Args:
        gradient_norm: Norm of the private gradient over all entries.
        noise_std: s = sigma C / (q N); 0 gives infinity.
        num_entries: d.

    Returns:
        The ratio, >= 0; single estimates below about (2/d)^(1/4) are indistinguishable from 0.
    """
    noise_energy = num_entries * noise_std**2
    if noise_energy == 0:
        return math.inf
    return math.sqrt(max(0.0, gradient_norm**2 / noise_energy - 1.0))

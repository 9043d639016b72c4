"""The Gaussian mechanism: clip each sample, sum, add noise once, divide by the expected size.

Receives per-sample gradients from the engine in ``grad_sample``, one physical batch after another;
returns, once per logical batch, the private mean gradient in every ``p.grad`` and the event that
the ledger records. This is the only room that draws noise.

Noise is keyed, not streamed: by a secret, by the step and scale, and by the very sum that it is
added to. A run that takes a step again on the same sum makes the same release again, which tells
nothing new; on any other sum (another setting, another rounding, a copied folder) the noise is
another, so that no two releases can be subtracted to leave raw sums.

Guarantees:
    With noise multiplier sigma and norm bound C, adding or removing one sample changes the clipped
    sum by at most C in Euclidean norm over *all* trainable parameters together, and the release is
    that sum plus N(0, sigma^2 C^2 I), divided by a number that does not depend on the draw.
    Norms, factors, sums and noise are float32 whatever the compute type. With several processes
    each sums its own share of the draw, and all add the same noise to the sum of the shares.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

from hf_dpmuon.accounting import Clipping, NoiseEvent
from hf_dpmuon.grad_sample import PerSampleEngine
from hf_dpmuon.randomness import keyed_generator

__all__ = ["Clipping", "GaussianMechanism", "check_scales", "clip_factors"]

LEAST_FACTOR = 1e-30  # also divided by a loss scale, float32 holds it with all its digits
AUTOMATIC_STABILISER = 0.01  # gamma of AUTO-S, Bu et al. 2023 (arXiv 2206.07136)


def clip_factors(
    norms: Mapping[str, Tensor], *, max_grad_norm: float, clipping: Clipping, num_layers: int
) -> dict[str, Tensor]:
    """Weights that bound each sample's gradient over all parameters by ``max_grad_norm``.

    ========== ===================================================================
    flat       min(1, C / |g|), |g| over all parameters (Abadi et al. 2016)
    per_layer  min(1, C_l / |g_l|) with C_l = C / sqrt(L), so that sum of C_l^2 = C^2
    automatic  C / (|g| + 0.01) (AUTO-S, Bu et al. 2023)
    ========== ===================================================================

    Args:
        norms: Per parameter, norms of the samples' gradients, of shape (B,).
        max_grad_norm: The bound C.
        clipping: The rule.
        num_layers: L, the number of trainable parameters (reached in this pass or not).

    Returns:
        Per parameter, in the type of the norms, of shape (B,). A sample with a non-finite norm in
        any parameter has weight 0 in all of them; so has one whose weight would be too small for
        float32 to hold all its digits.

    Guarantees:
        sqrt(sum over parameters of (factor * norm)^2) <= C (1 + 1e-5) for each sample, whatever
        the norms: float64 holds the squares of all of float32.
    """
    by_parameter = torch.stack(list(norms.values())).double()  # (P, B)
    total = torch.linalg.vector_norm(by_parameter, dim=0)  # (B,)
    match clipping:
        case "flat":
            factors = (max_grad_norm / total).clamp(max=1.0).expand_as(by_parameter)
        case "per_layer":
            factors = (max_grad_norm / math.sqrt(num_layers) / by_parameter).clamp(max=1.0)
        case "automatic":
            factors = (max_grad_norm / (total + AUTOMATIC_STABILISER)).expand_as(by_parameter)
    factors = torch.where(total.isfinite() & (factors >= LEAST_FACTOR), factors, 0.0)
    return {name: row.to(norms[name].dtype) for name, row in zip(norms, factors, strict=True)}


def check_scales(*, max_grad_norm: float, loss_scale: float) -> None:
    """Refuse a bound or a loss scale that could bound or scale nothing.

    Raises:
        ValueError: If one is not a finite number > 0.
    """
    for name, scale in (("per_sample_max_grad_norm", max_grad_norm), ("loss_scale", loss_scale)):
        if not 0 < scale < math.inf:
            raise ValueError(f"{name}={scale} must be a finite number > 0, for instance 1.0.")


class GaussianMechanism:
    """Turns per-sample gradients into one private gradient per logical batch.

    Steps, in order: ``begin``; ``accumulate`` after every physical batch (clip, sum); ``release``
    once (noise, divide, event). An empty logical batch is a ``release`` without ``accumulate``.

    Args:
        module: The engine that yields per-sample gradients; its trainable parameters now are the
            ones that are clipped together and noised.
        noise_multiplier: sigma >= 0, in units of ``max_grad_norm``.
        max_grad_norm: C > 0.
        sample_rate: q in (0, 1].
        num_units: N, the number of privacy units; the sum is divided by q N.
        noise_key: Secret bytes, the same in every process.
        fixed_noise: Tests only: noise that depends on key and step alone, so that runs that differ
            by rounding can be compared. Such a run carries no guarantee.
        clipping: How a sample's gradient is bounded; see ``clip_factors``.
        loss_scale: Factor of the loss that was backpropagated, > 0; undone before clipping.

    Attributes:
        stop_votes: Sum over processes of the ``stop_votes`` of the last release.

    Raises:
        ValueError: If a value is outside its range.
    """

    def __init__(
        self,
        module: PerSampleEngine,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        sample_rate: float,
        num_units: int,
        noise_key: bytes,
        clipping: Clipping = "flat",
        loss_scale: float = 1.0,
        fixed_noise: bool = False,
    ) -> None:
        check_scales(max_grad_norm=max_grad_norm, loss_scale=loss_scale)
        if not (math.isfinite(noise_multiplier) and noise_multiplier >= 0):
            raise ValueError(f"noise_multiplier={noise_multiplier} must be a finite number >= 0.")
        if not 0 < sample_rate <= 1:
            raise ValueError(f"sample_rate={sample_rate} must be in (0, 1].")
        if num_units < 1:
            raise ValueError(f"num_units={num_units} must be >= 1.")
        if clipping not in get_args(Clipping):
            raise ValueError(f"clipping={clipping!r} must be one of {get_args(Clipping)}.")
        self.module = module
        self.noise_multiplier = noise_multiplier
        self.max_grad_norm = max_grad_norm
        self.sample_rate = sample_rate
        self.expected_batch_size = sample_rate * num_units
        self.clipping: Clipping = clipping
        self.loss_scale = loss_scale
        self.stop_votes = 0.0
        self.noise_key = noise_key
        self._fixed_noise = fixed_noise
        self._parameters = _trainable(module)
        self._total, self._sums = _flat_views(self._parameters)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise in each entry of the released gradient."""
        return self.noise_multiplier * self.max_grad_norm / self.expected_batch_size

    @property
    def num_entries(self) -> int:
        """Number of entries of the released gradient over all parameters."""
        return sum(p.numel() for p in self._parameters.values())

    def begin(self) -> None:
        """Start a logical batch: drop what a backward pass outside it, or a failed one, left.

        Raises:
            RuntimeError: If the set of trainable parameters is no longer the protected one.
        """
        self._check_trainable_set()
        self.module.discard()
        self._total.zero_()

    def accumulate(self) -> None:
        """Clip the samples of the last backward pass, add them to the sum, drop their gradients.

        Raises:
            RuntimeError: If a trainable parameter has a gradient but none per sample, or if the
                set of trainable parameters is no longer the one that is protected.
        """
        self._check_trainable_set()
        with torch.autocast(self._total.device.type, enabled=False):
            scaled = self.module.per_unit_norms()
            if scaled:
                factors = clip_factors(
                    {name: norm / self.loss_scale for name, norm in scaled.items()},
                    max_grad_norm=self.max_grad_norm,
                    clipping=self.clipping,
                    num_layers=len(self._parameters),
                )
                weights = {name: factor / self.loss_scale for name, factor in factors.items()}
                self.module.add_weighted_sum(weights, into=self._sums)
        self.module.discard()

    def release(self, *, step: int, stop_votes: float = 0.0) -> NoiseEvent:
        """Write the private mean gradient to every ``p.grad`` and end the logical batch.

        Args:
            step: Number of this logical step, from 1.
            stop_votes: Public: 1 for a request to stop, else 0. They are added up over processes in
                the same collective; the sum is in ``self.stop_votes``.

        Returns:
            The event to record before the weights move.

        Guarantees:
            Noise is drawn once, for every protected parameter, also for an empty batch. Equal
            noise on unequal sums does not occur.
        """
        self._check_trainable_set()
        self._total[-1] = stop_votes
        if distributed.is_initialized():
            distributed.all_reduce(self._total)  # the one collective of a step
        self.stop_votes = self._total[-1].item()
        private, gradients = _flat_views(self._parameters)
        for gradient, noise in zip(gradients.values(), self._noise(step), strict=True):
            gradient.copy_(torch.from_numpy(noise))
        scale = self.noise_multiplier * self.max_grad_norm
        private.mul_(scale).add_(self._total).div_(self.expected_batch_size)
        self._total.zero_()
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name].to(parameter.dtype)
        return NoiseEvent(
            step=step,
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            max_grad_norm=self.max_grad_norm,
            clipping=self.clipping,
            digest=_sha256(private[:-1]).hex(),
        )

    def _noise(self, step: int) -> Iterator[NDArray[np.float32]]:
        """Standard normal noise for each parameter, drawn on all cores; key as in the module."""
        use = f"{step} {self.noise_multiplier} {self.max_grad_norm} {self.expected_batch_size}"
        total = b"" if self._fixed_noise else _sha256(self._total[:-1])

        def draw(name: str) -> NDArray[np.float32]:
            generator = keyed_generator(self.noise_key, use.encode(), total, name.encode())
            shape = tuple(self._parameters[name].shape)
            return generator.standard_normal(shape, dtype=np.float32)

        with ThreadPoolExecutor() as pool:  # numpy draws outside the interpreter's lock
            yield from pool.map(draw, self._parameters)

    def _check_trainable_set(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise RuntimeError(
                    f"{name} has a backward hook, which would see gradients that are not private; "
                    "remove it (WANDB_WATCH sets such hooks)."
                )
        now = _trainable(self.module)
        if {name: id(p) for name, p in now.items()} == {
            name: id(p) for name, p in self._parameters.items()
        }:
            return
        changed = sorted(now.keys() ^ self._parameters.keys())
        raise RuntimeError(
            "the set of trainable parameters changed after privacy was set up "
            f"({', '.join(changed) or 'parameters were replaced'}); freeze or unfreeze before the "
            "trainer is built, or build a new one."
        )


def _flat_views(
    parameters: Mapping[str, torch.nn.Parameter],
) -> tuple[Tensor, dict[str, Tensor]]:
    """One float32 vector of zeros for all parameters and one number more, and views of it."""
    sizes = [p.numel() for p in parameters.values()]
    device = next(iter(parameters.values())).device
    flat = torch.zeros(sum(sizes) + 1, dtype=torch.float32, device=device)
    views = zip(parameters.items(), torch.split(flat[:-1], sizes), strict=True)
    return flat, {name: view.view(p.shape) for (name, p), view in views}


def _sha256(vector: Tensor) -> bytes:
    return hashlib.sha256(vector.cpu().numpy().data).digest()


def _trainable(module: PerSampleEngine) -> dict[str, torch.nn.Parameter]:
    """Trainable parameters by their name in the plain model."""
    return {name: p for name, p in module._module.named_parameters() if p.requires_grad}

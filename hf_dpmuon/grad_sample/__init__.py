"""Per-sample gradients for every trainable parameter of a vision transformer.

Receives a plain model; returns it wrapped in a `PerSampleEngine`, so that a backward pass of the
*summed* loss leaves, for each trainable parameter, what the privacy mechanism needs: the norm of
every privacy unit's gradient, and sums of those gradients under weights that the mechanism chooses.
"""

from hf_dpmuon.grad_sample.bookkeeping import BookKeepingGradSampleModule, GhostGradSampleModule
from hf_dpmuon.grad_sample.engine import PerSampleEngine
from hf_dpmuon.grad_sample.hooks import HooksGradSampleModule
from hf_dpmuon.grad_sample.memory import free_bytes, peak_bytes
from hf_dpmuon.grad_sample.verification import verify_per_sample_gradients, verify_row_losses

__all__ = [
    "ENGINES",
    "BookKeepingGradSampleModule",
    "GhostGradSampleModule",
    "HooksGradSampleModule",
    "PerSampleEngine",
    "free_bytes",
    "peak_bytes",
    "verify_per_sample_gradients",
    "verify_row_losses",
]

ENGINES: dict[str, type[PerSampleEngine]] = {
    "bookkeeping": BookKeepingGradSampleModule,
    "ghost": GhostGradSampleModule,
    "hooks": HooksGradSampleModule,
}

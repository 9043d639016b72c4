"""Differentially private fine-tuning of pretrained vision transformers with DP-Muon.

The public names of all rooms. A room is imported when its first name is used: the trainer's base
class loads `datasets`, which whoever only wants an epsilon should not wait for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_dpmuon.accounting import SampledGaussian, compute_epsilon
    from hf_dpmuon.advice import Advice, advise
    from hf_dpmuon.arguments import DataArguments, DPTrainingArguments, ModelArguments
    from hf_dpmuon.data import (
        ImageExamples,
        build_transforms,
        class_weights,
        load_image_dataset,
    )
    from hf_dpmuon.filters import GradientFilter, KalmanFilter, LowPassFilter
    from hf_dpmuon.grad_sample import (
        BookKeepingGradSampleModule,
        GhostGradSampleModule,
        HooksGradSampleModule,
    )
    from hf_dpmuon.group_privacy import group_epsilon
    from hf_dpmuon.hub import push_folder
    from hf_dpmuon.known_noise import KnownNoise, signal_to_noise
    from hf_dpmuon.ledger import PrivacyLedger
    from hf_dpmuon.mechanism import GaussianMechanism
    from hf_dpmuon.membership import membership_tpr
    from hf_dpmuon.methods import Method, create_optimizer
    from hf_dpmuon.metrics import build_metrics, plot_confusion
    from hf_dpmuon.model_card import (
        build_model_card,
        plot_epsilon,
        privacy_report,
        read_report,
    )
    from hf_dpmuon.models import load_model, save_model
    from hf_dpmuon.optim import DPSGD, DPAdam, DPMuon, DPMuonS
    from hf_dpmuon.plan import Budget, PrivacyPlan, calibrate_noise_multiplier, num_steps
    from hf_dpmuon.random_matrix import (
        bulk_density,
        detection_gate,
        detection_threshold,
        effective_rank,
        noise_edge,
        overlaps,
        recovery_batch_size,
        shrink_singular_values,
    )
    from hf_dpmuon.roles import parameter_roles
    from hf_dpmuon.sampling import LogicalBatch, LogicalBatchLoader, PoissonSampler
    from hf_dpmuon.spectral import (
        newton_schulz,
        polar_factor,
        spectral_map,
    )
    from hf_dpmuon.trainer import DPTrainer
    from hf_dpmuon.units import PrivacyUnits
    from hf_dpmuon.validation import validate_model

_ROOMS = {
    "accounting": ("SampledGaussian", "compute_epsilon"),
    "group_privacy": ("group_epsilon",),
    "membership": ("membership_tpr",),
    "plan": ("Budget", "PrivacyPlan", "calibrate_noise_multiplier", "num_steps"),
    "advice": ("Advice", "advise"),
    "arguments": ("DPTrainingArguments", "DataArguments", "ModelArguments"),
    "data": ("ImageExamples", "build_transforms", "class_weights", "load_image_dataset"),
    "known_noise": ("KnownNoise", "signal_to_noise"),
    "methods": ("Method", "create_optimizer"),
    "filters": ("GradientFilter", "KalmanFilter", "LowPassFilter"),
    "grad_sample": (
        "BookKeepingGradSampleModule",
        "GhostGradSampleModule",
        "HooksGradSampleModule",
    ),
    "hub": ("push_folder",),
    "ledger": ("PrivacyLedger",),
    "mechanism": ("GaussianMechanism",),
    "metrics": ("build_metrics", "plot_confusion"),
    "model_card": ("build_model_card", "plot_epsilon", "privacy_report", "read_report"),
    "models": ("load_model", "save_model"),
    "roles": ("parameter_roles",),
    "validation": ("validate_model",),
    "optim": ("DPAdam", "DPMuon", "DPMuonS", "DPSGD"),
    "sampling": ("LogicalBatch", "LogicalBatchLoader", "PoissonSampler"),
    "units": ("PrivacyUnits",),
    "random_matrix": (
        "bulk_density",
        "detection_gate",
        "detection_threshold",
        "effective_rank",
        "noise_edge",
        "overlaps",
        "recovery_batch_size",
        "shrink_singular_values",
    ),
    "spectral": ("newton_schulz", "polar_factor", "spectral_map"),
    "trainer": ("DPTrainer",),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "Advice",
    "BookKeepingGradSampleModule",
    "Budget",
    "DPAdam",
    "DPMuon",
    "DPMuonS",
    "DPSGD",
    "DPTrainer",
    "DPTrainingArguments",
    "DataArguments",
    "GaussianMechanism",
    "GhostGradSampleModule",
    "GradientFilter",
    "HooksGradSampleModule",
    "ImageExamples",
    "KalmanFilter",
    "KnownNoise",
    "LogicalBatch",
    "LogicalBatchLoader",
    "LowPassFilter",
    "Method",
    "ModelArguments",
    "PoissonSampler",
    "PrivacyLedger",
    "PrivacyPlan",
    "PrivacyUnits",
    "SampledGaussian",
    "advise",
    "build_metrics",
    "build_model_card",
    "build_transforms",
    "bulk_density",
    "calibrate_noise_multiplier",
    "class_weights",
    "compute_epsilon",
    "create_optimizer",
    "detection_gate",
    "detection_threshold",
    "effective_rank",
    "group_epsilon",
    "load_image_dataset",
    "load_model",
    "membership_tpr",
    "newton_schulz",
    "noise_edge",
    "num_steps",
    "overlaps",
    "parameter_roles",
    "plot_confusion",
    "plot_epsilon",
    "polar_factor",
    "privacy_report",
    "push_folder",
    "read_report",
    "recovery_batch_size",
    "save_model",
    "shrink_singular_values",
    "signal_to_noise",
    "spectral_map",
    "validate_model",
]


def __getattr__(name: str) -> Any:
    """Import the room of a public name when the name is first used (PEP 562)."""
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(f"{__name__}.{_ROOM_OF[name]}"))[name]

"""The trainable set of a run: fixed once, and the same for engine, filter, mechanism and optimizer.

Receives a model when training starts; returns its trainable parameters with the filter of their
gradients and what is known of the noise in them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from hf_dpmuon.arguments import DPTrainingArguments
from hf_dpmuon.filters import GradientFilter
from hf_dpmuon.known_noise import KnownNoise, signal_to_noise
from hf_dpmuon.plan import PrivacyPlan

__all__ = ["TrainableSet"]


@dataclass(frozen=True)
class TrainableSet:
    """What is trained, from the start of training to its end.

    Attributes:
        parameters: The trainable parameters by name.
        filter: Smooths their private gradients.
        noise: What the plan fixes of the noise in the gradients that the optimizer reads.
        args: The arguments of the run.
        plan: Its plan.
    """

    parameters: dict[str, nn.Parameter]
    filter: GradientFilter
    noise: KnownNoise
    args: DPTrainingArguments
    plan: PrivacyPlan

    @classmethod
    def of(cls, model: nn.Module, args: DPTrainingArguments, plan: PrivacyPlan) -> TrainableSet:
        """Take what is trainable now."""
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        filter = args.method.filter(list(parameters.values()))
        std = plan.noise_std(args.per_sample_max_grad_norm)
        return cls(parameters, filter, KnownNoise(std, filter.response), args, plan)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer of ``dp_optimizer``."""
        return self.args.method.optimizer(
            model,
            self.noise,
            steps=self.plan.steps,
            max_grad_norm=self.args.per_sample_max_grad_norm,
        )

    def signal_to_noise(self, gradient_norm: float, *, step: int) -> float:
        """Return the ratio for a filtered private gradient of this norm, at a step from 1."""
        return signal_to_noise(
            gradient_norm=gradient_norm,
            noise_std=math.sqrt(self.noise.variance(step)),
            num_entries=sum(p.numel() for p in self.parameters.values()),
        )

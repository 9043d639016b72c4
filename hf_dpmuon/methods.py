"""A method: which optimizer behind which filter, with which settings, for which parameters.

Receives the settings once, as a frozen ``Method``, and refuses those without effect; builds the
optimizer and the filter from it, and says which rule moves what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpmuon.default_rates import Course
from hf_dpmuon.filters import GradientFilter, KalmanFilter, LowPassFilter
from hf_dpmuon.known_noise import KnownNoise, heavy_ball
from hf_dpmuon.optim import DPSGD, DPAdam, DPMuon, DPMuonS
from hf_dpmuon.options import (
    Filter,
    LearningRateFactor,
    LowPass,
    Optimizer,
    SpectralMap,
    check_choices,
)
from hf_dpmuon.roles import BLOCKS, ParameterRole, parameter_roles
from hf_dpmuon.spectral import NOISE_AWARE_MAPS, Triple, coefficient_table

__all__ = ["Method", "create_optimizer", "matrices_of", "matrix_shapes", "routing_table"]

SPECTRAL = ("muon", "muon_s")
FILTER_NAMES = {"none": "DP", "doppler": "DOPPLER", "disk": "DiSK"}
MATRIX_ROLES = frozenset({ParameterRole.MATRIX, ParameterRole.CONV}) | set(BLOCKS)
# Maps that iterate, and so have steps and a type; two of them have a choice of table as well.
ITERATED_MAPS = ("newton_schulz", "polar_express", "selective")
TABLED_MAPS = ("newton_schulz", "selective")


@dataclass(frozen=True)
class Method:
    """All settings of a method; ``dp_optimizer`` and ``dp_filter`` are independent of each other.

    Each is an option of a run, or an argument of ``torch.optim.AdamW``, and in docs/methods.md.

    Raises:
        ValueError: If a name is unknown, a value out of range, or a setting without effect.
    """

    dp_optimizer: Optimizer = "muon"
    dp_filter: Filter = "none"
    learning_rate: float | None = None
    vector_learning_rate: float | None = None
    weight_decay: float = 0.0
    sgd_momentum: float | None = None
    orthogonalize_head: bool = True
    orthogonalize_patch_embedding: bool = True
    spectral_map: SpectralMap = "newton_schulz"
    ns_steps: int = 5
    ns_coefficients: str | Triple = "quintic"
    ns_bf16: bool = False
    adjust_lr_fn: LearningRateFactor | None = None
    muon_momentum: float | None = None
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    correct_for_noise: bool = False
    doppler_coefficients: LowPass = "ema_0.9"
    disk_kappa: float = 0.7
    disk_gamma: float | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Method:
        """Take the settings of a method out of all arguments of a run."""
        taken = {field.name: settings[field.name] for field in fields(cls)}
        words = taken.pop("ns_coefficients")
        return cls(**taken) if words is None else cls(ns_coefficients=_table(words), **taken)

    def __post_init__(self) -> None:
        """Check every setting, and fill in what depends on others."""
        check_choices(self, Method)
        coefficient_table(self.ns_coefficients)
        self._check_effects()
        if self.sgd_momentum is None:
            vars(self)["sgd_momentum"] = 0.9 if self.dp_filter == "none" else 0.0
        for name, most in (
            ("learning_rate", float("inf")),
            ("vector_learning_rate", float("inf")),
            ("weight_decay", float("inf")),
            ("sgd_momentum", 1.0),
            ("muon_momentum", 1.0),
            ("adam_beta1", 1.0),
            ("adam_beta2", 1.0),
        ):
            number = vars(self)[name]
            if number is not None and not 0 <= number < most:
                allowed = "a finite number >= 0.0" if most > 1 else "in [0, 1)"
                raise ValueError(f"{name}={number} must be {allowed}.")
        if not self.adam_epsilon > 0:
            raise ValueError(f"adam_epsilon={self.adam_epsilon} must be > 0.")
        if self.ns_steps < 1:
            raise ValueError(f"ns_steps={self.ns_steps} must be >= 1.")
        self.filter([])  # which checks its own

    def _check_effects(self) -> None:
        """Refuse settings, other than the defaults, that nothing would read."""
        optimizer, direction, filter = (
            f"{name}={vars(self)[name]!r}" for name in ("dp_optimizer", "spectral_map", "dp_filter")
        )
        muon, adam = self.dp_optimizer == "muon", self.dp_optimizer == "adam"
        spectral = self.dp_optimizer in SPECTRAL
        iterated, tabled = (self.spectral_map in maps for maps in (ITERATED_MAPS, TABLED_MAPS))
        disk, doppler = self.dp_filter == "disk", self.dp_filter == "doppler"
        read = {
            "spectral_map": (muon, optimizer),
            "correct_for_noise": (adam or self.dp_optimizer == "muon_s", optimizer),
            "vector_learning_rate": (spectral, optimizer),
            "orthogonalize_head": (spectral, optimizer),
            "orthogonalize_patch_embedding": (spectral, optimizer),
            "adjust_lr_fn": (spectral, optimizer),
            "muon_momentum": (spectral, optimizer),
            "ns_steps": (spectral and iterated, direction if spectral else optimizer),
            "ns_bf16": (spectral and iterated, direction if spectral else optimizer),
            "ns_coefficients": (spectral and tabled, direction if spectral else optimizer),
            "adam_beta1": (adam, optimizer),
            "adam_beta2": (adam, optimizer),
            "adam_epsilon": (adam, optimizer),
            "sgd_momentum": (not adam, optimizer),
            "doppler_coefficients": (doppler, filter),
            "disk_kappa": (disk, filter),
            "disk_gamma": (disk, filter),
        }
        for field in fields(self):
            value = vars(self)[field.name]
            is_read, where = read.get(field.name, (True, ""))
            if value != field.default and not is_read:
                raise ValueError(
                    f"{field.name}={value!r} has no effect under {where}; leave it "
                    f"{field.default!r}."
                )

    @property
    def knows_noise(self) -> bool:
        """Whether the level of the noise is part of the method."""
        return self.spectral_map in NOISE_AWARE_MAPS or self.correct_for_noise

    def filter(self, parameters: Sequence[Tensor]) -> GradientFilter:
        """Build the filter of the gradients of these trainable parameters."""
        match self.dp_filter:
            case "doppler":
                return LowPassFilter.named(self.doppler_coefficients)
            case "disk":
                return KalmanFilter(parameters, kappa=self.disk_kappa, gamma=self.disk_gamma)
            case _:
                return GradientFilter()

    def optimizer(
        self,
        model: nn.Module,
        noise: KnownNoise | None = None,
        *,
        steps: int | None = None,
        max_grad_norm: float = 1.0,
    ) -> torch.optim.Optimizer:
        """Sort the trainable parameters of ``model`` into groups and build their optimizer.

        Args:
            model: The classifier.
            noise: Public level of the noise in the gradients, for what uses it.
            steps: Those of the whole run, on which a learning rate that is unset depends.
            max_grad_norm: C, on which it depends, too.

        Returns:
            An optimizer whose groups hold each trainable parameter exactly once.

        Raises:
            ValueError: If a noise level or the number of steps is missing, or there is no matrix to
                orthogonalise.
        """
        assert self.sgd_momentum is not None
        if self.correct_for_noise and noise is None:
            raise ValueError("correct_for_noise=True needs noise=KnownNoise(std).")
        matrices, vectors = self._groups(model)
        lr, vector_lr = self.learning_rate, self.vector_learning_rate
        spectral = self.dp_optimizer in SPECTRAL
        if lr is None or (spectral and vector_lr is None):
            if noise is None or steps is None:
                name = "learning_rate" if lr is None else "vector_learning_rate"
                raise ValueError(
                    f"{name} is unset, and its default depends on the run; set it, or give "
                    "noise=KnownNoise(std) and steps, as the trainer does."
                )
            course = Course(matrix_shapes(model), steps, max_grad_norm, noise)
            lr = self._default_rate(course) if lr is None else lr
            if vector_lr is None:
                vector_lr = course.gradient_rate(heavy_ball(self.sgd_momentum))
        if spectral:
            vectors |= {"rule": "sgd", "lr": vector_lr, "momentum": self.sgd_momentum}
        groups = [group for group in (*matrices, vectors) if group["params"]]
        correction = noise if self.correct_for_noise else None
        if self.dp_optimizer == "sgd":
            return DPSGD(groups, lr=lr, momentum=self.sgd_momentum)
        if self.dp_optimizer == "adam":
            betas = (self.adam_beta1, self.adam_beta2)
            return DPAdam(groups, lr=lr, betas=betas, eps=self.adam_epsilon, noise=correction)
        matrix: dict[str, Any] = {
            "ns_steps": self.ns_steps,
            "ns_coefficients": self.ns_coefficients,
            "ns_dtype": torch.bfloat16 if self.ns_bf16 else torch.float32,
        }
        if self.adjust_lr_fn is not None:
            matrix["adjust_lr_fn"] = self.adjust_lr_fn
        if self.muon_momentum is not None:
            matrix["momentum"] = self.muon_momentum
        if self.dp_optimizer == "muon_s":
            return DPMuonS(groups, lr=lr, noise=correction, **matrix)
        known = noise if self.spectral_map in NOISE_AWARE_MAPS else None
        return DPMuon(groups, lr=lr, spectral_map=self.spectral_map, noise=known, **matrix)

    def _default_rate(self, course: Course) -> float:
        match self.dp_optimizer:
            case "muon":
                return course.spectral_rate
            case "adam":
                return course.adam_rate(self.adam_beta1, correct_for_noise=self.correct_for_noise)
            case "muon_s":
                beta = 0.9 if self.muon_momentum is None else self.muon_momentum
                return course.gradient_rate(heavy_ball(beta))
            case _:
                assert self.sgd_momentum is not None
                return course.gradient_rate(heavy_ball(self.sgd_momentum))

    def _groups(self, model: nn.Module) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Groups of matrices, and that of the rest; each parameter is in exactly one."""
        spectral = self.dp_optimizer in SPECTRAL
        roles = parameter_roles(model)
        matrix_roles = set(MATRIX_ROLES)
        if self.orthogonalize_head or not spectral:
            matrix_roles.add(ParameterRole.HEAD)
        if self.orthogonalize_patch_embedding or not spectral:
            matrix_roles.add(ParameterRole.PATCH_EMBEDDING)
        by_blocks: dict[int, list[nn.Parameter]] = {1: []}
        vectors = []
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        for name, p in trainable:
            if roles[name] not in matrix_roles or p.ndim < 2:
                vectors.append(p)
            else:
                by_blocks.setdefault(BLOCKS.get(roles[name], 1), []).append(p)
        matrices = [p for parameters in by_blocks.values() for p in parameters]
        assert len({id(p) for p in (*matrices, *vectors)}) == len(trainable)
        if spectral and not matrices:
            raise ValueError(
                f"dp_optimizer={self.dp_optimizer!r} found no trainable matrix to orthogonalise in "
                "this model; unfreeze its linear layers or set dp_optimizer='sgd'."
            )
        if spectral:
            groups = [{"params": ps, "blocks": blocks} for blocks, ps in by_blocks.items()]
        else:
            groups = [{"params": matrices}]
        groups = [{**group, "weight_decay": self.weight_decay} for group in groups]
        return groups, {"params": vectors, "weight_decay": 0.0}


def matrix_shapes(model: nn.Module) -> list[tuple[int, int]]:
    """Rows and columns of each trained matrix; all vectors as one column, if there is none."""
    roles = parameter_roles(model)
    found, entries = [], 0
    for name, p in model.named_parameters():
        if p.requires_grad:
            entries += p.numel()
            if p.ndim >= 2 and roles[name] is not ParameterRole.EMBEDDING:
                blocks = BLOCKS.get(roles[name], 1)
                found += [(len(p) // blocks, p.numel() // len(p))] * blocks
    return found or [(entries, 1)]


def _table(words: str | Sequence[str | float]) -> str | Triple:
    """A table's name or three numbers, as Python or the words of a command line have them."""
    if isinstance(words, str):
        return words
    try:
        first, second, third = map(float, words)
    except ValueError:
        if len(words) == 1:
            return str(words[0])
        raise ValueError(
            f"ns_coefficients={words!r} must be the name of a table, or three numbers."
        ) from None
    return first, second, third


def create_optimizer(
    model: nn.Module,
    *,
    noise: KnownNoise | None = None,
    steps: int | None = None,
    max_grad_norm: float = 1.0,
    **settings: Any,
) -> torch.optim.Optimizer:
    """Build the optimizer of ``Method(**settings)`` for a model's trainable parameters.

    Args:
        model: The classifier.
        noise: Public level of the noise in the gradients, for what uses it.
        steps: Those of the whole run, on which a learning rate that is unset depends.
        max_grad_norm: C, on which it depends, too.
        **settings: Those of ``Method``.

    Raises:
        ValueError: As ``Method`` and ``Method.optimizer`` do.
    """
    return Method(**settings).optimizer(model, noise, steps=steps, max_grad_norm=max_grad_norm)


def matrices_of(model: nn.Module) -> dict[str, int]:
    """Names of the trainable parameters that are matrices, each with how many it stacks."""
    matrix_roles = MATRIX_ROLES | {ParameterRole.HEAD, ParameterRole.PATCH_EMBEDDING}
    roles = parameter_roles(model)
    return {
        name: BLOCKS.get(roles[name], 1)
        for name, p in model.named_parameters()
        if p.requires_grad and p.ndim >= 2 and roles[name] in matrix_roles
    }


def routing_table(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Lines that say which rule moves which parameters, for people to check before they train."""
    roles = parameter_roles(model)
    names = {id(p): name for name, p in model.named_parameters()}
    rows = []
    for group in optimizer.param_groups:
        rule = group["rule"]
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

"""Time and peak memory of one optimizer step, beside torch's own optimizers.

    python benchmarks/bench_optimizer.py --model vit-s --rounds 5

Every optimizer moves its own copy of the parameters of a Hugging Face ViT (patch embedding
flattened to a matrix, so that ``torch.optim.Muon`` takes it). Steps are interleaved: each round
times one step of every optimizer, so that a busy machine slows all alike; medians are printed with
their ratio to ``torch.optim.Muon`` in float32. A filter's step is its query points (DiSK: the moved
weights, at one of which a gradient would be taken), its smoothing and the optimizer's step. The
parameters that Muon does not take are moved by
``torch.optim.SGD`` beside it, as ``DPMuon`` moves them itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import _muon

from hf_dpmuon.filters import GradientFilter, KalmanFilter, LowPassFilter
from hf_dpmuon.known_noise import KnownNoise
from hf_dpmuon.optim import DPSGD, DPAdam, DPMuon, DPMuonS
from hf_dpmuon.spectral import SPECTRAL_MAPS

NOISE = KnownNoise(1e-3)
Step = Callable[[], object]


@dataclass(frozen=True)
class Shapes:
    """Of a ViT with 16-pixel patches, 12 blocks and a head of 100 classes."""

    width: int

    @property
    def matrices(self) -> list[tuple[int, ...]]:
        """Patch embedding, blocks, head."""
        d = self.width
        block = [(d, d)] * 4 + [(4 * d, d), (d, 4 * d)]
        return [(d, 3 * 16 * 16), *block * 12, (100, d)]

    @property
    def vectors(self) -> list[tuple[int, ...]]:
        """Tokens, positions, biases, norms."""
        d = self.width
        block = [(d,)] * 4 + [(4 * d,), (d,)] + [(d,)] * 4
        return [(1, 1, d), (1, 197, d), (d,), *block * 12, (d,), (d,), (100,)]


MODELS = {"vit-s": Shapes(384), "vit-b": Shapes(768)}


def float32_newton_schulz(
    grad: Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float
) -> Tensor:
    """The iteration of ``torch.optim.Muon``, line by line, without its cast to bfloat16."""
    a, b, c = ns_coefficients
    ortho_grad = grad.clone()
    if grad.size(0) > grad.size(1):
        ortho_grad = ortho_grad.T
    ortho_grad.div_(ortho_grad.norm().clamp(min=eps))
    for _ in range(ns_steps):
        gram_matrix = ortho_grad @ ortho_grad.T
        gram_update = torch.addmm(gram_matrix, gram_matrix, gram_matrix, beta=b, alpha=c)
        ortho_grad = torch.addmm(ortho_grad, gram_update, ortho_grad, beta=a)
    return ortho_grad.T if grad.size(0) > grad.size(1) else ortho_grad


class TorchMuon:
    """``torch.optim.Muon`` on matrices and ``torch.optim.SGD`` on the rest."""

    def __init__(
        self, matrices: list[nn.Parameter], vectors: list[nn.Parameter], *, float32: bool
    ) -> None:
        self.float32 = float32
        self.muon = torch.optim.Muon(matrices, lr=1e-3, weight_decay=0.0)
        self.sgd = torch.optim.SGD(vectors, lr=1e-3, momentum=0.9)

    def step(self) -> None:
        """Move everything once."""
        own = _muon._zeropower_via_newtonschulz
        if self.float32:
            _muon._zeropower_via_newtonschulz = float32_newton_schulz
        self.muon.step()  # type: ignore[no-untyped-call]
        _muon._zeropower_via_newtonschulz = own
        self.sgd.step()


class Filtered:
    """A filter, then the optimizer on what it returns."""

    def __init__(self, filter_: GradientFilter, optimizer: torch.optim.Optimizer) -> None:
        self.filter, self.optimizer = filter_, optimizer
        self.held = [p for group in optimizer.param_groups for p in group["params"]]

    def step(self) -> None:
        """Ask where to evaluate, smooth, move."""
        self.filter.query_points()
        released = [p.grad for p in self.held if p.grad is not None]
        for p, smooth in zip(self.held, self.filter.smooth(released), strict=True):
            p.grad = smooth
        self.optimizer.step()
        for p, gradient in zip(self.held, released, strict=True):
            p.grad = gradient


def build(name: str, matrices: list[nn.Parameter], vectors: list[nn.Parameter]) -> Step:
    """The step of the optimizer of that name."""
    everything = matrices + vectors
    spectral = [
        {"params": matrices},
        {"params": vectors, "rule": "sgd", "momentum": 0.9},
    ]
    builders: dict[str, Callable[[], Step]] = {
        "torch SGD": lambda: torch.optim.SGD(everything, lr=1e-3, momentum=0.9).step,
        "torch AdamW": lambda: torch.optim.AdamW(everything, lr=1e-3).step,
        "torch Muon float32": lambda: TorchMuon(matrices, vectors, float32=True).step,
        "torch Muon": lambda: TorchMuon(matrices, vectors, float32=False).step,
        "DPSGD": lambda: DPSGD(everything).step,
        "DPAdam": lambda: DPAdam(everything).step,
        "DPAdam corrected": lambda: DPAdam(everything, noise=NOISE).step,
        "DPMuon": lambda: DPMuon(spectral).step,
        "DPMuon you": lambda: DPMuon(spectral, ns_coefficients="quintic_tuned").step,
        "DPMuon bfloat16": lambda: DPMuon(spectral, ns_dtype=torch.bfloat16).step,
        "DPMuonS": lambda: DPMuonS(spectral).step,
        "DPMuonS corrected": lambda: DPMuonS(spectral, noise=NOISE).step,
        "DOPPLER-SGD": lambda: Filtered(LowPassFilter(), DPSGD(everything, momentum=0.0)).step,
        "DiSK-SGD": lambda: (
            Filtered(KalmanFilter(everything), DPSGD(everything, momentum=0.0)).step
        ),
        "DOPPLER-Muon": lambda: Filtered(LowPassFilter(), DPMuon(spectral)).step,
        "DiSK-Muon": lambda: Filtered(KalmanFilter(everything), DPMuon(spectral)).step,
    }
    if name.removeprefix("DPMuon ") in MAPS:
        mapped = name.removeprefix("DPMuon ")
        return DPMuon(spectral, spectral_map=mapped, noise=NOISE).step
    return builders[name]()


MAPS = sorted(SPECTRAL_MAPS - {"newton_schulz"})
SLOW = {f"DPMuon {name}" for name in MAPS} - {"DPMuon polar_express"}
METHODS = [
    "torch SGD", "torch AdamW", "torch Muon float32", "torch Muon", "DPSGD", "DOPPLER-SGD",
    "DiSK-SGD", "DPAdam", "DPAdam corrected", "DPMuon", "DPMuon you", "DPMuon bfloat16",
    "DOPPLER-Muon", "DiSK-Muon", "DPMuonS", "DPMuonS corrected",
    *(f"DPMuon {name}" for name in MAPS),
]  # fmt: skip


def parameters(shapes: list[tuple[int, ...]], device: str) -> list[nn.Parameter]:
    """Parameters of these shapes, with gradients as small as private ones are."""
    made = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for p in made:
        p.grad = 1e-3 * torch.randn_like(p)
    return made


def entries_of_state(owner: object) -> int:
    """Entries of the tensors that stay from one step to the next."""
    if isinstance(owner, Filtered):
        return entries_of_state(owner.optimizer) + _entries(
            list(owner.filter.state_dict().values())
        )
    if isinstance(owner, TorchMuon):
        return entries_of_state(owner.muon) + entries_of_state(owner.sgd)
    assert isinstance(owner, torch.optim.Optimizer)
    return _entries([list(state.values()) for state in owner.state.values()])


def _entries(value: object) -> int:
    if isinstance(value, list):
        return sum(_entries(item) for item in value)
    return value.numel() if isinstance(value, Tensor) and value.numel() > 1 else 0


def timed(step: Step, clock: Callable[[], float], device: str) -> float:
    """Seconds of one step."""
    start = clock()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def peak_bytes(step: Step, device: str) -> int:
    """Bytes that one step needs beyond what is held before it."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak of the resident set
    before = _resident("VmRSS")
    step()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; memory is measured on Linux only")


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="vit-s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--slow", action="store_true", help="also the maps that decompose")
    parser.add_argument("--only", help="methods that contain this, and torch Muon")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(args.threads)
    # One thread's own time does not count what other processes take of a shared core.
    clock = time.thread_time if device == "cpu" and args.threads == 1 else time.perf_counter
    shapes = MODELS[args.model]
    names = [name for name in METHODS if args.slow or name not in SLOW]
    if args.only:
        names = [name for name in names if args.only in name or name == "torch Muon float32"]
    steps, states, peaks = {}, {}, {}
    count = sum(torch.Size(s).numel() for s in shapes.matrices + shapes.vectors)
    for name in names:
        step = build(name, parameters(shapes.matrices, device), parameters(shapes.vectors, device))
        steps[name] = step
        step()  # allocates the state
        peaks[name] = peak_bytes(step, device)
        owner = step.__self__  # type: ignore[attr-defined]
        states[name] = entries_of_state(owner)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name in names:
            times[name].append(timed(steps[name], clock, device))
    medians = {name: statistics.median(times[name]) for name in names}
    reference = medians["torch Muon float32"]
    print(
        f"{args.model}: {count / 1e6:.1f} M parameters, {device}, {args.threads} threads "
        f"({clock.__name__}), "
        f"median of {args.rounds}, torch {torch.__version__}"
    )
    print(f"{'method':26}{'ms/step':>9}{'fastest':>9}{'/ Muon':>8}{'state':>7}{'peak MiB':>10}")
    for name in names:
        print(
            f"{name:26}{1e3 * medians[name]:9.1f}{1e3 * min(times[name]):9.1f}"
            f"{medians[name] / reference:8.2f}{states[name] / count:6.2f}x"
            f"{peaks[name] / 2**20:10.1f}"
        )


if __name__ == "__main__":
    main()

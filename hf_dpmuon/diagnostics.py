"""Whether singular directions stand clear of the noise: measured on private releases alone.

Receives the private gradient that an optimizer is about to step on, the optimizer's state and the
public level of the noise; keeps one row a matrix and step, and writes them as a report.

Guarantees:
    Everything here is a function of releases that the ledger holds and of public constants, so it
    costs no privacy: equal releases give equal reports, whatever the data. The report is not among
    the files that are pushed.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_dpmuon.figures import draw_spectra
from hf_dpmuon.files import write_json, write_whole
from hf_dpmuon.known_noise import KnownNoise, constant_gain
from hf_dpmuon.ledger import PrivacyLedger
from hf_dpmuon.methods import matrices_of
from hf_dpmuon.model_card import CARD_FILE
from hf_dpmuon.optim import momenta_after
from hf_dpmuon.random_matrix import (
    bulk_density,
    detection_gate,
    detection_threshold,
    effective_rank,
    noise_edge,
    overlaps,
    shrink_singular_values,
)

__all__ = [
    "SPECTRAL_PLOT_FILE",
    "MatrixSpectrum",
    "SpectralReport",
    "verdict",
    "write_local_card",
]

logger = logging.getLogger(__name__)

SPECTRAL_FILE = "spectral_report.json"
SPECTRAL_PLOT_FILE = "spectral_report.png"
LOCAL_CARD_FILE = "README.local.md"

LEADING = 5  # singular values of a matrix in the report
LONGEST_AVERAGE = 0.25  # of a run's steps: a longer one would follow no schedule
DENSITY_POINTS = 200

_Example = tuple[str, list[float], list[float], list[float]]


@dataclass(frozen=True)
class MatrixSpectrum:
    """What is known of one matrix at one step, in units of the mean gradient.

    The matrix is what the optimizer steps along before any spectral map, filter and momentum
    included, divided by what they make of a constant gradient.

    Attributes:
        step: Number of the step, from 1.
        name: That of the parameter; with a number where it stacks several matrices.
        rows: Its first dimension.
        columns: All others.
        noise_std: Standard deviation of the noise in every entry.
        norm: Frobenius norm.
        leading: Largest singular values, in descending order.
        edge: Where those of noise alone end.
        gate: What noise alone exceeds in 1 % of cases; a value above it is a detected direction.
        threshold: The smallest clean value that can be detected.
        detectable: Number of detected directions.
        overlap: Estimated product of the cosines of the leading left and right singular vectors
            with the clean ones; 0 where nothing is detected.
        signal_norm: Frobenius norm of the detected directions, less what noise adds to them.
        signal_to_noise: Estimated Frobenius norm of the signal over that of the noise.
        effective_rank: That of the matrix, noise included.
        signal_rank: Effective rank of the detected directions, less what noise adds to them.
    """

    step: int
    name: str
    rows: int
    columns: int
    noise_std: float
    norm: float
    leading: list[float]
    edge: float
    gate: float
    threshold: float
    detectable: int
    overlap: float
    signal_norm: float
    signal_to_noise: float
    effective_rank: float
    signal_rank: float

    @property
    def clearness(self) -> float:
        """The leading value over what noise alone reaches."""
        return self.leading[0] / self.gate

    @classmethod
    def of(
        cls,
        values: Tensor,
        *,
        step: int,
        name: str,
        rows: int,
        columns: int,
        noise_std: float,
    ) -> MatrixSpectrum:
        """Judge the singular values of a private matrix, in descending order."""
        level: dict[str, Any] = {"rows": rows, "columns": columns, "noise_std": noise_std}
        gate = noise_std * detection_gate(rows, columns)
        detected = values[values > gate]
        clean = shrink_singular_values(detected, rule="operator", **level)
        left, right = overlaps(detected[:1], **level)
        norm = float(torch.linalg.vector_norm(values))
        return cls(
            step=step,
            name=name,
            **level,
            norm=norm,
            leading=values[:LEADING].tolist(),
            edge=noise_std * noise_edge(rows, columns),
            gate=gate,
            threshold=noise_std * detection_threshold(rows, columns),
            detectable=len(detected),
            overlap=float((left * right).sum()),
            signal_norm=float(torch.linalg.vector_norm(clean)),
            signal_to_noise=math.sqrt(max(0.0, norm**2 / (rows * columns * noise_std**2) - 1)),
            effective_rank=effective_rank(values),
            signal_rank=effective_rank(clean),
        )


def verdict(spectra: Sequence[MatrixSpectrum], *, attainable_std: float) -> tuple[str, str]:
    """Whether orthogonalisation is worth its noise, in one word, with the reason.

    ============= ==================================================================================
    orthogonalise In half of the matrices or more a direction is detected.
    average more  In fewer, but there is significantly more energy than the noise has, and if it
                  lies in one direction of each matrix, an average as long as the run has room for
                  would lift it out of the noise.
    larger batch  Neither: only less noise in each release would help.
    ============= ==================================================================================

    Args:
        spectra: Those of the matrices, at one step or several; at least one.
        attainable_std: Noise in every entry under that longest average.
    """
    detected = fmean(spectrum.detectable > 0 for spectrum in spectra)
    seen = f"a direction stands clear of the noise in {100 * detected:.0f} % of the matrices"
    if detected >= 0.5:
        return "orthogonalise", f"{seen}."
    noise = [s.rows * s.columns * s.noise_std**2 for s in spectra]
    excess = sum(s.norm**2 for s in spectra) - sum(noise)
    # As if all steps had the same noise, which that of momentum nearly is.
    steps = len({s.step for s in spectra})
    spread = sum(n * s.noise_std**2 for n, s in zip(noise, spectra, strict=True))
    if excess <= 2 * math.sqrt(2 * steps * spread):
        return "larger batch", f"{seen}, and what is there is no more than noise."
    # For one direction's clean value over the threshold: the ratio of norms times (m n)^(1/4).
    size = median(s.rows * s.columns for s in spectra) ** 0.25
    strength = math.sqrt(excess / sum(noise)) * size
    averaging = fmean(s.noise_std for s in spectra) / attainable_std
    if averaging > 1 and strength * averaging > 1:
        return "average more", (
            f"{seen}; an average over a quarter of the run would have {averaging:.1f} times less "
            "noise, which may lift the signal out of it."
        )
    return "larger batch", f"{seen}, and no average that fits into the run would change that."


class _Run(Protocol):
    """See ``run.PrivateRun``, whose raw facts stay out of here."""

    folder: Path
    ledger: PrivacyLedger | None


class SpectralReport(TrainerCallback):
    """Measures the singular values of private momenta, and writes ``spectral_report.json``.

    Args:
        run: Its folder, in which the main process writes, and whether it has a guarantee.
        gradients: What the optimizer steps on next, by parameter name.
        noise: What is known of the noise in it.

    Attributes:
        spectra: All that was measured, in the order of the steps.
    """

    def __init__(
        self,
        run: _Run,
        *,
        gradients: Callable[[], Mapping[str, Tensor] | None],
        noise: Callable[[], KnownNoise],
    ) -> None:
        self.run = run
        self.gradients = gradients
        self.noise = noise
        self.spectra: list[MatrixSpectrum] = []
        # For the picture: the spectrum that was clearest, and the latest of each matrix.
        self._clearest: tuple[MatrixSpectrum, Tensor] | None = None
        self._latest: dict[str, tuple[MatrixSpectrum, Tensor]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on with the report of the run that is resumed."""
        path = self.run.folder / SPECTRAL_FILE
        self.spectra, self._clearest, self._latest = [], None, {}
        if state.is_world_process_zero and state.global_step and path.is_file():
            rows = json.loads(path.read_text(encoding="utf-8"))["matrices"]
            earlier = (MatrixSpectrum(**row) for row in rows)
            self.spectra = [row for row in earlier if row.step <= state.global_step]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure in the main process, every ``spectral_every`` steps and in the last one."""
        step, every = state.global_step + 1, args.spectral_every
        every = math.ceil(every * state.max_steps if every < 1 else every)
        is_due = every > 0 and (step % every == 0 or step == state.max_steps)
        gradients, noise = self.gradients(), self.noise()
        if not (is_due and state.is_world_process_zero and gradients is not None and noise.std > 0):
            return
        optimizer = kwargs["optimizer"]
        inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
        for name, matrix, noise_std in _momenta(kwargs["model"], inner, gradients, noise, step):
            values = noise_std * _singular_values(matrix / noise_std)
            rows, columns = matrix.shape
            spectrum = MatrixSpectrum.of(
                values, step=step, name=name, rows=rows, columns=columns, noise_std=noise_std
            )
            self.spectra.append(spectrum)
            self._latest[name] = (spectrum, values)
            if self._clearest is None or spectrum.clearness > self._clearest[0].clearness:
                self._clearest = self._latest[name]
        word, reason = self._verdict(state.max_steps)
        report = {
            "guarantee": self.run.ledger is not None and self.run.ledger.guarantee,
            "verdict": word,
            "reason": reason,
            "noise_std": noise.std,
            "matrices": [asdict(spectrum) for spectrum in self.spectra],
        }
        write_json(self.run.folder / SPECTRAL_FILE, report)
        if step == state.max_steps:
            logger.info("Singular values against the noise: %s: %s", word, reason)

    def plot(self, path: Path) -> bool:
        """Draw what was measured; return whether it could be drawn."""
        if self._clearest is None:
            return False
        steps = sorted({spectrum.step for spectrum in self.spectra})
        clear = {(s.name, s.step): s.clearness for s in self.spectra}
        return draw_spectra(
            [[clear.get((name, step), math.nan) for step in steps] for name in self._latest],
            names=list(self._latest),
            steps=steps,
            examples=[
                _against_noise(*example)
                for example in (self._clearest, self._latest[self._clearest[0].name])
            ],
            path=path,
        )

    def _verdict(self, max_steps: int) -> tuple[str, str]:
        """From the later half of the measured steps."""
        steps = sorted({spectrum.step for spectrum in self.spectra})
        later = [s for s in self.spectra if s.step >= steps[len(steps) // 2]]
        window = max(1.0, LONGEST_AVERAGE * max_steps)
        return verdict(later, attainable_std=self.noise().std / math.sqrt(window))


def _momenta(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    gradients: Mapping[str, Tensor],
    noise: KnownNoise,
    step: int,
) -> Iterator[tuple[str, Tensor, float]]:
    """Each matrix that the optimizer will step along, in units of the gradient, and its noise."""
    stacked = matrices_of(model)
    names: dict[Tensor, str] = {p: n for n, p in model.named_parameters() if n in stacked}
    of_matrices = {p: gradients[name] for p, name in names.items()}
    for p, momentum, response, taken in momenta_after(optimizer, of_matrices, step=step):
        gain = constant_gain([noise.filter, response], taken)
        noise_std = noise.std_after(response, taken) / gain
        blocks = (momentum / gain).flatten(1).chunk(stacked[names[p]])
        for number, matrix in enumerate(blocks):
            yield names[p] + (f"[{number}]" if len(blocks) > 1 else ""), matrix, noise_std


def _singular_values(matrix: Tensor) -> Tensor:
    """In descending order, from the smaller Gram matrix: a fifth of the time of an SVD."""
    X = matrix.float()
    gram = X @ X.mT if X.shape[0] <= X.shape[1] else X.mT @ X
    squares: Tensor = torch.linalg.eigvalsh(gram)
    return squares.clamp(min=0).sqrt().flip(0).double().cpu()


def _against_noise(spectrum: MatrixSpectrum, values: Tensor) -> _Example:
    """Title, values, and density of noise alone over a grid, in units of the edge of the noise."""
    edge = spectrum.edge
    grid = torch.linspace(0, edge, DENSITY_POINTS, dtype=torch.float64)
    density = edge * bulk_density(
        grid, rows=spectrum.rows, columns=spectrum.columns, noise_std=spectrum.noise_std
    )
    title = f"{spectrum.name}, step {spectrum.step}"
    return title, (values / edge).tolist(), (grid / edge).tolist(), density.tolist()


def write_local_card(folder: Path) -> None:
    """Write the card's twin with what this report adds; it is not among the files that are pushed.

    Nothing is written where a card or a report is missing.
    """
    report, card = folder / SPECTRAL_FILE, folder / CARD_FILE
    if not (report.is_file() and card.is_file()):
        return
    found = json.loads(report.read_text(encoding="utf-8"))
    lines = [
        card.read_text(encoding="utf-8"),
        "## Singular values against the noise",
        "",
        *([] if found["guarantee"] else ["**This run carries no privacy guarantee.**", ""]),
        f"**{found['verdict']}**: {found['reason']} Measured on private releases alone, at no "
        "privacy cost; this section is in the local card only.",
        "",
    ]
    if (folder / SPECTRAL_PLOT_FILE).is_file():
        lines += [f"![Singular values over steps]({SPECTRAL_PLOT_FILE})", ""]
    write_whole(folder / LOCAL_CARD_FILE, "\n".join(lines).encode())

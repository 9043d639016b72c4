"""Pictures: epsilon over a run, budgets, confusions of classes, singular values against noise.

Receives numbers; writes PNG files, if matplotlib, the optional extra ``plots``, is installed.

Guarantees:
    A picture has the same bytes each time, and nothing of the machine in it.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_dpmuon.files import write_whole
from hf_dpmuon.rounding import round_up

__all__ = [
    "can_plot",
    "draw_audit",
    "draw_budgets",
    "draw_confusions",
    "draw_epsilon",
    "draw_spectra",
]

MOST_WRITTEN_CLASSES = 30
LABELS = {"noise_per_unit": "noise in the mean gradient / C"}


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_epsilon(curve: Iterable[tuple[int, float]], *, delta: float, path: Path) -> bool:
    """Draw epsilon against the number of noise draws; return whether it could be drawn."""
    if not can_plot():
        return False
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    draws, epsilons = zip(*curve, strict=True)
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(draws, epsilons)
    axes.set_xlabel("noise draws (steps)")
    axes.set_ylabel(f"epsilon at delta = {round_up(delta)}")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    _save(figure, path)
    return True


def draw_budgets(
    rows: Sequence[Mapping[str, Any]], answer: str, *, path: Path, joined: bool
) -> bool:
    """Draw one column of several budgets, and their noise, against the batch size.

    Args:
        rows: The budgets, as ``hf-dpmuon budget --json`` gives them.
        answer: The column.
        path: The PNG file.
        joined: Whether a line joins the points, which says that they are alike otherwise.

    Returns:
        Whether it could be drawn.
    """
    if not can_plot():
        return False
    from matplotlib.figure import Figure

    batch_sizes = [row["logical_batch_size"] for row in rows]
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    for place, name in enumerate((answer, "noise_per_unit"), start=1):
        axes = figure.add_subplot(1, 2, place)
        line = "-" if joined else "none"
        axes.plot(batch_sizes, [row[name] for row in rows], marker="o", linestyle=line)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("logical batch size")
        axes.set_ylabel(LABELS.get(name, name))
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    _save(figure, path)
    return True


def draw_audit(rows: Sequence[Mapping[str, Any]], *, confidence: float, path: Path) -> bool:
    """Draw what an audit has shown beside what is claimed; return whether it could be drawn.

    Args:
        rows: ``delta``, ``epsilon`` (the bound from below) and ``claim`` of each.
        confidence: That of all bounds together.
        path: The PNG file.
    """
    if not can_plot():
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    deltas = [row["delta"] for row in rows]
    axes.plot(deltas, [row["claim"] for row in rows], marker="o", label="claimed, at most")
    shown = f"shown at {confidence:.0%} confidence, at least"
    axes.plot(deltas, [row["epsilon"] for row in rows], marker="s", label=shown)
    axes.set_xscale("log")
    axes.set_xlabel("delta")
    axes.set_ylabel("epsilon")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    _save(figure, path)
    return True


def draw_confusions(
    matrices: Sequence[tuple[str, Sequence[str], NDArray[np.int64]]], path: Path
) -> bool:
    """Draw which class was taken for which; return whether it could be drawn.

    Args:
        matrices: Title, names and counts (label by prediction) of each.
        path: The PNG file.
    """
    if not can_plot():
        return False
    from matplotlib.figure import Figure

    columns = math.ceil(math.sqrt(len(matrices)))
    rows = math.ceil(len(matrices) / columns)
    classes = max(len(names) for _, names, _ in matrices)
    size = 2.2 + 0.35 * min(classes, MOST_WRITTEN_CLASSES)
    figure = Figure(figsize=(size * columns, size * rows), layout="constrained")
    for place, (title, names, counts) in enumerate(matrices, start=1):
        axes = figure.add_subplot(rows, columns, place)
        shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        axes.set_title(title, parse_math=False)
        axes.set_xlabel("predicted")
        axes.set_ylabel("label")
        if len(names) > MOST_WRITTEN_CLASSES:
            continue
        axes.set_xticks(range(len(names)), names, rotation=90, parse_math=False)
        axes.set_yticks(range(len(names)), names, parse_math=False)
        for (row, column), count in np.ndenumerate(counts):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(count), ha="center", va="center", color=colour)
    _save(figure, path)
    return True


def draw_spectra(
    table: Sequence[Sequence[float]],
    *,
    names: Sequence[str],
    steps: Sequence[int],
    examples: Sequence[tuple[str, Sequence[float], Sequence[float], Sequence[float]]],
    path: Path,
) -> bool:
    """Draw how far the leading singular value of each matrix stands above the noise.

    Args:
        table: Matrices by steps, leading value over what noise alone reaches.
        names: Those of the matrices.
        steps: That were measured.
        examples: Title, singular values, and places with the density of those of noise alone, in
            units of the edge of the noise; drawn beside the table.
        path: The PNG file.

    Returns:
        Whether it could be drawn.
    """
    if not can_plot():
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, max(4.5, 0.13 * len(names))), layout="constrained")
    grid = figure.add_gridspec(len(examples), 2)
    axes = figure.add_subplot(grid[:, 0])
    colours = axes.imshow(
        np.log2(table), aspect="auto", cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest"
    )
    bar = figure.colorbar(colours, ax=axes, ticks=[-1, 0, 1], extend="both")
    bar.set_ticklabels(["half", "as noise", "twice"])
    axes.set_title("leading singular value against what noise alone reaches", fontsize=9)
    axes.set_yticks(range(len(names)), _shortened(names), fontsize=6, parse_math=False)
    ticks = range(0, len(steps), math.ceil(len(steps) / 10))
    axes.set_xticks(ticks, [str(steps[tick]) for tick in ticks])
    axes.set_xlabel("step")
    for row, (title, values, places, density) in enumerate(examples):
        axes = figure.add_subplot(grid[row, 1])
        bins = max(10, min(40, len(values) // 2))
        axes.hist(values, bins=bins, density=True, alpha=0.5, label="private momentum")
        axes.plot(places, density, color="black", label="noise alone (Marchenko-Pastur)")
        axes.axvline(1, color="black", linestyle=":", linewidth=1)
        axes.set_xlim(left=0)
        axes.set_title(_shortened([title])[0], fontsize=9, parse_math=False)
        axes.set_xlabel("singular value / edge of the noise")
        axes.set_yticks([])
        axes.legend(fontsize=7)
    _save(figure, path)
    return True


def _shortened(names: Sequence[str]) -> list[str]:
    """Names of parameters without what most of them share."""
    return [".".join(name.replace(".weight", "").split(".")[-5:]) for name in names]


def _save(figure: Any, path: Path) -> None:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # emoji in a class name
        figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    write_whole(path, buffer.getvalue())

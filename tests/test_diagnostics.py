"""What the spectral report says, what it is made of, and that it sees private releases alone."""

import json
import math
from pathlib import Path
from statistics import fmean

import pytest
import torch
from support import Images, Spy, as_loaded, tiny_timm_vit, trainer_of, weights
from transformers import TrainerCallback

from hf_dpmuon.diagnostics import MatrixSpectrum, verdict
from hf_dpmuon.mechanism import GaussianMechanism
from hf_dpmuon.methods import matrices_of
from hf_dpmuon.public_files import PUSHED_FILES
from hf_dpmuon.random_matrix import detection_gate, detection_threshold, noise_edge

QUERY = "vit.encoder.layer.0.attention.attention.query.weight"


def report_of(folder: Path) -> dict:
    return json.loads((folder / "spectral_report.json").read_text())


def by_hand(releases: list[torch.Tensor], *, rule: str, beta: float) -> tuple[torch.Tensor, float]:
    """Momentum over its gain on a constant gradient, and its noise over that of a release."""
    t = len(releases)
    ema = [(1 - beta) * beta ** (t - 1 - j) for j in range(t)]
    chain = {
        "muon": [beta * w + (1 - beta) * (j == t - 1) for j, w in enumerate(ema)],
        "adam": ema,
        "sgd": [w / (1 - beta) for w in ema],
        "muon_s": [w / (1 - beta) for w in ema],
    }[rule]
    momentum = sum(w * r for w, r in zip(chain, releases, strict=True))
    return momentum / sum(chain), math.sqrt(sum(w * w for w in chain)) / sum(chain)


@pytest.mark.parametrize(
    ("rule", "beta"), [("muon", 0.95), ("muon_s", 0.9), ("sgd", 0.9), ("adam", 0.9)]
)
def test_the_report_of_two_steps_is_that_of_a_decomposition_by_hand(tmp_path, rule, beta):
    trainer = trainer_of(tmp_path, kind=Spy, max_steps=2, dp_optimizer=rule, spectral_every=1)
    trainer.train()
    report, s = report_of(tmp_path), 1.0 / 8  # sigma C / B
    assert report["noise_std"] == s
    assert report["guarantee"] is False  # of a run with a noise_seed
    found = {(row["name"], row["step"]): row for row in report["matrices"]}
    matrices = matrices_of(trainer.model)
    assert {name for name, _ in found} == set(matrices)
    assert len(found) == 2 * len(matrices)
    for (name, step), row in found.items():
        releases = [release[name].flatten(1) for release in trainer.releases[:step]]
        momentum, factor = by_hand(releases, rule=rule, beta=beta)
        values = torch.linalg.svdvals(momentum.double())
        m, n = momentum.shape
        assert (row["rows"], row["columns"]) == (m, n)
        assert row["noise_std"] == pytest.approx(s * factor)
        assert row["leading"] == pytest.approx(values[:5].tolist(), rel=1e-4, abs=1e-4)
        assert row["norm"] == pytest.approx(float(momentum.norm()), rel=1e-5)
        assert row["gate"] == pytest.approx(s * factor * detection_gate(m, n))
        assert row["edge"] == pytest.approx(s * factor * noise_edge(m, n))
        assert row["threshold"] == pytest.approx(s * factor * detection_threshold(m, n))
        assert row["detectable"] == int((values > row["gate"]).sum())
        energy = row["norm"] ** 2 / (m * n * row["noise_std"] ** 2) - 1
        assert row["signal_to_noise"] == pytest.approx(math.sqrt(max(0, energy)), abs=1e-4)


def test_a_stacked_weight_is_judged_as_its_three_matrices(tmp_path):
    trainer = trainer_of(tmp_path, as_loaded(tiny_timm_vit()), max_steps=1)
    trainer.train()
    rows = [r for r in report_of(tmp_path)["matrices"] if r["name"].startswith("blocks.0.attn.qkv")]
    assert [r["name"] for r in rows] == [f"blocks.0.attn.qkv.weight[{i}]" for i in range(3)]
    assert {(r["rows"], r["columns"]) for r in rows} == {(16, 16)}


def test_measuring_changes_nothing_of_the_run(tmp_path):
    left = []
    for every in (0, 1):
        trainer = trainer_of(tmp_path / str(every), spectral_every=every)
        trainer.train()
        left.append(weights(trainer.model))
    assert all(torch.equal(left[0][name], left[1][name]) for name in left[0])
    assert not (tmp_path / "0/spectral_report.json").exists()


class Poisoner(TrainerCallback):
    """Adds what is not private to every gradient, as a raw backward pass would."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        for p in kwargs["model"].parameters():
            p.grad.add_(1e3)


def test_equal_releases_give_equal_reports_whatever_the_data_was(tmp_path, monkeypatch):
    """Other rows, other labels, fewer rows drawn, and raw gradients left in ``p.grad``."""

    def release(self, *, step, stop_votes=0.0):
        event = released(self, step=step, stop_votes=stop_votes)
        for number, p in enumerate(self._parameters.values()):
            generator = torch.Generator().manual_seed(1000 * step + number)
            p.grad = 0.1 * torch.randn(p.shape, generator=generator)
        return event

    released = GaussianMechanism.release
    monkeypatch.setattr(GaussianMechanism, "release", release)
    reports = []
    for number, settings in enumerate(
        (
            {"train_dataset": Images()},
            {"train_dataset": Images(seed=5), "noise_seed": 8},
            {"train_dataset": Images(), "callbacks": [Poisoner()]},
        )
    ):
        folder = tmp_path / str(number)
        trainer_of(folder, max_steps=2, **settings).train()
        reports.append((folder / "spectral_report.json").read_bytes())
    assert len(set(reports)) == 1


def test_a_resumed_run_goes_on_with_its_report(tmp_path):
    def run(**settings):
        return trainer_of(tmp_path, save_strategy="steps", save_steps=2, **settings)

    run().train()
    whole = report_of(tmp_path)
    run().train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert report_of(tmp_path) == whole
    assert sorted({row["step"] for row in whole["matrices"]}) == [1, 2, 3, 4]


def test_without_noise_or_with_another_interval_only_what_is_due_is_measured(tmp_path):
    trainer_of(tmp_path / "silent", noise_multiplier=0.0).train()
    assert not (tmp_path / "silent/spectral_report.json").exists()
    for every, steps in ((0.5, [2, 4]), (3, [3, 4])):
        trainer_of(tmp_path / str(every), spectral_every=every).train()
        found = {row["step"] for row in report_of(tmp_path / str(every))["matrices"]}
        assert sorted(found) == steps
    with pytest.raises(ValueError, match=r"spectral_every=-1 must be a number of steps"):
        trainer_of(tmp_path / "never", spectral_every=-1)


def test_report_and_picture_stay_in_the_local_card(tmp_path):
    trainer = trainer_of(tmp_path)
    assert not trainer.plot_spectra()  # nothing was measured
    trainer.train()
    assert trainer.plot_spectra()
    trainer.save_model()
    public, local = ((tmp_path / name).read_text() for name in ("README.md", "README.local.md"))
    assert local.startswith(public)
    assert "spectral_report.png" in local
    assert "no privacy guarantee" in local.removeprefix(public)
    assert "spectral" not in public
    written = {"spectral_report.json", "spectral_report.png", "README.local.md"}
    assert written <= {path.name for path in tmp_path.iterdir()}
    assert not written & set(PUSHED_FILES)


def spectra_of(signal: float, *, rank: int, s: float = 0.1, size: int = 64) -> list[MatrixSpectrum]:
    """Twelve matrices of ``rank`` equal directions in noise."""
    found = []
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        noise = s * torch.randn(size, size, generator=generator)
        axes = torch.linalg.qr(torch.randn(size, 2 * rank, generator=generator))[0]
        values = torch.linalg.svdvals(signal * axes[:, :rank] @ axes[:, rank:].T + noise).double()
        level = {"rows": size, "columns": size, "noise_std": s}
        found.append(MatrixSpectrum.of(values, step=1, name=str(seed), **level))
    return found


def test_the_verdict_follows_from_signal_noise_and_the_room_for_averages():
    threshold = 0.1 * detection_threshold(64, 64)
    clear = spectra_of(3 * threshold, rank=2)
    assert verdict(clear, attainable_std=0.1)[0] == "orthogonalise"
    assert {spectrum.detectable for spectrum in clear} == {2}
    assert fmean(s.overlap for s in clear) == pytest.approx(8 / 9, abs=0.03)  # 1 - x^-2
    assert fmean(s.signal_norm for s in clear) == pytest.approx(3 * threshold * 2**0.5, rel=0.04)
    for spectrum in clear:
        assert spectrum.signal_rank == pytest.approx(2, abs=0.1)
        assert 25 < spectrum.effective_rank < 64
    hidden = spectra_of(0.7 * threshold, rank=2)
    assert verdict(hidden, attainable_std=0.02)[0] == "average more"
    assert verdict(hidden, attainable_std=0.1)[0] == "larger batch"  # no room for an average
    nothing = spectra_of(0.0, rank=1)
    assert verdict(nothing, attainable_std=0.001)[0] == "larger batch"
    assert "no more than noise" in verdict(nothing, attainable_std=0.001)[1]

"""The audit against the real trainer: right code stays below its claim, planted faults do not."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from canary_runs import FAULTS, Small, audited
from scipy.stats import binom, chisquare
from support import Images, arguments, as_loaded, trainer_of

from hf_dpmuon import batches
from hf_dpmuon.canaries import PLOT_FILE, REPORT_FILE, AuditTrainer
from hf_dpmuon.cli import main
from hf_dpmuon.ledger import PrivacyLedger
from hf_dpmuon.sampling import PoissonSampler
from hf_dpmuon.trainer import DPTrainer

SETTING = {"canaries": 2000, "sample_rate": 0.2, "sigma": 0.7, "steps": 8}


@pytest.fixture
def unseeded_rows(monkeypatch):
    """Canaries draw nothing from the global generators, whose seeding takes most of the time."""
    monkeypatch.setattr(batches, "seeded_globals", lambda *_, **__: contextlib.nullcontext())


@pytest.mark.parametrize("rows_per_unit", [1, 2])
def test_right_code_shows_something_and_never_more_than_it_claims(
    rows_per_unit, tmp_path, unseeded_rows
):
    trainer = audited(tmp_path / "run", rows_per_unit=rows_per_unit, **SETTING)
    report = trainer.report()
    assert not report["refuted"]
    assert all(row["epsilon"] <= row["claim"] for row in report["bounds"])
    assert max(row["epsilon"] / row["claim"] for row in report["bounds"]) > 0.3


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows_more_than_is_claimed(fault, tmp_path, monkeypatch, unseeded_rows):
    FAULTS[fault](monkeypatch)
    trainer = audited(tmp_path / "run", rows_per_unit=2 if "unit" in fault else 1, **SETTING)
    assert trainer.report()["refuted"]


def test_a_canary_moves_the_release_by_the_whole_bound_and_nothing_else_does(tmp_path):
    """Without noise, what is released at the canaries' entries is who was drawn."""
    trainer = audited(tmp_path / "run", canaries=60, sample_rate=0.5, sigma=0.0, steps=6)
    weight, bias = (values for _, values in sorted(trainer.releases().items(), reverse=True))
    np.testing.assert_allclose(weight, bias, rtol=1e-6)
    drawn = weight * np.sqrt(2)
    assert np.all((np.abs(drawn) < 1e-6) | (np.abs(drawn - 1) < 1e-5))
    assert not drawn[:, ~trainer.is_member].any()
    assert 0.3 < drawn[:, trainer.is_member].mean() < 0.7


def test_an_audited_run_says_that_it_gives_no_guarantee(tmp_path):
    trainer = audited(
        tmp_path / "run", canaries=60, sample_rate=0.5, sigma=1.0, steps=2, noise_seed=None
    )
    (facts,) = PrivacyLedger.load(tmp_path / "run" / "privacy_ledger.jsonl").runs
    assert not facts.guarantee
    assert trainer.report()["guarantee"] is False


def test_coins_come_from_the_system_and_not_from_the_public_seed(tmp_path):
    first, second = (
        audited(
            tmp_path / name, canaries=60, sample_rate=0.1, sigma=1.0, steps=1, noise_seed=None
        ).is_member
        for name in ("a", "b")
    )
    assert (first != second).any()


def test_too_few_canaries_are_refused(tmp_path):
    with pytest.raises(ValueError, match="canaries=39 must be at least 40"):
        audited(tmp_path / "run", canaries=39, sample_rate=0.5, sigma=1.0, steps=1)


# What the audit of one run cannot see


def law_of_draws(trainer, *, draws: int) -> tuple[float, float]:
    """P-values of the sizes of draws, and of how many units of a draw are in the next one."""
    n, q = trainer.plan.num_units, trainer.plan.sample_rate
    stream = trainer.get_train_dataloader().dataset
    sizes, repeats = [], []
    before: set[int] = set()
    for number in range(draws):
        drawn = {int(row) for batch in stream[number] for row in batch.inputs["labels"]}
        sizes.append(len(drawn))
        repeats.append(len(drawn & before))
        before = drawn
    return _fit(sizes, n, q), _fit(repeats[1:], n, q * q)


def _fit(counts: list[int], n: int, q: float) -> float:
    """P-value of chi-square against a binomial law, cells above the second put together."""
    seen = np.bincount(np.minimum(counts, 3), minlength=4)
    law = [*binom.pmf([0, 1, 2], n, q), binom.sf(2, n, q)]
    return float(chisquare(seen, len(counts) * np.array(law)).pvalue)


class Numbered(Images):
    """Rows whose labels tell which they are."""

    def __getitem__(self, row):
        return {**super().__getitem__(row), "labels": row}


class OwnLoss(DPTrainer):
    def compute_loss(self, *args, **kwargs):  # so that labels may be any number
        return super().compute_loss(*args, **kwargs)


@pytest.fixture
def to_draw(tmp_path, unseeded_rows):
    def make():
        trainer = trainer_of(
            tmp_path / "run",
            train_dataset=Numbered(12),
            kind=OwnLoss,
            logical_batch_size=2,
            max_steps=100_000,
        )
        trainer.privacy_run.prepare(None)
        trainer._taken = 0
        return trainer

    return make


def _shuffled(self, generator):
    """A pass over all units in random order, some in each draw."""
    size = round(self.num_units * self.sample_rate)
    left = getattr(self, "_left", [])
    if len(left) < size:
        left = generator.permutation(self.num_units)
    self._left = left[size:]
    return np.sort(left[:size])


def _fixed_size(self, generator):
    size = round(self.num_units * self.sample_rate)
    return np.sort(generator.choice(self.num_units, size, replace=False))


def _never_empty(draw):
    def again(self, generator):
        while len(drawn := draw(self, generator)) == 0:
            pass
        return drawn

    return again


@pytest.mark.parametrize("fault", [None, _shuffled, _fixed_size, _never_empty(PoissonSampler.draw)])
def test_the_law_of_the_draws_tells_poisson_from_what_one_run_cannot_show(
    fault, to_draw, monkeypatch
):
    if fault is not None:
        monkeypatch.setattr(PoissonSampler, "draw", fault)
    sizes, repeats = law_of_draws(to_draw(), draws=1500)
    if fault is None:
        assert min(sizes, repeats) > 0.01
    else:
        assert min(sizes, repeats) < 1e-6


# The command


def test_the_command_audits_the_run_of_a_file(tmp_path, capsys, unseeded_rows):
    config = tmp_path / "run.yaml"
    settings = {
        "model_name_or_path": "builtin:tiny-vit",
        "dataset_name": "builtin:digits",
        "target_epsilon": 8.0,
        "logical_batch_size": 30,
        "max_steps": 2,
        "output_dir": str(tmp_path / "run"),
        "use_cpu": True,
        "disable_tqdm": True,
    }
    config.write_text(yaml.safe_dump(settings))
    assert main(["audit", str(config), "--canaries", "60"]) == 0
    folder = tmp_path / "run-audit"
    report = json.loads((folder / REPORT_FILE).read_text())
    assert not report["refuted"]
    assert report["noise_draws"] == 2
    assert "Not refuted" in capsys.readouterr().out
    assert (folder / PLOT_FILE).stat().st_size > 1000
    assert not list(folder.glob("*.safetensors"))
    assert not (tmp_path / "run").exists()


class SeveralLabels(Images):
    """Each class is a label that an image has, has not, or of which nobody knows."""

    def __getitem__(self, row):
        labels = torch.tensor([0.0, 1.0, torch.nan]).roll(row)
        return {"pixel_values": self.pixels[row], "labels": labels}


def test_canaries_of_several_labels_move_their_entries_alone(tmp_path):
    trainer = AuditTrainer(
        replace(as_loaded(Small()), multi_label=True),
        arguments(
            tmp_path / "run",
            noise_multiplier=0.0,
            logical_batch_size=40,
            max_steps=3,
            dp_optimizer="sgd",
            bf16=True,
        ),
        train_dataset=SeveralLabels(20),
        canaries=60,
    )
    trainer.train()
    for values in trainer.releases().values():
        assert np.all((np.abs(values) < 1e-6) | (np.abs(values * np.sqrt(2) - 1) < 1e-5))
        assert values[:, trainer.is_member].any()
        assert not values[:, ~trainer.is_member].any()

"""Advice before a run: its numbers are those of the plan and of theory, and no data is read."""

import json
import math

import pytest
from support import as_loaded, tiny_timm_vit

from hf_dpmuon import advice as room
from hf_dpmuon.advice import advise
from hf_dpmuon.cli import main
from hf_dpmuon.plan import Budget

WORDS = ["advise", "--model", "timm/tiny", "--units", "3000", "--target-epsilon", "8"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(room, "load_model", lambda *_, **__: as_loaded(tiny_timm_vit()))


def test_the_numbers_are_those_of_the_plan_and_of_theory():
    """Sigma and steps as a run would have them; the threshold from the look-ahead's variance."""
    found = advise("timm/tiny", num_units=3000, target_epsilon=8.0, num_classes=3)
    assert [c.logical_batch_size for c in found.choices] == [256, 512, 1024, 2048]
    for choice in found.choices:
        size = choice.logical_batch_size
        plan = Budget(logical_batch_size=size, target_epsilon=8.0).plan(3000)
        assert (choice.sigma, choice.steps) == (plan.noise_multiplier, plan.steps)
        assert choice.noise_per_unit == pytest.approx(plan.noise_multiplier / size)
        averaged = choice.noise_per_unit * math.sqrt(0.0303910)  # known value at beta = .95
        assert choice.thresholds["16 x 16"] == pytest.approx(averaged * 4, rel=1e-5)
        assert choice.thresholds["32 x 16"] == pytest.approx(averaged * 512**0.25, rel=1e-5)
        assert choice.hours > 0
    noise = [c.noise_per_unit for c in found.choices]
    assert noise == sorted(noise, reverse=True)
    assert found.logical_batch_size == 1024  # next to .32 N
    assert (found.method, found.engine) == ("muon", "bookkeeping")
    assert found.delta == 1 / 30000


def test_where_no_gradient_could_be_seen_muon_is_not_advised():
    found = advise("timm/tiny", num_units=300, target_epsilon=0.01, num_epochs=500)
    assert found.choices[-1].threshold > found.strongest
    assert found.method == "sgd"
    assert "cannot be detected" in found.reason


def test_the_engine_with_less_memory_is_advised_where_the_fast_one_does_not_fit(monkeypatch):
    monkeypatch.setattr(room, "free_bytes", lambda _: 1000)
    assert advise("timm/tiny", num_units=300, target_epsilon=8).engine == "ghost"


def test_the_command_prints_a_table_json_and_a_picture(capsys, tmp_path):
    picture = tmp_path / "advice.png"
    assert main([*WORDS, "--epochs", "3", "--plot", str(picture)]) == 0
    text = capsys.readouterr().out
    assert text.count("\n*") == 1
    assert "--dp_optimizer muon --logical_batch_size" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*WORDS, "--epochs", "3", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    again = advise("timm/tiny", num_units=3000, target_epsilon=8.0, num_epochs=3).to_dict()
    for choice in (*values["choices"], *again["choices"]):
        del choice["hours"]  # which no two trials share
    assert values["choices"] == again["choices"]
    assert values["gigabytes"].keys() == {"bookkeeping", "ghost"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--units", "200"], "num_units=200 must be >= 256"),
        (["--target-epsilon", "-1"], "target_epsilon=-1.0 must be a finite number > 0"),
        (["--physical_batch_size", "0"], "physical_batch_size=0 must be >= 1"),
        (["--delta", "0.5"], "delta=0.5"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(changed, message, capsys):
    assert main([*WORDS, *changed]) == 2
    assert message in capsys.readouterr().err

"""Laws of the privacy report and the card: true, complete, valid for the Hub, safe to publish."""

import hashlib
import inspect
import json
import math
import os
import re
import subprocess
import sys
import unicodedata
from dataclasses import asdict, replace

import pytest
from huggingface_hub import ModelCard, metadata_load
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_dpmuon.accounting import NoiseEvent, SampledGaussian, epsilon_bound
from hf_dpmuon.group_privacy import group_epsilon
from hf_dpmuon.ledger import PrivacyLedger, RunFacts
from hf_dpmuon.membership import membership_tpr
from hf_dpmuon.model_card import (
    BREAK,
    PrivacyReport,
    build_model_card,
    card_states,
    epsilon_curve,
    hash_weights,
    plain,
    plot_epsilon,
    privacy_report,
    read_report,
    verify_report,
    verify_weights,
)
from hf_dpmuon.rounding import percent_up, round_up

FACTS = RunFacts(
    delta=1e-5,
    accountant="rdp",
    privacy_unit="image",
    adjacency="add or remove one",
    guarantee=True,
    num_units=1000,
)
few = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
names = st.text(max_size=30) | st.text(
    "ab:|#\n\r-_*`[]<>&'\" \t\u2028\x85😀\x00\x1b$~!{}", max_size=12
)


def event(step, sigma=1.1, q=0.02):
    return NoiseEvent(step, sigma, q, 1.0, "flat", f"{step:064x}")


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "privacy_ledger.jsonl"


def ledger_of(path, *runs):
    """A ledger of runs, each of facts and a number of draws."""
    path.unlink(missing_ok=True)
    ledger = PrivacyLedger.create(path)
    for facts, draws in runs:
        ledger.open_run(facts)
        for _ in range(draws):
            ledger.record(event(len(ledger) + 1))
    return ledger


@pytest.fixture
def report(path):
    return privacy_report(ledger_of(path, (FACTS, 40)))


def card_of(report, **change):
    arguments = {
        "base_model": "google/vit-base-patch16-224-in21k",
        "dataset": "hospital/x-rays",
        "label_names": ["no finding", "pneumonia"],
        "recipe": {"method": "DP-Muon", "learning rate": 0.02},
        "metrics": {"accuracy": 0.875, "auroc": 0.9375},
    }
    return build_model_card(report, **(arguments | change))


def one_line(name):
    """The name without controls, and with the number of every character that is not seen."""
    name = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", name)
    unseen = {c for c in name if unicodedata.category(c) == "Cf"}
    for c in unseen:
        name = name.replace(c, f"[U+{ord(c):04X}]")
    return " ".join(name.split())


def fact(card, name):
    """The value in the row of a table."""
    (value,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", card, re.M)
    return value


# The report


def test_the_report_says_what_the_ledger_and_the_accountant_say(path):
    ledger = ledger_of(path, (FACTS, 30), (replace(FACTS, delta=1e-6), 10))
    report = privacy_report(ledger)
    events = [SampledGaussian(1.1, 0.02, 40)]
    epsilon = epsilon_bound(events, delta=1e-6).epsilon
    assert (report.epsilon, report.delta, report.accountant) == (epsilon, 1e-6, "rdp")
    assert report.accountant_version == f"opacus {report.versions['opacus']}"
    assert (report.steps, report.noise_multiplier, report.sample_rate) == (40, 1.1, 0.02)
    assert report.mechanisms == [{"noise_multiplier": 1.1, "sample_rate": 0.02, "steps": 40}]
    assert (report.privacy_unit, report.level, report.num_units) == ("image", "image-level", 1000)
    assert (report.runs, report.draws_before_last_run) == (2, 30)
    assert (report.clipping, report.per_sample_max_grad_norm) == ("flat", 1.0)
    assert (report.adjacency, report.guarantee) == ("add or remove one", True)
    assert (report.largest_group, report.group_name, report.group_epsilon) == (None, None, None)
    by_hand = membership_tpr(epsilon=epsilon, delta=1e-6, fpr=0.01)
    assert (report.membership_fpr, report.membership_tpr) == (0.01, by_hand)
    at_other_deltas = [
        membership_tpr(epsilon=epsilon_bound(events, delta=d).epsilon, delta=d, fpr=0.01)
        for d in (1e-4, 1e-3, 1e-2)
    ]
    assert 0.01 < report.sharper_membership_tpr <= min(by_hand, *at_other_deltas) * 1.05


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_the_largest_group_of_any_run_is_bounded(path, accountant):
    small = replace(FACTS, largest_group=3, group_name="patient", accountant=accountant)
    large = replace(small, largest_group=12)
    report = privacy_report(ledger_of(path, (large, 20), (small, 20)))
    assert (report.largest_group, report.group_name) == (12, "patient")
    assert report.group_epsilon == group_epsilon(
        [SampledGaussian(1.1, 0.02, 40)], group_size=12, delta=1e-5
    )
    assert report.group_epsilon > 12 * report.epsilon
    alone = replace(small, largest_group=1)
    assert privacy_report(ledger_of(path, (alone, 5))).group_epsilon is None


def test_a_ledger_without_draws_has_no_report(path):
    with pytest.raises(ValueError, match="ledger holds no noise draw"):
        privacy_report(ledger_of(path, (FACTS, 0)))
    path.unlink()
    with pytest.raises(ValueError, match="ledger holds no noise draw"):
        privacy_report(PrivacyLedger.create(path))


def test_a_report_is_read_back_as_it_was(path, tmp_path):
    group = replace(FACTS, largest_group=4, group_name="patient", max_examples_per_unit=2)
    ledger = ledger_of(path, (group, 3))
    file = tmp_path / "privacy_report.json"
    for _ in range(2):
        report = privacy_report(ledger)
        file.write_text(json.dumps(report.to_dict(), allow_nan=False))
        assert read_report(file) == report
        assert verify_report(report, ledger) == report
        ledger.record(event(4, sigma=0.0))
    assert report.epsilon == report.group_epsilon == math.inf
    assert not report.guarantee


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": "3"}, "epsilon='3' in .* must be of type float"),
        ({"epsilon": None}, "epsilon=None"),
        ({"epsilon": math.nan}, "epsilon=nan"),
        ({"steps": 2.5}, "steps=2.5 in .* must be of type int"),
        ({"steps": True}, "steps=True"),
        ({"guarantee": 1}, "guarantee=1 in .* must be of type bool"),
        ({"group_name": 5}, r"group_name=5 in .* must be of type str \| None"),
        ({"versions": []}, "versions="),
        ({"versions": {"python": 3}}, "versions=.* must be of type dict"),
        ({"weights": {"model.safetensors": None}}, "weights=.* must be of type dict"),
        ({"weights": "abc"}, "weights='abc' in .* must be of type dict"),
        ({"mechanisms": [{"sigma": 1}]}, "is not a privacy report of this version"),
        ({"mechanisms": 3}, "is not a privacy report of this version"),
        ({"more": 1}, "is not a privacy report of this version"),
    ],
)
def test_a_report_that_somebody_else_wrote_is_checked(report, tmp_path, change, message):
    file = tmp_path / "privacy_report.json"
    file.write_text(json.dumps(report.to_dict() | change))
    with pytest.raises(ValueError, match=message):
        read_report(file)


@pytest.mark.parametrize("content", ["", "[]", "null", "{}", "\x00", '{"epsilon": 1}'])
def test_a_file_that_is_no_report_is_refused(tmp_path, content):
    file = tmp_path / "privacy_report.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"path=.*privacy_report.json is not a privacy report"):
        read_report(file)


def test_no_value_of_a_report_hides_behind_another(report, tmp_path):
    file = tmp_path / "privacy_report.json"
    text = json.dumps(report.to_dict())
    file.write_text(text.replace("{", '{"epsilon": 0.1, ', 1))
    with pytest.raises(ValueError, match="a name is there twice"):
        read_report(file)


def test_a_report_belongs_to_the_weights_that_it_names(path, tmp_path):
    contents = {f"model-{i}.safetensors": bytes([i]) * 3 * 2**19 for i in (1, 2)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "optimizer.pt").write_bytes(b"no weights")
    hashes = hash_weights(tmp_path)
    assert hashes == {n: hashlib.sha256(content).hexdigest() for n, content in contents.items()}
    ledger = ledger_of(path, (FACTS, 3))
    report = privacy_report(ledger, weights=hashes)
    assert report.weights == hashes
    assert verify_report(report, ledger) == report
    verify_weights(report, hashes, tmp_path)
    one = {"model-1.safetensors": hashes["model-1.safetensors"]}
    for other in (
        {},
        one,
        {**hashes, "more.safetensors": "0"},
        {**hashes, **dict.fromkeys(one, "0")},
    ):
        with pytest.raises(ValueError, match=r"^weights='\S+\.safetensors' in .* save the model"):
            verify_weights(report, other, tmp_path)
    # A report of an earlier version names none, and is read as one that belongs to none.
    file = tmp_path / "privacy_report.json"
    old = report.to_dict()
    del old["weights"]
    file.write_text(json.dumps(old))
    assert read_report(file) == privacy_report(ledger)


def test_the_largest_share_of_a_unit_in_any_run_is_stated(path):
    def stated(*limits):
        runs = [(replace(FACTS, max_examples_per_unit=limit), 2) for limit in limits]
        return privacy_report(ledger_of(path, *runs)).max_examples_per_unit

    assert stated(2, 8, 4) == 8
    assert stated(8) == 8
    assert stated(8, None, 4) is None  # all


def test_any_fact_that_the_ledger_does_not_support_is_named(path):
    facts = replace(FACTS, largest_group=4, group_name="patient", max_examples_per_unit=2)
    ledger = ledger_of(path, (facts, 3))
    report = privacy_report(ledger)
    other = {"versions": {"python": "2"}, "accountant_version": "opacus 0.1"}
    other["weights"] = {"model.safetensors": "0"}  # the ledger knows of none
    other["earlier"] = report.as_earlier(counted=False)  # nor of these
    recomputed = verify_report(replace(report, **other), ledger)
    assert recomputed == replace(report, weights=other["weights"], earlier=other["earlier"])
    for name, value in asdict(report).items():
        if name in other:
            continue
        forged = {bool: lambda v: not v, str: lambda v: v + "s", list: lambda v: [*v, *v]}
        change = forged.get(type(value), lambda v: v * 0.999 - 1e-3)(value)
        with pytest.raises(ValueError, match=rf"^{name}="):
            verify_report(replace(report, **{name: change}), ledger)


# The card


def test_the_card_says_what_the_report_says(path):
    ledger = ledger_of(path, (FACTS, 30), (FACTS, 10))
    report = privacy_report(ledger)
    card = card_of(report, has_plot=True)
    assert report.epsilon <= float(fact(card, "epsilon")) <= report.epsilon + 1e-4
    assert fact(card, "delta") == "1e-05"
    assert fact(card, "privacy unit") == "image (image-level)"
    assert fact(card, "adjacency") == "add or remove one"
    assert fact(card, "units (N)") == "1000"
    assert fact(card, "accountant") == f"rdp (opacus {report.versions['opacus']})"
    assert fact(card, "noise multiplier (sigma)") == "1.1"
    assert fact(card, "sampling") == "Poisson, q = 0.02"
    assert fact(card, "noise draws (steps)") == "40"
    assert fact(card, "clipping") == "flat, C = 1"
    assert fact(card, "a guarantee") == "yes"
    assert fact(card, "method") == "DP-Muon"
    assert fact(card, "accuracy") == "0.8750"
    assert "started or resumed 2 times; the 30 draws before" in card
    assert f"finds at most {percent_up(report.sharper_membership_tpr)} of the members" in card
    assert "![Epsilon after each step](epsilon.png)" in card
    assert "epsilon.png" not in card_of(report)
    assert "2 classes: no finding, pneumonia" in card
    for never in ("loss", "seed", str(path)):
        assert never not in card
    for scope in ("hyper-parameters", "evaluation data", "other models", "all 40 noise draws"):
        assert scope in card
    assert "the guarantee does not cover" in card
    public = card_of(report, metrics_public=True)
    assert "the guarantee does not cover" not in public
    assert "computed on public data" in public
    assert "several labels per image" in card_of(report, multi_label=True)


def test_repeated_ids_are_never_called_patient_level(path):
    shared = replace(FACTS, largest_group=12, group_name="patient")
    report = privacy_report(ledger_of(path, (shared, 40)))
    card = card_of(report)
    assert "**Image-level, not patient-level.**" in card
    assert card.count("patient-level") == card.count("not patient-level") == 1
    assert f"for all 12 together epsilon is at most {round_up(report.group_epsilon)} at" in card
    assert float(fact(card, "epsilon of 12 images together")) >= report.group_epsilon
    unnamed = card_of(replace(report, group_name=None))
    assert "not id-level" in unnamed


def test_patients_as_units_are_called_patient_level(path):
    facts = replace(FACTS, privacy_unit="patient", max_examples_per_unit=8)
    card = card_of(privacy_report(ledger_of(path, (facts, 40))))
    assert "**Patient-level differential privacy.**" in card
    assert "differentially private for each patient of the training data" in card
    assert fact(card, "examples of one patient in a step") == "at most 8"
    assert "image-level" not in card
    assert "group privacy" not in card


@pytest.mark.parametrize("sigma", [1.1, 0.0])
def test_a_run_without_guarantee_says_so_before_anything_else(path, sigma):
    ledger = ledger_of(path, (replace(FACTS, guarantee=False), 0))
    ledger.record(event(1, sigma=sigma))
    card = card_of(privacy_report(ledger))
    text = ModelCard(card).text.strip().split("\n\n")
    assert text[0].startswith("# ")
    assert text[1].startswith("**This model carries no privacy guarantee.**")
    assert fact(card, "a guarantee") == "NO"
    assert "This model is (" not in card
    assert "would be (" in card
    assert "differential-privacy" not in ModelCard(card).data.tags


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
@pytest.mark.parametrize("q", [0.02, 1.0])
def test_only_noise_that_protects_somebody_is_called_private(path, accountant, q):
    seen = set()
    for sigma in (1e-9, 1e-5, 1e-3, 0.05, 0.3, 1.0, 4.0):
        ledger = ledger_of(path, (replace(FACTS, accountant=accountant), 0))
        ledger.record(event(1, sigma=sigma, q=q))
        report = privacy_report(ledger)
        assert report.guarantee == math.isfinite(report.epsilon)
        assert report.protects == (report.guarantee and report.sharper_membership_tpr < 0.9999)
        seen.add((report.guarantee, report.protects))
        card = card_of(report)
        assert ("differential-privacy" in ModelCard(card).data.tags) == report.protects
        first = ModelCard(card).text.strip().split("\n\n")[1]
        assert first.startswith("**This model carries no privacy guarantee.**") == (
            not report.guarantee
        )
        assert first.startswith("**This model protects nobody.**") == (
            report.guarantee and not report.protects
        )
    assert (True, True) in seen
    assert len(seen) >= 2


@pytest.mark.parametrize("sigma", [1.1, 1e-2, 0.0])
def test_a_card_states_its_own_report_and_no_other(path, sigma):
    facts = replace(FACTS, largest_group=4, group_name="patient", max_examples_per_unit=2)
    ledger = ledger_of(path, (facts, 0))
    ledger.record(event(1, sigma=sigma, q=0.5))
    report = privacy_report(ledger)
    card = card_of(report)
    assert card_states(report, card)
    assert card_states(report, card_of(report, metrics={}, has_plot=True, license="mit"))
    blocks = card.split("\n\n")
    from_report = ("**", "| | |\n|---|---|\n| epsilon", "- Counted", "As a bound")
    stated = [block for block in blocks if block.startswith(from_report)]
    assert len(stated) >= 5
    for block in stated:
        assert not card_states(report, card.replace(block, ""))
        assert not card_states(report, card.replace(block, f"~~{block}~~"))
        assert not card_states(report, card.replace(block, f"{block}\n\n{block}"))
    for text in ("", card.split("---\n", 2)[2], card.replace("tags:", "labels:"), "---\n[\n---\n"):
        assert not card_states(report, text)
    tag = "- differential-privacy\n"
    assert (tag in card) == report.protects
    untrue = card.replace(tag, "") if tag in card else card.replace("tags:\n", f"tags:\n{tag}")
    assert not card_states(report, untrue)
    ledger.record(event(2, sigma=sigma or 1.0, q=0.5))
    assert not card_states(privacy_report(ledger), card)


# Valid for the Hub


def distinct(metrics):
    """Whether no two names become one by writing them in one line."""
    return len({one_line(name) for name in metrics}) == len(metrics)


def test_the_metadata_is_what_the_hub_expects(report, tmp_path):
    file = tmp_path / "README.md"
    file.write_text(card_of(report, license="apache-2.0", library="timm", model_name="my model"))
    assert metadata_load(file) == {
        "base_model": "google/vit-base-patch16-224-in21k",
        "datasets": ["hospital/x-rays"],
        "library_name": "timm",
        "license": "apache-2.0",
        "pipeline_tag": "image-classification",
        "tags": ["differential-privacy", "dp-muon", "hf-dpmuon"],
        "model-index": [
            {
                "name": "my model",
                "results": [
                    {
                        "task": {"type": "image-classification"},
                        "dataset": {"name": "hospital/x-rays", "type": "hospital/x-rays"},
                        "metrics": [
                            {"type": "accuracy", "value": 0.875, "name": "accuracy"},
                            {"type": "roc_auc", "value": 0.9375, "name": "auroc"},
                        ],
                    }
                ],
            }
        ],
    }


@few
@given(names, names, st.dictionaries(names, st.floats(), max_size=4).filter(distinct), names)
def test_names_however_written_come_back_from_the_metadata(
    report, tmp_path, model, data, metrics, title
):
    card = card_of(report, base_model=model, dataset=data, metrics=metrics, model_name=title)
    file = tmp_path / "README.md"
    file.write_text(card, encoding="utf-8", newline="")
    parsed = ModelCard(card).data
    assert metadata_load(file) == parsed.to_dict()
    assert parsed.base_model in (None, model)
    assert parsed.datasets in (None, [data])
    finite = {one_line(name): value for name, value in metrics.items() if math.isfinite(value)}
    if finite:
        assert parsed.model_name == (one_line(title) or "Privately fine-tuned image classifier")
        shown = {r.metric_name: r.metric_value for r in parsed.eval_results}
        assert shown == finite
        assert {r.dataset_name for r in parsed.eval_results} == {
            one_line(data) or "a local data set"
        }
    else:
        assert parsed.eval_results is None


@few
@given(st.lists(names, min_size=1, max_size=4), names, names, names)
def test_names_however_written_add_no_structure_to_the_text(report, labels, model, title, value):
    def text(**change):
        card = card_of(report, metrics={}, recipe={"x": change.pop("recipe", "x")}, **change)
        return ModelCard(card).text.split("\n")

    expected = text(base_model="m", dataset="m", label_names=["l"] * len(labels), model_name="t")
    lines = text(
        base_model=model, dataset=model, label_names=labels, model_name=title, recipe=value
    )
    assert len(lines) == len(expected)
    for line, usual in zip(lines, expected, strict=True):
        assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == usual.count("|")
        assert line.startswith("#") == usual.startswith("#")
        assert not re.search(r"[\x00-\x1f\x7f-\x9f]", line)
    for name in labels:
        shown = re.sub(r"\\(.)", r"\1", plain(name).replace(BREAK, ""))
        assert shown == one_line(name)


@few
@given(st.text(max_size=20), st.sampled_from(["\u202e", "\u200b", "\u2066", "\ufeff", "\u00ad"]))
def test_k215_what_nobody_sees_is_named(name, unseen):
    shown = plain(name + unseen + "x")
    assert not any(unicodedata.category(c) in ("Cf", "Cc") for c in shown)
    assert f"U+{ord(unseen):04X}" in shown


@pytest.mark.parametrize(
    "name",
    ["https://evil.example/a", "HTTP://a.b", "www.evil.example", "WWW.a.b", "@someone", "a@b.org"],
)
def test_k215_a_name_is_no_link_and_no_mention(report, name):
    shown = plain(name)
    assert shown.replace(BREAK, "") == name
    assert not re.search(r"(?i)https?://|www\.|@\w", shown)
    card = card_of(report, label_names=[name, "b"], recipe={"x": name}, metrics={name: 0.5})
    text = ModelCard(card).text
    assert name not in text
    assert text.count(shown) == 3


def test_the_card_knows_no_framework():
    code = (
        "import sys, hf_dpmuon.model_card; "
        "loaded = {'torch', 'transformers', 'opacus'} & set(sys.modules); assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_k205_the_card_names_the_report_of_the_model_that_training_started_from(report):
    earlier = replace(report, epsilon=2.5, privacy_unit="patient", num_units=77)
    after_other = replace(report, earlier=earlier.as_earlier(counted=False))
    other = card_of(after_other)
    assert "- (2.5, 1e-05) for each patient" in other
    assert "there were 77" in other
    assert "the epsilons add up" in other
    after_composed = replace(report, earlier=earlier.as_earlier(counted=True))
    composed = card_of(after_composed)
    assert "Its draws are among those counted above" in composed
    assert "add up, and so" not in composed
    for stated, card in ((after_other, other), (after_composed, composed)):
        assert card_states(stated, card)
        assert not card_states(earlier, card)
    assert not card_states(after_other, card_of(report))  # the section was taken out
    assert not card_states(after_other, composed)
    assert "before this one" not in card_of(report)


def test_k205_each_report_names_all_trainings_that_it_does_not_count(report):
    """Of a chain of four models; a report that counts another's draws speaks for it."""
    first, second, third = (replace(report, epsilon=e, num_units=7) for e in (1.0, 2.0, 3.0))
    apart = replace(second, earlier=first.as_earlier(counted=False))
    told = replace(third, earlier=apart.as_earlier(counted=False)).as_earlier(counted=False)
    assert [(e.epsilon, e.counted) for e in told] == [(1.0, False), (2.0, False), (3.0, False)]
    joined = replace(second, earlier=first.as_earlier(counted=True))
    told = joined.as_earlier(counted=True)
    assert [(e.epsilon, e.counted) for e in told] == [(1.0, True), (2.0, True)]
    told = joined.as_earlier(counted=False)
    assert [(e.epsilon, e.counted) for e in told] == [(2.0, False)]
    told = apart.as_earlier(counted=True)
    assert [(e.epsilon, e.counted) for e in told] == [(1.0, False), (2.0, True)]


def test_k205_a_report_with_earlier_trainings_can_be_read_back(path, tmp_path):
    ledger = ledger_of(path, (FACTS, 3))
    void = replace(privacy_report(ledger), epsilon=math.inf, guarantee=False)
    report = privacy_report(ledger, earlier=void.as_earlier(counted=False))
    file = tmp_path / "privacy_report.json"
    file.write_text(json.dumps(report.to_dict(), allow_nan=False))
    assert read_report(file) == report
    assert verify_report(read_report(file), ledger) == report
    assert "(inf, 1e-05)" in card_of(report)
    assert "draws, without a guarantee. Its draws are not counted" in card_of(report)
    for wrong in ({"epsilon": "2"}, {"counted": 1}, {"more": 1}, {"num_units": True}):
        entry = {**report.to_dict()["earlier"][0], **wrong}
        file.write_text(json.dumps({**report.to_dict(), "earlier": [entry]}))
        with pytest.raises(ValueError, match=next(iter(wrong))):
            read_report(file)
    file.write_text(json.dumps({**report.to_dict(), "earlier": [3]}))
    with pytest.raises(ValueError, match="is not a privacy report of this version"):
        read_report(file)


def test_k238_a_base_model_that_is_no_hub_id_can_be_read_back(report):
    assert (
        ModelCard(card_of(report, base_model="builtin:tiny-vit")).data.to_dict()["trained_from"]
        == "builtin:tiny-vit"
    )


def test_names_that_are_no_hub_ids_stand_in_the_text_only(report):
    card = card_of(report, base_model="builtin:tiny-vit", dataset="builtin:digits")
    data = ModelCard(card).data
    assert (data.base_model, data.datasets) == (None, None)
    assert "builtin:tiny-vit, fine-tuned on builtin:digits" in card
    local = card_of(report, base_model=None, dataset=None)
    assert "a local model, fine-tuned on a local data set" in local


@pytest.mark.parametrize("library", ["transformers", "timm"])
def test_the_card_shows_how_to_load_the_model_with_its_library(report, library):
    card = card_of(report, library=library)
    (code,) = re.findall(r"```python\n(.*?)```", card, re.S)
    compile(code, library, "exec")
    assert f"{library} import" in code or f"import {library}" in code
    with pytest.raises(ValueError, match="library='keras' must be one of transformers, timm"):
        card_of(report, library="keras")


def test_the_card_of_a_network_of_this_package_says_what_timm_must_import(report):
    ours = card_of(report, library="timm", architecture="hf_dpmuon_wrn_16_4")
    assert "import hf_dpmuon.networks" in ours
    compile(re.findall(r"```python\n(.*?)```", ours, re.S)[0], "card", "exec")
    for other in (None, "vit_base_patch16_224"):
        assert "hf_dpmuon" not in card_of(report, library="timm", architecture=other)


def test_a_missing_licence_is_said(report):
    assert "No licence was stated" in card_of(report)
    assert "No licence was stated" not in card_of(report, license="mit")


def test_a_thousand_classes_do_not_fill_the_card(report):
    card = card_of(report, label_names=[f"class {i}" for i in range(1000)])
    assert "1000 classes: class 0, class 1" in card
    assert "class 99 and 900 more" in card
    assert "class 100" not in card


# The picture


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_the_curve_is_the_ledgers_epsilon_at_a_few_draws(path, accountant):
    ledger = ledger_of(path, (replace(FACTS, accountant=accountant), 0))
    for step in range(1, 351):
        ledger.record(event(step, sigma=1.1 if step < 200 else 2.0))
    curve = epsilon_curve(ledger)
    draws = [n for n, _ in curve]
    assert draws[0] == 0
    assert draws[-1] == 350
    assert 15 < len(curve) <= 101
    assert len(set(draws)) == len(draws)
    assert [e for _, e in curve] == [ledger.epsilon_after(n).epsilon for n in draws]
    assert curve[-1][1] == ledger.epsilon().epsilon
    short = ledger_of(path, (FACTS, 3))
    assert [n for n, _ in epsilon_curve(short)] == [0, 1, 2, 3]


def test_a_picture_is_the_same_bytes_and_tells_nothing_else(path, tmp_path):
    first, second, other = (tmp_path / f"{name}.png" for name in "abc")
    ledger = ledger_of(path, (FACTS, 20))
    assert plot_epsilon(ledger, first)
    assert plot_epsilon(ledger, second)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(b"\x89PNG")
    for chunk in (b"tEXt", b"iTXt", b"tIME"):
        assert chunk not in first.read_bytes()
    assert plot_epsilon(ledger_of(path, (FACTS, 21)), other)
    assert other.read_bytes() != first.read_bytes()


def test_without_matplotlib_there_is_no_picture(path, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not plot_epsilon(ledger_of(path, (FACTS, 2)), tmp_path / "epsilon.png")
    assert not (tmp_path / "epsilon.png").exists()


def test_every_field_of_the_report_is_documented():
    documented = re.findall(r"^    (\w+): ", inspect.cleandoc(PrivacyReport.__doc__), re.M)
    assert documented == list(PrivacyReport.__dataclass_fields__)

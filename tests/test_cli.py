"""The commands as a user runs them: right answers, one screen of help, one sentence of refusal."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_dpmuon.accounting import NoiseEvent, SampledGaussian, compute_epsilon
from hf_dpmuon.cli import main
from hf_dpmuon.ledger import LEDGER_FILE, PrivacyLedger, RunFacts
from hf_dpmuon.membership import membership_tpr, sharper_membership_tpr
from hf_dpmuon.model_card import build_model_card, hash_weights, plot_epsilon, privacy_report
from hf_dpmuon.parsing import shipped_configs
from hf_dpmuon.plan import calibrate_noise_multiplier

FACTS = RunFacts(
    delta=1e-5,
    accountant="rdp",
    privacy_unit="image",
    adjacency="add or remove one",
    guarantee=True,
    num_units=1000,
)
few = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def folder(tmp_path):
    """A run of two starts: ledger, report, card with names and metrics, configuration."""
    folder = tmp_path / "run"
    folder.mkdir()
    ledger = PrivacyLedger.create(folder / LEDGER_FILE)
    step = 0
    for draws in (30, 10):
        ledger.open_run(FACTS)
        for _ in range(draws):
            step += 1
            ledger.record(NoiseEvent(step, 1.1, 0.02, 1.0, "flat", f"{step:064x}"))
    report = privacy_report(ledger)
    (folder / "privacy_report.json").write_text(json.dumps(report.to_dict()))
    (folder / "README.md").write_text(card_of(report))
    config = {"id2label": {"0": "no finding", "1": "pneumonia"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def card_of(report, **change):
    arguments = {
        "base_model": "google/vit-base",
        "dataset": "hospital/x-rays",
        "label_names": ["no finding", "pneumonia"],
        "recipe": {},
        "metrics": {"accuracy": 0.875, "auroc": 0.9375},
        "license": "apache-2.0",
        "library": "timm",
        "model_name": "my model",
    }
    return build_model_card(report, **(arguments | change))


def text(*arguments, capsys):
    assert main(list(map(str, arguments))) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def values(*arguments, capsys):
    return json.loads(text(*arguments, "--json", capsys=capsys))


def refusal(*arguments, capsys):
    """The one sentence that a command refuses with."""
    try:
        code = main(list(map(str, arguments)))
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.endswith("\n")
    assert captured.err.count("\n") == 1
    return captured.err


# Help


@pytest.mark.parametrize("command", [[], ["configs"], ["budget"], ["inspect"], ["card"]])
@pytest.mark.parametrize("columns", ["40", "200"])
def test_help_fits_a_screen(command, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert 5 < len(lines) <= 24
    assert max(map(len, lines)) <= 80


def test_help_and_budget_load_no_more_than_they_need():
    code = """
import contextlib, io, sys
from hf_dpmuon.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(["budget", "--help"])
assert not {"torch", "numpy"} & set(sys.modules)
main(["budget", "--num_units", "1000", "--sigma", "2", "--steps", "5",
      "--logical_batch_size", "10"])
heavy = {"transformers", "datasets", "timm", "matplotlib", "sklearn"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True
    )
    assert "*     10" in done.stdout
    assert done.stderr == ""


# Configurations


def test_configs_are_listed_and_copied_as_they_are(tmp_path, capsys):
    listed = [line.split()[0] for line in text("configs", capsys=capsys).splitlines()]
    assert listed == list(shipped_configs())
    folder = tmp_path / "new" / "folder"
    said = text("configs", folder, capsys=capsys)
    assert "quickstart.yaml" in said
    assert {path.stem for path in folder.iterdir()} == set(listed)
    for name, path in shipped_configs().items():
        assert (folder / f"{name}.yaml").read_bytes() == path.read_bytes()


def test_configs_overwrite_nothing(tmp_path, capsys):
    (tmp_path / "quickstart.yaml").write_text("mine")
    said = refusal("configs", tmp_path, capsys=capsys)
    assert "quickstart.yaml" in said
    assert "dpsgd" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["quickstart.yaml"]
    assert (tmp_path / "quickstart.yaml").read_text() == "mine"
    assert "File exists" in refusal("configs", tmp_path / "quickstart.yaml", capsys=capsys)


# Budget


@few
@given(
    st.integers(100, 100_000),
    st.floats(0.001, 1),
    st.floats(0.5, 10),
    st.integers(1, 500),
    st.sampled_from(["epsilon", "sigma", "steps"]),
)
def test_any_two_of_epsilon_sigma_and_steps_give_the_third(
    capsys, num_units, share, sigma, steps, unknown
):
    batch_size = max(1, round(share * num_units))
    q, delta = batch_size / num_units, 1 / (10 * num_units)

    def cost(sigma, steps):
        return compute_epsilon(noise_multiplier=sigma, sample_rate=q, steps=steps, delta=delta)

    epsilon = cost(sigma, steps)
    known = {"epsilon": epsilon, "sigma": sigma, "steps": steps}
    del known[unknown]
    asked = [word for name, value in known.items() for word in (f"--{name}", value)]
    answer = values(
        *("budget", "--num_units", num_units, "--logical_batch_size", batch_size, *asked),
        capsys=capsys,
    )
    assert answer["delta"] == delta
    (plan,) = [p for p in answer["plans"] if p["asked"]]
    assert plan["sample_rate"] == q
    assert plan["epochs"] == plan["steps"] * q
    assert plan["epsilon"] == cost(plan["sigma"], plan["steps"])
    assert plan["noise_per_unit"] == plan["sigma"] / batch_size
    assert plan["membership_tpr"] == membership_tpr(epsilon=plan["epsilon"], delta=delta, fpr=0.01)
    assert plan["sharper_membership_tpr"] == sharper_membership_tpr(
        [SampledGaussian(plan["sigma"], q, plan["steps"])], delta=delta, fpr=0.01
    )
    assert {n: plan[n] for n in known if n != "epsilon"} == {
        n: v for n, v in known.items() if n != "epsilon"
    }
    if unknown == "epsilon":
        assert plan["epsilon"] == epsilon
    elif unknown == "sigma":
        assert plan["sigma"] == calibrate_noise_multiplier(
            target_epsilon=epsilon, target_delta=delta, sample_rate=q, steps=steps
        )
    else:
        assert plan["epsilon"] <= epsilon < cost(sigma, plan["steps"] + 1)


def test_the_prv_accountant_affords_the_most_steps_too(capsys):
    answer = values(
        *("budget", "--num_units", 1000, "--logical_batch_size", 1000, "--epsilon", 3),
        *("--sigma", 20, "--accountant", "prv"),
        capsys=capsys,
    )
    (plan,) = [p for p in answer["plans"] if p["asked"]]

    def cost(steps, accountant):
        return compute_epsilon(
            noise_multiplier=20,
            sample_rate=1.0,
            steps=steps,
            delta=1e-4,
            accountant=accountant,
        )

    assert cost(plan["steps"], "prv") <= 3 < cost(plan["steps"] + 1, "prv")
    assert cost(plan["steps"], "rdp") > 3


def test_the_table_compares_batch_sizes_at_equal_epochs(capsys):
    arguments = ("budget", "--num_units", 1000, "--logical_batch_size", 101, "--epsilon", 2)
    plans = values(*arguments, "--epochs", 5, capsys=capsys)["plans"]
    assert [p["logical_batch_size"] for p in plans] == [51, 101, 202, 404, 808]
    assert [p["steps"] for p in plans] == [100, 50, 25, 10, 5]
    assert [p["asked"] for p in plans] == [False, True, False, False, False]
    for plan in plans:
        assert 1.98 < plan["epsilon"] <= 2
    lines = text(*arguments, "--epochs", 5, capsys=capsys).splitlines()
    header, *rows = lines[2 : lines.index("", 2)]
    assert "5.05" not in lines[-1]
    assert any("4.04 at a batch of 808" in line for line in lines)  # case 268
    assert header.split() == [
        *("batch", "q", "steps", "epochs", "sigma", "epsilon", "noise", "TPR")
    ]
    assert len(rows) == len(plans)
    for row, plan in zip(rows, plans, strict=True):
        assert row.startswith("*") == plan["asked"]
        batch, _, steps, _, sigma, epsilon, _, tpr, _ = row.strip("* ").split()
        assert (int(batch), int(steps)) == (plan["logical_batch_size"], plan["steps"])
        assert float(sigma) == plan["sigma"]
        assert plan["epsilon"] <= float(epsilon) <= plan["epsilon"] + 1e-4
        assert plan["sharper_membership_tpr"] <= float(tpr) / 100 + 1e-12
        assert max(map(len, lines)) <= 100


@few
@given(st.integers(1000, 10**6), st.floats(0.3, 4), st.integers(1, 300))
def test_no_cost_is_printed_below_the_true_one(capsys, num_units, sigma, steps):
    arguments = ("budget", "--num_units", num_units, "--logical_batch_size", 500)
    arguments += ("--sigma", sigma, "--steps", steps)
    answer = values(*arguments, capsys=capsys)
    lines = text(*arguments, capsys=capsys).splitlines()
    (delta,) = re.findall(r"delta = (\S+),", lines[0])
    assert answer["delta"] <= float(delta) <= answer["delta"] * 1.01
    for row, plan in zip(lines[3:-3], answer["plans"], strict=True):
        *_, epsilon, _, tpr, _ = row.split()
        assert plan["epsilon"] <= float(epsilon) < plan["epsilon"] + 1.001e-4
        assert plan["sharper_membership_tpr"] * 100 <= float(tpr) * (1 + 1e-15)


def test_a_batch_size_without_a_solution_is_left_out(capsys):
    plans = values(
        *("budget", "--num_units", 1000, "--logical_batch_size", 10, "--epsilon", 2),
        *("--sigma", 1),
        capsys=capsys,
    )["plans"]
    assert 1 < len(plans) < 6
    assert all(p["epsilon"] <= 2 for p in plans)


@pytest.mark.parametrize(
    "given",
    [("--epsilon", 2, "--sigma", 2), ("--epsilon", 2, "--steps", 5), ("--sigma", 2, "--steps", 5)],
)
def test_a_plot_of_the_table(tmp_path, capsys, given):
    path = tmp_path / "budget.png"
    arguments = ("budget", "--num_units", 1000, "--logical_batch_size", 50, *given)
    assert "noise" in text(*arguments, "--plot", path, capsys=capsys)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["budget.png"]


def test_a_plot_that_cannot_be_drawn_is_refused(tmp_path, capsys, monkeypatch):
    arguments = ("budget", "--num_units", 1000, "--logical_batch_size", 50)
    arguments += ("--sigma", 2, "--steps", 5, "--plot")
    assert "No such file" in refusal(*arguments, tmp_path / "no" / "a.png", capsys=capsys)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "--plot needs matplotlib" in refusal(*arguments, tmp_path / "a.png", capsys=capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "arguments are required: --num_units"),
        ("--num_units many", "invalid int value: 'many'"),
        ("--num_units 5000", r"set epsilon .*, or sigma itself"),
        ("--num_units 5000 --epsilon 1 --sigma 1 --steps 1", "both go together only where"),
        ("--num_units 5000 --steps 1 --epochs 1", "not allowed with argument"),
        ("--num_units 0 --epsilon 1 --sigma 1", "num_units=0 must be >= 1"),
        ("--num_units 9 --epsilon 1 --sigma 1", r"logical_batch_size=1024 must be in \[1, 9\]"),
        ("--num_units 5000 --epsilon 1 --steps 0", "steps=0 must be >= 1"),
        ("--num_units 5000 --epsilon -1 --steps 5", "epsilon=-1.0 must be a finite number > 0"),
        ("--num_units 5000 --epsilon nan --sigma 1", "epsilon=nan must be a finite number > 0"),
        ("--num_units 5000 --sigma -1 --steps 5", "noise_multiplier=-1.0 must be a finite number"),
        ("--num_units 5000 --sigma nan --steps 5", "noise_multiplier=nan must be a finite number"),
        ("--num_units 5000 --sigma 1 --steps -1", "max_steps=-1 must be >= 1"),
        (
            "--num_units 5000 --sigma inf --steps 5",
            "multiplier=inf must be a finite number >= 0",
        ),
        ("--num_units 5000 --sigma 1 --epochs inf", "num_train_epochs=inf must be a finite number"),
        (
            "--num_units 5000 --sigma 1 --steps 1 --delta 0.1",
            "delta=0.1 must be above 0",
        ),
        ("--num_units 5000 --epsilon 0.01 --sigma 1", "epsilon=0.01 must be at least .*one step"),
        (
            "--num_units 5000 --epsilon 9 --sigma 1e9",
            "multiplier=1000000000.0 must be smaller",
        ),
        (
            "--num_units 5000 --epsilon 1e-9 --steps 1000 --delta 1e-12",
            "target_epsilon=1e-09 must be at least",
        ),
        ("--num_units 5000 --sigma 1 --steps 1 --accountant gdp", "invalid choice: 'gdp'"),
        ("--num_units 5000 --eps 1", "unrecognized arguments|two of epsilon"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused_in_one_sentence(capsys, given, message):
    assert re.search(message, refusal("budget", *given.split(), capsys=capsys))


def test_no_noise_costs_everything(capsys):
    arguments = ("budget", "--num_units", 5000, "--sigma", 0, "--steps", 5)
    assert {plan["epsilon"] for plan in values(*arguments, capsys=capsys)["plans"]} == {"inf"}
    assert " inf " in text(*arguments, capsys=capsys)


def test_no_command_is_refused(capsys):
    assert "required: COMMAND" in refusal(capsys=capsys)
    assert "invalid choice: 'train'" in refusal("train", capsys=capsys)


# Inspect


def test_a_run_is_verified_against_its_ledger(folder, capsys):
    ledger = PrivacyLedger.load(folder / LEDGER_FILE)
    report = privacy_report(ledger)
    for path in (folder, folder / LEDGER_FILE, folder / "privacy_report.json"):
        answer = values("inspect", path, capsys=capsys)
        assert answer["verified"] is True
        assert answer["report"] == report.to_dict()
        assert [start["draws"] for start in answer["runs"]] == [30, 10]
        assert {start["num_units"] for start in answer["runs"]} == {1000}
    (folder / "privacy_report.json").unlink()
    assert values("inspect", folder, capsys=capsys) == answer
    output = text("inspect", folder, capsys=capsys)
    assert output.startswith("Verified")
    assert f"{report.epsilon}" in output
    assert "sigma 1.1, q 0.02, 40 draws" in output
    assert "start 2" in output
    assert "start 3" not in output
    assert "NO GUARANTEE" not in output


def test_a_run_without_guarantee_is_marked(folder, capsys):
    ledger = PrivacyLedger.load(folder / LEDGER_FILE)
    ledger.open_run(replace(FACTS, guarantee=False))
    (folder / "privacy_report.json").unlink()
    assert text("inspect", folder, capsys=capsys).count("NO GUARANTEE") == 2


def test_a_report_without_its_ledger_is_only_stated(folder, capsys):
    (folder / LEDGER_FILE).unlink()
    answer = values("inspect", folder, capsys=capsys)
    assert answer["verified"] is False
    assert answer["runs"] == []
    assert text("inspect", folder, capsys=capsys).startswith("Not verifiable")
    path = folder / "privacy_report.json"
    stated = json.loads(path.read_text())
    (folder / "README.md").unlink()
    path.write_text(json.dumps(stated | {"clipping": "\x1b[2Jflat\nepsilon 0"}))
    output = text("inspect", folder, capsys=capsys)
    assert "\x1b" not in output
    assert "\nepsilon 0" not in output


def test_inspect_prints_every_cost_in_full(folder, capsys):
    delta = 1 / 30_001
    ledger = PrivacyLedger.load(folder / LEDGER_FILE)
    ledger.open_run(replace(FACTS, delta=delta))
    (folder / "privacy_report.json").unlink()
    report = privacy_report(ledger)
    words = text("inspect", folder, capsys=capsys).replace(",", " ").split()
    for cost in (report.epsilon, report.membership_tpr, report.sharper_membership_tpr):
        assert repr(cost) in words
    output = text("inspect", folder, capsys=capsys)
    assert output.index(repr(report.sharper_membership_tpr)) < output.index(
        repr(report.membership_tpr)
    )
    assert words.count(repr(delta)) == 2  # of the report, of the start


def test_the_weights_beside_a_report_are_verified(folder, capsys):
    assert values("inspect", folder, capsys=capsys)["weights_verified"] is False
    weights = folder / "model.safetensors"
    weights.write_bytes(b"of step 40")
    # The report is of a version that recorded none.
    assert values("inspect", folder, capsys=capsys)["weights_verified"] is False
    path = folder / "privacy_report.json"
    stated = json.loads(path.read_text())
    path.write_text(json.dumps({**stated, "weights": hash_weights(folder)}))
    for has_ledger in (True, False):
        if not has_ledger:
            (folder / LEDGER_FILE).unlink()
        assert values("inspect", folder, capsys=capsys)["weights_verified"] is True
        assert "The weights are those of the report." in text("inspect", folder, capsys=capsys)
    weights.write_bytes(b"of step 41")
    for command in ("inspect", "card"):
        assert "weights='model.safetensors' in" in refusal(command, folder, capsys=capsys)
    weights.unlink()
    assert values("inspect", folder, capsys=capsys)["weights_verified"] is False


def test_a_checkpoint_is_compared_with_the_ledger_of_its_run(folder, capsys):
    def ahead(path):
        return values("inspect", path, capsys=capsys)["draws_of_the_run_ahead"]

    run = PrivacyLedger.load(folder / LEDGER_FILE)
    checkpoint = folder / "checkpoint-40"
    checkpoint.mkdir()
    run.copy_to(checkpoint / LEDGER_FILE)
    assert ahead(folder) is None
    assert ahead(checkpoint) == 0
    assert "has the same draws" in text("inspect", checkpoint, capsys=capsys)
    run.record(NoiseEvent(41, 1.1, 0.02, 1.0, "flat", "0" * 64))
    assert ahead(checkpoint) == 1
    assert "is 1 draws AHEAD of this checkpoint" in text("inspect", checkpoint, capsys=capsys)
    later = PrivacyLedger.load(checkpoint / LEDGER_FILE)
    later.copy_to(folder / LEDGER_FILE)
    for step in (41, 42):
        later.record(NoiseEvent(step, 1.1, 0.02, 1.0, "flat", "0" * 64))
    (folder / "privacy_report.json").unlink()
    assert ahead(checkpoint) == -2
    assert "This checkpoint is 2 draws AHEAD" in text("inspect", checkpoint, capsys=capsys)
    PrivacyLedger.load(folder / LEDGER_FILE).record(
        NoiseEvent(41, 1.2, 0.02, 1.0, "flat", "0" * 64)
    )
    assert "are not of one run" in refusal("inspect", checkpoint, capsys=capsys)
    (folder / LEDGER_FILE).unlink()
    assert ahead(checkpoint) is None


def test_a_guarantee_that_protects_nobody_is_marked(tmp_path, capsys):
    ledger = PrivacyLedger.create(tmp_path / LEDGER_FILE)
    ledger.open_run(FACTS)
    ledger.record(NoiseEvent(1, 0.01, 0.02, 1.0, "flat", "0" * 64))
    output = text("inspect", tmp_path, capsys=capsys)
    assert "PROTECTS NOBODY" in output
    assert "NO GUARANTEE" not in output


def test_a_report_that_differs_from_the_ledger_is_an_error(folder, capsys):
    path = folder / "privacy_report.json"
    stated = json.loads(path.read_text())
    path.write_text(json.dumps(stated | {"epsilon": stated["epsilon"] / 2}))
    for command in ("inspect", "card"):
        message = refusal(command, folder, capsys=capsys)
        assert f"epsilon={stated['epsilon'] / 2!r} in the privacy report" in message
        assert repr(stated["epsilon"]) in message


def test_a_changed_ledger_is_an_error(folder, capsys):
    path = folder / LEDGER_FILE
    path.write_bytes(path.read_bytes().replace(b'"step":7', b'"step":8', 1))
    for command in ("inspect", "card"):
        assert "line 8 of" in refusal(command, folder, capsys=capsys)


def test_a_torn_last_line_is_noted(folder, capsys):
    path = folder / LEDGER_FILE
    content = path.read_bytes()
    path.write_bytes(content + b'{"chain":')
    assert main(["inspect", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("Verified")
    assert re.fullmatch(r"note: line 43 of .* is torn and was dropped.*\n", captured.err)
    assert path.read_bytes() == content + b'{"chain":'


@pytest.mark.parametrize("command", ["inspect", "card"])
def test_what_is_no_run_is_refused(tmp_path, command, capsys):
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"")
    for path in (tmp_path, tmp_path / "missing"):
        assert "must be a folder with privacy_ledger.jsonl or privacy_report.json" in refusal(
            command, path, capsys=capsys
        )
    assert "ledger holds no noise draw" in refusal(command, empty, capsys=capsys)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\x00\xff\n\x80")
    assert "line 1 of" in refusal(command, weights, capsys=capsys)
    old = tmp_path / "privacy_report.json"
    old.write_text('{"epsilon": 1.0}')
    assert "is not a privacy report of this version" in refusal(command, tmp_path, capsys=capsys)


# Card


def test_a_card_is_rebuilt_from_the_ledger_and_the_names_in_the_old_one(folder, capsys):
    ledger = PrivacyLedger.load(folder / LEDGER_FILE)
    expected = card_of(privacy_report(ledger))
    assert text("card", folder, capsys=capsys) == expected
    answer = values("card", folder, capsys=capsys)
    assert answer["card"] == expected
    assert answer["metadata"]["license"] == "apache-2.0"
    assert answer["metadata"]["base_model"] == "google/vit-base"
    plot_epsilon(ledger, folder / "epsilon.png")
    assert text("card", folder, capsys=capsys) == card_of(privacy_report(ledger), has_plot=True)


def test_a_card_without_an_old_one_is_minimal(folder, capsys):
    (folder / "README.md").unlink()
    (folder / "config.json").unlink()
    report = privacy_report(PrivacyLedger.load(folder / LEDGER_FILE))
    assert text("card", folder, capsys=capsys) == build_model_card(
        report, base_model=None, dataset=None, label_names=(), recipe={}, metrics={}
    )
    timm = {"label_names": ["a", "b"], "problem_type": "multi_label_classification"}
    (folder / "config.json").write_text(json.dumps(timm))
    card = text("card", folder, capsys=capsys)
    assert "2 labels: a, b" in card
    assert "several labels per image" in card


def test_a_card_is_written_whole_or_not_at_all(folder, capsys, monkeypatch):
    expected = text("card", folder, capsys=capsys)
    path = folder / "README.md"
    assert "written to" in text("card", folder, "--output", path, capsys=capsys)
    assert path.read_text() == expected

    def full(*arguments):
        raise OSError(28, "No space left on device")

    before = sorted(p.name for p in folder.iterdir())
    monkeypatch.setattr(os, "replace", full)
    assert "No space left" in refusal("card", folder, "--output", path, capsys=capsys)
    assert path.read_text() == expected
    assert sorted(p.name for p in folder.iterdir()) == before


def test_a_card_of_stated_numbers_says_so(folder, capsys):
    (folder / LEDGER_FILE).unlink()
    assert main(["card", str(folder)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("---\n")
    assert captured.err == "note: there is no ledger here; the card has the numbers as stated.\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("README.md", "---\n- a\n---\n"),
        ("README.md", "---\na: [\n---\n"),
        ("README.md", "---\nmodel-index: 3\n---\n"),
        ("config.json", "{"),
        ("config.json", "[1]"),
        ("config.json", "\ud800".encode("utf-16", "surrogatepass")),
    ],
)
def test_a_broken_neighbour_of_the_ledger_is_named(folder, capsys, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert f"{name} must be readable and is not" in refusal(
        "card", folder, "--output", folder / "card.md", capsys=capsys
    )
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


@pytest.mark.parametrize(
    "metadata",
    [
        "base_model: [1, 2]\ndatasets: {a: b}\nlicense: 3\nlibrary_name: [timm]",
        "library_name: keras\nmodel_name: 5",
    ],
)
def test_strange_metadata_is_left_out(folder, capsys, metadata):
    (folder / "README.md").write_text(f"---\n{metadata}\n---\n")
    card = text("card", folder, capsys=capsys)
    assert "a local model, fine-tuned on a local data set" in card


def test_inspect_refuses_a_card_that_states_something_else(folder, capsys):
    card = folder / "README.md"
    report = privacy_report(PrivacyLedger.load(folder / LEDGER_FILE))
    card.write_text(
        build_model_card(
            report, base_model=None, dataset=None, label_names=(), recipe={}, metrics={}
        )
    )
    text("inspect", folder, capsys=capsys)
    card.write_text(card.read_text().replace(f"({report.epsilon:.3g}"[:3], "(0.01"))
    assert "does not state what the report" in refusal("inspect", folder, capsys=capsys)

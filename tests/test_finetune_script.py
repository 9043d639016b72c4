"""The command that the README shows, as a user runs it."""

from __future__ import annotations

import json
import os
import resource
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image
from support import ROOT, forked, in_processes, script
from transformers import AutoImageProcessor, AutoModelForImageClassification

# A process group that is open when the interpreter ends aborts the process now and then.
# Each process says so in a file of its own: their lines on one pipe would run into each other.
LOOK_AT_EXIT = """
import atexit, os, pathlib, runpy, torch
said = pathlib.Path(__file__).with_name("open-at-exit-" + os.environ.get("RANK", "0"))
atexit.register(lambda: said.write_text(str(torch.distributed.is_initialized())))
runpy.run_path("scripts/finetune_vit.py", run_name="__main__")
"""
QUICKSTART = ("--config=configs/quickstart.yaml", "--max_steps=2", "--logical_batch_size=32")


def looking(folder: Path) -> str:
    path = folder / "finetune_and_look.py"
    path.write_text(LOOK_AT_EXIT)
    return str(path)


def said_at_exit(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("open-at-exit-*"))]


@dataclass(frozen=True)
class Launched:
    folder: Path
    stdout: str


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """The quickstart as a user launches it, in two processes with interpreters of their own."""
    home = tmp_path_factory.mktemp("launched")
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("accelerate")),
            *("launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"),
            *("--mixed_precision=no", "--dynamo_backend=no"),
            *(looking(home), *QUICKSTART, f"--output_dir={home / 'run'}"),
        ],
        cwd=ROOT,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert said_at_exit(home) == ["False", "False"]
    return Launched(home / "run", done.stdout)


def test_the_quickstart_trains_evaluates_and_saves(launched):
    folder = launched.folder
    assert launched.stdout.count("test accuracy") == 1
    assert launched.stdout.count("Routing of parameters") == 1
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "README.local.md",
        "config.json",
        "epsilon.png",
        "confusion.png",
        "model.safetensors",
        "preprocessor_config.json",
        "privacy_ledger.jsonl",
        "privacy_report.json",
        "spectral_report.json",
        "spectral_report.png",
        "trainer_state.json",
    }
    report = json.loads((folder / "privacy_report.json").read_text())
    assert report["guarantee"] is True
    assert 0.995 * 8 <= report["epsilon"] <= 8
    assert f"epsilon        {report['epsilon']:.4f}" in launched.stdout
    model, info = AutoModelForImageClassification.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.id2label[3] == "3"
    assert AutoImageProcessor.from_pretrained(folder).size["height"] == 28


def test_two_processes_train_as_one(tmp_path):
    states = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        options = (*QUICKSTART, "--noise_seed=5", "--use_cpu", f"--output_dir={folder}")
        path = looking(tmp_path)
        ran = in_processes(processes, lambda _, o=options, p=path: script(*o, path=p))
        assert [done.returncode for done in ran] == [0] * processes, ran[0].stderr[-3000:]
        assert said_at_exit(tmp_path) == ["False"] * processes
        assert [done.stdout.count("test accuracy") for done in ran] == [1, 0][:processes]
        states.append(AutoModelForImageClassification.from_pretrained(folder).state_dict())
    difference = max(float((states[0][n] - states[1][n]).abs().max()) for n in states[0])
    assert difference < 1e-5


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--target_epsilon=8", "--noise_multiplier=1"],
            "both are set",
        ),
        (["--target_epsilon=8", "--logical_batch_size=5000"], "logical_batch_size=5000"),
        (["--target_epsilom=8"], "did you mean 'target_epsilon'"),
        (["--target_epsilon=8", "--dataset_name=no/such-set"], "no/such-set"),
        (["--target_epsilon=8", "--model_name_or_path=no/such-model"], "no/such-model"),
    ],
    ids=["both", "q above 1", "typing error", "data set", "model"],
)
def test_bad_input_ends_with_one_sentence_and_code_2(tmp_path, options, sentence):
    folder = tmp_path / "run"
    done = script(f"--output_dir={folder}", *options)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("finetune_vit:")]
    assert sentence in line
    assert not (folder / "privacy_ledger.jsonl").exists()


def test_help_names_every_privacy_option():
    done = script("--help")
    assert done.returncode == 0
    for option in ("target_epsilon", "noise_multiplier", "logical_batch_size", "dataset_name"):
        assert f"--{option}" in done.stdout


@pytest.mark.parametrize("saving", ["at the end", "a checkpoint"])
def test_a_full_disk_ends_with_one_sentence_and_no_part_of_a_model(tmp_path, saving):
    folder = tmp_path / "run"
    options = ["--save_strategy=steps", "--save_steps=1"] if saving == "a checkpoint" else []

    def on_a_full_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))
        sys.argv = ["finetune_vit", *QUICKSTART, "--use_cpu", f"--output_dir={folder}", *options]
        runpy.run_path("scripts/finetune_vit.py", run_name="__main__")

    done = forked(on_a_full_disk)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("finetune_vit:")]
    assert "large" in line or "written" in line
    left = {path.name for path in folder.iterdir()}
    assert "privacy_ledger.jsonl" in left  # the step was taken, and counts
    assert not left & {"model.safetensors", "config.json", "README.md", "privacy_report.json"}
    assert not any("incomplete" in name or "checkpoint" in name for name in left)


def test_the_card_of_the_quickstart_says_how_to_load_it_and_is_right(
    launched, tmp_path, monkeypatch
):
    """Its model is greyscale, which `pipeline` would feed RGB."""
    folder = launched.folder
    card = (folder / "README.md").read_text()
    snippet = card.split("```python\n")[1].split("```")[0]
    Image.new("L", (50, 40), 90).save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    printed: list[torch.Tensor] = []
    exec(
        snippet.replace("<this repository or folder>", str(folder)),
        {"print": printed.append},
    )
    (probabilities,) = printed
    assert probabilities.shape == (1, 10)
    assert float(probabilities.sum()) == pytest.approx(1, abs=1e-5)

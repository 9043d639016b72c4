"""The command that fine-tunes, as a user runs it from a checkout or without one."""

from __future__ import annotations

import json
import os
import resource
import runpy
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image
from support import ROOT, forked, in_processes, script
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from transformers import AutoImageProcessor, AutoModelForImageClassification

from hf_dpmuon.cli import main

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


# What `hf-dpmuon finetune` is on a machine with two devices.
ON_TWO_DEVICES = """
import sys, torch
torch.accelerator.device_count = lambda: 2
from hf_dpmuon.cli import main
sys.exit(main(["finetune", *sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """The quickstart by its name, from another folder, in two processes that the command starts."""
    home = tmp_path_factory.mktemp("launched")
    options = ("--config=quickstart", *QUICKSTART[1:], "--output_dir=run")
    done = subprocess.run(
        [sys.executable, "-c", ON_TWO_DEVICES, *options],
        cwd=home,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
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


def command(*words: str) -> None:
    sys.exit(main(["finetune", *words]))


def module(*words: str) -> None:
    sys.argv = ["finetune.py", *words]
    runpy.run_module("hf_dpmuon.finetune", run_name="__main__")


def of_the_checkout(*words: str) -> None:
    sys.argv = ["finetune_vit.py", *words]
    runpy.run_path("scripts/finetune_vit.py", run_name="__main__")


@pytest.mark.parametrize(
    ("run", "program"),
    [
        (command, "hf-dpmuon finetune"),
        (of_the_checkout, "finetune_vit.py"),
        (module, "python -m hf_dpmuon.finetune"),
    ],
    ids=["command", "script", "module"],
)
def test_help_and_refusals_name_the_program_that_was_called(run, program):
    for option in ("--help", "-h", "--help-all"):
        done = forked(lambda o=option: run(o))
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"usage: {program} [--config")
        assert "--target_epsilon" in done.stdout
    done = forked(lambda: run("--config", "quickstrat"))
    assert done.returncode == 2
    assert done.stderr.startswith(f"{program.removesuffix('.py')}: config='quickstrat'")
    assert "ham10000, patch_camelyon, quickstart." in done.stderr
    assert done.stderr.count("\n") == 1


@dataclass
class Launcher:
    """What was started instead of processes, and what they end with."""

    started: list[Namespace]
    failure: Exception | None = None

    def __call__(self, options: Namespace) -> None:
        self.started.append(options)
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def launcher(monkeypatch) -> Launcher:
    launcher = Launcher([])
    monkeypatch.setattr("accelerate.commands.launch.launch_command", launcher)
    monkeypatch.setattr("hf_dpmuon.finetune.main", lambda words, program: len(words))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.delenv("RANK", raising=False)
    return launcher


def test_several_devices_get_a_process_each_that_runs_the_same_command(launcher):
    assert main(["finetune", "--config=quickstart", "--learning_rate", "1"]) == 0
    (options,) = launcher.started
    assert (options.num_processes, options.num_machines, options.multi_gpu) == (3, 1, True)
    assert (options.module, options.training_script) == (True, "hf_dpmuon.cli")
    words = ["finetune", "--config=quickstart", "--learning_rate", "1"]
    assert options.training_script_args == words


@pytest.mark.parametrize(
    ("words", "devices", "rank"),
    [
        ([], 0, None),
        ([], 1, None),
        ([], 3, "0"),
        (["--use_cpu"], 3, None),
        (["--use-cpu=True", "--max_steps=1"], 3, None),
        (["--help-all"], 3, None),
    ],
    ids=["no device", "one device", "a launcher is there", "cpu", "cpu, as a value", "help"],
)
def test_one_device_is_enough_for_this_process(launcher, monkeypatch, words, devices, rank):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert main(["finetune", *words]) == len(words)  # what `main` of the module returns here
    assert launcher.started == []


def test_the_exit_code_is_that_of_the_process_that_failed_first(launcher):
    failed = ProcessFailure(local_rank=1, pid=1, exitcode=2, error_file="<N/A>")
    launcher.failure = ChildFailedError("hf_dpmuon.cli", {1: failed})
    assert main(["finetune"]) == 2


@pytest.mark.parametrize("saving", ["at the end", "a checkpoint"])
def test_a_full_disk_ends_with_one_sentence_and_no_part_of_a_model(tmp_path, saving):
    folder = tmp_path / "run"
    options = ["--save_strategy=steps", "--save_steps=1"] if saving == "a checkpoint" else []

    def on_a_full_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))
        of_the_checkout(*QUICKSTART, "--use_cpu", f"--output_dir={folder}", *options)

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

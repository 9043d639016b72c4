"""The medical configurations, run by the real script on tiny data sets of the published schemas.

A Hub on loopback serves them to the real clients. The images are noise, and so are the patients.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from datasets import ClassLabel, Dataset, Features, Image, List, Value
from image_tables import parquet
from loopback_hub import LoopbackHub, parquet_of, png_of
from PIL import Image as Pictures
from safetensors import safe_open

from hf_dpmuon import (
    DPTrainer,
    DPTrainingArguments,
    ImageExamples,
    build_transforms,
    load_image_dataset,
    load_model,
)
from hf_dpmuon.arguments import parse_arguments
from hf_dpmuon.plan import calibrate_noise_multiplier, num_steps

ROOT = Path(__file__).parents[1]
CONFIGS = {path.stem: path for path in sorted((ROOT / "configs/medical").glob("*.yaml"))}
GUIDE = (ROOT / "docs/medical.md").read_text()
STRING = Value("string")
FINDINGS = [
    *("No Finding", "Enlarged Cardiomediastinum", "Cardiomegaly", "Lung Opacity", "Lung Lesion"),
    *("Edema", "Consolidation", "Pneumonia", "Atelectasis", "Pneumothorax", "Pleural Effusion"),
    *("Pleural Other", "Fracture", "Support Devices"),
]
COMPETITION = ("Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Pleural Effusion")
CELLS = [
    *("basophil", "eosinophil", "erythroblast", "immature granulocyte"),
    *("lymphocyte", "monocyte", "neutrophil", "platelet"),
]
LESIONS = [
    *("actinic_keratoses", "basal_cell_carcinoma", "benign_keratosis-like_lesions"),
    *("dermatofibroma", "melanocytic_Nevi", "melanoma", "vascular_lesions"),
]
Rows = list[dict[str, Any]]


def pictures(split: str, *, size: int = 12, channels: int = 3) -> Iterator[bytes]:
    """Endless distinct images."""
    generator = np.random.default_rng(sum(map(ord, split)))
    shape = (size, size) if channels == 1 else (size, size, channels)
    while True:
        yield png_of(generator.integers(0, 256, shape))


def chest_rows(split: str, count: int) -> Rows:
    images = pictures(split, channels=1)
    return [
        {
            "image": {"bytes": next(images), "path": f"person{7000 + i}_bacteria_{i}.jpeg"},
            "label": i % 2,
        }
        for i in range(count)
    ]


def skin_rows(split: str, count: int, *, first_lesion: int = 0) -> Rows:
    """Two images of each lesion; a lesion is of one kind."""
    images = pictures(split)
    return [
        {
            "image": {"bytes": next(images), "path": None},
            "image_id": f"ISIC_{27419 + 1000 * first_lesion + i:07d}",
            "lesion_id": f"HAM_{4001 + first_lesion + i // 2:07d}",
            "dx": LESIONS[(i // 2) % 7],
            "dx_type": "histo",
            "age": 45.0 + i,
            "sex": ("female", "male", "unknown")[i % 3],
            "localization": "back",
        }
        for i in range(count)
    ]


def patch_rows(split: str, count: int) -> Rows:
    images = pictures(split)
    return [
        {"image": {"bytes": next(images), "path": None}, "label": i % 2 == 1} for i in range(count)
    ]


def chexpert_rows(split: str, count: int, *, first_patient: int) -> Rows:
    """Three images of each patient in two studies, with each kind of answer for each finding."""
    images = pictures(split, channels=1)
    rows = []
    for i in range(count):
        patient, view = f"patient{first_patient + i // 3:05d}", i % 3
        answers = {name: (i + shift) % 4 for shift, name in enumerate(FINDINGS)}
        kind = "lateral" if view == 1 else "frontal"
        path = f"{patient}/study{1 + view // 2}/view{1 + view % 2}_{kind}.jpg"
        rows.append(
            {
                "Path": f"CheXpert-v1.0-small/{split}/{path}",
                "Sex": i % 2,
                "Age": 30 + i,
                "Frontal/Lateral": int(view == 1),
                "AP/PA": i % 2,
                **answers,
                "image": {"bytes": next(images), "path": None},
            }
        )
    return rows


def blood_rows(split: str, count: int) -> Rows:
    images = pictures(split)
    return [
        {
            "image": {"bytes": next(images), "path": None},
            "image_hash": f"{0x9E3779B97F4A7C15 * (i + 1 + len(split)) % 2**64:016x}",
            "question": "Which kind of cell does this image show?",
            "options": CELLS,
            "answer": CELLS[i % 8],
            "responses": ["It is round."],
        }
        for i in range(count)
    ]


CHEST = Features({"image": Image(), "label": ClassLabel(names=["NORMAL", "PNEUMONIA"])})
SKIN = Features(
    {
        "image": Image(),
        **dict.fromkeys(("image_id", "lesion_id", "dx", "dx_type"), STRING),
        "age": Value("float64"),
        "sex": STRING,
        "localization": STRING,
    }
)
PATCHES = Features({"image": Image(), "label": Value("bool")})
CHEXPERT = Features(
    {
        "Path": STRING,
        "Sex": ClassLabel(names=["Male", "Female"]),
        "Age": Value("int64"),
        "Frontal/Lateral": ClassLabel(names=["Frontal", "Lateral"]),
        "AP/PA": ClassLabel(names=["AP", "PA"]),
        **{
            name: ClassLabel(names=["unlabeled", "uncertain", "absent", "present"])
            for name in FINDINGS
        },
        "image": Image(),
    }
)
BLOOD = Features(
    {
        "image": Image(),
        "image_hash": STRING,
        "question": STRING,
        "options": List(STRING),
        "answer": STRING,
        "responses": List(STRING),
    }
)
RETINA = Features({"image": Image(), "eye": STRING, "level": Value("int64")})


def retina_rows(count: int) -> list[tuple[str, int]]:
    """Eye and grade: left and right of each subject."""
    return [(f"{40713 + i // 2}_{('left', 'right')[i % 2]}", i % 5) for i in range(count)]


@dataclass(frozen=True)
class Published:
    """A schema as it is published, and what a run on a tiny copy of it must report.

    Attributes:
        features: Columns and their types.
        splits: Rows of each split of the tiny copy.
        unit: What is protected.
        classes: Names of the model's outputs.
        ids: A pattern that all ids and paths of the data match, and nothing that may be written.
        held_out: Whether N is what is left of the train split's units.
        printed: Metrics that the run must print.
    """

    features: Features
    splits: dict[str, Rows]
    unit: str
    classes: tuple[str, ...]
    ids: str
    units: int
    held_out: bool = False
    printed: tuple[str, ...] = ("accuracy", "balanced accuracy", "auroc", "f1")


PUBLISHED = {
    "chest_xray_pneumonia": Published(
        CHEST,
        {
            "train": chest_rows("train", 24),
            "validation": chest_rows("validation", 4),
            "test": chest_rows("test", 8),
        },
        unit="image",
        classes=("NORMAL", "PNEUMONIA"),
        ids=r"person7\d{3}|bacteria_",
        units=24,
    ),
    "ham10000": Published(
        SKIN,
        {
            "train": skin_rows("train", 84),
            "validation": skin_rows("validation", 14, first_lesion=3),
            "test": skin_rows("test", 14, first_lesion=5),
        },
        unit="lesion",
        classes=tuple(LESIONS),
        ids=r"ISIC_\d|HAM_\d",
        units=42,
        held_out=True,
    ),
    "patch_camelyon": Published(
        PATCHES,
        {
            "train": patch_rows("train", 24),
            "valid": patch_rows("valid", 4),
            "test": patch_rows("test", 8),
        },
        unit="image",
        classes=("0", "1"),
        ids=r"\.parquet",
        units=24,
    ),
    "diabetic_retinopathy": Published(
        RETINA,
        {"train": [{"eye": eye, "level": level} for eye, level in retina_rows(60)]},
        unit="patient",
        classes=("0", "1", "2", "3", "4"),
        ids=r"407[1-4]\d_|_left|_right",
        units=30,
        held_out=True,
    ),
    "chexpert": Published(
        CHEXPERT,
        {
            "train": chexpert_rows("train", 36, first_patient=1),
            "validation": chexpert_rows("validation", 12, first_patient=64541),
        },
        unit="patient",
        classes=COMPETITION,
        ids=r"patient\d|study\d|view\d|CheXpert-v1",
        units=12,
        printed=("accuracy", "auroc", "f1"),
    ),
    "blood_cells": Published(
        BLOOD,
        {"train": blood_rows("train", 32), "test": blood_rows("test", 16)},
        unit="image",
        classes=tuple(CELLS),
        ids="|".join(
            row["image_hash"] for part in ("train", "test") for row in blood_rows(part, 32)
        ),
        units=32,
    ),
}


def write_retina(home: Path) -> Path:
    """The folder that docs/medical.md describes, made by the lines that it shows."""
    folder = home / "data/diabetic-retinopathy"
    (folder / "images").mkdir(parents=True)
    images = pictures("retina")
    for eye, _ in retina_rows(60):
        picture = Pictures.open(io.BytesIO(next(images)))
        picture.save(folder / f"images/{eye}.jpeg", quality=95)
    lines = [f"{eye},{level}" for eye, level in retina_rows(60)]
    (home / "trainLabels.csv").write_text("\n".join(["image,level", *lines]))
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    subprocess.run([sys.executable, "-c", code], cwd=home, check=True)
    return folder


# ---- what the files say, without running them ----


def test_there_are_six():
    assert set(CONFIGS) == set(PUBLISHED)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_parses_and_names_what_the_schema_has(name, tmp_path):
    given = yaml.safe_load(CONFIGS[name].read_text())
    options = [f"--config={CONFIGS[name]}", f"--output_dir={tmp_path}", "--use_cpu"]
    model, data, training = parse_arguments(options)
    assert model.model_name_or_path == "google/vit-base-patch16-224-in21k"
    parsed = {**vars(model), **vars(data), **vars(training)}
    assert {key: parsed[key] for key in given} == given
    published = PUBLISHED[name]
    assert isinstance(published.features[data.image_column], Image)
    labels = data.label_columns or [data.label_column]
    named = [*labels, *([data.privacy_unit_column] if data.privacy_unit_column else [])]
    assert set(named) <= set(published.features)
    assert data.train_split in published.splits
    # Rows to evaluate on are named, never guessed.
    assert data.eval_split in published.splits or data.eval_fraction is not None
    assert (data.privacy_unit_column is None) == (published.unit == "image")
    assert not training.bf16  # needs a device that the file cannot know


@pytest.mark.parametrize("name", CONFIGS)
def test_the_privacy_plan_in_a_comment_is_the_one_that_is_run(name):
    text = CONFIGS[name].read_text()
    number = r"([0-9.]*[0-9])"
    line = rf"^# N = {number}: q = {number}, {number} steps, sigma {number}$"
    units, q, steps, sigma = map(float, re.search(line, text, re.MULTILINE).groups())
    given = yaml.safe_load(text)
    rate = given["logical_batch_size"] / units
    assert rate == pytest.approx(q, rel=0.02)
    assert num_steps(num_epochs=given["num_train_epochs"], sample_rate=rate) == steps
    calibrated = calibrate_noise_multiplier(
        target_epsilon=given["target_epsilon"],
        target_delta=1 / (10 * units),
        sample_rate=rate,
        steps=int(steps),
    )
    assert calibrated == pytest.approx(sigma, abs=0.006)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_header_says_what_is_protected_and_what_is_not(name):
    header = CONFIGS[name].read_text().split("model_name_or_path")[0]
    assert header.splitlines()[0].endswith(f": {PUBLISHED[name].unit}-level.")
    for heading in ("Data", "Terms", "Unit", "Public", "Not protected", "Prepare"):
        assert re.search(rf"^# {heading}\b", header, re.MULTILINE), heading


@pytest.mark.parametrize("name", CONFIGS)
def test_chests_are_not_mirrored(name):
    given = yaml.safe_load(CONFIGS[name].read_text())
    assert given["random_flip"] is (name not in ("chest_xray_pneumonia", "chexpert"))


def test_the_class_weights_of_the_guide_follow_from_the_public_counts():
    counts = re.search(r"in this\s+order, are ((?:\d+, )+\d+)", GUIDE)[1].split(", ")
    skin, chest = (
        list(map(float, of.split()))
        for of in re.findall(r"--class_weights ((?:\d+\.\d+ ?)+)", GUIDE)
    )
    assert skin == [round(10015 / (7 * int(count)), 2) for count in counts]
    assert chest == [round(5216 / (2 * count), 2) for count in (1341, 3875)]


def test_the_guide_has_a_row_for_each_config():
    for name, published in PUBLISHED.items():
        (row,) = [line for line in GUIDE.splitlines() if line.startswith(f"| `{name}` |")]
        assert row.split("|")[4].split()[0] == published.unit


@pytest.mark.parametrize(
    ("of", "paths", "persons"),
    [
        (
            "image",
            [f"{i % 3}/{40713 + i // 2}_{('left', 'right')[i % 2]}.jpeg" for i in range(12)],
            6,
        ),
        (
            "Path",
            [f"train/patient{i // 3:05d}/study1/view{i}_frontal.jpg" for i in range(12)],
            4,
        ),
    ],
)
def test_the_units_in_paths_that_the_guide_names_are_found(tmp_path, of, paths, persons):
    """Both as they are downloaded: a folder of grades, and CheXpert with its table."""
    for path, image in zip(paths, pictures("guide"), strict=False):
        file = tmp_path / "CheXpert-v1.0-small" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        Pictures.open(io.BytesIO(image)).save(file)
    folder = tmp_path / "CheXpert-v1.0-small"
    if of == "Path":
        rows = [f"{folder.name}/{path},{i % 2}.0" for i, path in enumerate(paths)]
        (folder / "train.csv").write_text("\n".join(["Path,Edema", *rows]))
    (pattern,) = re.findall(rf"--privacy_unit_column {of} --privacy_unit_pattern '(.*)'", GUIDE)
    splits = load_image_dataset(
        str(folder),
        privacy_unit_column=of,
        privacy_unit_pattern=pattern,
        label_columns=["Edema"] if of == "Path" else None,
    )
    assert splits.units.name == "patient"
    assert len(splits.units) == persons


# ---- runs ----

# Each run is a child of its own, with the script's own streams and exit code; only the imports are
# shared.
RUN_ALL = """
import gc, json, os, runpy, sys
import datasets, sklearn.metrics, timm, transformers, matplotlib.figure
import hf_dpmuon.trainer, hf_dpmuon.data, hf_dpmuon.models
assert not datasets.config.HF_HUB_OFFLINE
gc.collect()
gc.freeze()  # what is collected is the runs', and no page of the imports is copied for it
for name, options in json.loads(sys.argv[1]).items():
    child = os.fork()
    if child == 0:
        log = os.open(f"{sys.argv[2]}/{name}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["finetune_vit.py", *options]
        code = 1
        try:
            runpy.run_path("scripts/finetune_vit.py", run_name="__main__")
            code = 0
        except SystemExit as exit:
            code = exit.code
        except BaseException:
            import traceback
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
TINY = [
    "--model_name_or_path=builtin:tiny-vit",
    "--use_cpu",
    "--max_steps=2",
    "--logical_batch_size=6",
    "--per_device_train_batch_size=8",
    "--dataloader_num_workers=0",
    "--save_steps=1",  # a checkpoint, so that its files are looked through as well
]


@dataclass(frozen=True)
class Run:
    """What a run left: its exit code, all that it printed, and its folder."""

    code: int
    log: str
    folder: Path

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.folder / "privacy_report.json").read_text())


def without(config: Path, key: str, folder: Path, **added: Any) -> Path:
    """A copy of the file that lacks one key: the command line cannot unset it."""
    given = yaml.safe_load(config.read_text())
    del given[key]
    changed = folder / f"{config.stem}-without-{key}.yaml"
    changed.write_text(yaml.safe_dump({**given, **added}))
    return changed


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Run]:
    """All configs, and some of their mistakes, by the real script in one process tree."""
    home = tmp_path_factory.mktemp("medical")
    retina = write_retina(home)
    asked: dict[str, list[str]] = {}
    with LoopbackHub() as hub:
        for name, published in PUBLISHED.items():
            asked[name] = [f"--config={CONFIGS[name]}"]
            if name == "diabetic_retinopathy":
                files = {str(p.relative_to(retina)): p.read_bytes() for p in files_of(retina)}
                hub.add_dataset("dr-weber/diabetic-retinopathy", files, private=True)
                asked[name].append(f"--dataset_name={retina}")
                asked["retina_on_hub"] = [
                    f"--config={CONFIGS[name]}",
                    "--dataset_name=dr-weber/diabetic-retinopathy",
                ]
                asked["retina_unprepared"] = [f"--config={CONFIGS[name]}"]
                continue
            repository = yaml.safe_load(CONFIGS[name].read_text())["dataset_name"]
            files = {
                f"data/{split}-00000-of-00001.parquet": parquet_of(rows, published.features)
                for split, rows in published.splits.items()
            }
            hub.add_dataset(repository, files)
        skin = PUBLISHED["ham10000"]
        features = Features({k: v for k, v in SKIN.items() if k != "lesion_id"})
        rows = [{k: v for k, v in row.items() if k in features} for row in skin.splits["train"]]
        hub.add_dataset("clinic/no-lesions", {"data/train.parquet": parquet_of(rows, features)})
        published_splits = without(CONFIGS["ham10000"], "eval_fraction", home, eval_split="test")
        asked["ham10000_published_splits"] = [f"--config={published_splits}"]
        asked["ham10000_no_unit"] = [
            f"--config={CONFIGS['ham10000']}",
            "--dataset_name=clinic/no-lesions",
        ]
        by_image = without(
            CONFIGS["ham10000"], "privacy_unit_column", home, max_examples_per_unit=8
        )
        asked["ham10000_by_image"] = [f"--config={by_image}"]
        asked = {
            name: [*options, *TINY, f"--output_dir={home / name / 'run'}"]
            for name, options in asked.items()
        }
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", RUN_ALL, json.dumps(asked), str(home)],
            env=hub.environment(home / "hf"),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    codes = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    return {
        name: Run(int(codes[name]), (home / f"{name}.log").read_text(), home / name / "run")
        for name in asked
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_trains_evaluates_and_protects_its_unit(name, runs):
    run, published = runs[name], PUBLISHED[name]
    assert run.code == 0, run.log[-3000:]
    report = run.report
    assert report["guarantee"] is True
    assert (report["privacy_unit"], report["level"]) == (published.unit, f"{published.unit}-level")
    target = yaml.safe_load(CONFIGS[name].read_text())["target_epsilon"]
    assert 0.9 * target < report["epsilon"] <= target
    if published.held_out:
        assert 0.5 * published.units < report["num_units"] < published.units
    else:
        assert report["num_units"] == published.units
    assert report["sample_rate"] == pytest.approx(6 / report["num_units"])
    for metric in published.printed:
        assert re.search(rf"^test {metric}  [01]\.\d{{4}}$", run.log, re.MULTILINE), metric
    card = (run.folder / "README.md").read_text()
    assert f"{published.unit}-level" in card
    assert ("patient-level" in card.lower()) == (published.unit == "patient")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_has_one_named_output_per_class(name, runs):
    folder, classes = runs[name].folder, PUBLISHED[name].classes
    config = json.loads((folder / "config.json").read_text())
    assert tuple(config["id2label"][str(i)] for i in range(len(classes))) == classes
    assert len(config["id2label"]) == len(classes)
    several = config.get("problem_type") == "multi_label_classification"
    assert several == (name == "chexpert")
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert weights.get_slice("classifier.weight").get_shape()[0] == len(classes)


@pytest.mark.parametrize("name", CONFIGS)
def test_no_id_and_no_path_of_the_data_is_written_or_printed(name, runs):
    run, ids = runs[name], re.compile(PUBLISHED[name].ids.encode())
    texts = {str(p.relative_to(run.folder)): p.read_bytes() for p in files_of(run.folder)}
    assert "model.safetensors" in texts
    assert any(path.startswith("checkpoint-") for path in texts)
    for path, content in {**texts, "what was printed": run.log.encode()}.items():
        found = ids.search(content) or ids.search(path.encode())
        assert found is None, (path, found)


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_every_id_of_the_data_is_one_that_is_looked_for():
    ids = {
        "chest_xray_pneumonia": lambda row: [row["image"]["path"]],
        "ham10000": lambda row: [row["image_id"], row["lesion_id"]],
        "diabetic_retinopathy": lambda row: [row["eye"]],
        "chexpert": lambda row: [row["Path"], row["Path"].split("/")[2]],
        "blood_cells": lambda row: [row["image_hash"]],
    }
    for name, of_row in ids.items():
        published = PUBLISHED[name]
        for rows in published.splits.values():
            assert all(re.search(published.ids, i) for row in rows for i in of_row(row)), name


def test_both_eyes_are_one_patient_on_the_hub_as_in_a_folder(runs):
    local, hub = runs["diabetic_retinopathy"], runs["retina_on_hub"]
    assert hub.code == 0, hub.log[-3000:]
    assert hub.report["num_units"] == local.report["num_units"]
    assert hub.report["level"] == "patient-level"
    assert f"{2 * hub.report['num_units']} training images" in hub.log
    assert "40713" not in hub.log


def test_lesions_that_are_in_both_published_splits_are_counted_and_refused(runs):
    run = runs["ham10000_published_splits"]
    assert run.code == 2, run.log[-3000:]
    (line,) = [line for line in run.log.splitlines() if line.startswith("finetune_vit:")]
    assert "7 units are in the train and the evaluation split" in line
    assert "14 evaluation rows" in line
    assert "eval_fraction" in line
    refused_before_training(run)


def test_a_table_without_the_unit_column_is_refused(runs):
    run = runs["ham10000_no_unit"]
    assert run.code == 2, run.log[-3000:]
    assert "privacy_unit_column='lesion_id' is missing" in run.log
    refused_before_training(run)


def test_a_folder_that_was_not_prepared_is_a_wrong_path_and_nobody_asks_the_hub(runs):
    run = runs["retina_unprepared"]
    assert run.code == 2, run.log[-3000:]
    assert "'./data/diabetic-retinopathy' is no file or folder here" in run.log
    refused_before_training(run)


def refused_before_training(run: Run) -> None:
    assert "Traceback" not in run.log
    assert re.search(r"ISIC_\d|HAM_\d", run.log) is None
    assert not run.folder.exists() or files_of(run.folder) == []


def test_without_the_unit_column_lesions_are_not_claimed_but_counted(runs):
    """The same data by image: the report says so, and what it means for a lesion."""
    run = runs["ham10000_by_image"]
    assert run.code == 0, run.log[-3000:]
    report = run.report
    assert (report["level"], report["group_name"], report["largest_group"]) == (
        "image-level",
        "lesion",
        2,
    )
    assert report["group_epsilon"] > report["epsilon"]
    assert "--privacy_unit_column lesion_id" in run.log


# ---- patients who are simulated ----

PATIENTS = 30
IMAGES_OF_EACH = 5


def simulated_patients(seed: int = 0) -> dict[str, Dataset]:
    """Real digits, each seen by the camera of a simulated patient: gain, gamma and rotation."""
    generator = np.random.default_rng(seed)
    digits = load_image_dataset("builtin:digits").train
    rows: dict[str, Rows] = {"train": [], "test": []}
    for patient in range(PATIENTS):
        gain, gamma = generator.uniform(0.6, 1.0), generator.uniform(0.7, 1.4)
        angle = generator.uniform(-20, 20)
        for i in range(IMAGES_OF_EACH):
            example = digits[patient * IMAGES_OF_EACH + i]
            turned = example["image"].rotate(angle, resample=Pictures.Resampling.BILINEAR)
            pixels = 255 * gain * (np.asarray(turned) / 255) ** gamma
            rows["test" if patient % 5 == 4 else "train"].append(
                {
                    "image": Pictures.fromarray(pixels.round().astype(np.uint8)),
                    "label": example["label"],
                    "patient_id": f"simulated-{patient:03d}",
                }
            )
    names = [str(digit) for digit in range(10)]
    features = Features({"image": Image(), "label": ClassLabel(names=names), "patient_id": STRING})
    return {split: Dataset.from_list(of, features=features) for split, of in rows.items()}


def test_simulated_patients_are_protected_as_whole_persons(tmp_path):
    """Real images, simulated patients: who owns which digit, and each camera, was made up here."""
    splits = load_image_dataset(
        str(parquet(tmp_path / "data", **simulated_patients())), privacy_unit_column="patient_id"
    )
    assert (len(splits.train), len(splits.evaluation)) == (120, 30)
    assert len(splits.units) == 24
    loaded = load_model("builtin:tiny-vit", label_names=splits.label_names)

    def examples(split: Dataset, *, train: bool) -> ImageExamples:
        transform = build_transforms(loaded.image_format, train=train, random_flip=False)
        return ImageExamples(
            split,
            image_column=splits.image_column,
            label_column=splits.label_column,
            transform=transform,
        )

    args = DPTrainingArguments(
        str(tmp_path / "run"),
        target_epsilon=8,
        logical_batch_size=8,
        per_device_train_batch_size=16,
        max_steps=4,
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = DPTrainer(
        loaded,
        args,
        train_dataset=examples(splits.train, train=True),
        eval_dataset=examples(splits.evaluation, train=False),
        units=splits.units,
        max_examples_per_unit=3,
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    assert all(not before[name].equal(p) for name, p in trainer.model.named_parameters())
    assert 0 <= metrics["eval_accuracy"] <= 1
    report = json.loads((tmp_path / "run/privacy_report.json").read_text())
    assert report["guarantee"] is True
    assert report["level"] == "patient-level"
    assert report["num_units"] == 24  # persons, not the 120 images
    assert report["sample_rate"] == pytest.approx(8 / 24)
    assert report["max_examples_per_unit"] == 3
    assert report["delta"] == pytest.approx(1 / 240)
    assert report["epsilon"] <= 8
    for path in files_of(tmp_path / "run"):
        assert b"simulated-0" not in path.read_bytes(), path

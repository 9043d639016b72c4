"""Data sets of a Hub on loopback, loaded with the real client: what the configurations rely on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel, Features, Image, Value
from loopback_hub import LoopbackHub, parquet_of, png_of

FEATURES = Features(
    {
        "image": Image(),
        "dx": ClassLabel(names=["nevus", "melanoma"]),
        "lesion_id": Value("string"),
    }
)
LOAD = """
import json, sys
import datasets
datasets.disable_progress_bars()
answers = []
for asked in json.loads(sys.argv[1]):
    try:
        found = datasets.load_dataset(asked.pop("path"), asked.pop("name", None), **asked)
    except Exception as error:
        answers.append({"error": f"{type(error).__name__}: {error}"})
        continue
    answers.append({
        split: {
            "rows": len(rows),
            "columns": rows.column_names,
            "first": {k: v for k, v in rows[0].items() if k != "image"},
            "pixels": sum(rows[0]["image"].convert("L").tobytes()),
            "names": rows.features[rows.column_names[1]].names,
        }
        for split, rows in found.items()
    })
print("RESULT" + json.dumps(answers))
"""


def scans(count: int, *, shade: int) -> bytes:
    rows = [
        {
            "image": {"bytes": png_of(np.full((6, 5, 3), shade + i)), "path": None},
            "dx": i % 2,
            "lesion_id": f"HAM_{i // 2:04d}",
        }
        for i in range(count)
    ]
    return parquet_of(rows, FEATURES)


@pytest.fixture(scope="module")
def hub():
    """Parquet in two configurations and two revisions, folders of images, gated and private."""
    with LoopbackHub() as hub:
        card = (
            "---\nlicense: cc-by-nc-4.0\nconfigs:\n"
            "- config_name: full\n  data_files:\n"
            "  - split: train\n    path: full/train-*.parquet\n"
            "  - split: test\n    path: full/test-*.parquet\n"
            "- config_name: small\n  data_files:\n"
            "  - split: train\n    path: small/train-*.parquet\n---\n"
        )
        files = {
            "README.md": card.encode(),
            "full/train-00000-of-00002.parquet": scans(6, shade=10),
            "full/train-00001-of-00002.parquet": scans(2, shade=20),
            "full/test-00000-of-00001.parquet": scans(4, shade=30),
            "small/train-00000-of-00001.parquet": scans(2, shade=40),
        }
        hub.first = hub.add_dataset("clinic/skin", files)
        hub.add_dataset("clinic/skin", {"small/train-00000-of-00001.parquet": scans(4, shade=50)})
        folders = {
            f"{split}/{name}/{i}.png": png_of(np.full((4, 4), shade + i))
            for split, shade in (("train", 100), ("test", 110))
            for name in ("NORMAL", "PNEUMONIA")
            for i in range(3)
        }
        hub.add_dataset("clinic/chest", folders)
        hub.add_dataset("clinic/gated", {"train.parquet": scans(2, shade=60)}, gated=True)
        hub.add_dataset("clinic/private", {"train.parquet": scans(2, shade=70)}, private=True)
        yield hub


def load(hub: LoopbackHub, home: Path, *asked: dict[str, str], **settings: str | None) -> list:
    done = hub.python(LOAD, json.dumps(asked), home=home, **settings)
    return json.loads(done.stdout.split("RESULT")[1])


def test_configurations_revisions_and_image_folders_load(hub, tmp_path):
    full, new, old, chest, private, gated, no_config, no_revision = load(
        hub,
        tmp_path,
        {"path": "clinic/skin", "name": "full"},
        {"path": "clinic/skin", "name": "small"},
        {"path": "clinic/skin", "name": "small", "revision": hub.first},
        {"path": "clinic/chest"},
        {"path": "clinic/private"},
        {"path": "clinic/gated"},
        {"path": "clinic/skin", "name": "large"},
        {"path": "clinic/skin", "name": "small", "revision": "v9"},
    )
    assert {split: found["rows"] for split, found in full.items()} == {"train": 8, "test": 4}
    assert full["train"]["columns"] == ["image", "dx", "lesion_id"]
    assert full["train"]["names"] == ["nevus", "melanoma"]
    assert full["train"]["first"] == {"dx": 0, "lesion_id": "HAM_0000"}
    assert full["test"]["pixels"] == 30 * 30
    assert (new["train"]["rows"], new["train"]["pixels"]) == (4, 30 * 50)
    assert (old["train"]["rows"], old["train"]["pixels"]) == (2, 30 * 40)
    assert {split: found["rows"] for split, found in chest.items()} == {"train": 6, "test": 6}
    assert chest["train"]["names"] == ["NORMAL", "PNEUMONIA"]
    assert chest["train"]["pixels"] == 16 * 100
    assert private["train"]["rows"] == gated["train"]["rows"] == 2  # with the token
    assert "large" in no_config["error"]
    assert "v9" in no_revision["error"]


def test_without_a_token_private_and_gated_data_are_out_of_reach(hub, tmp_path):
    asked = len(hub.requests)
    gated, private, missing, public = load(
        hub,
        tmp_path,
        {"path": "clinic/gated"},
        {"path": "clinic/private"},
        {"path": "clinic/none"},
        {"path": "clinic/chest"},
        token=None,
    )
    assert "is a gated dataset on the Hub" in gated["error"]  # GatedRepoError underneath
    # A stranger cannot tell a private data set from a missing one.
    assert private["error"].startswith("DatasetNotFoundError")
    assert private["error"] == missing["error"].replace("none", "private")
    assert public["train"]["rows"] == 6
    fetched = [r.path for r in hub.requests[asked:] if r.method == "GET" and "/resolve/" in r.path]
    assert fetched
    assert all(path.startswith("/datasets/clinic/chest/") for path in fetched)

"""Laws of where tables come from: folders, files, tars and the Hub."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from image_tables import SECRET, class_folders, parquet, png, table, webdataset, write_image
from loopback_hub import LoopbackHub, parquet_of, png_of

from hf_dpmuon.data import load_image_dataset


def test_class_folders_become_labels(tmp_path: Path) -> None:
    class_folders(tmp_path / "train", {"cat": 3, "dog": 2})
    class_folders(tmp_path / "test", {"cat": 1, "dog": 1})
    splits = load_image_dataset(str(tmp_path))
    assert splits.label_names == ("cat", "dog")
    assert splits.train["label"][:] == [0, 0, 0, 1, 1]
    assert splits.evaluation is not None
    assert splits.evaluation["label"][:] == [0, 1]
    assert splits.notes[0] == "evaluating on the split 'test'"


def test_folder_with_metadata_names_its_labels_there(tmp_path: Path) -> None:
    class_folders(tmp_path, {"images": 3})
    (tmp_path / "metadata.csv").write_text(
        "file_name,label\nimages/0.png,b\nimages/1.png,a\nimages/2.png,b\n"
    )
    splits = load_image_dataset(str(tmp_path))
    assert splits.label_names == ("a", "b")
    assert sorted(splits.train["label"][:]) == [0, 1, 1]


@pytest.mark.parametrize("whole_folder", [True, False])
def test_csv_with_image_paths(tmp_path: Path, whole_folder: bool) -> None:
    class_folders(tmp_path, {"images": 3})
    csv = tmp_path / "cohort.csv"
    csv.write_text(
        "patient,file,finding\n7,images/0.png,ill\n8,images/1.png,well\n7,images/2.png,ill\n"
    )
    splits = load_image_dataset(str(tmp_path if whole_folder else csv), label_column="finding")
    assert (splits.image_column, splits.label_column) == ("file", "finding")
    assert splits.train["finding"][:] == [0, 1, 0]
    assert np.asarray(splits.train[2]["file"]).max() == 20


def test_parquet_folder_and_file_agree(tmp_path: Path) -> None:
    folder = parquet(tmp_path / "data", train=table(["x", "y", "x"]))
    for source in (folder, folder / "train.parquet"):
        splits = load_image_dataset(str(source))
        assert splits.label_names == ("x", "y")
        assert splits.train["label"][:] == [0, 1, 0]
        assert splits.evaluation is None


def test_digits_are_split_once_and_for_all() -> None:
    first, second = (load_image_dataset("builtin:digits") for _ in range(2))
    assert first.evaluation is not None
    assert second.evaluation is not None
    assert (len(first.train), len(first.evaluation)) == (1437, 360)
    assert first.label_names == tuple("0123456789")
    assert first.train["label"][:] == second.train["label"][:]
    counts = np.bincount(first.evaluation["label"][:])
    assert counts.min() >= 35  # stratified: 36 of each, to within rounding
    assert counts.max() <= 37
    pixels = np.stack([np.asarray(image) for image in first.train["image"][:100]])
    assert pixels.shape == (100, 28, 28)
    assert pixels[:, :4].max() == 0  # padding
    assert pixels.max() == 255


def test_a_class_of_one_split_only_keeps_its_name(tmp_path: Path) -> None:
    """Case 97."""
    class_folders(tmp_path / "train", {"b": 2, "d": 2})
    class_folders(tmp_path / "test", {"a": 1, "c": 1, "d": 1})
    splits = load_image_dataset(str(tmp_path))
    assert splits.label_names == ("a", "b", "c", "d")
    assert splits.train["label"][:] == [1, 1, 3, 3]
    assert splits.evaluation is not None
    assert splits.evaluation["label"][:] == [0, 2, 3]
    assert any("2 classes have no training image" in n and "a, c" in n for n in splits.notes)


def test_images_at_several_depths_have_no_class(tmp_path: Path) -> None:
    class_folders(tmp_path, {"cat": 1, "dog/old": 1})
    with pytest.raises(ValueError, match="several depths"):
        load_image_dataset(str(tmp_path))


def test_the_paths_of_a_table_may_begin_above_it(tmp_path: Path) -> None:
    """As in CheXpert, whose tables lie beside the folders that their paths begin above."""
    for name in ("train", "valid"):
        class_folders(tmp_path / "CheXpert", {f"{name}/{SECRET}": 2})
        lines = [f"CheXpert/{name}/{SECRET}/{i}.png,{i}" for i in range(2)]
        (tmp_path / "CheXpert" / f"{name}.csv").write_text("\n".join(["Path,label", *lines]))
    splits = load_image_dataset(str(tmp_path / "CheXpert"))
    assert splits.image_column == "Path"
    assert len(splits.train) == 2
    assert splits.notes[0] == "evaluating on the split 'valid'"
    assert SECRET not in str(splits.notes)


def samples(count: int, *, start: int = 0) -> list[dict[str, object]]:
    return [
        {"png": png(start + i), "json": {"label": "ab"[i % 2], "patient_id": f"{SECRET}{i // 2}"}}
        for i in range(count)
    ]


def test_tars_round_trip_and_the_fields_of_their_json_are_columns(tmp_path: Path) -> None:
    webdataset(tmp_path / "train-0.tar", samples(4))
    webdataset(tmp_path / "train-1.tar", samples(2, start=100))
    webdataset(tmp_path / "test-0.tar", samples(2, start=200))
    splits = load_image_dataset(str(tmp_path))
    assert (splits.image_column, splits.label_column) == ("png", "label")
    assert splits.label_names == ("a", "b")
    assert splits.train["label"][:] == [0, 1] * 3
    levels = [int(np.asarray(row["png"]).max()) for row in splits.train]
    assert levels == [0, 1, 2, 3, 100, 101]
    assert splits.evaluation is not None
    assert len(splits.evaluation) == 2
    assert splits.repeated_unit is not None
    assert splits.repeated_unit.largest == 4
    assert SECRET not in str(splits.notes)


def test_one_tar_with_classes_of_their_own_files(tmp_path: Path) -> None:
    tar = webdataset(tmp_path / "x.tar", [{"png": png(i), "cls": i % 3} for i in range(6)])
    splits = load_image_dataset(str(tar))
    assert splits.train["cls"][:] == [0, 1, 2] * 2
    assert splits.evaluation is None


def test_a_sample_twice_in_a_tar_is_refused_without_its_name(tmp_path: Path) -> None:
    """What `datasets` says about it quotes the name of the sample, often a patient's."""
    tar = webdataset(tmp_path / "x.tar", [{"png": png(0), "cls": 0}])
    content = tar.read_bytes()[:2048].replace(b"0000.png", b"doe.png\0")
    tar.write_bytes(content[:1024] * 2 + b"\0" * 1024)
    with pytest.raises(ValueError, match=r"cannot be read as images with labels \(\w+\)") as caught:
        load_image_dataset(str(tar))
    assert "doe" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_table_that_cannot_be_parsed_is_refused_without_its_rows(tmp_path: Path) -> None:
    table = tmp_path / "x.csv"
    table.write_text(f'file,label\n"{SECRET}.png,1\n')
    with pytest.raises(ValueError, match="cannot be read as images with labels") as caught:
        load_image_dataset(str(table))
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("name", ["", " ", "\t"])
def test_no_name_is_not_the_current_folder(name: str) -> None:
    with pytest.raises(ValueError, match="has no name; give a folder"):
        load_image_dataset(name)


@pytest.mark.parametrize("left", [[], ["ill/", "well/"], [".DS_Store"], ["__MACOSX/ill/0.png"]])
def test_a_folder_without_files_is_one_sentence(tmp_path: Path, left: list[str]) -> None:
    for name in left:
        path = tmp_path / "x" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if name.endswith("/") else path.write_bytes(b"")
    (tmp_path / "x").mkdir(exist_ok=True)
    with pytest.raises(ValueError, match="is a folder without files") as caught:
        load_image_dataset(str(tmp_path / "x"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_a_table_that_is_not_separated_by_commas_is_told_so(tmp_path: Path, separator: str) -> None:
    class_folders(tmp_path, {"images": 2})
    rows = [["path", "label"], ["images/0.png", "1"], ["images/1.png", "0"]]
    (tmp_path / "x.csv").write_text("\n".join(map(separator.join, rows)))
    with pytest.raises(ValueError, match="separate the columns of a CSV file by commas"):
        load_image_dataset(str(tmp_path / "x.csv"))


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_table_in_another_encoding_is_told_so(tmp_path: Path, encoding: str) -> None:
    class_folders(tmp_path, {"images": 2})
    text = "path,label\nimages/0.png,M\u00fcller\nimages/1.png,x\n"
    (tmp_path / "x.csv").write_text(text, encoding=encoding)
    with pytest.raises(ValueError, match="is not encoded in UTF-8") as caught:
        load_image_dataset(str(tmp_path / "x.csv"))
    assert "ller" not in str(caught.value)


# Splits of folders

WORDS = ["stress-test", "test", "test_positive", "train", "val", "validation 2", "dev.x", "eval"]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("where", ["class", "file", "metadata"])
def test_only_a_folder_above_the_classes_is_a_split(tmp_path: Path, word: str, where: str) -> None:
    classes = [word, "other"] if where == "class" else ["a", "b"]
    prefix = "" if where == "class" else f"{word}_"
    paths = [f"{name}/{prefix}{i}.png" for name in classes for i in range(2)]
    for i, path in enumerate(paths):
        write_image(tmp_path / path, level=i)
    if where == "metadata":
        rows = [f"{path},{path[0]}" for path in paths]
        (tmp_path / "metadata.csv").write_text("\n".join(["file_name,label", *rows]))
    splits = load_image_dataset(str(tmp_path))
    assert len(splits.train) == 4
    assert splits.evaluation is None
    assert splits.label_names == tuple(sorted(classes))


@pytest.mark.parametrize(
    ("above", "metadata"),
    [("", None), ("unzipped/", None), ("a/b/", None), ("", "one"), ("", "each")],
)
@pytest.mark.parametrize(
    ("folder", "split"),
    [("test", "test"), ("val", "validation"), ("Test", "test"), ("dev", "validation")],
)
def test_folders_called_like_splits_are_splits(
    tmp_path: Path, above: str, metadata: str | None, folder: str, split: str
) -> None:
    class_folders(tmp_path / above / "train", {"a": 2, "b": 2})
    class_folders(tmp_path / above / folder, {"a": 1, "b": 1})
    if metadata is not None:
        for at in [tmp_path] if metadata == "one" else [tmp_path / "train", tmp_path / folder]:
            files = sorted(file.relative_to(at) for file in at.rglob("*.png"))
            rows = [f"{file},{file.parent.name}" for file in files]
            (at / "metadata.csv").write_text("\n".join(["file_name,label", *rows]))
    splits = load_image_dataset(str(tmp_path))
    assert splits.label_names == ("a", "b")
    assert splits.train["label"][:] == [0, 0, 1, 1]
    assert splits.evaluation is not None
    assert splits.evaluation["label"][:] == [0, 1]
    assert splits.notes[0] == f"evaluating on the split {split!r}"


def test_folders_almost_called_like_splits_are_not_merged(tmp_path: Path) -> None:
    for name in ("train_set", "test_set"):
        class_folders(tmp_path / name, {"a": 2, "b": 2})
    with pytest.raises(ValueError, match="2 folders above those of its classes"):
        load_image_dataset(str(tmp_path))


def test_names_of_files_that_make_another_split_are_explained(tmp_path: Path) -> None:
    table(["a", "b"]).to_parquet(str(tmp_path / "stress_test.parquet"))
    with pytest.raises(ValueError, match=r"'train' is missing; choose from test \(.*taken for"):
        load_image_dataset(str(tmp_path))


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.xlsx").write_bytes(b"")
    with pytest.raises(ValueError, match=r"must end in \.csv, \.tsv, .*\.parquet, \.tar\."):
        load_image_dataset(str(tmp_path / "x.xlsx"))


def test_files_that_are_no_images_are_counted(tmp_path: Path) -> None:
    class_folders(tmp_path, {"cat": 1, "dog": 1})
    for i in range(3):
        (tmp_path / "cat" / f"{i}.pdf").write_bytes(b"PDF")
    (tmp_path / "cat" / "scan.doe_john").write_bytes(b"x")
    splits = load_image_dataset(str(tmp_path))
    assert any("4 files" in note and "(3 .pdf, 1 other)" in note for note in splits.notes)
    assert "john" not in str(splits.notes)
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "a.pdf").write_bytes(b"PDF")
    with pytest.raises(ValueError, match="has 1 files, but no image, table"):
        load_image_dataset(str(tmp_path / "only"))


def test_a_data_set_that_is_nowhere_is_one_sentence() -> None:
    with pytest.raises(ValueError, match="no local path and the Hub cannot be reached") as caught:
        load_image_dataset("nobody/nothing")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train_split": "training"}, "split 'training' is missing; choose from train"),
        ({"eval_split": "val"}, "split 'val' is missing"),
        ({"eval_split": "train"}, "is also the train split"),
        (
            {"image_column": "scan"},
            "image_column='scan' is missing .*; choose from 'image', 'label'",
        ),
        ({"label_column": "class"}, "label_column='class' is missing"),
        ({"label_column": "image"}, "one class per row"),
        ({"on_corrupt": "ignore"}, "use 'refuse' or 'drop'"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, arguments: dict[str, str], message: str) -> None:
    class_folders(tmp_path, {"cat": 2, "dog": 2})
    with pytest.raises(ValueError, match=message):
        load_image_dataset(str(tmp_path), **arguments)  # type: ignore[arg-type]


# The Hub


def test_the_hub_says_what_is_missing_in_one_sentence(tmp_path: Path) -> None:
    """The real clients, against a Hub on loopback: with no token, a wrong and a right one."""
    rows = [
        {"image": {"bytes": png_of(np.full((4, 4), i)), "path": None}, "label": i % 2}
        for i in range(4)
    ]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    files = {"data/train-00000-of-00001.parquet": parquet_of(rows, features)}
    code = """
import json, os, sys
from hf_dpmuon.data import load_image_dataset
said = {}
for token in ("", "hf_expired", "hf_loopback"):  # the last: what it may read would be in the cache
    os.environ["HF_TOKEN"] = token
    answers = said[token] = {}
    for name, revision in json.loads(sys.argv[1]):
        try:
            answers[f"{name}@{revision}"] = len(load_image_dataset(name, revision=revision).train)
        except ValueError as error:
            answers[f"{name}@{revision}"] = str(error)
print("SAID", json.dumps(said))
"""
    names = ["open", "gated", "private", "absent", "scripted"]
    asked = [(f"clinic/{name}", None) for name in names]
    asked += [("clinic/open", "main"), ("clinic/open", "v9")]
    with LoopbackHub() as hub:
        hub.add_dataset("clinic/open", files)
        hub.add_dataset("clinic/gated", files, gated=True)
        hub.add_dataset("clinic/private", files, private=True)
        hub.add_dataset("clinic/scripted", {"scripted.py": b"raise SystemExit"})
        done = hub.python(code, json.dumps(asked), home=tmp_path, token=None)
    said = json.loads(done.stdout.split("SAID ")[1])
    stranger, member = said[""], said["hf_loopback"]
    assert stranger["clinic/open@None"] == stranger["clinic/open@main"] == 4
    assert "is gated: accept the terms on its page" in stranger["clinic/gated@None"]
    assert "`hf auth login`, or set HF_TOKEN" in stranger["clinic/gated@None"]
    assert "was not found on the Hub" in stranger["clinic/private@None"]
    assert "HF_TOKEN" in stranger["clinic/private@None"]
    assert "was not found on the Hub" in stranger["clinic/absent@None"]
    assert "'v9'" in stranger["clinic/open@v9"]
    assert "script of its own" in stranger["clinic/scripted@None"]
    assert member["clinic/private@None"] == member["clinic/gated@None"] == 4
    expired = said["hf_expired"]
    for name in ("gated", "private"):
        assert "set HF_TOKEN" in expired[f"clinic/{name}@None"], expired
        assert "wrong, expired" in expired[f"clinic/{name}@None"], expired
    for sentence in (*stranger.values(), *member.values(), *expired.values()):
        assert isinstance(sentence, int) or ("\n" not in sentence and sentence.endswith("."))


@pytest.mark.parametrize("path", ["/no/such/folder", "./absent", "a/b/c.parquet", "no such set"])
def test_a_path_to_nothing_is_not_looked_for_on_the_hub(path: str) -> None:
    with pytest.raises(ValueError, match="is no file or folder here"):
        load_image_dataset(path)


def test_a_hub_that_does_not_answer_is_told_from_one_that_says_no(tmp_path: Path) -> None:
    with LoopbackHub() as hub:
        environment = hub.environment(tmp_path)  # its port is closed after this block
    code = (
        "import time; time.sleep = lambda seconds: None\n"  # between the client's attempts
        "from hf_dpmuon.data import load_image_dataset; load_image_dataset('clinic/scans')"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "the Hub cannot be reached" in done.stderr.splitlines()[-1]


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def download_and_prepare(self) -> None:
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: Full())
    with pytest.raises(ValueError, match="does not fit on the disk of the cache"):
        load_image_dataset("clinic/scans")


@pytest.mark.parametrize(
    "arguments",
    [
        *({"eval_fraction": value} for value in ("x", True, float("nan"), [0.5])),
        *({"label_columns": value} for value in ("dx", 3, [1], {"dx"})),
        *({"dicom_window": value} for value in (5, (1,), (1, 2, 3), "ab", ("a", 2), (1, True))),
        *({"dicom_window": value} for value in ((float("nan"), 5), (40, float("inf")), (40, -1))),
        *({name: 3} for name in ("config_name", "revision", "train_split", "eval_split")),
        *({name: 3} for name in ("image_column", "label_column", "privacy_unit_column")),
        {"train_split": None},
        {"privacy_unit_column": "image", "privacy_unit_pattern": 3},
    ],
)
def test_arguments_of_another_type_are_refused_by_name_before_any_data(
    arguments: dict[str, Any],
) -> None:
    name = list(arguments)[-1]
    with pytest.raises(ValueError, match=f"^{name}=.* must be ") as caught:
        load_image_dataset("/no/such/folder", **arguments)
    assert "\n" not in str(caught.value)

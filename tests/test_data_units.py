"""Laws of privacy units: whose rows they are, and that no id is ever told."""

import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from image_tables import SECRET, parquet, png, table, webdataset, write_image

from hf_dpmuon.data import load_image_dataset, unit_name
from hf_dpmuon.data.units import find_repeated_unit, group_rows, held_out, unit_ids


def cohort(folder: Path, **patients: list[Any]) -> Path:
    """Write splits of images of two classes with these ids of patients."""
    splits = {
        name: table([("ill", "well")[i % 2] for i in range(len(ids))], patient_id=ids)
        for name, ids in patients.items()
    }
    return parquet(folder, **splits)


def test_rows_of_an_id_are_one_unit(tmp_path: Path) -> None:
    ids = [f"{SECRET}{i}" for i in (3, 1, 3, 2, 1, 3)]
    folder = cohort(tmp_path / "x", train=ids, test=[f"{SECRET}9"] * 2)
    splits = load_image_dataset(str(folder), privacy_unit_column="patient_id")
    assert splits.units is not None
    assert splits.units.name == "patient"
    assert [rows.tolist() for rows in splits.units.rows_of_unit] == [[0, 2, 5], [1, 4], [3]]
    assert splits.repeated_unit is None
    assert "6 training images of 3 privacy units (patient)" in splits.notes
    assert SECRET not in f"{splits.notes} {splits.units}"


def test_blanks_around_an_id_make_no_other_patient(tmp_path: Path) -> None:
    folder = cohort(tmp_path / "x", train=["p1", " p1", "p1 ", "p2"])
    splits = load_image_dataset(str(folder), privacy_unit_column="patient_id")
    assert splits.units is not None
    assert len(splits.units) == 2


def test_units_follow_the_rows_that_are_left(tmp_path: Path) -> None:
    lines = ["file,label,lesion_id"]
    for i, lesion in enumerate("abba"):
        write_image(tmp_path / f"{i}.png", level=i)
        lines.append(f"{i}.png,{i % 2},{lesion}")
    (tmp_path / "1.png").write_bytes(b"")
    (tmp_path / "x.csv").write_text("\n".join(lines))
    splits = load_image_dataset(
        str(tmp_path / "x.csv"), privacy_unit_column="lesion_id", on_corrupt="drop"
    )
    assert splits.units is not None
    assert splits.units.name == "lesion"
    assert [rows.tolist() for rows in splits.units.rows_of_unit] == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("column", "name"),
    [
        *[
            (c, "patient")
            for c in ("patient", "patient_id", "PatientID", "Patient Id", "PATIENT_ID")
        ],
        *[(c, "patient") for c in ("patientid", "patientID", "PATIENTID", "PatientNo")],
        *[("subjectid", "subject"), ("user_id", "user"), ("clientkey", "client")],
        *[("donor-nr", "donor"), ("pid", "pid"), ("isic_id", "isic_id"), ("image_id", "image_id")],
        *[("lesion_id", "lesion"), ("subject", "subject"), ("StudyUID", "study")],
        *[("patient_sex", "patient_sex"), ("MRN", "MRN"), ("age", "age")],
    ],
)
def test_a_column_names_its_units(column: str, name: str) -> None:
    assert unit_name(column) == name


MISSING = "privacy_unit_column='patient_id' has no id in 2 of 4 rows of the split 'train'"


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([SECRET, None, " ", "x"], MISSING),
        ([1.0, float("nan"), None, 2.0], MISSING),
        ([SECRET, "N/A", "unknown ", "x"], MISSING),
        ([SECRET, "?", "\u200b", "x"], MISSING),
        ([1.5, 2.0, 3.0, float("inf")], "privacy_unit_column='patient_id' holds 2 floats"),
        ([SECRET] * 4, "holds one unit only, but at least two are needed"),
        ([SECRET, SECRET.swapcase(), "x", "X"], "2 patient ids differ from others only in case"),
        ([[SECRET], ["x"], ["y"], ["z"]], "holds List.* name a column with one id per row"),
    ],
)
def test_rows_without_an_id_are_refused(tmp_path: Path, ids: list[Any], message: str) -> None:
    folder = cohort(tmp_path / "x", train=ids)
    with pytest.raises(ValueError, match=message) as caught:
        load_image_dataset(str(folder), privacy_unit_column="patient_id")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("label", "is a column of images or labels"),
        ("image", "is the column of images; set privacy_unit_pattern too"),
        ("PatientID", "privacy_unit_column='PatientID' is missing from the split 'train'"),
    ],
)
def test_a_column_that_holds_no_ids_is_refused(tmp_path: Path, column: str, message: str) -> None:
    folder = cohort(tmp_path / "x", train=["a", "b"])
    with pytest.raises(ValueError, match=message):
        load_image_dataset(str(folder), privacy_unit_column=column)


def test_a_patient_in_both_splits_is_refused_by_count(tmp_path: Path) -> None:
    """Case 95."""
    train = [f"{SECRET}{i}" for i in range(4)]
    test = [f"{SECRET}{i}" for i in (0, 1, 1, 8)]
    folder = cohort(tmp_path / "x", train=train, test=test)
    with pytest.raises(ValueError, match=r"2 units are in .* with 3 evaluation rows") as caught:
        load_image_dataset(str(folder), privacy_unit_column="patient_id")
    assert SECRET not in str(caught.value)
    splits = load_image_dataset(
        str(folder), privacy_unit_column="patient_id", eval_fraction=0.5
    )  # the way out that the refusal names
    assert splits.evaluation is not None


@pytest.mark.parametrize(
    ("train", "test"),
    [
        (["P1", "P1", "P2"], ["p1", "p3"]),
        (["01", "01", "02"], ["1", "3"]),
        (["P1", "P1", "P2"], ["P1\u200b", "P3"]),
        (["Jos\u00e9", "a", "b"], ["Jose\u0301", "c"]),
        ([1, 1, 2], [1.0, 3.0]),
    ],
)
def test_a_patient_of_another_spelling_in_the_evaluation_split_is_refused(
    tmp_path: Path, train: list[Any], test: list[Any]
) -> None:
    splits = {
        name: table(["ill", "well", "ill"][: len(ids)], patient_id=ids)
        for name, ids in (("train", train), ("test", test))
    }
    ids = unit_ids(splits, "patient_id", pattern=None, other_columns=["image", "label"])
    with pytest.raises(ValueError, match=r"1 units are in .* with 1 evaluation rows"):
        group_rows(ids["train"], ids["test"], column="patient_id", pattern=None)


def test_an_evaluation_split_without_the_column_is_refused(tmp_path: Path) -> None:
    lines = {"train": ["file,label,patient"], "test": ["file,label"]}
    for i in range(2):
        write_image(tmp_path / f"{i}.png", level=i)
        lines["train"].append(f"{i}.png,{i},{i}")
        lines["test"].append(f"{i}.png,{i}")
    for name, of_split in lines.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(of_split))
    with pytest.raises(ValueError, match=r"is missing from the split 'test'.*same columns"):
        load_image_dataset(str(tmp_path), privacy_unit_column="patient")


def test_ids_of_two_types_are_refused(tmp_path: Path) -> None:
    lines = {"train": ["file,label,patient", "0.png,0,1", "1.png,1,2"]}
    lines["test"] = ["file,label,patient", "0.png,0,p1", "1.png,1,p2"]
    for i in range(2):
        write_image(tmp_path / f"{i}.png", level=i)
    for name, of_split in lines.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(of_split))
    with pytest.raises(ValueError, match="the same type"):
        load_image_dataset(str(tmp_path), privacy_unit_column="patient")


def test_repeated_ids_that_nobody_named_are_pointed_out(tmp_path: Path) -> None:
    train = [f"{SECRET}{i}" for i in (0, 1, 1, 1)]
    folder = cohort(tmp_path / "x", train=train, test=[f"{SECRET}1", "y"])
    splits = load_image_dataset(str(folder))
    assert splits.units is None
    assert splits.repeated_unit is not None
    found = splits.repeated_unit
    assert (found.column, found.name, found.largest) == ("patient_id", "patient", 3)
    notes = " ".join(splits.notes)
    assert "set --privacy_unit_column patient_id" in notes
    assert "1 of 2 evaluation images share their patient with training images" in notes
    assert SECRET not in notes


def test_a_person_counts_before_a_lesion_and_single_ids_not_at_all(tmp_path: Path) -> None:
    split = table(
        ["a", "b", "a", "b"],
        lesion_id=["l", "l", "l", "m"],
        patient_id=["p", "p", "q", "r"],
        study_id=["1", "2", "3", "4"],
    )
    found = load_image_dataset(str(parquet(tmp_path / "x", train=split))).repeated_unit
    assert found is not None
    assert (found.column, found.largest) == ("patient_id", 2)
    single = load_image_dataset(
        str(parquet(tmp_path / "y", train=split.remove_columns(["lesion_id", "patient_id"])))
    )
    assert single.repeated_unit is None


def test_copies_in_the_images_of_several_patients_are_counted(tmp_path: Path) -> None:
    split = datasets.concatenate_datasets(
        [table(["a", "b"], patient_id=["p", "q"]), table(["a", "b"], patient_id=["p", "r"])]
    )
    folder = parquet(tmp_path / "x", train=split)
    splits = load_image_dataset(str(folder), privacy_unit_column="patient_id")
    notes = " ".join(splits.notes)
    assert "2 training images are exact copies" in notes
    assert "1 of the repeated images are in several units (patient)" in notes


# Holding out


def test_held_out_patients_are_whole_and_the_same_every_time(tmp_path: Path) -> None:
    ids = [f"p{i // 3}" for i in range(120)]
    folder = cohort(tmp_path / "x", train=ids, test=["z", "z"])
    first, second = (
        load_image_dataset(str(folder), eval_fraction=0.3, privacy_unit_column="patient_id")
        for _ in range(2)
    )
    assert first.evaluation is not None
    assert second.evaluation is not None
    assert first.units is not None
    train, held = set(first.train["patient_id"][:]), set(first.evaluation["patient_id"][:])
    assert not train & held
    assert train | held == set(ids)
    assert len(first.train) + len(first.evaluation) == 120
    assert first.units.num_rows == len(first.train)
    assert first.evaluation["patient_id"][:] == second.evaluation["patient_id"][:]


@pytest.mark.parametrize("gone", range(0, 50, 7))
def test_where_a_unit_goes_does_not_depend_on_the_others(gone: int) -> None:
    """So without one person the train split is the same but for this person's rows."""
    ids = [f"p{(7 * i) % 50}" for i in range(200)]
    fewer = [i for i in ids if i != f"p{gone}"]
    for part, of_fewer in zip(held_out(ids, 0.5), held_out(fewer, 0.5), strict=True):
        assert [ids[row] for row in part if ids[row] != f"p{gone}"] == [fewer[r] for r in of_fewer]


def test_the_share_that_is_held_out_is_the_one_asked_for() -> None:
    ids = [f"patient{i}" for i in range(20000)]
    for fraction in (0.05, 0.2, 0.7):
        count = len(held_out(ids, fraction)[1])
        deviation = (20000 * fraction * (1 - fraction)) ** 0.5
        assert abs(count - 20000 * fraction) < 4 * deviation


def test_without_ids_equal_images_stay_together(tmp_path: Path) -> None:
    split = datasets.concatenate_datasets([table(["a", "b"] * 10)] * 2)
    splits = load_image_dataset(str(parquet(tmp_path / "x", train=split)), eval_fraction=0.4)
    assert splits.evaluation is not None
    pixels = [
        {np.asarray(row["image"]).tobytes() for row in part}
        for part in (splits.train, splits.evaluation)
    ]
    assert not pixels[0] & pixels[1]
    assert len(pixels[0]) + len(pixels[1]) == 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eval_fraction": 0.0}, r"eval_fraction=0.0 must be in \(0, 1\)"),
        ({"eval_fraction": 1.0}, r"eval_fraction=1.0 must be in \(0, 1\)"),
        ({"eval_fraction": 0.5, "eval_split": "test"}, "are both set"),
        ({"eval_fraction": 1e-9}, "leaves one of the two parts empty"),
    ],
)
def test_shares_that_cannot_be_held_out_are_refused(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    folder = cohort(tmp_path / "x", train=["a", "b", "c", "d"])
    with pytest.raises(ValueError, match=message) as caught:
        load_image_dataset(str(folder), **arguments)
    assert re.fullmatch(r"[^\n]+\.", str(caught.value))


PATHS = [f"CheXpert-v1.0-small/train/{SECRET}{i:05d}/study1/view1.jpg" for i in (1, 1, 2, 3, 1)]


def test_ids_within_a_path_are_found_by_a_pattern_that_names_the_unit(tmp_path: Path) -> None:
    folder = cohort(tmp_path / "x", train=PATHS)
    splits = load_image_dataset(
        str(folder),
        privacy_unit_column="patient_id",
        privacy_unit_pattern=r"/(?P<person>[^/]+)/study",
    )
    assert splits.units is not None
    assert splits.units.name == "person"
    assert [rows.tolist() for rows in splits.units.rows_of_unit] == [[0, 1, 4], [2], [3]]
    assert SECRET not in f"{splits.notes} {splits.units}"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "is no regular expression"),
        ("study1", "must have exactly one group"),
        ("(study1)", "must have exactly one group"),
        ("(?P<a>stu)(?P<b>dy1)", "must have exactly one group"),
        ("(?P<study>study[23])", r"no id that matches privacy_unit_pattern=.* in 5 of 5 rows"),
    ],
)
def test_a_pattern_that_finds_no_id_is_refused(tmp_path: Path, pattern: str, message: str) -> None:
    folder = cohort(tmp_path / "x", train=PATHS)
    with pytest.raises(ValueError, match=message) as refusal:
        load_image_dataset(
            str(folder), privacy_unit_column="patient_id", privacy_unit_pattern=pattern
        )
    assert SECRET not in str(refusal.value)


def test_a_pattern_without_a_column_is_refused(tmp_path: Path) -> None:
    folder = cohort(tmp_path / "x", train=PATHS)
    with pytest.raises(ValueError, match="needs a privacy_unit_column to look in"):
        load_image_dataset(str(folder), privacy_unit_pattern="(?P<patient>p)")


def test_patients_that_repeat_within_a_path_are_pointed_out_with_a_pattern_that_works(
    tmp_path: Path,
) -> None:
    paths = [f"set/train/patient{i:05d}/study{j}/view1.jpg" for i, j in ((7, 1), (8, 1), (7, 2))]
    labels = ["ill", "well", "ill"]
    folder = parquet(
        tmp_path / "x",
        train=table(labels, Path=paths),
        test=table(labels[:2], Path=[paths[0], "set/patient00009/study1/view1.jpg"]),
    )
    splits = load_image_dataset(str(folder))
    found = splits.repeated_unit
    assert found is not None
    assert (found.column, found.name, found.largest) == ("Path", "patient", 2)
    notes = " ".join(splits.notes)
    assert f"--privacy_unit_column Path --privacy_unit_pattern '{found.pattern}'" in notes
    assert "1 of 2 evaluation images share their patient" in notes
    assert "00007" not in notes
    with pytest.raises(ValueError, match="1 units are in the train and the evaluation split"):
        load_image_dataset(
            str(folder), privacy_unit_column="Path", privacy_unit_pattern=found.pattern
        )


def test_words_that_look_like_no_id_are_no_units(tmp_path: Path) -> None:
    notes = [*["patient was calm"] * 3, "patient 7 was calm", "patient 7 was calm"]
    folder = parquet(tmp_path / "x", train=table(["a", "b", "a", "b", "a"], report=notes))
    assert load_image_dataset(str(folder)).repeated_unit is None


def repeated(**columns: list[Any]) -> tuple[str, int, int] | None:
    """What is found in a table of these columns: the column, its largest unit, rows without one."""
    rows = len(next(iter(columns.values())))
    split = table([("ill", "well")[i % 2] for i in range(rows)], **columns)
    found = find_repeated_unit(split, other_columns=("image", "label"))
    return found and (found.column, found.largest, found.unknown)


@pytest.mark.parametrize(
    "column",
    [
        *("patientid", "PatientID", "patientID", "subjectid", "Subject-ID", "Person"),
        *("MRN", "pid", "user_id", "client", "donorId"),
    ],
)
def test_a_person_is_found_by_the_name_of_the_column(column: str) -> None:
    assert repeated(**{column: ["a", "A ", "b"]}) == (column, 2, 0)
    assert repeated(lesion_id=["l"] * 3, **{column: ["a", "a", "b"]}) == (column, 2, 0)


@pytest.mark.parametrize("column", ["isic_id", "image_id", "rapid", "patient_sex", "user_agent"])
def test_an_id_of_an_image_is_nobodys(column: str) -> None:
    assert repeated(**{column: ["a", "a", "b"]}) is None


@pytest.mark.parametrize("strays", range(6))
def test_rows_without_an_id_do_not_hide_those_with_one(strays: int) -> None:
    """One row more must not make the bound for a person vanish."""
    paths = ["a/Patient1/x", "a/patient01/y", "b/patient2/x", "b/patient_2/y", "b/patient2/z"]
    stray = ["other/z"] * strays
    assert repeated(path=paths + stray) == ("path", 3, strays)
    assert repeated(path=paths + stray + ["other/z"] * (6 - strays)) is None
    missing = [None, "unknown", "n/a", "-", "nan", ""][:strays]
    assert repeated(patient=["p", "p", "q", *missing]) == ("patient", 2, strays)


def test_what_has_no_id_is_to_be_mended_before_a_unit_is_set(tmp_path: Path) -> None:
    paths = ["patient1/a.png", "patient1/b.png", "patient2/c.png", "calibration/d.png"]
    folder = parquet(tmp_path / "x", train=table(["a", "b", "a", "b"], path=paths))
    splits = load_image_dataset(str(folder))
    assert splits.repeated_unit is not None
    assert "after the ids of 1 images are filled in or these are removed" in " ".join(splits.notes)
    with pytest.raises(ValueError, match=r"matches .* in 1 of 4 rows .*mend the pattern"):
        load_image_dataset(
            str(folder),
            privacy_unit_column="path",
            privacy_unit_pattern=splits.repeated_unit.pattern,
        )


def test_a_pattern_that_ignores_case_makes_no_two_patients_of_one(tmp_path: Path) -> None:
    paths = ["Patient1/a.png", "patient1/b.png", "patient2/c.png"]
    folder = parquet(tmp_path / "x", train=table(["a", "b", "a"], path=paths))
    with pytest.raises(ValueError, match="1 patient ids differ from others only in case"):
        load_image_dataset(
            str(folder),
            privacy_unit_column="path",
            privacy_unit_pattern="(?i)(?P<patient>patient[0-9]+)",
        )
    found = load_image_dataset(str(folder)).repeated_unit
    assert found is not None
    splits = load_image_dataset(
        str(folder), privacy_unit_column="path", privacy_unit_pattern=found.pattern
    )
    assert splits.units is not None
    assert [rows.tolist() for rows in splits.units.rows_of_unit] == [[0, 1], [2]]


def classified(ids: list[int | None], names: list[str]) -> datasets.Dataset:
    """A table whose ids of patients are numbers of names."""
    split = table([("ill", "well")[i % 2] for i in range(len(ids))], patient_id=ids)
    return split.cast_column("patient_id", datasets.ClassLabel(names=names))


def test_classes_are_ids_by_their_names() -> None:
    """The numbers of two splits need not mean the same, and -1 is a missing class."""
    splits = {
        "train": classified([0, 1, 0], ["ann", "bob"]),
        "test": classified([0, 1], ["cid", "Bob"]),
    }
    ids = unit_ids(splits, "patient_id", pattern=None, other_columns=())
    assert ids["train"] == ["ann", "bob", "ann"]
    with pytest.raises(ValueError, match=r"1 units are in .* with 1 evaluation rows"):
        group_rows(ids["train"], ids["test"], column="patient_id", pattern=None)
    for names in (["ann", "bob"], ["ann", "unknown"]):
        missing = {"train": classified([0, -1, -1] if "bob" in names else [0, 1, 1], names)}
        with pytest.raises(ValueError, match="has no id in 2 of 3 rows of the split 'train'"):
            unit_ids(missing, "patient_id", pattern=None, other_columns=())


def test_spellings_of_one_patient_are_held_out_together() -> None:
    ids = [spelled for i in range(200) for spelled in (f"p{i}", f"P{i}", f"\u200bp{i} ")]
    for part in held_out(ids, 0.5):
        assert all(
            len({row - row % 3 for row in part[i : i + 3]}) == 1 for i in range(0, len(part), 3)
        )


# Ids in the paths of images

OWNERS = (1, 2, 1, 3, 1, 2)  # patients of six images


def named(folder: str = "", prefix: str = "patient") -> list[str]:
    return [f"{folder}{prefix}{owner:05d}/view{i}.png" for i, owner in enumerate(OWNERS)]


def write_all(root: Path, paths: list[str]) -> None:
    for i, path in enumerate(paths):
        write_image(root / path, level=i)


def class_folders_of_patients(home: Path) -> tuple[Path, str]:
    for i, owner in enumerate(OWNERS):
        write_image(home / "set" / ("ill", "well")[i % 2] / f"patient{owner}_{i}.png", level=i)
    return home / "set", "image"


def csv_of_patients(home: Path) -> tuple[Path, str]:
    write_all(home / "set", named())
    rows = [f"{path},{i % 2}" for i, path in enumerate(named())]
    (home / "set" / "train.csv").write_text("\n".join(["Path,label", *rows]))
    return home / "set", "Path"


def csv_from_above(home: Path) -> tuple[Path, str]:
    """As CheXpert is downloaded: the paths begin with the folder that the table is in."""
    write_all(home, named("set/train/"))
    rows = [f"{path},{i % 2}" for i, path in enumerate(named("set/train/"))]
    (home / "set" / "train.csv").write_text("\n".join(["Path,label", *rows]))
    return home / "set" / "train.csv", "Path"


def metadata_of_patients(home: Path, suffix: str = "csv") -> tuple[Path, str]:
    write_all(home / "set", named())
    rows = [f"{path},{i % 2}" for i, path in enumerate(named())]
    text = "\n".join(["file_name,label", *rows])
    if suffix == "jsonl":
        parts = (row.split(",") for row in rows)
        text = "\n".join(f'{{"file_name": "{path}", "label": {label}}}' for path, label in parts)
    (home / "set" / f"metadata.{suffix}").write_text(text)
    return home / "set", "image"


def metadata_of_lines(home: Path) -> tuple[Path, str]:
    return metadata_of_patients(home, "jsonl")


def tar_of_patients(home: Path) -> tuple[Path, str]:
    keys = [f"patient{owner}_{i}" for i, owner in enumerate(OWNERS)]
    samples = [{"png": png(i), "cls": i % 2} for i in range(6)]
    return webdataset(home / "set.tar", samples, keys=keys), "__key__"


def parquet_of_paths(home: Path) -> tuple[Path, str]:
    """As on the Hub: the bytes of each image, and what its file was called."""
    images = [{"bytes": png(i), "path": path} for i, path in enumerate(named())]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    columns = {"image": images, "label": [i % 2 for i in range(6)]}
    return parquet(home / "set", train=datasets.Dataset.from_dict(columns, features)), "image"


SOURCES = [
    *(class_folders_of_patients, csv_of_patients, csv_from_above, metadata_of_patients),
    *(metadata_of_lines, tar_of_patients, parquet_of_paths),
]


@pytest.mark.parametrize("source", SOURCES)
def test_patients_in_the_paths_of_images_are_found_and_can_be_units(
    source: Any, tmp_path: Path
) -> None:
    """Whatever the form; the folder above, which looks like a patient too, is nobody's."""
    folder, column = source(tmp_path / "patient99")
    splits = load_image_dataset(str(folder))
    found = splits.repeated_unit
    assert found is not None
    assert (found.column, found.name, found.largest, found.unknown) == (column, "patient", 3, 0)
    notes = " ".join(splits.notes)
    assert f"--privacy_unit_column {column} --privacy_unit_pattern '{found.pattern}'" in notes
    assert "patient0" not in notes
    before = set(splits.train.column_names)
    for pattern in (found.pattern, "(?P<patient>patient[0-9]+)"):
        splits = load_image_dataset(
            str(folder), privacy_unit_column=column, privacy_unit_pattern=pattern
        )
        assert splits.units is not None
        assert splits.units.name == "patient"
        assert sorted(len(rows) for rows in splits.units.rows_of_unit) == [1, 2, 3]
        assert set(splits.train.column_names) == before  # no column of paths was added


def test_the_paths_of_a_table_are_matched_as_it_has_them(tmp_path: Path) -> None:
    folder, column = csv_from_above(tmp_path)
    splits = load_image_dataset(
        str(folder), privacy_unit_column=column, privacy_unit_pattern="^set/train/(?P<patient>.+)/"
    )
    assert splits.units is not None
    assert len(splits.units) == 3


def test_units_in_paths_follow_the_rows_that_are_left_and_are_held_out_whole(
    tmp_path: Path,
) -> None:
    for i in range(60):
        path = tmp_path / "set" / ("ill", "well")[i % 2] / f"patient{i // 3}_{i}.png"
        write_image(path, level=i)
    (tmp_path / "set" / "ill" / "patient0_0.png").write_bytes(b"")
    splits = load_image_dataset(
        str(tmp_path / "set"),
        privacy_unit_column="image",
        privacy_unit_pattern="(?P<patient>patient[0-9]+)",
        on_corrupt="drop",
        eval_fraction=0.4,
    )
    assert splits.units is not None
    assert splits.evaluation is not None
    assert splits.units.num_rows + len(splits.evaluation) == 59
    levels = [
        {int(np.asarray(row["image"]).max()) // 3 for row in part}
        for part in (splits.train, splits.evaluation)
    ]
    assert not levels[0] & levels[1]
    assert len(levels[0]) == len(splits.units)


def test_a_patient_in_the_paths_of_both_splits_is_counted_and_refused(tmp_path: Path) -> None:
    for i, owner in enumerate(OWNERS):
        folder = tmp_path / ("train", "test")[i // 4] / ("ill", "well")[i % 2]
        write_image(folder / f"patient{owner}_{i}.png", level=i)
    splits = load_image_dataset(str(tmp_path))
    assert "2 of 2 evaluation images share their patient" in " ".join(splits.notes)
    assert splits.repeated_unit is not None
    with pytest.raises(ValueError, match="2 units are in the train and the evaluation split"):
        load_image_dataset(
            str(tmp_path),
            privacy_unit_column="image",
            privacy_unit_pattern=splits.repeated_unit.pattern,
        )


def test_images_without_a_path_have_no_unit_there(tmp_path: Path) -> None:
    folder = parquet(tmp_path / "x", train=table(["a", "b"]))
    with pytest.raises(ValueError, match="in 2 of 2 rows"):
        load_image_dataset(
            str(folder), privacy_unit_column="image", privacy_unit_pattern="(?P<patient>.+)"
        )


@pytest.mark.parametrize("named_column", [None, "Path"])
def test_only_the_column_whose_files_exist_becomes_images(
    tmp_path: Path, named_column: str | None
) -> None:
    """Another column of paths stays text, in which ids are found as well."""
    write_all(tmp_path, [f"{i}.png" for i in range(6)])
    rows = [f"archive/{path},{i}.png,{i % 2}" for i, path in enumerate(named())]
    (tmp_path / "x.csv").write_text("\n".join(["source,Path,label", *rows]))
    splits = load_image_dataset(str(tmp_path), image_column=named_column)
    assert splits.image_column == "Path"
    assert splits.train["source"][:] == [f"archive/{path}" for path in named()]
    assert splits.repeated_unit is not None
    assert (splits.repeated_unit.column, splits.repeated_unit.largest) == ("source", 3)


def test_of_two_columns_of_files_the_named_one_becomes_images(tmp_path: Path) -> None:
    write_all(tmp_path, [f"{i}.png" for i in range(4)])
    rows = [f"{i}.png,{(i + 1) % 4}.png,{i % 2}" for i in range(4)]
    (tmp_path / "x.csv").write_text("\n".join(["left,right,label", *rows]))
    with pytest.raises(ValueError, match="2 columns look like the images"):
        load_image_dataset(str(tmp_path))
    splits = load_image_dataset(str(tmp_path), image_column="right")
    assert [int(np.asarray(row["right"]).max()) for row in splits.train] == [1, 2, 3, 0]
    assert splits.train["left"][:] == ["0.png", "1.png", "2.png", "3.png"]


def test_folders_of_persons_are_no_classes(tmp_path: Path) -> None:
    """The names of classes are published with the model."""
    for i, owner in enumerate(OWNERS):
        write_image(tmp_path / ("ill", "well")[i % 2] / f"Patient-{owner:03d}/{i}.png", level=i)
    with pytest.raises(ValueError, match="3 of the 3 class names") as caught:
        load_image_dataset(str(tmp_path))
    assert "00" not in str(caught.value).replace(str(tmp_path), "")

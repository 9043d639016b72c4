"""Laws of columns and labels: one class, or several labels, per row."""

import math
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from image_tables import SECRET, STRING, class_folders, parquet, table
from PIL import Image

from hf_dpmuon.data import ImageSplits, load_image_dataset
from hf_dpmuon.data.columns import column_values

NAN = math.nan


def test_ambiguous_columns_are_listed(tmp_path: Path) -> None:
    images = [Image.new("L", (4, 4))] * 2
    features = datasets.Features(
        {"left": datasets.Image(), "right": datasets.Image(), "label": STRING}
    )
    two_images = datasets.Dataset.from_dict(
        {"left": images, "right": images, "label": ["a", "b"]}, features=features
    )
    folder = parquet(tmp_path / "two", train=two_images)
    with pytest.raises(ValueError, match=r"2 columns look like the images; .*'left', 'right'"):
        load_image_dataset(str(folder))
    assert load_image_dataset(str(folder), image_column="right").image_column == "right"


def test_a_lone_string_column_is_not_guessed_to_be_the_label(tmp_path: Path) -> None:
    """It may hold patient ids, and class names are published with the model."""
    folder = parquet(tmp_path / "x", train=table(["p1", "p2"]).rename_column("label", "patient"))
    with pytest.raises(ValueError, match=r"no column looks like the labels; .*'patient'"):
        load_image_dataset(str(folder))


CLASSES = datasets.ClassLabel(names=["a", "b", "c"])


@pytest.mark.parametrize(
    ("labels", "feature", "names", "ids"),
    [
        ([2, 0, 2], CLASSES, ("a", "b", "c"), [2, 0, 2]),
        ([10, 9, 2, 10], datasets.Value("int64"), ("2", "9", "10"), [2, 1, 0, 2]),
        ([1.0, 0.0], datasets.Value("float64"), ("0", "1"), [1, 0]),
        ([True, False], datasets.Value("bool"), ("0", "1"), [1, 0]),
        (["b", "a", "b"], datasets.Value("string"), ("a", "b"), [1, 0, 1]),
    ],
)
def test_labels_become_contiguous_ids_with_names(
    tmp_path: Path, labels: list[object], feature: object, names: tuple[str, ...], ids: list[int]
) -> None:
    splits = load_image_dataset(str(parquet(tmp_path / "x", train=table(labels, feature))))
    assert splits.label_names == names
    assert splits.train["label"][:] == ids


@pytest.mark.parametrize(
    ("labels", "feature"),
    [
        ([0, None, 1, -1, None], CLASSES),
        ([0, -1, 1, -7, None], datasets.Value("int64")),
        ([0.0, float("nan"), 1.0, 0.5, None], datasets.Value("float64")),
        (["a", "", "b", " ", None], datasets.Value("string")),
    ],
)
def test_bad_labels_are_counted_and_located(
    tmp_path: Path, labels: list[object], feature: object
) -> None:
    folder = parquet(tmp_path / "x", train=table(labels, feature))
    with pytest.raises(ValueError, match=r"3 labels of the split 'train' .*first rows: 1, 3, 4"):
        load_image_dataset(str(folder))


def test_a_class_only_in_evaluation_is_kept_and_noted(tmp_path: Path) -> None:
    folder = parquet(tmp_path / "x", train=table(["a", "c", "a"]), test=table(["c", "b"]))
    splits = load_image_dataset(str(folder))
    assert splits.label_names == ("a", "b", "c")
    assert splits.train["label"][:] == [0, 2, 0]
    assert splits.evaluation is not None
    assert splits.evaluation["label"][:] == [2, 1]
    assert any("1 classes have no training image" in note and "b" in note for note in splits.notes)


def test_splits_of_other_label_types_share_the_names(tmp_path: Path) -> None:
    class_folders(tmp_path, {"images": 2})
    rows = {
        "train": ("images/0.png,10", "images/1.png,9"),
        "test": ("images/0.png,9", "images/1.png,x"),
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(["file,label", *lines]))
    splits = load_image_dataset(str(tmp_path))
    assert splits.label_names == ("9", "10", "x")
    assert splits.evaluation is not None
    assert splits.evaluation["label"][:] == [0, 2]


def test_one_class_or_no_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one class only"):
        load_image_dataset(str(parquet(tmp_path / "one", train=table([1, 1], CLASSES))))
    empty = table([0, 1], CLASSES).select([])
    folder = parquet(tmp_path / "none", train=table([0, 1], CLASSES), test=empty)
    with pytest.raises(ValueError, match="has a split without rows"):
        load_image_dataset(str(folder))


def test_class_names_that_differ_in_blanks_only_are_refused(tmp_path: Path) -> None:
    folder = parquet(tmp_path / "x", train=table(["ill", "well", "ill "]))
    with pytest.raises(ValueError, match="differ in blanks"):
        load_image_dataset(str(folder))


def test_a_split_without_the_label_column_is_named(tmp_path: Path) -> None:
    other = table(["a", "b"]).rename_column("label", "finding")
    folder = parquet(tmp_path / "x", train=table(["a", "b"]), test=other)
    with pytest.raises(ValueError, match="label_column='label' is missing"):
        load_image_dataset(str(folder), label_column="label")


# Several labels per row

FINDINGS = ["Edema", "Fracture"]


def chexpert(folder: Path, rows: list[str], *, test: list[str] | None = None) -> Path:
    """Write a table of the findings of images, whose paths hold the id of a patient."""
    folder.mkdir(exist_ok=True)
    class_folders(folder, {SECRET: max(len(rows), len(test or []))})
    for name, lines in (("train", rows), ("test", test)):
        if lines is not None:
            numbered = [f"{SECRET}/{i}.png,{line}" for i, line in enumerate(lines)]
            (folder / f"{name}.csv").write_text("\n".join(["Path,Edema,Fracture", *numbered]))
    return folder


def numbers(splits: ImageSplits) -> np.ndarray[Any, Any]:
    return np.array(splits.train[splits.label_column][:], dtype=np.float32)


def test_several_columns_are_joined_and_what_is_not_known_is_nan(tmp_path: Path) -> None:
    folder = chexpert(tmp_path, ["1.0,", "-1.0,0.0", ",", "0.0,1.0"], test=["1.0,1.0"])
    splits = load_image_dataset(str(folder), label_columns=FINDINGS)
    assert splits.multi_label
    assert splits.label_names == ("Edema", "Fracture")
    np.testing.assert_array_equal(numbers(splits), [[1, NAN], [NAN, 0], [NAN, NAN], [0, 1]])
    assert splits.evaluation is not None
    assert splits.evaluation[splits.label_column][:] == [[1, 1]]
    notes = " ".join(splits.notes)
    assert "1 labels are uncertain (-1)" in notes
    assert "1 training images have no known label" in notes
    assert SECRET not in notes


@pytest.mark.parametrize(
    ("values", "feature"),
    [
        ([1, 0, None], datasets.Value("int8")),
        ([True, False, None], datasets.Value("bool")),
        ([1.0, 0.0, NAN], datasets.Value("float64")),
        (["1", "0.0", " "], datasets.Value("string")),
        (["True", "false", ""], datasets.Value("string")),
        ([1, 0, None], datasets.ClassLabel(names=["absent", "present"])),
    ],
)
def test_a_label_is_zero_or_one_in_any_type(
    tmp_path: Path, values: list[Any], feature: Any
) -> None:
    folder = parquet(tmp_path / "x", train=table(values, feature))
    splits = load_image_dataset(str(folder), label_columns=["label"])
    np.testing.assert_array_equal(numbers(splits), [[1], [0], [NAN]])


@pytest.mark.parametrize(
    ("values", "feature"),
    [
        ([2, 0, 1], datasets.Value("int64")),
        ([0.5, 0.0, 1.0], datasets.Value("float64")),
        ([SECRET, "0", "1"], STRING),
    ],
)
def test_another_number_is_refused_by_its_row(
    tmp_path: Path, values: list[Any], feature: Any
) -> None:
    folder = parquet(tmp_path / "x", train=table(values, feature))
    with pytest.raises(ValueError, match=r"1 labels of the column .*first rows: 0") as caught:
        load_image_dataset(str(folder), label_columns=["label"])
    assert SECRET not in str(caught.value)


def test_labels_of_one_value_are_noted(tmp_path: Path) -> None:
    splits = load_image_dataset(str(chexpert(tmp_path, ["1,0", ",1"])), label_columns=FINDINGS)
    assert any("1 labels have only one value" in n and n.endswith("Edema") for n in splits.notes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label_columns": FINDINGS, "label_column": "Edema"}, "are both set"),
        ({"label_columns": []}, "one or more columns"),
        ({"label_columns": ["Edema", "Edema"]}, "each once"),
        ({"label_columns": ["Edema", "Cough"]}, "label_columns='Cough' is missing"),
    ],
)
def test_wrong_label_columns_are_named(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_image_dataset(str(chexpert(tmp_path, ["1,0", "0,1"])), **arguments)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("column", ["patient", "PatientID", "study_id", "mrn"])
def test_classes_that_are_ids_are_no_labels(tmp_path: Path, column: str, named: bool) -> None:
    """Their names would be published with the model."""
    people = datasets.ClassLabel(names=["p", "q"])
    split = table(["a", "b", "a"]).add_column(column, [0, 0, 1]).cast_column(column, people)
    unit = column if named else None
    folder = parquet(tmp_path / "x", train=split)
    assert load_image_dataset(str(folder), privacy_unit_column=unit).label_names == ("a", "b")
    folder = parquet(tmp_path / "y", train=split.remove_columns("label"))
    with pytest.raises(ValueError, match="no column looks like the labels"):
        load_image_dataset(str(folder), privacy_unit_column=unit)


def test_a_named_unit_of_any_name_is_no_label(tmp_path: Path) -> None:
    people = datasets.ClassLabel(names=["p", "q"])
    split = table([0, 1, 0], CLASSES).add_column("who", [0, 0, 1]).cast_column("who", people)
    folder = parquet(tmp_path / "x", train=split)
    with pytest.raises(ValueError, match="2 columns look like the labels"):
        load_image_dataset(str(folder))
    splits = load_image_dataset(str(folder), privacy_unit_column="who")
    assert splits.label_column == "label"


def test_what_is_seen_may_be_called_a_lesion(tmp_path: Path) -> None:
    folder = parquet(tmp_path / "x", train=table([0, 1], CLASSES).rename_column("label", "lesion"))
    assert load_image_dataset(str(folder)).label_column == "lesion"


INTEGERS = datasets.List(datasets.Value("int64"))


def test_lists_with_a_single_one_are_classes(tmp_path: Path) -> None:
    folder = parquet(tmp_path / "x", train=table([[0, 1, 0], [1, 0, 0], [0, 0, 1]], INTEGERS))
    splits = load_image_dataset(str(folder))
    assert not splits.multi_label
    assert splits.label_names == ("0", "1", "2")
    assert splits.train["label"][:] == [1, 0, 2]
    assert any("one class per image, as all lists of 'label'" in note for note in splits.notes)


@pytest.mark.parametrize("second", [[1, 1], [0, 0], [None, 1], None])
def test_other_lists_are_several_labels(tmp_path: Path, second: list[int | None] | None) -> None:
    folder = parquet(tmp_path / "x", train=table([[0, 1], second], INTEGERS))
    splits = load_image_dataset(str(folder))
    assert splits.multi_label
    assert splits.label_names == ("0", "1")
    assert any("several labels per image, as not all lists" in note for note in splits.notes)
    wanted = [NAN if value is None else value for value in second or [None, None]]
    np.testing.assert_array_equal(numbers(splits), [[0, 1], wanted])


def test_lists_of_classes_mark_the_classes_they_name(tmp_path: Path) -> None:
    feature = datasets.List(datasets.ClassLabel(names=["a", "b", "c"]))
    folder = parquet(tmp_path / "x", train=table([[2, 0], [], [1], None], feature))
    splits = load_image_dataset(str(folder))
    assert splits.label_names == ("a", "b", "c")
    wanted = [[1, 0, 1], [0, 0, 0], [0, 1, 0], [NAN] * 3]
    np.testing.assert_array_equal(numbers(splits), wanted)


@pytest.mark.parametrize(
    ("labels", "feature", "message"),
    [
        ([[0], [1, 0]], INTEGERS, "lists of 2 lengths"),
        ([[0, 1], [2, 0]], INTEGERS, r"1 labels .*first rows: 1"),
        ([["x", "y"], ["1", "0"]], datasets.List(STRING), r"2 labels .*first rows: 0"),
    ],
)
def test_lists_that_are_no_labels_are_refused(
    tmp_path: Path, labels: list[Any], feature: Any, message: str
) -> None:
    folder = parquet(tmp_path / "x", train=table(labels, feature))
    with pytest.raises(ValueError, match=message):
        load_image_dataset(str(folder))


@pytest.mark.parametrize(
    ("labels", "feature"),
    [
        ([[0], [1]], datasets.List(datasets.ClassLabel(names=["b", "a"]))),
        ([0, 1], datasets.Value("int64")),
    ],
)
def test_splits_of_another_form_of_label_are_refused(
    tmp_path: Path, labels: list[Any], feature: Any
) -> None:
    train = table([[0], [1]], datasets.List(datasets.ClassLabel(names=["a", "b"])))
    folder = parquet(tmp_path / "x", train=train, test=table(labels, feature))
    with pytest.raises(ValueError, match="another form in each split"):
        load_image_dataset(str(folder))


def test_every_split_keeps_the_class_names_of_its_own_file(tmp_path: Path) -> None:
    """`datasets` reads them from the first split and would swap the classes of the second."""
    train = table([0, 1], datasets.ClassLabel(names=["ill", "well"]))
    test = table([0, 1], datasets.ClassLabel(names=["well", "ill"]))
    splits = load_image_dataset(str(parquet(tmp_path / "x", train=train, test=test)))
    assert splits.label_names == ("ill", "well")
    assert splits.train["label"][:] == [0, 1]
    assert splits.evaluation is not None
    assert splits.evaluation["label"][:] == [1, 0]


def test_answers_in_words_are_known_whatever_number_a_class_label_gives_them(
    tmp_path: Path,
) -> None:
    """CheXpert on the Hub: 0 is unlabeled, 1 uncertain, 2 absent and 3 present."""
    words = datasets.ClassLabel(names=["unlabeled", "uncertain", "absent", "present"])
    split = table([0, 1, 2, 3], words).rename_column("label", "Edema")
    folder = parquet(tmp_path / "x", train=split.add_column("Fracture", ["yes", "No", "", "no"]))
    splits = load_image_dataset(str(folder), label_columns=["Edema", "Fracture"])
    found = np.array(column_values(splits.train, splits.label_column))
    np.testing.assert_array_equal(found, [[np.nan, 1], [np.nan, 0], [0, np.nan], [1, 0]])

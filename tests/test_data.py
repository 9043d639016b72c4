"""Laws of the data room, on files written by the tests themselves."""

import pickle
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hf_dpmuon.data import (
    ImageExamples,
    ImageFormat,
    build_transforms,
    collate,
    load_image_dataset,
)

RGB = ImageFormat(8, 8, 3, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), "bilinear")
GREY = ImageFormat(8, 8, 1, (0.0,), (1.0,), "bilinear")


@pytest.fixture(autouse=True, scope="module")
def _fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets_cache")


def write_image(path: Path, *, level: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8), level).save(path)
    return path


def class_folders(root: Path, counts: dict[str, int]) -> Path:
    """Write `counts[folder]` images into each folder, every image of another level."""
    for folder, count in counts.items():
        for i in range(count):
            write_image(root / folder / f"{i}.png", level=10 * i)
    return root


STRING = datasets.Value("string")


def table(labels: list[object], feature: object = STRING) -> datasets.Dataset:
    images = [Image.new("L", (4, 4), 10 * (i % 20)) for i in range(len(labels))]
    features = datasets.Features({"image": datasets.Image(), "label": feature})
    return datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)


def parquet(folder: Path, **splits: datasets.Dataset) -> Path:
    folder.mkdir(exist_ok=True)
    for name, split in splits.items():
        split.to_parquet(str(folder / f"{name}.parquet"))
    return folder


# Sources


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


# Columns and labels


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
    assert splits.label_names == ("10", "9", "x")
    assert splits.evaluation is not None
    assert splits.evaluation["label"][:] == [1, 2]


def test_one_class_or_no_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one class only"):
        load_image_dataset(str(parquet(tmp_path / "one", train=table([1, 1], CLASSES))))
    empty = table([0, 1], CLASSES).select([])
    folder = parquet(tmp_path / "none", train=table([0, 1], CLASSES), test=empty)
    with pytest.raises(ValueError, match="has a split without rows"):
        load_image_dataset(str(folder))


# Corrupt images


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Class folders of 6 images, of which rows 0, 2 and 5 cannot be decoded."""
    class_folders(tmp_path, {"cat": 3, "dog": 3})
    noise = np.random.default_rng(0).integers(0, 255, (64, 64), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "cat" / "0.jpg")
    (tmp_path / "cat" / "0.png").unlink()
    whole = (tmp_path / "cat" / "0.jpg").read_bytes()
    (tmp_path / "cat" / "0.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "cat" / "2.png").write_bytes(b"")
    (tmp_path / "dog" / "2.png").write_text("not an image")
    return tmp_path


def test_corrupt_images_are_refused_by_count_and_row(damaged: Path) -> None:
    with pytest.raises(ValueError, match=r"3 of 6 images .*first rows: 0, 2, 5.*on_corrupt='drop'"):
        load_image_dataset(str(damaged))


def test_corrupt_images_are_dropped_before_rows_are_counted(damaged: Path) -> None:
    splits = load_image_dataset(str(damaged), on_corrupt="drop")
    assert len(splits.train) == 3
    assert splits.train["label"][:] == [0, 1, 1]
    levels = [np.asarray(row["image"]).max() for row in splits.train]
    assert levels == [10, 0, 10]  # each survivor once, none doubled
    assert any("3 of 6 images" in note and "3 are left" in note for note in splits.notes)


def test_an_image_that_vanishes_later_is_named_not_replaced(tmp_path: Path) -> None:
    class_folders(tmp_path, {"cat": 2, "dog": 2})
    examples = make_examples(str(tmp_path))
    (tmp_path / "dog" / "0.png").write_bytes(b"")
    assert examples[1]["labels"] == 0
    with pytest.raises(ValueError, match="the image of row 2 can no longer be read"):
        examples[2, 0]


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
    with pytest.raises(ValueError, match="no column looks like the images"):
        load_image_dataset(str(tmp_path / "only"))


# Pixels


def ramp16() -> np.ndarray:
    return np.linspace(0, 65535, 4096).astype(np.uint16).reshape(64, 64)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_deep_greyscale_keeps_its_levels(tmp_path: Path, mode: str, channels: int) -> None:
    ramp = ramp16()
    if mode == "I;16":
        Image.fromarray(ramp).save(tmp_path / "x.png")
        image: Image.Image = Image.open(tmp_path / "x.png")
    elif mode == "I":
        image = Image.fromarray(ramp.astype(np.int32))
    else:
        image = Image.fromarray(ramp.astype(np.float32) / 65535)
    wanted = ImageFormat(64, 64, channels, (0.0,) * channels, (1.0,) * channels, "bicubic")
    pixels = build_transforms(wanted, train=False)(image, None)
    assert pixels.shape == (channels, 64, 64)
    levels = pixels[0].flatten()
    assert (levels.diff() >= 0).all()
    assert len(levels.unique()) > 200
    torch.testing.assert_close(levels.numpy(), (ramp / 65535).astype(np.float32).ravel())


@pytest.mark.parametrize("values", [[[-1000, 3000]], [[0, 70000]]])
def test_intensities_without_a_declared_window_are_refused(values: list[list[int]]) -> None:
    image = Image.fromarray(np.array(values, dtype=np.int32))
    with pytest.raises(ValueError, match="declared window"):
        build_transforms(GREY, train=False)(image, None)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
@pytest.mark.parametrize("wanted", [RGB, GREY])
def test_every_mode_gives_the_colour_that_pillow_shows(mode: str, wanted: ImageFormat) -> None:
    image = Image.new("RGB", (5, 9), (255, 255, 255)).convert(mode)
    pixels = build_transforms(wanted, train=False)(image, None)
    white = (1 - torch.tensor(wanted.mean)) / torch.tensor(wanted.std)
    torch.testing.assert_close(
        pixels, white[:, None, None].expand(wanted.num_channels, 8, 8), atol=0.02, rtol=0
    )


def test_transparent_pixels_lie_on_black() -> None:
    image = Image.new("RGBA", (8, 8), (200, 200, 200, 0))
    assert build_transforms(GREY, train=False)(image, None).abs().max() == 0
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 250, 250, 250])
    palette.info["transparency"] = 1
    assert build_transforms(GREY, train=False)(palette, None).abs().max() == 0


def test_mean_and_std_follow_the_channels() -> None:
    with pytest.raises(ValueError, match=r"1 channels .* 3 means"):
        ImageFormat(8, 8, 1, (0.5,) * 3, (0.5,) * 3, "bilinear")


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**63 - 1), side=st.sampled_from([8, 20, 28]))
def test_augmentation_is_a_mirrored_crop_of_the_padded_image(seed: int, side: int) -> None:
    levels = np.random.default_rng(0).integers(1, 256, (side, side), dtype=np.uint8)
    wanted = ImageFormat(side, side, 1, (0.0,), (1.0,), "bilinear")
    augment = build_transforms(wanted, train=True)
    image = Image.fromarray(levels)
    before = torch.get_rng_state()
    pixels = augment(image, torch.Generator().manual_seed(seed))
    assert torch.equal(pixels, augment(image, torch.Generator().manual_seed(seed)))
    assert torch.equal(torch.get_rng_state(), before)  # no global randomness
    pad = side // 8
    padded = np.pad(levels, pad)
    crops = [
        flip[top : top + side, left : left + side]
        for flip in (padded, padded[:, ::-1])
        for top in range(2 * pad + 1)
        for left in range(2 * pad + 1)
    ]
    assert any(np.array_equal((pixels[0].numpy() * 255).round(), crop) for crop in crops)


def test_every_crop_and_both_mirrors_occur_equally_often() -> None:
    levels = np.random.default_rng(0).integers(1, 256, (8, 8), dtype=np.uint8)
    augment = build_transforms(GREY, train=True)
    draws = [
        augment(Image.fromarray(levels), torch.Generator().manual_seed(seed)).numpy().tobytes()
        for seed in range(3600)
    ]
    counts = np.unique(np.array([hash(draw) for draw in draws]), return_counts=True)[1]
    assert len(counts) == 18  # 3 x 3 places, 2 mirrors
    chi_square = ((counts - 200) ** 2 / 200).sum()
    assert chi_square < 45  # 17 degrees of freedom: p < 2e-4


def test_without_a_generator_or_training_nothing_is_drawn() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8), dtype=np.uint8))
    plain = build_transforms(GREY, train=False)(image, None)
    still = build_transforms(GREY, train=True, random_flip=False, random_crop=False)
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        assert torch.equal(build_transforms(GREY, train=False)(image, generator), plain)
        assert torch.equal(still(image, generator), plain)
    assert torch.equal(build_transforms(GREY, train=True)(image, None), plain)


# Examples and batches


def make_examples(source: str, *, train: bool = True) -> ImageExamples:
    splits = load_image_dataset(source)
    return ImageExamples(
        splits.train,
        image_column=splits.image_column,
        label_column=splits.label_column,
        transform=build_transforms(RGB, train=train),
    )


def test_examples_hold_pixels_and_labels_only(tmp_path: Path) -> None:
    split = table([0, 1, 1], CLASSES).add_column("patient_id", ["secret"] * 3)
    examples = make_examples(str(parquet(tmp_path / "x", train=split)))
    assert len(examples) == 3
    assert set(examples[0]) == {"pixel_values", "labels"}
    assert "secret" not in str(examples[0])
    batch = collate([examples[i] for i in range(3)])
    assert batch["pixel_values"].shape == (3, 3, 8, 8)
    assert batch["pixel_values"].dtype == torch.float32
    assert batch["labels"].tolist() == [0, 1, 1]
    assert batch["labels"].dtype == torch.int64


def test_a_key_decides_its_example_in_any_process(tmp_path: Path) -> None:
    class_folders(tmp_path, {"cat": 3, "dog": 3})
    examples = make_examples(str(tmp_path))
    copied = pickle.loads(pickle.dumps(examples))
    for key in [0, 5, (2, 7), (2, 8)]:
        assert torch.equal(examples[key]["pixel_values"], copied[key]["pixel_values"])
    loader = torch.utils.data.DataLoader(
        examples, batch_sampler=[[(2, 7), (2, 7)]], num_workers=1, collate_fn=collate
    )
    pixels = next(iter(loader))["pixel_values"]
    assert torch.equal(pixels[0], examples[2, 7]["pixel_values"])
    assert torch.equal(pixels[0], pixels[1])


def test_a_row_outside_the_split_is_an_index_error(tmp_path: Path) -> None:
    class_folders(tmp_path, {"cat": 2, "dog": 2})
    with pytest.raises(IndexError):
        make_examples(str(tmp_path))[4]


def test_importing_the_module_imports_no_data_set_library() -> None:
    code = "import sys, hf_dpmuon.data; sys.exit('datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Laws of checked images: what is damaged, what is seen, what reaches a batch."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_tables import SECRET, class_folders, parquet, table, write_image
from PIL import Image

from hf_dpmuon.arguments import DataArguments, DPTrainingArguments, ModelArguments
from hf_dpmuon.data import (
    ImageExamples,
    ImageFormat,
    build_transforms,
    collate,
    load_image_dataset,
)
from hf_dpmuon.job import finetune

RGB = ImageFormat(8, 8, 3, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), "bilinear")
GREY = ImageFormat(8, 8, 1, (0.0,), (1.0,), "bilinear")
CLASSES = datasets.ClassLabel(names=["a", "b", "c"])


# Arguments


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        ({"eval_fraction": 1.0}, r"eval_fraction=1\.0 must be in \(0, 1\)"),
        ({"eval_fraction": 0.2, "eval_split": "test"}, "are both set"),
        ({"label_column": "a", "label_columns": ["b"]}, "are both set"),
        ({"max_examples_per_unit": 0}, "max_examples_per_unit=0 must be a finite number >= 1"),
        ({"dicom_window": [40.0]}, "two finite numbers"),
        ({"dicom_window": [40.0, 0.0]}, "a width > 0"),
    ],
)
def test_settings_out_of_range_are_refused_before_any_data(
    given_settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    args = DPTrainingArguments(str(tmp_path), noise_multiplier=1.0, use_cpu=True)
    with pytest.raises(ValueError, match=message):
        finetune(ModelArguments(), DataArguments(dataset_name="/absent", **given_settings), args)


@pytest.mark.parametrize(
    ("given_settings", "needed"),
    [
        ({"max_examples_per_unit": 4}, "privacy_unit_column"),
        ({"public_class_counts": True}, "class_weights"),
        ({"privacy_unit_pattern": "(?P<patient>p[0-9]+)"}, "privacy_unit_column"),
    ],
)
def test_settings_without_effect_are_refused_before_any_data(
    given_settings: dict[str, Any], needed: str, tmp_path: Path
) -> None:
    args = DPTrainingArguments(str(tmp_path), noise_multiplier=1.0, use_cpu=True)
    with pytest.raises(ValueError, match=f"{next(iter(given_settings))}=.*{needed}"):
        finetune(ModelArguments(), DataArguments(dataset_name="/absent", **given_settings), args)


# Corrupt images and copies


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
    with pytest.raises(ValueError, match="an image can no longer be read") as caught:
        examples[2, 0]
    assert caught.value.__cause__ is None  # its text would name the file


def test_the_names_of_damaged_files_are_never_told(tmp_path: Path) -> None:
    class_folders(tmp_path, {"cat": 2, "dog": 2})
    (tmp_path / "cat" / f"{SECRET}.png").write_bytes(b"")
    with pytest.raises(ValueError, match="1 of 5 images") as caught:
        load_image_dataset(str(tmp_path))
    assert SECRET not in str(caught.value)
    assert SECRET not in str(load_image_dataset(str(tmp_path), on_corrupt="drop").notes)


def test_a_split_of_damaged_images_only_is_refused(tmp_path: Path) -> None:
    class_folders(tmp_path / "train", {"cat": 1, "dog": 1})
    for name in ("cat", "dog"):
        path = tmp_path / "test" / name / "0.png"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"2 of 2 images .*nothing is left"):
        load_image_dataset(str(tmp_path), on_corrupt="drop")


def test_exact_copies_are_counted_whatever_their_file_is(tmp_path: Path) -> None:
    write_image(tmp_path / "train" / "a" / "0.png", level=7)
    write_image(tmp_path / "train" / "a" / "1.bmp", level=7)
    write_image(tmp_path / "train" / "b" / "0.tiff", level=7)
    write_image(tmp_path / "train" / "b" / "1.png", level=8)
    write_image(tmp_path / "test" / "a" / "0.png", level=8)
    write_image(tmp_path / "test" / "b" / "1.png", level=9)
    notes = " ".join(load_image_dataset(str(tmp_path)).notes)
    assert "2 training images are exact copies" in notes
    assert "1 of 2 evaluation images are exact copies of training images" in notes


def test_images_of_nearly_one_grey_are_counted(tmp_path: Path) -> None:
    for i, top in enumerate((65535, 3000)):  # the second has 12 bits in a file of 16
        pixels = np.linspace(0, top, 16).astype(np.uint16).reshape(4, 4)
        path = tmp_path / "ab"[i] / "x.png"
        path.parent.mkdir()
        Image.fromarray(pixels).save(path)
    notes = " ".join(load_image_dataset(str(tmp_path)).notes)
    assert "1 deep greyscale images of the split 'train' use less than 10%" in notes


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


def test_transparency_is_left_out() -> None:
    image = Image.new("RGBA", (8, 8), (200, 200, 200, 0))
    seen = build_transforms(GREY, train=False)(image, None)
    assert torch.equal(seen, build_transforms(GREY, train=False)(image.convert("RGB"), None))


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
    split = table([0, 1, 1], CLASSES).add_column("patient_id", [SECRET] * 3)
    examples = make_examples(str(parquet(tmp_path / "x", train=split)))
    assert len(examples) == 3
    assert set(examples[0]) == {"pixel_values", "labels"}
    assert SECRET not in str(examples[0])
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


def test_a_stream_is_refused_with_the_reason(tmp_path: Path) -> None:
    stream = table([0, 1], CLASSES).to_iterable_dataset()
    with pytest.raises(ValueError, match="must be known before a sampling rate"):
        ImageExamples(
            stream,
            image_column="image",
            label_column="label",
            transform=build_transforms(RGB, train=False),
        )


def test_several_labels_reach_a_batch_with_the_unknown_marked(tmp_path: Path) -> None:
    feature = datasets.List(datasets.Value("float32"))
    split = table([[1, 0, None], [0, 0, 1], [1, 1, 0]], feature)
    examples = make_examples(str(parquet(tmp_path / "x", train=split)))
    labels = collate([examples[i] for i in range(3)])["labels"]
    nan = float("nan")
    wanted = torch.tensor([[1, 0, nan], [0, 0, 1], [1, 1, 0]])
    torch.testing.assert_close(labels, wanted, equal_nan=True)


def test_a_row_outside_the_split_is_an_index_error(tmp_path: Path) -> None:
    class_folders(tmp_path, {"cat": 2, "dog": 2})
    with pytest.raises(IndexError):
        make_examples(str(tmp_path))[4]


def test_importing_the_module_imports_no_data_set_library() -> None:
    code = (
        "import sys, hf_dpmuon.data as d; sys.exit(len({'datasets', 'pydicom'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

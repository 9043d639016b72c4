"""Laws of the door for tables and files: what is named is read, and nothing else happens."""

import os
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from image_tables import class_folders, parquet, png, table, write_dicom, write_image
from PIL import Image

from hf_dpmuon.data import load_image_dataset
from hf_dpmuon.data.dicom import ImageKindError, read_dicom
from hf_dpmuon.data.images import open_image

PIXELS = np.arange(0, 4096, 64, dtype=np.uint16).reshape(8, 8)


@pytest.mark.parametrize(
    "address", ["http://host/x.png", "https://host/x.png", "s3://b/x.png", "hf://datasets/a/x.png"]
)
def test_k212_no_address_is_fetched(tmp_path: Path, address: str) -> None:
    images = {"image": [{"bytes": png(1), "path": None}, {"bytes": None, "path": address}]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    split = datasets.Dataset.from_dict({**images, "label": ["a", "b"]}, features=features)
    # to_parquet of `datasets` would fetch the image itself
    pq.write_table(split.with_format("arrow")[:], tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"1 of 2 images .*\(1 an address on a network"):
        load_image_dataset(str(tmp_path / "x.parquet"))


@pytest.mark.parametrize("name", ["{}0417", "scan 2024-01-{}", "MRN123{}5", "patient_{}"])
def test_k213_folders_named_for_persons_are_no_classes(tmp_path: Path, name: str) -> None:
    names = [name.format(i) for i in range(10, 13)]
    class_folders(tmp_path, {f"mel/{folder}": 2 for folder in names})
    with pytest.raises(ValueError, match=r"persons right above|public_class_names=True") as raised:
        load_image_dataset(str(tmp_path))
    assert not any(folder in str(raised.value) for folder in names)


def test_k213_a_class_for_nearly_every_row_is_refused_unless_declared(tmp_path: Path) -> None:
    names = [f"{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(40)]
    folder = str(parquet(tmp_path, train=table(names)))
    with pytest.raises(ValueError, match="nearly each row has its own"):
        load_image_dataset(folder)
    assert len(load_image_dataset(folder, public_class_names=True).label_names) == 40


def test_k214_no_copy_of_a_table_is_kept(tmp_path: Path) -> None:
    class_folders(tmp_path, {"images": 2})
    csv = tmp_path / "cohort.csv"
    csv.write_text("file,label,patient\nimages/0.png,a,zq-unique-1\nimages/1.png,b,zq-unique-2\n")
    csv.chmod(0o600)
    load_image_dataset(str(csv))
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    copies = [f for f in cache.rglob("*") if f.is_file() and b"zq-unique" in f.read_bytes()]
    assert copies == []


@pytest.mark.parametrize("name", ["labels[1].csv", "a*b.csv", "a?.csv", "x::y.csv", "{a,b}.csv"])
def test_k222_the_table_that_is_named_is_read(tmp_path: Path, name: str) -> None:
    class_folders(tmp_path, {"images": 2})
    for other in ("labels1.csv", "aXb.csv", "aX.csv", "a.csv"):
        (tmp_path / other).write_text("file,label\nimages/0.png,other\nimages/1.png,wrong\n")
    (tmp_path / name).write_text("file,label\nimages/0.png,a\nimages/1.png,b\n")
    assert load_image_dataset(str(tmp_path / name)).label_names == ("a", "b")


@pytest.mark.parametrize("name", ["scan[1]", "a*", "b?", "x::y"])
def test_k222_a_pattern_in_the_path_of_a_parquet_file_is_refused(tmp_path: Path, name: str) -> None:
    parquet(tmp_path / "scan1", train=table(["wrong", "other"]))
    folder = parquet(tmp_path / "plain", train=table(["a", "b"])).rename(tmp_path / name)
    with pytest.raises(ValueError, match="rename it"):
        load_image_dataset(str(folder / "train.parquet"))


@pytest.mark.parametrize("link", ["mel", "test", "train/mel", "loop"])
def test_k223_linked_folders_are_refused_with_a_count(tmp_path: Path, link: str) -> None:
    folder = class_folders(tmp_path / "data", {"train/a": 2, "train/b": 2})
    target = folder if link == "loop" else class_folders(tmp_path / "far", {"x": 2})
    (folder / link).symlink_to(target)
    with pytest.raises(ValueError, match="has 1 links to folders"):
        load_image_dataset(str(folder))


@pytest.mark.parametrize("pair", ["A|B B|A", "A;B B;A", "A,B,C C,A,B", "x|y y|x"])
def test_k227_one_set_of_labels_in_two_orders_is_refused(tmp_path: Path, pair: str) -> None:
    with pytest.raises(ValueError, match="label_columns"):
        load_image_dataset(str(parquet(tmp_path, train=table([*pair.split(), "none"]))))


def test_k228_a_table_of_equal_age_is_read_anew(tmp_path: Path) -> None:
    class_folders(tmp_path, {"images": 2})
    csv = tmp_path / "cohort.csv"
    for names in (("a", "b"), ("c", "d")):
        csv.write_text(f"file,label\nimages/0.png,{names[0]}\nimages/1.png,{names[1]}\n")
        os.utime(csv, (0, 0))
        assert load_image_dataset(str(csv)).label_names == names


@pytest.mark.parametrize("form", ["{}", "grade{}", "t{}b"])
def test_k232_classes_have_one_natural_order(tmp_path: Path, form: str) -> None:
    names = [form.format(i) for i in range(12)]
    folders = class_folders(tmp_path / "folders", dict.fromkeys(names, 2))
    rows = parquet(tmp_path / "rows", train=table(sorted(names) * 2))
    for source in (folders, rows):
        assert load_image_dataset(str(source)).label_names == tuple(names)


@pytest.mark.parametrize("suffix", ["tiff", "gif", "png", "webp"])
def test_k233_images_of_several_frames_are_refused(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGB", (8, 8), (level, 0, 0)) for level in (0, 120, 250)]
    class_folders(tmp_path, {"a": 2, "b": 2})
    frames[0].save(tmp_path / "a" / f"x.{suffix}", save_all=True, append_images=frames[1:])
    with pytest.raises(ValueError, match=r"1 of 5 images .* of several frames"):
        load_image_dataset(str(tmp_path))


@pytest.mark.parametrize("tag", ["WindowCenter", "RescaleSlope", "RescaleIntercept", "both"])
def test_k258_empty_tags_are_absent(tmp_path: Path, tag: str) -> None:
    empty = dict.fromkeys(("WindowCenter", "WindowWidth") if tag == "both" else (tag,), None)
    plain = read_dicom(str(write_dicom(tmp_path / "a.dcm", PIXELS)), None)
    seen = read_dicom(str(write_dicom(tmp_path / "b.dcm", PIXELS, **empty)), None)
    np.testing.assert_array_equal(np.asarray(seen), np.asarray(plain))


@pytest.mark.parametrize(
    ("tags", "named"),
    [
        ({"WindowWidth": 0, "WindowCenter": 9}, "WindowWidth"),
        ({"WindowWidth": -1, "WindowCenter": 9}, "WindowWidth"),
        ({"WindowWidth": 9}, "WindowCenter"),
        ({"WindowCenter": 9}, "WindowWidth"),
        ({"RescaleSlope": 0}, "RescaleSlope"),
    ],
)
def test_k258_tags_that_mean_nothing_are_named(
    tmp_path: Path, tags: dict[str, int], named: str
) -> None:
    with pytest.raises(ImageKindError, match=named):
        read_dicom(str(write_dicom(tmp_path / "a.dcm", PIXELS, **tags)), None)


def test_k259_a_jpeg_of_12_bits_is_decoded() -> None:
    from pydicom.data import get_testdata_file

    levels = np.asarray(read_dicom(str(get_testdata_file("JPGExtended.dcm")), None))
    assert 0 <= levels.min() < levels.max() <= 1


@pytest.mark.parametrize(
    "text",
    [
        "sep=,\nfile,label\n{0},a\n{1},b\n",
        "sep=;\nfile;label\n{0};a\n{1};b\n",
        "file,label\n{0},a,\n{1},b,\n",
        "file,label,\n{0},a,\n{1},b,\n",
    ],
)
def test_k260_what_excel_writes_is_read(tmp_path: Path, text: str) -> None:
    paths = [write_image(tmp_path / "images" / f"{i}.png", level=i) for i in range(2)]
    (tmp_path / "x.csv").write_text(text.format(*(p.relative_to(tmp_path) for p in paths)))
    splits = load_image_dataset(str(tmp_path / "x.csv"))
    assert (splits.label_names, splits.image_column) == (("a", "b"), "file")


def test_a_photograph_is_turned_as_its_exif_says(tmp_path: Path) -> None:
    """Case 225: whatever reads it sees it upright."""
    image, exif = Image.new("L", (4, 8)), Image.Exif()
    exif[274] = 6
    image.save(tmp_path / "x.jpg", exif=exif)
    assert open_image({"bytes": None, "path": str(tmp_path / "x.jpg")}, None).size == (8, 4)

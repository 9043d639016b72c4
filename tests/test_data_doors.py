"""Laws of the door for tables and files: what is named is read, and nothing else happens."""

import io
import os
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from image_tables import class_folders, parquet, png, table, write_dicom, write_image
from PIL import Image
from support import forked
from transformers.image_utils import load_image

from hf_dpmuon.data import load_image_dataset, sources
from hf_dpmuon.data.dicom import ImageKindError, read_dicom
from hf_dpmuon.data.images import decode, open_image
from hf_dpmuon.finetune import check_output_folder, described

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
    with pytest.raises(ValueError, match=r"ids or dates.*public_class_names=True") as raised:
        load_image_dataset(str(tmp_path))
    assert not any(folder in str(raised.value) for folder in names)
    assert len(load_image_dataset(str(tmp_path), public_class_names=True).label_names) == 3


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
def test_k222_the_parquet_file_that_is_named_is_read(tmp_path: Path, name: str) -> None:
    parquet(tmp_path / "scan1", train=table(["wrong", "other"]))
    folder = parquet(tmp_path / "plain", train=table(["a", "b"])).rename(tmp_path / name)
    (folder / "train.parquet").rename(folder / f"{name}.parquet")
    assert load_image_dataset(str(folder / f"{name}.parquet")).label_names == ("a", "b")
    with pytest.raises(ValueError, match="rename it"):  # a folder that `datasets` must search
        load_image_dataset(str(folder))


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


def test_k228_a_parquet_file_of_equal_age_is_read_anew(tmp_path: Path) -> None:
    file = parquet(tmp_path, train=table(["a", "b"])) / "train.parquet"
    age = file.stat().st_mtime_ns
    assert load_image_dataset(str(file)).label_names == ("a", "b")
    parquet(tmp_path, train=table(["c", "d"]))
    os.utime(file, ns=(age, age))
    assert load_image_dataset(str(file)).label_names == ("c", "d")


@pytest.mark.parametrize("what", ["file", "folder"])
def test_k214_what_is_read_of_parquet_is_private_and_gone_afterwards(
    tmp_path: Path, what: str
) -> None:
    parquet(tmp_path, train=table(["zq-unique-a", "zq-unique-b"]))
    named = tmp_path / "train.parquet" if what == "file" else tmp_path
    home = tmp_path / "home"

    def work() -> None:
        datasets.config.HF_DATASETS_CACHE = home
        sources._private_cache.cache_clear()  # this process may have one
        load_image_dataset(str(named))
        (folder,) = home.glob("private-*")
        assert folder.stat().st_mode & 0o777 == 0o700

    done = forked(work)
    assert done.returncode == 0, done.stderr
    assert not [f for f in home.rglob("*") if f.is_file() and b"zq-unique" in f.read_bytes()]


def as_pipeline_sees(content: bytes, mode: str) -> np.ndarray:
    """What `transformers` makes of an image before its processor, and so what a card's lines do."""
    return np.asarray(load_image(Image.open(io.BytesIO(content))).convert(mode))


@pytest.mark.parametrize("kind", ["white under alpha 0", "half alpha", "palette", "grey", "turned"])
def test_k225_training_sees_an_image_as_the_pipeline_does(kind: str) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (8, 6, 4), dtype=np.uint8)
    if kind == "white under alpha 0":
        pixels[:] = (255, 255, 255, 0)
    image = Image.fromarray(pixels, "RGBA")
    buffer, exif = io.BytesIO(), Image.Exif()
    if kind == "palette":
        image = image.convert("RGB").quantize(16)
        image.info["transparency"] = 3
    elif kind == "grey":
        image = image.convert("LA")
    elif kind == "turned":
        image = image.convert("RGB")
        exif[0x0112] = 6
    image.save(buffer, format="PNG", exif=exif)
    ours = decode(open_image({"bytes": buffer.getvalue(), "path": None}, None)).convert("RGB")
    assert np.array_equal(np.asarray(ours), as_pipeline_sees(buffer.getvalue(), "RGB"))


@pytest.mark.parametrize("below", ["", "out", "deep/er/out", "train"])
def test_k231_an_output_folder_inside_the_data_is_refused(tmp_path: Path, below: str) -> None:
    class_folders(tmp_path, {"a": 2, "b": 2})
    with pytest.raises(ValueError, match="lies in the data set"):
        check_output_folder(tmp_path / below, str(tmp_path))
    check_output_folder(tmp_path.parent / "elsewhere", str(tmp_path))
    check_output_folder(tmp_path / "out", "owner/name")


def test_k232_the_order_of_classes_is_shown_beside_their_weights() -> None:
    assert described(["0", "1", "10"], [0.5, 1.0, 2.0]) == (
        "0 (weight 0.5), 1 (weight 1), 10 (weight 2)"
    )
    assert described(["a", "b"], None) == "a, b"
    assert described([str(i) for i in range(60)], None).endswith("49 and 10 more")


@pytest.mark.parametrize("written", ["images/0", "images\\0.png", "images\\0", "./images/0"])
def test_k260_ids_without_suffix_and_other_separators_are_found(
    tmp_path: Path, written: str
) -> None:
    class_folders(tmp_path, {"images": 2})
    table_file = tmp_path / "labels.csv"
    table_file.write_text(f"id,label\n{written},a\n{written.replace('0', '1')},b\n")
    splits = load_image_dataset(str(table_file), image_column="id", label_column="label")
    assert len(splits.train) == 2


def test_k260_names_that_are_not_utf8_are_counted(tmp_path: Path) -> None:
    folder = class_folders(tmp_path, {"a": 2, "b": 2})
    os.rename(os.fsencode(folder / "a" / "0.png"), os.fsencode(folder / "a") + b"/caf\xe9.png")
    with pytest.raises(ValueError, match="has 1 files whose names are not UTF-8"):
        load_image_dataset(str(folder))


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

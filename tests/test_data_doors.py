"""Laws of the door for tables and files: what is named is read, and nothing else happens."""

import io
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pydicom
import pytest
from image_tables import class_folders, parquet, png, table, webdataset, write_dicom, write_image
from PIL import Image
from pydicom.data import get_testdata_file
from pydicom.pixels import get_decoder
from transformers.image_utils import load_image

from hf_dpmuon.data import load_image_dataset
from hf_dpmuon.data.dicom import ImageKindError, read_dicom
from hf_dpmuon.data.folders import OF_A_RUN, read_folder
from hf_dpmuon.data.images import decode, open_image
from hf_dpmuon.job import check_output_folder, described

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


KINDS = (
    "csv",
    "jsonl",
    "parquet",
    "tar",
    "classes",
    "metadata.jsonl",
    "metadata.parquet",
    "packed",
)
RECORDS = [{"file_name": f"images/{i}.png", "label": "ab"[i % 2]} for i in range(4)]


def written(parent: Path, name: str, kind: str, labels: str = "ab") -> Path:
    """A data set of one kind and two classes, called by the name; what is read of it."""
    folder = parent / name
    records = [{**record, "label": labels[i % 2]} for i, record in enumerate(RECORDS)]
    if kind == "classes":
        return class_folders(folder, {labels[0]: 2, labels[1]: 2})
    if kind in ("packed", "parquet"):  # `to_parquet` of `datasets` takes some names for addresses
        file = folder / f"train-{name}.parquet" if kind == "packed" else parent / f"{name}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        plain = parquet(parent / "plain", train=table(list(labels))) / "train.parquet"
        plain.rename(file)
        return folder if kind == "packed" else file
    if kind == "tar":
        samples = [{"png": png(i), "json": {"label": labels[i % 2]}} for i in range(4)]
        return webdataset(parent / f"{name}.tar", samples)
    at = folder if kind.startswith("metadata") else parent
    class_folders(at, {"images": 4})
    file = at / (kind if kind.startswith("metadata") else f"{name}.{kind}")
    if kind.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(records), file)
    elif kind == "csv":
        rows = [",".join(record.values()) for record in records]
        file.write_text("\n".join(["file_name,label", *rows]))
    else:
        file.write_text("\n".join(map(json.dumps, records)))
    return folder if kind.startswith("metadata") else file


@pytest.mark.parametrize("kind", KINDS)
def test_k214_nothing_is_written_when_local_data_are_read(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 214: a table of mode 0600 lay in a cache as 0644, later in one a killed process left."""
    source = written(tmp_path / "data", "x", kind)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    opened.clear()
    splits = load_image_dataset(str(source))
    assert [row[splits.image_column].size for row in splits.train]
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before
    assert opened == []


opened: list[object] = []  # to be written, by anything that Python opens


def _opens(
    event: str,
    arguments: tuple[object, ...],
    *,
    # bound here, for the hook outlives the modules
    opened: list[object] = opened,
    writing: int = os.O_WRONLY | os.O_RDWR | os.O_CREAT,
) -> None:
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & writing:
        opened.append(arguments[0])


sys.addaudithook(_opens)


@pytest.mark.parametrize("name", ["scan[1]", "a*b", "a?", "x::y", "{a,b}", "file: c"])
@pytest.mark.parametrize("kind", KINDS)
def test_k222_what_is_named_is_read(tmp_path: Path, kind: str, name: str) -> None:
    """Case 222: a name with a pattern in it led to another file, or was refused."""
    for other in ("scan1", "aXb", "aX", "a", "y", "c"):
        written(tmp_path, other, kind, labels="wz")
    splits = load_image_dataset(str(written(tmp_path, name, kind)))
    assert splits.label_names == ("a", "b")
    assert len(splits.train) in (2, 4)


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train-00000-of-00002", "train-00001-of-00002", "test"], {"train": 4, "test": 2}),
        (["train/0", "train/1", "test/0"], {"train": 4, "test": 2}),
        (["data/cohort_train", "data/cohort-val"], {"train": 2, "validation": 2}),
        (["x", "y"], {"train": 4}),
    ],
)
def test_the_names_of_parquet_files_say_their_splits(
    tmp_path: Path, names: list[str], splits: dict[str, int]
) -> None:
    for name in names:
        file = tmp_path / f"{name}.parquet"
        file.parent.mkdir(exist_ok=True)
        table(["a", "b"]).to_parquet(str(file))
    assert {n: len(rows) for n, rows in read_folder(tmp_path, None).splits.items()} == splits


@pytest.mark.parametrize("names", [["train", "y"], ["train_test"], ["test/train", "test/x"]])
def test_files_of_no_split_or_of_two_are_refused(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        file = tmp_path / f"{name}.parquet"
        file.parent.mkdir(exist_ok=True)
        table(["a", "b"]).to_parquet(str(file))
    with pytest.raises(ValueError, match="of which 1 name no split, or several"):
        read_folder(tmp_path, None)


def test_files_of_two_kinds_are_refused_with_counts(tmp_path: Path) -> None:
    parquet(tmp_path, train=table(["a", "b"]))
    write_image(tmp_path / "logo.png")
    with pytest.raises(ValueError, match=r"has 1 images beside 1 files that end in \.parquet;"):
        load_image_dataset(str(tmp_path))
    (tmp_path / "logo.png").unlink()
    webdataset(tmp_path / "train.tar", [{"png": png(1), "cls": 0}])
    with pytest.raises(ValueError, match=r"beside 2 files that end in \.parquet or \.tar;"):
        load_image_dataset(str(tmp_path))


def test_class_names_stored_in_parquet_are_those_of_its_rows(tmp_path: Path) -> None:
    names = datasets.ClassLabel(names=["zebra", "ape"])
    parquet(tmp_path, **{"train-0": table([1, 0], names), "train-1": table([0, 0], names)})
    splits = load_image_dataset(str(tmp_path))
    assert splits.label_names == ("zebra", "ape")
    assert splits.train["label"][:] == [1, 0, 0, 0]
    parquet(tmp_path, **{"train-1": table([0, 0], datasets.ClassLabel(names=["ape", "zebra"]))})
    with pytest.raises(ValueError, match="other columns, types or class names"):
        load_image_dataset(str(tmp_path))


def test_parquet_of_pandas_with_categories_and_paths_is_read(tmp_path: Path) -> None:
    class_folders(tmp_path, {"images": 4})
    frame = pd.DataFrame(RECORDS).astype({"label": "category"})
    frame[["label", "file_name"]].to_parquet(tmp_path / "x.parquet")
    splits = load_image_dataset(str(tmp_path / "x.parquet"))
    assert splits.label_names == ("a", "b")
    assert [int(np.asarray(row["image"]).max()) for row in splits.train] == [0, 10, 20, 30]


def test_files_too_large_for_the_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=100))
    with pytest.raises(ValueError, match=r"of memory to read, of which 0[.]0 GiB are free"):
        load_image_dataset(str(written(tmp_path, "x", "tar")))


def test_a_folder_that_cannot_be_listed_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = class_folders(tmp_path, {"a": 1, "b": 1, "c": 1})
    scan = os.scandir

    def closed(path: str) -> Any:
        if str(path).endswith("c"):
            raise PermissionError(13, "c")
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(ValueError, match=r"1 folders that cannot be listed \(PermissionError\)"):
        load_image_dataset(str(folder))


@pytest.mark.parametrize("mark", sorted(OF_A_RUN))
@pytest.mark.parametrize("at", ["out", "train/out", "a/checkpoint-5"])
def test_k231_a_training_run_inside_the_data_is_no_class(
    tmp_path: Path, mark: str, at: str
) -> None:
    """Case 231: the pictures of a run became a class of the next."""
    folder = class_folders(tmp_path, {"a": 2, "b": 2, f"{at}/figures": 1})
    write_image(folder / at / "confusion.png")
    (folder / at / mark).write_text("{}")
    splits = load_image_dataset(str(folder))
    assert splits.label_names == ("a", "b")
    assert any("1 folders of training runs" in note for note in splits.notes)
    with pytest.raises(ValueError, match="without files other than 1 folders of training runs"):
        load_image_dataset(str(folder / at))


def test_metadata_of_two_forms_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, "x", "metadata.jsonl")
    (folder / "metadata.csv").write_text("file_name,label\nimages/0.png,a\n")
    with pytest.raises(ValueError, match="metadata in 2 forms"):
        load_image_dataset(str(folder))


def test_every_file_that_became_no_row_is_counted(tmp_path: Path) -> None:
    for kind in ("csv", "metadata.jsonl", "packed"):
        folder = tmp_path / kind
        written(folder if kind == "csv" else tmp_path, kind, kind)
        (folder / "notes.txt").write_text("x")
        notes = load_image_dataset(str(folder)).notes
        assert any("1 files of the folder" in note and "1 .txt" in note for note in notes), notes


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
    levels = np.asarray(read_dicom(str(get_testdata_file("JPGExtended.dcm")), None))
    assert 0 <= levels.min() < levels.max() <= 1


@pytest.mark.parametrize("left", [(), ("pillow",)], ids=["no decoder", "one that cannot"])
@pytest.mark.parametrize("name", ["JPGExtended.dcm", "JPEG2000.dcm"])
def test_a_missing_decoder_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, left: tuple[str, ...]
) -> None:
    """As without pylibjpeg: pydicom is there, and Pillow decodes some of the compressed files."""
    source = get_testdata_file(name)
    decoder = get_decoder(pydicom.dcmread(source).file_meta.TransferSyntaxUID)
    has = {plugin: decode for plugin, decode in decoder._available.items() if plugin in left}
    monkeypatch.setattr(decoder, "_available", has)
    if name == "JPEG2000.dcm" and left:
        assert read_dicom(source, None).size == (256, 1024)
        return
    class_folders(tmp_path, {"a": 1, "b": 1})
    shutil.copy(source, tmp_path / "a" / "scan-of-doe.dcm")
    with pytest.raises(ValueError, match=r"1 of 3 images .*DICOM in JPEG .*pip install") as caught:
        load_image_dataset(str(tmp_path))
    assert "doe" not in str(caught.value)


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

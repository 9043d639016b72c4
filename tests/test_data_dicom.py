"""Laws of DICOM: grey levels keep their order and their scale, and nothing else leaves the file."""

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from image_tables import SECRET, write_dicom, write_image
from pydicom.data import get_testdata_file

from hf_dpmuon.data import ImageExamples, ImageFormat, build_transforms, load_image_dataset
from hf_dpmuon.data.dicom import ImageKindError, read_dicom

HOUNSFIELD = np.linspace(-1000, 3000, 4096).astype(np.int16).reshape(64, 64)


def levels(
    folder: Path, pixels: np.ndarray, *, window: tuple[float, float] | None = None, **tags: Any
) -> np.ndarray:
    """Write pixels, and return them as they are read."""
    image = read_dicom(str(write_dicom(folder / "x.dcm", pixels, **tags)), window)
    assert image.mode == "F"
    return np.asarray(image)


WINDOW = {"WindowCenter": 1000, "WindowWidth": 4000}


@pytest.mark.parametrize("window", [None, (1000.0, 4000.0)])
@pytest.mark.parametrize("tags", [{}, WINDOW], ids=["plain", "windowed"])
def test_a_signed_ramp_stays_a_ramp(
    tmp_path: Path, window: tuple[float, float] | None, tags: dict[str, int]
) -> None:
    """Case 94: what is below 0 neither wraps nor clips."""
    seen = levels(tmp_path, HOUNSFIELD, window=window, **tags).ravel()
    assert (np.diff(seen) >= 0).all()
    assert len(np.unique(seen)) > 200
    assert 0 <= seen.min() < seen.max() <= 1


def test_black_and_white_of_a_declared_window_are_its_ends(tmp_path: Path) -> None:
    pixels = np.array([[-2000, -160, 40, 240, 3000]], dtype=np.int16)
    seen = levels(tmp_path, pixels, window=(40, 400), **WINDOW)  # the file's own is not used
    np.testing.assert_allclose(seen, [[0, 0, 0.5, 1, 1]], atol=1e-6)


def test_a_declared_window_is_in_the_units_of_the_rescaled_file(tmp_path: Path) -> None:
    stored = np.array([[0, 1024, 1064, 2048]], dtype=np.uint16)
    seen = levels(
        tmp_path, stored, window=(40, 400), BitsStored=12, RescaleSlope=1, RescaleIntercept=-1024
    )
    np.testing.assert_allclose(seen, [[0, 0.4, 0.5, 1]], atol=1e-6)


def test_the_windows_of_a_file_are_the_standard_s(tmp_path: Path) -> None:
    """PS3.3 C.11.2.1.2.1: the first of several windows, with its half and its one."""
    pixels = np.arange(0, 4096, 64, dtype=np.uint16).reshape(8, 8)
    tags = {"BitsStored": 12, "WindowCenter": [2048, 9], "WindowWidth": [1025, 9]}
    seen = levels(tmp_path, pixels, **tags)
    wanted = np.clip((pixels - (2048 - 0.5)) / (1025 - 1) + 0.5, 0, 1)
    np.testing.assert_allclose(seen, wanted, atol=1e-6)


def test_without_a_window_the_scale_is_that_of_the_stored_bits(tmp_path: Path) -> None:
    """So two images keep their relative brightness, whatever is on them."""
    for value in (0, 100, 4095):
        seen = levels(tmp_path, np.full((4, 4), value, dtype=np.uint16), BitsStored=12)
        np.testing.assert_allclose(seen, value / 4095, atol=1e-6)


@pytest.mark.parametrize("window", [None, (500.0, 800.0)])
@pytest.mark.parametrize("tags", [{}, WINDOW, {"RescaleSlope": -2, "RescaleIntercept": 7}])
def test_monochrome1_is_the_negative(
    tmp_path: Path, window: tuple[float, float] | None, tags: dict[str, int]
) -> None:
    one, two = (
        levels(tmp_path, HOUNSFIELD, window=window, PhotometricInterpretation=kind, **tags)
        for kind in ("MONOCHROME1", "MONOCHROME2")
    )
    np.testing.assert_allclose(one, 1 - two, atol=1e-6)


@pytest.mark.parametrize("tags", [{}, WINDOW, {"WindowCenter": 0, "WindowWidth": 1}])
def test_a_constant_image_is_finite(tmp_path: Path, tags: dict[str, int]) -> None:
    with np.errstate(all="raise"):
        seen = levels(tmp_path, np.full((4, 4), -5, dtype=np.int16), **tags)
    assert np.isfinite(seen).all()
    assert np.ptp(seen) == 0


@pytest.mark.parametrize(
    ("name", "mode", "size"),
    [
        ("CT_small.dcm", "F", (128, 128)),
        ("MR_small_RLE.dcm", "F", (64, 64)),
        ("JPEG2000.dcm", "F", (256, 1024)),
        ("SC_rgb_rle_16bit.dcm", "RGB", (100, 100)),
        ("SC_ybr_full_422_uncompressed.dcm", "RGB", (100, 100)),
        ("examples_palette.dcm", "RGB", (800, 350)),
    ],
)
def test_files_of_real_devices_are_read(name: str, mode: str, size: tuple[int, int]) -> None:
    image = read_dicom(get_testdata_file(name, download=False), None)
    assert (image.mode, image.size) == (mode, size)
    assert len(np.unique(np.asarray(image))) > 2


def test_encodings_of_one_image_agree() -> None:
    names = ("MR_small", "MR_small_RLE", "MR_small_bigendian", "MR_small_implicit")
    first, *others = (
        np.asarray(read_dicom(get_testdata_file(f"{name}.dcm", download=False), None))
        for name in names
    )
    for other in others:
        np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("SC_rgb_rle_2frame.dcm", "DICOM of several frames"),
        ("rtplan.dcm", "DICOM without integer pixels"),
    ],
)
def test_kinds_that_are_not_supported_are_named(name: str, message: str) -> None:
    with pytest.raises(ImageKindError, match=message):
        read_dicom(get_testdata_file(name, download=False), None)


# As a data set


def ramp(shift: int) -> np.ndarray:
    return np.roll(HOUNSFIELD, shift)


def test_a_folder_of_dicom_files_of_any_name_is_read(tmp_path: Path) -> None:
    """Case 92: three DICOM files and a PNG, and one file that is neither."""
    write_dicom(tmp_path / "ill" / "a.dcm", ramp(0))
    write_dicom(tmp_path / "ill" / "1.2.840.113619.2", ramp(1))
    write_dicom(tmp_path / "well" / SECRET, ramp(2))
    write_image(tmp_path / "well" / "b.png", level=9)
    (tmp_path / "well" / f"notes.{SECRET}").write_text(SECRET)
    splits = load_image_dataset(str(tmp_path))
    assert splits.label_names == ("ill", "well")
    assert splits.train["label"][:] == [0, 0, 1, 1]
    assert any("1 files of the folder became no example" in note for note in splits.notes)
    assert SECRET not in str(splits.notes)
    assert set(splits.train.column_names) == {"image", "label"}
    examples = ImageExamples(
        splits.train,
        image_column=splits.image_column,
        label_column=splits.label_column,
        transform=build_transforms(
            ImageFormat(64, 64, 3, (0.0,) * 3, (1.0,) * 3, "bicubic"), train=False
        ),
    )
    pixels = examples[1]["pixel_values"]
    assert len(pixels[0].unique()) > 200
    assert 0 <= pixels.min() < pixels.max() <= 1


def test_tables_may_name_dicom_files(tmp_path: Path) -> None:
    for i in range(3):
        write_dicom(tmp_path / "images" / f"{i}.dcm", ramp(i))
    rows = "\n".join(f"images/{i}.dcm,{i % 2},{i // 2}" for i in range(3))
    (tmp_path / "cohort.csv").write_text(f"file,label,patient_id\n{rows}\n")
    splits = load_image_dataset(
        str(tmp_path), privacy_unit_column="patient_id", dicom_window=(0, 100)
    )
    assert splits.units is not None
    assert [len(rows) for rows in splits.units.rows_of_unit] == [2, 1]
    seen = np.asarray(splits.train[0]["file"])
    assert seen.min() == 0
    assert seen.max() == 1  # the declared window reaches the rows

    (tmp_path / "cohort.csv").unlink()
    (tmp_path / "metadata.csv").write_text(f"file_name,label,patient_id\n{rows}\n")
    splits = load_image_dataset(str(tmp_path))
    assert splits.image_column == "image"
    assert splits.train["label"][:] == [0, 1, 0]
    assert not any("ignored" in note for note in splits.notes)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_dicom_files_with_metadata_of_another_form_are_read(tmp_path: Path, form: str) -> None:
    rows = [{"file_name": f"{i}.dcm", "label": i % 2} for i in range(3)]
    for i, row in enumerate(rows):
        write_dicom(tmp_path / str(row["file_name"]), ramp(i))
    if form == "jsonl":
        (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    else:
        pd.DataFrame(rows).to_parquet(tmp_path / "metadata.parquet")
    splits = load_image_dataset(str(tmp_path))
    assert (splits.image_column, splits.train["label"][:]) == ("image", [0, 1, 0])


def test_several_frames_are_refused_by_name_and_without_the_patient(tmp_path: Path) -> None:
    write_dicom(tmp_path / "ill" / f"{SECRET}.dcm", np.stack([ramp(0), ramp(1)]))
    write_dicom(tmp_path / "well" / "a.dcm", ramp(2))
    with pytest.raises(ValueError, match=r"1 DICOM of several frames.*first rows: 0") as caught:
        load_image_dataset(str(tmp_path))
    assert SECRET not in str(caught.value)


def test_headers_with_errors_say_nothing_of_the_patient(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for i, name in enumerate(("ill", "well")):
        file = write_dicom(tmp_path / name / "x.dcm", ramp(i))
        content = file.read_bytes()
        file.write_bytes(content.replace(b"19500101", SECRET.encode()[:8]))  # no date at all
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.DEBUG):
        warnings.simplefilter("always")
        load_image_dataset(str(tmp_path))
    said = caplog.text + "".join(str(warning.message) for warning in caught)
    assert SECRET[:8] not in said


@pytest.mark.parametrize("kept", [0, 1, 128, 131, 132, 200, 400, 700, -1, -9000])
def test_a_file_that_is_cut_short_is_called_so(tmp_path: Path, kept: int) -> None:
    for i, name in enumerate(("ill", "well")):
        write_dicom(tmp_path / name / "x.dcm", ramp(i))
    file = tmp_path / "ill" / "x.dcm"
    file.write_bytes(file.read_bytes()[:kept])
    message = r"1 DICOM .*(cut short|without its preamble).*first rows: 0"
    with pytest.raises(ValueError, match=message) as caught:
        load_image_dataset(str(tmp_path))
    assert SECRET not in str(caught.value)


def test_a_file_without_its_preamble_is_called_so(tmp_path: Path) -> None:
    for i, name in enumerate(("ill", "well")):
        write_dicom(tmp_path / name / "x.dcm", ramp(i))
    file = tmp_path / "ill" / "x.dcm"
    file.write_bytes(file.read_bytes()[132:])
    with pytest.raises(ValueError, match="1 DICOM without its preamble"):
        load_image_dataset(str(tmp_path))


@pytest.mark.parametrize("window", [(40.0, 0.0), (40.0, -1.0)])
def test_a_window_without_width_is_refused(window: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"dicom_window=\(40\.0, .*a width > 0"):
        load_image_dataset("builtin:digits", dicom_window=window)


def test_without_pydicom_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i, name in enumerate(("ill", "well")):
        write_dicom(tmp_path / name / "x.dcm", ramp(i))
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(ValueError, match=r"pip install 'hf-dpmuon\[dicom\]'"):
        load_image_dataset(str(tmp_path), on_corrupt="drop")

"""Small data sets that tests write: folders, Parquet files, tars and DICOM files."""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from PIL import Image

_CACHE = tempfile.TemporaryDirectory()
datasets.config.HF_DATASETS_CACHE = Path(_CACHE.name)  # so that nothing of another run is found

STRING = datasets.Value("string")
SECRET = "doe-jane-1950"  # stands for every patient's id; it must show up nowhere


def write_image(path: Path, *, level: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8), level).save(path)
    return path


def class_folders(root: Path, counts: dict[str, int]) -> Path:
    """Write `counts[folder]` images into each folder, every image of a folder of another level."""
    for folder, count in counts.items():
        for i in range(count):
            write_image(root / folder / f"{i}.png", level=10 * i)
    return root


def table(labels: list[Any], feature: Any = STRING, **columns: list[Any]) -> datasets.Dataset:
    """A split of distinct images with labels and other columns."""
    images = [Image.new("L", (4, 4), i) for i in range(len(labels))]
    features = datasets.Features({"image": datasets.Image(), "label": feature})
    split = datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)
    for name, values in columns.items():
        split = split.add_column(name, values)
    return split


def parquet(folder: Path, **splits: datasets.Dataset) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, split in splits.items():
        split.to_parquet(str(folder / f"{name}.parquet"))
    return folder


def png(level: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (8, 8), level).save(buffer, format="PNG")
    return buffer.getvalue()


def webdataset(
    path: Path, samples: Iterable[Mapping[str, Any]], *, keys: list[str] | None = None
) -> Path:
    """Write one sample after the other: bytes as they are, anything else as JSON text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for i, sample in enumerate(samples):
            for suffix, value in sample.items():
                content = value if isinstance(value, bytes) else json.dumps(value).encode()
                member = tarfile.TarInfo(f"{keys[i] if keys else f'{i:04d}'}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


def write_dicom(path: Path, pixels: np.ndarray, **tags: Any) -> Path:
    """Write greyscale pixels, (rows, columns) or (frames, rows, columns), with a patient's name."""
    import pydicom
    from pydicom.dataset import FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    file = pydicom.Dataset()
    file.file_meta = FileMetaDataset()
    file.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    file.file_meta.MediaStorageSOPClassUID = file.SOPClassUID = CTImageStorage
    file.file_meta.MediaStorageSOPInstanceUID = file.SOPInstanceUID = generate_uid(
        entropy_srcs=[path.name]
    )
    file.PatientID = file.PatientName = SECRET
    file.PatientBirthDate = "19500101"
    file.Rows, file.Columns = pixels.shape[-2:]
    if pixels.ndim == 3:
        file.NumberOfFrames = len(pixels)
    file.SamplesPerPixel = 1
    file.PhotometricInterpretation = "MONOCHROME2"
    file.BitsAllocated = file.BitsStored = 8 * pixels.dtype.itemsize
    file.PixelRepresentation = int(pixels.dtype.kind == "i")
    for name, value in tags.items():
        setattr(file, name, value)
    file.HighBit = file.BitsStored - 1
    file.PixelData = pixels.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    file.save_as(path, enforce_file_format=True)
    return path

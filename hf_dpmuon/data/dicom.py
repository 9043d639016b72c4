"""A DICOM file becomes an image whose grey levels mean the same in every file.

Receives a file and, if the user declared one, a window. Returns a Pillow image: mode F with
intensities in [0, 1] for greyscale, RGB for colour.

Guarantees:
    * The scale comes from the declared window, else from the file's own window, else from the
      range of its stored bits; never from the least and largest pixel of an image.
    * Nothing wraps: what lies outside the window is black or white. White is bright in both
      greyscale conventions.
    * Only what describes pixels is used: no name, date or id leaves the file, not in a warning.

Needs pydicom: `pip install 'hf-dpmuon[dicom]'`.
"""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    import pydicom

__all__ = [
    "DICOM_SUFFIXES",
    "ImageKindError",
    "Window",
    "is_dicom",
    "is_dicom_file",
    "read_dicom",
]

Window = tuple[float, float]  # center and width, in the units of the file after its rescaling

DICOM_SUFFIXES = (".dcm", ".dicom")
MAGIC = slice(128, 132)
SCALES = (
    *("WindowCenter", "WindowWidth", "VOILUTSequence", "VOILUTFunction"),
    *("RescaleSlope", "RescaleIntercept", "ModalityLUTSequence"),
)
INSTALL = "to be decoded it needs pip install 'hf-dpmuon[dicom]'"
GREYSCALE = ("MONOCHROME1", "MONOCHROME2")


class ImageKindError(ValueError):
    """An image of a kind that is not supported; the message holds nothing of the file."""


def is_dicom(head: bytes) -> bool:
    """Whether a file that begins so is DICOM."""
    return head[MAGIC] == b"DICM"


def is_dicom_file(path: str | Path) -> bool:
    """Whether a file can be opened and is DICOM, whatever its name."""
    try:
        with open(path, "rb") as file:
            return is_dicom(file.read(MAGIC.stop))
    except OSError:
        return False


def read_dicom(source: str | BinaryIO, window: Window | None) -> Image.Image:
    """Return the only frame of a DICOM file.

    Args:
        source: A path or an open file.
        window: Center and width of the grey levels that are told apart: black is
            `center - width / 2` and below, white is `center + width / 2` and above.

    Raises:
        ImageKindError: It is damaged or no single greyscale or colour frame, or no decoder is
            installed.
        ImportError: pydicom is missing.
    """
    try:
        import pydicom
    except ImportError as error:
        raise ImportError(
            "DICOM files need pydicom; install it with pip install 'hf-dpmuon[dicom]'."
        ) from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they quote values of the header
        try:
            file = pydicom.dcmread(source)
            _drop_empty(file)
            _refuse_unsupported(file)
            pixels = pydicom.pixels.pixel_array(file)
        except ImageKindError:
            raise
        except Exception as error:  # pydicom and its decoders raise anything, and quote the header
            if isinstance(error, RuntimeError) and "plugin" in str(error):
                syntax = file.file_meta.TransferSyntaxUID
                raise ImageKindError(f"DICOM in {syntax.name}; {INSTALL}") from None
            raise ImageKindError("DICOM that is damaged or cut short") from None
        if file.PhotometricInterpretation in GREYSCALE:
            return Image.fromarray(_grey_levels(pixels, file, window))
        return Image.fromarray(_colours(pixels, file))


def _drop_empty(file: "pydicom.Dataset") -> None:
    """Make tags without a value absent, and refuse windows and scales that mean nothing."""
    for tag in SCALES:
        if tag in file and file[tag].value in (None, "", []):
            del file[tag]
    for tag, other in (("WindowWidth", "WindowCenter"), ("WindowCenter", "WindowWidth")):
        if tag in file and other not in file:
            raise ImageKindError(f"DICOM with {tag} but without {other}; declare dicom_window")
    if "WindowWidth" in file:
        width = file.WindowWidth
        if not float(width if isinstance(width, float | int) else width[0]) > 0:
            raise ImageKindError("DICOM with a WindowWidth not above 0; declare dicom_window")
    if "RescaleSlope" in file or "RescaleIntercept" in file:
        file.RescaleSlope = file.get("RescaleSlope", 1)
        file.RescaleIntercept = file.get("RescaleIntercept", 0)
        if not float(file.RescaleSlope):
            raise ImageKindError("DICOM with a RescaleSlope of 0, which makes every level equal")


def _refuse_unsupported(file: "pydicom.Dataset") -> None:
    from pydicom.pixels import get_decoder

    if "PixelData" not in file:
        raise ImageKindError("DICOM without integer pixels, or cut short before them")
    if int(file.get("NumberOfFrames") or 1) > 1:
        raise ImageKindError("DICOM of several frames, each of which needs a file of its own")
    syntax = file.file_meta.TransferSyntaxUID
    if syntax.is_compressed and not get_decoder(syntax).is_available:
        raise ImageKindError(f"DICOM in {syntax.name}; {INSTALL}")


def _grey_levels(pixels: Any, file: "pydicom.Dataset", window: Window | None) -> Any:
    """Return float32 of the shape of `pixels`, in [0, 1]."""
    from pydicom.pixels import apply_modality_lut, apply_voi, apply_windowing

    values = apply_modality_lut(pixels, file)
    black, white = _stored_range(file)
    if window is not None:
        center, width = window
        black, white = center - width / 2, center + width / 2
    elif "WindowWidth" in file:
        values = apply_windowing(values, file)  # onto the stored range
    elif "VOILUTSequence" in file:
        entries, _, bits = file.VOILUTSequence[0].LUTDescriptor
        if (entries or 2**16) > 2**bits:
            raise ImageKindError(
                "DICOM with a VOI table longer than its bits; declare dicom_window"
            )
        values = apply_voi(values.astype(np.int64), file)
        black, white = 0, 2**bits - 1
    else:
        black, white = sorted((black, white))
    levels = np.clip((values.astype(np.float64) - black) / (white - black), 0, 1)
    if file.PhotometricInterpretation == "MONOCHROME1":
        levels = 1 - levels
    return levels.astype(np.float32)


def _stored_range(file: "pydicom.Dataset") -> tuple[float, float]:
    """Return what the least and the largest stored number mean after the rescaling."""
    if "ModalityLUTSequence" in file:
        return 0, 2 ** file.ModalityLUTSequence[0].LUTDescriptor[2] - 1
    bits = file.BitsStored
    stored = (
        (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if file.PixelRepresentation else (0, 2**bits - 1)
    )
    slope, intercept = file.get("RescaleSlope", 1), file.get("RescaleIntercept", 0)
    return float(stored[0] * slope + intercept), float(stored[1] * slope + intercept)


def _colours(pixels: Any, file: "pydicom.Dataset") -> Any:
    """Return uint8 of shape (H, W, 3)."""
    from pydicom.pixels import apply_color_lut

    bits = file.BitsStored
    if file.PhotometricInterpretation == "PALETTE COLOR":
        pixels = apply_color_lut(pixels, file)
        bits = 8 * pixels.dtype.itemsize
    if pixels.ndim != 3 or pixels.shape[-1] != 3 or pixels.dtype.kind != "u":
        raise ImageKindError(f"DICOM in the colours {file.PhotometricInterpretation}")
    return np.round(pixels / (2**bits - 1) * 255).astype(np.uint8)

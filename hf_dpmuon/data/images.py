"""A stored image becomes the normalised tensor that a model wants.

Receives the bytes or the path of an image and an `ImageFormat`. Returns Pillow images and fp32
tensors.

Guarantees:
    * Deep greyscale keeps its levels: it is scaled by a constant, or by a declared window.
    * Augmentation draws from the generator of its own example, never from a global one.
"""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from hf_dpmuon.data.dicom import (
    DICOM_SUFFIXES,
    ImageKindError,
    Window,
    is_dicom,
    is_dicom_file,
    read_dicom,
)

__all__ = ["ImageFormat", "ImageTransform", "build_transforms", "decode", "open_image", "open_rows"]

ImageTransform: TypeAlias = Callable[[Image.Image, torch.Generator | None], Tensor]

CROP_PADDING = 1 / 8  # of the side: the 4 pixels of 32 that are usual for CIFAR


@dataclass(frozen=True)
class ImageFormat:
    """What a model wants to see.

    Attributes:
        height: Rows of pixels.
        width: Columns of pixels.
        num_channels: 1 for greyscale, 3 for RGB.
        mean: Per channel, on intensities in [0, 1].
        std: Per channel, on intensities in [0, 1].
        interpolation: A resampling filter of Pillow in lower case, such as "bicubic".
    """

    height: int
    width: int
    num_channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str

    def __post_init__(self) -> None:
        if self.num_channels not in (1, 3):
            raise ValueError(
                f"num_channels={self.num_channels} is not supported; use a model for greyscale (1) "
                "or RGB (3) images."
            )
        if not len(self.mean) == len(self.std) == self.num_channels:
            raise ValueError(
                f"the model takes {self.num_channels} channels but its image processor normalises "
                f"{len(self.mean)} means and {len(self.std)} stds; give the processor one of each "
                "per channel."
            )
        if self.interpolation.upper() not in Image.Resampling.__members__:
            raise ValueError(
                f"interpolation={self.interpolation!r} is unknown; use one of "
                f"{', '.join(name.lower() for name in Image.Resampling.__members__)}."
            )


def build_transforms(
    image_format: ImageFormat,
    *,
    train: bool,
    random_flip: bool = True,
    random_crop: bool = True,
) -> ImageTransform:
    """Return a function from an image and a generator to a normalised (C, H, W) fp32 tensor.

    The image is brought to the channels of the model (transparency is left out, 16-bit greyscale is
    divided by 65535), resized to its height and width without keeping the aspect
    ratio, optionally augmented, and normalised. Without a generator nothing is drawn, so the
    same function serves evaluation.

    Args:
        image_format: What the model wants.
        train: Whether to augment at all.
        random_flip: Mirror left and right with probability 1/2.
        random_crop: Pad by an eighth of the side with black, and crop back at a random place.
    """
    return partial(
        _transform,
        image_format=image_format,
        random_flip=train and random_flip,
        random_crop=train and random_crop,
    )


def open_image(stored: Mapping[str, Any] | None, window: Window | None) -> Image.Image:
    """Return an image from its `bytes`, or from its `path`, as Pillow or pydicom read it.

    Raises:
        Exception: It cannot be read; decoders raise whatever they like on bad bytes.
    """
    if stored is None or (stored["bytes"] is None and stored["path"] is None):
        raise ImageKindError("no image at all")
    content, path = stored["bytes"], stored["path"]
    if content is None and "://" in path:
        raise ImageKindError(
            "an address on a network, to be copied here first, as a server would see who is drawn"
        )
    if content is not None and is_dicom(content):
        return read_dicom(io.BytesIO(content), window)
    if content is None and path is not None and is_dicom_file(path):
        return read_dicom(path, window)
    try:
        image = Image.open(path if content is None else io.BytesIO(content))
    except UnidentifiedImageError:
        if str(path).lower().endswith(DICOM_SUFFIXES):
            raise ImageKindError(
                "DICOM without its preamble, which must be written before it is read"
            ) from None
        raise
    with image:
        # A camera's MPO is one photograph, with copies for its display.
        if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
            raise ImageKindError(
                f"{image.format} of several frames, each of which needs a file of its own"
            )
        image.load()
        return ImageOps.exif_transpose(image)


def open_rows(
    rows: dict[str, list[Any]], *, image_column: str, window: Window | None
) -> dict[str, list[Any]]:
    """Return rows with their images opened; what `datasets` calls when rows are asked for."""
    if image_column not in rows:
        return rows
    return {**rows, image_column: [open_image(stored, window) for stored in rows[image_column]]}


def decode(image: Image.Image) -> Image.Image:
    """Return the image in mode L, RGB, or F with intensities in [0, 1].

    Deep greyscale is scaled by a constant, so that two images keep their relative brightness;
    `Image.convert` would clip it at 255.
    """
    if image.mode.startswith("I") or image.mode == "F":
        scale = 1 if image.mode == "F" else 65535
        intensities = np.asarray(image).astype(np.float32) / np.float32(scale)
        if not (intensities.min() >= 0 and intensities.max() <= 1):
            raise ImageKindError(
                f"intensities of a {image.mode} image outside its range, to be converted to "
                "unsigned 16-bit with a declared window first"
            )
        return Image.fromarray(intensities)
    # Transparency is left out, as `pipeline` and the lines of a card leave it out.
    return image.convert("L" if image.mode in ("1", "L", "LA", "La") else "RGB")


def _transform(
    image: Image.Image,
    generator: torch.Generator | None,
    *,
    image_format: ImageFormat,
    random_flip: bool,
    random_crop: bool,
) -> Tensor:
    height, width = image_format.height, image_format.width
    image = decode(image)
    if image.mode == "RGB" and image_format.num_channels == 1:
        image = image.convert("L")
    image = image.resize((width, height), Image.Resampling[image_format.interpolation.upper()])
    pixels = torch.from_numpy(np.array(image, dtype=np.float32))
    pixels = pixels.clamp(0, 1) if image.mode == "F" else pixels / 255
    pixels = pixels.permute(2, 0, 1) if image.mode == "RGB" else pixels[None]
    pixels = pixels.expand(image_format.num_channels, height, width)

    if generator is not None and random_flip and torch.rand((), generator=generator) < 0.5:
        pixels = pixels.flip(-1)
    if generator is not None and random_crop:
        pad_h, pad_w = int(height * CROP_PADDING), int(width * CROP_PADDING)
        top = int(torch.randint(2 * pad_h + 1, (), generator=generator))
        left = int(torch.randint(2 * pad_w + 1, (), generator=generator))
        padded = F.pad(pixels, (pad_w, pad_w, pad_h, pad_h))
        pixels = padded[:, top : top + height, left : left + width]

    mean, std = torch.tensor(image_format.mean), torch.tensor(image_format.std)
    return (pixels - mean[:, None, None]) / std[:, None, None]

"""A Hub or local image dataset becomes checked, model-ready examples.

Receives the name of a data set and the `ImageFormat` that a model wants. Returns the rows of
each split, their class names, and the tensors of single examples and batches.

Guarantees:
    * Every row of a returned split was decoded once and has a label in `range(len(label_names))`,
      so the number of rows is fixed before any sampling rate is computed from it.
    * A row is never replaced by another one: an unreadable image is refused, dropped before the
      count when told to, or raises.
    * Augmentation draws from the generator of its own example, never from a global one.
    * Only pixels and labels reach a batch; other columns (paths, patient ids) stay in the table.

`ImageSplits.notes` counts rows of private data. It is for the local console, not for a model card.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from tqdm.auto import tqdm

if TYPE_CHECKING:
    import datasets

__all__ = [
    "ImageFormat",
    "ImageSplits",
    "load_image_dataset",
    "build_transforms",
    "ImageExamples",
    "collate",
]

ImageTransform: TypeAlias = Callable[[Image.Image, torch.Generator | None], Tensor]

CROP_PADDING = 1 / 8  # of the side: the 4 pixels of 32 that are usual for CIFAR
ROWS_SHOWN = 5  # row numbers that a message names
EVALUATION_SPLITS = ("validation", "test")  # looked for in this order when none is named
LABEL_COLUMNS = ("label", "labels")


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


@dataclass(frozen=True)
class ImageSplits:
    """Checked rows, and what was found out about them.

    Attributes:
        train: Rows to train on.
        evaluation: Rows to evaluate on, if the data set has any.
        label_names: Class names by label.
        image_column: Name of the column of images.
        label_column: Name of the column of labels, ints in `range(len(label_names))`.
        notes: What a user should know, for the local console only.
    """

    train: "datasets.Dataset"
    evaluation: "datasets.Dataset | None"
    label_names: tuple[str, ...]
    image_column: str
    label_column: str
    notes: tuple[str, ...]


def load_image_dataset(
    name_or_path: str,
    *,
    config_name: str | None = None,
    revision: str | None = None,
    train_split: str = "train",
    eval_split: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    on_corrupt: Literal["refuse", "drop"] = "refuse",
) -> ImageSplits:
    """Load a data set and check every image and label of it.

    Args:
        name_or_path: One of
            * a Hub id;
            * a folder of class folders, with or without a folder per split above them, or with a
              `metadata.csv` beside the images;
            * a parquet file, or a folder of them;
            * a CSV file with a column of image paths relative to it, or a folder of such files:
              a single one is the train split, otherwise each is the split of its own name;
            * `builtin:digits`: the handwritten digits of scikit-learn.
        config_name: Configuration of a Hub data set.
        revision: Branch, tag or commit of a Hub data set.
        train_split: Split to train on.
        eval_split: Split to evaluate on; by default "validation", else "test", else none.
        image_column: Found by its type when not named.
        label_column: Found by its type, or by the name "label" or "labels", when not named. One
            class per row: a `ClassLabel`, ints or strings.
        on_corrupt: Whether unreadable images are refused, or dropped before rows are counted.

    Raises:
        ValueError: The data set cannot be found, a column is missing or ambiguous, a label is
            missing or out of range, an image cannot be read, or there is nothing to learn.
    """
    if on_corrupt not in ("refuse", "drop"):
        raise ValueError(f"on_corrupt={on_corrupt!r} is unknown; use 'refuse' or 'drop'.")
    splits, notes = _read_splits(name_or_path, config_name=config_name, revision=revision)
    if eval_split is None:
        eval_split = next(
            (name for name in EVALUATION_SPLITS if name in splits and name != train_split), None
        )
        notes.append(
            f"evaluating on the split {eval_split!r}"
            if eval_split
            else "the data set has no evaluation split"
        )
    elif eval_split == train_split:
        raise ValueError(
            f"eval_split={eval_split!r} is also the train split; name a split that is not trained "
            "on, or none."
        )
    names = [train_split] if eval_split is None else [train_split, eval_split]
    for name in names:
        if name not in splits:
            raise ValueError(f"split {name!r} is missing; choose from {', '.join(splits)}.")
        if len(splits[name]) == 0:
            raise ValueError(f"split {name!r} has no rows; choose from {', '.join(splits)}.")

    image_column = _find_image_column(splits[train_split], image_column)
    label_column = _find_label_column(splits[train_split], label_column, image_column)
    chosen = {name: _cast_images(splits[name], image_column) for name in names}
    chosen, label_names = _number_labels(chosen, label_column)
    for name in names:
        chosen[name], dropped = _readable(
            chosen[name], image_column, split_name=name, on_corrupt=on_corrupt
        )
        notes += dropped

    present = {name: set(_column(chosen[name], label_column)) for name in names}
    if len(present[train_split]) < 2:
        raise ValueError(
            f"split {train_split!r} holds one class only; training needs at least two classes in "
            f"the column {label_column!r}."
        )
    unseen = sorted(set().union(*present.values()) - present[train_split])
    if unseen:
        notes.append(
            f"{len(unseen)} classes have no training image and cannot be learnt: "
            + ", ".join(label_names[label] for label in unseen)
        )
    return ImageSplits(
        train=chosen[train_split],
        evaluation=None if eval_split is None else chosen[eval_split],
        label_names=label_names,
        image_column=image_column,
        label_column=label_column,
        notes=tuple(notes),
    )


def build_transforms(
    image_format: ImageFormat,
    *,
    train: bool,
    random_flip: bool = True,
    random_crop: bool = True,
) -> ImageTransform:
    """Return a function from an image and a generator to a normalised (C, H, W) fp32 tensor.

    The image is brought to the channels of the model (transparent pixels lie on black, 16-bit
    greyscale is divided by 65535), resized to its height and width without keeping the aspect
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


class ImageExamples(TorchDataset[dict[str, Tensor]]):
    """Rows of a split as tensors, under the names that image classifiers use.

    A key is a row, for evaluation, or a row and the seed of its augmentation, for training. The
    same key always gives the same example, whichever worker serves it.

    Args:
        split: Rows, as in `ImageSplits`.
        image_column: Name of the column of images.
        label_column: Name of the column of labels.
        transform: As returned by `build_transforms`.
    """

    def __init__(
        self,
        split: "datasets.Dataset",
        *,
        image_column: str,
        label_column: str,
        transform: ImageTransform,
    ) -> None:
        self._rows = split.select_columns([image_column, label_column])
        self._image_column = image_column
        self._label_column = label_column
        self._transform = transform

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Tensor]:
        row, generator = key, None
        if isinstance(key, tuple):
            row, seed = key
            generator = torch.Generator().manual_seed(seed)
        try:
            example = self._rows[row]
            pixel_values = self._transform(example[self._image_column], generator)
        except IndexError:
            raise
        except Exception as error:
            raise ValueError(
                f"the image of row {row} can no longer be read; restore it and resume, since "
                "replacing or skipping it would break the privacy guarantee."
            ) from error
        return {"pixel_values": pixel_values, "labels": torch.tensor(example[self._label_column])}


def collate(examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Stack images and labels; whatever else a row holds (names, patients) stays behind.

    Args:
        examples: At least one row with `pixel_values` and `labels`.

    Returns:
        `pixel_values` (N, C, H, W) and `labels` (N,).
    """
    return {
        name: torch.stack([torch.as_tensor(example[name]) for example in examples])
        for name in ("pixel_values", "labels")
    }


# Pixels


def _decode(image: Image.Image) -> Image.Image:
    """Return the image in mode L, RGB, or F with intensities in [0, 1].

    Deep greyscale is scaled by a constant, so that two images keep their relative brightness;
    `Image.convert` would clip it at 255.
    """
    if image.mode.startswith("I") or image.mode == "F":
        scale = 1 if image.mode == "F" else 65535
        intensities = np.asarray(image).astype(np.float32) / np.float32(scale)
        if not (intensities.min() >= 0 and intensities.max() <= 1):
            raise ValueError(
                f"the intensities of a {image.mode} image leave its range; convert the images to "
                "unsigned 16-bit with a declared window first."
            )
        return Image.fromarray(intensities)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "black"), image).convert("RGB")
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


def _transform(
    image: Image.Image,
    generator: torch.Generator | None,
    *,
    image_format: ImageFormat,
    random_flip: bool,
    random_crop: bool,
) -> Tensor:
    height, width = image_format.height, image_format.width
    image = _decode(image)
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


def _readable(
    split: "datasets.Dataset",
    image_column: str,
    *,
    split_name: str,
    on_corrupt: Literal["refuse", "drop"],
) -> tuple["datasets.Dataset", list[str]]:
    """Decode every image; return the rows that can be read and a note on the others."""
    images = split.select_columns([image_column])
    unreadable: dict[int, str] = {}
    for row in tqdm(range(len(images)), desc=f"checking {split_name} images", unit="image"):
        try:
            _decode(images[row][image_column])
        except Exception as error:  # decoders raise whatever they like on bad bytes
            unreadable[row] = type(error).__name__
    if not unreadable:
        return split, []
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(unreadable.values()).items())
    found = (
        f"{len(unreadable)} of {len(split)} images of the split {split_name!r} cannot be read "
        f"({kinds}; first rows: {_first(unreadable)})"
    )
    if on_corrupt == "refuse":
        raise ValueError(f"{found}; repair them, or drop them with on_corrupt='drop'.")
    if len(unreadable) == len(split):
        raise ValueError(f"{found}; nothing is left of it.")
    kept = [row for row in range(len(split)) if row not in unreadable]
    return split.select(kept), [f"{found} and were dropped; {len(kept)} are left"]


# Columns and labels


def _column(split: "datasets.Dataset", name: str) -> list[Any]:
    """Return the stored values of a column, without decoding any other."""
    values: list[Any] = split.select_columns([name]).with_format("arrow")[:][name].to_pylist()
    return values


def _first(rows: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(rows)[:ROWS_SHOWN]))


def _only(candidates: list[str], *, kind: str, columns: list[str]) -> str:
    if len(candidates) != 1:
        found = f"{len(candidates)} columns look like" if candidates else "no column looks like"
        raise ValueError(
            f"{found} the {kind}s; set {kind}_column to one of {', '.join(map(repr, columns))}."
        )
    return candidates[0]


def _named(split: "datasets.Dataset", name: str, *, kind: str) -> str:
    if name not in split.column_names:
        raise ValueError(
            f"{kind}_column={name!r} is missing; choose from "
            f"{', '.join(map(repr, split.column_names))}."
        )
    return name


def _find_image_column(split: "datasets.Dataset", name: str | None) -> str:
    import datasets

    if name is not None:
        return _named(split, name, kind="image")
    candidates = [
        column
        for column, feature in split.features.items()
        if isinstance(feature, datasets.Image)
        # the same feature, written by a library that does not know it
        or (isinstance(feature, dict) and set(feature) == {"bytes", "path"})
    ]
    return _only(candidates, kind="image", columns=split.column_names)


def _find_label_column(split: "datasets.Dataset", name: str | None, image_column: str) -> str:
    import datasets

    if name is not None:
        return _named(split, name, kind="label")
    columns = [column for column in split.column_names if column != image_column]
    classes = [
        column for column in columns if isinstance(split.features[column], datasets.ClassLabel)
    ]
    # A lone column of strings is not taken: it may as well hold patient ids, and class names
    # are published with the model.
    candidates = classes or [column for column in columns if column in LABEL_COLUMNS]
    return _only(candidates, kind="label", columns=columns)


def _cast_images(split: "datasets.Dataset", image_column: str) -> "datasets.Dataset":
    import datasets

    if image_column not in split.column_names:
        raise ValueError(
            f"the column {image_column!r} is not in every split; give all splits the same columns."
        )
    if isinstance(split.features[image_column], datasets.Image):
        return split.cast_column(image_column, datasets.Image())  # decoded, in its own mode
    try:
        return split.cast_column(image_column, datasets.Image())
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"image_column={image_column!r} holds {split.features[image_column]}, not images; name "
            "a column of images, of encoded bytes or of paths."
        ) from error


def _number_labels(
    splits: dict[str, "datasets.Dataset"], label_column: str
) -> tuple[dict[str, "datasets.Dataset"], tuple[str, ...]]:
    """Replace the labels of every split by ids into one list of class names.

    The order is that of a `ClassLabel`, else numeric, else alphabetic.
    """
    import datasets

    names = {name: _class_names(split, label_column, name) for name, split in splits.items()}
    found = {name for column in names.values() for name in column}
    feature = next(iter(splits.values())).features[label_column]
    if isinstance(feature, datasets.ClassLabel):
        label_names = [*feature.names, *sorted(found - set(feature.names))]
    elif all(name.isdecimal() for name in found):
        label_names = sorted(found, key=lambda name: (int(name), name))
    else:
        label_names = sorted(found)
    ids = {name: label for label, name in enumerate(label_names)}
    numbered = {
        name: split.remove_columns(label_column).add_column(
            label_column, [ids[class_name] for class_name in names[name]]
        )
        for name, split in splits.items()
    }
    return numbered, tuple(label_names)


def _class_names(split: "datasets.Dataset", label_column: str, split_name: str) -> list[str]:
    """Return the class name of every row, or refuse the split."""
    import datasets

    if label_column not in split.column_names:
        raise ValueError(
            f"the column {label_column!r} is not in the split {split_name!r}; give all splits the "
            "same columns."
        )
    feature = split.features[label_column]
    name_of: Callable[[Any], str | None]
    if isinstance(feature, datasets.ClassLabel):
        classes = feature.names

        def name_of(value: Any) -> str | None:
            return classes[value] if 0 <= value < len(classes) else None

    elif isinstance(feature, datasets.Value) and feature.dtype.endswith("string"):

        def name_of(value: Any) -> str | None:
            return value if value.strip() else None

    elif isinstance(feature, datasets.Value) and feature.dtype.startswith(
        ("int", "uint", "bool", "float")  # float: ints of which some are missing
    ):

        def name_of(value: Any) -> str | None:
            return str(int(value)) if value >= 0 and value == int(value) else None

    else:
        raise ValueError(
            f"label_column={label_column!r} holds {feature}; name a column with one class per row, "
            "as ints or strings."
        )
    values = _column(split, label_column)
    names = [None if value is None or value != value else name_of(value) for value in values]
    bad = [row for row, name in enumerate(names) if name is None]
    if bad:
        raise ValueError(
            f"{len(bad)} labels of the split {split_name!r} are missing or out of range (first "
            f"rows: {_first(bad)}); label or remove these rows, or name another split."
        )
    return [name for name in names if name is not None]


# Sources


def _read_splits(
    name_or_path: str, *, config_name: str | None, revision: str | None
) -> tuple[dict[str, "datasets.Dataset"], list[str]]:
    """Return all splits of the data set and notes on how they were read."""
    import datasets

    if name_or_path.startswith("builtin:"):
        if name_or_path != "builtin:digits":
            raise ValueError(
                f"{name_or_path!r} is unknown; the built-in data set is builtin:digits."
            )
        return _load_digits(), []
    path = Path(name_or_path).expanduser()
    try:
        if path.exists():
            return _read_local(path.resolve())
        return dict(datasets.load_dataset(name_or_path, config_name, revision=revision)), []
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        where = (
            "cannot be read as images with labels"
            if path.exists()
            else "is no local path and was not found on the Hub; check its spelling, your "
            "permission and the network"
        )
        raise ValueError(
            f"data set {name_or_path!r} {where} ({str(error).splitlines()[0]})."
        ) from error


def _read_local(path: Path) -> tuple[dict[str, "datasets.Dataset"], list[str]]:
    import datasets

    if path.is_file():
        if path.suffix == ".csv":
            return _read_csv([path]), []
        if path.suffix == ".parquet":
            return dict(datasets.load_dataset("parquet", data_files={"train": str(path)})), []
        raise ValueError("a single file must end in .csv or .parquet")
    tables = sorted(file for file in path.glob("*.csv") if file.name != "metadata.csv")
    if tables:
        return _read_csv(tables), []
    splits = dict(datasets.load_dataset(str(path)))
    return splits, _ignored_files(path, splits)


def _read_csv(tables: list[Path]) -> dict[str, "datasets.Dataset"]:
    """Read tables in which one column holds the paths of images, relative to the table."""
    import datasets
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    splits = {}
    for table in tables:
        split = datasets.load_dataset("csv", data_files=str(table), split="train")
        for column, feature in split.features.items():
            if len(split) == 0 or not feature.dtype.endswith("string"):
                continue
            if Path(str(split[0][column])).suffix.lower() in ImageFolder.EXTENSIONS:
                paths = [file and str(table.parent / file) for file in _column(split, column)]
                split = split.remove_columns(column).add_column(column, paths)
                split = split.cast_column(column, datasets.Image())
        splits["train" if len(tables) == 1 else table.stem] = split
    return splits


def _ignored_files(folder: Path, splits: dict[str, "datasets.Dataset"]) -> list[str]:
    """Note the files of an image folder that became no row, such as DICOM files."""
    import datasets
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    files = {file for file in folder.rglob("*") if file.is_file() and file.name[0] != "."}
    if not any(file.suffix.lower() in ImageFolder.EXTENSIONS for file in files):
        return []  # a folder of parquet files, whose column would hold the images themselves
    read: set[str] = set()
    for split in splits.values():
        column = next(
            (name for name, kind in split.features.items() if isinstance(kind, datasets.Image)),
            None,
        )
        if column is not None:
            read.update(image["path"] for image in _column(split, column) if image["path"])
    known = {"README.md", *ImageFolder.METADATA_FILENAMES}
    ignored = [file for file in files if str(file) not in read and file.name not in known]
    if not ignored:
        return []
    suffixes = Counter(file.suffix.lower() or "no suffix" for file in ignored)
    kinds = ", ".join(f"{count} {suffix}" for suffix, count in sorted(suffixes.items()))
    return [f"{len(ignored)} files of the folder became no example and were ignored ({kinds})"]


def _load_digits() -> dict[str, "datasets.Dataset"]:
    """Return scikit-learn's digits as 28 x 28 greyscale: 1437 to train on, 360 to test on.

    The 8 x 8 images are enlarged to 20 x 20 and padded, which is how Fashion-MNIST and MNIST
    place an object. The split is fixed and stratified by class.
    """
    import datasets
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    rows = train_test_split(
        np.arange(len(digits.target)), test_size=360, stratify=digits.target, random_state=0
    )
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=[str(digit) for digit in digits.target_names]),
        }
    )

    def enlarge(intensities: Any) -> Image.Image:
        small = Image.fromarray((intensities * (255 / 16)).round().astype(np.uint8))
        canvas = Image.new("L", (28, 28))
        canvas.paste(small.resize((20, 20), Image.Resampling.BILINEAR), (4, 4))
        return canvas

    return {
        name: datasets.Dataset.from_dict(
            {
                "image": [enlarge(digits.images[row]) for row in part],
                "label": [int(digits.target[row]) for row in part],
            },
            features=features,
        )
        for name, part in zip(("train", "test"), rows, strict=True)
    }

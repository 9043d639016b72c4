"""Rows of a split become the tensors of examples and batches.

Receives checked rows and a transform. Returns what image classifiers take.

Guarantees:
    * A row is never replaced by another one: an image that can no longer be read raises.
    * Only pixels and labels reach a batch; other columns (paths, patient ids) stay in the table.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from hf_dpmuon.data.images import ImageTransform

if TYPE_CHECKING:
    import datasets

__all__ = ["ImageExamples", "collate"]


class ImageExamples(TorchDataset[dict[str, Tensor]]):
    """Rows of a split as tensors, under the names that image classifiers use.

    A key is a row, for evaluation, or a row and the seed of its augmentation, for training. The
    same key always gives the same example, whichever worker serves it.

    Args:
        split: Rows, as in `ImageSplits`.
        image_column: Name of the column of images.
        label_column: Name of the column of labels: an int each, or a list of floats, one for each
            label, that is NaN where the label is not known.
        transform: As returned by `build_transforms`.
        checked: Whether every image was read already, as `load_image_dataset` does; else each is
            read once before training.

    Attributes:
        rows: The two columns of the split.

    Raises:
        ValueError: The rows are a stream, whose number is not known.
    """

    def __init__(
        self,
        split: "datasets.Dataset",
        *,
        image_column: str,
        label_column: str,
        transform: ImageTransform,
        checked: bool = False,
    ) -> None:
        import datasets

        if isinstance(split, datasets.IterableDataset):
            raise ValueError(
                "split=IterableDataset is a stream; load it with streaming=False, since the number "
                "of examples must be known before a sampling rate is computed from it."
            )
        self.rows = split.select_columns([image_column, label_column])
        self.checked = checked
        self._image_column = image_column
        self._label_column = label_column
        self._transform = transform

    def __len__(self) -> int:
        return len(self.rows)

    def labels(self) -> list[Tensor]:
        """The labels of all rows, each as in an example; no image is read."""
        column = self.rows.select_columns([self._label_column])[:][self._label_column]
        return [_label(stored) for stored in column]

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Tensor]:
        row, generator = key, None
        if isinstance(key, tuple):
            row, seed = key
            generator = torch.Generator().manual_seed(seed)
        try:
            example = self.rows[row]
            pixel_values = self._transform(example[self._image_column], generator)
        except IndexError:
            raise
        except Exception as error:  # its text may hold a path, and a path an id
            raise ValueError(
                f"an image can no longer be read ({type(error).__name__}); restore the images and "
                "resume, since replacing or skipping one would break the privacy guarantee."
            ) from None
        return {"pixel_values": pixel_values, "labels": _label(example[self._label_column])}


def _label(stored: int | list[float]) -> Tensor:
    return torch.tensor(stored, dtype=torch.float32 if isinstance(stored, list) else torch.int64)


def collate(examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Stack images and labels; whatever else a row holds (names, patients) stays behind.

    Args:
        examples: At least one row with `pixel_values` and `labels`.

    Returns:
        `pixel_values` (N, C, H, W) and `labels`, (N,) of int64 or (N, K) of fp32.
    """
    return {
        name: torch.stack([torch.as_tensor(example[name]) for example in examples])
        for name in ("pixel_values", "labels")
    }

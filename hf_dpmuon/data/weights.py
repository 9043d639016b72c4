"""Weights of the classes in the loss, for data in which some are rare.

Receives what the user asked for; returns one number per class.

Guarantees:
    Nothing is computed from the labels unless their counts were declared public: weights made of
    private counts would move every gradient, at no counted cost.
"""

from collections.abc import Sequence

import numpy as np

from hf_dpmuon.data.columns import column_values
from hf_dpmuon.data.loading import ImageSplits

__all__ = ["class_weights"]

BALANCED = "balanced"


def class_weights(
    setting: Sequence[str], splits: ImageSplits, *, public_class_counts: bool
) -> list[float]:
    """Return the weight of each class, or where a row has several labels of each one's positives.

    Args:
        setting: One number per class, or "balanced" alone: N / (classes * rows of the class), as
            scikit-learn has it, and for several labels negatives / positives of each.
        splits: Those of which the training labels are counted, under "balanced".
        public_class_counts: Whether those counts are declared to be public.

    Raises:
        ValueError: The setting is no list of numbers, counts are needed but not public, or a class
            to be balanced has no row.
    """
    if list(setting) != [BALANCED]:
        try:
            return [float(weight) for weight in setting]
        except ValueError:
            raise ValueError(
                f"class_weights={list(setting)} must be one number per class, or 'balanced' alone."
            ) from None
    if not public_class_counts:
        raise ValueError(
            "class_weights='balanced' would be computed from private labels at no counted cost; "
            "give the weights as numbers from a public source, or set public_class_counts=True if "
            "the number of training rows of each class is public."
        )
    labels = np.array(column_values(splits.train, splits.label_column), dtype=np.float64)
    if splits.multi_label:
        counts = np.nansum(labels == 1, axis=0)
        others = np.nansum(labels == 0, axis=0)
    else:
        counts = np.bincount(labels.astype(np.int64), minlength=len(splits.label_names))
        others = np.full(len(counts), len(labels) / len(counts))
    empty = [
        n
        for n, count, rest in zip(splits.label_names, counts, others, strict=True)
        if not (count and rest)
    ]
    if empty:
        raise ValueError(
            f"class_weights='balanced' needs training rows of each kind, and {', '.join(empty)} "
            "has none; give the weights as numbers."
        )
    return [float(weight) for weight in others / counts]

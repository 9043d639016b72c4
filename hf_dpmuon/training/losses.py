"""The loss of each row, averaged over rows, so that no row's term depends on another row.

Receives logits and labels of a physical batch; returns the mean over its rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["RowMeanLoss"]


class RowMeanLoss:
    """Cross-entropy of one label per image, or the mean binary cross-entropy of several.

    Args:
        num_classes: K, the number of logits.
        multi_label: Whether an image may have several labels; a NaN label is left out of its row's
            mean, and a row without a label has loss zero.
        class_weights: Public weights of the classes; of the positive examples of each label where
            there are several.
        label_smoothing: That of one label per image.

    Raises:
        ValueError: If the weights are not K finite numbers > 0, or smoothing meets several labels.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        multi_label: bool,
        class_weights: Sequence[float] | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        if multi_label and label_smoothing != 0:
            raise ValueError(
                f"label_smoothing_factor={label_smoothing} is for one label per image; leave it 0."
            )
        if class_weights is not None and (
            len(class_weights) != num_classes or not all(0 < w < math.inf for w in class_weights)
        ):
            raise ValueError(
                f"class_weights={list(class_weights)} must be {num_classes} finite numbers > 0, "
                "one for each class in the order of the class names."
            )
        self.num_classes = num_classes
        self.multi_label = multi_label
        self.label_smoothing = label_smoothing
        self.weights = None if class_weights is None else torch.tensor(class_weights)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over rows, (B, K) and (B,) or (B, K) to ()."""
        weights = None if self.weights is None else self.weights.to(logits.device, torch.float32)
        if self.multi_label:
            return _masked_binary_cross_entropy(logits, labels, positive_weights=weights).mean()
        losses = F.cross_entropy(
            logits, labels, reduction="none", label_smoothing=self.label_smoothing
        )
        if weights is not None:  # torch's weighted mean would couple the rows of a batch
            losses = losses * weights[labels]
        return losses.mean()


def _masked_binary_cross_entropy(
    logits: Tensor, labels: Tensor, *, positive_weights: Tensor | None
) -> Tensor:
    """For each row the mean over the labels that are not NaN, 0 where all are: (B, K) to (B,)."""
    is_known = ~labels.isnan()
    losses = F.binary_cross_entropy_with_logits(
        logits,
        labels.nan_to_num(0.0),  # NaN would spread through the gradient of a masked entry
        pos_weight=positive_weights,
        reduction="none",
    )
    return (losses * is_known).sum(-1) / is_known.sum(-1).clamp(min=1)

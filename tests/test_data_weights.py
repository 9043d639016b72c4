"""Class weights: given numbers, or counts that were declared public."""

from __future__ import annotations

import math

import datasets
import numpy as np
import pytest
from sklearn.utils.class_weight import compute_class_weight

from hf_dpmuon.data import ImageSplits, class_weights


def splits_of(labels: list, *, names: tuple[str, ...], multi_label: bool = False) -> ImageSplits:
    return ImageSplits(
        train=datasets.Dataset.from_dict({"label": labels}),
        evaluation=None,
        label_names=names,
        image_column="image",
        label_column="label",
        notes=(),
        multi_label=multi_label,
    )


SINGLE = splits_of([0, 1, 1, 2, 2, 2, 2], names=("a", "b", "c"))


def test_given_numbers_are_taken_as_they_are():
    assert class_weights(["1", "2.5", "1e1"], SINGLE, public_class_counts=False) == [1, 2.5, 10]


def test_balanced_weights_are_those_of_scikit_learn():
    labels = SINGLE.train["label"]
    expected = compute_class_weight("balanced", classes=np.arange(3), y=np.array(labels))
    given = class_weights(["balanced"], SINGLE, public_class_counts=True)
    np.testing.assert_allclose(given, expected)


def test_balanced_positives_weigh_as_much_as_the_negatives_that_are_known():
    labels = [[1.0, 0.0], [0.0, 0.0], [0.0, math.nan], [0.0, 1.0]]
    splits = splits_of(labels, names=("x", "y"), multi_label=True)
    assert class_weights(["balanced"], splits, public_class_counts=True) == [3.0, 2.0]


def test_private_labels_are_not_counted():
    with pytest.raises(ValueError, match="set public_class_counts=True if"):
        class_weights(["balanced"], SINGLE, public_class_counts=False)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (["balanced", "1"], "must be one number per class, or 'balanced' alone"),
        (["heavy"], "must be one number per class"),
    ],
)
def test_anything_else_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        class_weights(setting, SINGLE, public_class_counts=True)


def test_a_class_without_rows_cannot_be_balanced():
    splits = splits_of([0, 1, 1], names=("a", "b", "rare"))
    with pytest.raises(ValueError, match="rare has none"):
        class_weights(["balanced"], splits, public_class_counts=True)

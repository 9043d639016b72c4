"""What clinicians ask of a classifier: evaluation metrics, and a picture of its confusions.

Receives logits and labels of an evaluation split as arrays; returns named numbers, or writes a
picture. Evaluation is no release of the mechanism: the guarantee does not cover these numbers.

Guarantees:
    A metric that the data does not define (an AUROC where only one class is present) is left out:
    no zero, NaN or warning stands in its place. No metric depends on the order of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, log_softmax
from sklearn.metrics import (
    accuracy_score,
    f1_score,
    recall_score,
    roc_auc_score,
)

from hf_dpmuon.figures import draw_confusions

if TYPE_CHECKING:
    from transformers import EvalPrediction

__all__ = [
    "EvaluationRecord",
    "build_metrics",
    "classification_metrics",
    "multi_label_metrics",
    "plot_confusion",
]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

CALIBRATION_BINS = 15  # Guo et al. 2017 (arXiv 1706.04599)


def build_metrics(
    label_names: Sequence[str], *, multi_label: bool = False
) -> Callable[[EvalPrediction], dict[str, float]]:
    """Returns the ``compute_metrics`` of a Trainer for these classes.

    Args:
        label_names: The classes, in the order of the logits.
        multi_label: Whether each class is a question of its own, with NaN for a missing answer.
    """

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        logits, labels = prediction.predictions, prediction.label_ids
        if isinstance(logits, tuple):  # some models return hidden states after the logits
            logits = logits[0]
        if multi_label:
            return multi_label_metrics(logits, labels, label_names=label_names)
        return classification_metrics(logits, labels)

    return compute_metrics


@dataclass
class EvaluationRecord:
    """What the last evaluation of the declared split said, for the card and the picture.

    Attributes:
        compute: The metrics of a prediction.
        metrics: Those of the declared split, by name.
        prediction: The one that they are of.
    """

    compute: Callable[[EvalPrediction], dict[str, float]]
    metrics: dict[str, float] = field(default_factory=dict)
    prediction: EvalPrediction | None = None

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        """Compute metrics as the base class asks for them, and note the prediction."""
        self.prediction = prediction
        return self.compute(prediction)

    @contextmanager
    def recording(self, declared: bool) -> Iterator[None]:
        """What is evaluated inside is recorded, if it is of the declared split."""
        before = self.metrics, self.prediction
        yield
        if not declared:
            self.metrics, self.prediction = before

    def note(self, metrics: Mapping[str, Any]) -> None:
        """Keep the metrics of an evaluation, without times."""
        self.metrics = {
            name.removeprefix("eval_"): float(value)
            for name, value in metrics.items()
            if name.startswith("eval_")
            and not name.endswith(("runtime", "_per_second", "_time"))
            and isinstance(value, (int, float))
        }

    def plot(self, path: Path, *, label_names: Sequence[str]) -> bool:
        """See ``plot_confusion``; False before an evaluation."""
        last = self.prediction
        return last is not None and plot_confusion(
            last.predictions, last.label_ids, label_names=label_names, path=path
        )

    def forget(self) -> None:
        """What was recorded is of another model."""
        self.metrics, self.prediction = {}, None


def classification_metrics(logits: ArrayLike, labels: ArrayLike) -> dict[str, float]:
    """Metrics of a classifier that names one class of several.

    ============================= ==================================================================
    ``accuracy``                  share of rows whose largest logit is at their label
    ``balanced_accuracy``         mean recall of the classes present
    ``f1``                        mean over the classes that are present or predicted
    ``auroc``                     two classes: of class 1; more: mean of one against the rest over
                                  the classes present
    ``expected_calibration_error`` mean distance of confidence and accuracy over 15 equal bins of
                                  the largest probability
    ``cross_entropy``             mean cross-entropy; the run's own loss is ``eval_loss``
    ============================= ==================================================================

    Args:
        logits: Shape (rows, classes).
        labels: Class numbers, of shape (rows,).

    Raises:
        ValueError: Shapes do not fit, a logit is not finite, or a label is no class.
    """
    scores, classes = _checked_single(logits, labels)
    if len(classes) == 0:
        return {}
    log_probabilities = log_softmax(scores, axis=1)
    predicted = scores.argmax(axis=1)
    present = np.unique(classes)
    metrics = {
        "accuracy": float(accuracy_score(classes, predicted)),
        "balanced_accuracy": float(
            recall_score(classes, predicted, labels=present, average="macro")
        ),
        "f1": float(f1_score(classes, predicted, average="macro")),
        "expected_calibration_error": _calibration_error(
            np.exp(log_probabilities.max(axis=1)), predicted == classes
        ),
        "cross_entropy": -float(log_probabilities[np.arange(len(classes)), classes].mean()),
    }
    if len(present) > 1:
        if scores.shape[1] == 2:
            # The difference orders rows as the probability does, and never rounds to 1.
            metrics["auroc"] = float(roc_auc_score(classes == 1, scores[:, 1] - scores[:, 0]))
        else:
            metrics["auroc"] = float(
                np.mean([roc_auc_score(classes == c, log_probabilities[:, c]) for c in present])
            )
    return metrics


def multi_label_metrics(
    logits: ArrayLike, labels: ArrayLike, *, label_names: Sequence[str]
) -> dict[str, float]:
    """Metrics of a classifier that answers one yes-or-no question per label.

    ============================== =================================================================
    ``auroc_<label>``              of one label
    ``auroc``, ``f1``              mean over the labels for which they are defined
    ``accuracy``                   share of answers that are right
    ``expected_calibration_error`` over all answers, by the probability of the answer given
    ``cross_entropy``              mean binary cross-entropy of all answers
    ============================== =================================================================

    Args:
        logits: Shape (rows, labels).
        labels: 0, 1 or NaN for a missing answer, which counts nowhere; of the same shape.
        label_names: One for each label.

    Raises:
        ValueError: Shapes do not fit, a logit is not finite, or a label is not 0, 1 or NaN.
    """
    scores, answers = _checked_multi(logits, labels)
    _check_names(label_names, scores)
    known = ~np.isnan(answers)
    if not known.any():
        return {}
    predicted = scores > 0
    right = (predicted == (answers == 1))[known]
    given = np.where(predicted, expit(scores), expit(-scores))[known]
    losses = np.logaddexp(0, scores) - scores * np.where(known, answers, 0)
    metrics = {
        "accuracy": float(right.mean()),
        "expected_calibration_error": _calibration_error(given, right),
        "cross_entropy": float(losses[known].mean()),
    }
    aurocs, f1s = {}, []
    for column, name in enumerate(label_names):
        rows = known[:, column]
        truth, score = answers[rows, column] == 1, scores[rows, column]
        if truth.any() and not truth.all():
            aurocs[f"auroc_{name}"] = float(roc_auc_score(truth, score))
        if truth.any() or (score > 0).any():
            f1s.append(float(f1_score(truth, score > 0)))
    if aurocs:
        metrics |= {**aurocs, "auroc": float(np.mean(list(aurocs.values())))}
    if f1s:
        metrics["f1"] = float(np.mean(f1s))
    return metrics


def plot_confusion(
    logits: ArrayLike, labels: ArrayLike, *, label_names: Sequence[str], path: Path
) -> bool:
    """Writes a picture of which class was taken for which; for local eyes, not for the Hub.

    Args:
        logits: Shape (rows, classes).
        labels: Class numbers of shape (rows,), or 0, 1 and NaN of shape (rows, labels): one matrix
            for each label then.
        label_names: One for each column of the logits.
        path: The PNG file.

    Returns:
        Whether it was drawn: the pictures need matplotlib, the optional extra ``plots``.

    Raises:
        ValueError: Shapes do not fit, or a label is outside its range.
    """
    matrices = _confusion_matrices(logits, labels, label_names)
    return draw_confusions(matrices, path)


def _calibration_error(confidence: FloatArray, right: NDArray[np.bool_]) -> float:
    """Bins are open below and closed above, the first one closed on both sides."""
    bins = np.clip(np.ceil(confidence * CALIBRATION_BINS).astype(int) - 1, 0, CALIBRATION_BINS - 1)
    excess = np.bincount(bins, weights=confidence - right, minlength=CALIBRATION_BINS)
    return float(np.abs(excess).sum() / len(confidence))


def _confusion_matrices(
    logits: ArrayLike, labels: ArrayLike, label_names: Sequence[str]
) -> list[tuple[str, Sequence[str], IntArray]]:
    """Title, names and counts (label by prediction) of each matrix."""
    if np.ndim(labels) == 1:
        scores, classes = _checked_single(logits, labels)
        _check_names(label_names, scores)
        return [("", label_names, _counts(classes, scores.argmax(axis=1), scores.shape[1]))]
    scores, answers = _checked_multi(logits, labels)
    _check_names(label_names, scores)
    matrices: list[tuple[str, Sequence[str], IntArray]] = []
    for name, score, answer in zip(label_names, scores.T, answers.T, strict=True):
        known = ~np.isnan(answer)
        counts = _counts(answer[known].astype(np.int64), (score[known] > 0).astype(np.int64), 2)
        matrices.append((name, ("no", "yes"), counts))
    return matrices


def _counts(labels: IntArray, predicted: IntArray, classes: int) -> IntArray:
    cells = np.bincount(labels * classes + predicted, minlength=classes**2)
    return cells.reshape(classes, classes)


def _checked_single(logits: ArrayLike, labels: ArrayLike) -> tuple[FloatArray, IntArray]:
    scores, classes = np.asarray(logits, dtype=np.float64), np.asarray(labels)
    if scores.ndim != 2 or classes.shape != scores.shape[:1]:
        raise ValueError(
            f"labels of shape {classes.shape} must have one class number for each row of logits "
            f"of shape {scores.shape}."
        )
    _check_finite(scores)
    outside = classes[(classes < 0) | (classes >= scores.shape[1])]
    if len(outside):
        raise ValueError(f"labels={outside[0]} must be in [0, {scores.shape[1] - 1}].")
    return scores, classes.astype(np.int64)


def _checked_multi(logits: ArrayLike, labels: ArrayLike) -> tuple[FloatArray, FloatArray]:
    scores = np.asarray(logits, dtype=np.float64)
    answers = np.asarray(labels, dtype=np.float64)
    if scores.ndim != 2 or answers.shape != scores.shape:
        raise ValueError(
            f"labels of shape {answers.shape} must have the shape {scores.shape} of the logits."
        )
    _check_finite(scores)
    wrong = answers[~(np.isnan(answers) | (answers == 0) | (answers == 1))]
    if len(wrong):
        raise ValueError(f"labels={wrong[0]:g} must be 0, 1 or NaN.")
    return scores, answers


def _check_finite(scores: FloatArray) -> None:
    if not np.isfinite(scores).all():
        raise ValueError(
            "logits hold NaN or infinity and must be finite numbers: training diverged, and needs "
            "a smaller learning_rate."
        )


def _check_names(label_names: Sequence[str], scores: FloatArray) -> None:
    if len(label_names) != scores.shape[1]:
        raise ValueError(
            f"label_names has {len(label_names)} names and must have {scores.shape[1]}, one for "
            "each column of the logits."
        )

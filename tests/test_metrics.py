"""Laws and oracles of the evaluation metrics and the picture of confusions."""

import itertools
import math
import sys
import warnings

import numpy as np
import pytest
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import EvalPrediction

from hf_dpmuon.figures import can_plot
from hf_dpmuon.metrics import (
    _confusion_matrices,
    build_metrics,
    classification_metrics,
    multi_label_metrics,
    plot_confusion,
)

few = settings(max_examples=40, deadline=None, derandomize=True)


@pytest.fixture(autouse=True)
def warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@st.composite
def predictions(draw, classes=None):
    """Logits and labels; with one decimal, so that scores tie."""
    count, rows = classes or draw(st.integers(2, 5)), draw(st.integers(1, 40))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = generator.normal(scale=2, size=(rows, count)).round(1)
    used = draw(st.integers(1, count))
    return logits, generator.integers(0, used, rows)


@st.composite
def answers(draw):
    rows, labels = draw(st.integers(1, 30)), draw(st.integers(1, 4))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = generator.normal(scale=2, size=(rows, labels)).round(1)
    truth = generator.choice([0.0, 1.0, np.nan], size=(rows, labels), p=[0.5, 0.2, 0.3])
    return logits, truth


def area(positive, scores):
    """AUROC as Mann and Whitney count it."""
    pairs = itertools.product(scores[positive], scores[~positive])
    return np.mean([(a > b) + 0.5 * (a == b) for a, b in pairs])


def f1_by_hand(truth, predicted):
    hits = (truth & predicted).sum()
    return 2 * hits / (truth.sum() + predicted.sum())


def calibration_by_hand(confidence, right):
    total = 0.0
    for low in np.arange(15) / 15:
        inside = (confidence > low) & (confidence <= low + 1 / 15 + 1e-15)
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return total


# One class of several


@few
@given(predictions())
def test_single_label_metrics_are_those_counted_by_hand(case):
    logits, labels = case
    metrics = classification_metrics(logits, labels)
    predicted = logits.argmax(1)
    probabilities = torch.softmax(torch.from_numpy(logits), 1).numpy()
    present = np.unique(labels)
    named = np.union1d(labels, predicted)
    assert metrics["accuracy"] == pytest.approx(np.mean(predicted == labels))
    assert metrics["balanced_accuracy"] == pytest.approx(
        np.mean([(predicted[labels == c] == c).mean() for c in present])
    )
    assert metrics["f1"] == pytest.approx(
        np.mean([f1_by_hand(labels == c, predicted == c) for c in named])
    )
    loss = torch.nn.functional.cross_entropy(torch.from_numpy(logits), torch.from_numpy(labels))
    assert metrics["cross_entropy"] == pytest.approx(float(loss))
    assert metrics["expected_calibration_error"] == pytest.approx(
        calibration_by_hand(probabilities.max(1), predicted == labels)
    )
    assert ("auroc" in metrics) == (len(present) > 1)
    if "auroc" in metrics and logits.shape[1] > 2:
        log_probabilities = torch.log_softmax(torch.from_numpy(logits), 1).numpy()
        by_class = [area(labels == c, log_probabilities[:, c]) for c in present]
        assert metrics["auroc"] == pytest.approx(np.mean(by_class), abs=1e-9)
    assert all(math.isfinite(value) for value in metrics.values())


@few
@given(predictions(classes=2))
def test_two_classes_have_the_auroc_of_class_1(case):
    logits, labels = case
    metrics = classification_metrics(logits, labels)
    margin = logits[:, 1] - logits[:, 0]
    if len(np.unique(labels)) == 2:
        assert metrics["auroc"] == pytest.approx(area(labels == 1, margin))
    else:
        assert "auroc" not in metrics


def test_the_auroc_of_very_sure_answers_is_still_resolved():
    logits = np.array([[0.0, 100.0], [0.0, 101.0], [0.0, 102.0], [0.0, 103.0]])
    assert classification_metrics(logits, [0, 0, 1, 1])["auroc"] == 1
    assert classification_metrics(logits, [1, 1, 0, 0])["auroc"] == 0


@few
@given(predictions(), st.integers(0, 2**32 - 1))
def test_the_order_of_rows_and_the_numbers_of_classes_do_not_matter(case, seed):
    logits, labels = case
    generator = np.random.default_rng(seed)
    logits = logits + generator.normal(scale=1e-3, size=logits.shape)  # no ties: argmax is unique
    expected = classification_metrics(logits, labels)
    rows = generator.permutation(len(labels))
    assert classification_metrics(logits[rows], labels[rows]) == pytest.approx(expected)
    order = generator.permutation(logits.shape[1])
    renamed = np.argsort(order)[labels]
    if logits.shape[1] > 2:
        assert classification_metrics(logits[:, order], renamed) == pytest.approx(expected)


def test_calibration_error_known_by_hand():
    # Confidences 0.9, 0.9, 0.6 and 2/3 (a bin's upper edge); right, wrong, right, wrong.
    confidences = [0.9, 0.9, 0.6, 2 / 3]
    logits = [[math.log(p), math.log(1 - p)] for p in confidences]
    error = classification_metrics(logits, [0, 1, 0, 1])["expected_calibration_error"]
    assert error == pytest.approx((abs(1.8 - 1) + abs(0.6 - 1) + abs(2 / 3)) / 4)
    sure = classification_metrics([[1000.0, 0.0]], [0])
    assert sure["expected_calibration_error"] == 0
    assert sure["cross_entropy"] == 0


# Several questions


@few
@given(answers())
def test_multi_label_metrics_are_those_counted_by_hand(case):
    logits, truth = case
    names = [f"finding {i}" for i in range(logits.shape[1])]
    metrics = multi_label_metrics(logits, truth, label_names=names)
    known = ~np.isnan(truth)
    if not known.any():
        assert metrics == {}
        return
    positive = truth == 1
    right = ((logits > 0) == positive)[known]
    probabilities = torch.sigmoid(torch.from_numpy(logits)).numpy()
    assert metrics["accuracy"] == pytest.approx(right.mean())
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.from_numpy(logits[known]), torch.from_numpy(truth[known])
    )
    assert metrics["cross_entropy"] == pytest.approx(float(loss))
    given_answer = np.maximum(probabilities, 1 - probabilities)[known]
    assert metrics["expected_calibration_error"] == pytest.approx(
        calibration_by_hand(given_answer, right)
    )
    areas, f1s = {}, []
    for column, name in enumerate(names):
        rows = known[:, column]
        asked, said = positive[rows, column], logits[rows, column] > 0
        if asked.any() and not asked.all():
            areas[f"auroc_{name}"] = pytest.approx(area(asked, logits[rows, column]))
        if asked.any() or said.any():
            f1s.append(f1_by_hand(asked, said))
    assert {k: v for k, v in metrics.items() if k.startswith("auroc_")} == areas
    assert ("auroc" in metrics) == bool(areas)
    if areas:
        assert metrics["auroc"] == pytest.approx(np.mean([metrics[k] for k in areas]))
    assert ("f1" in metrics) == bool(f1s)
    if f1s:
        assert metrics["f1"] == pytest.approx(np.mean(f1s))


@few
@given(answers())
def test_what_the_model_says_where_the_answer_is_missing_does_not_matter(case):
    logits, truth = case
    names = list(map(str, range(logits.shape[1])))
    changed = np.where(np.isnan(truth), -logits + 3, logits)
    assert multi_label_metrics(changed, truth, label_names=names) == multi_label_metrics(
        logits, truth, label_names=names
    )


# What the Trainer calls


def test_the_trainer_gets_the_metrics_of_its_kind_of_labels():
    logits, labels = np.array([[2.0, -1.0], [0.5, 1.0]]), np.array([0, 1])
    single = build_metrics(["a", "b"])
    multi = build_metrics(["a", "b"], multi_label=True)
    expected = classification_metrics(logits, labels)
    assert single(EvalPrediction(predictions=logits, label_ids=labels)) == expected
    hidden = (logits, np.zeros((2, 7)))
    assert single(EvalPrediction(predictions=hidden, label_ids=labels)) == expected
    truth = np.array([[1.0, np.nan], [0.0, 1.0]])
    assert multi(EvalPrediction(predictions=logits, label_ids=truth)) == multi_label_metrics(
        logits, truth, label_names=["a", "b"]
    )


def test_nothing_to_evaluate_gives_no_numbers():
    assert classification_metrics(np.zeros((0, 3)), np.zeros(0, int)) == {}
    assert multi_label_metrics([[1.0]], [[np.nan]], label_names=["a"]) == {}


# The picture


@few
@given(predictions(), answers())
def test_confusions_are_those_of_scikit_learn(single, multi):
    logits, labels = single
    names = [str(i) for i in range(logits.shape[1])]
    ((_, written, counts),) = _confusion_matrices(logits, labels, names)
    assert written == names
    expected = sklearn.metrics.confusion_matrix(
        labels, logits.argmax(1), labels=range(logits.shape[1])
    )
    assert counts.tolist() == expected.tolist()
    logits, truth = multi
    names = [str(i) for i in range(logits.shape[1])]
    matrices = _confusion_matrices(logits, truth, names)
    assert [title for title, _, _ in matrices] == names
    for column, (_, _, counts) in enumerate(matrices):
        rows = ~np.isnan(truth[:, column])
        said = logits[rows, column] > 0
        asked = truth[rows, column] == 1
        assert counts.tolist() == [
            [(~asked & ~said).sum(), (~asked & said).sum()],
            [(asked & ~said).sum(), (asked & said).sum()],
        ]


LOGITS = np.array([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0], [0.0, 1.0, 2.0], [1.0, 2.0, 0.0]])
TRUTH = np.array([[1, 0, np.nan], [0, 1, np.nan], [0, 0, np.nan], [1, 1, np.nan]])


@pytest.mark.parametrize("labels", [np.array([0, 1, 2, 0]), TRUTH], ids=["single", "multi"])
def test_a_picture_shows_counts_and_no_more(tmp_path, labels):
    names = ["a $x^ b", "b\n|", "\N{MICROSCOPE}"]

    def drawn(logits, labels):
        path = tmp_path / "confusion.png"
        assert plot_confusion(logits, labels, label_names=names, path=path)
        return path.read_bytes()

    picture = drawn(LOGITS, labels)
    assert picture.startswith(b"\x89PNG")
    assert b"tEXt" not in picture
    assert drawn(LOGITS[::-1], labels[::-1]) == picture
    assert drawn(-LOGITS, labels) != picture


def test_many_classes_are_coloured_not_written(tmp_path):
    path = tmp_path / "confusion.png"
    logits = np.eye(100)
    assert plot_confusion(logits, np.arange(100), label_names=["x"] * 100, path=path)
    assert path.stat().st_size < 200_000


def test_without_matplotlib_there_is_no_picture(tmp_path, monkeypatch):
    assert can_plot()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "confusion.png"
    assert not can_plot()
    assert not plot_confusion(LOGITS, [0, 1, 2, 0], label_names=["a", "b", "c"], path=path)
    assert not path.exists()


# Errors


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        ([[1.0, 2.0]], [2], r"labels=2 must be in \[0, 1\]"),
        ([[1.0, 2.0]], [-100], r"labels=-100 must be in \[0, 1\]"),
        ([[1.0, 2.0]], [0, 1], r"labels of shape \(2,\)"),
        ([1.0, 2.0], [0, 1], r"logits of shape \(2,\)"),
        ([[math.nan, 2.0]], [0], "logits hold NaN"),
    ],
)
def test_single_labels_outside_their_range_are_named(logits, labels, message):
    with pytest.raises(ValueError, match=message):
        classification_metrics(logits, labels)


@pytest.mark.parametrize(
    ("logits", "labels", "names", "message"),
    [
        ([[1.0]], [[-1.0]], ["a"], "labels=-1 must be 0, 1 or NaN"),
        ([[1.0]], [1.0], ["a"], r"labels of shape \(1,\)"),
        ([[1.0]], [[1.0]], ["a", "b"], "label_names has 2 names and must have 1"),
        ([[math.inf]], [[1.0]], ["a"], "logits hold NaN or infinity"),
    ],
)
def test_answers_outside_their_range_are_named(logits, labels, names, message):
    with pytest.raises(ValueError, match=message):
        multi_label_metrics(logits, labels, label_names=names)

"""Metrics of a tally."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kfp_ddp.evaluation.measure import Tally, bin_of
from kfp_ddp.models.evaluation import wilson
from tests.unit.test_evaluate_roc import logits_and_targets


def tally(logits: Tensor, targets: Tensor, sizes: list[int]) -> Tally:
    counts = Tally(logits.shape[1])
    parts = zip(torch.split(logits, sizes), torch.split(targets, sizes), strict=True)
    for part, truth in parts:
        counts.update(part, truth)
    return counts


@pytest.mark.parametrize("classes", [2, 3, 10, 60])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_metrics_agree_with_torchmetrics(classes: int) -> None:
    functional = pytest.importorskip("torchmetrics.functional.classification")
    logits, targets = logits_and_targets(1003, classes)
    counts = tally(logits, targets, [400, 1, 602])
    probabilities = logits.softmax(1)

    def oracle(name: str, **options: object) -> Tensor:
        metric: Callable[..., Tensor] = getattr(functional, f"multiclass_{name}")
        return metric(probabilities, targets, num_classes=classes, **options)

    assert counts.samples == 1003
    assert counts.correct / 1003 == pytest.approx(float(oracle("accuracy", average="micro")))
    assert torch.equal(counts.confusion, oracle("confusion_matrix"))
    error = float(oracle("calibration_error", n_bins=15))
    assert counts.calibration_error == pytest.approx(error, abs=1e-6)
    results = counts.per_class([str(i) for i in range(classes)])
    names = {"precision": "precision", "recall": "recall", "f1_score": "f1"}
    for name, field in names.items():
        expected = oracle(name, average=None).tolist()
        assert [getattr(r, field) for r in results] == pytest.approx(expected, abs=1e-6)
    macro = [float(oracle(name, average="macro")) for name in names]
    assert counts.macro(results) == pytest.approx(macro, abs=1e-6)
    loss = float(torch.nn.functional.cross_entropy(logits.double(), targets))
    assert counts.loss == pytest.approx(loss, abs=1e-6)
    top5 = float(oracle("accuracy", average="micro", top_k=5)) if classes > 5 else None
    assert counts.top5 == (pytest.approx(top5) if top5 is not None else None)


def test_saturated_logits_give_finite_numbers() -> None:
    targets = torch.tensor([0, 1, 2])
    counts = tally(torch.nn.functional.one_hot(targets, 3) * 500.0, targets, [3])
    curve = counts.areas().roc
    assert curve is not None
    assert (curve.area, counts.loss, counts.calibration_error) == (1, 0, 0)
    assert [(b.samples, b.confidence, b.accuracy) for b in counts.calibration()] == [(3, 1, 1)]


def test_results_do_not_depend_on_batches_and_ranks() -> None:
    logits, targets = logits_and_targets(997, 7)
    one = tally(logits, targets, [997])
    assert one.confusion.dtype == torch.int64
    others = [tally(logits, targets, [1] * 97 + [900])]
    for ranks in (2, 3):
        shares = [(logits[r::ranks], targets[r::ranks]) for r in range(ranks)]
        tallies = [tally(*share, [len(share[1])]) for share in shares]
        others.append(Tally(7))
        others[-1].merge(share.state() for share in [Tally(7), *reversed(tallies)])
    for other in others:
        assert torch.equal(other.confusion, one.confusion)
        assert (other.samples, other.loss, other.top5) == (997, one.loss, one.top5)
        assert (other.calibration(), other.areas()) == (one.calibration(), one.areas())


def test_macro_means_omit_classes_without_samples_and_predictions() -> None:
    """Class 1 is only predicted, class 2 has a sample, class 3 has neither."""
    counts = Tally(4)
    counts.update(10 * torch.eye(4)[[0, 0, 1, 2]], torch.tensor([0, 0, 0, 2]))
    results = counts.per_class(["a", "b", "c", "d"])
    assert (results[3].samples, results[3].f1) == (0, 0)
    assert counts.macro(results) == pytest.approx((2 / 3, (2 / 3 + 1) / 3, (0.8 + 1) / 3))


def test_wilson_agrees_with_published_values() -> None:
    # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(29, 29) == pytest.approx((0.8830, 1.0), abs=5e-5)


def test_of_equal_scores_the_first_class_is_the_likeliest() -> None:
    counts = tally(torch.zeros(20, 10), torch.arange(20) % 10, [20])
    assert (counts.correct, counts.top5) == (2, 0.5)
    # Class 6 has three above it and two equal ones before it, so it is the sixth; class 4 is fifth.
    logits = torch.tensor([3.0, 3, 3, 1, 1, 0, 1]).expand(2, 7)
    assert tally(logits, torch.tensor([6, 4]), [2]).top5 == 0.5


def test_bins_are_closed_on_the_right() -> None:
    bins = bin_of(np.array([0.01, 1 / 15, 0.07, 0.5, 14 / 15, 0.94, 1.0], np.float32))
    assert bins.dtype == np.int64
    assert bins.tolist() == [0, 0, 1, 7, 13, 14, 14]


def test_intervals_of_a_class_are_of_wilson_or_none() -> None:
    counts = Tally(3)
    counts.update(10 * torch.eye(3)[[0, 0, 1]], torch.tensor([0, 1, 1]))
    first, second, third = counts.per_class(["a", "b", "c"], [0.5, 0.75, None])
    assert (first.recall_low, first.recall_high) == wilson(1, 1)
    assert (first.precision_low, first.precision_high) == wilson(1, 2)
    assert (second.recall_low, second.recall_high) == wilson(1, 2)
    assert (third.recall_low, third.precision_high) == (None, None)
    assert [one.roc_auc for one in (first, second, third)] == [0.5, 0.75, None]

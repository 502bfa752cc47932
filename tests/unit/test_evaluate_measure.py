import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kfp_ddp.components.evaluate.measure import Tally
from kfp_ddp.components.shared.evaluation import wilson


def logits_and_targets(n: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (n,), generator=generator)
    logits = torch.randn(n, classes, generator=generator)
    logits[torch.arange(n), targets] += 1.5
    return logits, targets


def tally(logits: Tensor, targets: Tensor, sizes: list[int]) -> Tally:
    counts = Tally(logits.shape[1])
    parts = zip(torch.split(logits, sizes), torch.split(targets, sizes), strict=True)
    for some, truth in parts:
        counts.update(some, truth)
    return counts


@pytest.mark.parametrize("classes", [2, 3, 10, 60])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_every_metric_agrees_with_torchmetrics(classes: int) -> None:
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
    assert counts.calibration_error == pytest.approx(
        float(oracle("calibration_error", n_bins=15)), abs=1e-6
    )
    results = counts.per_class([str(i) for i in range(classes)])
    for name in ("precision", "recall"):
        expected = oracle(name, average=None).tolist()
        assert [getattr(r, name) for r in results] == pytest.approx(expected, abs=1e-6)
    assert [r.f1 for r in results] == pytest.approx(
        oracle("f1_score", average=None).tolist(), abs=1e-6
    )
    macro = [float(oracle(n, average="macro")) for n in ("precision", "recall", "f1_score")]
    assert counts.macro(results) == pytest.approx(macro, abs=1e-6)
    assert counts.loss == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits.double(), targets)), abs=1e-6
    )
    if classes > 5:
        assert counts.top5 == pytest.approx(float(oracle("accuracy", average="micro", top_k=5)))
    else:
        assert counts.top5 is None


@pytest.mark.parametrize("classes", [2, 10])
def test_the_roc_agrees_with_sklearn(classes: int) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    logits, targets = logits_and_targets(2000, classes, seed=1)
    roc = tally(logits, targets, [2000]).roc()
    assert roc is not None
    probabilities = logits.double().softmax(1)
    truth = torch.nn.functional.one_hot(targets, classes)
    if classes == 2:
        area = sklearn.roc_auc_score(targets, probabilities[:, 1])
    else:
        area = sklearn.roc_auc_score(truth.ravel(), probabilities.ravel())
    assert roc.area == pytest.approx(area, abs=1e-12)
    points = (roc.false_positive_rate, roc.true_positive_rate, roc.threshold)
    assert len({len(column) for column in points}) == 1
    assert 2 < len(roc.threshold) <= 200
    assert all(math.isfinite(value) for column in points for value in column)
    assert (roc.false_positive_rate[0], roc.true_positive_rate[0]) == (0, 0)
    assert (roc.false_positive_rate[-1], roc.true_positive_rate[-1]) == (1, 1)


def test_no_roc_where_one_of_two_classes_is_missing() -> None:
    logits, _ = logits_and_targets(50, 2)
    assert tally(logits, torch.zeros(50, dtype=torch.int64), [50]).roc() is None


def test_saturated_logits_give_finite_numbers() -> None:
    targets = torch.tensor([0, 1, 2])
    logits = torch.nn.functional.one_hot(targets, 3) * 500.0
    counts = tally(logits, targets, [3])
    roc = counts.roc()
    assert roc is not None
    assert roc.area == 1
    assert counts.loss == 0
    assert counts.calibration_error == 0
    assert [(b.samples, b.confidence, b.accuracy) for b in counts.calibration()] == [(3, 1, 1)]


def test_batches_do_not_show_in_the_counts() -> None:
    logits, targets = logits_and_targets(997, 7)
    one, many = tally(logits, targets, [997]), tally(logits, targets, [1] * 97 + [900])
    assert torch.equal(one.confusion, many.confusion)
    assert (one.loss, one.top5, one.calibration()) == (many.loss, many.top5, many.calibration())
    assert one.areas() == many.areas()


def test_a_class_that_is_neither_there_nor_predicted_is_left_out_of_macro_means() -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0], [0.0, 9.0, 0.0]])
    counts = tally(logits, torch.tensor([0, 1]), [2])
    results = counts.per_class(["a", "b", "c"])
    assert (results[2].samples, results[2].f1) == (0, 0)
    assert counts.macro(results) == (1, 1, 1)


def test_wilson_against_published_values() -> None:
    # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(29, 29) == pytest.approx((0.8830, 1.0), abs=5e-5)


def test_a_mean_is_over_classes_that_were_there_or_were_predicted() -> None:
    """Class 1 was only predicted, class 2 was there once, class 3 neither."""
    counts = Tally(4)
    counts.update(10 * torch.eye(4)[[0, 0, 1, 2]], torch.tensor([0, 0, 0, 2]))
    results = counts.per_class(["a", "b", "c", "d"])
    assert counts.macro(results) == pytest.approx((2 / 3, (2 / 3 + 1) / 3, (0.8 + 1) / 3))

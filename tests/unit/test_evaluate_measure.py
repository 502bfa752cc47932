import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kfp_ddp.evaluation import measure, roc
from kfp_ddp.evaluation.measure import Tally, bin_of
from kfp_ddp.models.evaluation import wilson


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
    curve = tally(logits, targets, [2000]).roc()
    assert curve is not None
    probabilities = logits.double().softmax(1)
    truth = torch.nn.functional.one_hot(targets, classes)
    if classes == 2:
        area = sklearn.roc_auc_score(targets, probabilities[:, 1])
    else:
        area = sklearn.roc_auc_score(truth.ravel(), probabilities.ravel())
    assert curve.area == pytest.approx(area, abs=1e-12)
    points = (curve.false_positive_rate, curve.true_positive_rate, curve.threshold)
    assert len({len(column) for column in points}) == 1
    assert 2 < len(curve.threshold) <= 200
    assert all(math.isfinite(value) for column in points for value in column)
    assert (curve.false_positive_rate[0], curve.true_positive_rate[0]) == (0, 0)
    assert (curve.false_positive_rate[-1], curve.true_positive_rate[-1]) == (1, 1)


def test_no_roc_where_one_of_two_classes_is_missing() -> None:
    logits, _ = logits_and_targets(50, 2)
    areas = tally(logits, torch.zeros(50, dtype=torch.int64), [50]).areas()
    assert (areas.roc, areas.per_class, areas.macro) == (None, [None, None], None)


def test_of_no_samples_there_is_no_roc() -> None:
    assert Tally(3).roc() is None


def test_saturated_logits_give_finite_numbers() -> None:
    targets = torch.tensor([0, 1, 2])
    logits = torch.nn.functional.one_hot(targets, 3) * 500.0
    counts = tally(logits, targets, [3])
    curve = counts.roc()
    assert curve is not None
    assert curve.area == 1
    assert counts.loss == 0
    assert counts.calibration_error == 0
    assert [(b.samples, b.confidence, b.accuracy) for b in counts.calibration()] == [(3, 1, 1)]


def test_batches_do_not_show_in_the_counts() -> None:
    logits, targets = logits_and_targets(997, 7)
    one, many = tally(logits, targets, [997]), tally(logits, targets, [1] * 97 + [900])
    assert torch.equal(one.confusion, many.confusion)
    assert one.confusion.dtype == torch.int64
    assert (one.loss, one.top5, one.calibration()) == (many.loss, many.top5, many.calibration())
    assert one.areas() == many.areas()


def test_a_class_that_is_neither_there_nor_predicted_is_left_out_of_macro_means() -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0], [0.0, 9.0, 0.0]])
    counts = tally(logits, torch.tensor([0, 1]), [2])
    results = counts.per_class(["a", "b", "c"])
    assert (results[2].samples, results[2].f1) == (0, 0)
    assert counts.macro(results) == (1, 1, 1)


def test_names_and_results_are_those_of_all_classes() -> None:
    counts = Tally(3)
    counts.update(torch.eye(3), torch.arange(3))
    with pytest.raises(ValueError, match="zip"):
        counts.per_class(["a", "b"])
    with pytest.raises(ValueError, match="zip"):
        counts.macro(counts.per_class(["a", "b", "c"])[:2])


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


def test_tallies_of_ranks_merge_to_that_of_one_process_to_the_last_digit() -> None:
    logits, targets = logits_and_targets(301, 7)
    one = tally(logits, targets, [301])
    for ranks in (2, 3):
        shares = [
            tally(logits[r::ranks], targets[r::ranks], [len(targets[r::ranks])])
            for r in range(ranks)
        ]
        merged = Tally(7)
        merged.merge(share.state() for share in [Tally(7), *reversed(shares)])
        assert torch.equal(merged.confusion, one.confusion)
        assert (merged.samples, merged.loss, merged.top5) == (301, one.loss, one.top5)
        assert merged.calibration() == one.calibration()
        assert merged.areas() == one.areas()


def test_where_a_rank_kept_no_scores_there_is_no_roc(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = logits_and_targets(60, 3)
    few = tally(logits[:20], targets[:20], [20])
    monkeypatch.setattr(measure, "MOST_SCORES", 100)
    many = tally(logits[20:], targets[20:], [40])
    monkeypatch.undo()
    merged = Tally(3)
    merged.merge([few.state(), many.state()])
    assert (merged.samples, merged.logits_in_memory, merged.roc()) == (60, 0, None)
    assert merged.areas().macro is None


def test_of_equally_likely_classes_the_first_counts_as_likelier() -> None:
    """A network that tells nothing has chance level, not all right."""
    counts = tally(torch.zeros(20, 10), torch.arange(20) % 10, [20])
    assert (counts.correct, counts.top5) == (2, 0.5)


def test_a_class_has_ahead_of_it_what_is_likelier_and_what_ties_before_it() -> None:
    """The last has three and two before it, so it is the sixth; class 4 is the fifth."""
    logits = torch.tensor([3.0, 3, 3, 1, 1, 0, 1]).expand(2, 7)
    assert tally(logits, torch.tensor([6, 4]), [2]).top5 == 0.5


def test_a_confidence_is_in_the_bin_that_ends_at_it() -> None:
    bins = bin_of(np.array([0.01, 1 / 15, 0.07, 0.5, 14 / 15, 0.94, 1.0], np.float32))
    assert bins.dtype == np.int64
    assert bins.tolist() == [0, 0, 1, 7, 13, 14, 14]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_area_of_each_of_many_classes_is_sklearns(monkeypatch: pytest.MonkeyPatch) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    monkeypatch.setattr(roc, "_BLOCK", 1000)  # so that there are many blocks
    logits, targets = logits_and_targets(400, 60, seed=2)
    targets[targets == 59] = 0
    found = tally(logits, targets, [250, 150]).areas()
    score = logits.double().softmax(1)
    own = [sklearn.roc_auc_score(targets == name, score[:, name]) for name in range(59)]
    assert found.per_class[:59] == pytest.approx(own, abs=1e-12)
    assert found.per_class[59:] == [None]
    assert found.macro == pytest.approx(sum(own) / 59)
    assert found.roc is not None
    truth = torch.nn.functional.one_hot(targets, 60)
    area = sklearn.roc_auc_score(truth.ravel(), score.ravel())
    assert found.roc.area == pytest.approx(area, abs=1e-12)
    assert (found.roc.false_positive_rate[-1], found.roc.true_positive_rate[-1]) == (1, 1)
    assert sorted(found.roc.false_positive_rate) == found.roc.false_positive_rate
    assert len(found.roc.threshold) <= 200


def test_the_intervals_of_a_class_are_wilsons_and_none_where_there_is_nothing() -> None:
    counts = Tally(3)
    counts.update(10 * torch.eye(3)[[0, 0, 1]], torch.tensor([0, 1, 1]))
    first, second, third = counts.per_class(["a", "b", "c"])
    assert (first.recall_low, first.recall_high) == wilson(1, 1)
    assert (first.precision_low, first.precision_high) == wilson(1, 2)
    assert (second.recall_low, second.recall_high) == wilson(1, 2)
    assert (third.recall_low, third.precision_high, third.roc_auc) == (None, None, None)
    told = counts.per_class(["a", "b", "c"], [0.5, 0.75, None])
    assert [one.roc_auc for one in told] == [0.5, 0.75, None]

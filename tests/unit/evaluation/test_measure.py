"""Metrics of a tally, the ROC with its areas, and intervals."""

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kfp_ddp.evaluation import measure, roc
from kfp_ddp.evaluation.measure import COLUMNS, Tally, balanced_accuracy, bin_of, bootstrap
from kfp_ddp.evaluation.roc import Roc
from kfp_ddp.models.evaluation import wilson

SCALES = (1e-6, 1e-3, 0.01, 0.3, 1.0, 5.0, 30.0, 300.0, 1e4)


def logits_and_targets(n: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return informative logits, with equal rows, and targets."""
    draw = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (n,), generator=draw)
    targets[:2] = torch.tensor([0, 1])
    logits = torch.randn(n, classes, generator=draw)
    logits[torch.arange(n), targets] += 1.2
    logits[n // 2 : n // 2 + n // 8] = logits[: n // 8]
    return logits, targets


def tally_of(logits: Tensor, targets: Tensor, size: int | list[int] = 10_000) -> Tally:
    tally = Tally(logits.shape[1])
    for part, truth in zip(torch.split(logits, size), torch.split(targets, size), strict=True):
        tally.update(part, truth)
    return tally


def curve_of(logits: Tensor, targets: Tensor) -> Roc:
    curve = tally_of(logits, targets).areas().roc
    assert curve is not None
    return curve


def exact_area(logits: Tensor, targets: Tensor) -> float:
    """Return the share of pairs whose positive is higher, scores compared with 60 digits."""
    positive: list[Decimal] = []
    negative: list[Decimal] = []
    with localcontext() as context:
        context.prec = 60  # more than needed, so that equal odds are equal after rounding
        context.Emin, context.Emax = -(10**9), 10**9
        for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
            powers = [Decimal(value).exp() for value in row]
            for name in [1] if len(row) == 2 else range(len(row)):
                others = sum(sorted(p for at, p in enumerate(powers) if at != name))
                odds = (powers[name] / others).ln().quantize(Decimal("1e-40"))
                (positive if name == target else negative).append(odds)
    wins = sum((p > n) + 0.5 * (p == n) for p in positive for n in negative)
    return wins / (len(positive) * len(negative))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.sampled_from([2, 3, 10]), st.sampled_from(SCALES), st.integers(0, 99), st.booleans())
def test_area_is_that_of_all_pairs(classes: int, scale: float, seed: int, coarse: bool) -> None:
    logits, targets = logits_and_targets(48, classes, seed)
    logits = (2 * logits).round() / 2 if coarse else logits * scale  # coarse logits have ties
    areas = tally_of(logits, targets, 7 + seed % 9).areas()
    assert areas.roc is not None
    assert areas.roc.area == pytest.approx(exact_area(logits, targets), abs=1e-12)


@pytest.mark.parametrize("classes", [2, 10, 60])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_areas_agree_with_sklearn(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    monkeypatch.setattr(roc, "_BLOCK", 1000)  # so that there are many blocks
    logits, targets = logits_and_targets(400, classes, seed=2)
    targets[targets == 59] = 0
    areas = tally_of(logits, targets, 250).areas()
    score = logits.double().softmax(1)
    truth = torch.nn.functional.one_hot(targets, classes)
    known = range(min(classes, 59))
    expected = [sklearn.roc_auc_score(truth[:, name], score[:, name]) for name in known]
    assert areas.per_class == pytest.approx([*expected, *[None] * (classes - len(known))])
    assert areas.macro == pytest.approx(sum(expected) / len(known))
    curve = areas.roc
    assert curve is not None
    pooled = (targets, score[:, 1]) if classes == 2 else (truth.ravel(), score.ravel())
    assert curve.area == pytest.approx(sklearn.roc_auc_score(*pooled), abs=1e-12)
    false, true = curve.false_positive_rate, curve.true_positive_rate
    assert len(false) == len(true) == len(curve.threshold) <= 200
    assert (false[0], true[0], curve.threshold[0]) == (0, 0, 1)
    assert (false[-1], true[-1]) == (1, 1)
    assert sorted(false) == false
    assert torch.tensor([false, true, curve.threshold]).isfinite().all()


@pytest.mark.parametrize(("samples", "classes"), [(3000, 2), (60, 3)])
def test_curve(samples: int, classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three classes with a block each; of two, the odds are of the second."""
    monkeypatch.setattr(roc, "_BLOCK", 60 if classes == 3 else roc._BLOCK)
    logits, targets = logits_and_targets(samples, classes, seed=5)
    curve = curve_of(logits, targets)
    exact = logits.double()
    others = [exact[:, [at for at in range(classes) if at != c]] for c in range(classes)]
    odds = torch.stack([exact[:, c] - o.logsumexp(1) for c, o in enumerate(others)], 1)
    truth = torch.nn.functional.one_hot(targets, classes)
    if classes == 2:
        odds, truth = odds[:, 1], truth[:, 1]
    scores = odds.sigmoid()
    points = zip(curve.threshold, curve.false_positive_rate, curve.true_positive_rate, strict=True)
    next(points)
    for threshold, fpr, tpr in points:
        positive = (scores >= threshold - 1e-12).double()
        assert fpr == pytest.approx(float(positive[truth == 0].mean()), abs=2e-3)
        assert tpr == pytest.approx(float(positive[truth == 1].mean()), abs=2e-3)
    ends = [1.0, float(scores.max()), float(scores.min())]
    assert [*curve.threshold[:2], curve.threshold[-1]] == pytest.approx(ends, abs=1e-12)
    assert len(curve.threshold) > 20


def test_curve_has_99_levels_of_each_side_and_the_origin() -> None:
    logits, targets = torch.zeros(1960, 2), torch.arange(1960) % 2
    logits[:, 1] = torch.linspace(-3, 3, 1960)
    curve = curve_of(logits, targets)
    assert len(curve.threshold) == len(curve.true_positive_rate) == 199


def test_areas_are_empty_without_scores_and_with_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Tally(3).areas().roc is None
    one_class = tally_of(logits_and_targets(50, 2)[0], torch.zeros(50, dtype=torch.int64)).areas()
    assert (one_class.roc, one_class.per_class, one_class.macro) == (None, [None, None], None)
    logits, targets = logits_and_targets(100, 3)
    few = tally_of(logits, targets)
    assert few.areas().roc is not None
    monkeypatch.setattr(measure, "MOST_SCORES", 3 * 100)
    many = tally_of(logits.repeat(2, 1), targets.repeat(2), 100)
    both = Tally(3)
    for one in (few, many):
        both.add({name: one.column(name) for name in COLUMNS})
    for tally, samples in ((many, 200), (both, 300)):
        areas = tally.areas()
        assert (tally.samples, len(tally.column("logits"))) == (samples, 0)
        assert (areas.roc, areas.macro) == (None, None)


@pytest.mark.parametrize("classes", [2, 3, 10, 60])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_metrics_agree_with_torchmetrics(classes: int) -> None:
    functional = pytest.importorskip("torchmetrics.functional.classification")
    logits, targets = logits_and_targets(1003, classes)
    counts = tally_of(logits, targets, [400, 1, 602])
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
    counts = tally_of(torch.nn.functional.one_hot(targets, 3) * 500.0, targets, [3])
    curve = counts.areas().roc
    assert curve is not None
    assert (curve.area, counts.loss, counts.calibration_error) == (1, 0, 0)
    assert [(b.samples, b.confidence, b.accuracy) for b in counts.calibration()] == [(3, 1, 1)]


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
    counts = tally_of(torch.zeros(20, 10), torch.arange(20) % 10, [20])
    assert (counts.correct, counts.top5) == (2, 0.5)
    # Class 6 has three above it and two equal ones before it, so it is the sixth; class 4 is fifth.
    logits = torch.tensor([3.0, 3, 3, 1, 1, 0, 1]).expand(2, 7)
    assert tally_of(logits, torch.tensor([6, 4]), [2]).top5 == 0.5


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


SHARES = (0.6, 0.25, 0.1, 0.05)
NAMES = ["a", "b", "c", "d"]


def random_tally(n: int, seed: int, scale: float = 1.0) -> Tally:
    """Return a model of four classes, one of them rare; `scale` makes it overconfident."""
    draw = np.random.default_rng(seed)
    targets = draw.choice(4, n, p=SHARES)
    logits = draw.standard_normal((n, 4))
    # The log of the share makes the confidence the probability of a correct prediction.
    logits = 2 * (logits + 2 * np.eye(4)[targets]) + np.log(SHARES)
    tally = Tally(4)
    tally.update(torch.from_numpy(scale * logits).float(), torch.from_numpy(targets))
    return tally


def two_classes(predicted: list[int], targets: list[int]) -> Tally:
    tally = Tally(2)
    tally.update(8 * torch.eye(2)[predicted], torch.tensor(targets))
    return tally


@pytest.mark.parametrize(
    ("predicted", "targets", "counts"),
    [
        ([0, 0, 1], [0, 0, 0], [(2, 3)]),  # a single class: the interval of Wilson
        ([0, 0, 1, 1], [0, 0, 1, 1], [(2, 2), (2, 2)]),
        ([0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1], [(3, 4), (1, 2)]),
    ],
)
def test_the_interval_adds_the_distances_of_classes_as_squares(
    predicted: list[int], targets: list[int], counts: list[tuple[int, int]]
) -> None:
    classes = two_classes(predicted, targets).per_class(["a", "b"])
    value, interval = balanced_accuracy(classes)
    recalls, ends = [hits / n for hits, n in counts], [wilson(*count) for count in counts]
    below = math.hypot(*(p - low for p, (low, _) in zip(recalls, ends, strict=True)))
    above = math.hypot(*(high - p for p, (_, high) in zip(recalls, ends, strict=True)))
    n = len(counts)
    assert value == pytest.approx(sum(recalls) / n)
    assert interval.low == pytest.approx(value - below / n)
    assert interval.high == pytest.approx(min(1, value + above / n))


def test_intervals_contain_the_true_value_in_19_of_20_cases() -> None:
    many = random_tally(400_000, 1, 0.5)
    classes = many.per_class(NAMES)
    true = {
        "balanced_accuracy": balanced_accuracy(classes)[0],
        "macro_f1": many.macro(classes)[2],
        "calibration_error": many.calibration_error,
    }
    covered, trials = dict.fromkeys(true, 0), 100
    for seed in range(trials):
        tally = random_tally(400, 100 + seed, 0.5)
        ends = bootstrap(tally, 150)
        ends["balanced_accuracy"] = balanced_accuracy(tally.per_class(NAMES))[1]
        for name, value in true.items():
            covered[name] += ends[name].low <= value <= ends[name].high
    assert min(covered.values()) >= 0.88 * trials
    assert true["calibration_error"] > 0.05


def test_intervals_do_not_depend_on_batches_and_their_order() -> None:
    one = random_tally(300, 3)
    other = Tally(4)
    for at in (slice(200, 300), slice(0, 200)):
        other.add({name: one.column(name)[at] for name in COLUMNS})
    assert bootstrap(one, 50) == bootstrap(other, 50)


def test_there_is_no_bootstrap_without_variation_or_resamples() -> None:
    assert bootstrap(two_classes([0, 1], [0, 1]), 100) == {}
    assert bootstrap(two_classes([0, 1], [1, 0]), 100) == {}
    assert bootstrap(random_tally(100, 4), 0) == {}


def test_the_interval_of_an_error_is_mirrored_at_the_value() -> None:
    spread = np.linspace(0.2, 0.6, 1001)
    for value, low, high in ((0.5, 0.21, 0.79), (0.3, 0.01, 0.59), (0.25, 0, 0.59)):
        interval = measure._off_zero(value, spread, np.zeros(1001))
        assert (interval.low, interval.high) == pytest.approx((low, high))
    # A probability of 5 % and a tie count as chance.
    luck = np.array([0.0] * 19 + [0.5])
    for tie in (0.5, 0.5 + 1e-15):
        assert measure._off_zero(tie, spread, luck).low == 0
    assert measure._off_zero(0.51, spread, luck).low > 0.2
    assert measure._off_zero(0.6, spread, luck).high == pytest.approx(0.99)
    assert measure._off_zero(0.9, spread, luck).high == 1  # it is a share
    assert measure._off_zero(0.1, np.array([0.0, 0.0]), luck).high == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("value", "below"),
    [(0.5, 0.5), (0.5 + 1e-15, 0.5), (0.1, 0.1005), (-1, 0.0005), (2, 0.9995)],
)
def test_percentiles_are_moved_by_the_share_of_resamples_below(value: float, below: float) -> None:
    ends = np.arange(300) / 1000
    resamples = np.concatenate([ends, np.full(400, 0.5), 0.7 + ends])
    normal = NormalDist()
    shares = [normal.cdf(2 * normal.inv_cdf(below) + side * 1.959964) for side in (-1, 1)]
    low, high = np.quantile(resamples, shares)
    interval = measure._bias_corrected(value, resamples)
    assert (interval.low, interval.high) == pytest.approx((min(low, value), max(high, value)))

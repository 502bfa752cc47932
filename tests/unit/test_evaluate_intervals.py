"""Intervals of metrics that are not shares."""

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch

from kfp_ddp.evaluation import intervals
from kfp_ddp.evaluation.intervals import balanced_accuracy, bootstrap
from kfp_ddp.evaluation.measure import Tally
from kfp_ddp.models.evaluation import wilson

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
    state = one.state()
    other = Tally(4)
    for at in (slice(200, 300), slice(0, 200)):
        other.merge([{n: v[at] if v.ndim else v for n, v in state.items()}])
    assert bootstrap(one, 50) == bootstrap(other, 50)


def test_there_is_no_bootstrap_without_variation_or_resamples() -> None:
    assert bootstrap(two_classes([0, 1], [0, 1]), 100) == {}
    assert bootstrap(two_classes([0, 1], [1, 0]), 100) == {}
    assert bootstrap(random_tally(100, 4), 0) == {}


def test_the_interval_of_an_error_is_mirrored_at_the_value() -> None:
    spread = np.linspace(0.2, 0.6, 1001)
    for value, low, high in ((0.5, 0.21, 0.79), (0.3, 0.01, 0.59), (0.25, 0, 0.59)):
        interval = intervals._off_zero(value, spread, np.zeros(1001))
        assert (interval.low, interval.high) == pytest.approx((low, high))
    # A probability of 5 % and a tie count as chance.
    luck = np.array([0.0] * 19 + [0.5])
    assert intervals._off_zero(0.5, spread, luck).low == 0
    assert intervals._off_zero(0.51, spread, luck).low > 0.2
    assert intervals._off_zero(0.9, spread, luck).high == pytest.approx(1.59)
    assert intervals._off_zero(0.1, np.array([0.0, 0.0]), luck).high == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("value", "below"), [(0.5, 0.5), (0.1, 0.1005), (-1.0, 0.0005), (2.0, 0.9995)]
)
def test_percentiles_are_moved_by_the_share_of_resamples_below(value: float, below: float) -> None:
    ends = np.arange(300) / 1000
    resamples = np.concatenate([ends, np.full(400, 0.5), 0.7 + ends])
    normal = NormalDist()
    shares = [normal.cdf(2 * normal.inv_cdf(below) + side * 1.959964) for side in (-1, 1)]
    low, high = np.quantile(resamples, shares)
    interval = intervals._bias_corrected(value, resamples)
    assert (interval.low, interval.high) == pytest.approx((min(low, value), max(high, value)))

"""Intervals of metrics that are no shares."""

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


def drawn(n: int, seed: int, scale: float = 1.0) -> Tally:
    """A model of four classes, one of them rare; `scale` makes it surer than it should be."""
    draw = np.random.default_rng(seed)
    targets = draw.choice(4, n, p=SHARES)
    logits = draw.standard_normal((n, 4))
    # The log of the share makes the confidence the chance to be right.
    logits = 2 * (logits + 2 * np.eye(4)[targets]) + np.log(SHARES)
    tally = Tally(4)
    tally.update(torch.from_numpy(scale * logits).float(), torch.from_numpy(targets))
    return tally


def names() -> list[str]:
    return ["a", "b", "c", "d"]


def test_balanced_accuracy_of_one_class_is_that_of_wilson() -> None:
    tally = Tally(2)
    tally.update(torch.tensor([[2.0, 0], [2.0, 0], [0, 2.0]]), torch.tensor([0, 0, 0]))
    value, interval = balanced_accuracy(tally.per_class(["a", "b"]))
    assert value == pytest.approx(2 / 3)
    assert (interval.low, interval.high) == pytest.approx(wilson(2, 3))


def test_balanced_accuracy_is_the_mean_recall_and_says_something_without_a_mistake() -> None:
    tally = drawn(500, 0)
    value, _ = balanced_accuracy(tally.per_class(names()))
    targets, hits = tally.column("targets"), tally.column("targets") == tally.column("predicted")
    assert value == pytest.approx(np.mean([hits[targets == name].mean() for name in range(4)]))
    perfect = Tally(2)
    perfect.update(8 * torch.eye(2)[[0, 0, 1, 1]], torch.tensor([0, 0, 1, 1]))
    value, interval = balanced_accuracy(perfect.per_class(["a", "b"]))
    half = (1 - wilson(2, 2)[0]) / math.sqrt(2)
    assert (value, interval.high) == (1, 1)
    assert interval.low == pytest.approx(1 - half)


def test_balanced_accuracy_adds_the_distances_of_the_classes_as_squares() -> None:
    tally = Tally(2)
    tally.update(8 * torch.eye(2)[[0, 0, 0, 1, 1, 0]], torch.tensor([0, 0, 0, 0, 1, 1]))
    value, interval = balanced_accuracy(tally.per_class(["a", "b"]))
    (low, high), (lower, higher) = wilson(3, 4), wilson(1, 2)
    assert value == pytest.approx(0.625)
    assert interval.low == pytest.approx(0.625 - math.hypot(0.75 - low, 0.5 - lower) / 2)
    assert interval.high == pytest.approx(0.625 + math.hypot(high - 0.75, higher - 0.5) / 2)


def test_the_true_values_lie_in_the_intervals_19_times_of_20() -> None:
    many = drawn(400_000, 1, 0.5)
    classes = many.per_class(names())
    true = {
        "balanced_accuracy": balanced_accuracy(classes)[0],
        "macro_f1": many.macro(classes)[2],
        "calibration_error": many.calibration_error,
    }
    held, trials = dict.fromkeys(true, 0), 100
    for seed in range(trials):
        tally = drawn(400, 100 + seed, 0.5)
        found = bootstrap(tally, 150)
        found["balanced_accuracy"] = balanced_accuracy(tally.per_class(names()))[1]
        for name, value in true.items():
            held[name] += found[name].low <= value <= found[name].high
    assert min(held.values()) >= 0.88 * trials
    assert true["calibration_error"] > 0.05


def test_an_error_that_chance_alone_gives_may_be_none() -> None:
    zero = [bootstrap(drawn(300, seed), 100)["calibration_error"].low == 0 for seed in range(20)]
    assert sum(zero) >= 16
    assert bootstrap(drawn(500, 2, 3.0), 200)["calibration_error"].low > 0.02


def test_neither_batches_nor_their_order_show_in_an_interval() -> None:
    one = drawn(300, 3)
    state = one.state()
    other = Tally(4)
    for at in (slice(200, 300), slice(0, 200)):
        other.merge([{n: v[at] if v.ndim else v for n, v in state.items()}])
    assert bootstrap(one, 50) == bootstrap(other, 50)


def test_without_a_mistake_or_resamples_there_is_no_bootstrap() -> None:
    perfect = Tally(2)
    perfect.update(8 * torch.eye(2), torch.arange(2))
    assert bootstrap(perfect, 100) == {}
    assert bootstrap(drawn(100, 4), 0) == {}
    wrong = Tally(2)
    wrong.update(8 * torch.eye(2), 1 - torch.arange(2))
    assert bootstrap(wrong, 100) == {}


def test_a_metric_lies_in_its_interval() -> None:
    for seed in range(20):
        tally = drawn(12, 50 + seed)
        found = bootstrap(tally, 40)
        if found:
            macro = tally.macro(tally.per_class(names()))[2]
            for name, value in (
                ("macro_f1", macro),
                ("calibration_error", tally.calibration_error),
            ):
                assert found[name].low - 1e-9 <= value <= found[name].high + 1e-9


def test_the_interval_of_an_error_reaches_as_far_on_either_side() -> None:
    spread = np.linspace(0.2, 0.6, 1001)
    for found, low, high in ((0.5, 0.21, 0.79), (0.3, 0.01, 0.59), (0.25, 0, 0.59)):
        interval = intervals._off_zero(found, spread, np.zeros(1001))
        assert (interval.low, interval.high) == pytest.approx((low, high))


def test_a_chance_of_5_percent_and_a_tie_count_as_chance() -> None:
    spread = np.linspace(0.2, 0.6, 1001)
    luck = np.array([0.0] * 19 + [0.5])
    assert intervals._off_zero(0.5, spread, luck).low == 0
    assert intervals._off_zero(0.51, spread, luck).low > 0.2
    assert intervals._off_zero(0.9, spread, luck).high == pytest.approx(1.59)
    assert intervals._off_zero(0.1, np.array([0.0, 0.0]), luck).high == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("found", "below"), [(0.5, 0.5), (0.1, 0.1005), (-1.0, 0.0005), (2.0, 0.9995)]
)
def test_percentiles_are_moved_by_the_share_of_resamples_below(found: float, below: float) -> None:
    ends = np.arange(300) / 1000
    resamples = np.concatenate([ends, np.full(400, 0.5), 0.7 + ends])
    normal = NormalDist()
    shares = [normal.cdf(2 * normal.inv_cdf(below) + side * 1.959964) for side in (-1, 1)]
    low, high = np.quantile(resamples, shares)
    interval = intervals._bias_corrected(found, resamples)
    assert interval.low == pytest.approx(min(low, found))
    assert interval.high == pytest.approx(max(high, found))

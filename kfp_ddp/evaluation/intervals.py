"""Intervals of metrics that are no shares, which Wilson's does not fit."""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfp_ddp.evaluation.measure import CALIBRATION_BINS, Tally, bin_of
from kfp_ddp.models.evaluation import Z_95, ClassResult, Interval

Array = NDArray[Any]


def balanced_accuracy(classes: Sequence[ClassResult]) -> tuple[float, Interval]:
    """The mean recall of the classes with samples, with its interval.

    Wilson's distances of the classes, added as squares (MOVER; Zou and Donner 2008, Statistics in
    Medicine 27:1693): it holds for small classes and at 0 and 1 too.
    """
    there = [(one.recall, one.recall_low, one.recall_high) for one in classes]
    known = [(own, low, high) for own, low, high in there if low is not None and high is not None]
    mean = math.fsum(own for own, _, _ in known) / len(known)
    below = math.hypot(*(own - low for own, low, _ in known)) / len(known)
    above = math.hypot(*(high - own for own, _, high in known)) / len(known)
    return mean, Interval(low=max(0.0, mean - below), high=min(1.0, mean + above))


def bootstrap(tally: Tally, resamples: int) -> dict[str, Interval]:
    """95 % intervals of `macro_f1` and `calibration_error`, the same whatever the samples' order.

    None at all where every sample was told right or none was: what never occurred is in no
    resample.

    Args:
        tally: Of all samples.
        resamples: How many samples of the samples are drawn; 0 for no intervals.
    """
    if not resamples or tally.correct in (0, tally.samples):
        return {}
    names = ("targets", "predicted", "confidence")
    targets, predicted, confidence = (tally.column(name) for name in names)
    order = np.lexsort((confidence, predicted, targets))
    targets, predicted, confidence = targets[order], predicted[order], confidence[order]
    bins, sizes = bin_of(confidence), {"minlength": tally.classes}
    confidence = confidence.astype(np.float64)
    gaps = confidence - (targets == predicted)

    def macro_f1(at: Array) -> float:
        own, said = targets[at], predicted[at]
        weight = np.bincount(own, **sizes) + np.bincount(said, **sizes)
        right = np.bincount(own[own == said], **sizes)
        seen = weight > 0
        return float((2 * right[seen] / weight[seen]).mean())

    def error(bins: Array, gaps: Array) -> float:
        return float(np.abs(np.bincount(bins, gaps, CALIBRATION_BINS)).sum() / len(gaps))

    n, draw = tally.samples, np.random.default_rng(0)
    drawn = np.empty((resamples, 3))
    for row in drawn:
        at = draw.integers(0, n, n)
        # The last is of a model whose every confidence is the chance to be right.
        luck = error(bins, confidence - (draw.random(n) < confidence))
        row[:] = macro_f1(at), error(bins[at], gaps[at]), luck
    f1, errors, lucky = drawn.T
    return {
        "macro_f1": _bias_corrected(macro_f1(np.arange(n)), f1),
        "calibration_error": _off_zero(error(bins, gaps), errors, lucky),
    }


def _bias_corrected(found: float, drawn: Array) -> Interval:
    """Percentiles by the share of resamples below (Efron 1981, Canadian J. Statistics 9:139)."""
    normal, n = NormalDist(), len(drawn)
    below = float((drawn < found).sum() + (drawn == found).sum() / 2) / n
    bias = 2 * normal.inv_cdf(min(max(below, 0.5 / n), 1 - 0.5 / n))
    low, high = np.quantile(drawn, [normal.cdf(bias - Z_95), normal.cdf(bias + Z_95)]).tolist()
    return Interval(low=min(low, found), high=max(high, found))


def _off_zero(found: float, drawn: Array, luck: Array) -> Interval:
    """Percentiles and those mirrored at what was found, the wider: resamples lie further off 0.

    From 0 where chance alone gives as much to the perfectly calibrated in 5 % of cases (Broecker
    and Smith 2007, Weather and Forecasting 22:651).
    """
    low, high = np.quantile(drawn, [0.025, 0.975]).tolist()
    least = 0.0 if (luck >= found).mean() >= 0.05 else min(low, max(0.0, 2 * found - high))
    return Interval(low=min(least, found), high=max(high, 2 * found - low, found))

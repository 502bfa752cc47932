"""Intervals of metrics that are not shares, so that Wilson's interval does not apply."""

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
    """Return the mean recall of the classes with samples, and its interval.

    The Wilson distances of the classes, added as squares (MOVER; Zou and Donner 2008, Statistics
    in Medicine 27:1693), which is valid for small classes and at 0 and 1.
    """
    recalls = [(one.recall, one.recall_low, one.recall_high) for one in classes]
    known = [(own, low, high) for own, low, high in recalls if low is not None and high is not None]
    mean = math.fsum(own for own, _, _ in known) / len(known)
    below = math.hypot(*(own - low for own, low, _ in known)) / len(known)
    above = math.hypot(*(high - own for own, _, high in known)) / len(known)
    return mean, Interval(low=max(0.0, mean - below), high=min(1.0, mean + above))


def bootstrap(tally: Tally, resamples: int) -> dict[str, Interval]:
    """Return 95 % intervals of `macro_f1` and `calibration_error`, for any order of the samples.

    Empty if all samples are correct or all are incorrect, as resamples then do not vary, and for 0
    resamples.
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
        true, guess = targets[at], predicted[at]
        weight = np.bincount(true, **sizes) + np.bincount(guess, **sizes)
        right = np.bincount(true[true == guess], **sizes)
        seen = weight > 0
        return float((2 * right[seen] / weight[seen]).mean())

    def error(bins: Array, gaps: Array) -> float:
        return float(np.abs(np.bincount(bins, gaps, CALIBRATION_BINS)).sum() / len(gaps))

    n, draw = tally.samples, np.random.default_rng(0)
    drawn = np.empty((resamples, 3))
    for row in drawn:
        at = draw.integers(0, n, n)
        # The last is of a perfectly calibrated model with the same confidences.
        luck = error(bins, confidence - (draw.random(n) < confidence))
        row[:] = macro_f1(at), error(bins[at], gaps[at]), luck
    f1, errors, lucky = drawn.T
    return {
        "macro_f1": _bias_corrected(macro_f1(np.arange(n)), f1),
        "calibration_error": _off_zero(error(bins, gaps), errors, lucky),
    }


def _bias_corrected(value: float, drawn: Array) -> Interval:
    """Return bias-corrected percentiles (Efron 1981, Canadian J. Statistics 9:139)."""
    normal, n = NormalDist(), len(drawn)
    below = float((drawn < value).sum() + (drawn == value).sum() / 2) / n
    bias = 2 * normal.inv_cdf(min(max(below, 0.5 / n), 1 - 0.5 / n))
    low, high = np.quantile(drawn, [normal.cdf(bias - Z_95), normal.cdf(bias + Z_95)]).tolist()
    return Interval(low=min(low, value), high=max(high, value))


def _off_zero(value: float, drawn: Array, luck: Array) -> Interval:
    """Return the wider of two intervals, percentiles and percentiles mirrored at the value.

    Resampling overestimates the error. The low end is 0 if a perfectly calibrated model has such an
    error in 5 % of cases (Broecker and Smith 2007, Weather and Forecasting 22:651).
    """
    low, high = np.quantile(drawn, [0.025, 0.975]).tolist()
    least = 0.0 if (luck >= value).mean() >= 0.05 else min(low, max(0.0, 2 * value - high))
    return Interval(low=min(least, value), high=min(1.0, max(high, 2 * value - low, value)))

"""Classification metrics from logits, batch by batch and from any number of ranks.

Results of each sample are retained, counts are integers, and sums are rounded once (`math.fsum`).
So results do not depend on batches, ranks or their order.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kfp_ddp.evaluation.roc import Areas, areas
from kfp_ddp.models.evaluation import Z_95, CalibrationBin, ClassResult, Interval, wilson

COLUMNS = ("targets", "predicted", "confidence", "loss", "top5", "logits")
"""Results of a sample; `top5` is whether the true class is among the five likeliest."""
CALIBRATION_BINS = 15
MOST_SCORES = 1 << 26
"""Maximum logits for the ROC, one for each class and sample: 268 MB. With more there is no ROC."""
_ROUNDING = 1e-12
"""Figures of two resamples that are as close are equal: they are sums in different orders."""

Array = NDArray[Any]


class Tally:
    """Results of batches of logits (N, C) and targets (N,), for C of at least 2.

    References to the logits are retained for the ROC: do not modify them.
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.samples = 0
        self._columns: dict[str, list[Array]] = {name: [] for name in COLUMNS}
        self._scratch: Array = np.empty(0)
        self._areas: Areas | None = None

    @torch.inference_mode()
    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Count a batch."""
        scores = logits.cpu().numpy()
        truth = targets.cpu().numpy()
        rows = np.arange(len(truth))
        predicted = scores.argmax(1)
        first = scores[rows, predicted]
        own = scores[rows, truth]
        if (len(scores), scores.dtype) != (len(self._scratch), self._scratch.dtype):
            self._scratch = np.empty_like(scores)
        total = np.exp(np.subtract(scores, first[:, None], out=self._scratch), out=self._scratch)
        total = total.sum(1)
        confidence = 1 / total
        loss = np.log(total) + (first - own)
        top5 = _ahead(scores, own, truth, predicted) < 5
        values = (truth, predicted, confidence, loss, top5, scores)
        self.add(dict(zip(COLUMNS, values, strict=True)))

    def add(self, columns: Mapping[str, Array]) -> None:
        """Add the `COLUMNS` of samples. Unless all have logits there is no ROC."""
        self.samples += len(columns["targets"])
        self._areas = None
        for name, values in columns.items():
            self._columns[name].append(values)
        complete = sum(map(len, self._columns["logits"])) == self.samples
        if not complete or self.samples * self.classes > MOST_SCORES:
            self._columns["logits"] = []

    def column(self, name: str) -> Array:
        """Return one of the `COLUMNS` in counting order; logits may be left out."""
        return np.concatenate(self._columns[name] or [np.empty((0, self.classes))])

    @property
    def confusion(self) -> Tensor:
        """Counts (C, C) int64 by true and predicted class."""
        pairs = self.column("targets") * self.classes + self.column("predicted")
        counts = np.bincount(pairs, minlength=self.classes**2)
        return torch.from_numpy(counts.reshape(self.classes, self.classes))

    @property
    def correct(self) -> int:
        """Samples whose likeliest class is the true one."""
        return int((self.column("targets") == self.column("predicted")).sum())

    @property
    def loss(self) -> float:
        """Mean cross-entropy in nats."""
        return math.fsum(self.column("loss").tolist()) / self.samples

    @property
    def top5(self) -> float | None:
        """Share with the true class among the five likeliest; None with five classes or fewer."""
        return int(self.column("top5").sum()) / self.samples if self.classes > 5 else None

    def per_class(
        self, names: list[str], roc_auc: list[float | None] | None = None
    ) -> list[ClassResult]:
        """Return precision, recall and F1 of each class; 0 instead of a division by 0."""
        targets = self.column("targets")
        predicted = self.column("predicted")
        counted = (targets[targets == predicted], targets, predicted)
        counts = [np.bincount(samples, minlength=self.classes).tolist() for samples in counted]
        rows = zip(names, *counts, roc_auc or [None] * self.classes, strict=True)
        return [_result(*row) for row in rows]

    def macro(self, results: list[ClassResult]) -> tuple[float, float, float]:
        """Return mean precision, recall and F1 of the classes with samples or predictions."""
        seen = [results[at] for at in np.union1d(self.column("targets"), self.column("predicted"))]
        rows = zip(*((r.precision, r.recall, r.f1) for r in seen), strict=True)
        precision, recall, f1 = (sum(row) / len(seen) for row in rows)
        return precision, recall, f1

    def _bins(self) -> list[tuple[int, float, int]]:
        """Return samples, summed confidence and hits of each bin of the confidence."""
        confidence = self.column("confidence")
        hits = self.column("targets") == self.column("predicted")
        bins = bin_of(confidence)
        return [
            (int(own.sum()), math.fsum(confidence[own].tolist()), int(hits[own].sum()))
            for own in (bins == number for number in range(CALIBRATION_BINS))
        ]

    def calibration(self) -> list[CalibrationBin]:
        """Return the reliability diagram: bins of equal width, without empty ones."""
        return [
            CalibrationBin(samples=n, confidence=c / n, accuracy=h / n)
            for n, c, h in self._bins()
            if n
        ]

    @property
    def calibration_error(self) -> float:
        """Expected calibration error, L1 over 15 bins (Guo et al. 2017, equation 3)."""
        return math.fsum(abs(c - h) for _, c, h in self._bins()) / self.samples

    def areas(self) -> Areas:
        """Return the ROC of class 1 of two, or micro-averaged, and each class against the rest.

        Areas are exact. Empty with more than 2^26 logits. The area of a class is None if all
        samples are of this class, or none is.
        """
        if self._areas is None:
            self._areas = areas(self._columns["logits"], self._columns["targets"], self.classes)
        return self._areas


def bin_of(confidence: Array) -> NDArray[np.int64]:
    """Return the bin of each value, closed on the right (Guo et al. 2017, arXiv:1706.04599)."""
    number: NDArray[np.int64] = np.ceil(confidence * CALIBRATION_BINS).astype(np.int64) - 1
    return number


def _ahead(logits: Array, own: Array, targets: Array, predicted: Array) -> NDArray[np.int64]:
    """Count the classes above the true one; of equal scores the first is above."""
    likelier: NDArray[np.int64]
    likelier = (logits > own[:, None]).sum(1, dtype=np.uint32).astype(np.int64)  # int64 takes more
    close = ((likelier < 5) & (targets != predicted)).nonzero()[0]
    before = np.arange(logits.shape[1]) < targets[close, None]
    likelier[close] += ((logits[close] == own[close, None]) & before).sum(1)
    return likelier


def _result(
    name: str, hits: int, samples: int, predicted: int, roc_auc: float | None
) -> ClassResult:
    """Return one class from its samples, its predictions, and those in both."""
    recall, precision = (wilson(hits, n) if n else (None, None) for n in (samples, predicted))
    return ClassResult(
        name=name,
        samples=samples,
        precision=hits / max(predicted, 1),
        recall=hits / max(samples, 1),
        f1=2 * hits / max(samples + predicted, 1),
        precision_low=precision[0],
        precision_high=precision[1],
        recall_low=recall[0],
        recall_high=recall[1],
        roc_auc=roc_auc,
    )


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
    bins = bin_of(confidence)
    sizes = {"minlength": tally.classes}
    confidence = confidence.astype(np.float64)
    gaps = confidence - (targets == predicted)

    def macro_f1(at: Array) -> float:
        true = targets[at]
        guess = predicted[at]
        weight = np.bincount(true, **sizes) + np.bincount(guess, **sizes)
        right = np.bincount(true[true == guess], **sizes)
        seen = weight > 0
        return float((2 * right[seen] / weight[seen]).mean())

    def error(bins: Array, gaps: Array) -> float:
        return float(np.abs(np.bincount(bins, gaps, CALIBRATION_BINS)).sum() / len(gaps))

    n = tally.samples
    draw = np.random.default_rng(0)
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
    normal = NormalDist()
    n = len(drawn)
    lower = (drawn < value - _ROUNDING).sum() + (drawn <= value + _ROUNDING).sum()
    below = float(lower) / 2 / n
    bias = 2 * normal.inv_cdf(min(max(below, 0.5 / n), 1 - 0.5 / n))
    low, high = np.quantile(drawn, [normal.cdf(bias - Z_95), normal.cdf(bias + Z_95)]).tolist()
    return Interval(low=min(low, value), high=max(high, value))


def _off_zero(value: float, drawn: Array, luck: Array) -> Interval:
    """Return the wider of two intervals, percentiles and percentiles mirrored at the value.

    Resampling overestimates the error. The low end is 0 if a perfectly calibrated model has such an
    error in 5 % of cases (Broecker and Smith 2007, Weather and Forecasting 22:651).
    """
    low, high = np.quantile(drawn, [0.025, 0.975]).tolist()
    least = (
        0.0 if (luck >= value - _ROUNDING).mean() >= 0.05 else min(low, max(0.0, 2 * value - high))
    )
    return Interval(low=min(least, value), high=min(1.0, max(high, 2 * value - low, value)))

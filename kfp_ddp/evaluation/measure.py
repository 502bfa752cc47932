"""Classification metrics from logits, batch by batch and from any number of ranks.

Results of each sample are retained, counts are integers, and sums are rounded once (`math.fsum`).
So results do not depend on batches, ranks or their order.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kfp_ddp.evaluation.roc import Areas, areas
from kfp_ddp.models.evaluation import CalibrationBin, ClassResult, wilson

COLUMNS = ("targets", "predicted", "confidence", "loss", "top5", "logits")
"""Results of a sample; `top5` is whether the true class is among the five likeliest."""
CALIBRATION_BINS = 15
MOST_SCORES = 1 << 26
"""Maximum logits for the ROC, one for each class and sample: 268 MB. With more there is no ROC."""

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
        scores, truth = logits.cpu().numpy(), targets.cpu().numpy()
        rows = np.arange(len(truth))
        predicted = scores.argmax(1)
        first, own = scores[rows, predicted], scores[rows, truth]
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
        targets, predicted = self.column("targets"), self.column("predicted")
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

"""Classification metrics from logits, batch by batch, in plain torch.

Counts are integers and sums are float64, so neither the order nor the size of the batches
shows in a result.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kfp_ddp.components.shared.evaluation import CalibrationBin, ClassResult

CALIBRATION_BINS = 15
ROC_CLASSES = 50
_ROC_BINS = 198  # with both ends 200 points at most
_ROC_RANGE = 18.0  # log-odds; beyond, scores share the outermost bin


@dataclass(frozen=True)
class Batch:
    """What each sample of a batch came to: class, its probability, and the loss in nats."""

    predicted: Tensor
    confidence: Tensor
    loss: Tensor


@dataclass(frozen=True)
class Roc:
    """A receiver operating characteristic by falling threshold, and the area under it."""

    false_positive_rate: list[float]
    true_positive_rate: list[float]
    threshold: list[float]
    area: float


class Tally:
    """Running counts over batches of logits (N, C) and targets (N,).

    Args:
        classes: C, at least 2.
        device: Where the logits come from; the counts stay there until they are asked for.
    """

    def __init__(self, classes: int, device: torch.device | str = "cpu") -> None:
        self.classes = classes
        self.samples = 0
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._top5 = torch.zeros((), dtype=torch.int64, device=device)
        self._pairs = torch.zeros(classes * classes, dtype=torch.int64, device=device)
        self._bins = torch.zeros(3, CALIBRATION_BINS, dtype=torch.float64, device=device)
        self._scores = torch.zeros(2 * _ROC_BINS, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def update(self, logits: Tensor, targets: Tensor) -> Batch:
        """Count a batch and return what each of its samples came to."""
        top, order = logits.topk(min(5, self.classes), dim=1)
        predicted = order[:, 0]
        total = logits.logsumexp(1)
        confidence = (top[:, 0] - total).exp()
        loss = total - logits.gather(1, targets[:, None])[:, 0]

        self.samples += len(targets)
        self._loss += loss.double().sum()
        self._top5 += (order == targets[:, None]).sum()
        pairs = targets * self.classes + predicted
        self._pairs += torch.bincount(pairs, minlength=self.classes**2)
        # Guo et al. 2017 (arXiv:1706.04599), section 2: bins closed on the right.
        bins = (confidence * CALIBRATION_BINS).ceil().long().clamp(1, CALIBRATION_BINS) - 1
        for row, weights in enumerate(
            (torch.ones_like(confidence), confidence, predicted == targets)
        ):
            self._bins[row] += torch.bincount(bins, weights.double(), CALIBRATION_BINS)
        if self.classes <= ROC_CLASSES:
            self._count_scores(logits, total, targets)
        return Batch(predicted, confidence, loss)

    def _count_scores(self, logits: Tensor, total: Tensor, targets: Tensor) -> None:
        """Histogram the log-odds of positives and negatives: class 1, or one class vs the rest."""
        if self.classes == 2:
            odds, positive = (logits[:, 1] - logits[:, 0]).double(), targets == 1
        else:
            log_p = logits.double() - total.double()[:, None]
            odds = log_p - torch.log(-torch.expm1(log_p))
            positive = torch.nn.functional.one_hot(targets, self.classes).bool()
        scaled = (odds + _ROC_RANGE) * (_ROC_BINS / (2 * _ROC_RANGE))
        bins = scaled.nan_to_num(_ROC_BINS).clamp(0, _ROC_BINS - 1).long()
        self._scores += torch.bincount(
            (bins + _ROC_BINS * positive).flatten(), minlength=2 * _ROC_BINS
        )

    @property
    def confusion(self) -> Tensor:
        """Counts (C, C) int64 by true and predicted class."""
        return self._pairs.reshape(self.classes, self.classes).cpu()

    @property
    def correct(self) -> int:
        """Samples whose likeliest class is the true one."""
        return int(self.confusion.trace())

    @property
    def loss(self) -> float:
        """Mean cross-entropy in nats."""
        return float(self._loss) / self.samples

    @property
    def top5(self) -> float | None:
        """Share with the true class among the five likeliest; None with five classes or fewer."""
        return int(self._top5) / self.samples if self.classes > 5 else None

    def per_class(self, names: list[str]) -> list[ClassResult]:
        """Precision, recall and F1 of each class; 0 where nothing was there to divide by."""
        counts = self.confusion.double()
        hits, there, said = counts.diag(), counts.sum(1), counts.sum(0)
        precision, recall = hits / said.clamp(min=1), hits / there.clamp(min=1)
        f1 = 2 * hits / (there + said).clamp(min=1)
        columns = zip(names, there, precision, recall, f1, strict=True)
        return [
            ClassResult(name=n, samples=int(s), precision=float(p), recall=float(r), f1=float(f))
            for n, s, p, r, f in columns
        ]

    def macro(self, results: list[ClassResult]) -> tuple[float, float, float]:
        """Mean precision, recall and F1 over the classes that were there or were predicted."""
        counts = self.confusion
        seen = (counts.sum(0) + counts.sum(1) > 0).tolist()
        kept = [result for result, is_seen in zip(results, seen, strict=True) if is_seen]
        n = len(kept)
        return (
            sum(r.precision for r in kept) / n,
            sum(r.recall for r in kept) / n,
            sum(r.f1 for r in kept) / n,
        )

    def calibration(self) -> list[CalibrationBin]:
        """The reliability diagram: bins of equal width, those without samples left out."""
        rows = [row for row in self._bins.T.tolist() if row[0]]
        return [
            CalibrationBin(samples=int(n), confidence=c / n, accuracy=h / n) for n, c, h in rows
        ]

    @property
    def calibration_error(self) -> float:
        """Expected calibration error, L1 over 15 bins (Guo et al. 2017, equation 3)."""
        count, confidence, hits = self._bins.cpu()
        return float((confidence - hits).abs().sum() / count.sum())

    def roc(self) -> Roc | None:
        """ROC of class 1 of two, or micro-averaged over all; None if it says nothing.

        That is with more than 50 classes, and where all samples are of one class of two. At most
        200 points, evenly spaced in log-odds, all finite.
        """
        negative, positive = self._scores.cpu().reshape(2, _ROC_BINS).flip(1).double()
        if self.classes > ROC_CLASSES or not negative.sum() or not positive.sum():
            return None
        start = torch.zeros(1, dtype=torch.float64)
        fpr = torch.cat([start, negative.cumsum(0) / negative.sum()])
        tpr = torch.cat([start, positive.cumsum(0) / positive.sum()])
        edges = torch.linspace(_ROC_RANGE, -_ROC_RANGE, _ROC_BINS + 1, dtype=torch.float64)
        threshold = edges.sigmoid()
        # Points inside a level or upright stretch draw nothing.
        keep = torch.ones(len(fpr), dtype=torch.bool)
        still = (fpr.diff() == 0) & (tpr.diff() == 0)
        keep[1:-1] = ~(still[:-1] & still[1:])
        area = float(torch.trapezoid(tpr, fpr))
        return Roc(fpr[keep].tolist(), tpr[keep].tolist(), threshold[keep].tolist(), area)

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
MOST_SCORES = 1 << 24
"""Scores that are kept for the ROC, one a sample with two classes, else one a class and sample: 8
bytes each, 134 MB, and twice that while they are sorted. With more there is no ROC."""
_ROC_POINTS = 200


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
        self._negative: list[Tensor] = []
        self._positive: list[Tensor] = []

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
        if self._is_scored:
            self._keep_scores(logits, targets)
        else:
            self._negative, self._positive = [], []
        return Batch(predicted, confidence, loss)

    @property
    def _is_scored(self) -> bool:
        scores = self.samples * (1 if self.classes == 2 else self.classes)
        return self.classes <= ROC_CLASSES and scores <= MOST_SCORES

    @property
    def kept_scores(self) -> int:
        """How many are held in memory."""
        return sum(len(part) for part in (*self._negative, *self._positive))

    def _keep_scores(self, logits: Tensor, targets: Tensor) -> None:
        """Keep the log-odds of positives and negatives: class 1, or one class vs the rest."""
        positive = torch.nn.functional.one_hot(targets, self.classes).bool()
        odds = log_odds(logits)
        if self.classes == 2:
            positive, odds = positive[:, 1], odds[:, 1]
        self._negative.append(odds[~positive].cpu())
        self._positive.append(odds[positive].cpu())

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

        That is with more than 50 classes or 2^24 scores, and where all samples are of one class of
        two. The area is exact; of the curve at most 200 points are told, all finite.
        """
        if not self._is_scored or not self.samples:
            return None
        negative, positive = _sorted(self._negative), _sorted(self._positive)
        if not len(negative) or not len(positive):
            return None
        shown = torch.linspace(0, 1, _ROC_POINTS // 2 - 1, dtype=torch.float64)
        levels = [own[(shown * (len(own) - 1)).long()] for own in (negative, positive)]
        values = sorted(set(torch.cat(levels).tolist()), reverse=True)
        level = torch.tensor(values, dtype=torch.float64)

        def share(own: Tensor) -> list[float]:
            """The share of scores that reach each level; none before the first."""
            above = len(own) - torch.searchsorted(own, level)
            return [0.0, *(above / len(own)).tolist()]

        threshold = [1.0, *level.sigmoid().tolist()]
        return Roc(share(negative), share(positive), threshold, _area(negative, positive))


def log_odds(logits: Tensor) -> Tensor:
    """log(p / (1 - p)) of each class, float64, without cancellation however large a logit is."""
    logits = logits.double()
    first, at = logits.max(1, keepdim=True)
    total = (logits - first).exp().sum(1, keepdim=True)
    rest = first + (total - (logits - first).exp()).log()
    # Of the likeliest class nothing but rounding would be left over.
    others = logits.scatter(1, at, -torch.inf).logsumexp(1, keepdim=True)
    return logits - rest.scatter(1, at, others)


def _sorted(parts: list[Tensor]) -> Tensor:
    scores = torch.cat(parts)
    scores.numpy().sort()  # in place: torch would make indices of the same size too
    return scores


def _area(negative: Tensor, positive: Tensor) -> float:
    """Share of the pairs whose positive has the higher score, a tie counting half; both sorted."""
    wins = 0
    for some in torch.split(positive, 1 << 20):
        wins += int(torch.searchsorted(negative, some).sum())
        wins += int(torch.searchsorted(negative, some, right=True).sum())
    return wins / (2 * len(negative) * len(positive))

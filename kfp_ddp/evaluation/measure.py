"""Classification metrics from logits, batch by batch and from any number of ranks.

What each sample came to is kept, counts are integers and sums are rounded once (`math.fsum`), so
neither batches nor ranks nor their order show in a result.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kfp_ddp.evaluation.roc import Areas, Roc, areas
from kfp_ddp.models.evaluation import CalibrationBin, ClassResult, wilson

CALIBRATION_BINS = 15
MOST_SCORES = 1 << 26
"""Logits that are kept for the ROC, one a class and sample: 268 MB. With more there is no ROC."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Batch:
    """What each sample of a batch came to: class, its probability, and the loss in nats."""

    predicted: Tensor
    confidence: Tensor
    loss: Tensor


class Tally:
    """Running counts over batches of logits (N, C) and targets (N,).

    The logits are kept as they are given until there are too many for an ROC: do not change them.

    Args:
        classes: C, at least 2.
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.samples = 0
        self._top5 = 0
        self._pairs = np.zeros(classes * classes, np.int64)
        self._columns: dict[str, list[Array]] = {
            name: [] for name in ("targets", "predicted", "confidence", "loss", "logits")
        }
        self._scratch: Array = np.empty(0)
        self._areas: Areas | None = None

    @torch.inference_mode()
    def update(self, logits: Tensor, targets: Tensor) -> Batch:
        """Count a batch and return what each of its samples came to, on the CPU."""
        given, truth = logits.cpu().numpy(), targets.cpu().numpy()
        rows = np.arange(len(truth))
        predicted = given.argmax(1)
        first, own = given[rows, predicted], given[rows, truth]
        if (len(given), given.dtype) != (len(self._scratch), self._scratch.dtype):
            self._scratch = np.empty_like(given)
        total = np.exp(np.subtract(given, first[:, None], out=self._scratch), out=self._scratch)
        total = total.sum(1)
        confidence = 1 / total
        loss = np.log(total) + (first - own)
        self._top5 += int((_ahead(given, own, truth, predicted) < 5).sum())
        values = {"targets": truth, "predicted": predicted, "confidence": confidence}
        self._add({**values, "loss": loss, "logits": given})
        return Batch(*map(torch.from_numpy, (predicted, confidence, loss)))

    def _add(self, columns: Mapping[str, Array]) -> None:
        """Count what samples came to; without the logits of some there is no ROC of any."""
        targets, predicted = columns["targets"], columns["predicted"]
        self.samples += len(targets)
        self._areas = None
        np.add.at(self._pairs, targets * self.classes + predicted, 1)
        for name, values in columns.items():
            self._columns[name].append(values)
        complete = sum(map(len, self._columns["logits"])) == self.samples
        if not complete or self.samples * self.classes > MOST_SCORES:
            self._columns["logits"] = []

    def state(self) -> dict[str, Tensor]:
        """All that was counted, as tensors on the CPU, for `merge`; some 24 bytes a sample.

        With them 4 a sample and class, until those are too many for an ROC.
        """
        empty = np.zeros((0, self.classes))
        arrays = {n: np.concatenate(v) if v else empty for n, v in self._columns.items()}
        found = {name: torch.from_numpy(values) for name, values in arrays.items()}
        return {**found, "top5": torch.tensor(self._top5)}

    def merge(self, states: Iterable[Mapping[str, Tensor]]) -> None:
        """Add what others counted over samples of their own; all in any order give the same."""
        for state in states:
            if len(state["targets"]):
                self._top5 += int(state["top5"])
                self._add({name: state[name].numpy() for name in self._columns})

    def column(self, name: str) -> Array:
        """Of each sample `targets`, `predicted`, `confidence` or `loss`, in the order counted."""
        return np.concatenate(self._columns[name])

    @property
    def kept_scores(self) -> int:
        """How many are held in memory."""
        return sum(part.size for part in self._columns["logits"])

    @property
    def confusion(self) -> Tensor:
        """Counts (C, C) int64 by true and predicted class."""
        return torch.from_numpy(self._pairs.reshape(self.classes, self.classes).copy())

    @property
    def correct(self) -> int:
        """Samples whose likeliest class is the true one."""
        return int(self._pairs[:: self.classes + 1].sum())

    @property
    def loss(self) -> float:
        """Mean cross-entropy in nats."""
        return math.fsum(self.column("loss").tolist()) / self.samples

    @property
    def top5(self) -> float | None:
        """Share with the true class among the five likeliest; None with five classes or fewer."""
        return self._top5 / self.samples if self.classes > 5 else None

    def per_class(
        self, names: list[str], roc_auc: list[float | None] | None = None
    ) -> list[ClassResult]:
        """Precision, recall and F1 of each class; 0 where nothing was there to divide by."""
        pairs = self._pairs.reshape(self.classes, self.classes)
        columns = (pairs.diagonal(), pairs.sum(1), pairs.sum(0))
        own = roc_auc or [None] * self.classes
        rows = zip(names, *(c.tolist() for c in columns), own, strict=True)
        return [_result(*row) for row in rows]

    def macro(self, results: list[ClassResult]) -> tuple[float, float, float]:
        """Mean precision, recall and F1 over the classes that were there or were predicted."""
        pairs = self._pairs.reshape(self.classes, self.classes)
        seen = (pairs.sum(0) + pairs.sum(1) > 0).tolist()
        kept = [result for result, is_seen in zip(results, seen, strict=True) if is_seen]
        n = len(kept)
        return (
            sum(r.precision for r in kept) / n,
            sum(r.recall for r in kept) / n,
            sum(r.f1 for r in kept) / n,
        )

    def _bins(self) -> list[tuple[int, float, int]]:
        """Samples, summed confidence and hits of each bin of the confidence."""
        confidence = self.column("confidence")
        hits = self.column("targets") == self.column("predicted")
        bins = bin_of(confidence)
        return [
            (int(own.sum()), math.fsum(confidence[own].tolist()), int(hits[own].sum()))
            for own in (bins == number for number in range(CALIBRATION_BINS))
        ]

    def calibration(self) -> list[CalibrationBin]:
        """The reliability diagram: bins of equal width, those without samples left out."""
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
        """The ROC of class 1 of two, or micro-averaged over all, and each class against the rest.

        Areas are exact. Without any where more than 2^26 logits were counted; None for a class
        where all samples are of it, or none is.
        """
        if self._areas is None:
            self._areas = areas(self._columns["logits"], self._columns["targets"], self.classes)
        return self._areas

    def roc(self) -> Roc | None:
        """That of `areas`."""
        return self.areas().roc


def bin_of(confidence: Array) -> NDArray[np.int64]:
    """The bin of each, closed on the right (Guo et al. 2017, arXiv:1706.04599, section 2)."""
    number: NDArray[np.int64] = np.ceil(confidence * CALIBRATION_BINS).astype(np.int64) - 1
    return number


def _ahead(logits: Array, own: Array, targets: Array, predicted: Array) -> NDArray[np.int64]:
    """Classes that are likelier than the true one; of equal ones the first is taken as likelier."""
    likelier: NDArray[np.int64]
    likelier = (logits > own[:, None]).sum(1, dtype=np.uint32).astype(np.int64)  # int64 takes more
    close = ((likelier < 5) & (targets != predicted)).nonzero()[0]
    before = np.arange(logits.shape[1]) < targets[close, None]
    likelier[close] += ((logits[close] == own[close, None]) & before).sum(1)
    return likelier


def _result(name: str, hits: int, there: int, said: int, roc_auc: float | None) -> ClassResult:
    """One class from the samples of it, those that were said to be it, and those that were both."""
    recall, precision = (wilson(hits, n) if n else (None, None) for n in (there, said))
    return ClassResult(
        name=name,
        samples=there,
        precision=hits / max(said, 1),
        recall=hits / max(there, 1),
        f1=2 * hits / max(there + said, 1),
        precision_low=precision[0],
        precision_high=precision[1],
        recall_low=recall[0],
        recall_high=recall[1],
        roc_auc=roc_auc,
    )

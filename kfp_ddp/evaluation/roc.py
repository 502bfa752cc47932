"""The receiver operating characteristic and the areas under it, exact, in little memory."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_POINTS = 200
_BLOCK = 1 << 20
"""Scores in memory at a time, 8 MB; and scores from which the levels of the curve are chosen."""


@dataclass(frozen=True)
class Roc:
    """A receiver operating characteristic by descending threshold, and the area under it."""

    false_positive_rate: list[float]
    true_positive_rate: list[float]
    threshold: list[float]
    area: float


@dataclass(frozen=True)
class Areas:
    """The ROC of class 1 of two, or micro-averaged over all; and each class against the rest."""

    roc: Roc | None = None
    per_class: list[float | None] = field(default_factory=list)

    @property
    def macro(self) -> float | None:
        """Return the mean over the classes that have an area."""
        known = [area for area in self.per_class if area is not None]
        return math.fsum(known) / len(known) if known else None


def areas(parts: Sequence[Array], truth: Sequence[Array], classes: int) -> Areas:
    """Return areas from logits (N, C) and targets (N,), both in the same parts; empty from none.

    A score is the log-odds of a class. Areas are shares of the pairs whose positive has the higher
    score; a tie counts half. The curve has at most 200 points, all finite.
    """
    if not parts:
        return Areas()
    scored = range(1, 2) if classes == 2 else range(classes)
    step = max(1, _BLOCK // classes)
    rows = _in_blocks(parts, truth, step)
    targets = np.concatenate(truth)
    positive = np.sort(np.concatenate([own.positive for own in rows])[np.isin(targets, scored)])
    every = -(-len(targets) * len(scored) // _BLOCK)
    some = _Rows(*(np.concatenate([p[::every] for p in arrays]) for arrays in (parts, truth)))
    drawn = np.sort(np.concatenate(list(some.negatives(scored))))
    if not len(positive) or not len(drawn):
        return Areas(None, [None] * classes)
    per_class: list[float | None] = []

    def blocks() -> Iterator[Array]:
        """Yield sorted blocks of the scores of negatives, and compute the area of each class."""
        step = max(1, _BLOCK // len(targets))
        for start in range(scored.start, scored.stop, step):
            columns = range(start, min(start + step, scored.stop))
            scores = np.concatenate([own.odds(columns) for own in rows], axis=1)
            sides = [
                (np.sort(own[targets != number]), np.sort(own[targets == number]))
                for number, own in enumerate(scores, start)
            ]
            per_class.extend(_area(*side) for side in sides)
            yield np.sort(np.concatenate([negative for negative, _ in sides]))

    roc = _curve(blocks(), positive, _levels(drawn, positive))
    return Areas(roc, per_class * 2 if classes == 2 else per_class)


class _Rows:
    """Logits (N, C) and the terms of the log-odds of any class, in float64.

    log(p / (1 - p)) has no cancellation for large logits. The logits of a row are added in sorted
    order, so that equal log-odds are equal numbers.
    """

    def __init__(self, logits: Array, targets: Array) -> None:
        self.logits = logits
        self.targets = targets
        ordered = np.sort(logits, axis=1)
        self._first = ordered[:, -1].astype(np.float64)
        shifted = ordered - self._first[:, None]
        self._total = np.exp(shifted).sum(1)
        # The total without the likeliest class would be a rounding error.
        second = shifted[:, -2]
        rest = np.exp(shifted[:, :-1] - second[:, None]).sum(1)
        self._likeliest = -(second + np.log(rest))
        self.positive = self._odds(logits[np.arange(len(targets)), targets] - self._first)

    def _odds(self, shifted: Array) -> Array:
        likeliest = shifted == 0
        rest = np.where(likeliest, 1.0, self._total - np.exp(shifted))
        return np.where(likeliest, self._likeliest, shifted - np.log(rest))

    def odds(self, columns: range) -> Array:
        """Return the log-odds of some classes, (K, N)."""
        return self._odds(self.logits[:, columns.start : columns.stop].T - self._first)

    def negatives(self, columns: range) -> Iterator[Array]:
        """Yield the log-odds of each class for samples of other classes."""
        for number, odds in enumerate(self.odds(columns), columns.start):
            yield odds[self.targets != number]


def _in_blocks(parts: Sequence[Array], truth: Sequence[Array], step: int) -> list[_Rows]:
    """Return the logits in blocks of `step` rows."""
    return [
        _Rows(part[start : start + step], own[start : start + step])
        for part, own in zip(parts, truth, strict=True)
        for start in range(0, len(part), step)
    ]


def _levels(negative: Array, positive: Array) -> Array:
    """Return descending scores for the curve, at equal numbers of samples of each side."""
    shown = np.linspace(0, 1, _POINTS // 2 - 1)
    chosen = [own[(shown * (len(own) - 1)).astype(np.int64)] for own in (negative, positive)]
    return np.unique(np.concatenate(chosen))[::-1]


def _curve(blocks: Iterable[Array], positive: Array, level: Array) -> Roc:
    """Return the curve at some scores, and the area; blocks, positives and levels are sorted."""
    wins = count = 0
    below = np.zeros(len(level))
    lowest = math.inf
    for negative in blocks:
        wins += _wins(negative, positive)
        count += len(negative)
        below += np.searchsorted(negative, level)
        lowest = min(lowest, negative[0])
    level = np.append(level, lowest)
    wrong = np.append(1 - below / count, 1.0)
    right = 1 - np.searchsorted(positive, level) / len(positive)
    last = None if below[-1] else -1  # the lowest score is already a level
    points = (wrong[:last], right[:last], np.exp(-np.logaddexp(0, -level[:last])))
    wrong_, right_, threshold = (values.tolist() for values in points)
    area = wins / (2 * count * len(positive))
    return Roc([0.0, *wrong_], [0.0, *right_], [1.0, *threshold], area)


def _wins(negative: Array, positive: Array) -> int:
    """Count pairs whose positive is higher twice, and ties once; both arrays are sorted."""
    sides = (np.searchsorted(negative, positive, side=side) for side in ("left", "right"))
    return sum(int(counts.sum()) for counts in sides)


def _area(negative: Array, positive: Array) -> float | None:
    pairs = len(negative) * len(positive)
    return _wins(negative, positive) / (2 * pairs) if pairs else None

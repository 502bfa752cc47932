"""Doubtful labels: samples that are likelier of another class, and near duplicates."""

import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from kfp_ddp.core.spreadsheet import write_for_excel
from kfp_ddp.evaluation.measure import MOST_SCORES
from kfp_ddp.evaluation.predict import EMBEDDED, Predictions
from kfp_ddp.pictures.shards import Where

Array = NDArray[Any]

LABEL = "label"
DUPLICATE = "duplicate"
_SAME_PIXELS = 0.995
_SAME_EMBEDDING = 0.9
_BLOCK = 256
"""Images that are compared with all others at once: 61 MB a matrix for 60,000 others."""


class Doubt(NamedTuple):
    """A row of the table; paths are below the dataset's folder."""

    path: str
    label: str
    suggested: str
    score: float
    reason: str
    other: str
    images: tuple[Where, ...]
    """Where the one image is, or both."""


def find_doubts(
    evaluated: Sequence[Predictions],
    training: Predictions | None,
    dataset: Path,
    least_score: float,
) -> list[Doubt]:
    """Return the doubtful labels of evaluated splits, then near duplicates in them and in training.

    Both by descending score. A label with a score below `least_score`, the share of mistakes of
    the network, is left out: that is more likely one of them. Predictions on training images say
    nothing about their labels, as the network has learned these.
    """
    pool = [*evaluated, training] if training else list(evaluated)
    names = pool[0].index.classes
    sources = [(part.index, position) for part in pool for position in range(len(part.index))]

    def doubt(reason: str, score: float, suggested: int, *images: int) -> Doubt:
        both = [sources[image] for image in images]
        paths = [Path(index.paths[at]).relative_to(dataset).as_posix() for index, at in both]
        first, position = both[0]
        label = names[first.targets[position]]
        other = "".join(paths[1:])
        where = tuple(index.where(at) for index, at in both)
        return Doubt(paths[0], label, names[suggested], score, reason, other, where)

    doubts: list[Doubt] = []
    start = 0
    for part in evaluated:
        doubts += [
            doubt(LABEL, score, suggested, start + position)
            for position, suggested, score in _label_errors_of(part)
            if score >= least_score
        ]
        start += len(part.index)
    doubts.sort(key=lambda one: -one.score)
    for first, second, suggested, score in _duplicates_of(pool):
        doubts.append(doubt(DUPLICATE, score, suggested, first, second))
    return doubts


def _duplicates_of(pool: Sequence[Predictions]) -> Iterator[tuple[int, int, int, float]]:
    """Yield near duplicates: two positions in the pool, the class of the second, and the score.

    None if a part has no features.
    """
    if not all(len(part.features) for part in pool):
        return
    kinds = [(n, target) for n, part in enumerate(pool) for target in part.index.targets]
    losses = np.concatenate([part.tally.column("loss") for part in pool]).tolist()
    features = torch.cat([part.features for part in pool])
    for *pair, score in near_duplicates(features, torch.tensor(kinds)):
        # An evaluated image is named before a training image, and the worse predicted one first.
        first, second = sorted(pair, key=lambda at: (kinds[at][0], -losses[at]))
        yield first, second, kinds[second][1], score


def _label_errors_of(part: Predictions) -> list[tuple[int, int, float]]:
    """Return the `label_errors` of a split; none if its logits are not retained."""
    if part.tally.samples * part.tally.classes > MOST_SCORES:
        return []
    return label_errors(part.tally.column("logits"), np.array(part.index.targets))


def label_errors(logits: Array, targets: Array) -> list[tuple[int, int, float]]:
    """Return samples with a doubtful label: position, suggested class and score, descending.

    Confident learning (Northcutt et al. 2021, JAIR 70:1373): a class is plausible if its
    probability is at least the mean that it has for the samples with this label. A label is
    doubtful if another class is the likeliest plausible one, and likelier than the label. The
    score is the difference of both probabilities.
    """
    chances = np.exp(logits - logits.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    own = chances[np.arange(len(targets)), targets]
    classes = chances.shape[1]
    counts = np.bincount(targets, minlength=classes)
    sums = np.bincount(targets, own, classes)
    thresholds = np.divide(sums, counts, out=np.full(classes, np.inf), where=counts > 0)
    plausible = np.where(chances >= thresholds, chances, -1)
    suggested = plausible.argmax(1)
    scores = plausible.max(1) - own
    doubtful = (scores > 0).nonzero()[0]
    order = doubtful[np.argsort(-scores[doubtful], kind="stable")]
    return list(zip(order.tolist(), suggested[order].tolist(), scores[order].tolist(), strict=True))


def near_duplicates(features: Tensor, kinds: Tensor) -> list[tuple[int, int, float]]:
    """Return pairs of nearly equal images of two classes or splits, with the cosine of embeddings.

    As a trained network gives a class nearly one embedding, they must also be equal at 8x8 pixels:
    photographs saved anew correlate by more than 0.995, overlapping parts by less than 0.94.
    """
    small = features[:, EMBEDDED:].view(len(features), 3, -1)
    small = normalize((small - small.mean(2, keepdim=True)).flatten(1))
    embedded = normalize(features[:, :EMBEDDED] - features[:, :EMBEDDED].mean(0))
    kind = kinds[:, 0] * (kinds[:, 1].max() + 1) + kinds[:, 1]
    pairs: dict[tuple[int, int], float] = {}
    for start in range(0, len(features), _BLOCK):
        block = slice(start, start + _BLOCK)
        # Few images have the pixels of another one, so few embeddings are compared.
        alike = (small[block] @ small.T).ge(_SAME_PIXELS).logical_and_(kind[block, None] != kind)
        rows = alike.any(1).nonzero()[:, 0]
        scores, others = (embedded[start + rows] @ embedded.T).masked_fill_(~alike[rows], -1).max(1)
        for row in (scores >= _SAME_EMBEDDING).nonzero()[:, 0].tolist():
            one, other = sorted((start + int(rows[row]), int(others[row])))
            pairs[one, other] = min(float(scores[row]), 1.0)
    return sorted(((*pair, score) for pair, score in pairs.items()), key=lambda row: -row[2])


def to_csv(doubts: Iterable[Doubt]) -> str:
    """Return the table, a row for each doubt."""
    text = io.StringIO(newline="")
    rows = ((*one[:3], f"{one.score:z.4f}", *one[4:-1]) for one in doubts)
    write_for_excel(text, [Doubt._fields[:-1], *rows])
    return text.getvalue()

"""Whether images look like those that a model was evaluated on, by what its network computes."""

import hashlib
import heapq
import io
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kfp_ddp.core.spreadsheet import write_rows
from kfp_ddp.models.doubt import COLUMNS, ROUNDING, Rows, confidence_and_energy

if TYPE_CHECKING:
    from torch import Tensor

SIZE = 1000
"""Images of a sample: a difference of 0.1 between two distributions is significant then."""
LEVEL = 0.01
"""Images differ below this p-value: once in a hundred comparisons of equal ones."""


class Sample:
    """What the network computes for up to `SIZE` images: `COLUMNS`.

    Chosen are those with the smallest digests of their names, so a sample does not depend on the
    order of the images and the number of ranks.
    """

    def __init__(self) -> None:
        self.rows: dict[bytes, list[float]] = {}

    def add(self, names: Iterable[str], logits: "Tensor") -> None:
        """Add a batch: logits (N, classes) on the CPU."""
        keys = list(map(key_of, names))
        last = max(self.rows) if len(self.rows) == SIZE else b"\xff" * 33
        chosen = [at for at, key in enumerate(keys) if key < last]  # of a large split, nearly none
        rows = np.column_stack(confidence_and_energy(logits[chosen].numpy()))
        self.merge([dict(zip((keys[at] for at in chosen), rows.tolist(), strict=True))])

    def merge(self, others: Iterable[dict[bytes, list[float]]]) -> "Sample":
        """Add the rows of other samples; return this one."""
        for rows in others:
            self.rows |= rows
        self.rows = {key: self.rows[key] for key in heapq.nsmallest(SIZE, self.rows)}
        return self

    def table(self) -> Rows:
        """Return a row for each image, without its name."""
        return np.array(list(self.rows.values()), float)

    def to_csv(self) -> str:
        """Return the table as text, with six digits."""
        numbers = ([float(f"{value:.6g}") for value in row] for row in self.rows.values())
        text = io.StringIO(newline="")
        write_rows(text, [COLUMNS, *numbers])
        return text.getvalue()


def key_of(name: str) -> bytes:
    """Return the digest of a name, which chooses the images of a sample."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def compare(reference: Rows | None, sample: Sample) -> dict[str, Any]:
    """Return how a sample compares with that of a bundle, for JSON; {} if one of both is empty.

    A two-sample Kolmogorov-Smirnov test of each column, with the p-value multiplied by the number
    of columns (Bonferroni), as KSDrift of alibi-detect (Rabanser et al. 2019, arXiv:1810.11953).
    """
    if reference is None or not sample.rows:
        return {}
    images = sample.table()
    largest = np.abs(np.concatenate([reference, images])).max(0)
    both = zip(reference.T, images.T, ROUNDING * largest, strict=True)
    distances = [_distance(*one) for one in both]
    at = int(np.argmax(distances))
    p_value = min(1.0, len(COLUMNS) * _p_value(distances[at], len(images), len(reference)))
    most = {"column": COLUMNS[at], "distance": distances[at]}
    sizes = {"images": len(images), "reference": len(reference)}
    return {"differs": p_value < LEVEL, "p_value": p_value, **most, **sizes}


def _distance(
    first: NDArray[np.float64], second: NDArray[np.float64], rounding: np.float64
) -> float:
    """Return the largest difference between the shares of values up to any one."""
    return max(_lead(first, second, rounding), _lead(second, first, rounding))


def _lead(first: NDArray[np.float64], second: NDArray[np.float64], rounding: np.float64) -> float:
    """Return how much the share of `first` up to any value exceeds that of `second`, at most."""
    values = np.sort(first)
    own = np.arange(1, len(values) + 1) / len(values)
    other = np.sort(second).searchsorted(values + rounding, "right") / len(second)
    return float((own - other).max())


def _p_value(distance: float, first: int, second: int) -> float:
    """Return how often two samples of one distribution are at least so far apart.

    Kolmogorov's limit with the correction of Stephens for small samples (1970, JRSS B 32:115).
    """
    root = math.sqrt(first * second / (first + second))
    x = (root + 0.12 + 0.11 / root) * distance
    if x < 0.2:  # the series converges slowly there, to 1
        return 1.0
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, math.fsum(terms)))

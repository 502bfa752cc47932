"""Which predictions are sure, by what the evaluation of a bundle measured; free of torch."""

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.spreadsheet import Reader
from kfp_ddp.core.text import one_line
from kfp_ddp.models.bundle import LARGEST_CONFIG, METRICS, REFERENCE, Bundle
from kfp_ddp.models.champion import Champion
from kfp_ddp.models.evaluation import FEWEST_KEPT, LARGEST, Evaluation, best_cut, cuts

COLUMNS = ["confidence", "energy"]
"""The columns of `REFERENCE`; bundles of earlier versions have more."""
WORDS = {True: "yes", False: "no", None: ""}
"""What a table has for each answer."""
ROUNDING = 1e-4
"""Of the largest value: values that are as close are equal. What a network computes for an image
differs by some 1e-6 between CPUs and sizes of batches, and `reference.csv` has six digits. Copies
of one image would otherwise differ in both columns."""
UNUSUAL = 0.05
"""Share of the evaluated images that have less energy than a sure one."""
_DIGITS = 6
"""Of a probability in the predictions of an evaluation."""
Rows = NDArray[np.float64]
"""Values of `COLUMNS` (images, columns)."""


@dataclass(frozen=True)
class Thresholds:
    """The limits of a sure prediction."""

    probability: float = 0.0
    """Of the predicted class; 0 if the evaluation gives none."""
    energy: float = -np.inf
    """Of the logits, the least; -inf if the evaluation gives none."""
    highest_energy: float = np.inf
    """Networks with ReLU are most confident far away from what they know (arXiv:1812.05720)."""
    notes: tuple[str, ...] = ()
    """Why the evaluation does not give one."""

    @property
    def known(self) -> bool:
        """Whether anything decides."""
        return self.probability > 0 or self.energy > -np.inf

    def sure(self, logits: NDArray[Any]) -> list[bool | None]:
        """Return whether each prediction is sure, for logits [N, classes]; None if unknown."""
        if not self.known:
            return [None] * len(logits)
        confidence, energy = confidence_and_energy(logits)
        likely = confidence.round(_DIGITS) >= self.probability
        usual = (energy >= self.energy) & (energy <= self.highest_energy)
        answers: list[bool | None] = (likely & usual).tolist()
        return answers


UNKNOWN = Thresholds()
"""Nothing decides."""


def confidence_and_energy(logits: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the highest probability of each row, and its logsumexp (arXiv:2010.03759)."""
    scores = logits.astype(np.float64)
    peaks = scores.max(1)
    totals = np.exp(scores - peaks[:, None]).sum(1)
    return 1 / totals, peaks + np.log(totals)


def read(bundle: Bundle) -> Thresholds:
    """Return what the evaluation of a bundle gives; a file that does not give it is a note."""
    limits: dict[str, float] = {}
    notes = []
    for name, measure in (("probability", _probability), ("energy", _energies)):
        try:
            limits |= measure(bundle)
        except InputError as error:
            notes.append(f"no threshold of the {name}: {one_line(error)}")
    return Thresholds(**limits, notes=tuple(notes))


def _probability(bundle: Bundle) -> dict[str, float]:
    result = bundle.record(METRICS, Evaluation, LARGEST)
    predictions = Champion(bundle, result).predictions() if result else None
    if result is None or predictions is None:
        raise InputError("the bundle has no predictions of its evaluation: export it again")
    return {"probability": best_cut(result, cuts(predictions.values())).probability}


def _energies(bundle: Bundle) -> dict[str, float]:
    reference = read_reference(bundle)
    if reference is None:
        raise InputError(f"the bundle has no {REFERENCE}: export it again")
    energy = reference[:, COLUMNS.index("energy")]
    images = len(energy)
    if images < FEWEST_KEPT:
        raise InputError(f"{REFERENCE} has {images} images, and a threshold needs {FEWEST_KEPT}")
    rounding = ROUNDING * np.abs(energy).max()
    return {
        "energy": float(np.quantile(energy, UNUSUAL) - rounding),
        "highest_energy": float(energy.max() + rounding),
    }


def read_reference(bundle: Bundle) -> Rows | None:
    """Return the sample of a bundle, None without one; raise InputError if it is invalid."""
    content = bundle.read(REFERENCE, LARGEST_CONFIG)
    if content is None:
        return None
    try:
        reader = Reader(io.StringIO(content.decode(), newline=""))
        if reader.columns[: len(COLUMNS)] != COLUMNS:
            raise ValueError(f"its columns are not {', '.join(COLUMNS)}")
        rows = np.array([[row[name] for name in COLUMNS] for row in reader], float)
        if not len(rows) or not np.isfinite(rows).all():
            raise ValueError("its rows are not finite numbers")
    except ValueError as error:
        raise InputError(
            f"{REFERENCE} of {bundle.uri} is invalid ({error}): export again"
        ) from None
    return rows

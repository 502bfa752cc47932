"""The record of an evaluation, `evaluation.json`."""

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field, ValidationError, model_validator

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.files import read_below
from kfp_ddp.core.settings import Stored, first_fault
from kfp_ddp.core.spreadsheet import Reader

FILE = "evaluation.json"
PREDICTIONS = "predictions.csv"
CHAMPION_FOLDER = "champion"
"""Folder beside a model's evaluation: the champion's evaluation on the same samples."""
LARGEST = 64 << 20
"""Limit in bytes; 200 classes with their confusion have 0.2 MB."""
LARGEST_PREDICTIONS = 512 << 20
"""Limit in bytes; a million samples have some 100 MB."""
PREDICTION_COLUMNS = ("path", "target", "predicted", "confidence", "loss")
_FEWEST = 3
"""Samples of a class that is named as never right."""
FEWEST_KEPT = 20
"""Images from which a threshold is found."""
_FEWEST_WRONG = 5
"""Mistakes from which a threshold is found."""
_MOST_WRONG = 0.5
"""Share of mistakes among the kept images, of that among all."""
Z_95 = 1.959963984540054  # the 97.5 % quantile of the normal distribution
Better = Literal["", "higher", "lower"]
Place = Literal["kfp", "mlflow", "summary", "card", "page", "comparison"]
"""Where figures are shown: metrics of the KFP step and of the MLflow run, the Markdown of the step,
the model card (and the test split in the Markdown), the HTML report, and the comparison of runs."""


class Figure(NamedTuple):
    """A figure of an evaluation: where and how it is shown."""

    name: str
    """Of the field of `Evaluation`."""
    title: str
    form: Literal["share", "number", "count"]
    """What it is; each place has a format for each."""
    better: Better = ""
    """Which values are the better ones; '' if neither."""
    interval: Literal["", "page", "always"] = ""
    """Whether it has an interval: shown only in the HTML report, or beside the figure always."""
    by_class: bool = False
    """Whether all classes count equally, so it is of interest if they differ in size."""
    hidden: frozenset[Place] = frozenset()
    """Where it is not shown."""


_TEXTS: frozenset[Place] = frozenset(("summary", "card", "page", "comparison"))
_ALL: frozenset[Place] = frozenset((*_TEXTS, "kfp", "mlflow"))
_FEW: frozenset[Place] = _ALL - {"kfp"}
FIGURES = (
    Figure("accuracy", "accuracy", "share", "higher", "always"),
    Figure("accuracy_low", "low end of the accuracy", "share", "higher", hidden=_TEXTS),
    Figure("accuracy_high", "high end of the accuracy", "share", "higher", hidden=_TEXTS),
    Figure("top5", "top-5 accuracy", "share", "higher", hidden=frozenset(("mlflow",))),
    Figure(
        "balanced_accuracy",
        "balanced accuracy",
        "share",
        "higher",
        "page",
        by_class=True,
        hidden=frozenset(("mlflow", "comparison")),
    ),
    Figure("loss", "loss", "number", "lower"),
    Figure("macro_precision", "macro precision", "number", "higher", by_class=True, hidden=_ALL),
    Figure("macro_recall", "macro recall", "number", "higher", by_class=True, hidden=_ALL),
    Figure("macro_f1", "macro F1", "number", "higher", "page", by_class=True),
    Figure("calibration_error", "calibration error", "number", "lower", "page"),
    Figure("samples", "samples", "count", hidden=_FEW - {"comparison"}),
    Figure("skipped", "images left out", "count", "lower", hidden=_FEW - {"summary", "card"}),
    Figure("roc_auc", "ROC AUC", "number", "higher", hidden=_FEW - {"summary"}),
    Figure("macro_roc_auc", "macro ROC AUC", "number", "higher", by_class=True, hidden=_FEW),
)
"""All figures of the record, in the order in which they are shown."""


def figures_for(place: Place) -> list[Figure]:
    """Return the figures that a place shows, in order."""
    return [figure for figure in FIGURES if place not in figure.hidden]


class Interval(Stored):
    """The ends of a 95 % interval."""

    low: float
    high: float


class ClassResult(Stored):
    """Metrics of one class, with 95 % Wilson intervals where it has samples."""

    name: str
    samples: int
    precision: float
    recall: float
    f1: float
    precision_low: float | None = None
    precision_high: float | None = None
    recall_low: float | None = None
    recall_high: float | None = None
    roc_auc: float | None = None


class Slice(Stored):
    """Accuracy with its Wilson interval on the samples for which a tag has one value."""

    name: str
    """Of the tag."""
    value: str
    samples: int = Field(gt=0)
    correct: int = Field(ge=0)
    accuracy: float
    low: float
    high: float


class ClassChange(Stored):
    """Samples of a class that only the model (`won`) or the champion (`lost`) got right."""

    name: str
    samples: int
    won: int
    lost: int
    gain: float
    low: float
    high: float


class Compared(Stored):
    """The model against the champion on the same samples.

    `low` and `high` are Newcombe's 95 % interval of the gain, `p_value` McNemar's, one-sided.
    """

    champion: str
    """Its URI."""
    champion_version: str
    champion_accuracy: float
    gain: float
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    won: int | None = None
    lost: int | None = None
    classes: list[ClassChange] = Field(default_factory=list)


class CalibrationBin(Stored):
    """Samples whose confidence is in one fifteenth of 0 to 1: their number and two means."""

    samples: int
    confidence: float
    accuracy: float


class Prediction(NamedTuple):
    """The true class of a sample, and whether it was predicted."""

    target: str
    correct: bool
    confidence: float = math.nan
    """Probability of the predicted class; NaN if it is unknown."""

    @classmethod
    def of(cls, row: Mapping[str, str]) -> "Prediction":
        """Return that of a row; raise ValueError or KeyError for what is no row."""
        correct = row["target"] == row["predicted"] != ""
        return cls(row["target"], correct, float(row.get("confidence", math.nan)))


class Cut(NamedTuple):
    """The evaluated images that are kept if the less probable predictions are passed on."""

    probability: float
    """The lowest one of a kept image."""
    kept: int
    passed_on: float
    """Share of all images."""
    wrong: float
    """Share of the kept ones."""


class Evaluation(Stored):
    """Metrics of one checkpoint on one split; every sample counted exactly once.

    `accuracy_low` and `accuracy_high` bound a 95 % Wilson score interval. `loss` is the mean
    cross-entropy in nats, without label smoothing. Macro means leave out classes without samples
    and predictions. `samples_digest` identifies the samples by path and class, `split_digest` by
    path, size and token, if the version has a manifest; `skipped` is the number of files that
    cannot be read and were left out (on_bad_image=skip), `skipped_files` names the first of them.
    `balanced_accuracy` is the mean recall of the classes with samples, `macro_roc_auc` the mean of
    each such class against the rest.
    `intervals` are 95 % bootstrap intervals by metric. Fields with a default are missing in records
    of earlier versions.
    """

    format: Literal[1] = 1
    split: str
    samples: int = Field(gt=0)
    correct: int = Field(ge=0)
    accuracy: float = Field(ge=0, le=1)
    accuracy_low: float
    accuracy_high: float
    loss: float
    top5: float | None
    macro_precision: float
    macro_recall: float
    macro_f1: float
    calibration_error: float
    roc_auc: float | None
    classes: list[ClassResult]
    calibration: list[CalibrationBin]
    confusion: list[list[int]] | None
    model: str
    image_size: int
    step: int
    checkpoint: str
    checkpoint_digest: str
    dataset_digest: str
    samples_digest: str
    bundle_digest: str = ""
    """SHA-256 of the manifest of the bundle that was evaluated; '' for a checkpoint."""
    split_digest: str = ""
    predictions: str = Field(PREDICTIONS, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    device: str
    seconds: float
    skipped: int = Field(0, ge=0)
    skipped_files: list[str] = Field(default_factory=list)
    balanced_accuracy: float | None = None
    macro_roc_auc: float | None = None
    intervals: dict[str, Interval] = Field(default_factory=dict)
    slices: list[Slice] = Field(default_factory=list)
    tags: str = ""
    """Where the tags of the slices are, as `slices.read` takes it."""
    compared: Compared | None = None
    hardware: str = ""
    world_size: int = Field(1, ge=1)
    written: str = ""
    """UTC, ISO 8601."""

    @model_validator(mode="after")
    def _adds_up(self) -> "Evaluation":
        if self.correct > self.samples:
            raise ValueError("correct is more than samples")
        if abs(self.accuracy - self.correct / self.samples) > 1e-6:
            raise ValueError("accuracy is not correct / samples")
        return self

    @classmethod
    def parse(cls, text: str, uri: str) -> "Evaluation":
        """Return the record in `text`, the content of `uri`; raise InputError if it is invalid."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise InputError(
                f"{uri} is not an evaluation: {first_fault(error)}; "
                "give the evaluation.json that the evaluate component wrote"
            ) from None

    @classmethod
    def read(cls, path: Path) -> "Evaluation":
        """Return the record in a file; raise InputError if it cannot be read, or is invalid."""
        return cls.parse(_read(path, LARGEST, "evaluation").decode(errors="replace"), str(path))

    def read_predictions(self, folder: Path) -> dict[str, Prediction]:
        """Return the predictions in `folder` by path; raise InputError for another evaluation's."""
        path = folder / self.predictions
        return self.parse_predictions(_read(path, LARGEST_PREDICTIONS, "predictions"), str(path))

    def parse_predictions(self, content: bytes, uri: str) -> dict[str, Prediction]:
        """Return the predictions in the content of `uri` by path; raise as `read_predictions`."""
        try:
            predictions = {r["path"]: Prediction.of(r) for r in prediction_rows(content)}
        except (ValueError, KeyError) as error:
            raise InputError(
                f"{uri} has no predictions: {reason(error)}; run evaluate again"
            ) from None
        correct = sum(one.correct for one in predictions.values())
        if (len(predictions), correct) != (self.samples, self.correct):
            raise InputError(
                f"{uri} has {correct} of {len(predictions)} samples correct, the evaluation "
                f"beside it {self.correct} of {self.samples}: keep predictions.csv beside the "
                "evaluation.json it belongs to"
            )
        return predictions

    @property
    def never_right(self) -> list[str]:
        """Return the classes of which no sample is right."""
        return [one.name for one in self.classes if one.samples >= _FEWEST and not one.recall]

    def is_weak(self, enough: float) -> bool:
        """Return whether the accuracy is below `enough`, or may be that of the largest class."""
        largest = max((one.samples for one in self.classes), default=0)
        return self.accuracy < enough or self.accuracy_low <= largest / self.samples

    def interval(self, name: str) -> Interval | None:
        """Return the 95 % interval of a figure; None without one."""
        if name == "accuracy":
            return Interval(low=self.accuracy_low, high=self.accuracy_high)
        return self.intervals.get(name)

    def differs(self, other: "Evaluation") -> str:
        """Return why the samples of the two may differ, by content if both know it; '' if not."""
        if (self.samples_digest, self.samples) != (other.samples_digest, other.samples):
            return "evaluated on other samples"
        digests = [(self.split_digest, other.split_digest)]
        digests += [(self.dataset_digest, other.dataset_digest)]
        both = next((pair for pair in digests if all(pair)), None)
        if both is not None:
            return "" if both[0] == both[1] else "evaluated on other samples"
        if any(map(any, digests)):
            return "evaluated on samples of the same names, but one side has no digest of them"
        return ""

    def same_samples(self, other: "Evaluation") -> bool:
        """Return whether both are of the same samples."""
        return not self.differs(other)


def prediction_rows(content: bytes) -> Iterator[dict[str, str]]:
    """Return the rows of a `PREDICTIONS` file by column."""
    return iter(Reader(io.StringIO(content.decode(), newline="")))


def _read(path: Path, limit: int, what: str) -> bytes:
    try:
        return read_below(path.parent, path.name, limit)
    except (OSError, ValueError) as error:
        raise InputError(
            f"the {what} {path} cannot be read: {reason(error)}; run evaluate first"
        ) from None


def cuts(predictions: Iterable[Prediction]) -> list[Cut]:
    """Return what is kept from each probability of a prediction on, the highest first.

    Empty if a probability is unknown.
    """
    ordered = sorted(predictions, key=lambda one: -one.confidence)
    if not all(math.isfinite(one.confidence) for one in ordered):
        return []
    found = []
    kept = 0
    wrong = 0
    for probability, same in groupby(ordered, key=attrgetter("confidence")):
        right = [one.correct for one in same]
        kept += len(right)
        wrong += right.count(False)
        found.append(Cut(probability, kept, 1 - kept / len(ordered), wrong / kept))
    return found


def best_cut(result: Evaluation, found: Sequence[Cut]) -> Cut:
    """Return the cut that keeps most of the images of which half as many, in shares, are wrong.

    Raise InputError if there is none.
    """
    wrong = result.samples - result.correct
    if wrong < _FEWEST_WRONG:
        raise InputError(
            f"the evaluation has {wrong} mistakes in {result.samples:,} images, and a threshold "
            f"needs {_FEWEST_WRONG}: evaluate on more images"
        )
    most = _MOST_WRONG * wrong / result.samples
    suited = [cut for cut in found if cut.wrong <= most]
    if not suited or suited[-1].kept < FEWEST_KEPT:
        raise InputError(
            f"there are no {FEWEST_KEPT} of {result.samples:,} evaluated images, the most probable "
            "ones, of which half as many are wrong as of all: evaluate on more images"
        )
    return suited[-1]


def wilson(correct: int, samples: int) -> tuple[float, float]:
    """Return the Wilson score interval of a share (Wilson 1927, JASA 22:209), clipped to 0 to 1."""
    p = correct / samples
    z = Z_95
    shrink = 1 + z * z / samples
    centre = (p + z * z / (2 * samples)) / shrink
    half = z / shrink * math.sqrt(p * (1 - p) / samples + z * z / (4 * samples * samples))
    return max(0.0, centre - half), min(1.0, centre + half)


def slice_of(name: str, value: str, correct: int, samples: int) -> Slice:
    """Return a slice from its counts."""
    low, high = wilson(correct, samples)
    accuracy = correct / samples
    counts = {"samples": samples, "correct": correct}
    return Slice(name=name, value=value, **counts, accuracy=accuracy, low=low, high=high)


def reason(error: BaseException) -> str:
    """Return why a file operation failed, without the path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)

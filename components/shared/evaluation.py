"""What an evaluation found, as `evaluation.json` holds it. Free of torch, for gate and export."""

import csv
import io
import math
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kfp_ddp.base.errors import InputError

FILE = "evaluation.json"
PREDICTIONS = "predictions.csv"
AGAIN = "champion"
"""Beside the evaluation of a model: that of the champion on the same samples."""
PREDICTION_COLUMNS = ("path", "target", "predicted", "confidence", "loss")
Z_95 = 1.959963984540054  # the 97.5 % quantile of the normal distribution


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class ClassResult(_Frozen):
    """One class: how many samples it has, and how well they and only they were told."""

    name: str
    samples: int
    precision: float
    recall: float
    f1: float


class CalibrationBin(_Frozen):
    """Samples whose confidence lay in one fifteenth of 0 to 1: their number and two means."""

    samples: int
    confidence: float
    accuracy: float


class Evaluation(_Frozen):
    """Metrics of one checkpoint on one split; every sample counted exactly once.

    `accuracy_low` and `accuracy_high` bound a 95 % Wilson score interval. `loss` is the mean
    cross-entropy in nats, without label smoothing. Macro means leave out classes that were
    neither there nor predicted. `samples_digest` identifies the samples by path and class,
    `split_digest` by path, size and crc32c, where the version has a manifest.
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
    split_digest: str = ""
    predictions: str = Field(PREDICTIONS, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    device: str
    seconds: float

    @classmethod
    def parse(cls, text: str, where: str) -> "Evaluation":
        """The record in `text`, which came from `where`.

        Raises:
            InputError: naming the first field that is missing or wrong.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "the document"
            raise InputError(
                f"{where} is not an evaluation: {field}: {first['msg']}; "
                "give the evaluation.json that the evaluate component wrote"
            ) from None

    @classmethod
    def read(cls, path: Path) -> "Evaluation":
        """The record in the file `path`.

        Raises:
            InputError: if the file cannot be read or is not an evaluation.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"the evaluation {path} cannot be read: {reason(error)}; run evaluate first"
            ) from None
        return cls.parse(text, str(path))

    def same_samples(self, other: "Evaluation") -> bool:
        """Were both evaluated on the same samples? Content counts where both know its digest."""
        if self.samples_digest != other.samples_digest:
            return False
        if self.split_digest and other.split_digest:
            return self.split_digest == other.split_digest
        known = self.dataset_digest and other.dataset_digest
        return not known or self.dataset_digest == other.dataset_digest


def wilson(correct: int, samples: int, z: float = Z_95) -> tuple[float, float]:
    """The Wilson score interval of a share (Wilson 1927, JASA 22:209), clipped to 0 to 1."""
    p = correct / samples
    shrink = 1 + z * z / samples
    centre = (p + z * z / (2 * samples)) / shrink
    half = z / shrink * math.sqrt(p * (1 - p) / samples + z * z / (4 * samples * samples))
    return max(0.0, centre - half), min(1.0, centre + half)


def hits_by_path(text: str) -> dict[str, bool]:
    """For each sample in the text of a `predictions.csv`: was it told right?"""
    rows = csv.DictReader(io.StringIO(text, newline=""))
    return {row["path"]: row["target"] == row["predicted"] for row in rows}


def reason(error: BaseException) -> str:
    """Why a file operation failed, without the path that the message around it names already."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)

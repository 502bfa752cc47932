"""Inputs of a report: `report.json`, the evaluation, the verdict and the bundle's records."""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.files import read_below, sha256
from kfp_ddp.core.run_folder import VERDICT, RunFolder
from kfp_ddp.core.settings import Stored, first_fault, mapping_in
from kfp_ddp.models.bundle import CONFIG, INFRA, LATENCY, PARITY, VARIANTS
from kfp_ddp.models.evaluation import (
    FILE,
    LARGEST_PREDICTIONS,
    Compared,
    Cut,
    Evaluation,
    cuts,
    prediction_rows,
)
from kfp_ddp.training.spec.metrics import read_events

REPORT_DATA = "report.json"
_MAX_REPORT_DATA = 64 << 20
_MAX_DOCUMENT = 4 << 20
_BUNDLE_DOCUMENTS = (CONFIG, PARITY, LATENCY, VARIANTS, INFRA)


class Mistake(Stored):
    """An incorrectly predicted sample; `path` is below the split."""

    path: str
    target: str
    predicted: str
    confidence: float
    loss: float
    picture: str
    """WebP in base64."""
    tiny: bool = False
    """Show its pixels as squares."""


class Doubtful(Stored):
    """An image whose label is doubtful; paths are below the dataset."""

    path: str
    label: str
    suggested: str
    other: str
    """Its near duplicate; '' if the predictions are the reason."""
    score: float | None = None
    pictures: list[tuple[str, bool]]
    """Of it and of the other: WebP in base64, and whether to show its pixels as squares."""


class Dataset(Stored):
    """The manifest of the dataset version; empty without one."""

    name: str = ""
    source: str = ""
    digest: str = ""
    files: int = 0
    bytes: int = 0
    sides: dict[str, int] = Field(default_factory=dict)
    """Images of each side."""
    training: dict[str, int] = Field(default_factory=dict)
    """Training images of each class."""
    problems: list[str] = Field(default_factory=list)
    """One sentence each."""


class ReportData(Stored):
    """`report.json`; fields that an earlier version did not write are empty."""

    format: Literal[1] = 1
    config: dict[str, Any] = Field(default_factory=dict)
    """Of the training."""
    events: list[dict[str, Any]] = Field(default_factory=list)
    """Of the training, downsampled."""
    dataset: Dataset = Dataset()
    mistakes: list[Mistake] = Field(default_factory=list)
    """By descending loss."""
    surest: list[Mistake] = Field(default_factory=list)
    """Other mistakes, by descending confidence."""
    doubtful: list[Doubtful] = Field(default_factory=list)
    """The first ones of each reason."""
    doubts: int = 0
    """Rows of `labels_to_check.csv`."""
    uncompared: str = ""
    """Why training images were not searched for near duplicates; '' if they were, or are none."""
    least_score: float | None = None
    """Of a label that the predictions contradict; others are not among the doubts."""
    test: Evaluation | None = None
    """Of the same checkpoint on the test split."""

    @classmethod
    def read(cls, folder: Path) -> "ReportData":
        """Return the data in the folder of an evaluation; empty without a file."""
        try:
            return cls.model_validate_json(read_below(folder, REPORT_DATA, _MAX_REPORT_DATA))
        except FileNotFoundError:
            return cls()
        except OSError as error:
            why = f"cannot be read: {error.strerror}"
        except ValidationError as error:
            why = f"is invalid: {first_fault(error)}"
        raise InputError(f"{folder / REPORT_DATA} {why}; run evaluate again")


@dataclass(frozen=True)
class Confusion:
    """`count` of the `samples` of one class were predicted as another class."""

    target: str
    predicted: str
    count: int
    samples: int

    @property
    def share(self) -> float:
        """Share of the true class."""
        return self.count / self.samples


@dataclass(frozen=True)
class Material:
    """All inputs of a report; missing ones are empty."""

    folder: Path
    result: Evaluation
    data: ReportData
    config: Mapping[str, Any]
    events: list[dict[str, Any]]
    verdict: Mapping[str, Any]
    bundle: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """JSON documents of the bundle by name, without suffix."""

    @classmethod
    def read(cls, folder: Path, bundle: Path | None) -> "Material":
        """Read the inputs in the folder of an evaluation, and in the model's bundle if any."""
        result = Evaluation.read(folder / FILE)
        data = ReportData.read(folder)
        run = RunFolder(folder.parent)
        verdict = _document(folder, VERDICT)
        if verdict.get("evaluation_sha256", "") not in ("", sha256(folder / FILE)):
            verdict = {}  # on another evaluation
        with suppress(ValidationError):  # the gate decided on no comparison
            compared = Compared.model_validate(verdict.get("compared"))
            result = result.model_copy(update={"compared": compared})
        documents = _BUNDLE_DOCUMENTS if bundle else ()
        return cls(
            folder=folder,
            result=result,
            data=data,
            config=data.config or _document(run.path, run.config.name),
            events=data.events or read_events(run.metrics),
            verdict=verdict,
            bundle={name[:-5]: _document(bundle, name) for name in documents if bundle},
        )

    @cached_property
    def confusions(self) -> list[Confusion]:
        """Pairs of classes by descending count, then share."""
        if self.result.confusion is not None:
            return confusions(self.result)
        return _ranked(_count_pairs(self.folder / self.result.predictions), self.result)

    @cached_property
    def cuts(self) -> list[Cut]:
        """What is kept from each probability on; empty without the predictions of the record."""
        try:
            return cuts(self.result.read_predictions(self.folder).values())
        except InputError:
            return []

    @property
    def name(self) -> str:
        """Name of the exported model, or its architecture."""
        origin = self.bundle.get("config", {}).get("export", {}).get("made_of", {})
        return str(origin.get("model_name") or self.result.model)


def confusions(result: Evaluation) -> list[Confusion]:
    """Return the pairs of classes in the confusion matrix, the most frequent first."""
    names = [one.name for one in result.classes]
    counts = {
        (names[i], names[j]): count
        for i, row in enumerate(result.confusion or [])
        for j, count in enumerate(row)
        if count and i != j
    }
    return _ranked(counts, result)


def _ranked(counts: Mapping[tuple[str, str], int], result: Evaluation) -> list[Confusion]:
    samples = {one.name: one.samples for one in result.classes}
    pairs = (
        Confusion(target, predicted, count, samples[target])
        for (target, predicted), count in counts.items()
        if count <= samples.get(target, 0) and predicted in samples
    )
    return sorted(pairs, key=lambda pair: (-pair.count, -pair.share, pair.target, pair.predicted))


def _document(folder: Path, name: str) -> dict[str, Any]:
    """Return a JSON object in a folder; {} if it cannot be read."""
    try:
        return mapping_in(read_below(folder, name, _MAX_DOCUMENT))
    except (OSError, ValueError):
        return {}


def _count_pairs(predictions: Path) -> Counter[tuple[str, str]]:
    """Count the pairs of different true and predicted class."""
    try:
        content = read_below(predictions.parent, predictions.name, LARGEST_PREDICTIONS)
        rows = [(r["target"], r["predicted"]) for r in prediction_rows(content)]
        return Counter(row for row in rows if row[0] != row[1])
    except FileNotFoundError:
        return Counter()
    except (OSError, ValueError, KeyError):
        raise InputError(f"{predictions} is invalid: run evaluate again") from None

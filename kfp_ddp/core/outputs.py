"""What the local run reads of each step, by name: facts in its artifacts, and parameters.

A step builds its facts with these types, so a key that only one side renames is an error of types.
"""

from typing import Annotated, Any, Generic, NamedTuple, NotRequired, TypedDict, TypeVar

T = TypeVar("T")

Parameter = Annotated[T, "parameter"]
"""The component returns it; all other keys are metadata of an artifact."""


class StepOutputs(NamedTuple, Generic[T]):
    """The name of a step in a pipeline, and the type of its outputs."""

    step: str
    form: type[T]


class Warnings(TypedDict):
    """What a step warns of, a line for each."""

    warnings: NotRequired[str]


class PreflightFacts(TypedDict):
    """What will run, in one line."""

    what: str


class SyncFacts(Warnings):
    """A version of a dataset, and what the sync downloaded of it."""

    dataset: str
    source: str
    digest: str
    path: str
    files: int
    bytes: int
    downloaded: int


class ChangesFacts(TypedDict):
    """Whether something is new to train, and why."""

    changed: bool
    reason: str


class VolumeOutputs(TypedDict):
    """Where the next steps find the version."""

    path: Parameter[str]


class TrainFigures(TypedDict):
    """Metrics of a training, of which an own script reports few."""

    step: float
    """Of the checkpoint."""
    train_loss: NotRequired[float]
    images_per_s: NotRequired[float]
    val_loss: NotRequired[float]
    val_accuracy: NotRequired[float]
    val_top5: NotRequired[float]


class TuneFigures(TypedDict):
    """Metrics of a sweep."""

    trials: int
    failed: int
    ended_early: int
    hours: float
    """Of all ranks."""
    best_accuracy: NotRequired[float]


class TuneFacts(TypedDict):
    """The best trials, as `Trials` has them."""

    sweep: dict[str, Any]


class TuneOutputs(TuneFacts, TuneFigures):
    """The trials, and the folder of the best one."""

    run_dir: Parameter[str]


class EvaluateFigures(TypedDict):
    """Metrics of an evaluation that are not its parameters: `figures_for("kfp")` has them."""

    accuracy_low: float
    accuracy_high: float


class EvaluateOutputs(Warnings, EvaluateFigures):
    """The accuracy, and the path of the record."""

    accuracy: Parameter[float]
    evaluation: Parameter[str]


class PredictFacts(TypedDict):
    """How the images differ from those of the evaluation, in words."""

    drift: NotRequired[str]


class PredictOutputs(PredictFacts):
    """The rows of the table, and how many of them have no prediction."""

    rows: Parameter[int]
    unreadable: Parameter[int]


class ModelFacts(TypedDict):
    """A bundle."""

    name: str
    uri: str
    digest: str
    checkpoint_digest: str
    dataset_digest: str
    framework: str
    architecture: str
    formats: str
    """Names of files, with commas between them."""
    classes: int
    image_size: int
    accuracy: float
    samples: int


class ExportOutputs(ModelFacts):
    """The bundle and its folder."""

    Output: Parameter[str]


class GateFacts(TypedDict):
    """The verdict, the version of the champion, and what the verdict means."""

    blessed: bool
    reason: str
    champion: str
    title: str
    level: str
    words: str
    causes: str


class PublishFacts(ModelFacts):
    """The bundle with its version, and whether that is the champion."""

    version: str
    run_id: str
    champion_version: str
    """The one that it was compared with."""
    champion: bool
    champion_stays: str
    """Why the champion did not change; '' if it did."""
    signed_by: str
    registry: str


class PublishOutputs(PublishFacts):
    """The bundle and where it was uploaded to."""

    destination: Parameter[str]


class TeardownOutputs(TypedDict):
    """What was cleaned up, in one line."""

    Output: Parameter[str]


PREFLIGHT = StepOutputs("preflight", PreflightFacts)
SYNC = StepOutputs("data-sync", SyncFacts)
CHANGES = StepOutputs("changes", ChangesFacts)
VOLUME = StepOutputs("dataset-volume", VolumeOutputs)
TRAIN = StepOutputs("train", TrainFigures)
TUNE = StepOutputs("tune", TuneOutputs)
EVALUATE = StepOutputs("evaluate", EvaluateOutputs)
PREDICT = StepOutputs("predict", PredictOutputs)
EXPORT = StepOutputs("export", ExportOutputs)
GATE = StepOutputs("gate", GateFacts)
PUBLISH = StepOutputs("publish", PublishOutputs)
TEARDOWN = StepOutputs("teardown", TeardownOutputs)

"""The settings of a pipeline's form.

A form also has parameters for fields of `TrainConfig` and `LaunchSpec`, with the same names. Their
values "auto" and 0 mean that they are not set.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self, TypeVar

from pydantic import Field, model_validator

from kfp_ddp.core.settings import Settings
from kfp_ddp.datasets.settings import SyncSettings
from kfp_ddp.datasets.volume.request import Strategy
from kfp_ddp.evaluation.gate.rules import Rules
from kfp_ddp.evaluation.request import Measuring, PredictionRequest
from kfp_ddp.jobs.launch_spec import Backend, LaunchSpec, Supervision
from kfp_ddp.k8s.objects import AMOUNT, DESCRIPTIONS, NAME, QUANTITY, parse_quantity
from kfp_ddp.models import release
from kfp_ddp.plan.sweep import Sweep
from kfp_ddp.runs.notify import Notification
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.recipes import RecipeName

F = TypeVar("F", bound=Callable[..., Any])
UNSET = ("auto", 0, "")
OBJECT = NAME.removeprefix("^$|")
"""Pattern of the name of a PVC or a secret."""
LAST = "last"
"""Value of champion for the model that was exported last to the destination."""


class Parameters(Settings):
    """Settings of the run."""

    patterns: ClassVar = {OBJECT: DESCRIPTIONS[NAME]}

    source: str
    """Where the images are: gs://bucket/prefix, s3://, az:// or hf://datasets/owner/name, or the
    https:// address of a manifest, with <class>/ below it, or train/<class>/ and val/<class>/; or
    synthetic://10x1000@224, computed images of classes x images @ pixels."""
    recipe: RecipeName = "none"
    """Proven settings of a training, which yours override; auto: settings that fit the images and
    the GPUs; none: finetune where the training starts from existing weights, otherwise the
    defaults, a ResNet-50 in 90 epochs."""
    backend: Backend = "pytorchjob"
    """Where to compute: a pytorchjob of the Training Operator, a trainjob of the Trainer, or local,
    processes of the step itself."""
    champion: str = ""
    """Model to beat: last for the one that was exported last to this destination, or the folder or
    URI of a bundle; empty for none."""
    destination: str = ""
    """Where the bundle is uploaded to, as <destination>/<model_name>/<digest>: gs://bucket/prefix,
    s3://, az:// or a folder; empty for no upload."""
    model_name: str = "resnet"
    """Name of the exported model."""
    work_claim: str = Field("kfp-ddp-work", pattern=OBJECT)
    """PVC for checkpoints, evaluations and bundles."""
    work: str = ""
    """Prefix of a bucket for checkpoints, evaluations and bundles, such as gs://bucket/runs, in
    place of a PVC."""
    bucket_secret: str = Field("kfp-ddp-bucket", pattern=OBJECT)
    """Secret with the bucket's credentials, where pods have none of their own: key.json of a
    service account, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AZURE_STORAGE_ACCOUNT and
    AZURE_STORAGE_KEY. It may be missing, but the name must not be empty."""
    checkpoint: str = ""
    """Model to evaluate without a training: folder or URI of a checkpoint step-<number>, of a
    bundle, or of a model's exports, which means the champion; with model a file .pt, .pth or
    .safetensors with the weights of that network."""
    split: str = "val"
    """Split to evaluate on: val as in the training, and test too where it exists; train, test, or a
    folder of the dataset with class folders."""
    bundle: str = ""
    """Model that predicts: folder or URI of a bundle, or of a model's exports, which means the
    champion."""
    table: str = ""
    """URI of the table with a row for each object, such as gs://bucket/predictions.parquet; .csv
    or .parquet. An existing one is completed."""
    predict_gpus: str = ""
    """GPUs of the step that predicts, with a rank on each; empty for none."""
    keep: int = Field(0, ge=0)
    """Number of newest runs' folders and exported bundles to retain; the champion, the one that it
    was compared with and deployed bundles are always retained; 0 for all. keep_runs of job
    overrides it for the folders."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Further settings of the training by name, such as {"precision": "bf16"}."""
    job: dict[str, Any] = Field(default_factory=dict)
    """Further settings of the job by name, such as {"memory": "32Gi"}."""
    sync: dict[str, Any] = Field(default_factory=dict)
    """Further settings of the dataset and its sync by name, such as {"publish": "clone"}."""
    gate: dict[str, Any] = Field(default_factory=dict)
    """Rules that a model must meet to be published, and further measurements, by name."""
    release: dict[str, Any] = Field(default_factory=dict)
    """How a blessed model is published, by name: forms of the bundle, its signature, registry, and
    service."""
    prediction: dict[str, Any] = Field(default_factory=dict)
    """Settings of a batch prediction by name, such as {"batch_size": 64}."""
    sweep: dict[str, Any] = Field(default_factory=dict)
    """Trials: a space such as {"space": {"learning_rate": [0.05, 0.1]}}, or a list."""

    @property
    def exports(self) -> str:
        """URI of this model's exports; '' without a destination."""
        where = self.destination.rstrip("/")
        return f"{where}/{self.model_name}" if where else ""


class DatasetSettings(Settings):
    """The dataset of a run; the options of its sync are separate."""

    patterns: ClassVar = Parameters.patterns

    dataset: str = ""
    """Name of the dataset, for labels and the names of its PVCs; empty to derive it from the
    source."""
    claim: str = Field("kfp-ddp-data", pattern=OBJECT)
    """PVC for the versions of the dataset."""
    publish: Strategy = "in-place"
    """How workers get the data: in-place, from the PVC itself; clone or snapshot, from a
    ReadOnlyMany copy; each-node, downloaded by each pod to its own folder; auto, the best that is
    known to work; none."""


LAUNCHER_REQUESTS = {"cpu": "500m", "memory": "1Gi"}
"""Requests of the launching step; also its limits, unless it runs the ranks itself."""
SYNC_REQUESTS = {"cpu": "100m", "memory": "512Mi"}
EVALUATE_REQUESTS = {"cpu": "250m", "memory": "1Gi"}
"""Requests of the steps that compute: small, so that they start on a small node too."""


class StepResources(Settings):
    """Resources of the steps that compute."""

    patterns: ClassVar = {AMOUNT: DESCRIPTIONS[QUANTITY]}

    sync_cpu: str = Field("2", pattern=AMOUNT)
    """CPU limit of the sync."""
    sync_memory: str = Field("4Gi", pattern=AMOUNT)
    """Memory limit of the sync."""
    evaluate_cpu: str = Field("4", pattern=AMOUNT)
    """CPU limit of evaluation and export."""
    evaluate_memory: str = Field("8Gi", pattern=AMOUNT)
    """Memory limit of evaluation and export."""
    evaluate_gpus: int = Field(0, ge=0)
    """GPUs of evaluation and export, by the name in gpu_resource; if evaluate_backend is not local,
    of each pod of that job only."""
    evaluate_backend: Backend = "local"
    """Where to evaluate: local, in the step itself, with a rank for each of its GPUs; or a
    pytorchjob or trainjob, each pod of which may use evaluate_cpu and evaluate_memory."""
    evaluate_nodes: int = Field(1, ge=1, le=4096)
    """Worker pods of the job that evaluates."""

    @model_validator(mode="after")
    def _limits_cover_requests(self) -> Self:
        for step, asks in (("sync", SYNC_REQUESTS), ("evaluate", EVALUATE_REQUESTS)):
            for name, least in asks.items():
                limit = getattr(self, f"{step}_{name}")
                if parse_quantity(limit) < parse_quantity(least):
                    raise ValueError(
                        f"{step}_{name}={limit!r} is less than the step needs, {least}"
                    )
        if self.evaluate_nodes > 1 and self.evaluate_backend == "local":
            raise ValueError(
                f"evaluate_nodes={self.evaluate_nodes}: the step itself is one node; set "
                "evaluate_backend to pytorchjob or trainjob"
            )
        return self

    def requests_by_step(self, gpu_resource: str) -> dict[str, dict[str, str]]:
        """Return the requests by step and resource; an empty amount means none."""
        gpus = {gpu_resource: str(self.evaluate_gpus or "")}
        return {"data-sync": SYNC_REQUESTS, "evaluate": {**EVALUATE_REQUESTS, **gpus}}


MODELS: tuple[type[Settings], ...] = (Parameters, TrainConfig, LaunchSpec, DatasetSettings)
"""Models that describe a parameter of a form, in order of precedence."""
SUBJECTS: dict[str, tuple[type[Settings], ...]] = {
    "training": (TrainConfig,),
    "job": (LaunchSpec, Supervision, StepResources, Notification),
    "sync": (DatasetSettings, SyncSettings),
    "gate": (Rules, Measuring),
    "release": release.MODELS,
    "sweep": (Sweep,),
    "prediction": (PredictionRequest,),
}
"""Models of each mapping in a form."""


def described_settings(boxes: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield each setting of a run: its mapping, '' for a box of its own, name, default, meaning.

    `boxes` are the defaults of the form's parameters; other models have others.
    """
    models: list[tuple[str, type[Settings]]] = [("", Parameters)]
    models += [(subject, model) for subject in SUBJECTS for model in SUBJECTS[subject]]
    for mapping, model in models:
        for name in model.model_fields:
            # A mapping of settings is no setting itself: its models follow.
            is_mapping = not mapping and name in SUBJECTS
            if name in model.set_by_step or is_mapping:
                continue
            if name in boxes:
                row = {"mapping": "", "name": name, "default": _text(boxes[name])}
                meaning = description(name)
                known = choices(name)
            else:
                row = {"mapping": mapping, "name": name, "default": _text(_default(model, name))}
                meaning = model.model_fields[name].description or ""
                known = model.choices(name)
            yield {**row, "meaning": meaning, "choices": _one_of(known)}


def _default(model: type[Settings], name: str) -> Any:
    """Return the default of a field; '' for a required one."""
    field = model.model_fields[name]
    return "" if field.is_required() else field.get_default(call_default_factory=True)


def _text(default: Any) -> str:
    return str(list(default) if isinstance(default, tuple) else default)


def _one_of(known: tuple[str, ...]) -> str:
    closed = ", ".join(choice or "''" for choice in known)
    return f"One of {closed}." if closed else ""


def description(name: str) -> str:
    """Return the description of a form's parameter; raise LookupError if no model has it."""
    if name == "gpus_per_node":
        return f"{LaunchSpec.model_fields[name].description} -1: as many as the nodes have."
    model = _model_of(name)
    if model is None:
        models = ", ".join(model.__name__ for model in MODELS)
        raise LookupError(f"{name} is a field of no model: {models}")
    field = model.model_fields[name]
    text = field.description or ""
    unset = "auto" if choices(name) or field.annotation is str else "0"
    by_recipe = model is TrainConfig and field.default not in UNSET
    return f"{text} {unset}: as the recipe has it." if by_recipe else text


def choices(name: str) -> tuple[str, ...]:
    """Return the choices of a parameter of a form; empty for any value."""
    model = _model_of(name)
    closed = model.choices(name) if model else ()
    if closed and model is TrainConfig:
        return ("auto", *closed)
    return closed


def _model_of(name: str) -> type[Settings] | None:
    """Return the first model that describes a parameter."""
    return next((model for model in MODELS if name in model.model_fields), None)


def described(function: F) -> F:
    """Add the descriptions of its parameters to a pipeline's docstring, where KFP reads them."""
    names = inspect.signature(function).parameters
    texts = "\n".join(f"    {name}: {description(name)}" for name in names)
    function.__doc__ = f"{function.__doc__}\n\nArgs:\n{texts}\n"
    return function


def set_fields(inputs: Mapping[str, Any], model: type[Settings]) -> dict[str, Any]:
    """Return the parameters for fields of `model` that are set."""
    names = model.model_fields.keys() - Parameters.model_fields.keys()
    return {name: value for name, value in inputs.items() if name in names and value not in UNSET}

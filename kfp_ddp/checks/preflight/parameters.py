"""The parameters of a training run as people give them, apart from those that a model below has.

A pipeline's form also has boxes for fields of `TrainConfig` and `LaunchSpec`: they are passed on
under their own names, and a box that is left at "auto" or 0 was not filled in.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, TypeVar

from pydantic import Field, model_validator

from kfp_ddp.checks.preflight.sweep import Sweep
from kfp_ddp.core.settings import Settings
from kfp_ddp.datasets.settings import SyncSettings
from kfp_ddp.datasets.volume.request import Strategy
from kfp_ddp.evaluation.gate.rules import Rules
from kfp_ddp.evaluation.request import Measuring
from kfp_ddp.jobs.launch_spec import IN_WORDS, LaunchSpec
from kfp_ddp.jobs.supervision import Backend, Supervision
from kfp_ddp.k8s.quantity import AMOUNT, QUANTITY, amount
from kfp_ddp.models import release
from kfp_ddp.runs.notify import Notification
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.recipes import RecipeName

F = TypeVar("F", bound=Callable[..., Any])
BOX_LEFT_OPEN = ("auto", 0, "")
LAST = "last"
"""The champion that stands for the model exported last to this destination."""


class Parameters(Settings):
    """What belongs to the run as a whole."""

    source: str
    """Where the images are: gs://bucket/prefix, s3://, az:// or hf://datasets/owner/name, or the
    https:// address of a manifest, with <class>/ below it, or train/<class>/ and val/<class>/."""
    recipe: RecipeName = "none"
    """Settings of a training that is worth repeating, under those that you give; none for
    finetune where training has an init_from, and else for the defaults: a ResNet-50 in 90
    epochs."""
    backend: Backend = "pytorchjob"
    """What trains: a pytorchjob of the Training Operator, a trainjob of the Trainer, or local,
    processes of the step itself."""
    champion: str = ""
    """Model to beat: last for the one that was exported last to this destination, or the folder or
    address of a bundle; empty for none."""
    destination: str = ""
    """Where the bundle is uploaded to, as <destination>/<model_name>/<digest>: gs://bucket/prefix,
    s3://, az:// or a folder; empty for nowhere but the run's own folder."""
    model_name: str = "resnet"
    """Name of the exported model."""
    work_claim: str = "kfp-ddp-work"
    """Claim that holds checkpoints, evaluations and bundles."""
    work: str = ""
    """Prefix of a bucket that holds checkpoints, evaluations and bundles, such as
    gs://bucket/runs: no claim is needed for them."""
    bucket_secret: str = "kfp-ddp-bucket"  # noqa: S105
    """Secret with the bucket's credentials, where pods have none of their own: key.json of a
    service account, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AZURE_STORAGE_ACCOUNT and
    AZURE_STORAGE_KEY. It need not be there, but the name must not be empty."""
    checkpoint: str = ""
    """What is evaluated, where nothing is trained: folder or address of a checkpoint step-<number>,
    of a bundle, or of a model's exports, which stands for the champion."""
    split: str = "val"
    """What is evaluated on: val as the training had it, and with it test where there is one; train,
    test, or a folder of the dataset with class folders."""
    keep: int = Field(0, ge=0)
    """Runs' folders and exported bundles that stay, the newest, and always the champion, the one it
    was compared with and what a service answers with; 0 for all. Where job has keep_runs, that
    counts for the folders."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Further settings of the training by name, such as {"precision": "bf16"}."""
    job: dict[str, Any] = Field(default_factory=dict)
    """Further settings of the job by name, such as {"memory": "32Gi"}."""
    sync: dict[str, Any] = Field(default_factory=dict)
    """Further settings of the dataset and its sync by name, such as {"publish": "clone"}."""
    gate: dict[str, Any] = Field(default_factory=dict)
    """Rules that a model must meet to be published, and what else is measured of it, by name."""
    release: dict[str, Any] = Field(default_factory=dict)
    """What a blessed model is published as and where, by name: forms of the bundle, its signature,
    registry, and service."""
    sweep: dict[str, Any] = Field(default_factory=dict)
    """What is tried: a space such as {"space": {"learning_rate": [0.05, 0.1]}}, or trials written
    out."""


class Dataset(Settings):
    """What the sync of a run needs beside its own options."""

    dataset: str = ""
    """Name of the dataset, for labels and the names of its claims; empty for one made from the
    source."""
    claim: str = "kfp-ddp-data"
    """Claim that holds the versions of the dataset."""
    publish: Strategy = "in-place"
    """How workers get the data: in-place, from the claim itself; clone, snapshot or populator, from
    a ReadOnlyMany copy; each-node, brought by each pod to a folder of its own; auto, the best that
    is known to work; none."""


LAUNCHER_ASKS = {"cpu": "500m", "memory": "1Gi"}
"""What the launching step asks of a node; as much as it may use, unless its ranks are in it."""
SYNC_ASKS = {"cpu": "100m", "memory": "512Mi"}
EVALUATE_ASKS = {"cpu": "250m", "memory": "1Gi"}
"""What the steps that compute ask of a node: little, so that they start on a small one too."""


class StepResources(Settings):
    """What the pods of the steps may use that do the work themselves."""

    patterns: ClassVar = {AMOUNT: IN_WORDS[QUANTITY]}

    sync_cpu: str = Field("2", pattern=AMOUNT)
    """CPUs that the step that syncs may use."""
    sync_memory: str = Field("4Gi", pattern=AMOUNT)
    """Memory that the step that syncs may use."""
    evaluate_cpu: str = Field("4", pattern=AMOUNT)
    """CPUs that the steps that evaluate and export may use."""
    evaluate_memory: str = Field("8Gi", pattern=AMOUNT)
    """Memory that the steps that evaluate and export may use."""
    evaluate_gpus: int = Field(0, ge=0)
    """GPUs of the steps that evaluate and export, by the name in gpu_resource; with another
    evaluate_backend than local, of each pod of that job alone."""
    evaluate_backend: Backend = "local"
    """What evaluates: local, the step itself, with a rank for each of its GPUs; or a pytorchjob or
    trainjob, a job of its own of which each pod may use evaluate_cpu and evaluate_memory."""
    evaluate_nodes: int = Field(1, ge=1, le=4096)
    """Worker pods of the job that evaluates."""

    @model_validator(mode="after")
    def _may_use_what_is_asked(self) -> Self:
        for step, asks in (("sync", SYNC_ASKS), ("evaluate", EVALUATE_ASKS)):
            for name, least in asks.items():
                given = getattr(self, f"{step}_{name}")
                if amount(given) < amount(least):
                    raise ValueError(
                        f"{step}_{name}={given!r} is less than the step needs, {least}"
                    )
        if self.evaluate_nodes > 1 and self.evaluate_backend == "local":
            raise ValueError(
                f"evaluate_nodes={self.evaluate_nodes}: the step itself is one node; set "
                "evaluate_backend to pytorchjob or trainjob"
            )
        return self

    def by_step(self, gpu_resource: str) -> dict[str, dict[str, str]]:
        """What each step asks for, by the name of the resource; an empty amount is none."""
        gpus = {gpu_resource: str(self.evaluate_gpus or "")}
        return {"data-sync": SYNC_ASKS, "evaluate": {**EVALUATE_ASKS, **gpus}}


MODELS: tuple[type[Settings], ...] = (Parameters, TrainConfig, LaunchSpec, Dataset)
"""Who has the text of a box, in the order of asking."""
SUBJECTS: dict[str, tuple[type[Settings], ...]] = {
    "training": (TrainConfig,),
    "job": (LaunchSpec, Supervision, StepResources, Notification),
    "sync": (Dataset, SyncSettings),
    "gate": (Rules, Measuring),
    "release": release.MODELS,
    "sweep": (Sweep,),
}
"""The models behind each of the mappings."""


def description(name: str) -> str:
    """The text of a box of a form.

    Raises:
        LookupError: no model has such a field.
    """
    if name == "gpus_per_node":
        return f"{LaunchSpec.model_fields[name].description} -1: as many as the nodes have."
    model = next((model for model in MODELS if name in model.model_fields), None)
    if model is None:
        raise LookupError(f"{name} is a field of no model: {', '.join(m.__name__ for m in MODELS)}")
    field = model.model_fields[name]
    text = field.description or ""
    open_box = "auto" if choices(name) or field.annotation is str else "0"
    return f"{text} {open_box}: as the recipe has it." if _may_stay_open(model, name) else text


def _may_stay_open(model: type[Settings], name: str) -> bool:
    """Whether a box of the training stands for what the recipe has; a form asks for the others."""
    return model is TrainConfig and model.model_fields[name].default != ""


def choices(name: str) -> tuple[str, ...]:
    """The texts that a box takes; empty where it is open."""
    model = next((model for model in MODELS if name in model.model_fields), None)
    closed = model.choices(name) if model else ()
    return ("auto", *closed) if closed and model is TrainConfig else closed


def described(function: F) -> F:
    """Give a pipeline the texts of its parameters, which KFP reads from the docstring."""
    names = inspect.signature(function).parameters
    texts = "\n".join(f"    {name}: {description(name)}" for name in names)
    function.__doc__ = f"{function.__doc__}\n\nArgs:\n{texts}\n"
    return function


def filled_in(inputs: Mapping[str, Any], model: type[Settings]) -> dict[str, Any]:
    """The boxes for fields of `model` that were filled in."""
    return {
        name: value
        for name, value in inputs.items()
        if name in model.model_fields and name not in Parameters.model_fields
        if value not in BOX_LEFT_OPEN
    }

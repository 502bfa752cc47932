"""The pipelines whose forms are that of `train_resnet` with some changes."""

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any

from kfp import dsl

from kfp_ddp.pipelines import train_resnet
from kfp_ddp.pipelines.steps import Claims, Steps
from kfp_ddp.plan.form import LAST, described

ANY = Parameter.POSITIONAL_OR_KEYWORD


def variant(
    name: str,
    title: str,
    text: str,
    *,
    wire: Callable[[dict[str, Any], Claims], None] = train_resnet.wire,
    claims: Claims = Claims(),  # noqa: B008  a tuple
    without: tuple[str, ...] = (),
    required: tuple[str, ...] = (),
    defaults: Mapping[str, Any] | None = None,
) -> Any:
    """Return a pipeline whose form is that of `train_resnet` with some changes.

    `wire` connects the steps, and its docstring is the pipeline's. `required` are texts without a
    default; `defaults` are other defaults, and further parameters.
    """
    others = dict(defaults or {})
    form = inspect.signature(train_resnet.train_resnet.pipeline_func)
    source, *rest = form.parameters.values()
    fields = [source]
    fields += [Parameter(field, ANY, annotation=str) for field in required]
    for field in rest:
        if field.name not in (*without, *required):
            fields.append(field.replace(default=others.pop(field.name, field.default)))
    for new, value in others.items():
        fields.append(Parameter(new, ANY, annotation=type(value), default=value))

    def pipeline(*values: Any) -> None:
        wire(dict(zip((field.name for field in fields), values, strict=True)), claims)

    pipeline.__name__ = name
    pipeline.__doc__ = wire.__doc__
    vars(pipeline)["__signature__"] = inspect.Signature(fields, return_annotation=None)
    decorate = dsl.pipeline(name=name.replace("_", "-"), display_name=title, description=text)
    return decorate(described(pipeline))


# The PVC may be ReadWriteOnce with publish=clone or snapshot: only one node mounts it at a time.
train_resnet_bucket = variant(
    "train_resnet_bucket",
    "Train a ResNet with PyTorch DDP, runs in a bucket",
    "Like train-resnet, with checkpoints in a bucket: a claim for the dataset alone.",
    claims=Claims(work=False),
    without=("work_claim",),
    required=("work",),
)
train_resnet_claimless = variant(
    "train_resnet_claimless",
    "Train a ResNet with PyTorch DDP, without claims",
    "Like train-resnet, with checkpoints in a bucket and the dataset on each node.",
    claims=Claims(data=False, work=False),
    without=("work_claim",),
    required=("work",),
)


def _wire_script(form: dict[str, Any], claims: Claims) -> None:
    """Sync a bucket, run a script of yours on all ranks, evaluate, gate and export its weights.

    The script is a Python file as `kfp_ddp.training.spec.model_file.pack` packs it. Its environment
    and outputs are described in training/README.md. `model` is its network, and script_args of
    `training` are its arguments.
    """
    train_resnet.wire(form, claims)


own_script = variant(
    "own_script",
    "Train by a script of your own",
    "Like train-resnet, with a training script of yours in place of the loop: a Python file that "
    "every rank runs as under torchrun, and that leaves the weights.",
    wire=_wire_script,
    without=("recipe",),
    required=("script",),
)


def _wire_retrain(form: dict[str, Any], claims: Claims) -> None:
    """Sync a bucket; if data or settings are new, train, and promote a better model."""
    steps = Steps({**form, "champion": LAST}, claims)
    with steps.exit_handler():
        synced = steps.synced()
        new = steps.changes(synced)
        with dsl.If(new.outputs["Output"] == True, name="changed"):  # noqa: E712
            data = steps.published(synced)
            model = steps.trained(data)
            evaluation = steps.evaluated(data, model)
            steps.published_if_blessed(data, model, evaluation, new.outputs["attempt"])


retrain = variant(
    "retrain",
    "Retrain a ResNet where there is something new",
    "For schedules: unchanged data and settings are not trained on again, only a model that beats "
    "the last one is promoted, old runs and bundles go.",
    wire=_wire_retrain,
    without=("champion",),
    required=("destination",),
    defaults={"keep": 10},
)


def _wire_sweep(form: dict[str, Any], claims: Claims) -> None:
    """Sync a bucket, train trials with several settings, and publish the best if blessed."""
    steps = Steps(form, claims)
    with steps.exit_handler():
        data = steps.data()
        best = steps.swept(data)
        steps.published_if_blessed(data, best, steps.evaluated(data, best))


sweep = variant(
    "sweep",
    "Sweep over settings of a training",
    "Trains with several settings, some at a time: all combinations, or drawn near the good ones. "
    "With reduction_factor only the best go on. Evaluates, gates and exports the best like "
    "train-resnet.",
    wire=_wire_sweep,
    without=("pretrained",),
    defaults={"sweep": {"space": {"learning_rate": [0.025, 0.1, 0.4]}}},
)

"""The pipeline `train_resnet`, and the forms of pipelines that are like it."""

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any

from kfp import dsl

from kfp_ddp.checks.form import described
from kfp_ddp.pipelines.steps import Claims, Steps

ANY = Parameter.POSITIONAL_OR_KEYWORD


def wire(form: dict[str, Any], claims: Claims) -> None:
    """Connect the steps: check, sync a bucket, train with DDP, evaluate, gate and publish."""
    steps = Steps(form, claims)
    with steps.ended():
        data = steps.data()
        model = steps.trained(data)
        steps.published_if_blessed(data, model, steps.evaluated(data, model))


@dsl.pipeline(
    name="train-resnet",
    display_name="Train a ResNet with PyTorch DDP",
    description="Bucket to verified dataset, DDP training, evaluation, gate and exported bundle.",
)
@described
def train_resnet(
    source: str,
    recipe: str = "auto",
    pretrained: str = "auto",
    model: str = "auto",
    epochs: int = 0,
    training: dict = {},  # noqa: B006
    backend: str = "pytorchjob",
    nodes: int = 1,
    gpus_per_node: int = -1,
    job: dict = {},  # noqa: B006
    sync: dict = {},  # noqa: B006
    gate: dict = {},  # noqa: B006
    release: dict = {},  # noqa: B006
    champion: str = "",
    model_name: str = "resnet",
    destination: str = "",
    work_claim: str = "kfp-ddp-work",
    bucket_secret: str = "kfp-ddp-bucket",  # noqa: S107
) -> None:
    """Check, sync a bucket, train with DDP, evaluate, gate and publish."""
    wire(dict(locals()), Claims())


def like_train_resnet(
    wire: Callable[[dict[str, Any], Claims], None],
    name: str,
    claims: Claims = Claims(),  # noqa: B008  a tuple
    *,
    without: tuple[str, ...] = (),
    required: tuple[str, ...] = (),
    defaults: Mapping[str, Any] | None = None,
) -> Callable[..., None]:
    """Return a pipeline function whose form is that of `train_resnet` with some changes.

    `wire` connects the steps, and has the docstring of the pipeline. The form lacks the parameters
    `without`; those `required` are texts without a default; `defaults` are other defaults, and
    further parameters.
    """
    others = dict(defaults or {})
    source, *rest = inspect.signature(train_resnet.pipeline_func).parameters.values()
    fields = [source, *(Parameter(one, ANY, annotation=str) for one in required)]
    fields += [
        field.replace(default=others.pop(field.name, field.default))
        for field in rest
        if field.name not in (*without, *required)
    ]
    fields += [
        Parameter(one, ANY, annotation=type(value), default=value) for one, value in others.items()
    ]

    def pipeline(*values: Any) -> None:
        wire(dict(zip((field.name for field in fields), values, strict=True)), claims)

    pipeline.__name__, pipeline.__doc__ = name, wire.__doc__
    vars(pipeline)["__signature__"] = inspect.Signature(fields, return_annotation=None)
    return described(pipeline)

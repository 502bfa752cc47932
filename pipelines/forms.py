"""Forms of pipelines that are those of `train_resnet` but for some boxes."""

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any

from kfp_ddp.checks.preflight.parameters import described
from kfp_ddp.pipelines.steps import Claims
from kfp_ddp.pipelines.train_resnet import train_resnet

ANY = Parameter.POSITIONAL_OR_KEYWORD


def like_train_resnet(
    wire: Callable[[dict[str, Any], Claims], None],
    name: str,
    claims: Claims = Claims(),  # noqa: B008  a tuple
    *,
    without: tuple[str, ...] = (),
    required: tuple[str, ...] = (),
    defaults: Mapping[str, Any] | None = None,
) -> Callable[..., None]:
    """A pipeline's function, for `dsl.pipeline`.

    Args:
        wire: Joins the steps; it is given the parameters by name. Its docstring is the pipeline's.
        name: Of the pipeline.
        claims: What it mounts.
        without: Boxes that the form lacks.
        required: Boxes for a text that has to be given.
        defaults: Boxes with another default, and further ones.
    """
    others = dict(defaults or {})
    source, *rest = inspect.signature(train_resnet.pipeline_func).parameters.values()
    boxes = [source, *(Parameter(one, ANY, annotation=str) for one in required)]
    boxes += [
        box.replace(default=others.pop(box.name, box.default))
        for box in rest
        if box.name not in (*without, *required)
    ]
    boxes += [
        Parameter(one, ANY, annotation=type(value), default=value) for one, value in others.items()
    ]

    def pipeline(*given: Any) -> None:
        wire(dict(zip((box.name for box in boxes), given, strict=True)), claims)

    pipeline.__name__, pipeline.__doc__ = name, wire.__doc__
    vars(pipeline)["__signature__"] = inspect.Signature(boxes, return_annotation=None)
    return described(pipeline)

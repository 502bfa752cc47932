"""The pipeline `finetune`: `train_resnet` from existing weights."""

from typing import Any

from kfp import dsl

from kfp_ddp.pipelines import train_resnet
from kfp_ddp.pipelines.steps import Claims
from kfp_ddp.pipelines.train_resnet import like_train_resnet


def wire(form: dict[str, Any], claims: Claims) -> None:
    """Train from existing weights: torchvision's, a champion, a checkpoint or a file.

    With weights, auto is the recipe finetune for these images and GPUs.
    """
    train_resnet.wire({**form, "recipe": "auto"}, claims)


finetune = dsl.pipeline(
    name="finetune",
    display_name="Fine-tune a network on your images",
    description="Like train-resnet, from existing weights, by the recipe finetune: for "
    "hundreds to some ten thousand images.",
)(like_train_resnet(wire, "finetune", without=("recipe",), defaults={"pretrained": "true"}))

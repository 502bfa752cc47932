"""The pipeline `own_script`: a user's training script between our sync, gate and export."""

from typing import Any

from kfp import dsl

from kfp_ddp.pipelines import train_resnet
from kfp_ddp.pipelines.steps import Claims
from kfp_ddp.pipelines.train_resnet import like_train_resnet


def wire(form: dict[str, Any], claims: Claims) -> None:
    """Sync a bucket, run a script of yours on all ranks, evaluate, gate and export its weights.

    The script is a Python file as `kfp_ddp.training.model_file.pack` packs it. Its environment and
    outputs are described in training/README.md. `model` is its network, and script_args of
    `training` are its arguments.
    """
    train_resnet.wire(form, claims)


own_script = dsl.pipeline(
    name="own-script",
    display_name="Train by a script of your own",
    description="Like train-resnet, with a training script of yours in place of the loop: a Python "
    "file that every rank runs as under torchrun, and that leaves the weights.",
)(like_train_resnet(wire, "own_script", without=("recipe",), required=("script",)))

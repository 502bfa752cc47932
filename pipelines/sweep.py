"""The pipeline `sweep`: train several trials in parallel, evaluate and export the best."""

from typing import Any

from kfp import dsl

from kfp_ddp.pipelines.steps import Claims, Steps
from kfp_ddp.pipelines.train_resnet import like_train_resnet

AT_ONCE = 4
"""Trials that run in parallel; KFP takes no parameter for it."""


def wire(form: dict[str, Any], claims: Claims) -> None:
    """Sync a bucket, train once with each of several settings, and publish the best if blessed."""
    steps = Steps(form, claims)
    with steps.ended():
        data = steps.data()
        # In a group: kfp.local passes the loop's item to steps beside the loop.
        with dsl.If(steps.plan["dataset"] != "", name="sweep"):
            with dsl.ParallelFor(steps.plan["trials"], name="trials", parallelism=AT_ONCE) as trial:
                tried = steps.tried(data, trial)
            best = steps.best(tried)
            steps.published_if_blessed(data, best, steps.evaluated(data, best))


sweep = dsl.pipeline(
    name="sweep",
    display_name="Sweep over settings of a training",
    description="Trains with each of several settings, four at a time, ends those that are behind, "
    "ranks them, and evaluates, gates and exports the best like train-resnet.",
)(
    like_train_resnet(
        wire,
        "sweep",
        without=("pretrained",),
        defaults={"sweep": {"space": {"learning_rate": [0.025, 0.1, 0.4]}}},
    )
)

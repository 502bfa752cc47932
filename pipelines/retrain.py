"""The pipeline `retrain`: for schedules, trains only on new data or settings, deletes old runs."""

from typing import Any

from kfp import dsl

from kfp_ddp.checks.form import LAST
from kfp_ddp.pipelines.steps import Claims, Steps
from kfp_ddp.pipelines.train_resnet import like_train_resnet


def wire(form: dict[str, Any], claims: Claims) -> None:
    """Sync a bucket; if data or settings are new, train, and promote a better model."""
    steps = Steps({**form, "champion": LAST}, claims)
    with steps.ended():
        synced = steps.synced()
        new = steps.changes(synced)
        with dsl.If(new.outputs["Output"] == True, name="changed"):  # noqa: E712
            data = steps.published(synced)
            model = steps.trained(data)
            evaluation = steps.evaluated(data, model)
            steps.published_if_blessed(data, model, evaluation, new.outputs["attempt"])


retrain = dsl.pipeline(
    name="retrain",
    display_name="Retrain a ResNet where there is something new",
    description="For schedules: unchanged data and settings are not trained on again, only a model "
    "that beats the last one is promoted, old runs and bundles go.",
)(
    like_train_resnet(
        wire,
        "retrain",
        without=("champion",),
        required=("destination",),
        defaults={"keep": 10},
    )
)

"""The pipeline `train_resnet`."""

from typing import Any

from kfp import dsl

from kfp_ddp.pipelines.steps import Claims, Steps
from kfp_ddp.plan.form import described


def wire(form: dict[str, Any], claims: Claims) -> None:
    """Connect the steps: check, sync a bucket, train with DDP, evaluate, gate and publish."""
    steps = Steps(form, claims)
    with steps.exit_handler():
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

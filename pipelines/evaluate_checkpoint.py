"""The pipeline `evaluate_checkpoint`: evaluate an existing model on the current images."""

from kfp import dsl

from kfp_ddp.checks.form import described
from kfp_ddp.pipelines.steps import Claims, Steps


@dsl.pipeline(
    name="evaluate-checkpoint",
    display_name="Evaluate a checkpoint or a bundle",
    description="Bucket to verified dataset, evaluation of an existing model, its report and "
    "the verdict of the gate. Nothing is trained or exported.",
)
@described
def evaluate_checkpoint(
    source: str,
    checkpoint: str,
    split: str = "val",
    champion: str = "",
    gate: dict = {},  # noqa: B006
    model_name: str = "resnet",
    destination: str = "",
    job: dict = {},  # noqa: B006
    sync: dict = {},  # noqa: B006
    work_claim: str = "kfp-ddp-work",
    bucket_secret: str = "kfp-ddp-bucket",  # noqa: S107
) -> None:
    """Sync a bucket, evaluate a model on it, and judge that."""
    steps = Steps({**locals(), "backend": "local"}, Claims())
    with steps.exit_handler("evaluation"):
        data = steps.data()
        model = {"checkpoint": checkpoint, "run_dir": ""}
        result = steps.evaluated(data, model, split=split, **steps.at)
        steps.judged(result)

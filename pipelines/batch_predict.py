"""The pipeline `batch_predict`: a table with the class of each object below a prefix."""

from kfp import dsl

from kfp_ddp.checks.form import StepResources, described
from kfp_ddp.pipelines.steps import Claims, Steps


@dsl.pipeline(
    name="batch-predict",
    display_name="Predict the class of each object",
    description="A bucket's images and a model to a table with a row for each object. A later run "
    "predicts new and changed objects only.",
)
@described
def batch_predict(
    source: str,
    bundle: str,
    table: str,
    prediction: dict = {},  # noqa: B006
    backend: str = "local",
    job: dict = {},  # noqa: B006
    predict_gpus: str = "",
    bucket_secret: str = "kfp-ddp-bucket",  # noqa: S107
) -> None:
    """Predict the objects of a source, without a claim."""
    form, plan = {**locals(), "work": ""}, StepResources().model_dump()
    steps = Steps(form, Claims(data=False, work=False), plan)
    with steps.exit_handler("prediction"):
        steps.predicted()

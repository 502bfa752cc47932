"""Pipelines of some of the steps: a sync, an evaluation or a batch prediction alone."""

from kfp import dsl

from kfp_ddp.pipelines.steps import Claims, Steps
from kfp_ddp.plan.form import StepResources, described


@dsl.pipeline(
    name="sync-dataset",
    display_name="Sync a dataset from a bucket",
    description="Bucket to a verified version on a claim, named by its content, and to a "
    "ReadOnlyMany copy where publish asks for one. Unchanged data costs one listing.",
)
@described
def sync_dataset(
    source: str,
    dataset: str = "",
    claim: str = "kfp-ddp-data",
    publish: str = "in-place",
    sync: dict = {},  # noqa: B006
    bucket_secret: str = "kfp-ddp-bucket",  # noqa: S107
) -> None:
    """Sync a bucket, and prepare its version for mounting."""
    limits = StepResources().model_dump(include={"sync_cpu", "sync_memory"})
    named = {"dataset": dataset, "data_claim": claim, "publish": publish, "sync": sync}
    form = {"source": source, "bucket_secret": bucket_secret}
    Steps(form, Claims(), {**named, **limits, "layout": {}}).data()


@dsl.pipeline(
    name="evaluate-checkpoint",
    display_name="Evaluate a checkpoint or a bundle",
    description="Bucket to verified dataset, evaluation of an existing model, its report and "
    "the verdict of the gate. Nothing is trained. With model, checkpoint is weights of that "
    "network, from anywhere; they are exported, too, and published if blessed.",
)
@described
def evaluate_checkpoint(
    source: str,
    checkpoint: str,
    model: str = "auto",
    training: dict = {},  # noqa: B006
    split: str = "val",
    champion: str = "",
    gate: dict = {},  # noqa: B006
    release: dict = {},  # noqa: B006
    model_name: str = "resnet",
    destination: str = "",
    job: dict = {},  # noqa: B006
    sync: dict = {},  # noqa: B006
    work_claim: str = "kfp-ddp-work",
    bucket_secret: str = "kfp-ddp-bucket",  # noqa: S107
) -> None:
    """Sync a bucket, evaluate a model on it, and judge that; export weights of a network."""
    steps = Steps({**locals(), "backend": "local"}, Claims())
    with steps.exit_handler("evaluation"):
        data = steps.data()
        existing = {"checkpoint": checkpoint, "run_dir": ""}
        result = steps.evaluated(data, existing, split=split, **steps.at)
        verdict = steps.judged(result)
        with dsl.If(model != "auto", name="own-network"):
            written = {"checkpoint": "", "run_dir": ""}  # beside the evaluation
            bundle = steps.exported(data, written, result, split=split)
            steps.published_if(verdict, bundle, result)


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
    form = {**locals(), "work": ""}
    plan = StepResources().model_dump()
    steps = Steps(form, Claims(data=False, work=False), plan)
    with steps.exit_handler("prediction"):
        steps.predicted()

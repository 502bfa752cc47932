"""The KFP component `predict`."""

from typing import NamedTuple

from kfp import dsl


@dsl.component(
    base_image="ghcr.io/kfp-ddp/trainer:0.2.0",
    install_kfp_package=False,
    task_config_passthroughs=[
        dsl.TaskConfigPassthrough(field=field, apply_to_task=True) for field in dsl.TaskConfigField
    ],
)
def predict(
    source: str,
    bundle: str,
    table: str,
    prediction_metrics: dsl.Output[dsl.Metrics],
    prediction_record: dsl.Output[dsl.Artifact],
    options: dict = {},  # noqa: B006
    run_id: str = "",
    backend: str = "local",
    job: dict = {},  # noqa: B006
    image: str = "ghcr.io/kfp-ddp/trainer:0.2.0",
    task_name: str = "predict",
    task_id: str = "",
    task_config: dsl.TaskConfig = None,
) -> NamedTuple("Predicted", [("table", str), ("rows", int), ("unreadable", int)]):
    """Predict the class of each object of a source, and write a table.

    Args:
        source: Where the objects are, of any kind of store.
        bundle: Folder or URI of a bundle, or of a model's exports for the champion.
        table: URI of the table, .csv or .parquet; rows of an existing one that are up to date stay.
        prediction_metrics: Rows, rows that were computed, unreadable objects, seconds.
        prediction_record: The same as JSON, with the number of objects by class.
        task_config: Settings of this task, which KFP fills in; they apply to the workers of a job.
        options: Settings by name; the README lists them.
        run_id: Id of the pipeline run, for a job.
        backend: local: this step, with a rank for each of its GPUs; pytorchjob or trainjob: a job.
        job: Settings of the ranks by name, such as {"nodes": 2}; the README of job lists them.
        image: Image of a job's workers, unless job has one.
        task_name: Name of this task in the pipeline, for a job.
        task_id: Id of the task, which distinguishes iterations of a loop, for a job.

    Returns:
        URI of the table, number of its rows, and number of objects that cannot be read.
    """
    inputs = dict(locals())
    from kfp_ddp.evaluation.engine import predict

    return predict(**inputs)

"""The KFP component `evaluate`."""

from typing import NamedTuple

from kfp import dsl


@dsl.component(
    base_image="ghcr.io/kfp-ddp/trainer:0.2.0",
    install_kfp_package=False,
    task_config_passthroughs=[
        dsl.TaskConfigPassthrough(field=field, apply_to_task=True) for field in dsl.TaskConfigField
    ],
)
def evaluate(
    checkpoint: str,
    run_dir: str,
    dataset_path: str,
    evaluation_metrics: dsl.Output[dsl.Metrics],
    confusion_matrix: dsl.Output[dsl.ClassificationMetrics],
    evaluation_report: dsl.Output[dsl.HTML],
    evaluation_summary: dsl.Output[dsl.Markdown],
    split: str = "val",
    batch_size: int = 256,
    worst: int = 24,
    champion: str = "",
    options: dict = {},  # noqa: B006
    run_id: str = "",
    work_dir: str = "",
    backend: str = "local",
    job: dict = {},  # noqa: B006
    image: str = "ghcr.io/kfp-ddp/trainer:0.2.0",
    task_name: str = "evaluate",
    task_id: str = "",
    task_config: dsl.TaskConfig = None,
) -> NamedTuple("Evaluated", [("accuracy", float), ("evaluation", str)]):
    """Evaluate a checkpoint on every sample of a split, each exactly once.

    Args:
        checkpoint: Folder of the checkpoint, from train; a bundle or exports with an empty run_dir.
        run_dir: Folder of the run, for the evaluation; empty for <work_dir>/<run_id>/evaluate.
        dataset_path: Folder of the dataset version.
        evaluation_metrics: Accuracy with its interval, loss, macro F1, calibration error and more.
        confusion_matrix: Confusion matrix and ROC curve, with at most 50 classes.
        evaluation_report: Self-contained report: curves, confusion, classes, worst mistakes.
        evaluation_summary: The headline numbers.
        task_config: Settings of this task, which KFP fills in; they apply to the workers of a job.
        split: val, with test if there is one; test; or a folder of the dataset with class folders.
        batch_size: Images at a time.
        worst: Mistakes with the highest loss in the report, 0 to 200.
        champion: That of the gate, if it has one; evaluated again if it has other samples.
        options: Optional measurements, and the key of the champion, by name, as in the README.
        run_id: Id of the pipeline run, for an empty run_dir and for a job.
        work_dir: Folder or bucket for an empty run_dir; empty for KFP_DDP_WORK_DIR or /work.
        backend: local: this step, with a rank for each of its GPUs; pytorchjob or trainjob: a job.
        job: Settings of the ranks by name, such as {"nodes": 2}; the README of job lists them.
        image: Image of a job's workers, unless job has one.
        task_name: Name of this task in the pipeline, for a job.
        task_id: Id of the task, which distinguishes iterations of a loop, for a job.

    Returns:
        Share of the samples whose likeliest class is the true one, and the path of evaluation.json.
    """
    inputs = dict(locals())
    from kfp_ddp.evaluation.engine import run

    return run(**inputs)

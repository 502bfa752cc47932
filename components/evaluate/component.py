"""The KFP component `evaluate`."""

from typing import NamedTuple

from kfp import dsl


@dsl.component(
    base_image="ghcr.io/kfp-ddp/trainer:0.1.0",
    install_kfp_package=False,
    task_config_passthroughs=[
        dsl.TaskConfigPassthrough(field=field, apply_to_task=True)
        for field in (
            dsl.TaskConfigField.RESOURCES,
            dsl.TaskConfigField.KUBERNETES_TOLERATIONS,
            dsl.TaskConfigField.KUBERNETES_NODE_SELECTOR,
            dsl.TaskConfigField.KUBERNETES_AFFINITY,
            dsl.TaskConfigField.ENV,
            dsl.TaskConfigField.KUBERNETES_VOLUMES,
        )
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
    image: str = "ghcr.io/kfp-ddp/trainer:0.1.0",
    task_name: str = "evaluate",
    task_id: str = "",
    task_config: dsl.TaskConfig = None,
) -> NamedTuple("Evaluated", [("accuracy", float), ("evaluation", str)]):
    """Evaluate a checkpoint on every sample of a split, each exactly once.

    Args:
        checkpoint: Folder of the checkpoint, as train returned it. With an empty run_dir it may be
            the folder or address of a bundle too, or of a model's exports for the champion.
        run_dir: Folder of the run; the evaluation is written below it. Empty for one of this step,
            <work_dir>/<run_id>/evaluate.
        dataset_path: Folder of the dataset version.
        evaluation_metrics: Accuracy with its 95 % interval, top 5, loss, macro F1, calibration
            error, AUC.
        confusion_matrix: Confusion matrix and ROC curve, with at most 50 classes.
        evaluation_report: Self-contained report: curves, confusion, classes, worst mistakes.
        evaluation_summary: The headline numbers.
        task_config: What is set on this task, filled in by KFP: it reaches the workers of a job.
        split: What to evaluate on: val as the training had it, and with it test where there is one;
            test; or a folder of the dataset with class folders.
        batch_size: Images at a time.
        worst: How many of the worst mistakes the report shows, 0 to 200.
        champion: The gate's, if it has one. A bundle whose own evaluation is not of the samples of
            this split is evaluated on them too, so that the gate can compare.
        options: What else is measured, by name; the README lists it.
        run_id: Id of the pipeline run, where run_dir is empty, and for a job.
        work_dir: Folder, or bucket's prefix, for that; empty for KFP_DDP_WORK_DIR or /work.
        backend: local, this step itself with a rank for each of its GPUs, or nproc_per_node; or
            pytorchjob or trainjob, a job of its own.
        job: Settings of the ranks by name, such as {"nodes": 2, "gpus_per_node": 8}; the README of
            the component job lists them.
        image: Image of a job's workers, where job names none.
        task_name: Name of this task in the pipeline, for a job.
        task_id: The pipeline's task id, which tells iterations of a loop apart, for a job.

    Returns:
        accuracy: Share of the samples whose likeliest class is the true one.
        evaluation: Path of evaluation.json, for gate and export.
    """
    inputs = dict(locals())
    from kfp_ddp.evaluation.engine import run

    return run(**inputs)

"""The KFP component `evaluate`."""

from typing import NamedTuple

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/trainer:0.1.0", install_kfp_package=False)
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
        split: What to evaluate on: val as the training had it, and with it test where there is one;
            test; or a folder of the dataset with class folders.
        batch_size: Images at a time.
        worst: How many of the worst mistakes the report shows, 0 to 200.
        champion: The gate's, if it has one. A bundle whose own evaluation is not of the samples of
            this split is evaluated on them too, so that the gate can compare.
        options: What else is measured, by name; the README lists it.
        run_id: Id of the pipeline run, where run_dir is empty.
        work_dir: Folder, or bucket's prefix, for that; empty for KFP_DDP_WORK_DIR or /work.

    Returns:
        accuracy: Share of the samples whose likeliest class is the true one.
        evaluation: Path of evaluation.json, for gate and export.
    """
    inputs = dict(locals())
    from kfp_ddp.components.evaluate.engine import run

    return run(**inputs)

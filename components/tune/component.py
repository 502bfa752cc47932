"""The KFP component `tune`."""

from typing import NamedTuple

from kfp import dsl


@dsl.component(
    base_image="ghcr.io/kfp-ddp/launcher:0.2.0",
    install_kfp_package=False,
    task_config_passthroughs=[
        dsl.TaskConfigPassthrough(field, apply_to_task=field.name in ("ENV", "KUBERNETES_VOLUMES"))
        for field in dsl.TaskConfigField
    ],
)
def tune(
    run_id: str,
    task_name: str,
    dataset_path: str,
    sweep: dict,
    trained_model: dsl.Output[dsl.Model],
    train_metrics: dsl.Output[dsl.Metrics],
    loss_curve: dsl.Output[dsl.HTML],
    sweep_report: dsl.Output[dsl.HTML],
    sweep_metrics: dsl.Output[dsl.Metrics],
    sweep_summary: dsl.Output[dsl.Markdown],
    task_config: dsl.TaskConfig,
    training: dict = {},  # noqa: B006
    backend: str = "pytorchjob",
    job: dict = {},  # noqa: B006
    image: str = "ghcr.io/kfp-ddp/trainer:0.2.0",
    work_dir: str = "",
) -> NamedTuple("Best", [("checkpoint", str), ("run_dir", str)]):
    """Train with several settings, some at a time, each as a job, and choose the best.

    Args:
        run_id: Id of the pipeline run; names its folder below work_dir.
        task_name: Name of this task in the pipeline; names the folders of the trials.
        dataset_path: Folder of the dataset version, as for train.
        sweep: Settings of the sweep by name, such as {"space": {"learning_rate": [0.05, 0.1]}}.
        trained_model: The checkpoint of the best trial: its path, digest, step and metrics.
        train_metrics: Last loss, accuracy, speed and step of the best trial.
        loss_curve: Curves of loss and accuracy of the best trial.
        sweep_report: The trials with the settings in which they differ, and their curves.
        sweep_metrics: Accuracy of the best, and the number of trials, failed and ended early.
        sweep_summary: The trials in a table.
        task_config: Settings of this task, which KFP fills in; they apply to the workers.
        training: Settings of all trainings by name, which those of a trial override.
        backend: pytorchjob (Training Operator), trainjob (Trainer), or local: one after the other.
        job: Settings of the job of each trial by name, as for train.
        image: Image of the workers, unless job has one.
        work_dir: Folder for checkpoints and metrics, as for train.

    Returns:
        The checkpoint of the best trial, and its folder.
    """
    inputs = dict(locals())
    from kfp_ddp.sweep.engine import run

    return run(**inputs)

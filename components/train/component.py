"""The KFP component `train`."""

from typing import NamedTuple

from kfp import dsl


@dsl.component(
    base_image="ghcr.io/kfp-ddp/launcher:0.1.0",
    install_kfp_package=False,
    task_config_passthroughs=[
        dsl.TaskConfigField.RESOURCES,
        dsl.TaskConfigField.KUBERNETES_TOLERATIONS,
        dsl.TaskConfigField.KUBERNETES_NODE_SELECTOR,
        dsl.TaskConfigField.KUBERNETES_AFFINITY,
        dsl.TaskConfigPassthrough(field=dsl.TaskConfigField.ENV, apply_to_task=True),
        dsl.TaskConfigPassthrough(field=dsl.TaskConfigField.KUBERNETES_VOLUMES, apply_to_task=True),
    ],
)
def train(
    run_id: str,
    task_name: str,
    task_id: str,
    dataset_path: str,
    trained_model: dsl.Output[dsl.Model],
    train_metrics: dsl.Output[dsl.Metrics],
    loss_curve: dsl.Output[dsl.HTML],
    training_job: dsl.Output[dsl.Artifact],
    task_config: dsl.TaskConfig,
    training: dict = {},  # noqa: B006
    backend: str = "pytorchjob",
    job: dict = {},  # noqa: B006
    image: str = "ghcr.io/kfp-ddp/trainer:0.1.0",
    work_dir: str = "",
    may_fail: bool = False,
) -> NamedTuple("Trained", [("checkpoint", str), ("run_dir", str), ("failure", str)]):
    """Train a ResNet with PyTorch DDP on an image folder; resume from the newest checkpoint.

    Args:
        run_id: Id of the pipeline run; names its folder under work_dir.
        task_name: Name of this task in the pipeline; names its folder in that of the run.
        task_id: The pipeline's task id, which tells iterations of a loop apart; empty outside of a
            pipeline.
        dataset_path: Folder of the dataset version, or of images as training/README.md has them.
        trained_model: The best checkpoint where keep_best kept it, else the newest: its path,
            digest, step and metrics.
        train_metrics: Final loss, accuracy, speed and step.
        loss_curve: Loss and accuracy over the steps, as a picture.
        training_job: The job as it ended, for the record.
        task_config: What is set on this task, filled in by KFP: it reaches the workers.
        training: Settings of the training by name, such as {"model": "resnet18", "epochs": 30};
            training/README.md lists them.
        backend: pytorchjob (Training Operator), trainjob (Trainer), or local: this step itself.
        job: Settings of the job by name, such as {"nodes": 2, "gpus_per_node": 8}; the README
            of the component job lists them. Also heartbeat_minutes and keep_runs.
        image: Image of the workers, where job names none.
        work_dir: Folder, on a claim that later steps mount too, for checkpoints and metrics, or a
            bucket's prefix such as gs://bucket/runs; empty for KFP_DDP_WORK_DIR or /work.
        may_fail: Whether the step succeeds, with an empty checkpoint, where the training fails, as
            where it is one of several that are tried.

    Returns:
        The folder of that checkpoint, and the folder of the task, or their addresses; and why the
        training failed, which is empty where it did not.
    """
    inputs = dict(locals())
    from kfp_ddp.runs.train.engine import run

    return run(**inputs)

"""The KFP component `train`."""

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
    image: str = "ghcr.io/kfp-ddp/trainer:0.2.0",
    work_dir: str = "",
) -> NamedTuple("Trained", [("checkpoint", str), ("run_dir", str)]):
    """Train a ResNet with PyTorch DDP on an image folder; resume from the newest checkpoint.

    Args:
        run_id: Id of the pipeline run; names its folder below work_dir.
        task_name: Name of this task in the pipeline; names its folder in that of the run.
        task_id: Id of the task, which tells iterations of a loop apart; empty outside a pipeline.
        dataset_path: Folder of the dataset version, or of images as in training/README.md.
        trained_model: The best checkpoint with keep_best, else the newest: path, digest, metrics.
        train_metrics: Last loss, accuracy, speed and step.
        loss_curve: Curves of loss and accuracy.
        training_job: The finished job.
        task_config: Settings of this task, which KFP fills in; they apply to the workers.
        training: Settings of the training, such as {"epochs": 30}; training/README.md lists them.
        backend: pytorchjob (Training Operator), trainjob (Trainer), or local: this step itself.
        job: Settings of the job by name, such as {"nodes": 2, "gpus_per_node": 8}; see the README.
        image: Image of the workers, unless job has one.
        work_dir: Folder on a PVC, or a bucket's prefix; empty for KFP_DDP_WORK_DIR or /work.

    Returns:
        The folder or URI of that checkpoint, and of the task.
    """
    inputs = dict(locals())
    from kfp_ddp.runs.train.engine import run

    return run(**inputs)

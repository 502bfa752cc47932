"""The KFP signature of `preflight`."""

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/launcher:0.1.0", install_kfp_package=False)
def preflight(
    summary: dsl.Output[dsl.Markdown],
    source: str,
    data_dir: str,
    work_dir: str,
    dataset: str = "",
    sync: dict = {},  # noqa: B006
    data_claim: str = "",
    work_claim: str = "",
    publish: str = "in-place",
    backend: str = "pytorchjob",
    image: str = "ghcr.io/kfp-ddp/trainer:0.1.0",
    nodes: int = 1,
    nproc_per_node: int = 0,
    gpus_per_node: int = 0,
    cluster: dict = {},  # noqa: B006
    model: str = "resnet50",
    image_size: int = 224,
    epochs: int = 90,
    batch_size: int = 256,
    learning_rate: float = 0.1,
    weight_decay: float = 5e-5,
    warmup_epochs: float = 5.0,
    label_smoothing: float = 0.1,
    seed: int = 0,
    workers: int = 4,
    checkpoint_epochs: int = 1,
    checkpoint_minutes: float = 15.0,
    training: dict = {},  # noqa: B006
    min_accuracy: float = 0.0,
    champion: str = "",
    min_improvement: float = 0.0,
    model_name: str = "resnet",
    destination: str = "",
    keep_runs: int = 0,
) -> str:
    """Check the parameters of a training run before a byte moves; change nothing.

    Inputs are those of the steps that follow, under the same names. What fails here in seconds
    would fail there after a sync, or after the training.

    Args:
        summary: What will run, and warnings.
        source: As for data_sync.
        data_dir: Folder that the data claim is mounted at.
        work_dir: Folder that the work claim is mounted at.
        dataset: As for data_sync.
        sync: As the options of data_sync.
        data_claim: Claim of the dataset.
        work_claim: Claim of checkpoints and results.
        publish: As for dataset_volume.
        backend: As for train; on a cluster rights, claims, queue and GPUs are looked at.
        image: As for train.
        nodes: As for train.
        nproc_per_node: As for train.
        gpus_per_node: As for train.
        cluster: As for train.
        model: As for train.
        image_size: As for train.
        epochs: As for train.
        batch_size: As for train.
        learning_rate: As for train.
        weight_decay: As for train.
        warmup_epochs: As for train.
        label_smoothing: As for train.
        seed: As for train.
        workers: As for train.
        checkpoint_epochs: As for train.
        checkpoint_minutes: As for train.
        training: As for train.
        min_accuracy: As for gate.
        champion: As for gate.
        min_improvement: As for gate.
        model_name: As for export.
        destination: As for export; a bucket that is not there is an error.
        keep_runs: As for teardown.

    Returns:
        One line that says what will run.
    """
    from kfp_ddp.components.preflight.engine import run

    return run(
        summary=summary,
        source=source,
        dataset=dataset,
        sync=sync,
        claims={data_dir: data_claim, work_dir: work_claim},
        publish=publish,
        backend=backend,
        nproc_per_node=nproc_per_node,
        cluster={"image": image, "nodes": nodes, "gpus_per_node": gpus_per_node},
        more_cluster=cluster,
        training={
            "data": data_dir,
            "output_dir": work_dir,
            "model": model,
            "image_size": image_size,
            "epochs": epochs,
            "batch_size": batch_size,
            "learning_rate": learning_rate,
            "weight_decay": weight_decay,
            "warmup_epochs": warmup_epochs,
            "label_smoothing": label_smoothing,
            "seed": seed,
            "workers": workers,
            "checkpoint_epochs": checkpoint_epochs,
            "checkpoint_minutes": checkpoint_minutes,
        },
        more_training=training,
        rules={"min_accuracy": min_accuracy, "min_improvement": min_improvement},
        champion=champion,
        model_name=model_name,
        destination=destination,
        keep_runs=keep_runs,
    )

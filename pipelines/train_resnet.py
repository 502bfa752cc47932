"""The pipeline `train_resnet`: bucket to evaluated, gated and exported model."""

from pathlib import PurePosixPath

from kfp import dsl, kubernetes

from kfp_ddp.components.data_sync.component import data_sync
from kfp_ddp.components.dataset_volume.component import dataset_volume
from kfp_ddp.components.evaluate.component import evaluate
from kfp_ddp.components.export.component import export
from kfp_ddp.components.gate.component import gate
from kfp_ddp.components.preflight.component import preflight
from kfp_ddp.components.shared.step import KEY
from kfp_ddp.components.teardown.component import teardown
from kfp_ddp.components.train.component import train

# Keys of the bucket's secret that become environment variables: S3 and what speaks like it.
SECRET_ENV = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    *("AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3"),
)


def _bucket(task: dsl.PipelineTask, credentials: object) -> dsl.PipelineTask:
    """Give a step the bucket's credentials, if such a secret is there."""
    kubernetes.use_secret_as_volume(
        task, secret_name=credentials, mount_path=str(PurePosixPath(KEY).parent), optional=True
    )
    return kubernetes.use_secret_as_env(
        task, secret_name=credentials, secret_key_to_env={k: k for k in SECRET_ENV}, optional=True
    )


def _mount(task: dsl.PipelineTask, data: object = None, work: object = None) -> dsl.PipelineTask:
    """Mount the claims a step uses and switch its cache off: what it reads changes under a path."""
    if data is not None:
        kubernetes.mount_pvc(task, pvc_name=data, mount_path="/data")
    if work is not None:
        kubernetes.mount_pvc(task, pvc_name=work, mount_path="/work")
    return task.set_caching_options(False)


@dsl.pipeline(
    name="train-resnet",
    display_name="Train a ResNet with PyTorch DDP",
    description="Bucket to verified dataset, DDP training, evaluation, gate and exported bundle.",
)
def train_resnet(
    source: str,
    dataset: str = "",
    sync: dict = {},  # noqa: B006
    model: str = "resnet50",
    image_size: int = 224,
    epochs: int = 90,
    batch_size: int = 256,
    learning_rate: float = 0.1,
    warmup_epochs: float = 5.0,
    weight_decay: float = 5e-5,
    label_smoothing: float = 0.1,
    seed: int = 0,
    workers: int = 4,
    checkpoint_epochs: int = 1,
    checkpoint_minutes: float = 15.0,
    publish: str = "in-place",
    backend: str = "pytorchjob",
    nodes: int = 1,
    nproc_per_node: int = 0,
    gpus_per_node: int = 0,
    image: str = "ghcr.io/kfp-ddp/trainer:0.1.0",
    cluster: dict = {},  # noqa: B006
    training: dict = {},  # noqa: B006
    min_accuracy: float = 0.7,
    champion: str = "",
    min_improvement: float = 0.0,
    model_name: str = "resnet",
    destination: str = "",
    data_claim: str = "kfp-ddp-data",
    work_claim: str = "kfp-ddp-work",
    keep_runs: int = 0,
    credentials: str = "kfp-ddp-bucket",
    data_dir: str = "/data",
    work_dir: str = "/work",
) -> None:
    """Check, sync a bucket, train with DDP, evaluate, gate and export.

    Args:
        source: Prefix with train/<class>/ and val/<class>/ image folders: gs://bucket/prefix, or
            s3://, or a manifest's https:// address.
        dataset: Name of the dataset, for labels and the names of its claims; empty for one made
            from the source.
        sync: Further settings of the sync by name, such as {"max_delete": 1}; the component
            data_sync lists them.
        model: resnet18, resnet34, resnet50, or cifar_resnet8, 14, 20 for small images.
        image_size: Height and width of the images that the network sees, in pixels.
        epochs: Passes over the training split.
        batch_size: Images a step, over all ranks together.
        learning_rate: Peak learning rate, reached after the warm-up.
        warmup_epochs: Epochs of linear warm-up before the cosine decay.
        weight_decay: L2 penalty on the weights of convolutions and linear layers.
        label_smoothing: Share of the target spread over all classes, 0 to 1.
        seed: Seed of initialisation, order and augmentation.
        workers: Loader processes for each rank.
        checkpoint_epochs: Save a checkpoint each so many epochs.
        checkpoint_minutes: And each so many minutes; 0 for epochs only.
        publish: How workers get the data: in-place, clone, snapshot, populator, auto or none.
        backend: pytorchjob, trainjob, or local for processes of the train step itself, where its
            image has torch: the published one has not.
        nodes: Pods of the job.
        nproc_per_node: Ranks a node; 0 for one for each GPU, or one on a CPU.
        gpus_per_node: GPUs of a node.
        image: Image of the job's pods.
        cluster: Further settings of the job by name, such as {"priority_class": "low"};
            `kfp-ddp manifest --settings` lists them.
        training: Further settings of the training by name, such as {"precision": "bf16"}; the
            component train lists them.
        min_accuracy: The gate blesses a model of at least this accuracy, 0 to 1.
        champion: Model to beat: <destination>/<model_name> for the last that was exported there,
            or the folder of a bundle; empty for none. Better in a bucket: one on the work claim
            may go with the runs that keep_runs deletes.
        min_improvement: Accuracy that the model must gain on the champion, -1 to 1. At 0 a tie
            passes; 0.001 asks for a tenth of a percent more.
        model_name: Name of the exported model in its bundle and serving layout.
        destination: Where the bundle is uploaded to: gs://bucket/prefix; empty for nowhere.
        data_claim: Claim that holds the versions of the dataset.
        work_claim: Claim that holds checkpoints, evaluations and bundles.
        keep_runs: Folders of runs to keep on the work claim; 0 for all. A recurring run fills it.
        credentials: Secret with the bucket's credentials, where pods have none of their own:
            key.json of a service account, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. It need
            not be there, but the name must not be empty.
        data_dir: Where the data claim is mounted; change it for local runs only.
        work_dir: Where the work claim is mounted; change it for local runs only.
    """
    # Not in the group: where a claim is missing, the pod of teardown could not start either.
    checked = _bucket(
        preflight(
            source=source,
            dataset=dataset,
            sync=sync,
            data_dir=data_dir,
            work_dir=work_dir,
            data_claim=data_claim,
            work_claim=work_claim,
            publish=publish,
            backend=backend,
            image=image,
            nodes=nodes,
            nproc_per_node=nproc_per_node,
            gpus_per_node=gpus_per_node,
            cluster=cluster,
            model=model,
            image_size=image_size,
            epochs=epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            warmup_epochs=warmup_epochs,
            label_smoothing=label_smoothing,
            seed=seed,
            workers=workers,
            checkpoint_epochs=checkpoint_epochs,
            checkpoint_minutes=checkpoint_minutes,
            training=training,
            min_accuracy=min_accuracy,
            champion=champion,
            min_improvement=min_improvement,
            model_name=model_name,
            destination=destination,
            keep_runs=keep_runs,
        ).set_caching_options(False),
        credentials,
    )
    last = teardown(
        run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
        work_dir=work_dir,
        backend=backend,
        keep_runs=keep_runs,
    )
    _mount(last, work=work_claim)
    with dsl.ExitHandler(last, name="training"):
        synced = _mount(
            data_sync(source=source, data_dir=data_dir, dataset=dataset, options=sync),
            data=data_claim,
        )
        _bucket(synced, credentials).after(checked)
        volume = _mount(
            dataset_volume(
                dataset=dataset,
                digest=synced.outputs["digest"],
                path=synced.outputs["path"],
                claim=data_claim,
                publish=publish,
                source=source,
            )
        )
        trained = _mount(
            train(
                run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
                task_name=dsl.PIPELINE_TASK_NAME_PLACEHOLDER,
                task_id=dsl.PIPELINE_TASK_ID_PLACEHOLDER,
                dataset_path=volume.outputs["path"],
                work_dir=work_dir,
                backend=backend,
                nodes=nodes,
                nproc_per_node=nproc_per_node,
                gpus_per_node=gpus_per_node,
                image=image,
                cluster=cluster,
                training=training,
                model=model,
                image_size=image_size,
                epochs=epochs,
                batch_size=batch_size,
                learning_rate=learning_rate,
                warmup_epochs=warmup_epochs,
                weight_decay=weight_decay,
                label_smoothing=label_smoothing,
                seed=seed,
                workers=workers,
                checkpoint_epochs=checkpoint_epochs,
                checkpoint_minutes=checkpoint_minutes,
            ),
            data=volume.outputs["claim"],
            work=work_claim,
        )
        evaluated = _mount(
            evaluate(
                checkpoint=trained.outputs["checkpoint"],
                run_dir=trained.outputs["run_dir"],
                dataset_path=volume.outputs["path"],
                champion=champion,
            ),
            data=volume.outputs["claim"],
            work=work_claim,
        )
        _bucket(evaluated, credentials)
        verdict = _mount(
            gate(
                accuracy=evaluated.outputs["accuracy"],
                evaluation=evaluated.outputs["evaluation"],
                min_accuracy=min_accuracy,
                champion=champion,
                min_improvement=min_improvement,
            ),
            work=work_claim,
        )
        _bucket(verdict, credentials)
        with dsl.If(verdict.outputs["Output"] == True, name="blessed"):  # noqa: E712
            exported = _mount(
                export(
                    checkpoint=trained.outputs["checkpoint"],
                    run_dir=trained.outputs["run_dir"],
                    dataset_path=volume.outputs["path"],
                    evaluation=evaluated.outputs["evaluation"],
                    model_name=model_name,
                    destination=destination,
                ),
                data=volume.outputs["claim"],
                work=work_claim,
            )
            _bucket(exported, credentials)

"""The KFP signature of `train`."""

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
    dataset_path: str,
    work_dir: str,
    trained_model: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    loss_curve: dsl.Output[dsl.HTML],
    job: dsl.Output[dsl.Artifact],
    task_config: dsl.TaskConfig,
    task_name: str = "train",
    task_id: str = "",
    backend: str = "pytorchjob",
    image: str = "ghcr.io/kfp-ddp/trainer:0.1.0",
    nodes: int = 1,
    nproc_per_node: int = 0,
    gpus_per_node: int = 0,
    cpu: str = "",
    memory: str = "",
    scheduler: str = "",
    queue: str = "",
    spot: str = "",
    retries: int = 2,
    deadline_minutes: float = 0.0,
    pending_minutes: float = 0.0,
    heartbeat_minutes: float = 15.0,
    cluster: dict = {},  # noqa: B006
    training: dict = {},  # noqa: B006
    model: str = "resnet50",
    image_size: int = 224,
    epochs: int = 90,
    batch_size: int = 256,
    micro_batch_size: int = 0,
    learning_rate: float = 0.1,
    lr_reference_batch: int = 0,
    momentum: float = 0.9,
    weight_decay: float = 5e-5,
    warmup_epochs: float = 5.0,
    label_smoothing: float = 0.1,
    ema_decay: float = 0.0,
    augment: str = "auto",
    images: str = "convert",
    on_bad_image: str = "fail",
    verify_images: int = 10000,
    seed: int = 0,
    workers: int = 4,
    precision: str = "auto",
    device: str = "auto",
    deterministic: bool = False,
    checkpoint_epochs: int = 1,
    checkpoint_minutes: float = 15.0,
    keep_checkpoints: int = 2,
    resume: str = "auto",
    log_steps: int = 50,
    timeout_minutes: float = 10.0,
    blur_pool: bool = False,
    init_from: str = "",
    train_image_size: int = 0,
    start_image_size: int = 0,
    batch_size_per_rank: int = 0,
    crop_min_area: float = 0.08,
    cache_gb: float = 0.25,
    cache_dir: str = "",
    eval_epochs: int = 1,
    checkpoint_steps: int = 0,
    strategy: str = "ddp",
    compile: bool = False,  # noqa: A002
    tensorboard: bool = False,
    prometheus_port: int = 0,
    profile_steps: int = 0,
    peak_tflops: float = 0.0,
) -> NamedTuple("Trained", [("checkpoint", str), ("run_dir", str)]):
    """Train a ResNet with PyTorch DDP on an image folder; resume from the newest checkpoint.

    Args:
        run_id: Id of the pipeline run; names the folder of the run under work_dir.
        dataset_path: Folder with train/<class>/ and val/<class>/ of images.
        work_dir: Folder, on a claim that later steps mount too, for checkpoints and metrics.
        trained_model: The newest checkpoint: its path, digest, step and metrics.
        metrics: Final loss, accuracy, speed and step.
        loss_curve: Loss and accuracy over the steps, as a picture.
        job: The job as it ended, for the record.
        task_config: What is set on this task, filled in by KFP: it reaches the workers.
        task_name: Name of this task in the pipeline.
        task_id: The pipeline's task id, which tells iterations of a loop apart.
        backend: pytorchjob (Training Operator), trainjob (Trainer), or local: this step itself.
        image: Image of the workers of a job.
        nodes: Pods of a job.
        nproc_per_node: Ranks a node; 0 for one for each GPU, or one where there is none.
        gpus_per_node: GPUs of a pod; beside what is set on this task.
        cpu: CPU of a pod, request and limit, for example 8; '' for what is set on this task.
        memory: Memory of a pod, likewise, for example 32Gi.
        scheduler: kueue, volcano, coscheduling or runai; '' for the cluster's own.
        queue: Queue of that scheduler.
        spot: Interruptible nodes of gke, aks, eks or karpenter; '' for none.
        retries: Retries of the job after a lost node or a preemption, from its checkpoint.
        deadline_minutes: The job is deleted after so long; 0 for never.
        pending_minutes: The step gives up on pods that cannot start for so long; 0 for never.
        heartbeat_minutes: The job stops itself when this step is silent for so long; 0 for never.
        cluster: Any other setting of a job by name, for example {"shm_size": "8Gi"}.
        training: Settings of the training by name, over those below, for pipelines that pass
            them on as one parameter, for example {"precision": "bf16"}.
        model: resnet18, resnet34, resnet50, or cifar_resnet8, 14, 20 for small images.
        image_size: Height and width of the images that the network sees, in pixels.
        epochs: Passes over the training split.
        batch_size: Images a step, over all ranks together.
        micro_batch_size: Images a forward pass on one rank; 0 for batch_size / world size.
        learning_rate: Peak learning rate, reached after the warm-up.
        lr_reference_batch: Scale the learning rate by batch_size / this; 0 for never.
        momentum: Nesterov momentum of SGD, 0 to 1.
        weight_decay: L2 penalty on the weights of convolutions and linear layers.
        warmup_epochs: Epochs of linear warm-up before the cosine decay.
        label_smoothing: Share of the target spread over all classes, 0 to 1.
        ema_decay: Decay a step of the averaged weights; 0 for no averaging.
        augment: none, shift, shift-flip, crop or crop-flip; auto fits the model.
        images: Images not RGB and square: convert them with a warning, or strict.
        on_bad_image: An unreadable image: fail with its name, or skip and count.
        verify_images: Images decoded in full before the first epoch, at most.
        seed: Seed of initialisation, order and augmentation.
        workers: Loader processes for each rank.
        precision: fp32 or bf16; auto is bf16 on a GPU that has it, fp32 on a CPU.
        device: cuda or cpu; auto is what there is.
        deterministic: Refuse kernels that are not deterministic.
        checkpoint_epochs: Save a checkpoint each so many epochs; 0 for never.
        checkpoint_minutes: And each so many minutes; 0 for epochs only.
        keep_checkpoints: Newest checkpoints that are kept, at least 2.
        resume: auto goes on from this run's newest valid checkpoint, never starts anew.
        log_steps: Steps between two lines of metrics.
        timeout_minutes: A collective that waits longer than this fails the training.
        blur_pool: Low-pass filter before strides (Zhang 2019).
        init_from: Begin with the weights of this step directory; '' for random weights.
        train_image_size: Height and width of the images in training; 0 for image_size.
        start_image_size: Grow the images from this size over three quarters of the run; 0 for no.
        batch_size_per_rank: Instead of batch_size: images a step on each rank; 0 for batch_size.
        crop_min_area: Smallest share of an image that a resized crop takes.
        cache_gb: Keep decoded images in a mapped file of at most this; 0: never.
        cache_dir: Where to keep decoded images; '' for the temporary folder.
        eval_epochs: Evaluate each so many epochs, and at the end.
        checkpoint_steps: Save a checkpoint each so many steps; 0 for never.
        strategy: Replicate the model, insist on one rank, or shard it over the ranks.
        compile: Compile the network with torch.compile.
        tensorboard: Write TensorBoard events to tensorboard/.
        prometheus_port: Serve /metrics on this port of rank 0; 0 for not.
        profile_steps: Trace so many steps of rank 0 to profile/; 0 for none.
        peak_tflops: Peak of one device, for MFU; 0 for what is known of the GPU.

    Returns:
        The folder of the newest checkpoint, and the folder of the run.
    """
    from kfp_ddp.components.train.engine import Artifacts, run

    return run(
        run_id=run_id,
        task_name=task_name,
        task_id=task_id,
        work_dir=work_dir,
        backend=backend,
        nproc_per_node=nproc_per_node,
        heartbeat_minutes=heartbeat_minutes,
        training={
            "data": dataset_path,
            "model": model,
            "image_size": image_size,
            "epochs": epochs,
            "batch_size": batch_size,
            "micro_batch_size": micro_batch_size,
            "learning_rate": learning_rate,
            "lr_reference_batch": lr_reference_batch,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "warmup_epochs": warmup_epochs,
            "label_smoothing": label_smoothing,
            "ema_decay": ema_decay,
            "augment": augment,
            "images": images,
            "on_bad_image": on_bad_image,
            "verify_images": verify_images,
            "seed": seed,
            "workers": workers,
            "precision": precision,
            "device": device,
            "deterministic": deterministic,
            "checkpoint_epochs": checkpoint_epochs,
            "checkpoint_minutes": checkpoint_minutes,
            "keep_checkpoints": keep_checkpoints,
            "resume": resume,
            "log_steps": log_steps,
            "timeout_minutes": timeout_minutes,
            "blur_pool": blur_pool,
            "init_from": init_from,
            "train_image_size": train_image_size,
            "start_image_size": start_image_size,
            "batch_size_per_rank": batch_size_per_rank,
            "crop_min_area": crop_min_area,
            "cache_gb": cache_gb,
            "cache_dir": cache_dir,
            "eval_epochs": eval_epochs,
            "checkpoint_steps": checkpoint_steps,
            "strategy": strategy,
            "compile": compile,
            "tensorboard": tensorboard,
            "prometheus_port": prometheus_port,
            "profile_steps": profile_steps,
            "peak_tflops": peak_tflops,
        },
        more_training=training,
        cluster={
            "image": image,
            "nodes": nodes,
            "gpus_per_node": gpus_per_node,
            "cpu": cpu,
            "memory": memory,
            "scheduler": scheduler,
            "queue": queue,
            "spot": spot,
            "retries": retries,
            "deadline_minutes": deadline_minutes,
            "pending_minutes": pending_minutes,
        },
        more_cluster=cluster,
        task_config=task_config,
        artifacts=Artifacts(trained_model, metrics, loss_curve, job),
    )

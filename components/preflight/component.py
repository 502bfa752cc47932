"""The KFP component `preflight`; a test compares its inputs with the pipeline's form."""

from typing import NamedTuple

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/launcher:0.1.0", install_kfp_package=False)
def preflight(
    plan_summary: dsl.Output[dsl.Markdown],
    source: str,
    recipe: str = "none",
    model: str = "auto",
    epochs: int = 0,
    batch_size: int = 0,
    training: dict = {},  # noqa: B006
    backend: str = "pytorchjob",
    nodes: int = 1,
    gpus_per_node: int = -1,
    job: dict = {},  # noqa: B006
    sync: dict = {},  # noqa: B006
    gate: dict = {},  # noqa: B006
    release: dict = {},  # noqa: B006
    champion: str = "",
    model_name: str = "resnet",
    destination: str = "",
    work_claim: str = "kfp-ddp-work",
    image: str = "ghcr.io/kfp-ddp/trainer:0.1.0",
    work: str = "",
    publish: str = "",
    run_id: str = "",
    keep: int = 0,
    init_from: str = "",
    script: str = "",
    sweep: dict = {},  # noqa: B006
    checkpoint: str = "",
    split: str = "val",
) -> NamedTuple(
    "Plan",
    [
        ("training", dict),
        ("job", dict),
        ("sync", dict),
        ("gate", dict),
        ("measuring", dict),
        ("release", dict),
        ("service", str),
        ("layout", dict),
        ("dataset", str),
        ("data_claim", str),
        ("publish", str),
        ("champion", str),
        ("sync_cpu", str),
        ("sync_memory", str),
        ("train_cpu", str),
        ("train_memory", str),
        ("evaluate_cpu", str),
        ("evaluate_memory", str),
        ("evaluate_gpus", str),
        ("evaluate_backend", str),
        ("evaluate_job", dict),
        ("gpu_resource", str),
        ("trials", list),
    ],
):
    """Check the parameters of a training run before the first transfer, and return the settings.

    A problem is found here in seconds, not after a sync or a training. The returned mappings
    contain the settings that are set, also by the recipe, for the steps that follow.

    Args:
        plan_summary: Title, warnings and all settings of the run.
        source: Where the images are: gs://bucket/prefix, s3://, az:// or hf://datasets/owner/name,
            or the https:// address of a manifest, with <class>/ below it, or train/<class>/ and
            val/<class>/.
        recipe: Proven settings of a training, which yours override; none for finetune where
            training has an init_from, and otherwise for the defaults: a ResNet-50 in 90 epochs.
        model: Network to train: a torchvision classifier by its name, cifar_resnet8, 14 or 20 for
            small images, or mine.py:build for a function of your own file. auto: as the recipe has
            it.
        epochs: Passes over the training images. 0: as the recipe has it.
        batch_size: Images in a step, over all ranks; unless set, it is lowered to fit the dataset
            and the number of ranks. 0: as the recipe has it.
        training: Further settings of the training by name, such as {"precision": "bf16"}.
        backend: Where to train: a pytorchjob of the Training Operator, a trainjob of the Trainer,
            or local, processes of the step itself.
        nodes: Number of worker pods. An MPIJob has its launcher besides.
        gpus_per_node: GPUs of each pod; 0 for those that are set on the KFP task, or none. -1: as
            many as the nodes have.
        job: Further settings of the job by name, such as {"memory": "32Gi"}.
        sync: Further settings of the dataset and its sync by name, such as {"publish": "clone"}.
        gate: Rules that a model must meet to be published, and further measurements, by name.
        release: How a blessed model is published, by name: forms of the bundle, its signature,
            registry, and service.
        champion: Model to beat: last for the one that was exported last to this destination, or the
            folder or URI of a bundle; empty for none.
        model_name: Name of the exported model.
        destination: Where the bundle is uploaded to, as <destination>/<model_name>/<digest>:
            gs://bucket/prefix, s3://, az:// or a folder; empty for no upload.
        work_claim: PVC for checkpoints, evaluations and bundles.
        image: Image of the workers, where job names none.
        work: Prefix of a bucket for the runs' folders; empty to use work_claim.
        publish: each-node in a pipeline that mounts no PVC for data, otherwise empty.
        run_id: Id of the pipeline run, for notifications about a rejected run; empty for none.
        keep: Number of runs' folders and bundles to retain; 0 for all.
        init_from: Initial weights; empty for none, or those in training.
        script: Text of a Python training script; empty for none, or that in training.
        sweep: Trials of a sweep; empty for a single training.
        checkpoint: Model to evaluate without a training; empty to train.
        split: Split to evaluate on.

    Returns:
        Settings of training, job, sync, gate, measuring, release and layout; the service for the
        roll-out; name, PVC and publishing of the dataset; the champion; resources of the steps;
        settings of each trial.
    """
    inputs = dict(locals())
    from kfp_ddp.checks.preflight import run

    return run(inputs)

"""The KFP component `preflight`; `make reference` writes its inputs from the pipeline's form."""

from typing import NamedTuple

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/launcher:0.1.0", install_kfp_package=False)
def preflight(
    plan_summary: dsl.Output[dsl.Markdown],
    # The form of the pipeline.
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
    """Check the parameters of a training run before a byte moves, and return them as checked.

    What fails here in seconds would fail later after a sync, or after the training. The mappings
    hold what was set, by its recipe too; the steps that follow take them.

    Args:
        plan_summary: What will run, and warnings.
        source: Where the images are: gs://bucket/prefix, s3://, az:// or hf://datasets/owner/name,
            or the https:// address of a manifest, with <class>/ below it, or train/<class>/ and
            val/<class>/.
        recipe: Settings of a training that is worth repeating, under those that you give; none for
            finetune where training has an init_from, and else for the defaults: a ResNet-50 in 90
            epochs.
        model: Network to train: a classifier of torchvision by its name, cifar_resnet8, 14 or 20
            for small images, or mine.py:build for a function of a file of your own. auto: as the
            recipe has it.
        epochs: Passes over the training images. 0: as the recipe has it.
        batch_size: Images in a step, on all ranks together; unless it is set, fewer where the
            dataset or the number of ranks asks for it. 0: as the recipe has it.
        training: Further settings of the training by name, such as {"precision": "bf16"}.
        backend: What trains: a pytorchjob of the Training Operator, a trainjob of the Trainer, or
            local, processes of the step itself.
        nodes: Number of worker pods. An MPIJob has its launcher besides.
        gpus_per_node: GPUs of each pod; 0 for those that are set on the KFP task, or none. -1: as
            many as the nodes have.
        job: Further settings of the job by name, such as {"memory": "32Gi"}.
        sync: Further settings of the dataset and its sync by name, such as {"publish": "clone"}.
        gate: Rules that a model must meet to be published, and what else is measured of it, by
            name.
        release: What a blessed model is published as and where, by name: forms of the bundle, its
            signature, registry, and service.
        champion: Model to beat: last for the one that was exported last to this destination, or the
            folder or address of a bundle; empty for none.
        model_name: Name of the exported model.
        destination: Where the bundle is uploaded to, as <destination>/<model_name>/<digest>:
            gs://bucket/prefix, s3://, az:// or a folder; empty for nowhere but the run's own
            folder.
        work_claim: Claim that holds checkpoints, evaluations and bundles.
        image: Image of the workers, where job names none.
        work: Prefix of a bucket for the runs' folders, in place of work_claim; empty for that.
        publish: How workers get the data in a pipeline that mounts no claim for it: each-node;
            empty for one that does.
        run_id: Id of the pipeline run, for those who are told where it is refused; empty to tell
            nobody.
        keep: Runs' folders and bundles that stay, in a pipeline that deletes old ones; 0 for all.
        init_from: Weights to begin with, in a pipeline that asks for them; empty for none, or those
            that training names.
        script: Text of a Python file that trains, in a pipeline that asks for it; empty for none,
            or that of training.
        sweep: What is tried in a pipeline that trains several times; empty for one that does not.
        checkpoint: What is evaluated, in a pipeline that trains nothing; empty for one that does.
        split: What it is evaluated on.

    Returns:
        The settings of training, job, sync, gate, measuring, release and layout, the service that a
        model is rolled out on, the dataset's name, its claim and how it is published, the model to
        beat, what the pods of the steps take, as KFP takes it, and the settings of the training of
        each trial.
    """
    inputs = dict(locals())
    from kfp_ddp.checks.preflight.engine import run

    return run(inputs)

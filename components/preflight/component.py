"""The KFP component `preflight`."""

from typing import NamedTuple

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/launcher:0.2.0", install_kfp_package=False)
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
    image: str = "ghcr.io/kfp-ddp/trainer:0.2.0",
    work: str = "",
    publish: str = "",
    run_id: str = "",
    keep: int = 0,
    pretrained: str = "",
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
        ("train_token", str),
        ("evaluate_cpu", str),
        ("evaluate_memory", str),
        ("evaluate_gpus", str),
        ("evaluate_backend", str),
        ("evaluate_job", dict),
        ("evaluate_token", str),
        ("gpu_resource", str),
        ("sweep", dict),
    ],
):
    """Check the parameters of a run before the first transfer, and return its settings.

    A problem is an error here in seconds, not after a sync or a training. The returned mappings
    contain the settings that are set, also by the recipe.

    The inputs are the parameters of all forms. They are inputs of their own because KFP passes only
    whole values safely: in a text or mapping of several values its launcher inserts them unescaped
    into JSON, so that a quote in one fails the step.

    Args:
        plan_summary: Title, warnings and all settings of the run.
        source: Where the images are: gs://bucket/prefix, s3://, az:// or \
            hf://datasets/owner/name, or the https:// address of a manifest, with <class>/ below \
            it, or train/<class>/ and val/<class>/; or synthetic://10x1000@224, computed images of \
            classes x images @ pixels.
        recipe: Proven settings of a training, which yours override; auto: settings that fit the \
            images and the GPUs; none: finetune where the training starts from existing weights, \
            otherwise the defaults, a ResNet-50 in 90 epochs.
        model: Network to train: a torchvision classifier by its name, timm/NAME or \
            timm/NAME.WEIGHTS of timm, cifar_resnet8, 14 or 20 for small images, or mine.py:build \
            for a function of your own file. auto: as the recipe has it.
        epochs: Passes over the training images. 0: as the recipe has it.
        batch_size: Images in a step, over all ranks; unless set, it is lowered to fit the dataset \
            and the number of ranks. 0: as the recipe has it.
        training: Further settings of the training by name, such as {"precision": "bf16"}.
        backend: Where to compute: a pytorchjob of the Training Operator, a trainjob of the \
            Trainer, or local, processes of the step itself.
        nodes: Number of worker pods, in a RayJob with its head. An MPIJob has its launcher \
            besides.
        gpus_per_node: GPUs of each pod; 0 for those that are set on the KFP task, or none. -1: as \
            many as the nodes have.
        job: Further settings of the job by name, such as {"memory": "32Gi"}.
        sync: Further settings of the dataset and its sync by name, such as {"publish": "clone"}.
        gate: Rules that a model must meet to be published, and further measurements, by name.
        release: How a blessed model is published, by name: forms of the bundle, its signature, \
            registry, and service.
        champion: Model to beat: last for the one that was exported last to this destination, or \
            the folder or URI of a bundle; empty for none.
        model_name: Name of the exported model.
        destination: Where the bundle is uploaded to, as <destination>/<model_name>/<digest>: \
            gs://bucket/prefix, s3://, az:// or a folder; empty for no upload.
        work_claim: PVC for checkpoints, evaluations and bundles.
        image: Image of the workers, where job names none.
        work: Prefix of a bucket for checkpoints, evaluations and bundles, such as \
            gs://bucket/runs, in place of a PVC.
        publish: each-node in a pipeline that mounts no PVC for data, otherwise empty.
        run_id: Id of the pipeline run, for notifications about a rejected run; empty for none.
        keep: Number of newest runs' folders and exported bundles to retain; the champion, the one \
            that it was compared with and deployed bundles are always retained; 0 for all. \
            keep_runs of job overrides it for the folders.
        pretrained: Initial weights. true: those of torchvision or timm. auto: the same if they \
            can be had and there are fewer than 50,000 images, or random ones needed a smaller \
            image_size; never without a pipeline. false: random ones. Or a path or an address \
            (https, gs, s3, az, hf) of a file .pth or .safetensors, a checkpoint, a bundle or a \
            model's exports; torchvision:NAME for others of torchvision.
        script: Text of a Python file, packed, that replaces the training loop; every rank runs it \
            as under torchrun. A command line takes the name of the file, such as mine.py.
        sweep: Trials: a space such as {"space": {"learning_rate": [0.05, 0.1]}}, or a list.
        checkpoint: Model to evaluate without a training: folder or URI of a checkpoint \
            step-<number>, of a bundle, or of a model's exports, which means the champion.
        split: Split to evaluate on: val as in the training, and test too where it exists; train, \
            test, or a folder of the dataset with class folders.

    Returns:
        Settings of training, job, sync, gate, measuring, release and layout; the service for the \
        roll-out; name, PVC and publishing of the dataset; the champion; resources of the steps, \
        and the Secrets with a token that they mount; settings of the sweep.
    """
    inputs = dict(locals())
    from kfp_ddp.checks.preflight import run

    return run(inputs)

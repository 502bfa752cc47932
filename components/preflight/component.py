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
        source: Where images are: gs://bucket/prefix, s3://, az://, hf://, https:// or synthetic://.
        recipe: Proven settings, which yours override; auto: those that fit the images and GPUs.
        model: Network, such as resnet50, timm/NAME or mine.py:build. auto: as the recipe has it.
        epochs: Passes over the training images. 0: as the recipe has it.
        batch_size: Images in a step, over all ranks. 0: as the recipe has it.
        training: Further settings of the training by name, such as {"precision": "bf16"}.
        backend: pytorchjob (Training Operator), trainjob (Trainer), or local: the step itself.
        nodes: Number of worker pods, in a RayJob with its head. An MPIJob has its launcher besides.
        gpus_per_node: GPUs of each pod; 0 for those of the KFP task, or none. -1: all of a node.
        job: Further settings of the job by name, such as {"memory": "32Gi"}.
        sync: Further settings of the dataset and its sync by name, such as {"publish": "clone"}.
        gate: Rules that a model must meet to be published, and further measurements, by name.
        release: How a blessed model is published, by name: forms, signature, registry and service.
        champion: Model to beat: a bundle, or last for the last one at destination; empty for none.
        model_name: Name of the exported model.
        destination: Where bundles go: gs://bucket/prefix, s3://, az:// or a folder; empty for none.
        work_claim: PVC for checkpoints, evaluations and bundles.
        image: Image of the workers, where job names none.
        work: Prefix of a bucket for checkpoints, evaluations and bundles, in place of a PVC.
        publish: each-node in a pipeline that mounts no PVC for data, otherwise empty.
        run_id: Id of the pipeline run, for notifications about a rejected run; empty for none.
        keep: Number of newest runs' folders and exported bundles to retain; 0 for all.
        pretrained: Initial weights: auto, true (published), false (random), a path or an address.
        script: Packed text of a Python file that replaces the training loop, run in every rank.
        sweep: Trials: a space such as {"space": {"learning_rate": [0.05, 0.1]}}, or a list.
        checkpoint: Model to evaluate without a training: checkpoint, bundle, exports or weights.
        split: Split to evaluate on: val, with test if any; train; test; a folder of class folders.

    Returns:
        Settings of the run by subject, and what the steps take: names, PVCs, resources, Secrets.
    """
    inputs = dict(locals())
    from kfp_ddp.checks.preflight import run

    return run(inputs)

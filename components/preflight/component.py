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

    The inputs are the parameters of all forms; README.md describes them. They are inputs of their
    own because KFP passes only whole values safely: in a text or mapping of several values its
    launcher inserts them unescaped into JSON, so that a quote in one fails the step.

    Args:
        plan_summary: Title, warnings and all settings of the run.
        image: Image of the workers, where job names none.
        publish: each-node in a pipeline that mounts no PVC for data, otherwise empty.
        run_id: Id of the pipeline run, for notifications about a rejected run; empty for none.

    Returns:
        Settings of training, job, sync, gate, measuring, release and layout; the service for the
        roll-out; name, PVC and publishing of the dataset; the champion; resources of the steps,
        and the Secrets with a token that they mount; settings of the sweep.
    """
    inputs = dict(locals())
    from kfp_ddp.checks.preflight import run

    return run(inputs)

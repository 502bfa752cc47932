"""The job of a function, from the arguments of `Client.train`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kfp_ddp.core.container_images import Images
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.log import log
from kfp_ddp.core.secrets import check_secrets

LOCAL = "local"
TRAINER_FIELDS = {
    *("func", "func_args", "image", "packages_to_install", "pip_index_urls", "num_nodes"),
    *("resources_per_node", "env"),
}
"""Fields of `kubeflow.trainer.CustomTrainer` of the Kubeflow SDK; CustomTrainerContainer has the
image, the nodes, the resources and the environment of these."""


def job_of(func: Any, trainer: Any, runtime: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of the component `job` that calls a function, or runs a trainer's image.

    InputError for what cannot be run.
    """
    from kfp_ddp.jobs.shipping.authoring import as_function, has_one_process

    given = _given(func, trainer, settings)
    check_secrets(given)
    function = given.pop("func", None)
    name = getattr(function, "__name__", "job")
    title = name.strip("_").replace("_", "-").lower() or "job"
    inputs = {}
    if function:
        inputs = as_function(function, given.pop("func_args", None))
        if has_one_process(function):
            log.info(f"{name} uses DataParallel without ranks: it is one process in each pod")
            given.setdefault("nproc_per_node", 1)
    if not given.get("packages_to_install"):
        given.pop("pip_index_urls", None)  # which the SDK always sets
    inputs["nodes"] = given.pop("num_nodes", given.pop("nodes", 1))
    for setting in ("image", "gpus_per_node"):
        if setting in given:
            inputs[setting] = given.pop(setting)
    resources = given.pop("resources_per_node", {})
    if resources:
        limits = dict(map(_resource, resources.items()))
        given["resources"] = {"limits": limits, "requests": limits}
    if runtime:
        given["runtime"] = str(getattr(runtime, "name", runtime))
    return {**inputs, "settings": given, "title": title}


def _given(func: Any, trainer: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments and fields that are set; raise InputError for conflicts."""
    fields = _without_none(getattr(trainer, "__dict__", {}))
    given = _without_none({"func": func, **settings})
    twice = given.keys() & fields
    if twice:
        raise InputError(f"{min(twice)} of the trainer is an argument, too: leave it out")
    unknown = fields.keys() - TRAINER_FIELDS
    if unknown:
        raise InputError(f"{min(unknown)} of the trainer is not known: leave it out")
    given |= fields
    # The SDK's name and ours for one setting.
    for theirs, ours in (("num_nodes", "nodes"), ("resources_per_node", "resources")):
        if {theirs, ours} <= given.keys():
            raise InputError(f"{theirs} and {ours} are one setting: give one of them")
    for name in ("func_args", "resources_per_node"):
        if not isinstance(given.get(name, {}), Mapping):
            raise InputError(f"{name} is not a mapping, such as {{'gpu': 2}}: write one")
    if "func" not in given and "image" not in fields:
        raise InputError("there is no function to run: give func, or a trainer that has it")
    return given


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _resource(item: tuple[str, Any]) -> tuple[str, str]:
    """Return a resource as Kubernetes names it, of gpu, mig-1g.5gb and so on."""
    name = str(item[0]).lower()
    if name == "gpu" or name.startswith("mig-"):
        name = f"nvidia.com/{name}"
    return name, str(item[1])


def job_pipeline(inputs: Mapping[str, Any], kind: str, images: Images, folder: Path) -> Path:
    """Compile the pipeline of one job to a file; raise the InputError that its step would."""
    from kfp import dsl

    from kfp_ddp.checks.preflight import token_of
    from kfp_ddp.components.job.component import job
    from kfp_ddp.jobs.engine import specification
    from kfp_ddp.pipelines.compiled import write
    from kfp_ddp.pipelines.steps import launching

    ids = {
        "run_id": dsl.PIPELINE_JOB_ID_PLACEHOLDER,
        "task_name": dsl.PIPELINE_TASK_NAME_PLACEHOLDER,
        "task_id": dsl.PIPELINE_TASK_ID_PLACEHOLDER,
    }
    inputs = {"image": images.trainer, **inputs}
    title = inputs.pop("title")
    fields = dict(inputs)
    settings = fields.pop("settings")
    checked = "pytorchjob" if kind == LOCAL else kind  # this machine has no kind of its own
    specification(settings, dsl.TaskConfig(), **fields, kind=checked)

    def function(backend: str = kind) -> None:
        launching(job(**ids, **inputs, kind=backend), token_of(kind))

    return write({title: dsl.pipeline(function, name=title)}, folder, images)[0]

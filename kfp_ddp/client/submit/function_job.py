"""The job of a function, from the arguments of `Client.train`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kfp_ddp.core.container_images import Images
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.secrets import check_secrets

LOCAL = "local"
TRAINER_FIELDS = {
    *("func", "func_args", "image", "packages_to_install", "pip_index_urls", "num_nodes"),
    *("resources_per_node", "env"),
}
"""Fields of `kubeflow.trainer.CustomTrainer` of the Kubeflow SDK."""


def job_of(func: Any, trainer: Any, runtime: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of the component `job` that calls a function; raise InputError."""
    from kfp_ddp.jobs.shipping.authoring import as_function

    own = {name: one for name, one in getattr(trainer, "__dict__", {}).items() if one is not None}
    given = {name: one for name, one in {"func": func, **settings}.items() if one is not None}
    if wrong := sorted(given.keys() & own or own.keys() - TRAINER_FIELDS):
        why = "is an argument, too" if wrong[0] in given else "is not known"
        raise InputError(f"{wrong[0]} of the trainer {why}: leave it out")
    given |= own
    for theirs, ours in (("num_nodes", "nodes"), ("resources_per_node", "resources")):
        if {theirs, ours} <= given.keys():
            raise InputError(f"{theirs} and {ours} are one setting: give one of them")
    for name in ("func_args", "resources_per_node"):
        if not isinstance(given.get(name, {}), Mapping):
            raise InputError(f"{name} is not a mapping, such as {{'gpu': 2}}: write one")
    if "func" not in given:
        raise InputError("there is no function to run: give func, or a trainer that has it")
    check_secrets(given)
    name = getattr(given["func"], "__name__", "function")
    title = name.strip("_").replace("_", "-").lower() or "job"
    inputs = as_function(given.pop("func"), given.pop("func_args", None))
    if not given.get("packages_to_install"):
        given.pop("pip_index_urls", None)  # which the SDK always sets
    inputs["nodes"] = given.pop("num_nodes", given.pop("nodes", 1))
    inputs |= {name: given.pop(name) for name in ("image", "gpus_per_node") if name in given}
    if resources := given.pop("resources_per_node", {}):
        limits = dict(map(_resource, resources.items()))
        given["resources"] = {"limits": limits, "requests": limits}
    if runtime:
        given["runtime"] = str(getattr(runtime, "name", runtime))
    return {**inputs, "settings": given, "title": title}


def _resource(item: tuple[str, Any]) -> tuple[str, str]:
    """Return a resource as Kubernetes names it, of gpu, mig-1g.5gb and so on."""
    name = str(item[0]).lower()
    nvidia = name == "gpu" or name.startswith("mig-")
    return f"nvidia.com/{name}" if nvidia else name, str(item[1])


def job_pipeline(inputs: Mapping[str, Any], kind: str, images: Images, folder: Path) -> Path:
    """Compile the pipeline of one job to a file; raise the InputError that its step would."""
    from kfp import dsl

    from kfp_ddp.checks.preflight import token_of
    from kfp_ddp.components.job.component import job
    from kfp_ddp.jobs.engine import specification
    from kfp_ddp.pipelines.compiled import write
    from kfp_ddp.pipelines.steps import launching

    names = {"run_id": "JOB_ID", "task_name": "TASK_NAME", "task_id": "TASK_ID"}
    ids = {name: getattr(dsl, f"PIPELINE_{one}_PLACEHOLDER") for name, one in names.items()}
    inputs = {"image": images.trainer, **inputs}
    title = inputs.pop("title")
    own = {name: one for name, one in inputs.items() if name != "settings"}
    checked = "pytorchjob" if kind == LOCAL else kind
    specification(inputs["settings"], dsl.TaskConfig(), **own, kind=checked)

    def function(backend: str = kind) -> None:
        launching(job(**ids, **inputs, kind=backend), token_of(kind))

    return write({title: dsl.pipeline(function, name=title)}, folder, images)[0]

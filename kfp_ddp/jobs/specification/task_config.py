"""What a user set on the KFP task as parts of a specification, joined with what is set here."""

from typing import Any

from kfp_ddp.k8s.api import Object


def passed_through(task_config: Any) -> dict[str, Any]:
    """Fields of LaunchSpec from a dsl.TaskConfig; every part of it may be None."""
    if task_config is None:
        return {}
    given = {
        "affinity": task_config.affinity,
        "tolerations": task_config.tolerations,
        "node_selector": task_config.node_selector,
        "env_vars": task_config.env,
        "volumes": task_config.volumes,
        "volume_mounts": task_config.volume_mounts,
        "resources": _quantities(task_config.resources or {}),
    }
    return {name: value for name, value in given.items() if value}


def overlaid(task_config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` over what was set on the task: lists and mappings of both are joined."""
    task = passed_through(task_config)
    found = {**task, **fields}
    for name, given in task.items():
        own = fields.get(name)
        if own:
            found[name] = _joined(given, own) if isinstance(given, dict) else [*given, *own]
        else:
            found[name] = given
    return found


def _joined(given: Object, own: Object) -> Object:
    """`own` over `given`, part by part: a limit that is set here drops none that is set there."""
    found = {**given, **own}
    for name in given.keys() & own.keys():
        if isinstance(given[name], dict) and isinstance(own[name], dict):
            found[name] = _joined(given[name], own[name])
    return found


def _quantities(resources: Object) -> Object:
    """Limits and requests alone, as strings, which is what every kind of job takes."""
    return {
        part: {name: str(value) for name, value in resources[part].items() if value != ""}
        for part in ("limits", "requests")
        if resources.get(part)
    }

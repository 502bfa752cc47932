"""Job settings that come from the KFP task: its dsl.TaskConfig and the PVCs that its pod mounts."""

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.folders import is_per_node, is_remote
from kfp_ddp.k8s.api import Api, Object, own_pod


def own_claims(api: Api) -> dict[str, str]:
    """Claims that the step's own pod mounts, by path; {} outside of a pod of KFP."""
    pod = own_pod(api)
    if pod is None:
        return {}
    mounts = [m for c in pod["spec"]["containers"] for m in c.get("volumeMounts") or []]
    return _by_path(mounts, pod["spec"].get("volumes") or ())


def by_volume(volumes: Iterable[Object]) -> dict[str, str]:
    """The claims among some volumes, by the name of the volume."""
    kind = "persistentVolumeClaim"
    return {each["name"]: each[kind]["claimName"] for each in volumes if kind in each}


def _by_path(mounts: Iterable[Object], volumes: Iterable[Object]) -> dict[str, str]:
    claims = by_volume(volumes)
    return {m["mountPath"]: claims[m["name"]] for m in mounts if m["name"] in claims}


def with_folders(
    api: Api, fields: dict[str, Any], data: str, written: str, task: str
) -> dict[str, Any]:
    """`fields` with the claims of both folders, that of the data read-only where it can be.

    Args:
        api: The cluster.
        fields: Those of LaunchSpec.
        data: The dataset, which may be one that each pod brings.
        written: Folder that the workers write to, or its address.
        task: Name of the step.

    Raises:
        InputError: a folder that lies on no claim.
    """
    on_claims = {"dataset_path": data, "work_dir": written}
    if is_per_node(data):
        del on_claims["dataset_path"]
    if is_remote(written):
        del on_claims["work_dir"]
    fields = with_claims(fields, list(on_claims.values()), own_claims(api))
    every = [m["mountPath"] for m in fields.get("volume_mounts") or ()] + list(fields["claims"])
    for what, path in on_claims.items():
        if not covering(path, every):
            raise InputError(
                f"{what} {path} lies on no claim that the workers could mount; mount one on the "
                f"{task} task with kubernetes.mount_pvc"
            )
    return read_only(fields, data, written)


def check_carried(job: Mapping[str, Any]) -> None:
    """Refuse a training in a bucket whose pods would begin with different checkpoints.

    Args:
        job: Fields of LaunchSpec that were set.

    Raises:
        InputError: naming the one.
    """
    for name, only in (("elastic", ""), ("restart_policy", "Never")):
        if (value := job.get(name, only)) != only:
            raise InputError(
                f"job sets {name}={value!r}, where pods come anew while others go on, and work in "
                "a bucket is fetched when a job begins: leave it out, or use a work claim"
            )


def with_claims(fields: dict[str, Any], paths: list[str], claims: dict[str, str]) -> dict[str, Any]:
    """`fields` with a claim for each path that no mount among them covers yet."""
    mounted = [m["mountPath"] for m in fields.get("volume_mounts") or ()]
    found = dict(fields.get("claims") or {})
    for path in paths:
        if covering(path, [*mounted, *found]):
            continue
        mount = covering(path, list(claims))
        if mount:
            found[mount] = claims[mount]
    return {**fields, "claims": found}


def covering(path: str, mounts: list[str]) -> str:
    """The deepest mount that a path lies on; '' for none."""
    parents = {str(PurePosixPath(path)), *map(str, PurePosixPath(path).parents)}
    inside = [m for m in mounts if str(PurePosixPath(m)) in parents]
    return max(inside, key=len, default="")


def read_only(fields: dict[str, Any], path: str, written: str) -> dict[str, Any]:
    """`fields` with the mount under `path` read-only, unless `written` lies on it too.

    KFP itself cannot mount a claim read-only, and Kubernetes does not enforce ReadOnlyMany.
    """
    mounts = [dict(m) for m in fields.get("volume_mounts") or ()]
    claims = dict(fields.get("claims") or {})
    every = [m["mountPath"] for m in mounts] + list(claims)
    mount = covering(path, every)
    if not mount or mount == covering(written, every):
        return fields
    for each in mounts:
        if each["mountPath"] == mount:
            each["readOnly"] = True
    if mount in claims and not claims[mount].endswith(":ro"):
        claims[mount] += ":ro"
    return {**fields, "volume_mounts": mounts, "claims": claims}


def claim_of(fields: dict[str, Any], path: str) -> str:
    """Name of the claim that a path lies on; '' for none."""
    claims = {m: name.removesuffix(":ro") for m, name in (fields.get("claims") or {}).items()}
    claims |= _by_path(fields.get("volume_mounts") or (), fields.get("volumes") or ())
    return str(claims.get(covering(path, list(claims)), ""))


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

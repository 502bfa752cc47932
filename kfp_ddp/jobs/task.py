"""Job settings that come from the KFP task: its dsl.TaskConfig and the PVCs that its pod mounts."""

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.folders import is_per_node, is_remote
from kfp_ddp.k8s.api import LAUNCHER, Api, Object, own_pod


def claims_by_volume(volumes: Iterable[Object]) -> dict[str, str]:
    """Return the PVCs among some volumes, by the name of the volume."""
    kind = "persistentVolumeClaim"
    return {item["name"]: item[kind]["claimName"] for item in volumes if kind in item}


def _claims_by_path(mounts: Iterable[Object], volumes: Iterable[Object]) -> dict[str, str]:
    claims = claims_by_volume(volumes)
    return {m["mountPath"]: claims[m["name"]] for m in mounts if m["name"] in claims}


def with_folders(
    api: Api, fields: dict[str, Any], data: str, written: str, task: str
) -> dict[str, Any]:
    """Return `fields` with the PVCs of both folders, that of the data read-only if possible.

    `written` is the folder or URI that the workers write to, `task` the name of the step. Data that
    each node copies or reads from a bucket has no PVC. InputError for another folder without one.
    """
    on_claims = {} if is_per_node(data) or is_remote(data) else {"dataset_path": data}
    on_claims |= {} if is_remote(written) else {"work_dir": written}
    own = (own_pod(api) or {"spec": {"containers": []}})["spec"]  # none outside of a pod of KFP
    own_mounts = [m for c in own["containers"] for m in c.get("volumeMounts") or []]
    own_claims = _claims_by_path(own_mounts, own.get("volumes") or ())
    fields = with_claims(fields, list(on_claims.values()), own_claims)
    mounts = [m["mountPath"] for m in fields.get("volume_mounts") or ()] + list(fields["claims"])
    for what, path in on_claims.items():
        if not mount_of(path, mounts):
            raise InputError(
                f"{what} {path} is not on a PVC that the workers could mount; mount one on the "
                f"{task} task with kubernetes.mount_pvc"
            )
    return read_only(fields, data, written)


def check_bucket_training(job: Mapping[str, Any]) -> None:
    """Raise InputError if pods of a training in a bucket would start from different checkpoints."""
    policy = job.get("restart_policy", "Never")
    if policy != "Never":
        raise InputError(
            f"job sets restart_policy={policy!r}, which replaces pods while others run, but work "
            "in a bucket is downloaded when a job starts: remove it, or use a work claim"
        )


def with_claims(fields: dict[str, Any], paths: list[str], claims: dict[str, str]) -> dict[str, Any]:
    """Return `fields` with a PVC for each path that is not covered by a mount yet."""
    mounted = [m["mountPath"] for m in fields.get("volume_mounts") or ()]
    all_claims = dict(fields.get("claims") or {})
    for path in paths:
        mount = mount_of(path, list(claims))
        if mount and not mount_of(path, [*mounted, *all_claims]):
            all_claims[mount] = claims[mount]
    return {**fields, "claims": all_claims}


def mount_of(path: str, mounts: list[str]) -> str:
    """Return the deepest mount that contains a path; '' for none."""
    parents = {str(PurePosixPath(path)), *map(str, PurePosixPath(path).parents)}
    inside = [m for m in mounts if str(PurePosixPath(m)) in parents]
    return max(inside, key=len, default="")


def read_only(fields: dict[str, Any], path: str, written: str) -> dict[str, Any]:
    """Return `fields` with the mount of `path` read-only, unless it also contains `written`.

    KFP itself cannot mount a PVC read-only, and Kubernetes does not enforce ReadOnlyMany.
    """
    mounts = [dict(m) for m in fields.get("volume_mounts") or ()]
    claims = dict(fields.get("claims") or {})
    every = [m["mountPath"] for m in mounts] + list(claims)
    mount = mount_of(path, every)
    if not mount or mount == mount_of(written, every):
        return fields
    for item in mounts:
        if item["mountPath"] == mount:
            item["readOnly"] = True
    if mount in claims and not claims[mount].endswith(":ro"):
        claims[mount] += ":ro"
    return {**fields, "volume_mounts": mounts, "claims": claims}


def claim_of(fields: dict[str, Any], path: str) -> str:
    """Return the name of the PVC that contains a path; '' for none."""
    claims = {m: name.removesuffix(":ro") for m, name in (fields.get("claims") or {}).items()}
    claims |= _claims_by_path(fields.get("volume_mounts") or (), fields.get("volumes") or ())
    return str(claims.get(mount_of(path, list(claims)), ""))


def with_task_config(task_config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Return `fields` over those of a dsl.TaskConfig: lists and mappings of both are merged.

    Any part of the TaskConfig may be None. The token of the launcher's account stays in the step.
    """
    if task_config is None:
        return fields
    parts = {
        "affinity": task_config.affinity,
        "tolerations": task_config.tolerations,
        "node_selector": task_config.node_selector,
        "env_vars": task_config.env,
        "volumes": _without_token(task_config.volumes),
        "volume_mounts": _without_token(task_config.volume_mounts),
        "resources": _quantities(task_config.resources or {}),
    }
    task = {name: value for name, value in parts.items() if value}
    merged = {**fields, **task}
    for name, value in task.items():
        if own := fields.get(name):
            merged[name] = _merge(value, own) if isinstance(value, dict) else [*value, *own]
    return merged


def _without_token(named: Iterable[Object] | None) -> list[Object]:
    """Return volumes, or mounts, of a step without the secret, after which KFP names its volume."""
    return [one for one in named or () if one["name"] != LAUNCHER]


def _merge(base: Object, own: Object) -> Object:
    """Return `own` merged over `base` at every level, so that no limit of either is dropped."""
    merged = {**base, **own}
    for name in base.keys() & own.keys():
        if isinstance(base[name], dict) and isinstance(own[name], dict):
            merged[name] = _merge(base[name], own[name])
    return merged


def _quantities(resources: Object) -> Object:
    """Return only limits and requests, as strings, as every kind of job expects them."""
    return {
        part: {name: str(value) for name, value in resources[part].items() if value != ""}
        for part in ("limits", "requests")
        if resources.get(part)
    }

"""Job settings that come from the KFP task: its dsl.TaskConfig and the PVCs that its pod mounts."""

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.folders import is_per_node, is_remote
from kfp_ddp.k8s.api import LAUNCHER, Api, Object, own_pod


def claims_by_volume(volumes: Iterable[Object]) -> dict[str, str]:
    """Return the PVCs among some volumes, by the name of the volume."""
    claims: dict[str, str] = {}
    for volume in volumes:
        if "persistentVolumeClaim" in volume:
            claims[volume["name"]] = volume["persistentVolumeClaim"]["claimName"]
    return claims


def _claims_by_path(mounts: Iterable[Object], volumes: Iterable[Object]) -> dict[str, str]:
    claims = claims_by_volume(volumes)
    by_path: dict[str, str] = {}
    for mount in mounts:
        if mount["name"] in claims:
            by_path[mount["mountPath"]] = claims[mount["name"]]
    return by_path


def _listed(fields: Mapping[str, Any], name: str) -> list[Object]:
    """Return a list among some fields; an empty one if it is missing or None."""
    return list(fields.get(name) or ())


def _own_claims(api: Api) -> dict[str, str]:
    """Return the PVCs of the step's own pod by path; none outside of a pod of KFP."""
    pod = own_pod(api)
    if pod is None:
        return {}
    mounts: list[Object] = []
    for container in pod["spec"]["containers"]:
        mounts += _listed(container, "volumeMounts")
    return _claims_by_path(mounts, _listed(pod["spec"], "volumes"))


def _claims(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return a copy of the setting `claims`, PVCs by path."""
    return dict(fields.get("claims") or {})


def _mount_paths(fields: Mapping[str, Any]) -> list[str]:
    """Return the paths at which something is mounted by these fields."""
    mounts = _listed(fields, "volume_mounts")
    return [mount["mountPath"] for mount in mounts] + list(_claims(fields))


def with_folders(
    api: Api, fields: dict[str, Any], data: str, written: str, task: str
) -> dict[str, Any]:
    """Return `fields` with the PVCs of both folders, that of the data read-only if possible.

    `written` is the folder or URI that the workers write to, `task` the name of the step. Data that
    each node copies or reads from a bucket has no PVC. InputError for another folder without one.
    """
    on_claims: dict[str, str] = {}
    if not is_per_node(data) and not is_remote(data):
        on_claims["dataset_path"] = data
    if not is_remote(written):
        on_claims["work_dir"] = written
    fields = with_claims(fields, list(on_claims.values()), _own_claims(api))
    mounts = _mount_paths(fields)
    for setting, path in on_claims.items():
        if not mount_of(path, mounts):
            raise InputError(
                f"{setting} {path} is not on a PVC that the workers could mount; mount one on the "
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
    mounted = _mount_paths(fields)
    all_claims = _claims(fields)
    for path in paths:
        mount = mount_of(path, list(claims))
        if mount and not mount_of(path, [*mounted, *all_claims]):
            all_claims[mount] = claims[mount]
    return {**fields, "claims": all_claims}


def mount_of(path: str, mounts: list[str]) -> str:
    """Return the deepest mount that contains a path; '' for none."""
    folder = PurePosixPath(path)
    parents = {folder, *folder.parents}
    above = [mount for mount in mounts if PurePosixPath(mount) in parents]
    return max(above, key=len, default="")


def read_only(fields: dict[str, Any], path: str, written: str) -> dict[str, Any]:
    """Return `fields` with the mount of `path` read-only, unless it also contains `written`.

    KFP itself cannot mount a PVC read-only, and Kubernetes does not enforce ReadOnlyMany.
    """
    paths = _mount_paths(fields)
    data_path = mount_of(path, paths)
    if not data_path or data_path == mount_of(written, paths):
        return fields
    # Copies: the caller's fields stay as they are.
    mounts = [dict(mount) for mount in _listed(fields, "volume_mounts")]
    claims = _claims(fields)
    for mount in mounts:
        if mount["mountPath"] == data_path:
            mount["readOnly"] = True
    if data_path in claims:
        claims[data_path] = claims[data_path].removesuffix(":ro") + ":ro"
    return {**fields, "volume_mounts": mounts, "claims": claims}


def claim_of(fields: dict[str, Any], path: str) -> str:
    """Return the name of the PVC that contains a path; '' for none."""
    claims = {mount: name.removesuffix(":ro") for mount, name in _claims(fields).items()}
    claims |= _claims_by_path(_listed(fields, "volume_mounts"), _listed(fields, "volumes"))
    mount = mount_of(path, list(claims))
    return str(claims.get(mount, ""))


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
        own = fields.get(name)
        if not own:
            continue
        if isinstance(value, dict):
            merged[name] = _merge(value, own)
        else:
            merged[name] = [*value, *own]
    return merged


def _without_token(named: Iterable[Object] | None) -> list[Object]:
    """Return volumes, or mounts, of a step without the secret, after which KFP names its volume."""
    return [item for item in named or () if item["name"] != LAUNCHER]


def _merge(base: Object, own: Object) -> Object:
    """Return `own` merged over `base` at every level, so that no limit of either is dropped."""
    merged = {**base, **own}
    for name in base.keys() & own.keys():
        if isinstance(base[name], dict) and isinstance(own[name], dict):
            merged[name] = _merge(base[name], own[name])
    return merged


def _quantities(resources: Object) -> Object:
    """Return only limits and requests, as strings, as every kind of job expects them."""
    quantities: Object = {}
    for part in ("limits", "requests"):
        if resources.get(part):
            quantities[part] = {
                name: str(value) for name, value in resources[part].items() if value != ""
            }
    return quantities

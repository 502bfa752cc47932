"""The claims that the folders of a step lie on, mounted into its workers too."""

import os
from pathlib import PurePosixPath
from typing import Any

from kfp_ddp.components.shared.cluster.api import Api, ApiError, core


def own_claims(api: Api) -> dict[str, str]:
    """Claims that the step's own pod mounts, by path; {} outside of a pod of KFP."""
    name = os.environ.get("KFP_POD_NAME", "")
    if not name:
        return {}
    try:
        pod = api.patient(lambda: api.call("GET", core(api.namespace, "pods", name)))
    except ApiError:
        return {}
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["spec"].get("volumes") or []
        if "persistentVolumeClaim" in volume
    }
    mounts = [m for c in pod["spec"]["containers"] for m in c.get("volumeMounts") or []]
    return {m["mountPath"]: claims[m["name"]] for m in mounts if m["name"] in claims}


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
    volumes = {
        v["name"]: v["persistentVolumeClaim"]["claimName"]
        for v in fields.get("volumes") or ()
        if "persistentVolumeClaim" in v
    }
    for mount in fields.get("volume_mounts") or ():
        if mount["name"] in volumes:
            claims[mount["mountPath"]] = volumes[mount["name"]]
    return str(claims.get(covering(path, list(claims)), ""))

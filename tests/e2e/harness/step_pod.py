"""The pod of a step, as KFP's driver and Argo make it from the compiled document."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.harness import emissary
from tests.e2e.harness.grounds import IMAGE, UID, Grounds, wait_for_end

_EMISSARY = Path(emissary.__file__).read_text()
_SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def manifest(
    *,
    name: str,
    image: str,
    command: list[str],
    environment: dict[str, str],
    resources: dict[str, dict[str, str]],
    platform: dict[str, Any],
    resolve: Callable[[dict[str, Any]], str],
) -> dict[str, Any]:
    """The pod, but for its owner and account.

    `platform` is the task's part of the platform spec, and `resolve` gives the value of a
    parameter in it.

    Raises:
        NotImplementedError: for a setting that is not played here, rather than losing it.
    """
    container: dict[str, Any] = {
        "name": "main",
        "image": image,
        "command": ["python3", "-u", "-c", _EMISSARY],
        "args": command,
        "env": [
            *({"name": key, "value": value} for key, value in environment.items()),
            _field("KFP_POD_NAME", "metadata.name"),
            _field("KFP_POD_UID", "metadata.uid"),
        ],
        "resources": resources,
        "securityContext": _SECURITY,
        "volumeMounts": [],
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [],
        # The image's user; containers of this cluster's images run as root unless told otherwise.
        "securityContext": {"runAsUser": UID, "seccompProfile": {"type": "RuntimeDefault"}},
    }
    metadata: dict[str, Any] = {"name": name, "labels": {}, "annotations": {}}
    for setting, value in platform.items():
        if setting == "pvcMount":
            _claims(spec, value, resolve)
        elif setting == "emptyDirMounts":
            _empty_dirs(spec, value)
        elif setting == "secretAsEnv":
            _secrets(container, value, resolve)
        elif setting == "secretAsVolume":
            _secret_volumes(spec, value, resolve)
        elif setting == "configMapAsVolume":
            _config_maps(spec, value, resolve)
        elif setting == "fieldPathAsEnv":
            container["env"] += [_field(item["name"], item["fieldPath"]) for item in value]
        elif setting == "podMetadata":
            metadata["labels"].update(value.get("labels", {}))
            metadata["annotations"].update(value.get("annotations", {}))
        elif setting == "activeDeadlineSeconds":
            spec["activeDeadlineSeconds"] = int(value)
        elif setting == "securityContext":
            user = {"runAsUser": int(value["runAsUser"])} if "runAsUser" in value else {}
            container["securityContext"] = _SECURITY | value | user
        elif setting == "nodeSelector":
            spec["nodeSelector"] = value["labels"]
        elif setting == "tolerations":
            spec["tolerations"] = value
        elif setting == "nodeAffinity":
            spec["affinity"] = _affinity(value)
        else:
            raise NotImplementedError(f"{setting} of the platform spec is not played")
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def bare(name: str, command: list[str], image: str = IMAGE, **claims: str) -> dict[str, Any]:
    """Return a pod of the images' user that runs a command, with claims by name of a folder."""
    pod = manifest(
        name=name,
        image=image,
        command=command,
        environment={"OMP_NUM_THREADS": "1"},
        resources={},
        platform={},
        resolve=str,
    )
    for folder, claim in claims.items():
        mount(pod, claim, f"/{folder}")
    pod["spec"]["securityContext"] = {"runAsUser": UID}
    return pod


def run(grounds: Grounds, name: str, command: list[str], image: str = IMAGE, **claims: str) -> None:
    """Run such a pod to its end."""
    body = bare(name, command, image, **claims)
    grounds.core.create_namespaced_pod(grounds.namespace, body)
    phase = wait_for_end(grounds, name, 300)
    log = grounds.core.read_namespaced_pod_log(name, grounds.namespace)
    assert phase == "Succeeded", log


def mount(pod: dict[str, Any], claim: str, path: str) -> None:
    """Mount a claim in the pod's container; several mounts of one claim share a volume."""
    spec = pod["spec"]
    name = f"claim-{claim}"
    if all(volume["name"] != name for volume in spec["volumes"]):
        spec["volumes"].append({"name": name, "persistentVolumeClaim": {"claimName": claim}})
    spec["containers"][0]["volumeMounts"].append({"name": name, "mountPath": path})


def _claims(
    spec: dict[str, Any], mounts: list[dict[str, Any]], resolve: Callable[[dict[str, Any]], str]
) -> None:
    for item in mounts:
        mount({"spec": spec}, resolve(item["pvcNameParameter"]), item["mountPath"])


def _empty_dirs(spec: dict[str, Any], mounts: list[dict[str, Any]]) -> None:
    for item in mounts:
        source = {key: item[key] for key in ("medium", "sizeLimit") if key in item}
        spec["volumes"].append({"name": item["volumeName"], "emptyDir": source})
        spec["containers"][0]["volumeMounts"].append(
            {"name": item["volumeName"], "mountPath": item["mountPath"]}
        )


def _secrets(
    container: dict[str, Any],
    secrets: list[dict[str, Any]],
    resolve: Callable[[dict[str, Any]], str],
) -> None:
    for item in secrets:
        secret = resolve(item["secretNameParameter"])
        for pair in item["keyToEnv"]:
            reference = dict[str, Any](
                name=secret, key=pair["secretKey"], optional=item.get("optional", False)
            )
            container["env"].append(
                {"name": pair["envVar"], "valueFrom": {"secretKeyRef": reference}}
            )


def _secret_volumes(
    spec: dict[str, Any], secrets: list[dict[str, Any]], resolve: Callable[[dict[str, Any]], str]
) -> None:
    for item in secrets:
        secret = resolve(item["secretNameParameter"])
        source = {"secretName": secret, "optional": item.get("optional", False)}
        spec["volumes"].append({"name": secret, "secret": source})  # KFP gives it this name, too
        spec["containers"][0]["volumeMounts"].append(
            {"name": secret, "mountPath": item["mountPath"]}
        )


def _config_maps(
    spec: dict[str, Any], maps: list[dict[str, Any]], resolve: Callable[[dict[str, Any]], str]
) -> None:
    for item in maps:
        name = resolve(item["configMapNameParameter"])  # KFP gives the volume this name, too
        source = {"name": name, "optional": item.get("optional", False)}
        spec["volumes"].append({"name": name, "configMap": source})
        spec["containers"][0]["volumeMounts"].append({"name": name, "mountPath": item["mountPath"]})


def _affinity(terms: list[dict[str, Any]]) -> dict[str, Any]:
    """Required terms, which are alternatives; preferred ones, with a weight, are not played."""
    if any("weight" in term for term in terms):
        raise NotImplementedError("a weight of a node affinity is not played")
    required = {"nodeSelectorTerms": terms}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

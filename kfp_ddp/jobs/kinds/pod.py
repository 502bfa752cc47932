"""The worker's pod template, shared by all kinds of jobs."""

from __future__ import annotations

import hashlib
from typing import Any

from kfp_ddp.core.machine import GPUS
from kfp_ddp.core.text import unexpanded
from kfp_ddp.jobs.fields import JobFields, Starter
from kfp_ddp.jobs.shipping import code, payload
from kfp_ddp.k8s.api import Object

SHM = "shm"
NODE = "KFP_DDP_NODE"  # part of the ranks' reports
METRICS = "kfp-ddp/metrics"  # the Services in deploy/monitoring select by it
SCRIPT = "script"
# Taints and labels that providers put on their interruptible nodes, from their documentation.
SPOT_NODES: dict[str, tuple[str, str]] = {
    "gke": ("cloud.google.com/gke-spot", "true"),
    "aks": ("kubernetes.azure.com/scalesetpriority", "spot"),
    "karpenter": ("karpenter.sh/capacity-type", "spot"),
    "eks": ("eks.amazonaws.com/capacityType", "SPOT"),
}
TORCHRUN_MODULE = "torch.distributed.run"
OF_STARTER: dict[Starter, dict[str, str]] = {
    # Its own limit is ten minutes; pulling a large image on another node may take longer.
    "torchrun": {"PET_RDZV_CONF": "timeout=3600,join_timeout=3600"},
    # By default Open MPI binds each of two ranks to one core, too few for a rank with threads.
    "mpirun": {"OMPI_MCA_hwloc_base_binding_policy": "none"},
    "": {},
}
"""Environment variables that a starter reads."""
SCHEDULER_NAMES = {"runai": "runai-scheduler", "kai": "kai-scheduler"}
"""Schedulers of pods; the operator sets the names of the others."""


def template(
    spec: JobFields,
    labels: dict[str, str],
    container: str,
    script_map: str = "",
    starter: Starter | None = None,
) -> Object:
    """Return a pod template with one container.

    `script_map` is '' for a script in a variable; `starter` is None for that of the kind.
    """
    starter = spec.job_kind.script_starter if starter is None else starter
    # A queue's label is only for the job; with it, each pod would be queued again.
    ours = {key: value for key, value in labels.items() if key.startswith("kfp-ddp/")}
    mounted = mounts(spec, script_map)
    security = container_security(spec)
    init: Object = {
        "image": spec.image,
        "resources": INIT_CONTAINER,
        "volumeMounts": mounted,
        "securityContext": security,
    }
    worker = {
        "name": container,
        "image": spec.image,
        "imagePullPolicy": spec.image_pull_policy,
        "command": command(spec, script_map, starter),
        "args": args(spec, starter),
        "env": environment(spec, script_map, starter),
        "envFrom": [{"secretRef": {"name": name}} for name in spec.env_from_secrets],
        "resources": resources(spec),
        "volumeMounts": mounted,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": security,
    }
    of_pod: Object = {
        "runAsUser": spec.run_as_user if spec.run_as_user >= 0 else None,
        "fsGroup": spec.fs_group if spec.fs_group >= 0 else None,
        "fsGroupChangePolicy": "OnRootMismatch" if spec.fs_group >= 0 else None,
    }
    spread: Object = {"labelSelector": {"matchLabels": ours}}
    fields = {
        **scheduling(spec),
        "topologySpreadConstraints": [{**spread, **item} for item in spec.topology_spread],
        "restartPolicy": "OnFailure" if spec.restart_policy == "OnFailure" else "Never",
        "terminationGracePeriodSeconds": spec.grace_seconds,
        "hostNetwork": spec.host_network or None,
        "dnsPolicy": "ClusterFirstWithHostNet" if spec.host_network else None,
        "runtimeClassName": spec.runtime_class,
        "priorityClassName": spec.priority_class,
        "schedulerName": SCHEDULER_NAMES.get(spec.scheduler, ""),
        "serviceAccountName": spec.service_account,
        "automountServiceAccountToken": None if spec.service_account else False,
        "imagePullSecrets": [{"name": name} for name in spec.image_pull_secrets],
        "securityContext": _without_empty(of_pod),
        "volumes": volumes(spec, script_map),
        "initContainers": [{**init, **item} for item in spec.init_containers],
        "containers": [_without_empty(worker)],
    }
    return {"metadata": _metadata(spec, ours), "spec": _without_empty(fields)}


def _metadata(spec: JobFields, ours: dict[str, str]) -> Object:
    """Return the labels and annotations of a pod, with our own labels."""
    labels = {**spec.labels, **ours}
    annotations = dict(spec.annotations)
    if not spec.istio:
        labels["sidecar.istio.io/inject"] = "false"
        annotations["sidecar.istio.io/inject"] = "false"
    if spec.metrics_port:
        annotations["prometheus.io/scrape"] = "true"
        annotations["prometheus.io/port"] = str(spec.metrics_port)
        labels[METRICS] = "true"
    return {"labels": labels, "annotations": annotations}


def command(spec: JobFields, script_map: str, starter: Starter) -> list[str]:
    """Return the command in exec form, without a shell."""
    first = preparation(spec, script_map, starter)
    if not spec.script and not spec.entry:
        return [*first, *spec.command]
    if spec.script:
        python = payload.python(payload.SCRIPT, script_map)
    else:
        python = ["python3", *(["-m"] if code.is_module(spec.entry) else [])]
        python.append(_unchanged(spec.entry, starter))
    if starter == "torchrun":
        what = ["--no-python", *python] if spec.script and not script_map else python[1:]
        if spec.args[:1] == ("--",):
            what.insert(what[0][0] == "-", "--")  # torchrun removes the first one
        return [*first, "python3", "-m", TORCHRUN_MODULE, *what]
    if starter:
        # Without a number of ranks, mpirun uses every slot of the operator's host file.
        return [starter, *first, *python]
    return [*first, *python]


def preparation(spec: JobFields, script_map: str, starter: Starter) -> list[str]:
    """Return the words before a command that prepare its code and packages; none without any."""
    how = "together" if starter == "mpirun" else "alone"
    return [*payload.python(payload.START, script_map), how] if spec.prepares() else []


def args(spec: JobFields, starter: Starter) -> list[str]:
    """Return the arguments; those of a script or an entry arrive unchanged."""
    own = bool(spec.script or spec.entry)
    return [_unchanged(word, starter) if own else word for word in spec.args]


def _unchanged(word: str, starter: Starter) -> str:
    """Return a word escaped so that it arrives unchanged; torchrun expands string.Template."""
    return unexpanded(word.replace("$", "$$") if starter == "torchrun" else word)


def environment(spec: JobFields, script_map: str, starter: Starter) -> list[Object]:
    """Return the environment of the container; the user's variables override presets."""
    preset = {**spec.job_kind.environment, **OF_STARTER[starter]}
    if spec.nccl_debug:
        preset["NCCL_DEBUG"] = spec.nccl_debug
    if spec.nccl_socket_interface:
        preset["NCCL_SOCKET_IFNAME"] = preset["GLOO_SOCKET_IFNAME"] = spec.nccl_socket_interface
    if spec.nccl_infiniband:
        preset["NCCL_IB_DISABLE"] = "1" if spec.nccl_infiniband == "off" else "0"
    if spec.nccl_timeout_minutes:
        preset["KFP_DDP_TIMEOUT_SECONDS"] = f"{spec.nccl_timeout_minutes * 60:g}"
    if spec.gpus():
        preset[GPUS] = str(spec.gpus())
    preset |= payload.variables(spec, script_map)
    values: dict[str, Object] = {k: {"name": k, "value": v} for k, v in preset.items()}
    values[NODE] = {"name": NODE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    values.update({item["name"]: item for item in spec.env_vars})
    values.update({k: {"name": k, "value": v} for k, v in spec.env.items()})
    return list(values.values())


def resources(spec: JobFields, defaults: bool = True) -> Object:
    """Return requests and limits of the container, with `defaults` for unset ones."""
    own = spec.requested()
    default = default_resources(spec) if defaults else {}
    limits = {**own["limits"], **default.get("limits", {})}
    requests = {**own["requests"], **default.get("requests", {})}
    if spec.gpus_per_node:
        limits[spec.gpu_resource] = str(spec.gpus_per_node)
        requests.pop(spec.gpu_resource, None)
    if spec.rdma_resource:
        limits.setdefault(spec.rdma_resource, "1")
    return _without_empty({"limits": limits, "requests": requests})


def volumes(spec: JobFields, script_map: str) -> list[Object]:
    """Return the pod's volumes: those of the settings, PVCs by path, shared memory, the script."""
    # KFP names a volume after its PVC, and lists one mounted twice two times.
    all_volumes = list({volume["name"]: dict(volume) for volume in spec.volumes}.values())
    claims = dict.fromkeys(name.removesuffix(":ro") for name in spec.claims.values())
    all_volumes += [
        {"name": _volume(name), "persistentVolumeClaim": {"claimName": name}} for name in claims
    ]
    if spec.shm_size:
        all_volumes.append(
            {"name": SHM, "emptyDir": {"medium": "Memory", "sizeLimit": spec.shm_size}}
        )
    if script_map:
        all_volumes.append({"name": SCRIPT, "configMap": {"name": script_map}})
    return all_volumes


def mounts(spec: JobFields, script_map: str) -> list[Object]:
    """Return the container's mounts."""
    all_mounts = [dict(mount) for mount in spec.volume_mounts]
    for path, claim in spec.claims.items():
        mount: Object = {"name": _volume(claim.removesuffix(":ro")), "mountPath": path}
        all_mounts.append({**mount, "readOnly": True} if claim.endswith(":ro") else mount)
    if spec.shm_size:
        all_mounts.append({"name": SHM, "mountPath": "/dev/shm"})  # noqa: S108
    if script_map:
        all_mounts.append({"name": SCRIPT, "mountPath": payload.FOLDER, "readOnly": True})
    return all_mounts


def _volume(claim: str) -> str:
    """Return the name of a PVC's volume: at most 63 characters and no dot, unlike PVC names."""
    name = f"claim-{claim}"
    if len(name) <= 63 and "." not in name:
        return name
    return f"claim-{hashlib.sha256(claim.encode()).hexdigest()[:12]}"


def scheduling(spec: JobFields) -> Object:
    """Return selector, tolerations and affinity, with those of spot nodes."""
    selector = dict(spec.node_selector)
    tolerations = [dict(item) for item in spec.tolerations]
    if spec.spot:
        key, value = SPOT_NODES[spec.spot]
        selector[key] = value
        toleration = {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"}
        tolerations.append(toleration)
    return _without_empty(
        {"nodeSelector": selector, "tolerations": tolerations, "affinity": dict(spec.affinity)}
    )


def container_security(spec: JobFields) -> Object:
    """Return the container's security context.

    Non-root is not set on the pod: the init containers that operators add run as root.
    """
    rdma = ["IPC_LOCK"] if spec.nccl_infiniband == "on" else []  # to lock the memory that it uses
    added = list(dict.fromkeys([*spec.capabilities, *rdma]))
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": _without_empty({"drop": ["ALL"], "add": added}),
        "seccompProfile": {"type": "RuntimeDefault"},
        "runAsNonRoot": spec.non_root or None,
    }
    return _without_empty(security)


def _without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are not empty, so that a manifest shows only what is set."""
    empty: tuple[object, ...] = (None, "", [], {})  # 0 and False are settings
    return {name: value for name, value in fields.items() if value not in empty}


# The smallest cloud machines with a GPU have 4 CPUs and 15 GiB, some of it reserved.
PER_GPU = {
    "limits": {"cpu": (8, ""), "memory": (32, "Gi")},
    "requests": {"cpu": (2, ""), "memory": (8, "Gi")},
}
PER_RANK_ON_CPUS = {
    "limits": {"cpu": (4, ""), "memory": (4, "Gi")},
    "requests": {"cpu": (100, "m"), "memory": (512, "Mi")},
}
INIT_CONTAINER = {
    "limits": {"cpu": "1", "memory": "1Gi"},
    "requests": {"cpu": "50m", "memory": "64Mi"},
}
"""Default of an init container."""


def default_resources(spec: JobFields) -> dict[str, dict[str, str]]:
    """Return default limits and requests of a pod's CPU and memory, if neither is set.

    A namespace with a ResourceQuota refuses a pod that lacks one of them. If a limit or a request
    is set, the other is left to Kubernetes: setting only a request means no limit.
    """
    gpus = spec.gpus()
    shares, count = (PER_GPU, gpus) if gpus else (PER_RANK_ON_CPUS, spec.processes())
    own = spec.requested()
    is_set = {name for part in own.values() for name in part}
    missing = [name for name in ("cpu", "memory") if name not in is_set]
    return {
        part: {name: f"{share[name][0] * count}{share[name][1]}" for name in missing}
        for part, share in shares.items()
    }

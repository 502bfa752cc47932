"""The worker's pod template, shared by all kinds of jobs."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

from kfp_ddp.jobs import code, payload
from kfp_ddp.jobs.script import unexpanded
from kfp_ddp.k8s.api import Object

if TYPE_CHECKING:
    from kfp_ddp.jobs.launch_spec import LaunchSpec

SHM = "shm"
NODE = "KFP_DDP_NODE"  # ranks tell it in their progress
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
# torchrun that is told to stop exits with 1, as for an error, of which an elastic job would end.
TORCHRUN = """import sys
from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
try:
    run.main()
except SignalException as error:
    sys.exit(128 + error.sigval)
"""


def template(
    spec: LaunchSpec, labels: dict[str, str], container: str, script_map: str = ""
) -> Object:
    """A pod template with one container called `container`, as the operator looks for it.

    `labels` are those of the job, which the pods carry too; `script_map` is the ConfigMap that
    holds the script, '' when it travels in the environment.
    """
    annotations = dict(spec.annotations)
    # A queue's label belongs on the job alone; on a pod it would be queued a second time.
    ours = {key: value for key, value in labels.items() if key.startswith("kfp-ddp/")}
    pod_labels = {**spec.labels, **ours}
    if not spec.istio:
        pod_labels["sidecar.istio.io/inject"] = "false"
        annotations["sidecar.istio.io/inject"] = "false"
    if spec.metrics_port:
        annotations["prometheus.io/scrape"] = "true"
        annotations["prometheus.io/port"] = str(spec.metrics_port)
        pod_labels[METRICS] = "true"
    return {
        "metadata": {"labels": pod_labels, "annotations": annotations},
        "spec": _without_empty(
            {
                **scheduling(spec),
                "topologySpreadConstraints": topology_spread(spec, ours),
                "restartPolicy": "OnFailure" if spec.restart_policy == "OnFailure" else "Never",
                "terminationGracePeriodSeconds": spec.grace_seconds,
                "hostNetwork": spec.host_network or None,
                "dnsPolicy": "ClusterFirstWithHostNet" if spec.host_network else None,
                "priorityClassName": spec.priority_class,
                # The operator sets the gang schedulers' own when it is left out.
                "schedulerName": "runai-scheduler" if spec.scheduler == "runai" else "",
                "serviceAccountName": spec.service_account,
                "automountServiceAccountToken": None if spec.service_account else False,
                "imagePullSecrets": [{"name": name} for name in spec.image_pull_secrets],
                "securityContext": security(spec),
                "volumes": volumes(spec, script_map),
                "initContainers": init_containers(spec, script_map),
                "containers": [
                    _without_empty(
                        {
                            "name": container,
                            "image": spec.image,
                            "imagePullPolicy": spec.image_pull_policy,
                            "command": command(spec, script_map),
                            "args": args(spec),
                            "env": environment(spec, script_map),
                            "envFrom": [
                                {"secretRef": {"name": name}} for name in spec.env_from_secrets
                            ],
                            "resources": resources(spec),
                            "volumeMounts": mounts(spec, script_map),
                            "terminationMessagePolicy": "FallbackToLogsOnError",
                            "securityContext": container_security(spec),
                        }
                    )
                ],
            }
        ),
    }


def command(spec: LaunchSpec, script_map: str) -> list[str]:
    """What the container runs, in exec form: no shell ever sees it."""
    starter = spec.job_kind.script_starter
    first: list[str] = []
    if spec.prepares():
        how = "together" if starter == "mpirun" else "alone"
        first = [*payload.python(payload.START, script_map), how]
    if not spec.script and not spec.entry:
        return [*first, *spec.command]
    if spec.script:
        python = payload.python(payload.SCRIPT, script_map)
    else:
        python = ["python3", *(["-m"] if code.is_module(spec.entry) else [])]
        python.append(_as_given(spec, spec.entry))
    if starter == "torchrun":
        torchrun = ["-c", TORCHRUN] if spec.elastic else ["-m", TORCHRUN_MODULE]
        what = ["--no-python", *python] if spec.script and not script_map else python[1:]
        if spec.args[:1] == ("--",):
            what.insert(what[0][0] == "-", "--")  # torchrun takes the first for its own
        return [*first, "python3", *torchrun, *what]
    # Without a number of ranks, mpirun takes every slot of the operator's host file.
    return [*([starter] if starter else []), *first, *python]


def args(spec: LaunchSpec) -> list[str]:
    """What follows the command; a script and an entry get it as it was given."""
    own = bool(spec.script or spec.entry)
    return [_as_given(spec, word) if own else word for word in spec.args]


def _as_given(spec: LaunchSpec, word: str) -> str:
    """A word that arrives as it is; torchrun takes each for a string.Template, too."""
    torchrun = spec.job_kind.script_starter == "torchrun"
    return unexpanded(word.replace("$", "$$") if torchrun else word)


def environment(spec: LaunchSpec, script_map: str) -> list[Object]:
    """Env of the container; what the user set wins over what a preset sets."""
    preset = dict(spec.job_kind.environment)
    if spec.nccl_debug:
        preset["NCCL_DEBUG"] = spec.nccl_debug
    if spec.nccl_socket_interface:
        preset["NCCL_SOCKET_IFNAME"] = preset["GLOO_SOCKET_IFNAME"] = spec.nccl_socket_interface
    if spec.nccl_infiniband:
        preset["NCCL_IB_DISABLE"] = "1" if spec.nccl_infiniband == "off" else "0"
    if spec.nccl_timeout_minutes:
        preset["KFP_DDP_TIMEOUT_SECONDS"] = f"{spec.nccl_timeout_minutes * 60:g}"
    if spec.elastic:
        # Or torchrun waits in vain for an address, where a new node joins one that ran before.
        preset["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    preset |= payload.variables(spec, script_map)
    values: dict[str, Object] = {k: {"name": k, "value": v} for k, v in preset.items()}
    values[NODE] = {"name": NODE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    values.update({item["name"]: item for item in spec.env_vars})
    values.update({k: {"name": k, "value": v} for k, v in spec.env.items()})
    return list(values.values())


def resources(spec: LaunchSpec, defaults: bool = True) -> Object:
    """Requests and limits of the container; `defaults` where nobody said anything."""
    asked, found = spec.asked(), default_resources(spec) if defaults else {}
    limits = {**asked["limits"], **found.get("limits", {})}
    requests = {**asked["requests"], **found.get("requests", {})}
    if spec.gpus_per_node:
        limits[spec.gpu_resource] = str(spec.gpus_per_node)
    if spec.rdma_resource:
        limits.setdefault(spec.rdma_resource, "1")
    return _without_empty({"limits": limits, "requests": requests})


def volumes(spec: LaunchSpec, script_map: str) -> list[Object]:
    """Volumes of the pod: given ones, claims by path, shared memory and the script."""
    # KFP names a volume after its claim, and lists one that is mounted twice two times.
    found = list({volume["name"]: dict(volume) for volume in spec.volumes}.values())
    claims = dict.fromkeys(name.removesuffix(":ro") for name in spec.claims.values())
    found += [
        {"name": _volume(name), "persistentVolumeClaim": {"claimName": name}} for name in claims
    ]
    if spec.shm_size:
        found.append({"name": SHM, "emptyDir": {"medium": "Memory", "sizeLimit": spec.shm_size}})
    if script_map:
        found.append({"name": SCRIPT, "configMap": {"name": script_map}})
    return found


def mounts(spec: LaunchSpec, script_map: str) -> list[Object]:
    """Mounts of the container."""
    found = [dict(mount) for mount in spec.volume_mounts]
    for path, claim in spec.claims.items():
        mount: Object = {"name": _volume(claim.removesuffix(":ro")), "mountPath": path}
        found.append({**mount, "readOnly": True} if claim.endswith(":ro") else mount)
    if spec.shm_size:
        found.append({"name": SHM, "mountPath": "/dev/shm"})  # noqa: S108
    if script_map:
        found.append({"name": SCRIPT, "mountPath": payload.FOLDER, "readOnly": True})
    return found


def _volume(claim: str) -> str:
    """The name of a claim's volume, which may hold less than the claim's: 63 characters, no dot."""
    name = f"claim-{claim}"
    if len(name) <= 63 and "." not in name:
        return name
    return f"claim-{hashlib.sha256(claim.encode()).hexdigest()[:12]}"


def scheduling(spec: LaunchSpec) -> Object:
    """Where the pod may run: selector, tolerations and affinity, with those of spot nodes."""
    selector, tolerations = dict(spec.node_selector), [dict(item) for item in spec.tolerations]
    if spec.spot:
        key, value = SPOT_NODES[spec.spot]
        selector[key] = value
        toleration = {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"}
        tolerations.append(toleration)
    return _without_empty(
        {"nodeSelector": selector, "tolerations": tolerations, "affinity": dict(spec.affinity)}
    )


def topology_spread(spec: LaunchSpec, labels: dict[str, str]) -> list[Object]:
    """How the pods spread; where nothing else is selected, it is the pods with `labels`."""
    among = {"labelSelector": {"matchLabels": labels}}
    return [{**among, **each} for each in spec.topology_spread]


def init_containers(spec: LaunchSpec, script_map: str) -> list[Object]:
    """What runs in the pod before its worker, as its worker may run where it says nothing."""
    like_worker: Object = {
        "image": spec.image,
        "resources": INIT_CONTAINER,
        "volumeMounts": mounts(spec, script_map),
        "securityContext": container_security(spec),
    }
    return [{**like_worker, **each} for each in spec.init_containers]


def security(spec: LaunchSpec) -> Object:
    """Security context of the pod."""
    return _without_empty(
        {
            "runAsUser": spec.run_as_user if spec.run_as_user >= 0 else None,
            "fsGroup": spec.fs_group if spec.fs_group >= 0 else None,
            "fsGroupChangePolicy": "OnRootMismatch" if spec.fs_group >= 0 else None,
        }
    )


def container_security(spec: LaunchSpec) -> Object:
    """Security context of our container.

    Non-root is asked of it alone: the init containers that operators add have images of root.
    """
    return _without_empty(
        {
            "allowPrivilegeEscalation": False,
            "capabilities": _without_empty({"drop": ["ALL"], "add": capabilities(spec)}),
            "seccompProfile": {"type": "RuntimeDefault"},
            "runAsNonRoot": spec.non_root or None,
        }
    )


def capabilities(spec: LaunchSpec) -> list[str]:
    """Capabilities that are given; RDMA locks the memory that it reads and writes."""
    rdma = ["IPC_LOCK"] if spec.nccl_infiniband == "on" else []
    return list(dict.fromkeys([*spec.capabilities, *rdma]))


def _without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    """Without what is empty, so that a manifest shows only what was asked for."""
    return {k: v for k, v in fields.items() if v is not None and v != "" and v != [] and v != {}}


class Share(NamedTuple):
    """A number and its unit."""

    number: int
    unit: str = ""

    def times(self, count: int) -> str:
        """So many of it, as Kubernetes writes quantities."""
        return f"{self.number * count}{self.unit}"


# The smallest machines that clouds attach a GPU to have 4 CPUs and 15 GiB, some of it taken.
PER_GPU = {
    "limits": {"cpu": Share(8), "memory": Share(32, "Gi")},
    "requests": {"cpu": Share(2), "memory": Share(8, "Gi")},
}
PER_RANK_ON_CPUS = {
    "limits": {"cpu": Share(4), "memory": Share(4, "Gi")},
    "requests": {"cpu": Share(100, "m"), "memory": Share(512, "Mi")},
}
INIT_CONTAINER = {
    "limits": {"cpu": "1", "memory": "1Gi"},
    "requests": {"cpu": "50m", "memory": "64Mi"},
}
"""Of an init container that says nothing of its own."""


def default_resources(spec: LaunchSpec) -> dict[str, dict[str, str]]:
    """Limits and requests of each pod for the CPU and the memory of which nothing was set.

    A namespace with a ResourceQuota takes no pod that lacks one of them. Where a limit or a request
    was set, the other is left to Kubernetes: a request alone is how to have no limit.

    Returns:
        {"limits": {…}, "requests": {…}} by resource, as Kubernetes writes them; {} where both CPU
        and memory were set.
    """
    gpus = spec.gpus()
    shares, count = (PER_GPU, gpus) if gpus else (PER_RANK_ON_CPUS, spec.processes())
    asked = spec.asked()
    missing = [
        name for name in ("cpu", "memory") if not any(name in part for part in asked.values())
    ]
    if not missing:
        return {}
    return {part: {name: of[name].times(count) for name in missing} for part, of in shares.items()}

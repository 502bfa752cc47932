"""Hypothesis strategies for valid settings of jobs."""

import string
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.kinds.base import Runtime
from kfp_ddp.jobs.launch_spec import LaunchSpec

UNITS = ("m", "", "k", "Ki", "M", "Mi", "G", "Gi", "T", "Ti", "P", "Pi", "E", "Ei")
INSIDE = string.ascii_letters + string.digits + "-_."

TEXT = st.text(string.printable + "äß∑模$$()`'\"\\{}%", max_size=30)
NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)
LABELS = st.from_regex(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?", fullmatch=True)
KEYS = st.builds("".join, st.tuples(st.sampled_from(("", "a-b.com/")), LABELS.filter(bool)))
VARIABLES = st.builds("".join, st.tuples(st.sampled_from("_aZ-."), st.text(INSIDE, max_size=20)))
QUANTITIES = st.builds(
    "{}{}".format,
    st.integers(0, 999) | st.decimals(0, 100, places=3).map("{:f}".format),
    st.sampled_from(UNITS),
)
SECRET = {"name": "secret", "key": "key"}
TOPOLOGY = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}


def _named(values: st.SearchStrategy[str], start: str) -> st.SearchStrategy[dict[str, str]]:
    """Return up to three values by numbered names."""
    return st.lists(values, max_size=3).map(
        lambda items: {f"{start}{i}": item for i, item in enumerate(items)}
    )


SPEC: dict[str, Any] = {"image": "ghcr.io/you/trainer:1.0", "command": ("python3", "train.py")}
JOB_LABELS = {"kfp-ddp/run-id": "run", "kueue.x-k8s.io/queue-name": "team"}


def made(
    kind: str = "pytorchjob", in_cluster: Runtime | None = None, **fields: Any
) -> dict[str, Any]:
    """Return the `spec` of a job with these settings; `in_cluster` is the runtime of a TrainJob."""
    spec = LaunchSpec.create(**{**SPEC, **fields}, kind=kind)
    meta = {"name": "job", "labels": JOB_LABELS}
    return dict(spec.job_kind.manifest(spec, meta, "", in_cluster)["spec"])


def templates(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The pod templates of a job by role; of a TrainJob what it patches in its runtime."""
    if "runtimePatches" in job:
        (patch,) = job["runtimePatches"]
        (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        return {"Node": node["template"]["spec"]["template"]}
    if "rayClusterSpec" in job:
        cluster = job["rayClusterSpec"]
        pods = {"Head": cluster["headGroupSpec"]["template"]}
        for group in cluster.get("workerGroupSpecs", []):
            pods["Worker"] = group["template"]
        return {**pods, "Submitter": job["submitterPodTemplate"]}
    (replicas,) = (value for key, value in job.items() if key.endswith("eplicaSpecs"))
    return {role: replica["template"] for role, replica in replicas.items()}


SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "nodes": st.integers(1, 5),
    "nproc_per_node": st.integers(0, 9),
    "gpus_per_node": st.integers(0, 8),
    "gpu_resource": st.sampled_from(("nvidia.com/gpu", "amd.com/gpu", "nvidia.com/mig-1g.5gb")),
    "env": st.dictionaries(VARIABLES, TEXT, max_size=4),
    "env_from_secrets": st.lists(NAMES, max_size=3),
    "claims": _named(NAMES, "/c"),
    "nccl_socket_interface": st.sampled_from(("", "eth0")),
    "nccl_timeout_minutes": st.sampled_from((0, 0.5, 90)),
    "metrics_port": st.sampled_from((0, 9400)),
    "labels": st.dictionaries(KEYS, LABELS, max_size=3),
    "annotations": st.dictionaries(KEYS, TEXT, max_size=3),
    "capabilities": st.lists(st.sampled_from(("IPC_LOCK", "SYS_NICE", "NET_RAW")), unique=True),
    "node_selector": st.dictionaries(KEYS, LABELS, max_size=2),
    "image_pull_secrets": st.lists(NAMES, max_size=3),
    "grace_seconds": st.integers(1, 999),
    "backoff_limit": st.integers(-1, 3),
    "ttl_seconds": st.integers(-1, 99),
    "deadline_minutes": st.sampled_from((0, 0.01, 60)),
    "init_containers": _named(st.just("true"), "init-").map(
        lambda fields: [{"name": name, "command": [word]} for name, word in fields.items()]
    ),
    "topology_spread": st.sampled_from(([], [TOPOLOGY])),
    "rdma_resource": st.sampled_from(("", "rdma/hca")),
    "resources": st.just({"limits": {"example.com/fpga": "1"}}),
    "env_vars": st.just([{"name": "KEY", "valueFrom": {"secretKeyRef": SECRET}}]),
    "volume_mounts": st.just([{"name": "more", "mountPath": "/more"}]),
    "tolerations": st.just([{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]),
    "affinity": st.just({"podAntiAffinity": {}}),
    "queue": st.just("team"),
    "args": st.lists(TEXT, min_size=1, max_size=1),
    **dict.fromkeys(("priority_class", "service_account"), st.just("") | NAMES),
    **dict.fromkeys(("host_network", "istio", "non_root"), st.booleans()),
    **dict.fromkeys(("run_as_user", "fs_group"), st.sampled_from((-1, 0, 1000))),
    **dict.fromkeys(("cpu", "memory", "cpu_request", "memory_request", "shm_size"), QUANTITIES),
} | {
    name: st.sampled_from(LaunchSpec.choices(name))
    for name in LaunchSpec.model_fields
    if name != "kind" and LaunchSpec.choices(name)
}


PROGRAMS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    ({"command": ["python3"]}, {"script": "print('$HOME `id` \\\\')"})
)
NEEDS: dict[str, dict[str, Any]] = {
    "volume_mounts": {
        "volumes": [{"name": "more", "persistentVolumeClaim": {"claimName": "more"}}]
    },
    "queue": {"scheduler": "kueue"},
    "rdma_resource": {"nccl_infiniband": "on"},
}
"""Settings that are valid only with others."""


@st.composite
def specifications(draw: st.DrawFn, kind: str) -> LaunchSpec:
    """Return a job of a kind with some of the settings that it supports."""
    refused = {item.setting for item in KINDS[kind].unsupported}
    names = draw(st.sets(st.sampled_from(sorted(SETTINGS.keys() - refused)), max_size=20))
    fields = {name: draw(SETTINGS[name]) for name in sorted(names)}
    for name in NEEDS.keys() & names:
        fields |= NEEDS[name]
    try:
        return LaunchSpec.create(kind=kind, image="a.b/c:1", **draw(PROGRAMS), **fields)
    except InputError:  # such as a request above its limit
        assume(False)
        raise

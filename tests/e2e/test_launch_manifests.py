"""Every kind of job with everything set: what the API server and its webhooks say, strictly."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kubernetes import client

from kfp_ddp.jobs.identity import Owner, identify, metadata
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import Api, core
from tests.e2e.harness.scene import namespace
from tests.launch_specs import specifications
from tests.unit.test_launch_pods import templates

pytestmark = pytest.mark.smoke

EVERYTHING: dict[str, Any] = {
    "image": "ghcr.io/you/trainer:1.0",
    "nodes": 2,
    "nproc_per_node": 2,
    "gpus_per_node": 2,
    "cpu": "8",
    "memory": "32Gi",
    "cpu_request": "4",
    "memory_request": "16Gi",
    "resources": {"limits": {"example.com/fpga": "1"}},
    "shm_size": "8Gi",
    "env": {"A": "b"},
    "env_vars": [
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "secret", "key": "key"}}},
    ],
    "claims": {"/data": "images:ro", "/work": "work"},
    "volumes": [{"name": "more", "persistentVolumeClaim": {"claimName": "more"}}],
    "volume_mounts": [{"name": "more", "mountPath": "/more"}],
    "nccl_debug": "INFO",
    "nccl_socket_interface": "eth0",
    "nccl_infiniband": "on",
    "rdma_resource": "rdma/hca",
    "nccl_timeout_minutes": 10,
    "capabilities": ["SYS_NICE"],
    "labels": {"team": "vision"},
    "annotations": {"k8s.v1.cni.cncf.io/networks": "rdma"},
    "node_selector": {"zone": "a"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"podAntiAffinity": {}},
    "spot": "gke",
    "scheduler": "kueue",
    "queue": "team",
    "image_pull_secrets": ["registry"],
    "service_account": "worker",
    "run_as_user": 1000,
    "fs_group": 1000,
    "deadline_minutes": 60,
    "metrics_port": 9400,
}
# What a TrainJob leaves to its runtime.
OPERATORS: dict[str, Any] = {
    "env_from_secrets": ["secret"],
    "host_network": True,
    "init_containers": [{"name": "fetch", "command": ["true"]}],
    "topology_spread": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "priority_class": "high",
    "image_pull_policy": "IfNotPresent",
    "restart_policy": "ExitCode",
    "backoff_limit": 3,
}


@pytest.fixture(scope="module")
def api(cluster: client.ApiClient) -> Iterator[Api]:
    with namespace(cluster) as space:
        yield Api(cluster, space.namespace)


def dry_run(api: Api, fields: dict[str, Any]) -> dict[str, Any]:
    """The job as the server would store it."""
    spec = LaunchSpec.create(**fields)
    identity = identify("0b9c5d4e-run", "train", "12", spec)
    owner = Owner("pod", "workflow", "3f1e0c1a-0000-4000-8000-000000000000")
    script_map = identity.name if spec.script else ""
    body = spec.job_kind.manifest(
        spec, metadata(spec, identity, api.namespace, 0, owner), script_map
    )
    query = {"fieldValidation": "Strict", "dryRun": "All"}
    return api.call("POST", KINDS[spec.kind].path(api.namespace), body, query)


def everything(kind: str) -> dict[str, Any]:
    """All settings that a kind of job has a place for."""
    no_place = {item.setting for item in KINDS[kind].unsupported if not item.allowed}
    given = {**EVERYTHING, **OPERATORS}
    return {"kind": kind, **{name: given[name] for name in given.keys() - no_place}}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_job_with_everything_set_is_valid(api: Api, kind: str) -> None:
    job = dry_run(api, {**everything(kind), "script": "print('$HOME `id` \\\\')"})["spec"]
    if kind == "trainjob":
        assert job["trainer"]["numProcPerNode"] == 2
        assert job["trainer"]["resourcesPerNode"]["limits"]["rdma/hca"] == "1"
    else:
        assert job["runPolicy"]["cleanPodPolicy"] == "Running"


@pytest.mark.parametrize("kind", list(KINDS))
@settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(data=st.data())
def test_valid_settings_are_valid_manifests(api: Api, kind: str, data: st.DataObject) -> None:
    """The operator's pods too: a job shows nothing until they cannot be created."""
    spec = data.draw(specifications(kind))
    meta = metadata(spec, identify("run", "train", "7", spec), api.namespace, 0, None)
    job = spec.job_kind.manifest(spec, meta)
    query = {"fieldValidation": "Strict", "dryRun": "All"}
    api.call("POST", KINDS[kind].path(api.namespace), job, query)
    for template in templates(job["spec"]).values() if kind != "trainjob" else ():
        pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)}
        pod["metadata"]["name"] = "of-the-job"
        for named in ("serviceAccountName", "priorityClassName"):  # which would have to exist
            pod["spec"].pop(named, None)
        api.call("POST", core(api.namespace, "pods"), pod, query)

"""The pods of a job of any kind: metadata, rights, resources and scheduling."""

from typing import Any

import pytest

from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.kinds.base import Runtime
from kfp_ddp.jobs.kinds.pod import default_resources
from kfp_ddp.jobs.kinds.trainjob import TOKEN_DIR
from kfp_ddp.jobs.launch_spec import LaunchSpec

SPEC: dict[str, Any] = {"image": "ghcr.io/you/trainer:1.0", "command": ("python3", "train.py")}
LABELS = {"kfp-ddp/run-id": "run", "kueue.x-k8s.io/queue-name": "team"}
V1 = ["pytorchjob", "tfjob", "mpijob"]


def made(kind: str, result: Runtime | None = None, **fields: Any) -> dict[str, Any]:
    spec = LaunchSpec.create(**{**SPEC, **fields}, kind=kind)
    return dict(spec.job_kind.manifest(spec, {"name": "job", "labels": LABELS}, "", result)["spec"])


def templates(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The pod templates of a job by role; of a TrainJob what it patches in its runtime."""
    if "runtimePatches" in job:
        (patch,) = job["runtimePatches"]
        (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        return {"Node": node["template"]["spec"]["template"]}
    (replicas,) = (value for key, value in job.items() if key.endswith("eplicaSpecs"))
    return {role: replica["template"] for role, replica in replicas.items()}


def asked(kind: str, job: dict[str, Any]) -> list[dict[str, Any]]:
    """What the workers of a job ask for."""
    if kind == "trainjob":
        return [job["trainer"].get("resourcesPerNode", {})]
    workers = {role: item for role, item in templates(job).items() if role != "Launcher"}
    return [item["spec"]["containers"][0]["resources"] for item in workers.values()]


@pytest.mark.parametrize("kind", list(KINDS))
def test_workers_have_no_token_without_an_account(kind: str) -> None:
    """An MPIJob's launcher starts its ranks through the API server."""
    for role, template in templates(made(kind, nodes=2)).items():
        pod = template["spec"]
        hidden = {mount["mountPath"] for mount in pod["containers"][0].get("volumeMounts", [])}
        if kind == "trainjob":
            assert TOKEN_DIR in hidden
        else:
            mounted = None if role == "Launcher" else False
            assert pod.get("automountServiceAccountToken") is mounted
    for template in templates(made(kind, nodes=2, service_account="worker")).values():
        pod = template["spec"]
        assert "automountServiceAccountToken" not in pod
        assert TOKEN_DIR not in {m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}


@pytest.mark.parametrize("kind", list(KINDS))
def test_labels_and_annotations_of_every_pod_do_not_replace_ours(kind: str) -> None:
    annotations = {"k8s.v1.cni.cncf.io/networks": "rdma", "sidecar.istio.io/inject": "true"}
    labels = {"team": "vision", "kfp-ddp/run-id": "another"}
    job = made(kind, nodes=2, annotations=annotations, labels=labels)
    for template in templates(job).values():
        meta = template["metadata"]
        assert meta["annotations"] == {**annotations, "sidecar.istio.io/inject": "false"}
        assert meta["labels"].items() >= {"team": "vision", "kfp-ddp/run-id": "run"}.items()


@pytest.mark.parametrize("kind", list(KINDS))
def test_infiniband_adds_its_capability_and_device(kind: str) -> None:
    rdma: dict[str, Any] = {"nccl_infiniband": "on", "rdma_resource": "rdma/hca"}
    job = made(kind, **rdma, capabilities=["SYS_NICE"])
    for template in templates(job).values():
        capabilities = template["spec"]["containers"][0]["securityContext"]["capabilities"]
        assert capabilities == {"drop": ["ALL"], "add": ["SYS_NICE", "IPC_LOCK"]}
    assert {item["limits"]["rdma/hca"] for item in asked(kind, job)} == {"1"}
    own = {"rdma/hca": "4", "example.com/fpga": "2"}
    for item in asked(kind, made(kind, **rdma, resources={"limits": own})):
        assert item["limits"].items() >= own.items()
    for template in templates(made(kind)).values():
        security = template["spec"]["containers"][0]["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("kind", V1)
def test_topology_spread_counts_the_pods_of_the_job(kind: str) -> None:
    zones = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    own = {**zones, "labelSelector": {"matchLabels": {"team": "vision"}}}
    for template in templates(made(kind, nodes=2, topology_spread=[zones, own])).values():
        first, second = template["spec"]["topologySpreadConstraints"]
        assert first["labelSelector"] == {"matchLabels": {"kfp-ddp/run-id": "run"}}
        assert second == own
        matched = first["labelSelector"]["matchLabels"]
        assert matched.items() <= template["metadata"]["labels"].items()


@pytest.mark.parametrize("kind", V1)
def test_an_init_container_has_defaults_of_its_worker(kind: str) -> None:
    options = {"name": "fetch", "command": ["true"]}
    other = {**options, "name": "other", "image": "b:2", "volumeMounts": [], "resources": {}}
    job = made(kind, nodes=2, claims={"/data": "images"}, init_containers=[options, other])
    for template in templates(job).values():
        worker = template["spec"]["containers"][0]
        first, second = template["spec"]["initContainers"][:2]
        for name in ("image", "volumeMounts", "securityContext"):
            assert first[name] == worker[name]
        assert set(first["resources"]) == {"limits", "requests"}
        assert (second["image"], second["volumeMounts"], second["resources"]) == ("b:2", [], {})


def test_default_resources_grow_with_gpus_or_ranks() -> None:
    def result(**fields: Any) -> Any:
        return default_resources(LaunchSpec.create(**SPEC, **fields))

    assert result(gpus_per_node=8) == {
        "limits": {"cpu": "64", "memory": "256Gi"},
        "requests": {"cpu": "16", "memory": "64Gi"},
    }
    assert result() == {
        "limits": {"cpu": "4", "memory": "4Gi"},
        "requests": {"cpu": "100m", "memory": "512Mi"},
    }
    assert result(nproc_per_node=4)["requests"] == {"cpu": "400m", "memory": "2048Mi"}
    on_task = {"limits": {"nvidia.com/mig-1g.5gb": "1"}}
    assert result(resources=on_task) == result(gpus_per_node=1)
    assert result(gpus_per_node=2, nproc_per_node=8) == result(gpus_per_node=2)


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({"cpu": "4"}, {"memory"}),
        ({"cpu_request": "1"}, {"memory"}),
        ({"memory": "4Gi"}, {"cpu"}),
        ({"memory_request": "4Gi"}, {"cpu"}),
        ({"resources": {"limits": {"memory": "4Gi"}}}, {"cpu"}),
        ({"resources": {"requests": {"cpu": "1"}}, "memory": "1Gi"}, set()),
    ],
)
def test_a_default_replaces_no_setting(fields: Any, left: set[str]) -> None:
    result = default_resources(LaunchSpec.create(**SPEC, **fields))
    assert set(result.get("limits", {})) == set(result.get("requests", {})) == left


def test_a_default_does_not_replace_the_resources_of_a_runtime() -> None:
    def of(runtime: Runtime | None, **fields: Any) -> Any:
        return made("trainjob", runtime, **fields)["trainer"].get("resourcesPerNode")

    assert of(Runtime(has_resources=False))["limits"] == {"cpu": "4", "memory": "4Gi"}
    assert of(Runtime(has_resources=True)) is None
    assert of(Runtime(has_resources=True), cpu="2") == {
        "limits": {"cpu": "2"},
        "requests": {"cpu": "2"},
    }


def test_a_trainjob_names_the_kind_of_its_runtime() -> None:
    for kind in ("TrainingRuntime", "ClusterTrainingRuntime"):
        reference = made("trainjob", Runtime(kind), runtime="mine")["runtimeRef"]
        assert reference["name"] == "mine"
        assert reference["kind"] == kind

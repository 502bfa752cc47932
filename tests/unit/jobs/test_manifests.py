"""The manifest of each kind of job: metadata, rights, resources and scheduling."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kubernetes import utils

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.identity import identify, metadata
from kfp_ddp.jobs.kinds import KINDS, pod
from kfp_ddp.jobs.kinds.base import Runtime
from kfp_ddp.jobs.kinds.pod import default_resources
from kfp_ddp.jobs.kinds.trainjob import TOKEN_DIR
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.shipping import payload
from kfp_ddp.k8s.objects import parse_quantity
from tests.launch_specs import QUANTITIES, SPEC, made, specifications, templates

V1 = ["pytorchjob", "tfjob", "mpijob", "xgboostjob"]
HELPERS = ("Launcher", "Submitter")
"""Pods that compute nothing."""
UNBUFFERED = "PYTHONUNBUFFERED"
# A value of each setting that some kind does not support.
OTHER: dict[str, Any] = {
    "runtime": "mine",
    "nproc_per_node": 2,
    "nccl_timeout_minutes": 5.0,
    "host_network": True,
    "init_containers": [{"name": "fetch"}],
    "topology_spread": [{"topologyKey": "zone"}],
    "priority_class": "high",
    "runtime_class": "nvidia",
    "image_pull_policy": "Always",
    "restart_policy": "OnFailure",
    "backoff_limit": 0,
    "scheduler": "volcano",
    "env_from_secrets": ["secret"],
    "clean_pod_policy": "All",
    "ttl_seconds": 5,
}
EXAMPLES = settings(
    max_examples=50,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


def resources_of(kind: str, job: dict[str, Any]) -> list[dict[str, Any]]:
    """What the workers of a job ask for."""
    if kind == "trainjob":
        return [job["trainer"].get("resourcesPerNode", {})]
    workers = {role: item for role, item in templates(job).items() if role not in HELPERS}
    return [item["spec"]["containers"][0]["resources"] for item in workers.values()]


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
    assert {item["limits"]["rdma/hca"] for item in resources_of(kind, job)} == {"1"}
    own = {"rdma/hca": "4", "example.com/fpga": "2"}
    for item in resources_of(kind, made(kind, **rdma, resources={"limits": own})):
        assert item["limits"].items() >= own.items()
    for template in templates(made(kind)).values():
        security = template["spec"]["containers"][0]["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("kind", V1)
def test_scheduling_of_the_pods_of_the_job(kind: str) -> None:
    zones = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    own = {**zones, "labelSelector": {"matchLabels": {"team": "vision"}}}
    fields = dict[str, Any](topology_spread=[zones, own], runtime_class="nvidia", gpus_per_node=2)
    for template in templates(made(kind, nodes=2, **fields)).values():
        assert template["spec"]["runtimeClassName"] == "nvidia"
        variables = template["spec"]["containers"][0]["env"]
        assert {"name": "KFP_DDP_GPUS", "value": "2"} in variables
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
        ({"memory_request": "4Gi"}, {"cpu"}),
        ({"resources": {"limits": {"memory": "4Gi"}}}, {"cpu"}),
        ({"resources": {"requests": {"cpu": "1"}}, "memory": "1Gi"}, set()),
    ],
)
def test_a_default_replaces_no_setting(fields: Any, left: set[str]) -> None:
    result = default_resources(LaunchSpec.create(**SPEC, **fields))
    assert set(result.get("limits", {})) == set(result.get("requests", {})) == left


def test_a_trainjob_names_its_runtime_and_does_not_replace_its_resources() -> None:
    def of(has_resources: bool, **fields: Any) -> Any:
        runtime = Runtime("TrainingRuntime", has_resources)
        job = made("trainjob", runtime, **fields, runtime="mine")
        assert job["runtimeRef"] == {"name": "mine", "kind": "TrainingRuntime"}
        return job["trainer"].get("resourcesPerNode")

    assert of(has_resources=False)["limits"] == {"cpu": "4", "memory": "4Gi"}
    assert of(has_resources=True) is None
    own = {"limits": {"cpu": "2"}, "requests": {"cpu": "2"}}
    assert of(has_resources=True, cpu="2") == own
    assert made("trainjob", None)["runtimeRef"]["kind"] == "ClusterTrainingRuntime"


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_unsupported_setting_is_refused(kind: str) -> None:
    """A setting without effect would go unnoticed."""
    unsupported = {item.setting for item in KINDS[kind].unsupported}
    for name, value in OTHER.items():
        fields = {**SPEC, "kind": kind, name: value}
        if name in unsupported:
            with pytest.raises(InputError, match=name):
                LaunchSpec.create(**fields)
        else:
            assert LaunchSpec.create(**fields).kind == kind
    assert unsupported <= OTHER.keys()
    assert LaunchSpec.create(**SPEC, kind=kind, scheduler="kueue").kind == kind


def test_a_queued_trainjob_has_only_fields_that_kueue_keeps() -> None:
    """Kueue up to 0.19 writes a TrainJob back by the types of Trainer 2.2."""
    queued: dict[str, Any] = {"scheduler": "kueue", "queue": "team"}
    grace = "terminationGracePeriodSeconds"
    assert grace in templates(made("trainjob"))["Node"]["spec"]
    assert grace not in templates(made("trainjob", **queued))["Node"]["spec"]
    assert grace in templates(made("pytorchjob", **queued, grace_seconds=5))["Worker"]["spec"]
    with pytest.raises(InputError, match="terminationGracePeriodSeconds into the runtime"):
        made("trainjob", **queued, grace_seconds=5)


@pytest.mark.parametrize(
    ("kind", "starts", "variables"),
    [
        ("pytorchjob", ["python3", "-m", "torch.distributed.run"], {"PET_RDZV_CONF"}),
        ("trainjob", ["python3", "-m", "torch.distributed.run"], {"PET_RDZV_CONF", UNBUFFERED}),
        ("tfjob", ["python3"], {UNBUFFERED}),
        ("xgboostjob", ["python3"], {UNBUFFERED}),
        ("rayjob", ["python3"], {UNBUFFERED, "RAY_USAGE_STATS_ENABLED"}),
        ("mpijob", ["mpirun", "python3"], {"OMPI_MCA_hwloc_base_binding_policy", UNBUFFERED}),
    ],
)
def test_how_each_kind_starts_a_script(kind: str, starts: list[str], variables: set[str]) -> None:
    spec = LaunchSpec.create(image="a:1", script="print()", kind=kind)
    starter = KINDS[kind].script_starter
    assert pod.command(spec, "map", starter) == [*starts, "/etc/kfp-ddp/script.py"]
    without_map = pod.command(spec, "", starter)
    assert without_map[: len(starts)] == starts
    program = payload.RUN_FROM_ENV.format(variable="KFP_DDP_SCRIPT", file="script.py")
    assert without_map[-2:] == ["-c", program]
    environment = {entry["name"]: entry for entry in pod.environment(spec, "map", starter)}
    assert environment.keys() == {pod.NODE, *variables}
    assert environment["KFP_DDP_NODE"]["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}


@pytest.mark.parametrize("kind", list(KINDS))
@EXAMPLES
@given(data=st.data())
def test_every_pod_has_our_labels_no_rights_and_resources(kind: str, data: st.DataObject) -> None:
    spec = data.draw(specifications(kind))
    meta = metadata(spec, identify("run", "train", "7", spec), "space", 0, None)
    job = spec.job_kind.manifest(spec, meta, "")
    ours = {key: value for key, value in meta["labels"].items() if key.startswith("kfp-ddp/")}
    limited = {"cpu": spec.cpu or not spec.cpu_request}
    limited["memory"] = spec.memory or not spec.memory_request
    for role, template in templates(job["spec"]).items():
        pod, (container,) = template["spec"], template["spec"]["containers"]
        assert template["metadata"]["labels"].items() >= ours.items()
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        if kind == "trainjob":
            resources = [job["spec"]["trainer"]["resourcesPerNode"]]
            hidden = TOKEN_DIR in {mount["mountPath"] for mount in container["volumeMounts"]}
            assert hidden == (not spec.service_account)
            mounted = [mount["name"] for mount in container["volumeMounts"]]
            assert len(mounted) == len(set(mounted) & {item["name"] for item in pod["volumes"]})
        else:
            containers = [container, *pod.get("initContainers", [])]
            resources = [item["resources"] for item in containers]
            no_token = not spec.service_account and role != "Launcher"
            assert (pod.get("automountServiceAccountToken") is False) == no_token
        for item in resources:
            for name in ("cpu", "memory"):
                assert name in item["requests"]
                assert name in item.get("limits", {}) or not limited[name]


def test_a_rayjob_prepares_every_node_and_submits_to_the_head() -> None:
    """What is prepared must be there before Ray starts: its workers inherit folder and path."""
    fields: Any = {"script": "print()", "command": (), "args": ["a b"], "nodes": 3}
    job = made(
        "rayjob", **fields, packages_to_install=["a==1"], gpus_per_node=2, claims={"/d": "d"}
    )
    pods = {role: item["spec"]["containers"][0] for role, item in templates(job).items()}
    assert pods["Head"] == pods["Worker"]
    command = " ".join(pods["Head"]["command"])
    assert 0 < command.index("KFP_DDP_START") < command.index("KUBERAY_GEN_RAY_START_CMD")
    driver = pods["Submitter"]["command"][3:] + pods["Submitter"]["args"]
    assert (driver[0], driver[-1]) == ("python3", "a b")
    (group,) = job["rayClusterSpec"]["workerGroupSpecs"]
    assert (group["replicas"], group["rayStartParams"]["num-gpus"]) == (2, "2")
    assert "workerGroupSpecs" not in made("rayjob")["rayClusterSpec"]
    with pytest.raises(InputError, match="needs a command"):
        made("rayjob", command=())


@settings(max_examples=200, derandomize=True, deadline=None)
@given(text=QUANTITIES)
def test_a_quantity_is_parsed_as_by_the_kubernetes_client(text: str) -> None:
    assert parse_quantity(text) == Fraction(utils.parse_quantity(text))


@pytest.mark.parametrize("kind", ["pytorchjob", "tfjob", "mpijob", "xgboostjob", "rayjob"])
@pytest.mark.parametrize(
    ("scheduler", "name", "label"),
    [
        ("runai", "runai-scheduler", "runai/queue"),
        ("kai", "kai-scheduler", "kai.scheduler/queue"),
    ],
)
def test_a_scheduler_of_pods_is_named_in_every_pod(
    kind: str, scheduler: str, name: str, label: str
) -> None:
    spec = LaunchSpec.create(**SPEC, kind=kind, scheduler=scheduler, queue="team")
    meta = metadata(spec, identify("run", "train", "7", spec), "space", 0, None)
    assert meta["labels"][label] == "team"
    pods = templates(spec.job_kind.manifest(spec, meta, "")["spec"]).values()
    assert {template["spec"]["schedulerName"] for template in pods} == {name}


def test_a_plain_command_of_a_pytorchjob_is_a_rank() -> None:
    """An image that reads LOCAL_RANK and has no torchrun is one process of a pod."""
    job = made("pytorchjob", nodes=3, command=())
    env = templates(job)["Worker"]["spec"]["containers"][0]["env"]
    values = {item["name"]: item.get("value") for item in env}
    assert (values["WORLD_SIZE"], values["LOCAL_RANK"], values["LOCAL_WORLD_SIZE"]) == (
        *("3", "0", "1"),
    )

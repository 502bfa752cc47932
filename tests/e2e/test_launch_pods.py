"""What a job's pods are given and what is kept from them, as the pods themselves see it."""

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client

from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.run import launch
from kfp_ddp.k8s.api import Api
from tests.e2e.harness.delivery import delivered, skip_without_mpi
from tests.e2e.harness.grounds import IMAGE, UID, Grounds
from tests.e2e.harness.scene import namespace

pytestmark = pytest.mark.smoke

QUOTA = {"requests.cpu": "1", "limits.cpu": "16", "requests.memory": "4Gi", "limits.memory": "16Gi"}
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"
SAY = f"""
import json, os
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
found = {{"token": os.path.exists("{TOKEN}"), "fetched": os.path.exists("/shared/fetched")}}
found |= {{name: int(status[name], 16) for name in ("CapBnd", "CapEff")}}
print("SAID", json.dumps(found), flush=True)
"""
IPC_LOCK = 1 << 14
V1 = ["pytorchjob", "tfjob"]


@pytest.fixture(scope="module")
def grounds(cluster: client.ApiClient) -> Iterator[Grounds]:
    """A namespace with a quota of everything that may be forgotten, and no LimitRange."""
    with namespace(cluster) as space, delivered(space):
        quota = {"metadata": {"name": "all"}, "spec": {"hard": QUOTA}}
        space.core.create_namespaced_resource_quota(space.namespace, quota)
        yield space


def said(
    grounds: Grounds, capsys: pytest.CaptureFixture[str], kind: str, **fields: Any
) -> list[dict[str, Any]]:
    """What each worker of a job saw."""
    options = {
        "run_as_user": UID,
        "shm_size": "64Mi",
        "grace_seconds": 5,
        "retries": 0,
        **fields,
    }
    start = ["mpirun"] if kind == "mpijob" else []
    command = [*start, "python3", "-c", SAY]
    spec = LaunchSpec.create(kind=kind, image=IMAGE, command=command, nodes=2, **options)
    launch(spec, str(uuid.uuid4()), "train", "", Api(grounds.api, grounds.namespace))
    lines = capsys.readouterr().out.splitlines()
    return [json.loads(line.partition("SAID ")[2]) for line in lines if "SAID " in line]


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_job_with_defaults_runs_under_a_quota_without_a_token(
    grounds: Grounds, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    if kind == "mpijob":
        skip_without_mpi()
    result = said(grounds, capsys, kind)
    assert len(result) == 2
    for item in result:
        assert not item["token"]
        assert item["CapBnd"] == 0


@pytest.mark.parametrize("kind", V1)
def test_an_init_container_hands_files_to_its_worker_under_a_quota(
    grounds: Grounds, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    fetch = {"name": "fetch", "command": ["touch", "/shared/fetched"]}
    result = said(
        grounds,
        capsys,
        kind,
        volumes=[{"name": "shared", "emptyDir": {}}],
        volume_mounts=[{"name": "shared", "mountPath": "/shared"}],
        init_containers=[fetch],
        fs_group=UID,
    )
    assert [item["fetched"] for item in result] == [True, True]


@pytest.mark.parametrize("kind", [*V1, "trainjob"])
@pytest.mark.parametrize("root", [True, False])
def test_ipc_lock_has_effect_for_root_alone(
    grounds: Grounds, capsys: pytest.CaptureFixture[str], kind: str, root: bool
) -> None:
    user = {"run_as_user": 0, "non_root": False} if root else {}
    for item in said(grounds, capsys, kind, nccl_infiniband="on", **user):
        assert item["CapBnd"] == IPC_LOCK
        assert item["CapEff"] == (IPC_LOCK if root else 0)


def test_an_account_that_is_named_has_its_token(
    grounds: Grounds, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("pytorchjob", "trainjob"):
        result = said(grounds, capsys, kind, service_account=grounds.service_account)
        assert [item["token"] for item in result] == [True, True]


def test_a_runtime_of_the_namespace_goes_before_one_of_the_cluster(
    grounds: Grounds, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one here has a name of the cluster's, and says what its nodes ask for."""
    api = Api(grounds.api, grounds.namespace)
    group = f"/apis/{KINDS['trainjob'].group_version}"
    runtime = api.call("GET", f"{group}/clustertrainingruntimes/torch-distributed")
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    (node,) = pod["spec"]["containers"]
    part = {"cpu": "123m", "memory": "345Mi"}
    node["resources"] = {"limits": part, "requests": part}
    own = {
        "apiVersion": KINDS["trainjob"].group_version,
        "kind": "TrainingRuntime",
        "metadata": {"name": "torch-distributed", "labels": runtime["metadata"]["labels"]},
        "spec": runtime["spec"],
    }
    path = f"{group}/namespaces/{grounds.namespace}/trainingruntimes"
    api.call("POST", path, own)
    marks = {"labels": {"team": "vision"}, "annotations": {"note": "a b"}}
    assert len(said(grounds, capsys, "trainjob", **marks)) == 2
    jobs = api.call("GET", KINDS["trainjob"].path(grounds.namespace))["items"]
    (ours,) = (job for job in jobs if job["spec"]["runtimeRef"]["kind"] == "TrainingRuntime")
    pods = grounds.core.list_namespaced_pod(
        grounds.namespace, label_selector=KINDS["trainjob"].pod_selector(ours["metadata"]["name"])
    )
    assert [item.spec.containers[0].resources.requests["cpu"] for item in pods.items] == [
        "123m"
    ] * 2
    for item in pods.items:
        assert item.metadata.labels["team"] == "vision"
        assert item.metadata.annotations["note"] == "a b"
    api.delete(f"{path}/torch-distributed")

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
from tests.e2e.harness.admission import provide_kubectl, skip_without_mpi
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
    with namespace(cluster) as space, provide_kubectl(space):
        quota = {"metadata": {"name": "all"}, "spec": {"hard": QUOTA}}
        space.core.create_namespaced_resource_quota(space.namespace, quota)
        yield space


def worker_reports(
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
    result = worker_reports(grounds, capsys, kind)
    assert len(result) == 2
    for item in result:
        assert not item["token"]
        assert item["CapBnd"] == 0


@pytest.mark.parametrize("kind", V1)
def test_an_init_container_hands_files_to_its_worker_under_a_quota(
    grounds: Grounds, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    fetch = {"name": "fetch", "command": ["touch", "/shared/fetched"]}
    result = worker_reports(
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
    for item in worker_reports(grounds, capsys, kind, nccl_infiniband="on", **user):
        assert item["CapBnd"] == IPC_LOCK
        assert item["CapEff"] == (IPC_LOCK if root else 0)

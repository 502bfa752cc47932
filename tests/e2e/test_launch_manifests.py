"""Jobs before they are created, what their pods are given, and a job of many workers."""

import copy
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kubernetes import client

from benchmarks.launch_parts import kubelets, load
from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.check_job import check
from kfp_ddp.jobs.follow.sample import STREAMS, sample_note
from kfp_ddp.jobs.identity import identify, metadata
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.run import launch
from kfp_ddp.k8s.api import Api
from kfp_ddp.k8s.resource import PODS
from tests.e2e.harness.admission import provide_kubectl, skip_without_mpi
from tests.e2e.harness.grounds import IMAGE, UID, Grounds
from tests.e2e.harness.leftovers import leftovers
from tests.e2e.harness.namespace import namespace
from tests.e2e.harness.programs import kfp_ddp, kubectl
from tests.e2e.harness.rights import act_as
from tests.launch_specs import specifications, templates

ALL = list(KINDS)
# Without the RayJob, which has one command for all pods. Pipelines run the kinds of torch.
OTHERS = [pytest.param(kind, marks=pytest.mark.smoke) for kind in ("mpijob", "tfjob")]
RUNNING = [*sorted(KINDS.keys() - {"rayjob", "mpijob", "tfjob"}), *OTHERS]
SCRIPT = {"image": "ghcr.io/you/trainer:1.0", "script": "print(1)", "nodes": 2}
WARNING = "3 nvidia.com/gpu a node are requested and no node has more than 0; the job waits"
# Streams of logs, three watches (job, pods, events), the launch itself and its last request.
SOCKETS = STREAMS + 3 + 2
REQUESTS = 60
"""Besides at most one a second."""
RSS_MB = 300
MANY = [
    pytest.param(100, 20, 5, id="100"),
    pytest.param(1000, 50, 20, id="1000", marks=pytest.mark.soak),
]
QUOTA = {"requests.cpu": "1", "limits.cpu": "16", "requests.memory": "4Gi", "limits.memory": "16Gi"}
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"
SAY = f"""
import json, os
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
found = {{"token": os.path.exists("{TOKEN}"), "fetched": os.path.exists("/shared/fetched")}}
found |= {{name: int(status[name], 16) for name in ("CapBnd", "CapEff")}}
line = "SAID " + json.dumps(found) + "\\n"
os.write(1, line.encode())  # at once: mpirun mixes the pieces of its ranks
"""
IPC_LOCK = 1 << 14


@pytest.fixture(scope="module")
def api(cluster: client.ApiClient) -> Iterator[Api]:
    with namespace(cluster) as space:
        yield Api(cluster, space.namespace)


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
    job = spec.job_kind.manifest(spec, meta, "")
    query = {"fieldValidation": "Strict", "dryRun": "All"}
    api.create(KINDS[kind].resource, job, query=query)
    for template in templates(job["spec"]).values() if kind != "trainjob" else ():
        pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)}
        pod["metadata"]["name"] = "of-the-job"
        for named in ("serviceAccountName", "priorityClassName"):  # which would have to exist
            pod["spec"].pop(named, None)
        api.create(PODS, pod, query=query)


def test_the_output_of_manifest_is_valid(api: Api) -> None:
    settings = ("image=a:1", "script=print('$HOME ∑')", "--namespace", api.namespace)
    printed = kfp_ddp("manifest", "pytorchjob", *settings)
    assert printed.returncode == 0, printed.stderr
    dry = ("-n", api.namespace, "apply", "--dry-run=server", "--validate=strict", "-f", "-")
    assert kubectl(*dry, text=printed.stdout).count("created (server dry run)") == 2


@pytest.fixture(scope="module")
def grounds(cluster: client.ApiClient) -> Iterator[Grounds]:
    with namespace(cluster, ours=False) as space:
        yield space


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"claims": {"/data": "nowhere:ro"}}, "claim nowhere does not exist in namespace"),
        ({"scheduler": "kueue", "queue": "nowhere"}, "nowhere"),  # no such queue, or no Kueue
    ],
)
def test_missing_pvc_or_queue_fails_before_a_job_is_created(
    grounds: Grounds, kind: str, fields: dict[str, Any], message: str
) -> None:
    assert message in refused(Api(grounds.api, grounds.namespace), {**fields, "kind": kind})
    assert leftovers(grounds) == set()


@pytest.mark.parametrize("kind", ALL)
def test_missing_rights_fail_before_a_job_is_created(grounds: Grounds, kind: str) -> None:
    with act_as(grounds.api, grounds.namespace, "default") as nobody:
        line = refused(Api(nobody, grounds.namespace), {"kind": kind})
    plural = KINDS[kind].resource.plural
    assert f"no right to list {plural} in namespace {grounds.namespace}" in line
    assert "apply deploy/rbac" in line
    assert leftovers(grounds) == set()


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    "gpus",
    [{"gpus_per_node": 3}, {"resources": {"limits": {"nvidia.com/gpu": "3"}}}],
    ids=["own", "of the task"],
)
def test_missing_gpus_are_a_warning(grounds: Grounds, kind: str, gpus: dict[str, Any]) -> None:
    """Nodes may be added when a job asks for them, so it is not refused."""
    spec = LaunchSpec.create(**SCRIPT, **gpus, kind=kind)
    (warning,) = check(Api(grounds.api, grounds.namespace), spec)
    assert warning.startswith(WARNING)
    assert "\n" not in warning


def refused(api: Api, fields: dict[str, Any]) -> str:
    """The one line that a launch ends with."""
    with pytest.raises(InputError) as error:
        launch(LaunchSpec.create(**{**SCRIPT, **fields}), str(uuid.uuid4()), "train", "", api)
    return str(error.value)


@pytest.fixture
def simulated(cluster: client.ApiClient) -> Iterator[Api]:
    with namespace(cluster, ours=False) as space:
        result = Api(cluster, space.namespace)
        if why := kubelets.find_obstacle(result):
            pytest.skip(why)
        yield result


@pytest.mark.parametrize(("count", "failing", "replaced"), MANY)
def test_first_of_many_failures_is_named_and_usage_is_bounded(
    simulated: Api, tmp_path: Path, count: int, failing: int, replaced: int
) -> None:
    job = load.run_job(simulated, tmp_path, count, failing, replaced)
    lines, logs = job.launch.lines, job.kubelets.logs
    first, nodes = load.number(job.first), count // load.PODS_A_NODE
    assert f"failed: worker-{first}: exit code 1: ValueError: no layer 5; " in lines[-1]
    notes = [line for line in lines if line.startswith("following at most")]
    assert notes == [sample_note(count, simulated.namespace)]
    assert f"[worker-0] {job.pods[0]} is at step 0" in lines
    assert f"[worker-{first}] ValueError: no layer 5" in lines
    assert logs.most_open <= STREAMS
    assert len(logs.requested) <= nodes + failing + replaced
    usage = job.launch.usage
    assert usage.sockets <= SOCKETS, usage
    assert usage.requests <= REQUESTS + usage.seconds, usage
    assert usage.rss_mb <= RSS_MB, usage


@pytest.fixture(scope="module")
def deployed(cluster: client.ApiClient) -> Iterator[Grounds]:
    """A namespace with a quota of everything that may be forgotten, and no LimitRange."""
    with namespace(cluster) as space, provide_kubectl(space):
        quota = {"metadata": {"name": "all"}, "spec": {"hard": QUOTA}}
        space.core.create_namespaced_resource_quota(space.namespace, quota)
        yield space


def worker_reports(
    deployed: Grounds, capsys: pytest.CaptureFixture[str], kind: str, **fields: Any
) -> list[dict[str, Any]]:
    """What each worker of a job saw."""
    options = {"run_as_user": UID, "shm_size": "64Mi", "grace_seconds": 5, "retries": 0, **fields}
    start = ["mpirun"] if kind == "mpijob" else []
    command = [*start, "python3", "-c", SAY]
    spec = LaunchSpec.create(kind=kind, image=IMAGE, command=command, nodes=2, **options)
    launch(spec, str(uuid.uuid4()), "train", "", Api(deployed.api, deployed.namespace))
    lines = capsys.readouterr().out.splitlines()
    return [json.loads(line.partition("SAID ")[2]) for line in lines if "SAID " in line]


@pytest.mark.parametrize("kind", RUNNING)
def test_a_job_with_defaults_runs_under_a_quota_without_a_token(
    deployed: Grounds, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    if kind == "mpijob":
        skip_without_mpi()
    result = worker_reports(deployed, capsys, kind)
    assert len(result) == 2
    for item in result:
        assert not item["token"]
        assert item["CapBnd"] == 0


def test_an_init_container_hands_files_to_its_worker_under_a_quota(
    deployed: Grounds, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch = {"name": "fetch", "command": ["touch", "/shared/fetched"]}
    result = worker_reports(
        deployed,
        capsys,
        "pytorchjob",
        volumes=[{"name": "shared", "emptyDir": {}}],
        volume_mounts=[{"name": "shared", "mountPath": "/shared"}],
        init_containers=[fetch],
        fs_group=UID,
    )
    assert [item["fetched"] for item in result] == [True, True]


@pytest.mark.parametrize(
    ("kind", "root"), [("pytorchjob", True), ("pytorchjob", False), ("trainjob", True)]
)
def test_lock(deployed: Grounds, capsys: pytest.CaptureFixture[str], kind: str, root: bool) -> None:
    user = {"run_as_user": 0, "non_root": False} if root else {}
    for item in worker_reports(deployed, capsys, kind, nccl_infiniband="on", **user):
        assert item["CapBnd"] == IPC_LOCK
        assert item["CapEff"] == (IPC_LOCK if root else 0)

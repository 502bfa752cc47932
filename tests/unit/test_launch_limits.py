"""How long a job may take and wait, told by its own pods, and what a deadline's end is called."""

import copy
import threading
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from kubernetes import client

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.shared.cluster.api import Api, Object
from kfp_ddp.components.shared.launch import check_job as preflight
from kfp_ddp.components.shared.launch import run
from kfp_ddp.components.shared.launch.ending import Ending
from kfp_ddp.components.shared.launch.follow.failure import root_cause
from kfp_ddp.components.shared.launch.follow.follower import Ended, Follower, Limits
from kfp_ddp.components.shared.launch.manifests.kinds import KINDS, State, state
from kfp_ddp.components.shared.launch.manifests.specification import LaunchSpec

RUNNING, CREATED = State("running"), State("created")
SIX = Limits(pending=6)


def ago(seconds: float) -> str:
    return datetime.fromtimestamp(time.time() - seconds, UTC).isoformat()


def pod(name: str, phase: str, age: float, **metadata: Any) -> Object:
    meta = {"name": name, "uid": name, "labels": {}, "creationTimestamp": ago(age), **metadata}
    return {"metadata": meta, "status": {"phase": phase}}


def following(*pods: Object, kind: str = "pytorchjob", age: float = 600) -> Follower:
    """A follower of a job with these pods; deleting the job does nothing."""
    api = Api(client.ApiClient(client.Configuration(host="http://127.0.0.1:1")), "space")
    job = {"metadata": {"name": "x", "uid": "job", "creationTimestamp": ago(age)}}
    follower = Follower(api, KINDS[kind], job, Ending(api, None, threading.Event()), None)
    follower.pods.objects = {each["metadata"]["uid"]: each for each in pods}
    follower.pods.synced.set()
    return follower


def test_a_trainjob_whose_pods_wait_for_a_node_is_given_up() -> None:
    active = {"status": {"jobsStatus": [{"name": "node", "ready": 0, "active": 1}]}}
    follower = following(pod("node-0", "Pending", 7), kind="trainjob")
    follower.said = "x is created: node-0: no node has enough nvidia.com/gpu free"
    with pytest.raises(InputError) as error:
        follower._within(SIX, state(active))
    assert str(error.value) == (
        "node-0 of TrainJob x did not start within pending_minutes=0.1, and the job was deleted: "
        "x is created: node-0: no node has enough nvidia.com/gpu free"
    )


def test_one_pod_that_waits_counts_though_the_others_run() -> None:
    follower = following(pod("master", "Running", 60), pod("worker", "Pending", 60))
    with pytest.raises(InputError, match="worker of PyTorchJob x did not start within"):
        follower._within(SIX, RUNNING)


def test_a_pod_that_was_made_anew_has_its_own_time() -> None:
    follower = following(pod("master", "Running", 600), pod("worker", "Pending", 3))
    follower._within(SIX, RUNNING)
    follower._within(SIX, CREATED)  # the operator says it is restarting
    leaving = pod("worker", "Pending", 600, deletionTimestamp=ago(1))
    following(pod("master", "Running", 600), leaving)._within(SIX, RUNNING)


def test_an_elastic_job_waits_for_no_more_than_its_least_number_of_pods() -> None:
    follower = following(pod("a", "Running", 60), pod("b", "Pending", 60))
    follower._within(Limits(pending=6, least=1), RUNNING)
    with pytest.raises(InputError):
        follower._within(Limits(pending=6, least=2), RUNNING)


def test_a_job_without_pods_counts_from_its_start_once_pods_are_known() -> None:
    follower = following()
    with pytest.raises(InputError, match="PyTorchJob x did not start within"):
        follower._within(SIX, CREATED)
    follower.pods.synced.clear()
    follower._within(SIX, CREATED)
    lost = following()
    lost.known = {"a": pod("a", "Running", 600)}
    lost._within(SIX, CREATED)


def test_neither_a_queue_nor_the_pods_that_it_took_back_count() -> None:
    waiting = pod("worker", "Pending", 600)
    following(waiting)._within(SIX, State("queued"))
    taken = following(waiting, pod("worker-again", "Pending", 2))
    taken.taken = {"worker"}
    taken._within(SIX, CREATED)


@pytest.mark.parametrize(
    ("code", "reason", "retryable"), [(137, "OOMKilled", False), (139, "Error", True)]
)
def test_an_elastic_job_whose_pods_crash_again_and_again_is_over(
    code: int, reason: str, retryable: bool
) -> None:
    """Its operator would make them anew without an end."""
    follower = following(pod("worker", "Running", 5))
    follower.jobs.objects = {"job": follower.job}
    follower.jobs.synced.set()
    stamp = {"exitCode": code, "reason": reason, "finishedAt": ago(9)}
    crash = pod("worker", "Failed", 10)
    crash["status"]["containerStatuses"] = [{"name": "pytorch", "state": {"terminated": stamp}}]
    drained = pod("worker", "Failed", 10)
    ended = {"name": "pytorch", "state": {"terminated": {**stamp, "exitCode": 143}}}
    drained["status"]["containerStatuses"] = [ended]
    evicted = copy.deepcopy(crash)
    evicted["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True"}]
    follower.over = [crash, drained, evicted, drained]
    assert not follower._look(Limits(crashes=2)).over
    follower.over.append(crash)
    assert not follower._look(Limits()).over
    found = follower._look(Limits(crashes=2))
    assert (found.phase, found.message) == ("failed", "its pods crashed 2 times")
    assert follower.worn == [crash, crash]
    assert root_cause(follower.worn, found.message).retryable is retryable


PREEMPTED = (
    '{"exit_code": 143, "rank": -1, "error": "stopped by SIGTERM", "retryable": true, "time": 1}'
)


class Cluster:
    """Takes everything; the faults are what its controllers do."""

    namespace = "space"

    def __init__(self) -> None:
        self.deleted: list[str] = []

    def another(self) -> "Cluster":
        return self

    def patient(self, request: Any) -> Any:
        return request()

    def call(self, method: str, path: str, *given: Any, **more: Any) -> Object:
        if method == "DELETE":
            self.deleted.append(path)
        return {"items": []}


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(preflight, "check", lambda *given: [])
    monkeypatch.delenv("KFP_POD_NAME", raising=False)
    return Cluster()


def ended(monkeypatch: pytest.MonkeyPatch, *conditions: Object) -> list[int]:
    """Let every attempt end with a pod that was stopped; the attempts that are made."""
    stopped = {"exitCode": 143, "message": PREEMPTED, "finishedAt": "2026-01-01T00:00:00Z"}
    containers = [{"name": "node", "state": {"terminated": stopped}}]
    status = {"phase": "Failed", "containerStatuses": containers}
    left = {"metadata": {"name": "x-node-0", "uid": "u", "labels": {}}, "status": status}
    job = {"metadata": {"name": "x"}, "status": {"conditions": list(conditions)}}
    made: list[int] = []

    def follow(jobs: Any, attempt: int, *given: Any) -> Ended:
        made.append(attempt)
        found = state(job)
        return Ended(found if found.over else State("failed", "restarted"), job, [left])

    monkeypatch.setattr(run, "_follow", follow)
    return made


def launch(api: Any, **fields: Any) -> str:
    spec = LaunchSpec.create(kind="trainjob", image="a:1", command=["x"], **fields)
    with pytest.raises(InputError) as error:
        run.launch(spec, "run", "train", "", api)
    return str(error.value)


def test_a_deadline_that_the_operator_enforced_is_told_and_not_tried_again(
    api: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks left as if they were preempted, which would be worth another hour."""
    reason = {"reason": "DeadlineExceeded", "message": "TrainJob exceeded its active deadline"}
    made = ended(monkeypatch, {"type": "Failed", "status": "True", **reason})
    said = launch(api, deadline_minutes=60)
    assert said.endswith(
        "failed: it took longer than deadline_minutes=60 and was ended; its checkpoints are kept"
    )
    assert made == [0]


def test_a_job_that_is_deleted_leaves_no_pod_to_ask(
    api: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(monkeypatch)
    assert launch(api, retries=0).endswith("stopped by SIGTERM; log above")
    assert len(api.deleted) == 1
    ended(monkeypatch, {"type": "Failed", "status": "True"})
    assert launch(api, retries=0).endswith("log above, or kubectl logs -n space x-node-0")
    assert len(api.deleted) == 1

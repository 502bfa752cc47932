"""How long a job may take and wait, told by its own pods, and what a deadline's end is called."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.errors import JobError, RunCancelledError
from kfp_ddp.core.failure import Failure
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.datasets.access import using
from kfp_ddp.jobs import check_job, run
from kfp_ddp.jobs.ending import Ending
from kfp_ddp.jobs.failure import cause_in_pods
from kfp_ddp.jobs.follow.decisions import (
    Limits,
    Pods,
    Snapshot,
    Verdict,
    cannot_start,
    out_of_time,
    verdict,
)
from kfp_ddp.jobs.follow.follower import Outcome
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.kinds.base import State
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import ApiError, Object
from kfp_ddp.k8s.pods import Reason, Wait
from kfp_ddp.storage.leases import folder_holders
from tests import cluster
from tests.cluster import FakeApi

NOW = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
SIX = Limits(pending=6)
RUNNING: Object = {"status": {"conditions": [{"type": "Running", "status": "True"}]}}
QUEUED: Object = {"spec": {"runPolicy": {"suspend": True}}}


def ago(seconds: float) -> str:
    return datetime.fromtimestamp(NOW - seconds, UTC).isoformat()


def pod(name: str, phase: str, age: float, **metadata: Any) -> Object:
    meta = {"name": name, "uid": name, "labels": {}, "creationTimestamp": ago(age), **metadata}
    return {"metadata": meta, "status": {"phase": phase}}


def look(
    *existing: Object, job: Any = None, age: float = 600, kind: str = "pytorchjob", **seen: Any
) -> Snapshot:
    """A look at a job of this age with these pods; `seen` is what else was seen of pods."""
    meta = {"name": "x", "uid": "job", "creationTimestamp": ago(age)}
    present = {item["metadata"]["uid"]: item for item in existing}
    pods = Pods(KINDS[kind], NOW - age, present, **seen)
    return Snapshot(KINDS[kind], {"metadata": meta, **(job or {})}, pods, True, now=NOW, clock=0)


def late(seen: Snapshot, limits: Limits = SIX) -> str:
    return out_of_time(seen, limits, "x is created: no node is free")


def test_a_trainjob_whose_pods_wait_for_a_node_is_given_up() -> None:
    active = {"status": {"jobsStatus": [{"name": "node", "ready": 0, "active": 1}]}}
    assert late(look(pod("node-0", "Pending", 7), job=active, kind="trainjob")) == (
        "node-0 of TrainJob x did not start within pending_minutes=0.1, and the job was deleted: "
        "x is created: no node is free"
    )


WORKER = pod("worker", "Pending", 600)
HALF = look(pod("a", "Running", 60), pod("b", "Pending", 60), job=RUNNING)
THREE = look(pod("a", "Pending", 7), pod("b", "Pending", 9), pod("c", "Pending", 8))
LEAVING = pod("worker", "Pending", 600, deletionTimestamp=ago(1))


@pytest.mark.parametrize(
    ("seen", "limits", "who"),
    [
        # One pod that waits counts though the others run.
        (HALF, SIX, "b of "),
        # A pod that was made anew has its own time, also while the operator says it restarts.
        (look(pod("a", "Running", 600), pod("b", "Pending", 3), job=RUNNING), SIX, None),
        (look(pod("a", "Running", 600), pod("b", "Pending", 3)), SIX, None),
        (look(pod("a", "Running", 600), LEAVING, job=RUNNING), SIX, None),
        # A job without pods counts from its start, unless it had some.
        (look(), SIX, ""),
        (look(age=3), SIX, None),
        (look(job=RUNNING), SIX, None),
        (look(LEAVING), SIX, None),
        (look(lost=(pod("a", "Running", 600),)), SIX, None),
        (look(ended=(pod("a", "Failed", 600),)), SIX, None),
        # Neither a queue nor the pods that it took back count.
        (look(WORKER, job=QUEUED), SIX, None),
        (look(WORKER, pod("again", "Pending", 2), preempted=frozenset({"worker"})), SIX, None),
        (look(WORKER), Limits(), None),
        # A job without pods counts once pods are known.
        (replace(look(), pods_listed=False), SIX, None),
        # Of pods that wait the oldest is named.
        (THREE, SIX, "b of "),
        # A time that is just up is not over.
        (look(pod("a", "Pending", 6)), SIX, None),
        (look(pod("a", "Running", 6), age=60), Limits(deadline=60), None),
    ],
)
def test_a_long_wait_ends_the_job(seen: Snapshot, limits: Limits, who: str | None) -> None:
    line = late(seen, limits)
    if who is None:
        assert line == ""
    else:
        assert line.startswith(f"{who}PyTorchJob x did not start within pending_minutes=0.1")


def test_a_transient_reason_lasts_for_pending_minutes() -> None:
    seen = replace(look(), clock=1000)
    stands = [Wait("pod a", Reason("quota", "exceeded quota"), 900)]
    line = "PyTorchJob x cannot start and was deleted: pod a: exceeded quota"
    assert cannot_start(seen, Limits(), stands) == line
    assert cannot_start(seen, Limits(pending=99), stands) == line
    assert cannot_start(seen, Limits(pending=101), stands) == ""
    assert cannot_start(replace(seen, clock=950), Limits(), stands) == ""
    over = look(job={"status": {"conditions": [{"type": "Failed", "status": "True"}]}})
    assert cannot_start(replace(over, clock=1000), Limits(), stands) == ""


@pytest.mark.parametrize(
    ("job", "age", "over"), [(RUNNING, 61, True), (RUNNING, 59, False), (QUEUED, 9999, False)]
)
def test_a_deadline_counts_outside_of_the_queue(job: Object, age: float, over: bool) -> None:
    line = late(look(pod("a", "Running", 5), job=job, age=age), Limits(deadline=60))
    expected = "PyTorchJob x took longer than deadline_minutes=1 and was deleted; its checkpoints"
    assert line.startswith(expected) if over else line == ""


@pytest.mark.parametrize(
    ("code", "reason", "retryable"), [(137, "OOMKilled", False), (139, "Error", True)]
)
def test_a_job_whose_pods_are_replaced_ends_after_crashes(
    code: int, reason: str, retryable: bool
) -> None:
    """Its operator would make them anew without an end."""
    crash, drained = (cluster.pod("worker", cluster.ended(c, reason=reason)) for c in (code, 143))
    conditions = [{"type": "DisruptionTarget", "status": "True"}]
    evicted = cluster.pod("worker", cluster.ended(code, reason=reason), conditions=conditions)
    gone = (crash, drained, evicted, drained)
    worker = pod("worker", "Running", 5)
    assert verdict(look(worker, ended=gone), Limits(crashes=2)) is None
    seen = look(worker, ended=(*gone, crash))
    assert verdict(seen, Limits()) is None
    result = verdict(seen, Limits(crashes=2))
    assert result is not None
    assert (result.state, result.given_up) == (State("failed", "its pods crashed 2 times"), True)
    assert result.reasons == (crash, crash)
    assert cause_in_pods(result.reasons, result.state.message).retryable is retryable


def test_a_failed_job_is_not_given_up() -> None:
    job = {"status": {"conditions": [{"type": "Failed", "status": "True", "message": "why"}]}}
    result = verdict(look(job=job), Limits(crashes=1))
    assert result is not None
    assert (result.state, result.given_up) == (State("failed", "why"), False)
    assert late(look(job=job, age=9999), Limits(deadline=1, pending=1)) == ""


PREEMPTED = Failure(143, -1, "stopped by SIGTERM", retryable=True, time=1).to_json()


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    monkeypatch.setattr(check_job, "check", lambda *options: [])
    monkeypatch.delenv("KFP_POD_NAME", raising=False)
    return FakeApi()


def ended(monkeypatch: pytest.MonkeyPatch, *conditions: Object) -> list[int]:
    """Let every attempt end with a pod that was stopped; the attempts that are made."""
    left = cluster.pod("x-node-0", cluster.ended(143, PREEMPTED))
    created: list[int] = []

    def follow(jobs: Any, attempt: int, ending: Any, run_dir: Any, trains: Any, limits: Any) -> Any:
        created.append(attempt)
        seen = look(job={"status": {"conditions": list(conditions)}}, kind="trainjob")
        end = verdict(seen, limits) or Verdict(State("failed", "restarted"), given_up=True)
        failure = end.failure or cause_in_pods([left], end.state.message)
        return Outcome(end.state, end.given_up, failure=failure, job=seen.job, pods=[left])

    monkeypatch.setattr(run, "_follow", follow)
    return created


def launch(api: FakeApi, **fields: Any) -> str:
    spec = LaunchSpec.create(kind="trainjob", image="a:1", command=["x"], **fields)
    with pytest.raises(JobError) as error:
        run.launch(spec, "run", "train", "", api)
    return str(error.value)


def test_an_operators_deadline_is_final(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks left as if they were preempted, which would be worth another hour."""
    reason = {"reason": "DeadlineExceeded", "message": "TrainJob exceeded its active deadline"}
    created = ended(monkeypatch, {"type": "Failed", "status": "True", **reason})
    line = launch(api, deadline_minutes=60)
    assert line.endswith(
        "failed: it took longer than deadline_minutes=60 and was ended; its checkpoints are kept"
    )
    assert created == [0]
    assert "longer than the deadline of its runtime" in launch(api)


def test_preemption_and_bad_node(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    failure, failed = Failure(1, -1, "stalled", retryable=True), State("failed")
    preempted = Outcome(failed, failure=failure, preempted=True)
    on_a_bad_node = Outcome(failed, failure=failure, node="b")
    outcomes = iter([preempted, on_a_bad_node, Outcome(State("succeeded"))])
    attempts = []

    def follow(jobs: Any, attempt: int, *_: Any) -> Outcome:
        attempts.append((attempt, jobs.avoided))
        return next(outcomes)

    monkeypatch.setattr(run, "_follow", follow)
    spec = LaunchSpec.create(image="a:1", command=["x"], retries=1)
    assert run.launch(spec, "run", "train", "", api).failure is None
    assert attempts == [(0, frozenset()), (1, frozenset()), (2, frozenset({"b"}))]


def test_terminated_run_ends(api: FakeApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Argo may end the pod of the exit handler, too."""
    monkeypatch.setattr(Ending, "cancelled", lambda self: True)
    spec = LaunchSpec.create(image="a:1", command=["x"])
    with pytest.raises(RunCancelledError), using("run", tmp_path):
        run.launch(spec, "run", "train", "", api)
    jobs = spec.job_kind.resource.path("space")
    assert [path.rpartition("/")[0] for path in api.deleted()] == [jobs]
    assert folder_holders(RunFolder(tmp_path).leases) == []


def test_no_job_is_created_without_its_owner(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would end it with its run."""
    monkeypatch.setenv("KFP_POD_NAME", "step")
    api.objects["/api/v1/namespaces/space/pods/step"] = 503
    with pytest.raises(ApiError, match="503"):
        run.launch(LaunchSpec.create(image="a:1", command=["x"]), "run", "train", "", api)


def test_a_deleted_job_leaves_no_pod_to_ask(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    ended(monkeypatch)
    assert launch(api, retries=0).endswith("stopped by SIGTERM; log above")
    assert len(api.deleted()) == 1
    ended(monkeypatch, {"type": "Failed", "status": "True"})
    assert launch(api, retries=0).endswith("log above, or kubectl logs -n space x-node-0")
    assert len(api.deleted()) == 1

from typing import Any

import pytest

from kfp_ddp.components.launch.api import ApiError
from kfp_ddp.components.launch.kinds import State, state
from kfp_ddp.components.launch.pending import explain

JOB: dict[str, Any] = {"metadata": {"uid": "u", "name": "job", "labels": {}}}


class Answers:
    """Stands where an API would be asked about claims and queues."""

    namespace = "space"

    def __init__(self, answer: dict[str, Any] | None = None) -> None:
        self.answer = answer

    def call(self, method: str, path: str) -> dict[str, Any]:
        if self.answer is None:
            raise ApiError(404, "NotFound", "not there")
        return self.answer


def pending(status: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "job-master-0", "labels": {}},
        "spec": spec,
        "status": {"phase": "Pending", **status},
    }


def unscheduled(message: str, **spec: Any) -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "message": message}
    return pending({"conditions": [condition]}, **spec)


def waiting(reason: str, message: str) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return pending({"containerStatuses": [{"name": "c", "image": "a:1", "state": state}]})


@pytest.mark.parametrize(
    ("pod", "says"),
    [
        (
            unscheduled("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
            "no node has enough nvidia.com/gpu free",
        ),
        (
            unscheduled("0/3 nodes are available: 3 node(s) had untolerated taint {gpu: }"),
            "nodes are tainted and not tolerated",
        ),
        (
            unscheduled("3 node(s) didn't match Pod's node affinity/selector"),
            "no node fits its selector or affinity",
        ),
        (waiting("ImagePullBackOff", "not found"), "cannot pull a:1 (ImagePullBackOff: not found)"),
        (waiting("CreateContainerConfigError", 'secret "s" not found'), "cannot start"),
        (
            unscheduled("x", volumes=[{"persistentVolumeClaim": {"claimName": "images"}}]),
            "claim images does not exist",
        ),
    ],
)
def test_a_pending_pod_is_explained(pod: dict[str, Any], says: str) -> None:
    api: Any = Answers()
    assert says in explain(JOB, State("created"), [pod], [], api)


def test_an_unbound_claim_is_named_with_its_class() -> None:
    api: Any = Answers({"status": {"phase": "Pending"}, "spec": {"storageClassName": "late"}})
    pod = unscheduled("x", volumes=[{"persistentVolumeClaim": {"claimName": "images"}}])
    said = explain(JOB, State("created"), [pod], [], api)
    assert said.endswith("claim images is not bound (StorageClass late)")


def test_a_queued_job_knows_its_place() -> None:
    def workload(uid: str, at: int) -> dict[str, Any]:
        meta = {"ownerReferences": [{"uid": uid}], "creationTimestamp": f"2026-11-21T10:00:0{at}Z"}
        reserved = {"type": "QuotaReserved", "status": "False", "message": "no quota for 8 GPUs"}
        return {
            "metadata": meta,
            "spec": {"queueName": "team"},
            "status": {"conditions": [reserved]},
        }

    api: Any = Answers({"items": [workload("other", 1), workload("u", 2), workload("late", 3)]})
    job = {"metadata": {**JOB["metadata"], "labels": {"kueue.x-k8s.io/queue-name": "team"}}}
    said = explain(job, State("queued"), [], [], api)
    assert said == "waiting in queue team, behind 1 other job(s) (no quota for 8 GPUs)"


def test_states_of_both_kinds_of_jobs() -> None:
    def job(*kinds: str, **more: Any) -> dict[str, Any]:
        conditions = [{"type": kind, "status": "True"} for kind in kinds]
        return {"status": {"conditions": conditions, **more.get("status", {})}, "spec": more}

    assert state({}).phase == "created"
    assert state(job("Created", "Running")).phase == "running"
    assert state(job("Created", "Running", "Succeeded")).phase == "succeeded"
    assert state(job("Complete")).phase == "succeeded"
    assert state(job("Failed")).phase == "failed"
    assert state(job("Created", suspend=True)).phase == "queued"
    assert state(job("Created", runPolicy={"suspend": True})).phase == "queued"
    assert state(job(status={"jobsStatus": [{"name": "node", "active": 2}]})).phase == "running"

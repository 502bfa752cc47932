"""When a service is ready, and what blocks it, by its status and pods."""

from typing import Any

import pytest

from kfp_ddp.models.serving.rollout import SPEC
from kfp_ddp.models.serving.wait import (
    CRASHES,
    REFUSED,
    crashed,
    of_spec,
    ready,
    reasons,
    waits_for,
)

NEW, OLD = "new", "old"


def pod(spec: str, *, answers: bool = True, **more: Any) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": str(answers)}]
    metadata = {"name": f"pod-{spec}", "labels": {SPEC: spec}, **more.pop("metadata", {})}
    return {"metadata": metadata, "status": {"conditions": conditions, "phase": "Running", **more}}


def condition(name: str, status: str, reason: str = "", message: str = "") -> dict[str, str]:
    return {"type": name, "status": status, "reason": reason, "message": message}


def service(*conditions: dict[str, str], **status: Any) -> dict[str, Any]:
    listed = list(conditions) or [condition("Ready", "True")]
    body = {"metadata": {"name": "shop"}, "spec": {}}
    return {**body, "status": {"conditions": listed, **status}}


def knative(percent: int, created: str = "2", latest: str = "2") -> dict[str, Any]:
    traffic = [
        {"revisionName": latest, "percent": percent, "latestRevision": True, "tag": "latest"},
        {"revisionName": "1", "percent": 100 - percent, "latestRevision": False, "tag": "prev"},
    ]
    revisions = {"latestCreatedRevision": created, "latestReadyRevision": latest}
    return service(components={"predictor": {"traffic": traffic, **revisions}})


def trial() -> dict[str, Any]:
    """Return a service that does not answer, with a predictor that is tried beside it."""
    canary = [{"predictor": {"name": "trial", "labels": {SPEC: NEW}}}]
    return service(condition("Ready", "False")) | {"spec": {"canary": canary}}


LEAVING = pod(OLD, metadata={"deletionTimestamp": "2026-11-22T00:00:00Z"})


@pytest.mark.parametrize(
    ("status", "pods", "answer"),
    [
        (service(), [pod(NEW)], True),
        (service(), [pod(NEW, answers=False)], False),
        (service(), [], False),
        (service(), [pod(OLD)], False),  # Ready is of the previous model
        (service(), [pod(NEW), pod(OLD)], False),
        (service(), [pod(NEW), LEAVING], True),
        (service(), [pod(NEW), pod(OLD, phase="Failed")], True),
        (service(condition("Ready", "False")), [pod(NEW)], False),
        (service(condition("Ready", "Unknown")), [pod(NEW)], False),
        (trial(), [pod(NEW), pod(OLD)], True),
        (trial(), [pod(NEW, answers=False), pod(OLD)], False),
        (knative(10), [pod(NEW), pod(OLD)], True),
        (knative(10), [pod(OLD)], False),
        (knative(0), [pod(NEW), pod(OLD)], False),
        (knative(100), [pod(NEW), pod(OLD)], False),
        (knative(10, created="3"), [pod(NEW), pod(OLD)], False),
        ({"metadata": {"name": "shop"}, "spec": {}}, [pod(NEW)], False),
    ],
)
def test_it_is_ready_when_requests_reach_the_new_model(
    status: dict[str, Any], pods: list[dict[str, Any]], answer: bool
) -> None:
    assert ready(status, pods, NEW, 10) == answer


def restarted(where: str, restarts: int, code: int = 1) -> dict[str, Any]:
    ended = {"terminated": {"exitCode": code}}
    return {where: [{"name": "kserve-container", "restartCount": restarts, "lastState": ended}]}


@pytest.mark.parametrize("where", ["containerStatuses", "initContainerStatuses"])
def test_a_container_that_exits_repeatedly_is_found(where: str) -> None:
    once = pod(NEW, **restarted(where, CRASHES - 1))
    assert crashed([once]) is None
    crash = crashed([once, pod(OLD, **restarted(where, CRASHES, 137))])
    assert crash == ("pod-old", "kserve-container", 137)
    assert of_spec([pod(OLD), pod(NEW), LEAVING], NEW) == [pod(NEW)]


BAD_URI = {"reason": "InvalidPredictorSpec", "message": "StorageURI not supported"}


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (service(), ""),
        (
            service(modelStatus={"transitionStatus": "InvalidSpec", "lastFailureInfo": BAD_URI}),
            "InvalidPredictorSpec: StorageURI not supported",
        ),
        (service(modelStatus={"transitionStatus": "UpToDate", "lastFailureInfo": BAD_URI}), ""),
        (service(modelStatus={"transitionStatus": "InProgress"}), ""),
        (
            service(condition("PredictorReady", "False", "RevisionFailed", "no such image")),
            "RevisionFailed: no such image",
        ),
        (service(condition("PredictorReady", "False", "MinimumReplicasUnavailable", "starts")), ""),
        (service(condition("PredictorReady", "Unknown", "RevisionFailed", "x")), ""),
        (service(condition("IngressReady", "False", "NotReconciled", "x")), ""),
    ],
)
def test_a_refusal_by_kserve_is_a_reason(status: dict[str, Any], text: str) -> None:
    result = [(who, why.kind, why.text) for who, why in reasons(status, [pod(NEW)]).items()]
    assert result == ([("KServe", REFUSED, text)] if text else [])


def test_the_reason_of_a_pod_replaces_that_of_kserve() -> None:
    waiting = {"reason": "ImagePullBackOff", "message": "not found"}
    blocked = pod(NEW, containerStatuses=[{"image": "x:1", "state": {"waiting": waiting}}])
    status = service(condition("PredictorReady", "False", "RevisionFailed", "x"))
    ((name, reason),) = reasons(status, [blocked]).items()
    assert (name, reason.kind) == ("pod-new", "image refused")


def test_waits_are_described() -> None:
    assert waits_for(service(), []) == "KServe to make its pods"
    assert waits_for(service(), [pod(NEW)]) == "its pods"
    stopped = {**condition("Stopped", "False"), "severity": "Info"}
    starts = service(condition("PredictorReady", "False", "", "no pod yet"), stopped)
    assert waits_for(starts, [pod(NEW)]) == "PredictorReady: no pod yet"
    pending = pod(NEW)
    pending["status"]["phase"] = "Pending"
    pending["status"]["conditions"] = [condition("PodScheduled", "False", "", "no node has room")]
    assert waits_for(starts, [pending]) == "pod-new: cannot be scheduled (no node has room)"

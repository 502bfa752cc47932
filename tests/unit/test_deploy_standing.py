"""When a service is ready with a model, and what stands against it, by status and pods alone."""

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
    told = list(conditions) or [condition("Ready", "True")]
    return {"metadata": {"name": "shop"}, "status": {"conditions": told, **status}}


def knative(percent: int, created: str = "2", latest: str = "2") -> dict[str, Any]:
    traffic = [
        {"revisionName": latest, "percent": percent, "latestRevision": True, "tag": "latest"},
        {"revisionName": "1", "percent": 100 - percent, "latestRevision": False, "tag": "prev"},
    ]
    revisions = {"latestCreatedRevision": created, "latestReadyRevision": latest}
    return service(components={"predictor": {"traffic": traffic, **revisions}})


LEAVING = pod(OLD, metadata={"deletionTimestamp": "2026-11-22T00:00:00Z"})


@pytest.mark.parametrize(
    ("found", "pods", "answer"),
    [
        (service(), [pod(NEW)], True),
        (service(), [pod(NEW, answers=False)], False),
        (service(), [], False),
        (service(), [pod(OLD)], False),  # Ready is that of what was before
        (service(), [pod(NEW), pod(OLD)], False),
        (service(), [pod(NEW), LEAVING], True),
        (service(), [pod(NEW), pod(OLD, phase="Failed")], True),
        (service(condition("Ready", "False")), [pod(NEW)], False),
        (service(condition("Ready", "Unknown")), [pod(NEW)], False),
        (knative(10), [pod(NEW), pod(OLD)], True),
        (knative(10), [pod(OLD)], False),
        (knative(0), [pod(NEW), pod(OLD)], False),
        (knative(100), [pod(NEW), pod(OLD)], False),
        (knative(10, created="3"), [pod(NEW), pod(OLD)], False),
        ({"metadata": {"name": "shop"}}, [pod(NEW)], False),
    ],
)
def test_it_is_ready_when_requests_reach_the_new_model(
    found: dict[str, Any], pods: list[dict[str, Any]], answer: bool
) -> None:
    assert ready(found, pods, NEW, 10) == answer


def of(where: str, restarts: int, code: int = 1) -> dict[str, Any]:
    ended = {"terminated": {"exitCode": code}}
    return {where: [{"name": "kserve-container", "restartCount": restarts, "lastState": ended}]}


@pytest.mark.parametrize("where", ["containerStatuses", "initContainerStatuses"])
def test_a_container_that_ends_again_and_again_is_seen(where: str) -> None:
    calm = pod(NEW, **of(where, CRASHES - 1))
    assert crashed([calm]) is None
    found = crashed([calm, pod(OLD, **of(where, CRASHES, 137))])
    assert found == ("pod-old", "kserve-container", 137)


def test_only_pods_of_the_new_model_count() -> None:
    assert of_spec([pod(OLD), pod(NEW), LEAVING], NEW) == [pod(NEW)]


BAD_URI = {"reason": "InvalidPredictorSpec", "message": "StorageURI not supported"}


@pytest.mark.parametrize(
    ("found", "said"),
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
def test_what_kserve_has_against_it_is_told(found: dict[str, Any], said: str) -> None:
    told = reasons(found, [pod(NEW)])
    assert [(who, why.kind, why.text) for who, why in told.items()] == (
        [("KServe", REFUSED, said)] if said else []
    )


def test_a_pod_that_cannot_start_says_more_than_kserve() -> None:
    waiting = {"reason": "ImagePullBackOff", "message": "not found"}
    held = pod(NEW, containerStatuses=[{"image": "x:1", "state": {"waiting": waiting}}])
    status = service(condition("PredictorReady", "False", "RevisionFailed", "x"))
    (found,) = reasons(status, [held]).items()
    assert (found[0], found[1].kind) == ("pod-new", "image refused")


def test_what_it_waits_for_is_in_words() -> None:
    assert waits_for(service(), []) == "KServe to make its pods"
    assert waits_for(service(), [pod(NEW)]) == "its pods"
    starts = service(condition("PredictorReady", "False", "", "no pod yet"))
    assert waits_for(starts, [pod(NEW)]) == "PredictorReady: no pod yet"
    pending = pod(NEW)
    pending["status"]["phase"] = "Pending"
    pending["status"]["conditions"] = [condition("PodScheduled", "False", "", "no node has room")]
    assert waits_for(starts, [pending]) == "pod-new: cannot be scheduled (no node has room)"

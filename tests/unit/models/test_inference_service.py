"""InferenceServices for a bundle, and whether one is ready."""

from typing import Any

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.models.inference_service import (
    OPENVINO,
    OURS,
    RUNTIMES,
    TRITON,
    manifest,
    served_name,
    storage_uri,
)
from kfp_ddp.rollout.rollout import SPEC
from kfp_ddp.rollout.wait import (
    CRASHES,
    REFUSED,
    crashed,
    pods_of_spec,
    ready,
    reasons,
    waits_for,
)

BUNDLE = "gs://models/exports/flowers/0123456789ab"
NEW, OLD = "new", "old"


def make(runtime: str, **more: Any) -> dict[str, Any]:
    image: dict[str, Any] = {"image": "ghcr.io/you/server:1"} if runtime == OURS else {}
    return manifest("shop", BUNDLE, "flowers", runtime, **image, **more)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_manifest_has_what_it_was_given(runtime: str) -> None:
    limits = {"limits": {"cpu": 2, "memory": "4Gi"}}
    service = make(runtime, service_account="reader", resources=limits)
    assert service["metadata"] == {"name": "shop"}
    predictor = service["spec"]["predictor"]
    assert predictor["serviceAccountName"] == "reader"
    server = predictor.get("model") or predictor["containers"][0]
    assert server["resources"] == limits


def test_each_runtime_gets_its_part_of_the_bundle() -> None:
    triton = make(TRITON)["spec"]["predictor"]["model"]
    assert triton["storageUri"] == f"{BUNDLE}/serving"
    assert (triton["protocolVersion"], triton["runtime"]) == ("v2", TRITON)
    openvino = make(OPENVINO)["spec"]["predictor"]["model"]
    assert openvino["storageUri"] == f"{BUNDLE}/serving/flowers"
    assert openvino["args"] == ['--plugin_config={"INFERENCE_PRECISION_HINT":"f32"}']
    ours = make(OURS)["spec"]["predictor"]["containers"][0]
    assert {"name": "STORAGE_URI", "value": BUNDLE} in ours["env"]
    assert ours["command"][:3] == ["kfp-ddp", "serve", "/mnt/models"]


def test_openvino_model_server_names_the_model_after_the_service() -> None:
    names = {runtime: served_name("shop", "flowers", runtime) for runtime in RUNTIMES}
    assert names == {TRITON: "flowers", OPENVINO: "shop", OURS: "flowers"}


def test_addresses_are_translated_for_kserve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert storage_uri("s3://b/models/x/") == "s3://b/models/x"
    assert storage_uri("pvc://claim/runs/1/bundle") == "pvc://claim/runs/1/bundle"
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "shop")
    assert storage_uri("az://models/x") == "https://shop.blob.core.windows.net/models/x"


@pytest.mark.parametrize(
    ("bundle", "why"),
    [
        ("az://models/x", "set AZURE_STORAGE_ACCOUNT"),
        ("./bundle", "KServe cannot read ./bundle"),
        ("gs://", "KServe cannot read gs:"),
    ],
)
def test_others_are_refused(monkeypatch: pytest.MonkeyPatch, bundle: str, why: str) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT", raising=False)
    with pytest.raises(InputError, match=why):
        storage_uri(bundle)


def test_an_unknown_runtime_and_ours_without_an_image_are_refused() -> None:
    with pytest.raises(InputError, match="runtime is 'triton': give one of kserve-tritonserver"):
        make("triton")
    with pytest.raises(InputError, match="needs an image"):
        manifest("shop", BUNDLE, "flowers", OURS)


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


def knative(created: str, latest: str) -> dict[str, Any]:
    revisions = {"latestCreatedRevision": created, "latestReadyRevision": latest}
    return service(components={"predictor": revisions})


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
        (trial(), [pod(NEW), pod(OLD)], True),
        (trial(), [pod(NEW, answers=False), pod(OLD)], False),
        (knative("2", "2"), [pod(NEW), pod(OLD)], True),  # the old revision stays for a while
        (knative("2", "2"), [pod(OLD)], False),
        (knative("2", "1"), [pod(NEW), pod(OLD)], False),
        (knative("2", ""), [pod(NEW)], False),
        ({"metadata": {"name": "shop"}, "spec": {}}, [pod(NEW)], False),
    ],
)
def test_it_is_ready_when_requests_reach_the_new_model(
    status: dict[str, Any], pods: list[dict[str, Any]], answer: bool
) -> None:
    assert ready(status, pods, NEW) == answer


def restarted(where: str, restarts: int, code: int = 1) -> dict[str, Any]:
    ended = {"terminated": {"exitCode": code}}
    return {where: [{"name": "kserve-container", "restartCount": restarts, "lastState": ended}]}


@pytest.mark.parametrize("where", ["containerStatuses", "initContainerStatuses"])
def test_a_container_that_exits_repeatedly_is_found(where: str) -> None:
    once = pod(NEW, **restarted(where, CRASHES - 1))
    assert crashed([once]) is None
    crash = crashed([once, pod(OLD, **restarted(where, CRASHES, 137))])
    assert crash == ("pod-old", "kserve-container", 137)
    assert pods_of_spec([pod(OLD), pod(NEW), LEAVING], NEW) == [pod(NEW)]


BAD: dict[str, Any] = {"lastFailureInfo": {"reason": "InvalidPredictorSpec", "message": "no"}}


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (service(), ""),
        (
            service(modelStatus=BAD | {"transitionStatus": "InvalidSpec"}),
            "InvalidPredictorSpec: no",
        ),
        (service(modelStatus=BAD | {"transitionStatus": "UpToDate"}), ""),
        (service(modelStatus={"transitionStatus": "InProgress"}), ""),
        (service(condition("PredictorReady", "False", "RevisionFailed", "x")), "RevisionFailed: x"),
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

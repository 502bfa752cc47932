"""How far a service is with its newest predictor, by its status and its pods; pure."""

from collections.abc import Iterable
from typing import NamedTuple

from kfp_ddp.core.text import one_line
from kfp_ddp.k8s.api import Object
from kfp_ddp.k8s.objects import condition, conditions, every_container, has_ended, label
from kfp_ddp.k8s.pods import FINAL_AFTER, Reason, container_reason, waiting_reason
from kfp_ddp.models.serving.rollout import SPEC

CRASHES = 3
"""Ends of one container after which it is not waited for another."""
CRASHING, REFUSED = "crash", "refused by KServe"
LIMITS = {**FINAL_AFTER, CRASHING: 0.0, REFUSED: 60.0}
"""How long, in seconds, a reason may stand before it ends the rollout."""
# A Deployment says so until its first pod is ready.
_STARTING = ("MinimumReplicasUnavailable", "Deploying", "ContainerMissing", "Uninitialized")
_OF_PREDICTOR = ("PredictorReady", "PredictorConfigurationReady", "LatestDeploymentReady")
_FAULTY = ("InvalidSpec", "BlockedByFailedLoad")


class Crashed(NamedTuple):
    """A container that ends again and again."""

    pod: str
    container: str
    code: int


def of_spec(pods: Iterable[Object], spec: str) -> list[Object]:
    """The pods of the predictor with this label that are not being deleted."""
    return [pod for pod in pods if label(pod, SPEC) == spec and not _leaving(pod)]


def ready(service: Object, pods: Iterable[Object], spec: str, percent: int) -> bool:
    """Whether requests for the predictor with this label reach it, and it alone.

    With Knative that is its newest revision, which has this share of the requests; without, what
    was before has to be gone. `status.observedGeneration` is that of what KServe makes, not ours.
    """
    pods = list(pods)
    answers = any(condition(pod, "Ready") for pod in of_spec(pods, spec))
    if not condition(service, "Ready") or not answers:
        return False
    predictor = component(service)
    if not (traffic := predictor.get("traffic")):
        return all(label(pod, SPEC) == spec or _leaving(pod) for pod in pods)
    newest = predictor.get("latestCreatedRevision")
    shares = [int(each.get("percent") or 0) for each in traffic if each.get("latestRevision")]
    return newest == predictor.get("latestReadyRevision") and max(shares, default=0) == percent


def component(service: Object) -> Object:
    """What the service's status says of its predictor."""
    components = (service.get("status") or {}).get("components") or {}
    found: Object = components.get("predictor") or {}
    return found


def crashed(pods: Iterable[Object]) -> Crashed | None:
    """The first container that ended too often."""
    for pod in pods:
        for each in every_container(pod):
            ended = (each.get("lastState") or {}).get("terminated") or {}
            if int(each.get("restartCount") or 0) >= CRASHES and ended:
                code = int(ended.get("exitCode") or 0)
                return Crashed(pod["metadata"]["name"], each["name"], code)
    return None


def reasons(service: Object, pods: Iterable[Object]) -> dict[str, Reason]:
    """What keeps each pod from starting, and KServe from making one, by the name of whose it is."""
    found = {pod["metadata"]["name"]: why for pod in pods if (why := container_reason(pod))}
    said = _refusal(service)
    return found or ({"KServe": Reason(REFUSED, one_line(said))} if said else {})


def _refusal(service: Object) -> str:
    """What KServe or Knative have against a predictor, '' for nothing."""
    model = (service.get("status") or {}).get("modelStatus") or {}
    last = model.get("lastFailureInfo") or {}
    if model.get("transitionStatus") in _FAULTY and (last.get("message") or last.get("reason")):
        return f"{last.get('reason', 'refused')}: {last.get('message', '')}".strip(": ")
    for each in conditions(service):
        reason = str(each.get("reason") or "")
        if each["type"] in _OF_PREDICTOR and each["status"] == "False" and reason not in _STARTING:
            return f"{reason or each['type']}: {each.get('message', '')}".strip(": ")
    return ""


def waits_for(service: Object, pods: Iterable[Object]) -> str:
    """What it waits for, in words, where nothing stands against it."""
    pods = list(pods)
    for pod in pods:
        if (reason := waiting_reason(pod)) and reason.kind:
            return f"{pod['metadata']['name']}: {reason.text}"
    said = [
        f"{each['type']}: {each.get('message') or each.get('reason') or 'not yet'}"
        for each in conditions(service)
        if each["status"] != "True"
    ]
    return (one_line("; ".join(said)) or "its pods") if pods else "KServe to make its pods"


def _leaving(pod: Object) -> bool:
    return has_ended(pod) or "deletionTimestamp" in pod["metadata"]

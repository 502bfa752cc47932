"""How far a service is with its newest predictor, by its status and its pods; pure."""

from collections.abc import Iterable
from typing import NamedTuple

from kfp_ddp.components.shared.cluster.api import Object, short
from kfp_ddp.components.shared.launch.follow.standing import FINAL_AFTER, Reason, of_containers
from kfp_ddp.components.shared.rollout import SPEC

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
    return [pod for pod in pods if _spec(pod) == spec and not _leaving(pod)]


def ready(service: Object, pods: Iterable[Object], spec: str, percent: int) -> bool:
    """Whether requests for the predictor with this label reach it, and it alone.

    With Knative that is its newest revision, which has this share of the requests; without, what
    was before has to be gone. `status.observedGeneration` is that of what KServe makes, not ours.
    """
    pods, status = list(pods), service.get("status") or {}
    if not _true(status, "Ready") or not any(map(_answers, of_spec(pods, spec))):
        return False
    predictor = component(service)
    if not (traffic := predictor.get("traffic")):
        return all(_spec(pod) == spec or _leaving(pod) for pod in pods)
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
        for each in _containers(pod):
            ended = (each.get("lastState") or {}).get("terminated") or {}
            if int(each.get("restartCount") or 0) >= CRASHES and ended:
                code = int(ended.get("exitCode") or 0)
                return Crashed(pod["metadata"]["name"], each["name"], code)
    return None


def reasons(service: Object, pods: Iterable[Object]) -> dict[str, Reason]:
    """What keeps each pod from starting, and KServe from making one, by the name of whose it is."""
    found = {pod["metadata"]["name"]: why for pod in pods if (why := of_containers(pod))}
    said = _refusal(service.get("status") or {})
    return found or ({"KServe": Reason(REFUSED, short(said))} if said else {})


def _refusal(status: Object) -> str:
    """What KServe or Knative have against a predictor, '' for nothing."""
    model = status.get("modelStatus") or {}
    last = model.get("lastFailureInfo") or {}
    if model.get("transitionStatus") in _FAULTY and (last.get("message") or last.get("reason")):
        return f"{last.get('reason', 'refused')}: {last.get('message', '')}".strip(": ")
    for each in status.get("conditions") or []:
        reason = str(each.get("reason") or "")
        if each["type"] in _OF_PREDICTOR and each["status"] == "False" and reason not in _STARTING:
            return f"{reason or each['type']}: {each.get('message', '')}".strip(": ")
    return ""


def waits_for(service: Object, pods: Iterable[Object]) -> str:
    """What it waits for, in words, where nothing stands against it."""
    pods = list(pods)
    for pod in pods:
        for each in (pod.get("status") or {}).get("conditions") or []:
            if each["type"] == "PodScheduled" and each["status"] == "False":
                return f"{pod['metadata']['name']}: {short(str(each.get('message', '')))}"
    said = [
        f"{each['type']}: {each.get('message') or each.get('reason') or 'not yet'}"
        for each in (service.get("status") or {}).get("conditions") or []
        if each["status"] != "True"
    ]
    return (short("; ".join(said)) or "its pods") if pods else "KServe to make its pods"


def _spec(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get(SPEC, ""))


def _leaving(pod: Object) -> bool:
    over = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    return over or "deletionTimestamp" in pod["metadata"]


def _answers(pod: Object) -> bool:
    return _true(pod.get("status") or {}, "Ready")


def _true(status: Object, name: str) -> bool:
    conditions = status.get("conditions") or []
    return any(each["type"] == name and each["status"] == "True" for each in conditions)


def _containers(pod: Object) -> list[Object]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]

"""The state of a pod: why it waits, how long that may last, why it failed, and its images."""

import contextlib
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple

from kfp_ddp import __version__
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import one_line
from kfp_ddp.k8s.api import Api, ApiError, Object, own_pod
from kfp_ddp.k8s.objects import (
    all_container_statuses,
    annotation,
    condition,
    conditions,
    container_statuses,
    init_container_statuses,
    number_of,
    part,
    phase,
    text_of,
)

NODE_NAME = "workflows.argoproj.io/node-name"
"""The annotation of a step's pod with its node of the Workflow."""
ATTEMPTS = re.compile(r"\(\d+\)")
# Seconds after which a reason to wait ends the job. Any other reason, such as a missing node, PVC
# or queue, may go away tomorrow: only pending_minutes limits it.
FINAL_AFTER = {
    "invalid image name": 5.0,
    "image not on the node": 60.0,
    "image refused": 60.0,  # the registry responds that it has no such image, or no right to it
    "image": 20 * 60.0,  # the registry does not respond: it may be down
    "configuration": 60.0,  # a missing Secret or ConfigMap, a refused user
    "container": 5 * 60.0,  # the container runtime fails: its node may be overloaded
    "crashes": 5.0,
    "forbidden": 60.0,
    "quota": 60.0,  # or pending_minutes if set: other jobs may release quota
}
TRANSIENT = ("quota", "image")

STARTS = ("", "ContainerCreating", "PodInitializing")
"""Reasons of a container that starts as it should; any other prevents it."""
# Of Kubernetes and the operators; KubeRay has an event for each object, and for a refused job.
NOT_CREATED = ("FailedCreate", "FailedToCreate", "InvalidRay")
CRASHES = 5  # the back-off is then minutes long
LOGIN = "log in with image_pull_secrets"
# Words about a failed pull, the kind of wait, and the remedy; the first that match count.
PULLS = (
    ("too ?many ?requests", "image", f"the registry limits pulls: {LOGIN}"),
    ("x509|certificate", "image refused", "let the nodes trust the registry's certificate"),
    ("no space left|disk quota", "image", "the node's disk is full: free it, or enlarge it"),
    ("authori|authenti|denied|forbidden", "image refused", f"correct its name, or {LOGIN}"),
    ("no match for platform", "image refused", "build it for the platform of the nodes"),
    ("not found|not exist|manifest unknown|invalid ref", "image refused", "correct its name"),
    ("time-?out|timed out|such host|connect|EOF|unavail", "image", "let nodes reach the registry"),
)
NO_CAUSE = ("image", "check its name and image_pull_secrets")
# containerd names the image again in each, and the cause, which comes last, is beyond one_line.
WRAPPED = re.compile(r'.*failed to (pull and unpack image|resolve reference) "[^"]*": ', re.DOTALL)
FORBIDDEN = re.compile(r"forbidden|denied the request|is invalid", re.IGNORECASE)

LOST_NODE = ("Evicted", "NodeLost", "Shutdown", "NodeShutdown", "Terminated", "Preempting")
# The pod's own limit, or what its node lacks by its configuration, as in "pod requires AppArmor".
UNFIT = re.compile("DeadlineExceeded|requires|forbidden|not supported|cannot enforce", re.I)
DISRUPTED = "disrupted"
REFUSED = "refused"
OUT_OF_MEMORY = "out of memory"


class Reason(NamedTuple):
    """Why a pod waits or failed: a kind, such as a key of FINAL_AFTER, and one line."""

    kind: str
    text: str


STARTING = Reason("", "starting")


def waiting_reason(pod: Object) -> Reason | None:
    """Return why a pod does not run yet, of kind '' if it starts as it should; None if it runs."""
    if phase(pod) != "Pending":
        return None
    if unplaced := condition(pod, "PodScheduled", "False"):
        return Reason("unschedulable", unschedulable(str(unplaced.get("message", ""))))
    if reason := container_reason(pod):
        return reason
    for container in init_container_statuses(pod):
        if "running" in part(container, "state"):
            return Reason("", f"init container {container['name']} runs")
    return STARTING if container_statuses(pod) else Reason("", "waiting for a node")


def unschedulable(message: str) -> str:
    """Return in one line what the scheduler's message means."""
    short = one_line(message)
    lacking = sorted(set(re.findall(r"Insufficient ([\w./-]*\w)", message)))
    if lacking:
        return f"no node has enough {', '.join(lacking)} free ({short})"
    if gap := sorted(set(re.findall(r"([\w./-]+):\{\{", message))):  # of coscheduling
        return f"the nodes have not enough {', '.join(gap)} free for all pods at once ({short})"
    if "taint" in message:
        return f"nodes are tainted and not tolerated ({short})"
    if "affinity" in message or "selector" in message:
        return f"no node fits its selector or affinity ({short})"
    return f"cannot be scheduled ({short})"


def container_reason(pod: Object) -> Reason | None:
    """Return why a container of a pod cannot start, by its status; None if nothing prevents it."""
    reasons = map(_reason_of_container, all_container_statuses(pod))
    return next(filter(None, reasons), None)


def _reason_of_container(container: Object) -> Reason | None:
    waiting = part(container, "state", "waiting")
    why = text_of(waiting, "reason")
    if why in STARTS:
        return None
    cause = WRAPPED.sub("", text_of(waiting, "message"))
    message = one_line(cause)
    detail = f"({why}: {message})" if message else f"({why})"
    image = str(container.get("image"))
    pull = f"cannot pull {image} {detail}"
    if why == "InvalidImageName":
        return Reason("invalid image name", f"{pull}; correct it")
    if why == "ErrImageNeverPull":
        return Reason("image not on the node", f"{pull}; let image_pull_policy pull it")
    if "Pull" in why or "Registry" in why:
        kind, remedy = _pull_remedy(cause.replace(image, ""))
        return Reason(kind, f"{pull}; {remedy}")
    kind, hint = _start_failure(container, why)
    if "runAsNonRoot" in message:
        hint = "; set run_as_user, or non_root=false"
    return Reason(kind, f"cannot start {detail}{hint}")


def _pull_remedy(cause: str) -> tuple[str, str]:
    """Return the kind of wait after a failed pull, and its remedy."""
    # Names and addresses may have any words.
    text = re.sub(r'"[^"]*"', "", cause)
    for words, kind, remedy in PULLS:
        if re.search(words, text, re.IGNORECASE):
            return kind, remedy
    return NO_CAUSE


def _start_failure(container: Object, why: str) -> tuple[str, str]:
    """Return the kind of wait of a container that does not start, and how it ended before."""
    kind = "configuration" if why == "CreateContainerConfigError" else "container"
    ended = part(container, "lastState", "terminated")
    if not ended:
        return kind, ""
    if number_of(container, "restartCount") >= CRASHES:
        kind = "crashes"
    last = one_line(text_of(ended, "message") or text_of(ended, "reason"))
    return kind, f"; it ended with exit code {ended.get('exitCode')}: {last}".rstrip(": ")


def creation_reason(events: Iterable[Object]) -> Reason | None:
    """Return why pods are not created, by the newest event about it."""
    failures = [event for event in events if text_of(event, "reason").startswith(NOT_CREATED)]
    newest = max(failures, key=_time_of, default=None)
    return refusal(str(newest.get("message", ""))) if newest else None


def _time_of(event: Object) -> str:
    return text_of(event, "lastTimestamp") or text_of(event, "eventTime")


def refusal(text: str) -> Reason:
    """Return the reason for which the API server does not accept a pod."""
    message = one_line(text)
    kind = "forbidden" if FORBIDDEN.search(message) else "no pods"
    return Reason("quota" if "quota" in message else kind, message)


@dataclass(frozen=True)
class Wait:
    """The reason for which a pod waits, since when on the monotonic clock."""

    who: str
    reason: Reason
    since: float

    def __str__(self) -> str:
        return f"{self.who}: {self.reason.text}"


def track(
    before: Mapping[str, Wait], reasons: Mapping[str, Reason], clock: float
) -> dict[str, Wait]:
    """Return the waits by pod since first seen; a failed pull and its back-off are one wait."""
    waits = {who: Wait(who, reason, clock) for who, reason in reasons.items()}
    for who in waits.keys() & before.keys():
        earlier = before[who]
        reason = reasons[who]
        if earlier.reason.kind.removesuffix(" refused") == reason.kind.removesuffix(" refused"):
            # A back-off does not repeat the cause of the failed pull before it.
            no_cause = reason.text.endswith(NO_CAUSE[1])
            waits[who] = earlier if no_cause else replace(earlier, reason=reason)
    return waits


def expired(waits: Iterable[Wait], clock: float, pending: float) -> Wait | None:
    """Return the oldest wait past its limit, `pending` seconds for some if set; else None."""
    limits = dict(FINAL_AFTER)
    if pending:
        limits |= dict.fromkeys(TRANSIENT, pending)
    return oldest(
        wait for wait in waits if clock - wait.since >= limits.get(wait.reason.kind, math.inf)
    )


def oldest(waits: Iterable[Wait]) -> Wait | None:
    """Return the longest wait; None for none."""
    return min(waits, key=lambda wait: wait.since, default=None)


def failure_reason(pod: Object) -> Reason | None:
    """Return why Kubernetes ended a pod: DISRUPTED if a retry may help, REFUSED if not; or None."""
    if disruption := condition(pod, "DisruptionTarget"):
        text = disruption.get("message") or disruption.get("reason") or "the pod was disrupted"
        return Reason(DISRUPTED, one_line(text))
    status = part(pod, "status")
    why = text_of(status, "reason")
    text = one_line(f"{why}: {status.get('message', '')}".rstrip(": "))
    if why in LOST_NODE:
        return Reason(DISRUPTED, text)
    endings = terminations(pod)
    if any(ended.get("reason") == "OOMKilled" for ended in endings):
        return Reason(OUT_OF_MEMORY, "out of memory (OOMKilled)")
    if phase(pod) == "Failed" and why:
        return Reason(_kind_of_failure(pod, why, text), text)
    return _reason_of_exit(endings)


def _kind_of_failure(pod: Object, why: str, text: str) -> str:
    # A pod that ran failed by itself, unless its time was over.
    if why != "DeadlineExceeded" and not is_rejected(pod):
        return "failed"
    return REFUSED if UNFIT.search(text) else DISRUPTED


def _reason_of_exit(endings: Iterable[Object]) -> Reason | None:
    """Return the reason of the first container that failed and has one other than Error."""
    reasons = (text_of(ended, "reason") for ended in endings if ended.get("exitCode"))
    known = (reason for reason in reasons if reason not in ("", "Error"))
    first = next(known, "")
    return Reason("failed", first) if first else None


def is_rejected(pod: Object) -> bool:
    """Return whether a node did not accept the pod: it failed, and none of its containers ran."""
    states = [part(status, "state") for status in all_container_statuses(pod)]
    return phase(pod) == "Failed" and not any("terminated" in state for state in states)


def terminations(pod: Object) -> list[Object]:
    """Return how the containers of a pod ended, of those that have."""
    states = [part(status, "state") for status in container_statuses(pod)]
    return [state["terminated"] for state in states if "terminated" in state]


def has_started(pod: Object, container: str) -> bool:
    """Return whether a container has a log."""
    for status in container_statuses(pod):
        if status["name"] == container:
            state = part(status, "state")
            return (
                "running" in state or "terminated" in state or number_of(status, "restartCount") > 0
            )
    return False


def is_pending(pod: Object) -> bool:
    """Return whether no container of the pod has started."""
    return phase(pod) in ("", "Pending")


def writes_no_more(pod: Object) -> bool:
    """Return whether the pod writes nothing now and, if it ended, never will."""
    return phase(pod) in ("Succeeded", "Failed", "Pending")


def created(pod: Object) -> float:
    """Return when the pod was created, in seconds since 1970."""
    return datetime.fromisoformat(pod["metadata"]["creationTimestamp"]).timestamp()


def seconds_to_stop(pod: Object) -> float:
    """Return how long a pod that is being deleted may still run; 0 for any other."""
    if "deletionTimestamp" not in pod["metadata"] or writes_no_more(pod):
        return 0
    return number_of(part(pod, "spec"), "terminationGracePeriodSeconds")


def ended_at(pod: Object) -> str:
    """Return when the first container of the pod ended, as sortable text; '~' for unknown."""
    times = (ended["finishedAt"] for ended in terminations(pod) if ended.get("finishedAt"))
    return min(times, default="~")


def has_failed(pod: Object) -> bool:
    """Return whether the pod, or a container of it, failed."""
    return phase(pod) == "Failed" or any(_exit_codes(pod))


def has_crashed(pod: Object) -> bool:
    """Return whether the pod's own program failed, not stopped or removed from its node."""
    disrupted = any(item["type"] == "DisruptionTarget" for item in conditions(pod))
    return not disrupted and any(code not in (0, 143) for code in _exit_codes(pod))


def was_restarted(pod: Object) -> bool:
    """Return whether a container of the pod was restarted."""
    return any(part(status, "lastState", "terminated") for status in container_statuses(pod))


def _exit_codes(pod: Object) -> list[int]:
    return [number_of(ended, "exitCode") for ended in terminations(pod)]


def node_of(pod: Object) -> str:
    """Return the node of the Workflow that a pod is an attempt of; '' for a pod of no Workflow."""
    return ATTEMPTS.sub("", annotation(pod, NODE_NAME))


def task_of(node: str) -> str:
    """Return the task's name in its pipeline: the last part of a node, without what KFP adds."""
    named = [part for part in node.split(".") if part != "executor"]
    return named[-1].removesuffix("-driver")


def step_pods() -> list[Object]:
    """Return the pod of this step; none outside of KFP, or if it cannot be read."""
    with contextlib.suppress(InputError, ApiError):
        if os.environ.get("KFP_POD_NAME") and (pod := own_pod(Api.connect())):
            return [pod]
    return []


def record_images(workers: Iterable[Object] = (), containers_of: Collection[str] = ()) -> Object:
    """Return our version, and the images of the step and of containers of its workers."""
    return {
        "version": __version__,
        "step": used_images(step_pods(), ("main",)),
        "workers": used_images(workers, containers_of),
    }


def used_images(pods: Iterable[Object], of: Collection[str]) -> list[dict[str, str]]:
    """Return name and digest (as a tag may move) of each image that these containers ran."""
    # A mapping without values: each image once, in their order.
    images: dict[tuple[str, str], None] = {}
    for pod in pods:
        names = {item["name"]: item["image"] for item in pod["spec"]["containers"]}
        for status in container_statuses(pod):
            digest = text_of(status, "imageID").rpartition("@")[2]
            if digest and status["name"] in of:
                images[names[status["name"]], digest] = None
    return [{"image": image, "digest": digest} for image, digest in images]

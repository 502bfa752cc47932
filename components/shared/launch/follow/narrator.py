"""What is told of a job besides its logs: where it is, and why it does not run yet.

That may be scheduling, quota, an image, a claim or a queue.
"""

import re
from collections.abc import Sequence

from kfp_ddp.components.shared.cluster.api import Api, ApiError, Object, core, short
from kfp_ddp.components.shared.launch import kueue
from kfp_ddp.components.shared.launch.follow.decisions import Look
from kfp_ddp.components.shared.launch.follow.printer import Printer
from kfp_ddp.components.shared.launch.job_state import State
from kfp_ddp.components.shared.launch.specification.kinds import pod_title

EXPLAIN_SECONDS = 2.0
# A queue may hold a job for days: what does not change there is asked for less and less often.
QUEUE_SECONDS = 30.0
PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
MOUNT = {
    "FailedAttachVolume": "a ReadWriteOnce claim is on one node at a time: use ReadWriteMany, or "
    "publish=clone or snapshot for data",
    "FailedMount": "check the claims, secrets and maps that the pod mounts",
}
STARTING = "starting"
CONFIG = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")


class Narrator:
    """Prints where a job is and what it waits for, when that is new."""

    def __init__(self, printer: Printer, api: Api) -> None:
        self.printer, self.api = printer, api
        self.line = ""
        """What was told last."""
        self.phase = ""
        self.pause = EXPLAIN_SECONDS
        """How long what a queue says is not asked for again."""
        self.asked_at = 0.0

    def tell(self, look: Look, events: Sequence[Object]) -> None:
        """Print it if some time has passed since it was asked for."""
        phase = look.state.phase
        pause = self.pause if phase == self.phase == "queued" else EXPLAIN_SECONDS
        if look.state.over or look.clock - self.asked_at < pause:
            return
        self.asked_at = look.clock
        pods = list(look.pods.present.values())
        reason = explain(look.job, look.state, pods, list(events), self.api)
        line = f"{look.name} is {phase}" + (f": {reason}" if reason else "")
        if line == self.line:
            self.pause = min(self.pause * 2, QUEUE_SECONDS)
            return
        self.printer.say(line)
        self.line, self.phase, self.pause = line, phase, EXPLAIN_SECONDS


def explain(job: Object, state: State, pods: list[Object], events: list[Object], api: Api) -> str:
    """One line on what a job waits for; '' when all its pods run.

    Its `events` are none where they may not be read. Claims, queues and the events of pods are
    asked for only while a pod waits for them.
    """
    if state.phase == "queued":
        return kueue.waiting(job, api)
    reasons: dict[str, list[str]] = {}
    found = {pod["metadata"]["name"]: _of_pod(pod, api) for pod in pods}
    unmounted = _unmounted(api) if STARTING in found.values() else {}
    for pod in pods:
        name = pod["metadata"]["name"]
        reason = unmounted.get(name, STARTING) if found[name] == STARTING else found[name]
        if reason:
            reasons.setdefault(reason, []).append(pod_title(pod))
    if reasons:
        return "; ".join(f"{', '.join(sorted(who))}: {why}" for why, who in reasons.items())
    if not pods:
        warnings = [e for e in events if e.get("type") == "Warning"]
        if warnings:
            return f"no pods yet: {short(str(warnings[-1].get('message', '')))}"
        return "no pods yet: the operator has not made them"
    return ""


def _of_pod(pod: Object, api: Api) -> str:
    status = pod.get("status", {})
    if status.get("phase") != "Pending":
        return ""
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _unschedulable(pod, str(condition.get("message", "")), api)
    every = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    for container in every:
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason, message = waiting.get("reason", ""), short(str(waiting.get("message", "")))
        if reason in PULL:
            said = f"cannot pull {container['image']} ({reason}: {message})"
            return f"{said}; check its name and image_pull_secrets"
        if reason in CONFIG:
            hint = "; set run_as_user, or non_root=false" if "runAsNonRoot" in message else ""
            return f"cannot start ({reason}: {message}){hint}"
    for container in status.get("initContainerStatuses") or []:
        if "running" in (container.get("state") or {}):
            return f"init container {container['name']} runs"
    return STARTING if status.get("containerStatuses") else "waiting for a node"


def _unmounted(api: Api) -> dict[str, str]:
    """Why a volume cannot be mounted, which only events tell, by the name of the pod."""
    query = {"fieldSelector": "involvedObject.kind=Pod,type=Warning"}
    try:
        events = api.call("GET", core(api.namespace, "events"), query=query)["items"]
    except ApiError:
        return {}
    return {
        event["involvedObject"]["name"]: f"{short(str(event.get('message', '')))}; "
        + MOUNT[event["reason"]]
        for event in events
        if event.get("reason") in MOUNT
    }


def _unschedulable(pod: Object, message: str, api: Api) -> str:
    for volume in pod["spec"].get("volumes") or []:
        claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
        if claim and (problem := claim_problem(api, claim)):
            return problem
    lacking = sorted(set(re.findall(r"Insufficient ([\w./-]*\w)", message)))
    if lacking:
        return f"no node has enough {', '.join(lacking)} free ({short(message)})"
    if "taint" in message:
        return f"nodes are tainted and not tolerated ({short(message)})"
    if "affinity" in message or "selector" in message:
        return f"no node fits its selector or affinity ({short(message)})"
    return f"cannot be scheduled ({short(message)})"


def claim_problem(api: Api, claim: str) -> str:
    """What is wrong with a claim; '' when it is bound or binds when a pod uses it."""
    try:
        found = api.call("GET", core(api.namespace, "persistentvolumeclaims", claim))
    except ApiError as error:
        return f"claim {claim} does not exist" if error.status == 404 else ""
    phase = (found.get("status") or {}).get("phase", "")
    if phase == "Lost":
        return f"claim {claim} has lost its volume"
    if phase == "Pending":
        storage = found["spec"].get("storageClassName") or "no class"
        return f"claim {claim} is not bound (StorageClass {storage})"
    return ""

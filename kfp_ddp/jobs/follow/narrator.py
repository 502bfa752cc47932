"""Messages on the phase of a job, and on why it waits: scheduling, quota, image, PVC or queue."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache

from kfp_ddp.core.text import one_line
from kfp_ddp.jobs import kueue
from kfp_ddp.jobs.follow.decisions import Snapshot
from kfp_ddp.jobs.follow.printer import Printer
from kfp_ddp.jobs.gangs import gang_waiting
from kfp_ddp.jobs.kinds import pod_title
from kfp_ddp.jobs.kinds.base import State
from kfp_ddp.k8s.api import Api, ApiError, Object
from kfp_ddp.k8s.objects import condition, part, phase
from kfp_ddp.k8s.pods import STARTING, Reason, Wait, creation_reason, refusal, track, waiting_reason
from kfp_ddp.k8s.resource import CLAIMS, EVENTS, PODS, STORAGE_CLASSES

EXPLAIN_SECONDS = 2.0
# A queue may suspend a job for days, so it is asked less and less often.
QUEUE_SECONDS = 30.0
# The pods of a large job start one by one: it is reported less often, with some of their names.
MANY_PODS = 16
MANY_SECONDS = 10.0
NAMED = 3
# The status of a pod contains the excluded reasons, which come once for each pod.
OF_PODS = "involvedObject.kind=Pod,type=Warning,reason!=FailedScheduling,reason!=BackOff"
UNMOUNTED = {"fieldSelector": OF_PODS, "limit": "500"}
MOUNT = {
    "FailedAttachVolume": "a ReadWriteOnce claim is on one node at a time: use ReadWriteMany, or "
    "publish=clone or snapshot for data",
    "FailedMount": "check the claims, secrets and maps that the pod mounts",
}
NO_PODS = "no pods yet"
OF_CLAIMS = re.compile("volume|storage ?class|free storage", re.IGNORECASE)
"""Words of the scheduler about PVCs."""


class StatusPrinter:
    """Prints the phase of a job and what it waits for, when it changes."""

    def __init__(self, printer: Printer, api: Api) -> None:
        self.printer = printer
        self.api = api
        self.line = ""
        """The last message."""
        self.phase = ""
        self.pause = EXPLAIN_SECONDS
        """Pause between two requests about the queue."""
        self.asked_at = self.printed_at = 0.0
        self.waits: dict[str, Wait] = {}
        """Why pods cannot start; after the end of the job, as before it."""

    def report(self, snapshot: Snapshot, events: Sequence[Object] | None, pods: int = 0) -> None:
        """Print the present state if it is due; `pods` is the expected number of pods."""
        now = snapshot.state.phase
        still_queued = now == self.phase == "queued"
        pause = self.pause if still_queued else EXPLAIN_SECONDS
        if snapshot.state.over or snapshot.clock - self.asked_at < pause:
            return
        self.asked_at = snapshot.clock
        reasons = explain(snapshot.job, snapshot.state, snapshot.pods.own, events, self.api, pods)
        problems = {who: reason for who, reason in reasons.items() if reason.kind}
        self.waits = track(self.waits, problems, snapshot.clock)
        line = f"{snapshot.name} is {now}"
        if reasons:
            line += f": {summary(reasons)}"
        if line == self.line:
            self.pause = min(self.pause * 2, QUEUE_SECONDS)
            return
        soon = snapshot.clock - self.printed_at < MANY_SECONDS
        only_pods_changed = len(reasons) > MANY_PODS and now == self.phase
        if only_pods_changed and soon:
            return
        self.printed_at = snapshot.clock
        self.printer.say(line)
        self.line = line
        self.phase = now
        self.pause = EXPLAIN_SECONDS


def explain(
    job: Object,
    state: State,
    pods: Sequence[Object],
    events: Sequence[Object] | None,
    api: Api,
    expected: int = 0,
) -> dict[str, Reason]:
    """Return what each pod, or the job as '', waits for; `events` is None without the right."""
    if state.phase == "queued":
        return {"": Reason("", kueue.waiting(job, api))}
    reasons = _explain_pods(pods, api)
    if len(pods) >= max(1, expected):
        return reasons
    refused = _refused(job, api) if events is None else creation_reason(events)
    present = f"{len(pods)} of {expected} pods" if pods else NO_PODS
    if refused:
        reasons[present] = refused
    elif not pods:
        gang = gang_waiting(api, job)
        reasons[present] = Reason("", gang or "the operator has not created them")
    return reasons


def _explain_pods(pods: Sequence[Object], api: Api) -> dict[str, Reason]:
    """Return what the pods wait for, by their titles."""
    problem = cache(lambda claim: claim_problem(api, claim))  # pods have their claims in common
    waiting = {pod["metadata"]["name"]: _explain_pod(pod, problem) for pod in pods}
    # Events are asked for only where the status of a pod does not say more.
    unmounted = _unmounted(api) if STARTING in waiting.values() else {}
    reasons: dict[str, Reason] = {}
    for pod in pods:
        name = pod["metadata"]["name"]
        reason = waiting[name]
        if reason == STARTING:
            reason = unmounted.get(name, STARTING)
        if reason:
            reasons[pod_title(pod)] = reason
    return reasons


def summary(reasons: Mapping[str, Reason]) -> str:
    """Return in one line what a job waits for, grouped by reason; '' for nothing."""
    by_text: dict[str, list[str]] = {}
    for who, reason in reasons.items():
        by_text.setdefault(reason.text, []).append(who)
    lines = []
    for text, names in by_text.items():
        who = ", ".join(sorted(names))
        if len(names) > MANY_PODS:
            who = f"{', '.join(sorted(names)[:NAMED])} and {len(names) - NAMED:,} more"
        lines.append(f"{who}: {text}" if who else text)
    return "; ".join(lines)


def _refused(job: Object, api: Api) -> Reason | None:
    """Return why the API server refuses a pod of a Training Operator job, by a dry run."""
    replicas: list[Object] = []
    for field, value in job["spec"].items():
        if field.endswith("ReplicaSpecs"):
            replicas += value.values()
    for replica in replicas:
        template = replica["template"]
        meta = {**template["metadata"], "generateName": f"{job['metadata']['name']}-"}
        try:
            api.create(PODS, {**template, "metadata": meta}, query={"dryRun": "All"})
        except ApiError as error:
            # "cannot create" is the step's own lack of a right, and says nothing of the operator's.
            if error.status == 403 and "cannot create" not in error.message:
                return refusal(error.message)
    return None


def _explain_pod(pod: Object, claim_problem: Callable[[str], Reason | None]) -> Reason | None:
    """Return why a pod waits, with what is wrong with its PVCs if it cannot be scheduled."""
    reason = waiting_reason(pod)
    if reason is None or reason.kind != "unschedulable":
        return reason
    scheduled = condition(pod, "PodScheduled", "False") or {}
    is_about_claims = OF_CLAIMS.search(str(scheduled.get("message")))
    for volume in pod["spec"].get("volumes") or ():
        claim = part(volume, "persistentVolumeClaim").get("claimName")
        problem = claim_problem(claim) if claim else None
        if problem is None:
            continue
        # A claim of kind '' is only not bound yet, which matters if the scheduler says so.
        if problem.kind or is_about_claims:
            return Reason(reason.kind, f"{problem.text}; {reason.text}")
    return reason


def _unmounted(api: Api) -> dict[str, Reason]:
    """Return why volumes cannot be mounted, by pod name; only events show it."""
    try:
        events = api.list_objects(EVENTS, UNMOUNTED)
    except ApiError:
        return {}
    reasons: dict[str, Reason] = {}
    for event in events:
        remedy = MOUNT.get(event.get("reason", ""))
        if remedy:
            message = one_line(str(event.get("message", "")))
            reasons[event["involvedObject"]["name"]] = Reason("mount", f"{message}; {remedy}")
    return reasons


def claim_problem(api: Api, claim: str) -> Reason | None:
    """Return what is wrong with a PVC, of kind '' if it may bind once its pod has a node."""
    try:
        pvc = api.get(CLAIMS, claim)
    except ApiError:
        return None
    if pvc is None:
        return Reason("claim", f"claim {claim} does not exist")
    if phase(pvc) == "Lost":
        return Reason("claim", f"claim {claim} has lost its volume")
    if phase(pvc) != "Pending":
        return None
    name = pvc["spec"].get("storageClassName")
    kind = ""
    with suppress(ApiError):
        storage = api.get(STORAGE_CLASSES, name) if name else None
        if storage is None or storage.get("volumeBindingMode") == "Immediate":
            kind = "claim"  # it should be bound by now
    return Reason(kind, f"claim {claim} is not bound (StorageClass {name or 'no class'})")

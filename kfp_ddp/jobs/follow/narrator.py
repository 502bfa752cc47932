"""What is told of a job besides its logs: where it is, and why it does not run yet.

That may be scheduling, quota, an image, a claim or a queue.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from kfp_ddp.core.text import one_line
from kfp_ddp.jobs import kueue
from kfp_ddp.jobs.follow.decisions import Look
from kfp_ddp.jobs.follow.logs import Printer
from kfp_ddp.jobs.kinds import pod_title
from kfp_ddp.jobs.kinds.base import State
from kfp_ddp.k8s.api import Api, ApiError, Object, core
from kfp_ddp.k8s.objects import phase
from kfp_ddp.k8s.pods import (
    STARTING,
    Reason,
    Wait,
    creation_reason,
    refusal,
    track,
    waiting_reason,
)

EXPLAIN_SECONDS = 2.0
# A queue may hold a job for days: what does not change there is asked for less and less often.
QUEUE_SECONDS = 30.0
# The pods of a large job start one by one, which is told less often, and with some of their names.
MANY_PODS, MANY_SECONDS, NAMED = 16, 10.0, 3
# The reasons that are left out stand in the status of the pods, and come once for each of them.
OF_PODS = "involvedObject.kind=Pod,type=Warning,reason!=FailedScheduling,reason!=BackOff"
UNMOUNTED = {"fieldSelector": OF_PODS, "limit": "500"}
MOUNT = {
    "FailedAttachVolume": "a ReadWriteOnce claim is on one node at a time: use ReadWriteMany, or "
    "publish=clone or snapshot for data",
    "FailedMount": "check the claims, secrets and maps that the pod mounts",
}
NO_PODS = "no pods yet"


class Narrator:
    """Prints where a job is and what it waits for, when that is new."""

    def __init__(self, printer: Printer, api: Api) -> None:
        self.printer, self.api = printer, api
        self.line = ""
        """What was told last."""
        self.phase = ""
        self.pause = EXPLAIN_SECONDS
        """How long what a queue says is not asked for again."""
        self.asked_at = self.told_at = 0.0
        self.standing: dict[str, Wait] = {}
        """Why each pod that cannot start does not; of a job that is over, as it was before."""

    def tell(self, look: Look, events: Sequence[Object] | None, pods: int = 0) -> None:
        """Print it if some time has passed since it was asked for; `pods` are those wanted."""
        now = look.state.phase
        pause = self.pause if now == self.phase == "queued" else EXPLAIN_SECONDS
        if look.state.over or look.clock - self.asked_at < pause:
            return
        self.asked_at = look.clock
        found = explain(look.job, look.state, look.pods.own, events, self.api, pods)
        problems = {who: reason for who, reason in found.items() if reason.kind}
        self.standing = track(self.standing, problems, look.clock)
        line = f"{look.name} is {now}" + (f": {in_words(found)}" if found else "")
        if line == self.line:
            self.pause = min(self.pause * 2, QUEUE_SECONDS)
            return
        soon = look.clock - self.told_at < MANY_SECONDS
        if len(found) > MANY_PODS and now == self.phase and soon:
            return
        self.told_at = look.clock
        self.printer.say(line)
        self.line, self.phase, self.pause = line, now, EXPLAIN_SECONDS


def explain(
    job: Object,
    state: State,
    pods: Sequence[Object],
    events: Sequence[Object] | None,
    api: Api,
    wanted: int = 0,
) -> dict[str, Reason]:
    """What a job, by '', or each of its pods waits for; empty when all run.

    Its `events` are None where they may not be read. Claims, queues and the events of pods are
    asked for only while a pod waits for them.
    """
    if state.phase == "queued":
        return {"": Reason("", kueue.waiting(job, api))}
    problem = cache(lambda claim: claim_problem(api, claim))
    found = {pod["metadata"]["name"]: _of_pod(pod, problem) for pod in pods}
    unmounted = _unmounted(api) if STARTING in found.values() else {}
    told: dict[str, Reason] = {}
    for pod in pods:
        name = pod["metadata"]["name"]
        reason = unmounted.get(name, STARTING) if found[name] == STARTING else found[name]
        if reason:
            told[pod_title(pod)] = reason
    lacking = len(pods) < max(1, wanted)
    if lacking and (kept := creation_reason(events) if events is not None else _refused(job, api)):
        told[NO_PODS if not pods else f"{len(pods)} of {wanted} pods"] = kept
    elif not pods:
        told[NO_PODS] = Reason("", "the operator has not made them")
    return told


def in_words(found: Mapping[str, Reason]) -> str:
    """One line on what a job waits for, the pods of one reason together; '' for nothing."""
    by_text: dict[str, list[str]] = {}
    for who, reason in found.items():
        by_text.setdefault(reason.text, []).append(who)
    lines = ((_listed(sorted(who)), text) for text, who in by_text.items())
    return "; ".join(f"{who}: {text}" if who else text for who, text in lines)


def _listed(names: Sequence[str]) -> str:
    if len(names) <= MANY_PODS:
        return ", ".join(names)
    return f"{', '.join(names[:NAMED])} and {len(names) - NAMED:,} more"


def _refused(job: Object, api: Api) -> Reason | None:
    """Why the API server takes no pod of a job of the Training Operator, by asking it for one."""
    parts = (part for name, part in job["spec"].items() if name.endswith("ReplicaSpecs"))
    for replica in (each for part in parts for each in part.values()):
        name = {"generateName": f"{job['metadata']['name']}-"}
        body = {**replica["template"], "metadata": {**replica["template"]["metadata"], **name}}
        try:
            api.call("POST", core(api.namespace, "pods"), body, {"dryRun": "All"})
        except ApiError as error:
            if error.status == 403 and "cannot create" not in error.message:
                return refusal(error.message)
    return None


def _of_pod(pod: Object, claim_problem: Callable[[str], str]) -> Reason | None:
    """Return why a pod waits, with what is wrong with its PVCs if it cannot be scheduled."""
    reason = waiting_reason(pod)
    if reason and reason.kind == "unschedulable":
        for volume in pod["spec"].get("volumes") or []:
            claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
            if claim and (problem := claim_problem(claim)):
                return Reason(reason.kind, problem)
    return reason


def _unmounted(api: Api) -> dict[str, Reason]:
    """Why a volume cannot be mounted, which only events tell, by the name of the pod."""
    try:
        events = api.call("GET", core(api.namespace, "events"), query=UNMOUNTED)["items"]
    except ApiError:
        return {}
    return {
        event["involvedObject"]["name"]: Reason(
            "mount", f"{one_line(str(event.get('message', '')))}; {MOUNT[event['reason']]}"
        )
        for event in events
        if event.get("reason") in MOUNT
    }


def claim_problem(api: Api, claim: str) -> str:
    """What is wrong with a claim; '' when it is bound or binds when a pod uses it."""
    try:
        found = api.call("GET", core(api.namespace, "persistentvolumeclaims", claim))
    except ApiError as error:
        return f"claim {claim} does not exist" if error.status == 404 else ""
    if phase(found) == "Lost":
        return f"claim {claim} has lost its volume"
    if phase(found) == "Pending":
        storage = found["spec"].get("storageClassName") or "no class"
        return f"claim {claim} is not bound (StorageClass {storage})"
    return ""

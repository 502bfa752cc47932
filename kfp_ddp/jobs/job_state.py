"""What a job of any kind says of itself: its phase, and since when it may run."""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from kfp_ddp.k8s.api import Object
from kfp_ddp.k8s.objects import condition, conditions

Phase = Literal["created", "queued", "running", "succeeded", "failed"]
# The Training Operator has one reason for all failures.
V1_DEADLINE = "active longer than specified deadline"


@dataclass(frozen=True)
class State:
    """Where a job is, and what its controller says about it."""

    phase: Phase
    message: str = ""
    reason: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing will change any more."""
        return self.phase in ("succeeded", "failed")

    @property
    def past_deadline(self) -> bool:
        """Whether its controller ended it for the time that it took."""
        return self.phase == "failed" and (
            self.reason == "DeadlineExceeded" or V1_DEADLINE in self.message
        )


def state(job: Object) -> State:
    """The state of a job of any kind, from its conditions."""
    true = {each["type"]: each for each in conditions(job) if each["status"] == "True"}
    for kind, phase in (
        ("Failed", "failed"),
        ("Succeeded", "succeeded"),
        ("Complete", "succeeded"),
    ):
        if found := true.get(kind):
            said, why = found.get("message", ""), found.get("reason", "")
            return State(phase, said, why)  # type: ignore[arg-type]
    if "Suspended" in true or suspended(job):
        return State("queued", true.get("Suspended", {}).get("message", ""))
    if "Running" in true:
        return State("running")
    # A TrainJob has no such condition, and counts pods that wait for a node as active too.
    jobs = (job.get("status") or {}).get("jobsStatus") or []
    if any(each.get("ready") or each.get("succeeded") for each in jobs):
        return State("running")
    return State("created")


def started(job: Object) -> float:
    """When a job may last have begun to run, in seconds since 1970.

    That is when it was made, or when its queue let it go: what it waited there, or ran before it
    was preempted, counts for no deadline of its own, and for none of its operator's.
    """
    resumed = condition(job, "Suspended", "False")
    at = resumed.get("lastTransitionTime") if resumed else None
    return datetime.fromisoformat(at or job["metadata"]["creationTimestamp"]).timestamp()


def suspended(job: Object) -> bool:
    """Whether its specification holds the job back, as a queue does."""
    spec = job.get("spec") or {}
    return bool(spec.get("suspend") or (spec.get("runPolicy") or {}).get("suspend"))

"""What follows from one look at a job: nothing, that it is over, or that it is given up.

Only what was seen and the clocks go in, so that every rule is a function to be read alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kfp_ddp.jobs.follow.pods import Pods
from kfp_ddp.jobs.kinds import Kind, pod_title
from kfp_ddp.jobs.kinds.base import State, started
from kfp_ddp.k8s.api import Object
from kfp_ddp.k8s.pods import Wait, created, expired, waits, was_restarted

# The pods that failed with a container that was started again are waited for so long.
SETTLE_SECONDS = 2.0


@dataclass(frozen=True)
class Limits:
    """How long a job may take, in seconds since it left its queue, if any; 0 for any time."""

    deadline: float = 0
    pending: float = 0
    """How long each of its pods may wait to start."""
    enough_pods: int = 0
    """Pods that are enough for an elastic job to run; 0 where all are needed."""
    crashes: int = 0
    """Pods that may crash and be made anew, which an operator does without an end; 0 for any."""
    silence: float = 0
    """How long nothing may be heard after a pod was replaced; 0 where its peers take it in."""
    pods: int = 0
    """Pods that it is made of; 0 where nobody knows."""
    stall: float = 0
    """How long its ranks may stand still, since all of them run."""


@dataclass(frozen=True)
class Look:
    """What one look at a job showed."""

    kind: Kind
    job: Object
    pods: Pods
    pods_listed: bool
    """Whether the pods are known yet."""
    now: float
    """Seconds since 1970, by the API server's clock."""
    clock: float
    """The monotonic clock."""
    heard_at: float = 0
    """Monotonic clock of the last line or metric of the job."""

    @property
    def name(self) -> str:
        """The name of the job."""
        return str(self.job["metadata"]["name"])

    @property
    def title(self) -> str:
        """Its kind and name."""
        return f"{self.kind.title} {self.name}"

    @property
    def state(self) -> State:
        """The state that the job itself tells."""
        return self.kind.state(self.job)


@dataclass(frozen=True)
class Verdict:
    """How a job ended."""

    state: State
    given_up: bool = False
    """Whether that is our judgement: the operator would let the job go on, so it is deleted."""
    reasons: tuple[Object, ...] = ()
    """Pods that are why it was given up, where that are not all of them."""


def verdict(look: Look, limits: Limits) -> Verdict | None:
    """How the job ended; None while it goes on."""
    if look.state.over:
        return Verdict(look.state)
    for reason in (restarted_in_place(look), split_by_a_replacement(look, limits)):
        if reason:
            return Verdict(State("failed", reason), given_up=True)
    crashed = look.pods.crashed
    if 0 < limits.crashes <= len(crashed):
        failed = State("failed", f"its pods crashed {len(crashed)} times")
        return Verdict(failed, given_up=True, reasons=tuple(crashed))
    return None


def restarted_in_place(look: Look) -> str:
    """Whether a container failed and was started again, alone, while its peers wait for it.

    A rank that comes back alone finds no others, and an error of the user comes back with it, so
    the whole job is over; the pods that failed with it are waited for.
    """
    if not look.kind.restarts_in_place or not any(map(was_restarted, look.pods.own)):
        return ""
    settled = look.clock - look.pods.restarted_at > SETTLE_SECONDS
    return "a container was started again in its pod" if settled else ""


def split_by_a_replacement(look: Look, limits: Limits) -> str:
    """Whether a lost pod's successor and its peers have come to nothing.

    The operator replaces a pod that is gone. Peers that were connected to it fail at once, but
    those that only were about to be wait for it, and it for them, without a word, until a
    rendezvous ends after a quarter of an hour.
    """
    if not limits.silence or not look.pods.replaced:
        return ""
    silent = look.clock - max(look.pods.replaced_at, look.heard_at) > limits.silence
    return "a pod that was lost was replaced, and its peers wait for it" if silent else ""


def out_of_time(look: Look, limits: Limits, waits_for: str) -> str:
    """The error of a job that took, or waited, longer than it may; '' while it may go on.

    What it waits in its queue counts for neither. `waits_for` is what was last said of it.
    """
    if look.state.over or look.state.phase == "queued":
        return ""
    if limits.deadline and look.now - started(look.job) > limits.deadline:
        return (
            f"{look.title} took longer than deadline_minutes={limits.deadline / 60:g} "
            "and was deleted; its checkpoints are kept"
        )
    since, who = waiting(look, limits.enough_pods)
    if limits.pending and since and look.now - since > limits.pending:
        return (
            f"{who}{look.title} did not start within pending_minutes={limits.pending / 60:g}, "
            f"and the job was deleted: {waits_for}"
        )
    return ""


def cannot_start(look: Look, limits: Limits, standing: Iterable[Wait]) -> str:
    """The error of a job of which a pod can never start, or not soon enough; '' for none."""
    if look.state.over or not (found := expired(standing, look.clock, limits.pending)):
        return ""
    return f"{look.title} cannot start and was deleted: {found}"


def waiting(look: Look, enough_pods: int) -> tuple[float, str]:
    """Since when the job has waited for a pod, and for which; 0 where it waits for none.

    The job's own state tells nothing of it: it runs as soon as one of its pods does.
    """
    if not look.pods_listed:
        return 0, ""
    pods = look.pods
    own = [pod for pod in pods.own if "deletionTimestamp" not in pod["metadata"]]
    if not own:
        had_some = pods.present or pods.lost or pods.ended or look.state.phase != "created"
        return (0, "") if had_some else (started(look.job), "")
    late = [pod for pod in own if waits(pod)]
    if not late or (enough_pods and len(own) - len(late) >= enough_pods):
        return 0, ""
    oldest = min(late, key=created)
    return max(created(oldest), started(look.job)), f"{pod_title(oldest)} of "

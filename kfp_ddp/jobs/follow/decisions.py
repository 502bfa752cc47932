"""What a look at a job shows: its pods so far, and whether it is over; makes no request."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from kfp_ddp.core.failure import Failure
from kfp_ddp.jobs.kinds import Kind, pod_title
from kfp_ddp.jobs.kinds.base import State, started
from kfp_ddp.k8s.api import Object
from kfp_ddp.k8s.pods import (
    Wait,
    created,
    expired,
    has_crashed,
    has_failed,
    is_pending,
    was_restarted,
    writes_no_more,
)

# How long to wait for other pods to fail after a container was restarted.
SETTLE_SECONDS = 2.0


@dataclass(frozen=True)
class Limits:
    """Time limits of a job in seconds, without its time in a queue; 0 for no limit."""

    deadline: float = 0
    pending: float = 0
    """How long each of its pods may wait to start."""
    crashes: int = 0
    """Crashes of pods, which an operator replaces without limit."""
    silence: float = 0
    """Time without a log line or metric after a pod was replaced; 0 if its peers accept it."""
    pods: int = 0
    """Pods of the job; 0 for unknown."""
    stall: float = 0
    """How long its ranks may stall, once all of them run."""


@dataclass(frozen=True)
class Pods:
    """The pods of a job so far; each look returns a new object."""

    kind: Kind
    admitted: float
    """When the queue last admitted the job, or it was created, in seconds since 1970."""
    present: Mapping[str, Object] = field(default_factory=dict)
    """The pods at the last look, by uid."""
    lost: tuple[Object, ...] = ()
    """Pods removed while they ran: by force, or with their node."""
    ended: tuple[Object, ...] = ()
    """Pods removed after they ended, such as by the operator's clean-up."""
    preempted: frozenset[str] = frozenset()
    """The uids of pods that the job's queue preempted: their end is not a failure of the job."""
    restarted_at: float = 0
    """Monotonic clock when a restarted container was first seen."""
    replaced_at: float = 0
    """Monotonic clock when the replacement of a lost or failed pod was first seen."""

    def look(
        self, job: Object, pods: Mapping[str, Object], removed: Mapping[str, Object], clock: float
    ) -> "Pods":
        """Return the history after one more look; `removed` has the last states of removed pods."""
        before = self._without_preempted(job, pods)
        gone = [
            removed.get(uid, pod)
            for uid, pod in before.present.items()
            if uid not in pods and uid not in before.preempted
        ]
        now = replace(
            before,
            present=dict(pods),
            lost=(*before.lost, *(pod for pod in gone if not writes_no_more(pod))),
            ended=(*before.ended, *(pod for pod in gone if writes_no_more(pod))),
        )
        restarted = any(map(was_restarted, now.own))
        return replace(
            now,
            restarted_at=now.restarted_at or (clock if restarted else 0),
            replaced_at=now.replaced_at or (clock if now.replaced else 0),
        )

    def _without_preempted(self, job: Object, pods: Mapping[str, Object]) -> "Pods":
        """Drop the history before a preemption by the queue, but note the preempted pods."""
        admitted = started(job)
        if self.kind.state(job).phase == "queued":
            preempted = self.preempted | {*self.present, *pods}
        elif admitted != self.admitted:
            preempted = self.preempted | {*self.present}
        else:
            return self
        return Pods(self.kind, admitted, self.present, preempted=preempted)

    @property
    def own(self) -> list[Object]:
        """The present pods that were not preempted."""
        return [pod for uid, pod in self.present.items() if uid not in self.preempted]

    @property
    def replaced(self) -> bool:
        """Whether a lost or failed pod has a replacement."""
        gone = {pod_title(pod) for pod in (*self.lost, *filter(has_failed, self.ended))}
        return any(pod_title(pod) in gone for pod in self.own)

    @property
    def ended_for_good(self) -> list[Object]:
        """Ended and removed pods without a replacement."""
        present = {pod_title(pod) for pod in self.own}
        return [pod for pod in self.ended if pod_title(pod) not in present]

    @property
    def only_preempted(self) -> bool:
        """Whether preempted pods are present, and no other failed: the operator counts them."""
        return len(self.own) < len(self.present) and not any(map(has_failed, self.own))


@dataclass(frozen=True)
class Snapshot:
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
        """The state of the job."""
        return self.kind.state(self.job)


@dataclass(frozen=True)
class Verdict:
    """How a job ended."""

    state: State
    given_up: bool = False
    """Whether the launcher gave it up: its operator would continue it, so it must be deleted."""
    reasons: tuple[Object, ...] = ()
    """The pods for which it was given up, if not all."""
    failure: Failure | None = None
    """The cause, where the pods do not show it."""
    node: str = ""
    """The node that is at fault, to avoid."""


def verdict(snapshot: Snapshot, limits: Limits) -> Verdict | None:
    """Return how the job ended; None while it runs."""
    if snapshot.state.past_deadline:  # its pods show only a signal
        limit = "the deadline of its runtime"
        if limits.deadline:
            limit = f"deadline_minutes={limits.deadline / 60:g}"
        line = f"it took longer than {limit} and was ended; its checkpoints are kept"
        return Verdict(snapshot.state, failure=Failure(1, -1, line, retryable=False))
    if snapshot.state.over:
        return Verdict(snapshot.state)
    if reason := restarted_in_place(snapshot) or split_by_a_replacement(snapshot, limits):
        return Verdict(State("failed", reason), given_up=True)
    # Each failure once: they were removed.
    crashed = tuple(filter(has_crashed, snapshot.pods.ended))
    if 0 < limits.crashes <= len(crashed):
        failed = State("failed", f"its pods crashed {len(crashed)} times")
        return Verdict(failed, given_up=True, reasons=crashed)
    return None


def restarted_in_place(snapshot: Snapshot) -> str:
    """Return the error of a job with a restarted container, which finds no peers; '' for none."""
    if not snapshot.kind.restarts_in_place or not any(map(was_restarted, snapshot.pods.own)):
        return ""
    settled = snapshot.clock - snapshot.pods.restarted_at > SETTLE_SECONDS
    return "a container was restarted in its pod" if settled else ""


def split_by_a_replacement(snapshot: Snapshot, limits: Limits) -> str:
    """Return the error of a job whose peers wait for a replaced pod; '' for none.

    Peers that were only about to connect to a lost pod wait for a quarter of an hour.
    """
    if not limits.silence or not snapshot.pods.replaced:
        return ""
    silent = snapshot.clock - max(snapshot.pods.replaced_at, snapshot.heard_at) > limits.silence
    return "a lost pod was replaced, and its peers wait for it" if silent else ""


def out_of_time(snapshot: Snapshot, limits: Limits, wait: str) -> str:
    """Return the error of a job past a limit, without its time in a queue; '' for none."""
    if snapshot.state.over or snapshot.state.phase == "queued":
        return ""
    if limits.deadline and snapshot.now - snapshot.kind.started(snapshot.job) > limits.deadline:
        return (
            f"{snapshot.title} took longer than deadline_minutes={limits.deadline / 60:g} "
            "and was deleted; its checkpoints are kept"
        )
    since, pod = waiting(snapshot)
    is_late = snapshot.now - since > limits.pending
    if limits.pending and since and is_late:
        return (
            f"{pod}{snapshot.title} did not start within pending_minutes={limits.pending / 60:g}, "
            f"and the job was deleted: {wait}"
        )
    return ""


def cannot_start(snapshot: Snapshot, limits: Limits, pod_waits: Iterable[Wait]) -> str:
    """Return the error of a job with a pod that can never start, or not in time; '' for none."""
    wait = expired(pod_waits, snapshot.clock, limits.pending)
    if snapshot.state.over or not wait:
        return ""
    return f"{snapshot.title} cannot start and was deleted: {wait}"


def waiting(snapshot: Snapshot) -> tuple[float, str]:
    """Return since when the job has waited for a pod, which its state does not show; 0 for none."""
    if not snapshot.pods_listed:
        return 0, ""
    pods = snapshot.pods
    begun = snapshot.kind.started(snapshot.job)
    own = [pod for pod in pods.own if "deletionTimestamp" not in pod["metadata"]]
    if not own:
        had_some = any((pods.present, pods.lost, pods.ended))
        if had_some or snapshot.state.phase != "created":
            return 0, ""
        return begun, ""
    late = [pod for pod in own if is_pending(pod)]
    if not late:
        return 0, ""
    first = min(late, key=created)
    return max(created(first), begun), f"{pod_title(first)} of "

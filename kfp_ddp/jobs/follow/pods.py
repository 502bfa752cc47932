"""The history of a job's pods, from one look to the next. Makes no request."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kfp_ddp.jobs.kinds import Kind, pod_title
from kfp_ddp.jobs.kinds.base import started
from kfp_ddp.k8s.api import Object
from kfp_ddp.k8s.pods import has_crashed, has_failed, was_restarted, writes_no_more


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

    @classmethod
    def of_new(cls, job: Object, kind: Kind) -> "Pods":
        """Return the pods of a job before the first look."""
        return cls(kind, started(job))

    def look(
        self, job: Object, pods: Mapping[str, Object], removed: Mapping[str, Object], clock: float
    ) -> "Pods":
        """Return the history after one more look.

        Args:
            job: The job now.
            pods: Its pods now, by uid.
            removed: Removed pods in their last state, by uid: the last state of a pod that ended
                and was cleaned up comes with the event of its deletion.
            clock: The monotonic clock.
        """
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
        """Whether preempted pods are still present, and no other pod has failed.

        The Training Operator counts them against a job that is admitted again before they end.
        """
        return len(self.own) < len(self.present) and not any(map(has_failed, self.own))

    @property
    def crashed(self) -> list[Object]:
        """Removed pods whose own program failed, once for each failure."""
        return list(filter(has_crashed, self.ended))

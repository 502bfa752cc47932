"""What became of a job's pods, from one look at them to the next; no cluster is asked here."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kfp_ddp.jobs.kinds import Kind, pod_title
from kfp_ddp.jobs.kinds.base import started
from kfp_ddp.k8s.api import Object
from kfp_ddp.k8s.pods import has_crashed, has_failed, was_restarted, writes_no_more


@dataclass(frozen=True)
class Pods:
    """The pods that were seen so far; each look makes a new one of the last."""

    kind: Kind
    let_in: float
    """When the job was last let in by its queue, or made, in seconds since 1970."""
    present: Mapping[str, Object] = field(default_factory=dict)
    """Those that were there at the last look, by uid."""
    lost: tuple[Object, ...] = ()
    """Those that were removed while they ran: by force, or with their node."""
    ended: tuple[Object, ...] = ()
    """Those that ended and were removed, such as by the operator's cleaning up."""
    taken_back: frozenset[str] = frozenset()
    """The uids of those that the job's queue took back: how they end is no failure of the job."""
    restarted_at: float = 0
    """Monotonic clock of the first look at a container that was started again in its pod."""
    replaced_at: float = 0
    """Monotonic clock of the first look at a pod in the place of one that was lost or failed."""

    @classmethod
    def of(cls, job: Object, kind: Kind) -> "Pods":
        """Those of a job that was not looked at yet."""
        return cls(kind, started(job))

    def look(
        self, job: Object, there: Mapping[str, Object], removed: Mapping[str, Object], clock: float
    ) -> "Pods":
        """What is known after one more look.

        Args:
            job: The job as it is now.
            there: The pods that are there now, by uid.
            removed: Those that were seen to go, as they were then: for a pod that ended and was
                cleaned up, the last state comes with the event of its deletion.
            clock: The monotonic clock.
        """
        before = self._taken_back(job, there)
        gone = [
            removed.get(uid, pod)
            for uid, pod in before.present.items()
            if uid not in there and uid not in before.taken_back
        ]
        now = replace(
            before,
            present=dict(there),
            lost=(*before.lost, *(pod for pod in gone if not writes_no_more(pod))),
            ended=(*before.ended, *(pod for pod in gone if writes_no_more(pod))),
        )
        restarted = any(map(was_restarted, now.own))
        return replace(
            now,
            restarted_at=now.restarted_at or (clock if restarted else 0),
            replaced_at=now.replaced_at or (clock if now.replaced else 0),
        )

    def _taken_back(self, job: Object, there: Mapping[str, Object]) -> "Pods":
        """Forget what happened before the queue took the job back, and remember its pods."""
        let_in = started(job)
        if self.kind.state(job).phase == "queued":
            taken_back = self.taken_back | {*self.present, *there}
        elif let_in != self.let_in:
            taken_back = self.taken_back | {*self.present}
        else:
            return self
        return Pods(self.kind, let_in, self.present, taken_back=taken_back)

    @property
    def own(self) -> list[Object]:
        """Those that are there and were not taken back."""
        return [pod for uid, pod in self.present.items() if uid not in self.taken_back]

    @property
    def replaced(self) -> bool:
        """Whether a pod is there in the place of one that was lost or failed."""
        gone = {pod_title(pod) for pod in (*self.lost, *filter(has_failed, self.ended))}
        return any(pod_title(pod) in gone for pod in self.own)

    @property
    def ended_for_good(self) -> list[Object]:
        """Those that ended and were removed, and whose place no other pod has taken."""
        there = {pod_title(pod) for pod in self.own}
        return [pod for pod in self.ended if pod_title(pod) not in there]

    @property
    def only_taken_back(self) -> bool:
        """Whether pods that were taken back are still there, and no other one has failed.

        The Training Operator counts those against a job that is let in again before they ended.
        """
        return len(self.own) < len(self.present) and not any(map(has_failed, self.own))

    @property
    def crashed(self) -> list[Object]:
        """Those that failed of themselves and were removed, as often as they did."""
        return list(filter(has_crashed, self.ended))

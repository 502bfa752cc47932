"""Following one job to its end as if it ran in the step: state, logs, progress, reasons."""

import threading
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.shared.cluster.api import Api, Mirror, Object, core
from kfp_ddp.components.shared.launch import heartbeat
from kfp_ddp.components.shared.launch.ending import Ending
from kfp_ddp.components.shared.launch.follow import pending
from kfp_ddp.components.shared.launch.follow.logs import PlaceFile, PodLog, Printer
from kfp_ddp.components.shared.launch.follow.progress import METRICS_FILE, Progress, Tail
from kfp_ddp.components.shared.launch.manifests.kinds import Kind, State, pod_title, started, state

PROGRESS_SECONDS = 10.0
DRAIN_SECONDS = 5.0
EXPLAIN_SECONDS = 2.0
# A queue may hold a job for days: what does not change there is asked for less and less often.
QUEUE_SECONDS = 30.0
SETTLE_SECONDS = 2.0


class Cancelled(Exception):  # noqa: N818
    """The run was terminated while its job ran."""


@dataclass
class Limits:
    """How long a job may take, in seconds since it left its queue, if any; 0 for any time."""

    deadline: float = 0
    pending: float = 0
    least: int = 0
    """Pods that are enough for an elastic job to run; 0 where all are needed."""
    crashes: int = 0
    """Pods that may crash and be made anew, which an operator does without an end; 0 for any."""
    apart: float = 0
    """Silence after a lost pod was replaced; 0 where its peers know how to take it in."""


@dataclass
class Ended:
    """How a job ended, and what its pods were then."""

    state: State
    job: Object
    pods: list[Object] = field(default_factory=list)
    last_lines: dict[str, list[str]] = field(default_factory=dict)
    lost: list[Object] = field(default_factory=list)
    preempted: bool = False
    """Whether it failed for nothing but the end of pods that its queue had taken back."""


class Follower:
    """Follows one job: two watches, a thread for each pod's log, and one loop that decides."""

    def __init__(
        self,
        api: Api,
        kind: Kind,
        job: Object,
        ending: Ending,
        run_dir: Path | None,
        progress: bool = False,
    ) -> None:
        self.api, self.kind, self.job, self.ending, self.run_dir = api, kind, job, ending, run_dir
        self.name = job["metadata"]["name"]
        self.changed = threading.Event()
        one = {"fieldSelector": f"metadata.name={self.name}"}
        self.jobs = Mirror(api, kind.path(api.namespace), one, self.changed)
        pods = {"labelSelector": kind.pod_selector(self.name)}
        self.pods = Mirror(api, core(api.namespace, "pods"), pods, self.changed)
        self.events = Mirror(api, core(api.namespace, "events"), one_job(self.name), self.changed)
        for mirror in ending.mirrors:
            mirror.changed = self.changed
        self.printer = Printer()
        self.places: PlaceFile | None = None
        self.known: dict[str, Object] = {}
        self.lost: list[Object] = []
        self.over: list[Object] = []
        self.worn: list[Object] = []
        self.taken: set[str] = set()
        self.since = started(job)
        self.logs: dict[str, PodLog] = {}
        self.progress = Progress()
        self.tail: Tail | None = None
        if run_dir is not None:
            self.places = PlaceFile(run_dir / f"launcher.{self.name}.places.json", self.printer)
        if run_dir is not None and progress:
            self.tail = Tail(run_dir / METRICS_FILE)
        self.said, self.phase, self.patience = "", "", EXPLAIN_SECONDS
        self.progressed = self.explained = self.beat = self.restarted = 0.0
        self.parted = self.heard = 0.0
        self.fresh = False

    def run(self, limits: Limits) -> Ended:
        """Return when the job is over and its logs are printed.

        Args:
            limits: Deadlines.

        Raises:
            Cancelled: the run was terminated; the job is deleted.
            InputError: a deadline passed (the job is deleted), or somebody deleted the job.
        """
        if self.tail is not None:
            self.tail.skip()
        self.ending.before_exit = self._save
        for mirror in (self.jobs, self.pods, self.events):
            mirror.start()
        try:
            while True:
                self.changed.wait(timeout=0.5)
                self.changed.clear()
                now = self._look(limits)
                if now.over:
                    preempted = now.phase == "failed" and self._only_taken()
                    if not self.restarted:
                        self._drain()
                    self._notice_lost()
                    pods = [*self._own_pods(), *(self.worn or self._removed())]
                    lines = self.printer.last_lines()
                    return Ended(now, self.job, pods, lines, self.lost, preempted)
        finally:
            for mirror in (self.jobs, self.pods, self.events):
                mirror.stop()
            for log in self.logs.values():
                log.abandoned.set()
            self._save()

    def _look(self, limits: Limits) -> State:
        """Take in what changed; one turn of the loop."""
        if self.ending.cancelled():
            self.ending.delete_job()
            raise Cancelled
        if not self.jobs.synced.is_set():
            return State("created")
        if self.jobs.forbidden:
            raise InputError(f"cannot watch {self.kind.title} {self.name}: {self.jobs.forbidden}")
        uid = self.job["metadata"]["uid"]
        found = self.jobs.objects.get(uid)
        if found is None or "deletionTimestamp" in found["metadata"]:
            raise InputError(
                f"{self.kind.title} {self.name} was deleted by somebody else; run the step again"
            )
        self.job = found
        now = state(found)
        if not now.over and (problem := self.kind.spoiled(found)):
            self.ending.delete_job()
            raise InputError(f"{self.kind.title} {self.name} {problem}")
        self._notice_taken(now)
        self._notice_lost()
        self._follow_logs()
        self._show(now)
        self._keep_alive()
        self._within(limits, now)
        if self.kind.restarts_in_place and not now.over and self._restarted():
            return State("failed", "a container was started again in its pod")
        if not now.over and self._apart(limits):
            return State("failed", "a pod that was lost was replaced, and its peers wait for it")
        crashes = list(filter(has_crashed, self.over))
        if not now.over and 0 < limits.crashes <= len(crashes):
            self.worn = crashes
            return State("failed", f"its pods crashed {len(crashes)} times")
        return now

    def _restarted(self) -> bool:
        """Whether a container failed and was started again, alone, while its peers wait for it.

        A rank that comes back alone finds no others, and an error of the user comes back with
        it, so the whole job is over; the pods that failed with it are waited for.
        """
        if not any(map(was_restarted, self._own_pods())):
            return False
        self.restarted = self.restarted or time.monotonic()
        return time.monotonic() - self.restarted > SETTLE_SECONDS

    def _apart(self, limits: Limits) -> bool:
        """Whether a lost pod's successor and its peers have come to nothing.

        The operator replaces a pod that is gone. Peers that were connected to it fail at once, but
        those that only were about to be wait for it, and it for them, without a word, until a
        rendezvous ends after a quarter of an hour.
        """
        lost = {pod_title(pod) for pod in [*self.lost, *filter(has_failed, self.over)]}
        if not limits.apart or not lost & {pod_title(pod) for pod in self._own_pods()}:
            return False
        self.parted = self.parted or time.monotonic()
        heard = max(self.parted, self.heard, self.printer.at)
        return time.monotonic() - heard > limits.apart

    def _notice_taken(self, now: State) -> None:
        """Know the pods that a queue takes back: how they end is no failure of the job."""
        since = started(self.job)
        if now.phase == "queued":
            self.taken |= {*self.known, *self.pods.objects}
        elif since != self.since:
            self.taken |= {*self.known}
        else:
            return
        self.since, self.lost, self.over = since, [], []
        self.parted = self.restarted = 0.0

    def _own_pods(self) -> list[Object]:
        return [pod for uid, pod in self.pods.objects.items() if uid not in self.taken]

    def _only_taken(self) -> bool:
        """Whether pods that were taken back are still there, and no other one has failed.

        The Training Operator counts those against a job that is let in again before they ended.
        """
        own = self._own_pods()
        return len(own) < len(self.pods.objects) and not any(map(has_failed, own))

    def _notice_lost(self) -> None:
        """Keep the pods that were removed before they ended: by force, or with their node."""
        pods = dict(self.pods.objects)
        gone = [
            self.pods.removed.get(uid, pod)
            for uid, pod in self.known.items()
            if uid not in pods and uid not in self.taken
        ]
        self.lost += [pod for pod in gone if not ended(pod)]
        self.over += [pod for pod in gone if ended(pod)]
        self.known = pods

    def _removed(self) -> list[Object]:
        """Pods that ended and were removed, such as by the operator's cleaning up.

        One that another pod has taken the place of is no part of how the job ended.
        """
        there = {pod_title(pod) for pod in self._own_pods()}
        return [pod for pod in self.over if pod_title(pod) not in there]

    def _follow_logs(self) -> None:
        names = {pod["metadata"]["name"]: uid for uid, pod in self.pods.objects.items()}
        for log in self.logs.values():
            if names.get(log.name_of_pod, log.uid) != log.uid:
                log.abandoned.set()  # or it would print its successor's lines, a second time
        for uid, pod in self.pods.objects.items():
            for container in self.kind.containers:
                key = f"{uid}/{container}"
                if key in self.logs:
                    self.logs[key].update(pod)
                elif has_started(pod, container):
                    self.logs[key] = PodLog(self.api, pod, container, self.printer)
                    self.logs[key].start()

    def _show(self, now: State) -> None:
        """A progress line, or what the job waits for, when it is new."""
        if self.tail is not None:
            if self.progress.update(self.tail.read()):
                self.fresh, self.heard = True, time.monotonic()
            due = time.monotonic() - self.progressed >= PROGRESS_SECONDS
            if self.fresh and (due or now.over):
                self.printer.say(self.progress.line())
                self.progressed, self.fresh = time.monotonic(), False
        pause = self.patience if now.phase == self.phase == "queued" else EXPLAIN_SECONDS
        if now.over or time.monotonic() - self.explained < pause:
            return
        self.explained = time.monotonic()
        pods = list(self.pods.objects.values())
        reason = pending.explain(self.job, now, pods, list(self.events.objects.values()), self.api)
        line = f"{self.name} is {now.phase}" + (f": {reason}" if reason else "")
        self.patience = min(self.patience * 2, QUEUE_SECONDS)
        if line != self.said:
            self.printer.say(line)
            self.said, self.phase, self.patience = line, now.phase, EXPLAIN_SECONDS

    def _keep_alive(self) -> None:
        if time.monotonic() - self.beat < heartbeat.TOUCH_SECONDS:
            if self.places is not None:
                self.places.save()
            return
        self.beat = time.monotonic()
        if self.run_dir is not None:
            heartbeat.touch(self.run_dir)
        self.ending.warm()

    def _within(self, limits: Limits, now: State) -> None:
        if now.over or now.phase == "queued":
            return
        age = time.time() - started(self.job)
        if limits.deadline and age > limits.deadline:
            self.ending.delete_job()
            raise InputError(
                f"{self.kind.title} {self.name} took longer than deadline_minutes="
                f"{limits.deadline / 60:g} and was deleted; its checkpoints are kept"
            )
        since, who = self._waiting(limits.least, now)
        if limits.pending and since and time.time() - since > limits.pending:
            said = self.said
            self.ending.delete_job()
            raise InputError(
                f"{who}{self.kind.title} {self.name} did not start within "
                f"pending_minutes={limits.pending / 60:g}, and the job was deleted: {said}"
            )

    def _waiting(self, least: int, now: State) -> tuple[float, str]:
        """Since when the job has waited for a pod, and for which; 0 where it waits for none.

        The job's own state tells nothing of it: it runs as soon as one of its pods does.
        """
        if not self.pods.synced.is_set():
            return 0, ""
        own = [pod for pod in self._own_pods() if "deletionTimestamp" not in pod["metadata"]]
        if not own:
            had_some = self.known or self.lost or self.over or now.phase != "created"
            return (0, "") if had_some else (started(self.job), "")
        waiting = [pod for pod in own if waits(pod)]
        if not waiting or (least and len(own) - len(waiting) >= least):
            return 0, ""
        oldest = min(waiting, key=created)
        return max(created(oldest), started(self.job)), f"{pod_title(oldest)} of "

    def _drain(self) -> None:
        """Let the logs come to their end; the job is over, so they do in a moment."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < deadline:
            self._follow_logs()
            alive = [log for log in self.logs.values() if log.is_alive()]
            if not alive and all(ended(pod) for pod in self.pods.objects.values()):
                break
            self.changed.wait(timeout=0.1)
            self.changed.clear()
        if self.tail is not None and self.progress.update(self.tail.read()):
            self.printer.say(self.progress.line())

    def _save(self) -> None:
        if self.places is not None:
            self.places.save()


def one_job(name: str) -> dict[str, str]:
    """Events about the job object itself; those of pods stand in their conditions."""
    return {"fieldSelector": f"involvedObject.name={name}"}


def has_started(pod: Object, container: str) -> bool:
    """Whether the container has a log."""
    for status in (pod.get("status") or {}).get("containerStatuses") or []:
        if status["name"] == container:
            now = status.get("state") or {}
            return "running" in now or "terminated" in now or bool(status.get("restartCount"))
    return False


def waits(pod: Object) -> bool:
    """Whether no container of the pod's own has started, be it for a node, an image or a volume."""
    phase = (pod.get("status") or {}).get("phase")
    return phase in (None, "", "Pending")


def created(pod: Object) -> float:
    """When the pod was made, in seconds since 1970."""
    return datetime.fromisoformat(pod["metadata"]["creationTimestamp"]).timestamp()


def has_failed(pod: Object) -> bool:
    """Whether the pod, or a container of it, ended badly."""
    status = pod.get("status") or {}
    ends = [(each.get("state") or {}) for each in status.get("containerStatuses") or []]
    codes = [int(end["terminated"].get("exitCode") or 0) for end in ends if "terminated" in end]
    return status.get("phase") == "Failed" or any(codes)


def has_crashed(pod: Object) -> bool:
    """Whether the pod failed of itself, and was neither told to end nor taken from its node."""
    status = pod.get("status") or {}
    if any(each["type"] == "DisruptionTarget" for each in status.get("conditions") or []):
        return False
    ends = [(each.get("state") or {}) for each in status.get("containerStatuses") or []]
    codes = [int(end["terminated"].get("exitCode") or 0) for end in ends if "terminated" in end]
    return any(code not in (0, 143) for code in codes)


def was_restarted(pod: Object) -> bool:
    """Whether a container of the pod ended badly before."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return any((status.get("lastState") or {}).get("terminated") for status in statuses)


def ended(pod: Object) -> bool:
    """Whether a pod will write no more lines."""
    phase = (pod.get("status") or {}).get("phase")
    return phase in ("Succeeded", "Failed", "Pending")

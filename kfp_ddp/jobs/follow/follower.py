"""Follow one job to its end: watch, log, report and decide."""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.core.files import atomic_write
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.jobs.ending import Ending
from kfp_ddp.jobs.failure import root_cause
from kfp_ddp.jobs.follow.decisions import Limits, Look, Verdict, cannot_start, out_of_time, verdict
from kfp_ddp.jobs.follow.logs import ALL, FAILED, PodLogs, Printer, sample_note
from kfp_ddp.jobs.follow.narrator import Narrator
from kfp_ddp.jobs.follow.pods import Pods
from kfp_ddp.jobs.follow.ranks import Ranks, Stall, Told, read
from kfp_ddp.jobs.kinds import Kind
from kfp_ddp.jobs.kinds.base import State
from kfp_ddp.jobs.progress import ProgressTeller
from kfp_ddp.k8s.api import Api, Object, core
from kfp_ddp.k8s.pods import has_failed, oldest, seconds_to_stop, waits, writes_no_more
from kfp_ddp.k8s.watch_cache import WatchCache

TURN_SECONDS = 0.5
RANKS_SECONDS = 5.0
DRAIN_SECONDS = 5.0
# Of many pods some are always stopped late; what those that failed say is waited for all the same.
DRAIN_MANY_SECONDS = 1.0
# A look is followed by a rest of so many times its work, or the start of many pods takes a core.
REST = 3
PROGRESS_SECONDS = 10.0
GIVEN_UP = Verdict(State("failed", "its ranks stood still"), given_up=True)


@dataclass
class Outcome:
    """How a job ended, and what its pods were then."""

    state: State
    job: Object
    pods: list[Object] = field(default_factory=list)
    last_lines: dict[str, list[str]] = field(default_factory=dict)
    """The end of each pod's log, by uid."""
    lost: tuple[Object, ...] = ()
    """Pods that were removed while they ran."""
    preempted: bool = False
    """Whether it failed for nothing but the end of pods that its queue had taken back."""
    given_up: bool = False
    """Whether that is our judgement: the operator would let the job go on."""
    never_started: str = ""
    """The pod that waited longest to start when the job ended, and for what."""
    stall: Stall | None = None
    """Who stood still, where it was given up for that."""


class Watches:
    """What the cluster holds of one job: itself, its pods, and the events about it."""

    def __init__(self, api: Api, kind: Kind, job: str, changed: threading.Event) -> None:
        space, this = api.namespace, {"fieldSelector": f"metadata.name={job}"}
        self.jobs = WatchCache(api, kind.path(space), this, changed)
        its = {"labelSelector": kind.pod_selector(job)}
        self.pods = WatchCache(api, core(space, "pods"), its, changed, reduced_pod)
        # Those of pods stand in their conditions.
        about = {"fieldSelector": "involvedObject.kind!=Pod,type=Warning"}
        self.events = WatchCache(api, core(space, "events"), about, changed, reduced_event)
        # The second is the Job that makes the pods of a TrainJob.
        self.makers = (job, f"{job}-node-0")
        self.all = (self.jobs, self.pods, self.events)

    def warnings(self) -> list[Object] | None:
        """The events that say why pods of the job are not made; None where none may be read."""
        if self.events.forbidden:
            return None
        found = list(self.events.objects.values())
        return [each for each in found if each["involvedObject"].get("name") in self.makers]

    def start(self) -> None:
        """Begin to watch."""
        for each in self.all:
            each.start()

    def stop(self) -> None:
        """Let the watches end at their next event."""
        for each in self.all:
            each.stop()


class Standstill:
    """Looks now and then how far the ranks are."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ranks = folder, Ranks()
        self.parts: Iterator[tuple[list[Told], bool]] | None = None
        """What is left to read of this round over all ranks; None between two."""
        self.told: list[Told] = []
        self.began_at = self.read_at = -RANKS_SECONDS
        self.uids: frozenset[str] = frozenset()
        self.since = 0.0
        """Monotonic clock since when these very pods have all run."""

    def look(self, look: Look, limit: float) -> Stall | None:
        """Who stands still, if nothing of the job has advanced for `limit` seconds."""
        uids = frozenset(pod["metadata"]["uid"] for pod in look.pods.own)
        if uids != self.uids or look.state.phase != "running" or any(map(waits, look.pods.own)):
            self.uids, self.since = uids, look.clock
        if not limit or not self._read(look.clock):
            return None
        pods = {pod["metadata"]["name"]: pod for pod in look.pods.own}
        self.ranks = self.ranks.look(self.told, pods, look.clock)
        return self.ranks.stall(pods, self.since, look.clock, limit)

    def _read(self, clock: float) -> bool:
        """Read a part of what the ranks tell, where it is time; true when that was the last."""
        if self.parts is None and clock - self.began_at >= RANKS_SECONDS:
            self.parts, self.told, self.began_at = read(self.folder), [], clock
        if self.parts is None or clock - self.read_at < TURN_SECONDS:
            return False
        self.read_at = clock
        part, last = next(self.parts)
        self.told += part
        if last:
            self.parts = None
        return last


class Follower:
    """Follows one job: watches, a thread for each pod's log, and one loop that decides."""

    def __init__(
        self,
        api: Api,
        kind: Kind,
        job: Object,
        ending: Ending,
        run_dir: Path | None,
        progress: bool = False,
    ) -> None:
        name = job["metadata"]["name"]
        self.api, self.kind, self.job, self.ending = api, kind, job, ending
        self.changed = threading.Event()
        ending.wake(self.changed)
        self.watches = Watches(api, kind, name, self.changed)
        self.pods = Pods.of(job, kind)
        self.wanted = 0
        """Pods that the job is made of; 0 where nobody knows."""
        self.told_sample = False
        """Whether it was said that its logs are too many."""
        self.printer = Printer()
        self.logs = PodLogs(api, kind.containers, self.printer)
        self.narrator = Narrator(self.printer, api)
        folder = RunFolder(run_dir) if run_dir is not None else None
        self.files = StepFiles(folder, name, self.printer) if folder else None
        self.progress: ProgressTeller | None = None
        self.standstill = Standstill(folder.ranks) if folder and progress else None
        if folder and progress:
            self.progress = ProgressTeller(self.printer.say, folder.metrics, PROGRESS_SECONDS)

    def run(self, limits: Limits) -> Outcome:
        """Return when the job is over and its logs are printed.

        Raises:
            RunCancelledError: the run was terminated; the job is deleted.
            JobError: a deadline passed (the job is deleted), or somebody deleted the job.
            InputError: it may not be watched.
        """
        if self.files is not None:
            self.ending.before_exit = self.files.leave
            if self.progress is not None:
                self.ending.newest_step = self.files.newest_step
        self.wanted = limits.pods
        self.watches.start()
        worked = 0.0
        try:
            while True:
                if self.many:  # a few are looked at when they change: the step may end in a moment
                    time.sleep(min(TURN_SECONDS, REST * (time.thread_time() - worked)))
                self.changed.wait(timeout=TURN_SECONDS)
                self.changed.clear()
                worked = time.thread_time()
                look = self._look()
                if look is None:
                    continue
                self.narrator.tell(look, self.watches.warnings(), limits.pods)
                self.ending.warm()
                if self.files is not None:
                    self.files.keep(look.clock)
                if found := self._decide(look, limits):
                    return self._end(found, look)
                if self.standstill and (stall := self.standstill.look(look, limits.stall)):
                    self.printer.say(f"{look.name}: {stall.failure.error}; ending it")
                    return replace(self._end(GIVEN_UP, look), stall=stall)
        finally:
            self.watches.stop()
            self.logs.abandon()
            if self.files is not None:
                self.files.save_cursors()

    def _look(self) -> Look | None:
        """Take in what changed; None while the job was not seen yet."""
        title = f"{self.kind.title} {self.job['metadata']['name']}"
        self.ending.leave_if_cancelled(title)
        if not self.watches.jobs.synced.is_set():
            return None
        if self.watches.jobs.forbidden:
            raise InputError(f"cannot watch {title}: {self.watches.jobs.forbidden}")
        uid, jobs = self.job["metadata"]["uid"], self.watches.jobs
        there = jobs.objects.get(uid)
        job = there or jobs.removed.get(uid)
        stays = there is not None and "deletionTimestamp" not in there["metadata"]
        # One that had ended may go at once: its time to live is over, too.
        if job is None or not (stays or self.kind.state(job).over):
            raise JobError(f"{title} was deleted by somebody else; run the step again")
        self.job, clock = job, time.monotonic()
        listed = self.watches.pods.synced.is_set()
        self._look_at_pods(clock)
        heard_at = self.printer.printed_at
        if self.progress is not None:
            self.progress.tell(clock, at_once=self.kind.state(job).over)
            heard_at = max(heard_at, self.progress.heard_at)
        return Look(self.kind, job, self.pods, listed, self.api.now(), clock, heard_at)

    def _look_at_pods(self, clock: float) -> None:
        there = self.watches.pods.objects
        self.pods = self.pods.look(self.job, there, self.watches.pods.removed, clock)
        self._follow_logs(there)

    @property
    def many(self) -> bool:
        """Whether its pods are too many for more than a sample of their logs."""
        return max(self.wanted, len(self.pods.present)) > ALL

    def _follow_logs(self, there: Mapping[str, Object]) -> None:
        if self.many and not self.told_sample:
            self.told_sample = True
            count = max(self.wanted, len(there))
            self.printer.say(sample_note(count, self.api.namespace))
        self.logs.follow(there, self.many)

    def _decide(self, look: Look, limits: Limits) -> Verdict | None:
        """How the job ended; None while it goes on. One that cannot go on is deleted."""
        problem = ""
        if not look.state.over and (lack := self.kind.lost(look.job)):
            problem = f"{look.title} {lack}"
        standing = self.narrator.standing.values()
        problem = problem or out_of_time(look, limits, self.narrator.line)
        if problem := problem or cannot_start(look, limits, standing):
            self.ending.delete_job()
            raise JobError(problem)
        return verdict(look, limits)

    def _end(self, found: Verdict, look: Look) -> Outcome:
        preempted = found.state.phase == "failed" and look.pods.only_taken_back
        if found.state.phase == "failed" and self.many:
            self._tell_failed()
        if not (self.kind.restarts_in_place and look.pods.restarted_at):
            self._drain()
        self._look_at_pods(look.clock)
        if found.state.phase == "failed" and not found.reasons:
            self._hear_out()
        return Outcome(
            state=found.state,
            job=self.job,
            pods=[*self.pods.own, *(found.reasons or self.pods.ended_for_good)],
            last_lines=self.printer.last_lines(),
            lost=self.pods.lost,
            preempted=preempted,
            given_up=found.given_up,
            never_started=str(oldest(self.narrator.standing.values()) or ""),
        )

    def _tell_failed(self) -> None:
        """Say how many failed, where that is more than the logs tell."""
        failed = sum(map(has_failed, self.pods.own))
        if failed > FAILED:
            shown = f"the logs of the first {FAILED} are shown"
            self.printer.say(f"{failed:,} pods of {self.job['metadata']['name']} failed; {shown}")

    def _hear_out(self) -> None:
        """Wait for what pods that are being stopped will say, where none has said why yet.

        The Training Operator calls a job failed as soon as a pod of it is deleted, which then still
        saves, and sends what it saved.
        """
        began = time.monotonic()
        while not any(map(has_failed, (*self.pods.own, *self.pods.ended))):
            grace = max(map(seconds_to_stop, self.pods.own), default=0)
            if time.monotonic() - began >= grace:
                break
            self.changed.wait(timeout=TURN_SECONDS)
            self.changed.clear()
            self._look_at_pods(time.monotonic())

    def _drain(self) -> None:
        """Let the logs come to their end; the job is over, so they do in a moment."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < DRAIN_SECONDS:
            pods = self.watches.pods.objects
            self._follow_logs(pods)
            if self.many and not self.logs.of_failed and self._read_cause(pods):
                continue
            heard = self.logs.uids & pods.keys() if self.many else pods.keys()
            if self.logs.printed and all(writes_no_more(pods[uid]) for uid in heard):
                break
            if self.many and waited > DRAIN_MANY_SECONDS and not self.logs.of_failed:
                break
            self.changed.wait(timeout=0.1)
            self.changed.clear()
        if self.progress is not None:
            self.progress.tell(time.monotonic(), at_once=True)

    def _read_cause(self, pods: Mapping[str, Object]) -> bool:
        """Begin with the log of the pod that would be named as the cause; false where it was read.

        Many fail in the second that their statuses tell, and only their logs say who was first.
        """
        own = [pod for uid, pod in pods.items() if uid not in self.pods.taken_back]
        named = root_cause(own, "", self.printer.last_lines()).pod
        unread = (each for each in own if each["metadata"]["uid"] not in self.logs.uids)
        cause = next((each for each in unread if each["metadata"]["name"] == named), None)
        if cause is not None:
            self.logs.begin(cause, end_only=True)
        return cause is not None


TOUCH_SECONDS = 10.0
# Each save is a sync of the claim's file system.
SAVE_SECONDS = 0.5


class StepFiles:
    """The files of one step; a claim that cannot be written now is tried again."""

    def __init__(self, folder: RunFolder, job: str, printer: Printer) -> None:
        self.printer, self.heartbeat = printer, folder.heartbeat
        self.checkpoints = folder.checkpoints
        self.cursors = folder.log_positions(job)
        """For a successor of this step, which goes on in the logs where this one ended."""
        self.saved = ""
        self.saved_at = self.touched_at = 0.0
        if self.cursors.exists():
            printer.load(self.cursors.read_text())

    def keep(self, clock: float) -> None:
        """Write what is due by the monotonic clock."""
        if clock - self.saved_at >= SAVE_SECONDS:
            self.saved_at = clock
            self.save_cursors()
        if clock - self.touched_at < TOUCH_SECONDS:
            return
        self.touched_at = clock
        try:
            self.heartbeat.write_text(f"{time.time():.0f}\n")  # a bucket tells content alone
        except OSError as error:
            print(f"warning: cannot touch {self.heartbeat}: {error.strerror}", flush=True)

    def newest_step(self) -> int:
        """The step of the newest checkpoint; 0 for none."""
        names = [path.name.removeprefix("step-") for path in self.checkpoints.glob("step-*")]
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def leave(self) -> None:
        """Note how far the logs were printed, and print no more; for a signal handler."""
        self.printer.stop()
        self.save_cursors()

    def save_cursors(self) -> None:
        """Write the cursors if they changed."""
        text = self.printer.dump()
        if text == self.saved:
            return
        with contextlib.suppress(OSError):
            with atomic_write(self.cursors) as file:
                file.write(text.encode())
            self.saved = text


METADATA = ("name", "uid", "labels", "creationTimestamp", "deletionTimestamp")
SPEC = ("nodeName", "restartPolicy", "terminationGracePeriodSeconds")
STATUS = ("phase", "reason", "message", "conditions")
CONTAINER = ("name", "image", "imageID", "state", "lastState", "restartCount")
EVENT = ("involvedObject", "reason", "message", "lastTimestamp", "eventTime")


def reduced_pod(pod: Object) -> Object:
    """A pod with what is asked of it here, in a record of its images, and in words."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    claims = [each for each in spec.get("volumes") or () if "persistentVolumeClaim" in each]
    containers = {
        name: [_of(each, CONTAINER) for each in status[name]]
        for name in ("containerStatuses", "initContainerStatuses")
        if status.get(name)
    }
    return {
        "metadata": _of(pod["metadata"], METADATA),
        "spec": {
            **_of(spec, SPEC),
            "volumes": claims,
            "containers": [_of(each, ("name", "image")) for each in spec.get("containers") or ()],
        },
        "status": {**_of(status, STATUS), **containers},
    }


def reduced_event(event: Object) -> Object:
    """An event with what it is about, what it says, and when."""
    return {"metadata": _of(event["metadata"], ("name", "uid")), **_of(event, EVENT)}


def _of(item: Object, names: Sequence[str]) -> Object:
    return {name: item[name] for name in names if name in item}

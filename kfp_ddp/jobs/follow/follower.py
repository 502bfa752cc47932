"""Follow one job to its end: watch, log, report and decide."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.jobs.ending import Ending, StepFiles
from kfp_ddp.jobs.failure import cause_in_pods
from kfp_ddp.jobs.follow.decisions import (
    Limits,
    Pods,
    Snapshot,
    Verdict,
    cannot_start,
    out_of_time,
    verdict,
)
from kfp_ddp.jobs.follow.logs import PodLogs
from kfp_ddp.jobs.follow.narrator import StatusPrinter
from kfp_ddp.jobs.follow.printer import Printer
from kfp_ddp.jobs.follow.ranks import StallWatch
from kfp_ddp.jobs.follow.sample import ALL, FAILED
from kfp_ddp.jobs.kinds import Kind
from kfp_ddp.jobs.kinds.base import started
from kfp_ddp.jobs.progress import ProgressPrinter
from kfp_ddp.k8s.api import Api, Object
from kfp_ddp.k8s.objects import part, select
from kfp_ddp.k8s.pods import has_failed, is_rejected, oldest, seconds_to_stop, writes_no_more
from kfp_ddp.k8s.resource import EVENTS, PODS
from kfp_ddp.k8s.watch_cache import WatchCache

TURN_SECONDS = 0.5
DRAIN_SECONDS = 5.0
# Of many pods some always stop late; the logs of failed ones are waited for all the same.
DRAIN_MANY_SECONDS = 1.0
# Each look is followed by a pause of this many times its CPU time, to not occupy a core.
REST = 3
PROGRESS_SECONDS = 10.0


@dataclass(frozen=True)
class Outcome(Verdict):
    """How a job ended, with its pods; `failure` is the first cause, None for success."""

    job: Object = field(default_factory=dict)
    pods: list[Object] = field(default_factory=list)
    last_lines: dict[str, list[str]] = field(default_factory=dict)
    """The last lines of each pod's log, by uid."""
    preempted: bool = False
    """Whether it failed only because its queue preempted its pods."""


class Watches:
    """Watches of one job, its pods, and the events about it."""

    def __init__(self, api: Api, kind: Kind, job: str, changed: threading.Event) -> None:
        by_name = {"fieldSelector": f"metadata.name={job}"}
        self.kind = kind
        self.jobs = WatchCache(api, kind.resource, by_name, changed)
        of_job = {"labelSelector": kind.pod_selector(job)}
        self.pods = WatchCache(api, PODS, of_job, changed, reduced_pod)
        # The conditions of a pod contain what its events say.
        about = {"fieldSelector": "involvedObject.kind!=Pod,type=Warning"}
        self.events = WatchCache(api, EVENTS, about, changed, reduced_event)
        self.all: tuple[WatchCache, ...] = (self.jobs, self.pods, self.events)

    def warnings(self) -> list[Object] | None:
        """Return the events on why pods are not created; None without the right to read them."""
        if self.events.forbidden:
            return None
        events = list(self.events.objects.values())
        names = {name for job in self.jobs.objects.values() for name in self.kind.creators(job)}
        return [item for item in events if item["involvedObject"].get("name") in names]


class Follower:
    """Follows one job by watches, a thread for each pod's log, and one loop that decides."""

    def __init__(
        self,
        api: Api,
        kind: Kind,
        job: Object,
        ending: Ending,
        run_dir: Path | None,
        progress: bool = False,
        sent: Object | None = None,
    ) -> None:
        """Follow `job`; of what was `sent`, an adopted one may have lost a part before."""
        name = job["metadata"]["name"]
        self.api = api
        self.kind = kind
        self.job = job
        self.ending = ending
        self.sent = sent or job
        self.title = f"{kind.title} {name}"
        self.watches = Watches(api, kind, name, ending.changed)
        self.pods = Pods(kind, started(job))
        self.limits = Limits()
        self.printer = Printer()
        self.logs = PodLogs(api, kind.containers, self.printer)
        self.narrator = StatusPrinter(self.printer, api)
        self.files: StepFiles | None = None
        self.progress: ProgressPrinter | None = None
        self.stalls: StallWatch | None = None
        if run_dir is not None:
            folder = RunFolder(run_dir)
            self.files = StepFiles(folder, name, self.printer, progress)
            if progress:
                self.stalls = StallWatch(folder.ranks)
                self.progress = ProgressPrinter(self._say, folder.metrics, PROGRESS_SECONDS)
        ending.watch_job(kind.resource, name, self.files)

    def _say(self, progress: str) -> None:
        """Print the progress, with the name of the job where this process follows several."""
        self.printer.say(f"{self.title}: {progress}" if len(Ending.active) > 1 else progress)

    def run(self, limits: Limits) -> Outcome:
        """Return the outcome once the logs are printed; RunCancelledError, JobError, InputError."""
        self.limits = limits
        for watch in self.watches.all:
            watch.start()
        worked = 0.0
        try:
            while True:
                if self.many:  # few pods are looked at on each change, to end without delay
                    time.sleep(min(TURN_SECONDS, REST * (time.thread_time() - worked)))
                self.ending.changed.wait(timeout=TURN_SECONDS)
                self.ending.changed.clear()
                worked = time.thread_time()
                snapshot = self._look()
                if snapshot is None:
                    continue
                self.narrator.report(snapshot, self.watches.warnings(), limits.pods)
                self.ending.keep_open()
                if self.files is not None:
                    self.files.update(snapshot.clock)
                if end := self._decide(snapshot):
                    return self._end(end, snapshot)
        finally:
            for watch in self.watches.all:
                watch.stop()
            self.logs.abandon()
            if self.files is not None:
                self.files.save_cursors()

    def _look(self) -> Snapshot | None:
        """Return the present state; None before the job, or the pods of an ended one, are seen."""
        self.ending.leave_if_cancelled(self.title)
        if not self.watches.jobs.synced.is_set():
            return None
        if self.watches.jobs.forbidden:
            raise InputError(f"cannot watch {self.title}: {self.watches.jobs.forbidden}")
        self.job = self._newest_job()
        over = self.kind.state(self.job).over
        clock = time.monotonic()
        listed = self.watches.pods.synced.is_set()
        if over and not listed:
            return None  # of an adopted job; only its pods show the cause
        self._look_at_pods(clock)
        heard_at = self.printer.printed_at
        if self.progress is not None:
            self.progress.update(clock, at_once=over)
            heard_at = max(heard_at, self.progress.updated_at)
        return Snapshot(self.kind, self.job, self.pods, listed, self.api.now(), clock, heard_at)

    def _newest_job(self) -> Object:
        """Return the job as it is now, or was when it ended; JobError if it was deleted."""
        uid = self.job["metadata"]["uid"]
        present = self.watches.jobs.objects.get(uid)
        if present is not None and "deletionTimestamp" not in present["metadata"]:
            return present
        # A job that has ended may be removed at once, by its time to live.
        removed = present or self.watches.jobs.removed.get(uid)
        if removed is None or not self.kind.state(removed).over:
            raise JobError(f"{self.title} was deleted by another user; run the step again")
        return removed

    def _present(self) -> dict[str, Object]:
        """Return the pods of the job, without those of a deleted job of the same name."""
        begin = self.job["metadata"]["creationTimestamp"]
        return {
            uid: pod
            for uid, pod in self.watches.pods.objects.items()
            if pod["metadata"].get("creationTimestamp", begin) >= begin
        }

    def _look_at_pods(self, clock: float) -> None:
        pods = self._present()
        self.pods = self.pods.look(self.job, pods, self.watches.pods.removed, clock)
        self.logs.follow(pods, self.many)

    @property
    def many(self) -> int:
        """The number of pods if these are too many to follow all logs, else 0."""
        count = max(self.limits.pods, len(self.pods.present))
        return count if count > ALL else 0

    def _decide(self, snapshot: Snapshot) -> Verdict | None:
        """Return how the job ended; None while it runs. Delete a job that cannot continue."""
        problem = self._problem(snapshot)
        if problem:
            self.ending.delete_job()
            raise JobError(problem)
        end = verdict(snapshot, self.limits)
        if end or self.stalls is None:
            return end
        stall = self.stalls.look(snapshot, self.limits.stall)
        if stall:
            self.printer.say(f"{snapshot.name}: {stall.state.message}; it is ended")
        return stall

    def _problem(self, snapshot: Snapshot) -> str:
        """Return why the job cannot go on; '' for nothing."""
        if not snapshot.state.over:
            lost = self.kind.lost(snapshot.job, self.sent)
            if lost:
                return f"{snapshot.title} {lost}"
        late = out_of_time(snapshot, self.limits, self.narrator.line)
        return late or cannot_start(snapshot, self.limits, self.narrator.waits.values())

    def _end(self, end: Verdict, snapshot: Snapshot) -> Outcome:
        failed = end.state.phase == "failed"
        if failed and self.many:
            self._say_which_logs()
        # A restarted container writes on, so its log would not end.
        if not (self.kind.restarts_in_place and snapshot.pods.restarted_at):
            self._drain()
        self._look_at_pods(snapshot.clock)
        if failed and not end.reasons:
            self._await_failure()
        pods = [*self.pods.own, *(end.reasons or self.pods.ended_for_good)]
        lines = self.printer.last_lines()
        failure = end.failure
        if failed and failure is None:
            waited = str(oldest(self.narrator.waits.values()) or "")
            failure = cause_in_pods(pods, end.state.message, lines, self.pods.lost, waited)
        node = end.node
        if failure and not node:
            node = _rejecting_node(pods, failure.pod)
        return Outcome(
            **(vars(end) | {"failure": failure, "node": node}),
            job=self.job,
            pods=pods,
            last_lines=lines,
            preempted=failed and snapshot.pods.only_preempted,
        )

    def _say_which_logs(self) -> None:
        """Say that only some of the failed pods have their logs shown, where there are more."""
        number = sum(map(has_failed, self.pods.own))
        if number > FAILED:
            shown = f"the logs of the first {FAILED} are shown"
            self.printer.say(f"{number:,} pods of {self.job['metadata']['name']} failed; {shown}")

    def _await_failure(self) -> None:
        """Wait for a pod to fail: the Training Operator counts one that still saves as failed."""
        began = time.monotonic()
        while not any(map(has_failed, (*self.pods.own, *self.pods.ended))):
            grace = max(map(seconds_to_stop, self.pods.own), default=0)
            if time.monotonic() - began >= grace:
                break
            self.ending.changed.wait(timeout=TURN_SECONDS)
            self.ending.changed.clear()
            self._look_at_pods(time.monotonic())

    def _drain(self) -> None:
        """Wait a moment for the end of the logs of a job that is over."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < DRAIN_SECONDS:
            pods = self._present()
            self.logs.follow(pods, self.many)
            is_idle = self.many and not self.logs.reads_failed_pod
            if is_idle and self._read_cause(pods):
                continue
            followed = self.logs.uids & pods.keys() if self.many else pods.keys()
            silent = all(writes_no_more(pods[uid]) for uid in followed)
            if silent and self.logs.printed:
                break
            # Again, since the log of a failed pod may have ended meanwhile.
            is_idle = self.many and not self.logs.reads_failed_pod
            if is_idle and waited > DRAIN_MANY_SECONDS:
                break
            self.ending.changed.wait(timeout=0.1)
            self.ending.changed.clear()
        if self.progress is not None:
            self.progress.update(time.monotonic(), at_once=True)

    def _read_cause(self, pods: Mapping[str, Object]) -> bool:
        """Open the log that would be the cause, as many fail at once; false if it was read."""
        own = [pod for uid, pod in pods.items() if uid not in self.pods.preempted]
        cause = cause_in_pods(own, "", self.printer.last_lines()).pod
        for pod in own:
            meta = pod["metadata"]
            if meta["name"] != cause or meta["uid"] in self.logs.uids:
                continue
            for container in self.kind.containers:
                self.logs.begin(pod, container, end_only=True)
            return True
        return False


def _rejecting_node(pods: list[Object], name: str) -> str:
    """Return the node that rejected the last pod of this name; '' if none did."""
    for pod in reversed(pods):
        if pod["metadata"]["name"] == name and is_rejected(pod):
            return str(pod["spec"].get("nodeName") or "")
    return ""


METADATA = ("name", "uid", "labels", "creationTimestamp", "deletionTimestamp")
SPEC = ("nodeName", "restartPolicy", "terminationGracePeriodSeconds")
STATUS = ("phase", "reason", "message", "conditions")
CONTAINER = ("name", "image", "imageID", "state", "lastState", "restartCount")
IMAGE = ("name", "image")
EVENT = ("involvedObject", "reason", "message", "lastTimestamp", "eventTime")


def reduced_pod(pod: Object) -> Object:
    """Return the fields of a pod that the launcher uses, a hundredth of its memory."""
    spec = part(pod, "spec")
    status = part(pod, "status")
    claims = [item for item in spec.get("volumes") or () if "persistentVolumeClaim" in item]
    containers: Object = {}
    for name in ("containerStatuses", "initContainerStatuses"):
        if status.get(name):
            containers[name] = [select(item, CONTAINER) for item in status[name]]
    return {
        "metadata": select(pod["metadata"], METADATA),
        "spec": {
            **select(spec, SPEC),
            "volumes": claims,
            "containers": [select(item, IMAGE) for item in spec.get("containers") or ()],
        },
        "status": {**select(status, STATUS), **containers},
    }


def reduced_event(event: Object) -> Object:
    """Return the fields of an event that the launcher uses."""
    return {"metadata": select(event["metadata"], ("name", "uid")), **select(event, EVENT)}

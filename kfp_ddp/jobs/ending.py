"""Cancel and eviction of the step, both of which reach it as SIGTERM 30 ms to 0.7 s before its end.

Before that, the Workflow of a cancelled run has spec.activeDeadlineSeconds 0 (or a shutdown), and
the pod of an evicted step a deletionTimestamp. Whether Argo then retries it, nobody can choose.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import ClassVar

from kfp_ddp.core.errors import RunCancelledError
from kfp_ddp.core.failure import TERMINATION_LOG
from kfp_ddp.core.files import atomic_write
from kfp_ddp.core.log import log
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.core.step import handling_signals
from kfp_ddp.jobs.follow.printer import Printer
from kfp_ddp.jobs.identity import Owner
from kfp_ddp.k8s.api import Api, ApiError, Object
from kfp_ddp.k8s.objects import part
from kfp_ddp.k8s.resource import PODS, WORKFLOWS, Resource
from kfp_ddp.k8s.watch_cache import WatchCache
from kfp_ddp.training.spec.manifest import step_dirs, step_of

BRIEF_SECONDS = 0.5
LEAVE_SECONDS = 3.0
LOOK_SECONDS = 0.1
WARM_SECONDS = 10.0
TOUCH_SECONDS = 10.0
# Each save is an fsync on the PVC.
SAVE_SECONDS = 0.5


class StepFiles:
    """The log cursors and the heartbeat of a step; failed writes are retried.

    Rank 0 stops the job, with a checkpoint, when the heartbeat file goes stale; see
    `stop_when_stale` of `kfp_ddp.training.spec.config.TrainConfig`.
    """

    def __init__(self, folder: RunFolder, job: str, printer: Printer, trains: bool = False) -> None:
        self.printer = printer
        self.heartbeat = folder.heartbeat
        self.checkpoints = folder.checkpoints
        self.trains = trains
        self.cursors = folder.log_positions(job)
        """For the retry of this step, which continues the logs from there."""
        self.saved = ""
        self.saved_at = self.touched_at = 0.0
        if self.cursors.exists():
            printer.load(self.cursors.read_text())

    def update(self, clock: float) -> None:
        """Write what is due by the monotonic clock."""
        if clock - self.saved_at >= SAVE_SECONDS:
            self.saved_at = clock
            self.save_cursors()
        if clock - self.touched_at < TOUCH_SECONDS:
            return
        self.touched_at = clock
        try:
            self.heartbeat.write_text(f"{time.time():.0f}\n")  # a bucket has no time stamps of ours
        except OSError as error:
            log.warning(f"cannot touch {self.heartbeat}: {error.strerror}")

    def newest_step(self) -> int | None:
        """Return the step from which a retry of a training resumes; None for another job."""
        if not self.trains:
            return None
        return max(map(step_of, step_dirs(self.checkpoints)), default=0)

    def save_and_stop(self) -> None:
        """Stop printing and save the log cursors; for a signal handler."""
        self.printer.stop()
        self.save_cursors()

    def save_cursors(self) -> None:
        """Write the cursors if they changed."""
        text = self.printer.dump()
        if text == self.saved:
            return
        with suppress(OSError):
            with atomic_write(self.cursors) as file:
                file.write(text.encode())
            self.saved = text


class Ending:
    """Watches for a cancel of the run and an eviction of this step, and handles their signals."""

    active: ClassVar[list["Ending"]] = []
    """Those that watch now: in a sweep one for each of several jobs, which threads follow."""

    def __init__(self, api: Api, owner: Owner | None) -> None:
        self.api = api
        self.owner = owner
        self.short_api = api.another()
        """A connection that stays open for the last request."""
        self.warmed_at = -WARM_SECONDS
        self.job: tuple[Resource, str] | None = None
        """Its kind and name."""
        self.files: StepFiles | None = None
        self.resumes_from: int | None = None
        """The step from which Retry would resume; None for unknown."""
        self.reported = False
        """Whether the eviction was reported."""
        self.reporting = threading.Lock()
        self.changed = threading.Event()
        """Is set on each change."""
        self.over = threading.Event()
        self.changed_or_over = threading.Event()
        self.watches: list[WatchCache] = []
        if owner is not None:
            query = {"fieldSelector": f"metadata.name={owner.workflow}"}
            self.watches.append(WatchCache(api, WORKFLOWS, query, self.changed_or_over))
            query = {"fieldSelector": f"metadata.name={owner.pod}"}
            self.watches.append(WatchCache(api, PODS, query, self.changed_or_over))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch, and handle SIGTERM and SIGINT, during a `with` block."""
        for watch in self.watches:
            watch.start()
        threading.Thread(target=self._wait, daemon=True, name="eviction").start()
        self.keep_open()
        self.active.append(self)
        try:
            with handling_all():
                yield
        finally:
            self.active.remove(self)
            for watch in self.watches:
                watch.stop()
            self.over.set()
            self.changed_or_over.set()

    def cancelled(self) -> bool:
        """Return whether the run was terminated, so that the job is no longer needed."""
        return any(terminated(item) for item in self._objects())

    def evicted(self) -> bool:
        """Return whether this step's own pod is being deleted; Argo may retry it."""
        return any(_deleted(item) for item in self._objects())

    def watch_job(self, kind: Resource, name: str, files: StepFiles | None = None) -> None:
        """Handle the next signal for this job, with these files of the step."""
        self.job = (kind, name)
        self.files = files

    def leave_if_cancelled(self, job: str) -> None:
        """Delete the job of a terminated run and raise RunCancelledError; `job` is its title."""
        if self.cancelled():
            self.delete_job()
            raise RunCancelledError(f"the run was terminated; {job} is deleted")

    def keep_open(self) -> None:
        """Open the connection for the last request, or keep it open."""
        if time.monotonic() - self.warmed_at < WARM_SECONDS:
            return
        self.warmed_at = time.monotonic()
        path = PODS.path(self.api.namespace, self.owner.pod) if self.owner else "/version"
        with suppress(ApiError):
            self.short_api.call("GET", path, seconds=2)

    def delete_job(self) -> None:
        """Delete the job, if it exists."""
        if self.job:
            self.api.delete(*self.job)

    def leave(self) -> None:
        """Before this process ends: on eviction leave the job to the retry, else delete it."""
        name = self.job[1] if self.job else ""
        evicted = not self.cancelled() and self.evicted()
        # The other thread may be about to report.
        if not self.cancelled() and self.reporting.acquire(timeout=LOOK_SECONDS):
            self._look_for_newest_step()
        if not evicted and not self.cancelled():
            _report_to_kubernetes(self._message())  # first: a request may take too long
            evicted = self._evicted_now()
        if evicted:
            message = self._message()
            _report_to_kubernetes(message)
            message += f"; job {name} keeps running for the retry, unless the run fails"
        else:
            message = f"stopped; job {name} is deleted"
            _report_to_kubernetes(message)
            try:
                if self.job:
                    self.short_api.delete(*self.job, retry=False, seconds=BRIEF_SECONDS)
            except ApiError as error:
                message = f"stopped; job {name} could not be deleted ({error.message})"
        _print(f"\n{message}\n")
        if self.files:
            self.files.save_and_stop()

    def _wait(self) -> None:
        """Report an eviction while the PVC may block the main thread; forward changes."""
        while not self.over.is_set():
            self.changed_or_over.wait()
            self.changed_or_over.clear()
            self.report_eviction()
            self.changed.set()

    def report_eviction(self) -> None:
        """Report an eviction as soon as it is seen: after the signal there may be no time."""
        if self.reported or not self.evicted() or self.cancelled():
            return
        with self.reporting:
            self._look_for_newest_step()
            self.reported = True
            _report_to_kubernetes(self._message())
            _print(f"{self._message()}\n")

    def _look_for_newest_step(self) -> None:
        """Update the newest step within a time limit, since the PVC may hang.

        A reported step does not change, so that the log and the run's error agree.
        """
        files = self.files
        if self.reported or files is None:
            return

        def look() -> None:
            with suppress(OSError):
                self.resumes_from = files.newest_step()

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        looking.join(LOOK_SECONDS)

    def _message(self) -> str:
        if self.resumes_from is None:
            return "launcher was evicted; Retry adopts its job, or creates a new one"
        return f"launcher was evicted; Retry resumes from step {self.resumes_from} or later"

    def _objects(self) -> list[Object]:
        return [item for watch in self.watches for item in list(watch.objects.values())]

    def _evicted_now(self) -> bool:
        """Return whether the own pod is deleted, or replaced by one of its name."""
        if self.owner is None:
            return False
        try:
            pod = self.short_api.get(PODS, self.owner.pod, seconds=BRIEF_SECONDS)
        except ApiError:
            return False
        if pod is None:
            return True
        uid = pod["metadata"]["uid"]
        return _deleted(pod) or os.environ.get("KFP_POD_UID", uid) != uid


@contextmanager
def handling_all() -> Iterator[None]:
    """On SIGTERM and SIGINT, leave all active jobs and exit; only the main thread can do so."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        try:
            # The first leaves in this thread: a single job, the usual case, needs no other.
            first = Ending.active[:1]
            rest = Ending.active[1:]
            leaving = [threading.Thread(target=ending.leave, daemon=True) for ending in rest]
            for thread in leaving:
                thread.start()
            for ending in first:
                ending.leave()
            for thread in leaving:
                thread.join(LEAVE_SECONDS)
        finally:
            os._exit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    with handling_signals(on_signal, signal.SIGTERM, signal.SIGINT) if main else nullcontext():
        yield


def _print(text: str) -> None:
    """Print to stderr without its lock, which an interrupted print may own."""
    with suppress(OSError):
        os.write(2, text.encode())


def _report_to_kubernetes(message: str) -> None:
    """Write the termination message, which Argo shows as the error of the step and the run."""
    path = Path(os.environ.get("KFP_DDP_TERMINATION_LOG", TERMINATION_LOG))
    with suppress(OSError):
        if path.exists():
            path.write_text(message)


def terminated(item: Object) -> bool:
    """Return whether an object is the Workflow of a cancelled run."""
    spec = part(item, "spec")
    if "containers" in spec:
        return False
    return spec.get("activeDeadlineSeconds") == 0 or bool(spec.get("shutdown"))


def _deleted(item: Object) -> bool:
    is_pod = "containers" in part(item, "spec")
    return is_pod and bool(item["metadata"].get("deletionTimestamp"))

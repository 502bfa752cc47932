"""Cancel and eviction told apart, and what is done about each in the moment that is left.

Both reach a step as SIGTERM, and after it there are 30 ms to 0.7 s: KFP's launcher dies at once
and its parent looks for that once a second. A cancelled run's Workflow has
spec.activeDeadlineSeconds 0 (or a shutdown) before that; an evicted step's own pod has a
deletionTimestamp. Argo runs that step again under the same name, or fails the run, whichever of
the pod's end and its going it sees first; nothing in the step can choose.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from kfp_ddp.core.errors import PREEMPTED, RunCancelledError
from kfp_ddp.core.failure import TERMINATION_LOG
from kfp_ddp.jobs.identity import WORKFLOWS, Owner
from kfp_ddp.k8s.api import DELETE, Api, ApiError, Object, core, custom
from kfp_ddp.k8s.watch_cache import WatchCache

BRIEF_SECONDS = 0.5
LOOK_SECONDS = 0.1
WARM_SECONDS = 10.0


class Ending:
    """Watches for the end of the run and of this step, and answers the signal of either."""

    def __init__(self, api: Api, owner: Owner | None, changed: threading.Event) -> None:
        self.api, self.owner = api, owner
        self.quick = api.another()
        """A connection that is kept open for the last request."""
        self.warmed_at = -WARM_SECONDS
        self.job_path = ""
        self.before_exit: Callable[[], None] = lambda: None
        self.newest_step: Callable[[], int | None] = lambda: None
        """Looks for the step from which Retry would go on; None where none is known."""
        self.resumes_from: int | None = None
        """What it found last."""
        self.told = False
        """Whether an eviction was told."""
        self.telling = threading.Lock()
        self.changed, self.stirred, self.over = changed, threading.Event(), threading.Event()
        self.watches: list[WatchCache] = []
        if owner is not None:
            one = {"fieldSelector": f"metadata.name={owner.workflow}"}
            workflows = custom(WORKFLOWS, api.namespace, "workflows")
            self.watches.append(WatchCache(api, workflows, one, self.stirred))
            one = {"fieldSelector": f"metadata.name={owner.pod}"}
            self.watches.append(WatchCache(api, core(api.namespace, "pods"), one, self.stirred))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch, and handle SIGTERM and SIGINT, for the length of a `with` block."""
        for watch in self.watches:
            watch.start()
        threading.Thread(target=self._stand_by, daemon=True, name="eviction").start()
        self.warm()
        numbers = (signal.SIGTERM, signal.SIGINT)
        previous = [signal.signal(number, self._on_signal) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, previous, strict=True):
                signal.signal(number, handler)
            for watch in self.watches:
                watch.stop()
            self.over.set()
            self.stirred.set()

    def cancelled(self) -> bool:
        """Whether the run was terminated: nobody wants the job any more."""
        return any(terminated(each) for each in self._objects())

    def evicted(self) -> bool:
        """Whether this step's own pod is being deleted; it will be run again."""
        return any(_deleted(each) for each in self._objects())

    def wake(self, changed: threading.Event) -> None:
        """Set this event when something changes."""
        self.changed = changed

    def leave_if_cancelled(self, job: str) -> None:
        """Delete the job and leave where nobody wants it any more; `job` is what it is called.

        Raises:
            RunCancelledError: the run was terminated.
        """
        if self.cancelled():
            self.delete_job()
            raise RunCancelledError(f"the run was terminated; {job} is deleted")

    def warm(self) -> None:
        """Open the connection for the last request, or keep it open; now and then is enough."""
        if time.monotonic() - self.warmed_at < WARM_SECONDS:
            return
        self.warmed_at = time.monotonic()
        path = core(self.api.namespace, "pods", self.owner.pod) if self.owner else "/version"
        with suppress(ApiError):
            self.quick.call("GET", path, seconds=2)

    def delete_job(self) -> None:
        """Delete the job for good; one that is gone is fine."""
        if self.job_path:
            self.api.delete(self.job_path)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Leave the job to a successor on eviction, delete it otherwise; then be gone."""
        name = self.job_path.rpartition("/")[2]
        evicted = not self.cancelled() and self.evicted()
        # The thread that tells may be at it.
        if not self.cancelled() and self.telling.acquire(timeout=LOOK_SECONDS):
            self._look_for_newest_step()
        if not evicted and not self.cancelled():
            _tell_kubernetes(self._words())  # first: asking may take longer than there is
            evicted = self._evicted_now()
        if evicted:
            said = self._words()
            _tell_kubernetes(said)
            said += f"; job {name} goes on and will be taken up again, unless the run ends for this"
        else:
            said = f"stopped; job {name} is deleted"
            _tell_kubernetes(said)
            try:
                if self.job_path:
                    self.quick.call("DELETE", self.job_path, DELETE, seconds=BRIEF_SECONDS)
            except ApiError as error:
                if error.status != 404:
                    said = f"stopped; job {name} could not be deleted ({error.message})"
        try:
            _print(f"\n{said}\n")
            self.before_exit()
        finally:
            os._exit(PREEMPTED)

    def _stand_by(self) -> None:
        """Tell of an eviction from a thread of its own, and pass on what changes.

        The main thread may wait for the claim, for longer than there is.
        """
        while not self.over.is_set():
            self.stirred.wait()
            self.stirred.clear()
            self.tell_of_eviction()
            self.changed.set()

    def tell_of_eviction(self) -> None:
        """Say it as soon as it is seen, for after the signal there may be no time to."""
        if self.told or not self.evicted() or self.cancelled():
            return
        with self.telling:
            self._look_for_newest_step()
            self.told = True
            _tell_kubernetes(self._words())
            _print(f"{self._words()}\n")

    def _look_for_newest_step(self) -> None:
        """Look once, and no longer than there is time: a claim that hangs may not keep this step.

        A step that was told stays, so that the log and the run's error name the same one.
        """
        if self.told:
            return

        def look() -> None:
            with suppress(OSError):
                self.resumes_from = self.newest_step()

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        looking.join(LOOK_SECONDS)

    def _words(self) -> str:
        if self.resumes_from is None:
            return "launcher was evicted; Retry takes its job up, or makes it anew"
        return f"launcher was evicted; Retry goes on from step {self.resumes_from} or later"

    def _objects(self) -> list[Object]:
        return [each for watch in self.watches for each in list(watch.objects.values())]

    def _evicted_now(self) -> bool:
        """Ask about the own pod: the watch may be a moment behind the signal.

        A pod that was deleted by force is gone before its processes are, and the one that takes
        its place has its name.
        """
        if self.owner is None:
            return False
        try:
            path = core(self.api.namespace, "pods", self.owner.pod)
            found = self.quick.call("GET", path, seconds=BRIEF_SECONDS)
        except ApiError as error:
            return error.status == 404
        uid = found["metadata"]["uid"]
        return _deleted(found) or os.environ.get("KFP_POD_UID", uid) != uid


def _print(text: str) -> None:
    """Print at once: the print of another thread, or one that a signal interrupts, locks stdout."""
    with suppress(OSError):
        os.write(1, text.encode())


def _tell_kubernetes(said: str) -> None:
    """Leave the line where Argo takes the error of a step, and so of its run, from."""
    path = Path(os.environ.get("KFP_DDP_TERMINATION_LOG", TERMINATION_LOG))
    with suppress(OSError):
        if path.exists():
            path.write_text(said)


def terminated(item: Object) -> bool:
    """Whether it is the Workflow of a run that was cancelled."""
    spec = item.get("spec") or {}
    if "containers" in spec:
        return False
    return spec.get("activeDeadlineSeconds") == 0 or bool(spec.get("shutdown"))


def _deleted(item: Object) -> bool:
    is_pod = "containers" in (item.get("spec") or {})
    return is_pod and bool(item["metadata"].get("deletionTimestamp"))

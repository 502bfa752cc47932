"""Logs of all pods: each line once and in order, over cuts, restarts and adoption."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime

from kfp_ddp.jobs.follow.printer import RECENT_LINES, LogCursor, Printer, Stamp
from kfp_ddp.jobs.follow.sample import LogRequest, requests_of, sample, sample_note
from kfp_ddp.jobs.kinds import pod_title
from kfp_ddp.k8s.api import Api, ApiError, Object
from kfp_ddp.k8s.objects import container_statuses, has_ended, part
from kfp_ddp.k8s.pods import has_failed
from kfp_ddp.k8s.resource import PODS

# A silent log is requested again after this time: its connection may have been cut silently.
QUIET_SECONDS = 60.0
# A redrawn progress bar has no line end; the container runtime splits at the same length.
LONGEST = 16384
# Pause after a refusal, such as by a node without the log.
REFUSED_SECONDS = 0.5


class PodLogs:
    """The followed logs, each in a thread with its own connection."""

    def __init__(
        self,
        api: Api,
        containers: Sequence[str],
        printer: Printer,
        title: Callable[[Object], str] = pod_title,
    ) -> None:
        self.api = api
        self.containers = containers
        self.printer = printer
        self.title = title
        self.threads: dict[tuple[str, str], PodLog] = {}
        self.sampled = False

    def follow(self, pods: Mapping[str, Object], many: int = 0) -> None:
        """Update the pods, and open the logs to follow: all, or a sample if there are `many`."""
        names = {pod["metadata"]["name"]: uid for uid, pod in pods.items()}
        for (uid, _), log in self.threads.items():
            if names.get(log.pod_name, uid) != uid:
                log.abandoned.set()  # its replacement has the same name, hence the same log
            if uid in pods:
                log.latest = pods[uid]
        requests: list[LogRequest] = []
        if many:
            requests = self._sample(pods, many)
        else:
            for uid, pod in pods.items():
                requests += requests_of(uid, pod, self.containers, end_only=False)
        for uid, container, end_only in requests:
            self.begin(pods[uid], container, end_only)

    def _sample(self, pods: Mapping[str, Object], many: int) -> list[LogRequest]:
        """Return the logs of a large job to open now, and forget those of removed pods."""
        if not self.sampled:
            self.printer.say(sample_note(many, self.api.namespace))
        self.sampled = True
        for key, log in list(self.threads.items()):
            if log.uid not in pods and not log.is_alive():
                del self.threads[key]
        begun = {log.uid: log.is_alive() for log in self.threads.values()}
        return sample(pods, self.containers, begun)

    def begin(self, pod: Object, container: str, end_only: bool) -> None:
        """Open one more log."""
        key = str(pod["metadata"]["uid"]), container
        if key not in self.threads:
            log = PodLog(self.api, pod, container, self.printer, self.title(pod), end_only)
            self.threads[key] = log
            log.start()

    @property
    def printed(self) -> bool:
        """Whether every opened log has ended."""
        return not any(log.is_alive() for log in self.threads.values())

    @property
    def uids(self) -> set[str]:
        """The pods with opened logs."""
        return {log.uid for log in self.threads.values()}

    @property
    def reads_failed_pod(self) -> bool:
        """Whether the log of a failed pod is still being read."""
        return any(log.is_alive() and has_failed(log.latest) for log in self.threads.values())

    def abandon(self) -> None:
        """End the threads at their next line."""
        for log in self.threads.values():
            log.abandoned.set()


class PodLog(threading.Thread):
    """Follows the log of one container until it has ended and every line is printed."""

    def __init__(
        self, api: Api, pod: Object, container: str, printer: Printer, title: str, end_only: bool
    ) -> None:
        super().__init__(daemon=True, name=f"log {pod['metadata']['name']}")
        self.api = api.another()
        self.container = container
        self.printer = printer
        self.path = PODS.path(api.namespace, pod["metadata"]["name"])
        self.pod_name = pod["metadata"]["name"]
        self.uid = str(pod["metadata"]["uid"])
        self.key = f"{self.uid}/{container}"
        self.end_only = end_only
        """Whether the last lines of the existing log are enough."""
        self.title = title
        self.latest = pod
        """The pod in its current state."""
        self.abandoned = threading.Event()

    def run(self) -> None:
        """Print until the container has ended; after a cut, continue from the last printed line."""
        with contextlib.closing(self.api):
            while not self.abandoned.is_set():
                restart, over = self._status()
                cursor = self.printer.cursors.get(self.key)
                if cursor is not None and cursor.restart < restart:
                    # The container was restarted: first the rest of its previous log.
                    self._read(cursor.restart, previous=True, follow=False)
                complete = self._read(restart, previous=False, follow=not over)
                now, over_now = self._status()
                # It may have been restarted while its log was read.
                was_last = over and over_now and now == restart
                if complete and was_last:
                    return
                self.abandoned.wait(0.05 if over_now else 0.5)

    def _status(self) -> tuple[int, bool]:
        """Return the number of restarts, and whether the container has ended for good."""
        over = has_ended(self.latest)
        never_restarts = part(self.latest, "spec").get("restartPolicy") == "Never"
        for container in container_statuses(self.latest):
            if container["name"] == self.container:
                restarts = int(container.get("restartCount") or 0)
                ended = "terminated" in part(container, "state")
                return restarts, over or (ended and never_restarts)
        return 0, over

    def _read(self, restart: int, previous: bool, follow: bool) -> bool:
        """Print the new lines of one run of the container; return whether they are complete."""
        cursor = self.printer.cursors.get(self.key)
        if cursor is not None and cursor.restart != restart:
            cursor = None
        query = {"container": self.container, "timestamps": "true"}
        if follow:
            query["follow"] = "true"
        if previous:
            query["previous"] = "true"
        if cursor is not None:
            since = datetime.fromtimestamp(cursor.stamp.seconds)  # the server's resolution
            query["sinceTime"] = since.astimezone().isoformat()
        elif self.end_only:
            query["tailLines"] = str(RECENT_LINES)
        try:
            for now, text in unprinted(self._lines(query, follow), restart, cursor):
                self.printer.line(self.key, now, f"[{self.title}] {drawn(text)}")
        except ApiError as error:
            if error.status == 404:
                # The pod, or its earlier run, was removed: the rest is lost.
                if not previous:
                    self.abandoned.set()
                return True
            if error.status:
                self.abandoned.wait(REFUSED_SECONDS)
            return False
        return True

    def _lines(self, query: dict[str, str], follow: bool) -> Iterator[str]:
        for raw in self.api.lines(f"{self.path}/log", query, QUIET_SECONDS, LONGEST):
            if self.abandoned.is_set():
                return
            if not raw.endswith(b"\n") and follow:
                raise ApiError(0, "", "the connection was cut within a line")
            yield raw.decode("utf-8", "replace").rstrip("\n")


def drawn(text: str) -> str:
    """Return what a terminal shows of a line with carriage returns."""
    return text.rstrip("\r").rpartition("\r")[2]


def unprinted(
    lines: Iterable[str], restart: int, cursor: LogCursor | None
) -> Iterator[tuple[LogCursor, str]]:
    """Yield each line after a cursor, with the next cursor; a line without a time continues one."""
    last = cursor
    passed = 0
    stamp: Stamp | None = None
    for line in lines:
        head, _, text = line.partition(" ")
        try:
            stamp = Stamp.parse(head)
        except ValueError:
            text = line
        if stamp is None:
            continue
        if cursor is not None:
            if stamp < cursor.stamp:
                continue
            if stamp == cursor.stamp and passed < cursor.lines:
                passed += 1
                continue
            cursor = None
        # Several lines may have the same time: the cursor counts them.
        number = 1
        if last is not None and last.stamp == stamp:
            number = last.lines + 1
        last = LogCursor(restart, stamp, number)
        yield last, text

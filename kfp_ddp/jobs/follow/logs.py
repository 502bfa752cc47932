"""Logs of all pods: each line once and in order, over cuts, restarts and adoption."""

import contextlib
import json
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from kfp_ddp.core.text import from_json
from kfp_ddp.jobs.kinds import pod_role, pod_title
from kfp_ddp.k8s.api import Api, ApiError, Object
from kfp_ddp.k8s.objects import container_statuses, has_ended, part
from kfp_ddp.k8s.pods import ended_at, has_failed, has_started
from kfp_ddp.k8s.resource import PODS

# The last lines of each pod, to find why it ended.
RECENT_LINES = 400
# A pod that is replaced again and again counts as a new one each time.
RECENT_PODS = 256
STOP_SECONDS = 0.02
RFC_3339 = re.compile(r"(.{19})(?:\.([0-9]*))?(.*)")


class Stamp(NamedTuple):
    """The time of a line to the nanosecond. The text drops trailing zeros, so it does not sort."""

    seconds: int
    nanos: int

    @classmethod
    def parse(cls, text: str) -> "Stamp":
        """Parse RFC 3339 as the kubelet writes it."""
        parts = RFC_3339.fullmatch(text)
        if parts is None:
            raise ValueError(f"{text!r} is not a time")
        seconds, fraction, zone = parts.groups("")
        if zone in ("Z", ""):
            zone = "+00:00"
        whole = datetime.fromisoformat(seconds + zone)
        return cls(int(whole.timestamp()), int(fraction.ljust(9, "0")[:9]))


class LogCursor(NamedTuple):
    """How far a container's log was printed: up to `stamp`, with `lines` of that time."""

    restart: int
    stamp: Stamp
    lines: int


class Printer:
    """Prints the lines of many pods and records the cursor of each log, under one lock."""

    def __init__(self) -> None:
        self.cursors: dict[str, LogCursor] = {}
        self.recent: dict[str, deque[str]] = {}
        self.printed_at = 0.0
        """Monotonic clock of a pod's last line."""
        self.lock = threading.Lock()
        self.over = False

    def line(self, key: str, cursor: LogCursor, text: str) -> None:
        """Print a line and record its cursor, unless stopped."""
        with self.lock:
            if self.over:
                return
            self.write(text)
            self.cursors[key] = cursor
            self.printed_at = time.monotonic()
            recent = self.recent.setdefault(key.partition("/")[0], deque(maxlen=RECENT_LINES))
            recent.append(text.partition("] ")[2])
            if len(self.recent) > RECENT_PODS:
                self.recent.pop(next(iter(self.recent)))

    def stop(self) -> None:
        """Print no more lines; waits briefly for the lock, which an interrupted thread may own."""
        self.over = True
        if self.lock.acquire(timeout=STOP_SECONDS):
            self.lock.release()

    def say(self, text: str) -> None:
        """Print a message of the launcher."""
        with self.lock:
            self.write(text)

    def write(self, text: str) -> None:
        """Print a line."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def dump(self) -> str:
        """Return the cursors as JSON, without the lock, which an interrupted thread may own."""
        cursors = self.cursors.copy()  # other threads change it
        rows = {
            key: [cursor.restart, *cursor.stamp, cursor.lines] for key, cursor in cursors.items()
        }
        return json.dumps(rows)

    def last_lines(self) -> dict[str, list[str]]:
        """Return the last lines of each pod's log, by uid."""
        recent = self.recent.copy()  # other threads change it
        return {uid: list(lines) for uid, lines in recent.items()}

    def load(self, text: str) -> None:
        """Load the cursors of an earlier launcher; ignore an invalid file."""
        try:
            for key, (restart, seconds, nanos, lines) in from_json(text).items():
                self.cursors[key] = LogCursor(restart, Stamp(seconds, nanos), lines)
        except (ValueError, TypeError, AttributeError):
            self.cursors = {}


ALL = 16
"""Pods up to which every log is followed: each is a connection to the API server for days."""
STREAMS = 16
"""Logs open at once."""
FOR_FAILED = 4
"""How many of them are reserved for pods that fail."""
FAILED = 16
"""How many failed pods have their logs read, from the first."""


class LogRequest(NamedTuple):
    """A log to follow; with `end_only` the last lines of the existing one are enough."""

    uid: str
    container: str
    end_only: bool


def sample(
    pods: Mapping[str, Object], containers: Sequence[str], begun: Mapping[str, bool]
) -> list[LogRequest]:
    """Return a large job's logs to open now; `begun`: whether opened ones, by uid, are open."""
    room = STREAMS - sum(begun.values())
    logs = _logs_of_failed(pods, containers, begun, room)
    if len(logs) >= room:
        return logs
    nodes = {_node(pods[uid]) for uid in begun if uid in pods}
    for uid in sorted(set(pods) - set(begun), key=lambda uid: pod_role(pods[uid]).order):
        pod = pods[uid]
        leads = pod_role(pod).number == 0
        reserved = 0 if leads else FOR_FAILED
        if room - len(logs) <= reserved:
            break
        # Rank 0's log is followed in any case, of the others one on each node.
        is_covered = _node(pod) in nodes and not leads
        if is_covered or has_failed(pod):
            continue
        requests = _requests(uid, pod, containers, end_only=not leads)
        if requests:
            nodes.add(_node(pod))
            logs += requests
    return logs


def _logs_of_failed(
    pods: Mapping[str, Object], containers: Sequence[str], begun: Mapping[str, bool], room: int
) -> list[LogRequest]:
    """Return the logs of the first pods that failed, as long as there is room."""
    failed = [uid for uid, pod in pods.items() if has_failed(pod)]
    failed.sort(key=lambda uid: ended_at(pods[uid]))
    logs: list[LogRequest] = []
    for uid in failed[:FAILED]:
        if uid not in begun and len(logs) < room:
            logs += _requests(uid, pods[uid], containers, end_only=True)
    return logs


def sample_note(pods: int, namespace: str) -> str:
    """Return a note on which logs of a large job are followed."""
    return (
        f"following at most {STREAMS - FOR_FAILED} of {pods:,} logs: of rank 0's pod and of one on "
        f"each node; of the first {FAILED} pods that fail the end is shown; "
        f"`kubectl logs -n {namespace} POD` shows any other"
    )


def _requests(uid: str, pod: Object, containers: Sequence[str], end_only: bool) -> list[LogRequest]:
    """Return the logs of the pod's containers that have started."""
    return [LogRequest(uid, name, end_only) for name in containers if has_started(pod, name)]


def _node(pod: Object) -> str:
    return str(part(pod, "spec").get("nodeName") or "")


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
                requests += _requests(uid, pod, self.containers, end_only=False)
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

"""Logs of all pods: each line once and in order, over cuts, restarts and adoption."""

import json
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from kfp_ddp.jobs.kinds import pod_role, pod_title
from kfp_ddp.k8s.api import Api, ApiError, Object, core
from kfp_ddp.k8s.objects import containers, has_ended
from kfp_ddp.k8s.pods import ended_at, has_failed, has_started

# Of each pod so many lines are kept, for what they say of its end.
RECENT_LINES = 400
# And of so many pods: one that is replaced again and again is another one each time.
RECENT_PODS = 256
STOP_SECONDS = 0.02
RFC_3339 = re.compile(r"(.{19})(?:\.([0-9]*))?(.*)")


class Stamp(NamedTuple):
    """A line's time to the nanosecond; text compares wrongly, for it drops trailing zeros."""

    seconds: int
    nanos: int

    @classmethod
    def parse(cls, text: str) -> "Stamp":
        """From RFC 3339, as the kubelet writes it."""
        parts = RFC_3339.fullmatch(text)
        if parts is None:
            raise ValueError(f"{text!r} is no time")
        whole, fraction, zone = parts.groups("")
        at = datetime.fromisoformat(whole + ("+00:00" if zone in ("Z", "") else zone))
        return cls(int(at.timestamp()), int(fraction.ljust(9, "0")[:9]))

    def since(self) -> str:
        """The whole second, which is as fine as the API server's sinceTime."""
        return datetime.fromtimestamp(self.seconds).astimezone().isoformat()


class LogCursor(NamedTuple):
    """How far a container's log was printed: up to `stamp`, with `lines` of that very time."""

    restart: int
    stamp: Stamp
    lines: int


class Printer:
    """Prints whole lines of many pods, and knows the cursor of each; one lock for both."""

    def __init__(self) -> None:
        self.cursors: dict[str, LogCursor] = {}
        self.recent: dict[str, deque[str]] = {}
        self.printed_at = 0.0
        """When a pod's line was printed last, on the monotonic clock."""
        self.lock = threading.Lock()
        self.over = False

    def line(self, key: str, cursor: LogCursor, text: str) -> None:
        """Print a line and note that it is printed; neither once this is to stop."""
        with self.lock:
            if self.over:
                return
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
            self.cursors[key] = cursor
            self.printed_at = time.monotonic()
            recent = self.recent.setdefault(key.partition("/")[0], deque(maxlen=RECENT_LINES))
            recent.append(text.partition("] ")[2])
            if len(self.recent) > RECENT_PODS:
                self.recent.pop(next(iter(self.recent)))

    def stop(self) -> None:
        """Print no more lines of pods, so that the cursors stay what was printed.

        Waits for a line that is being printed, but not long: the thread that a signal interrupts
        may hold the lock itself.
        """
        self.over = True
        if self.lock.acquire(timeout=STOP_SECONDS):
            self.lock.release()

    def say(self, text: str) -> None:
        """Print a line of our own."""
        with self.lock:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def dump(self) -> str:
        """The cursors as JSON.

        Without the lock, which the thread that a signal interrupts may hold.
        """
        cursors = self.cursors.copy()  # other threads add to it
        return json.dumps({key: [p.restart, *p.stamp, p.lines] for key, p in cursors.items()})

    def last_lines(self) -> dict[str, list[str]]:
        """The end of each pod's log, by uid."""
        recent = self.recent.copy()  # other threads add to it
        return {uid: list(lines) for uid, lines in recent.items()}

    def load(self, text: str) -> None:
        """Take up the cursors that an earlier launcher noted; what cannot be read is ignored."""
        try:
            for key, (restart, seconds, nanos, lines) in json.loads(text).items():
                self.cursors[key] = LogCursor(restart, Stamp(seconds, nanos), lines)
        except (ValueError, TypeError, AttributeError):
            self.cursors = {}


ALL = 16
"""The most pods of a job of which every log is followed."""
STREAMS, FOR_FAILED = 16, 4
"""Logs that are open at once, and how many of these are left to pods that fail."""
FAILED = 16
"""Pods that failed whose logs are read: the first ones."""


class Wanted(NamedTuple):
    """A log that is to be followed."""

    uid: str
    container: str
    end_only: bool
    """Whether the last lines are enough of what was written before."""


def sample(
    pods: Mapping[str, Object], containers: Sequence[str], begun: Mapping[str, bool]
) -> list[Wanted]:
    """The logs to begin with now.

    Args:
        pods: Those that are there, by uid.
        containers: Names of those that have a log of ours.
        begun: The logs that were begun with, by the uid of their pod, and whether they are open.
    """
    found: list[Wanted] = []
    room = STREAMS - sum(begun.values())
    failed = sorted((uid for uid in pods if has_failed(pods[uid])), key=lambda u: ended_at(pods[u]))
    for uid in failed[:FAILED]:
        if uid not in begun and len(found) < room:
            found += [Wanted(uid, each, True) for each in _started(pods[uid], containers)]
    if room - len(found) <= 0:
        return found
    nodes = {_node(pods[uid]) for uid in begun if uid in pods}
    for uid in sorted(set(pods) - set(begun), key=lambda each: place(pods[each])):
        pod = pods[uid]
        leads = place(pod)[1] == 0
        if room - len(found) <= (0 if leads else FOR_FAILED):
            break
        if has_failed(pod) or (_node(pod) in nodes and not leads):
            continue
        if started := _started(pod, containers):
            nodes.add(_node(pod))
            found += [Wanted(uid, each, not leads) for each in started]
    return found


def sample_note(pods: int, namespace: str) -> str:
    """What is followed of a job of so many pods, in a line."""
    return (
        f"following at most {STREAMS - FOR_FAILED} of {pods:,} logs: of rank 0's pod and of one on "
        f"each node; of the first {FAILED} pods that fail the end is shown; "
        f"`kubectl logs -n {namespace} POD` shows any other"
    )


def place(pod: Object) -> tuple[bool, int, str]:
    """Where a pod stands among those of its job; rank 0 is in that of number 0."""
    role = pod_role(pod)
    return not role.leads, role.number, role.title


def _started(pod: Object, containers: Sequence[str]) -> list[str]:
    return [each for each in containers if has_started(pod, each)]


def _node(pod: Object) -> str:
    return str((pod.get("spec") or {}).get("nodeName") or "")


# A log that is quiet for so long is asked for anew, lest its connection was cut without a word.
QUIET_SECONDS = 60.0
# A bar that is drawn over and over has no end of line; the container runtime cuts there, too.
LONGEST = 16384
# A log that was refused, as by a node that has nothing of it, is not asked for sooner.
REFUSED_SECONDS = 0.5


# Of a log whose end is enough so many lines; as many are kept for what they say of a failure.
END_LINES = str(RECENT_LINES)


def to_follow(pods: Mapping[str, Object], containers: Sequence[str]) -> Iterator[Wanted]:
    """Every log that there is, each over a connection of its own."""
    for uid, pod in pods.items():
        for container in containers:
            if has_started(pod, container):
                yield Wanted(uid, container, end_only=False)


class PodLogs:
    """The logs that are followed, a thread for each."""

    def __init__(
        self,
        api: Api,
        containers: Sequence[str],
        printer: Printer,
        title: Callable[[Object], str] = pod_title,
    ) -> None:
        self.api, self.containers, self.printer, self.title = api, containers, printer, title
        self.threads: dict[tuple[str, str], PodLog] = {}

    def follow(self, pods: Mapping[str, Object], many: bool = False) -> None:
        """Take in how the pods are now, and begin with the logs that are to be followed.

        Args:
            pods: Those that are there, by uid.
            many: Whether they are too many for more than a sample of their logs.
        """
        names = {pod["metadata"]["name"]: uid for uid, pod in pods.items()}
        for (uid, _), log in self.threads.items():
            if names.get(log.pod_name, uid) != uid:
                log.abandoned.set()  # or it would print its successor's lines, a second time
            if uid in pods:
                log.latest = pods[uid]
        if many:
            self._forget(pods)
            begun = {log.uid: log.is_alive() for log in self.threads.values()}
            wanted: Iterable[Wanted] = sample(pods, self.containers, begun)
        else:
            wanted = to_follow(pods, self.containers)
        for uid, container, end_only in wanted:
            self._begin(pods[uid], container, end_only)

    def begin(self, pod: Object, end_only: bool) -> None:
        """Begin with the logs of one more pod."""
        for container in self.containers:
            self._begin(pod, container, end_only)

    def _begin(self, pod: Object, container: str, end_only: bool) -> None:
        key = str(pod["metadata"]["uid"]), container
        if key not in self.threads:
            log = PodLog(self.api, pod, container, self.printer, self.title(pod), end_only)
            self.threads[key] = log
            log.start()

    def _forget(self, pods: Mapping[str, Object]) -> None:
        """Drop what came to its end with its pod."""
        for key, log in list(self.threads.items()):
            if log.uid not in pods and not log.is_alive():
                del self.threads[key]

    @property
    def printed(self) -> bool:
        """Whether every log that was begun with has come to its end."""
        return not any(log.is_alive() for log in self.threads.values())

    @property
    def uids(self) -> set[str]:
        """The pods whose logs were begun with."""
        return {log.uid for log in self.threads.values()}

    @property
    def of_failed(self) -> bool:
        """Whether the log of a pod that failed has not come to its end."""
        return any(log.is_alive() and has_failed(log.latest) for log in self.threads.values())

    def abandon(self) -> None:
        """Let the threads end at their next line."""
        for log in self.threads.values():
            log.abandoned.set()


class PodLog(threading.Thread):
    """Follows one container until it is over and every line of it is printed."""

    def __init__(
        self,
        api: Api,
        pod: Object,
        container: str,
        printer: Printer,
        title: str = "",
        end_only: bool = False,
    ) -> None:
        super().__init__(daemon=True, name=f"log {pod['metadata']['name']}")
        self.api, self.container, self.printer = api.another(), container, printer
        self.path = core(api.namespace, "pods", pod["metadata"]["name"])
        self.pod_name = pod["metadata"]["name"]
        self.uid = str(pod["metadata"]["uid"])
        self.key = f"{self.uid}/{container}"
        self.end_only = end_only
        """Whether the last lines are enough of what was written before."""
        self.title = title or pod_title(pod)
        self.latest = pod
        """The pod as it is now."""
        self.abandoned = threading.Event()

    def run(self) -> None:
        """Print until the container is over; every cut is bridged from the last line printed."""
        try:
            self._follow()
        finally:
            self.api.close()

    def _follow(self) -> None:
        while not self.abandoned.is_set():
            restart, over = self._status()
            cursor = self.printer.cursors.get(self.key)
            if cursor is not None and cursor.restart < restart:
                # The container was restarted: the rest of the log before, then the new one.
                self._read(cursor.restart, previous=True, follow=False)
            whole = self._read(restart, previous=False, follow=not over)
            now, over_now = self._status()
            if whole and over and over_now and now == restart:
                return
            self.abandoned.wait(0.05 if over_now else 0.5)

    def _status(self) -> tuple[int, bool]:
        """Restarts so far, and whether the container has ended for good."""
        over = has_ended(self.latest)
        for container in containers(self.latest):
            if container["name"] == self.container:
                ended = "terminated" in (container.get("state") or {})
                never = self.latest["spec"].get("restartPolicy") == "Never"
                return int(container.get("restartCount") or 0), over or (ended and never)
        return 0, over

    def _read(self, restart: int, previous: bool, follow: bool) -> bool:
        """Print what is new of one run of the container; True when the stream ended by itself."""
        cursor = self.printer.cursors.get(self.key)
        if cursor is not None and cursor.restart != restart:
            cursor = None
        query = {"container": self.container, "timestamps": "true"}
        if follow:
            query["follow"] = "true"
        if previous:
            query["previous"] = "true"
        if cursor is not None:
            query["sinceTime"] = cursor.stamp.since()
        elif self.end_only:
            query["tailLines"] = END_LINES
        try:
            for now, text in unprinted(self._whole_lines(query, follow), restart, cursor):
                self.printer.line(self.key, now, f"[{self.title}] {drawn(text)}")
        except ApiError as error:
            if error.status == 404:
                # The pod is gone, or its earlier run is: what was not read cannot be.
                if not previous:
                    self.abandoned.set()
                return True
            if error.status:
                self.abandoned.wait(REFUSED_SECONDS)
            return False
        return True

    def _whole_lines(self, query: dict[str, str], follow: bool) -> Iterator[str]:
        for raw in self.api.lines(f"{self.path}/log", query, QUIET_SECONDS, LONGEST):
            if self.abandoned.is_set():
                return
            if not raw.endswith(b"\n") and follow:
                raise ApiError(0, "", "half a line: the connection was cut, it is read again whole")
            yield raw.decode("utf-8", "replace").rstrip("\n")


def drawn(text: str) -> str:
    """What a terminal shows of a line that goes back to its begin: what was drawn there last."""
    return next((part for part in reversed(text.split("\r")) if part), "")


def unprinted(
    lines: Iterable[str], restart: int, cursor: LogCursor | None
) -> Iterator[tuple[LogCursor, str]]:
    """The text of the lines after a cursor, each with the cursor that tells that it is printed.

    Args:
        lines: Each with its time before it, as the kubelet writes them; one without goes on with
            the one before.
        restart: Which run of the container they are of.
        cursor: Where to begin; None for the first line.
    """
    last, passed, stamp = cursor, 0, None
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
        same = last is not None and last.stamp == stamp
        last = LogCursor(restart, stamp, last.lines + 1 if same and last else 1)
        yield last, text

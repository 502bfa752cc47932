"""The logs of all pods, each line once and in order, across cuts, restarts and adoption."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kfp_ddp.components.shared.cluster.api import Api, ApiError, Object, core
from kfp_ddp.components.shared.launch.follow.pods import has_started
from kfp_ddp.components.shared.launch.follow.printer import LogCursor, Printer, Stamp
from kfp_ddp.components.shared.launch.specification.kinds import pod_title

# A log that is quiet for so long is asked for anew, lest its connection was cut without a word.
QUIET_SECONDS = 60.0
# A bar that is drawn over and over has no end of line; the container runtime cuts there, too.
LONGEST = 16384


def to_follow(pods: Mapping[str, Object], containers: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Which logs are followed, each over a connection of its own, as uid and container.

    Today those of all containers that have one.
    """
    for uid, pod in pods.items():
        for container in containers:
            if has_started(pod, container):
                yield uid, container


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

    def follow(self, pods: Mapping[str, Object]) -> None:
        """Take in how the pods are now, and begin with the logs that are to be followed."""
        names = {pod["metadata"]["name"]: uid for uid, pod in pods.items()}
        for (uid, _), log in self.threads.items():
            if names.get(log.pod_name, uid) != uid:
                log.abandoned.set()  # or it would print its successor's lines, a second time
            if uid in pods:
                log.latest = pods[uid]
        for uid, container in to_follow(pods, self.containers):
            if (uid, container) not in self.threads:
                log = PodLog(self.api, pods[uid], container, self.printer, self.title(pods[uid]))
                self.threads[uid, container] = log
                log.start()

    @property
    def printed(self) -> bool:
        """Whether every log that was begun with has come to its end."""
        return not any(log.is_alive() for log in self.threads.values())

    def abandon(self) -> None:
        """Let the threads end at their next line."""
        for log in self.threads.values():
            log.abandoned.set()


class PodLog(threading.Thread):
    """Follows one container until it is over and every line of it is printed."""

    def __init__(
        self, api: Api, pod: Object, container: str, printer: Printer, title: str = ""
    ) -> None:
        super().__init__(daemon=True, name=f"log {pod['metadata']['name']}")
        self.api, self.container, self.printer = api.another(), container, printer
        self.path = core(api.namespace, "pods", pod["metadata"]["name"])
        self.pod_name = pod["metadata"]["name"]
        self.key = f"{pod['metadata']['uid']}/{container}"
        self.title = title or pod_title(pod)
        self.latest = pod
        """The pod as it is now."""
        self.abandoned = threading.Event()

    def run(self) -> None:
        """Print until the container is over; every cut is bridged from the last line printed."""
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
        status = self.latest.get("status", {})
        over = status.get("phase") in ("Succeeded", "Failed")
        for container in status.get("containerStatuses") or []:
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
        try:
            for now, text in unprinted(self._whole_lines(query, follow), restart, cursor):
                self.printer.line(self.key, now, f"[{self.title}] {drawn(text)}")
        except ApiError as error:
            if error.status == 404:
                # The pod is gone, or its earlier run is: what was not read cannot be.
                if not previous:
                    self.abandoned.set()
                return True
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

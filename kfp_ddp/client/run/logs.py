"""The logs of a run's steps: from their pods, KFP, or a local run."""

import contextlib
import queue
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, islice

from kfp_ddp.client.kfp import pods
from kfp_ddp.client.kfp.pods import LAUNCHER, KfpLogs
from kfp_ddp.client.kfp.steps import OVER, Leaf, leaves
from kfp_ddp.client.run.run_info import RunInfo
from kfp_ddp.core.errors import KfpDdpError, ServerError, StorageError
from kfp_ddp.jobs.follow.logs import PodLogs
from kfp_ddp.jobs.follow.printer import LogCursor, Printer, Stamp
from kfp_ddp.k8s.api import Api, review

POLL_SECONDS = 2.0
UNWRITTEN = ("SKIPPED", "OMITTED", "CACHED")
"""States of steps without a log."""
EXECUTOR = "[KFP Executor "
INPUTS = "Got executor_input:"
ARGO = re.compile(r"time=\S+ level=\w+ msg=.* argo=true")


def select_steps(run: RunInfo, word: str) -> list[Leaf]:
    """Return the steps of a name, or those of a group; all for ''. InputError if there are none."""
    every = list(leaves(run.steps))
    if not word:
        return every
    matches = [leaf for leaf in every if word in (leaf.label, leaf.step.name, leaf.step.title)]
    return matches or list(leaves(run.step(word).steps))


def _are_over(steps: Iterable[Leaf]) -> bool:
    return all(leaf.step.state in OVER for leaf in steps)


def lines(run: RunInfo, leaf: Leaf, api: Callable[[], Api], every: bool = False) -> Iterator[str]:
    """Yield a step's log, with the lines of KFP and Argo if `every`; none before its start."""
    complete = _all_lines(run, leaf, api)
    return complete if every else filter(StepLines().includes, complete)


def _all_lines(run: RunInfo, leaf: Leaf, api: Callable[[], Api]) -> Iterator[str]:
    if run.folder is not None:
        yield from run.local_log(leaf.step.name)
        return
    if leaf.step.state in UNWRITTEN:
        return
    sources = [_pod_log(run, leaf, api)]
    if run.kfp_logs:
        sources.append(run.kfp_logs.lines(leaf))
    problems = []
    for source in sources:
        # A source that cannot be read fails at its first line, so that the next one can be tried.
        try:
            first = list(islice(source, 1))
        except KfpDdpError as error:
            problems.append(str(error))
            continue
        yield from chain(first, source)
        return
    raise StorageError(f"the log of {leaf.label} cannot be read: {'; '.join(problems)}")


def _pod_log(run: RunInfo, leaf: Leaf, api: Callable[[], Api]) -> Iterator[str]:
    cluster = api()
    pod = pods.find_pod(pods.list_pods(cluster, run.id), leaf.step, leaf.step.by_driver)
    if pod is not None:
        yield from pods.log(cluster, pod)
    elif leaf.step.state in OVER:
        raise StorageError(f"the pod of {leaf.label} was deleted")


def follow(
    run: RunInfo,
    word: str,
    connect: Callable[[], Api],
    reload: Callable[[], RunInfo],
    prefix: bool,
    every: bool,
) -> Iterator[str]:
    """Yield the logs of steps as they are written, until the steps are over.

    Without the permission for pods and their logs, they are read through KFP.
    """
    printer = _StepPrinter(prefix, every)
    try:
        api = connect()
        pods.list_pods(api, run.id)
        if not review(api, "get", "", "pods", "log"):
            raise StorageError("no permission to get pods/log")
    except KfpDdpError:
        if run.kfp_logs is None:
            raise
        yield from _follow_kfp(run, run.kfp_logs, word, reload, printer)
        return
    done = [leaf for leaf in select_steps(run, word) if leaf.step.state in OVER]
    yield from read(run, done, lambda: api, prefix, every)  # in order: they do not run in parallel
    yield from _follow_pods(run, api, word, reload, printer, {leaf.label for leaf in done})


def _follow_pods(
    run: RunInfo,
    api: Api,
    word: str,
    reload: Callable[[], RunInfo],
    printer: "_StepPrinter",
    printed: Collection[str],
) -> Iterator[str]:
    """Yield logs from pods, at the same time, until their steps are over; not of the `printed`."""
    labels: dict[str, str] = {}
    logs = PodLogs(api, (pods.MAIN,), printer, title=lambda pod: labels[pod["metadata"]["uid"]])
    try:
        while True:
            active = [leaf for leaf in select_steps(run, word) if leaf.label not in printed]
            items = pods.list_pods(api, run.id)
            by_uid = {}
            for leaf in active:
                if pod := pods.find_pod(items, leaf.step):
                    uid = pod["metadata"]["uid"]
                    labels[uid] = leaf.label
                    by_uid[uid] = pod
            logs.follow(by_uid)
            ended = run.state in OVER or _are_over(active)
            # The threads may still read the last lines of a pod that has ended.
            complete = ended and logs.printed
            yield from printer.lines(0 if complete else POLL_SECONDS)
            if complete:
                return
            run = reload()
    finally:
        logs.abandon()


def _follow_kfp(
    run: RunInfo, kfp: KfpLogs, word: str, reload: Callable[[], RunInfo], printer: "_StepPrinter"
) -> Iterator[str]:
    """Yield logs through KFP, one after another, and what is left when their steps are over."""
    done = set[str]()
    while True:
        steps = select_steps(run, word)
        for leaf in steps:
            over = leaf.step.state in OVER
            if leaf.label in done or leaf.step.state in (*UNWRITTEN, "PENDING"):
                continue
            try:
                yield from _new_lines(kfp, leaf, printer)
            except (StorageError, ServerError):  # not started, or cut
                if over:
                    raise
            if over:
                done.add(leaf.label)
        if run.state in OVER or _are_over(steps):
            return
        time.sleep(POLL_SECONDS)
        run = reload()


def _new_lines(kfp: KfpLogs, leaf: Leaf, printer: "_StepPrinter") -> Iterator[str]:
    for nodes in leaf.step.nodes:
        pod = nodes[-1]
        cursor = printer.cursors.get(pod)
        printed = cursor.lines if cursor else 0
        for number, line in enumerate(kfp.log(nodes, follow=True), 1):
            if number > printed:
                cursor = LogCursor(0, Stamp(0, 0), number)
                printer.line(pod, cursor, f"[{leaf.label}] {line}")
                yield from printer.lines(0)


def read(
    run: RunInfo,
    steps: Iterable[Leaf],
    api: Callable[[], Api],
    prefix: bool,
    every: bool,
    all_of_them: bool = False,
) -> Iterator[str]:
    """Yield the current logs of steps, with a warning on stderr for each unreadable one.

    With `all_of_them` the error is raised if no line could be read.
    """
    problems: list[KfpDdpError] = []
    any_line = False
    for leaf in steps:
        head = f"[{leaf.label}] " if prefix else ""
        try:
            for line in lines(run, leaf, api, every):
                yield f"{head}{line}"
                any_line = True
        except KfpDdpError as error:
            problems.append(error)
    nothing = bool(problems) and not any_line
    if all_of_them and nothing:
        raise problems[0]
    for problem in problems:
        sys.stderr.write(f"warning: {problem}\n")


class StepLines:
    """Separates a step's own lines from those of Argo, and of KFP, which logs indented JSON."""

    def __init__(self) -> None:
        self._inside = False
        """Whether the lines before were the begin of such a JSON."""

    def includes(self, line: str) -> bool:
        """Return whether the next line of the log is the step's own."""
        text = line.rstrip()
        is_json = text in ("{", "}") or text.startswith((" ", "\t"))
        if self._inside and is_json:
            self._inside = text != "}"
            return False
        of_kfp = bool(line.startswith(EXECUTOR) or LAUNCHER.match(line))
        self._inside = of_kfp and text.endswith((INPUTS, "{"))
        return not (of_kfp or ARGO.match(line))


class _StepPrinter(Printer):
    def __init__(self, prefix: bool, every: bool) -> None:
        super().__init__()
        self._prefix = prefix
        self._every = every
        self._own: dict[str, StepLines] = {}
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()

    def write(self, text: str) -> None:
        """Queue a line, since threads write."""
        self._queue.put(text)

    def lines(self, seconds: float) -> Iterator[str]:
        """Yield the lines that are written within this time; for 0 those that are there."""
        end = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while not seconds or time.monotonic() < end:
                yield self._queue.get(timeout=max(0.0, end - time.monotonic()))

    def line(self, key: str, cursor: LogCursor, text: str) -> None:
        """Print a line, unless it is KFP's."""
        content = text.partition("] ")[2]
        if self._every or self._own.setdefault(key, StepLines()).includes(content):
            super().line(key, cursor, text if self._prefix else content)
        else:
            self.cursors[key] = cursor

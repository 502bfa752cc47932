"""Follow a run until its end: its steps as a tree, and the progress of its training."""

import contextlib
import io
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import sleep
from typing import TypeVar

from markupsafe import Markup
from rich.console import Console
from rich.live import Live
from rich.text import Text
from rich.tree import Tree

from kfp_ddp.client.kfp import pods
from kfp_ddp.client.kfp.steps import OVER, Step, leaves
from kfp_ddp.client.run.run_info import UNFINISHED, RunFinder, RunInfo, local_run, read_trainings
from kfp_ddp.core.errors import (
    InputError,
    JobError,
    KfpDdpError,
    RunCancelledError,
    ServerError,
    StorageError,
)
from kfp_ddp.core.folders import is_remote
from kfp_ddp.core.text import printable
from kfp_ddp.jobs.identity import KFP_RUN
from kfp_ddp.jobs.progress import clock
from kfp_ddp.k8s.api import Api, ApiError, Object
from kfp_ddp.k8s.pods import waiting_reason
from kfp_ddp.k8s.resource import PODS
from kfp_ddp.local.display import RunProgress
from kfp_ddp.report.render import render
from kfp_ddp.report.training import training_curves

T = TypeVar("T")
View = Callable[[RunInfo], None]
"""Shows a run each time that it is polled."""
POLL_SECONDS = 2.0
SILENCE_SECONDS = 300.0
"""How long the server may fail to answer while a run is followed."""
MARKS = {
    "SUCCEEDED": ("✓", "green", ""),
    "CACHED": ("✓", "green", "cached"),
    "FAILED": ("✗", "red", "failed"),
    "CANCELED": ("✗", "red", "cancelled"),
    "RUNNING": ("●", "cyan", "running"),
    "PENDING": ("·", "dim", "pending"),
    "SKIPPED": ("–", "dim", "skipped (condition is false)"),
    "OMITTED": ("–", "dim", "not run"),
    "UNKNOWN": ("?", "dim", "not known: KFP lost it, and its Workflow cannot be read"),
}
"""A mark, a colour and a text for each state."""
ACTIVE = ("RUNNING", "PENDING")
PROGRESS_LINE = re.compile(r"step \d+(/\d+)? · .*")
PROGRESS_LINES = 40
PROGRESS_SECONDS = 5.0
RETRY_SECONDS = 300.0
"""Pause after the cluster refused a request."""


class RunCluster:
    """The cluster of a run, read while it answers; a user watches, so nothing is retried."""

    def __init__(self, finder: RunFinder, run_id: str) -> None:
        self._finder = finder
        self._run_id = run_id
        self._api: Api | None = None
        self._not_before = 0.0
        self._lines: dict[str, tuple[float, str]] = {}
        """By step: the time of the last look, and its line."""

    def nodes(self) -> list[Object]:
        """Return the nodes of the run's Workflow; empty if they cannot be read."""
        return self._read(lambda api: pods.list_nodes(api, self._run_id), [])

    def progress(self, step: Step) -> str:
        """Return the newest line of progress, or why the pod waits; '' for neither."""
        key = step.pods[-1] if step.pods else step.name
        looked, line = self._lines.get(key, (-PROGRESS_SECONDS, ""))
        now = time.monotonic()
        if step.start and now - looked >= PROGRESS_SECONDS:
            line = self._read(lambda api: self._line(api, step), line)
            self._lines[key] = (now, line)
        return line

    def _read(self, look: Callable[[Api], T], default: T) -> T:
        if time.monotonic() < self._not_before:
            return default
        try:
            self._api = self._api or self._finder.api()
            return look(self._api)
        except (ApiError, StorageError, InputError) as error:
            if isinstance(error, InputError) or getattr(error, "status", 0) in (401, 403):
                self._not_before = time.monotonic() + RETRY_SECONDS
            return default

    def _line(self, api: Api, step: Step) -> str:
        query = {"labelSelector": f"{KFP_RUN}={self._run_id}"}
        items = api.list_objects(PODS, query)
        if (pod := pods.find_pod(items, step)) is None:
            return ""
        if reason := waiting_reason(pod):
            return f"pending: {reason.text}"
        newest = ""
        for line in pods.log(api, pod, tail=PROGRESS_LINES):
            if match := PROGRESS_LINE.search(line):
                newest = match[0].strip()
        return newest


def watched(finder: RunFinder, run: RunInfo) -> tuple[Callable[[], RunInfo], Callable[[Step], str]]:
    """Return a function that reads a run again, and one that returns the progress of a step."""
    if (folder := run.folder) is None:
        cluster = RunCluster(finder, run.id)
        client = finder.client
        return lambda: finder.read(client.get_run(run.id), cluster.nodes()), cluster.progress
    training = RunProgress(folder)
    width = shutil.get_terminal_size().columns - 30

    def progress(step: Step) -> str:
        return training.line(width) if step.name == "train" else ""

    return lambda: local_run(folder), progress


def follow(read: Callable[[], RunInfo], view: View, timeout: float | None = None) -> RunInfo:
    """Show a run until it is over, and return it as `read` does; raise TimeoutError."""
    began = time.monotonic()
    silent_since = 0.0
    while True:
        try:
            run = read()
            silent_since = 0.0
        except ServerError:
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > SILENCE_SECONDS:
                raise
            sleep(POLL_SECONDS)
            continue
        view(run)
        if run.state in (*OVER, UNFINISHED):
            return run
        if timeout is not None and time.monotonic() - began >= timeout:
            raise TimeoutError(f"{run.name} is {run.state} after {timeout:g} s, and continues")
        sleep(POLL_SECONDS)


def until_over(
    finder: RunFinder, run: RunInfo, silent: bool = False, to_stderr: bool = False
) -> RunInfo:
    """Show a run until it is over: as a tree on a terminal, else as lines.

    With `to_stderr` stdout is for a program. An interrupt is SystemExit 130, with a line.
    """
    read, progress = watched(finder, run)
    stream = sys.stderr if to_stderr else sys.stdout
    continues = f"the run continues: kfp-ddp status {run.word} --follow"
    try:
        if silent:
            return follow(read, lambda run: None)
        if stream.isatty():
            with Live(console=Console(file=stream), auto_refresh=False) as live:
                return follow(read, lambda run: live.update(tree(run, progress), refresh=True))
        view = lines(lambda line: print(line, file=stream, flush=True), progress)
        return follow(read, view)
    except InputError as error:  # with its exit code nothing would have been started
        raise ServerError(f"{error}; {continues}") from None
    except KeyboardInterrupt:
        print(continues, file=sys.stderr)
        raise SystemExit(130) from None


def check_success(run: RunInfo) -> None:
    """Raise RunCancelledError or JobError for a run that ended without success."""
    if run.state != "SUCCEEDED":
        kind = RunCancelledError if run.state == "CANCELED" else JobError
        raise kind(f"{run.name} ended {run.state}: see kfp-ddp describe {run.word}")


def lines(write: Callable[[str], None], progress: Callable[[Step], str]) -> View:
    """Return a view that writes a line for each step that changes, for a log."""
    written: dict[str, str] = {}

    def show(run: RunInfo) -> None:
        for leaf in leaves(run.steps):
            step = leaf.step
            title = leaf.title
            text = _describe(step, progress)
            if written.get(title, MARKS["PENDING"][2]) != text:
                written[title] = text
                mark = MARKS.get(step.state, MARKS["PENDING"])[0]
                line = f"{datetime.now():%H:%M:%S}  {mark} {title:<15} {text}"
                write(printable(line.rstrip()))

    return show


def console() -> Console:
    """Return a console for tables and trees, which are not cut in a file or pipe."""
    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=10_000)


def tree(run: RunInfo, progress: Callable[[Step], str]) -> Tree:
    """Return the steps of a run, to be printed."""
    mark, colour, _ = MARKS.get(run.state, MARKS["UNKNOWN"])
    about = f"  {run.id[:8]}  {run.state}  {duration(run.start, run.end)}"
    head = Text.assemble((f"{mark} ", colour), (printable(run.name), "bold"), about)
    root = Tree(head, guide_style="dim")
    _add_branches(root, run.steps, progress)
    return root


def _add_branches(branch: Tree, steps: Sequence[Step], progress: Callable[[Step], str]) -> None:
    for step in steps:
        mark, colour, _ = MARKS.get(step.state, MARKS["PENDING"])
        line = printable(_describe(step, progress))
        text = Text.assemble((f"{mark} ", colour), printable(f"{step.title}  "), (line, "dim"))
        _add_branches(branch.add(text), step.steps, progress)


def to_html(finder: RunFinder, run: RunInfo) -> str:
    """Return a page with the steps of a run, and the curves if no pod is needed to read them."""
    terminal = Console(record=True, file=io.StringIO(), width=110, force_jupyter=False)
    terminal.print(tree(run, watched(finder, run)[1]))
    steps = terminal.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    parts = [Markup(steps)]  # noqa: S704  rich has escaped the names
    facts = [run.page or str(run.folder or "")]
    work = str(run.values.get("work") or "")
    if run.folder or is_remote(work):
        with contextlib.suppress(KfpDdpError), tempfile.TemporaryDirectory() as scratch:
            for training in read_trainings(run.files(), Path(scratch)):
                if training.progress.last:
                    facts.append(f"{training.task}: {training.progress.line()}")
                parts.append(training_curves(training.events))
    curves = Markup().join(parts)
    return render("training.html", title=run.name, facts=facts, curves=curves, time="")


def duration(start: datetime | None, end: datetime | None) -> str:
    """Return the time from a start to an end, or until now; '' without a start."""
    if start is None:
        return ""
    until = end or datetime.now(UTC)
    return clock((until - start).total_seconds())


def _describe(step: Step, progress: Callable[[Step], str]) -> str:
    active = step.state in ACTIVE
    line = progress(step) if active and not step.steps else ""
    if line:
        return line
    text = MARKS[step.state][2] if step.state in MARKS else step.state.lower()
    if step.by_driver and active:
        text = "starting"
    if step.by_driver and step.state == "FAILED":
        text = "failed to start"
    ran = step.state not in ("SKIPPED", "OMITTED", "UNKNOWN")
    if ran and step.end:
        text = f"{text} {duration(step.start, step.end)}".strip()
    return text

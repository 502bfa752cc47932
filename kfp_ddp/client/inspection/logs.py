"""The logs of a run's steps: of their pods, of the pipeline root, or of a run here."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from kfp_ddp.client import pods
from kfp_ddp.client.inspection import local_run
from kfp_ddp.client.inspection.subject import Subject
from kfp_ddp.client.steps import OVER, Leaf, leaves
from kfp_ddp.core.errors import InputError, KfpDdpError
from kfp_ddp.jobs.follow.logs import LogCursor, PodLogs, Printer
from kfp_ddp.k8s.api import Api, Object
from kfp_ddp.storage.destination import open_destination

LOOK_SECONDS = 2.0
LARGEST = 256 << 20
BUCKETS = ("gs://", "s3://", "az://")
EXECUTOR, INPUTS = "[KFP Executor ", "Got executor_input:"
KEPT = "executor-logs"
"""The artifact that KFP's launcher keeps of each step."""


def chosen(subject: Subject, word: str) -> list[Leaf]:
    """The steps that a word names: one, all in a group, or all of a name; '' for every step.

    Raises:
        InputError: it names none.
    """
    every = list(leaves(subject.steps))
    if not word:
        return every
    found = [leaf for leaf in every if word in (leaf.label, leaf.step.name, leaf.step.title)]
    return found or list(leaves(subject.step(word).steps))


def lines(subject: Subject, leaf: Leaf, api: Callable[[], Api]) -> Iterator[str]:
    """What a step said so far; nothing where it has not begun.

    Raises:
        KfpDdpError: it is gone, or cannot be read.
    """
    own = OwnWords()
    return (line for line in _all_lines(subject, leaf, api) if own.has(line))


def _all_lines(subject: Subject, leaf: Leaf, api: Callable[[], Api]) -> Iterator[str]:
    if subject.folder is not None:
        yield from local_run.log(subject.folder, leaf.step.name)
        return
    if leaf.step.state in ("SKIPPED", "OMITTED", "CACHED"):
        return
    over, pod = leaf.step.state in OVER, None
    try:
        known = api()
        pod = pods.of_step(pods.of_steps(known, subject.id), leaf.step, leaf.step.by_driver)
    except KfpDdpError:
        if not (over and subject.root.startswith(BUCKETS)):
            raise
    if pod is not None:
        yield from pods.log(known, pod)
    elif over:
        yield from kept(subject, leaf)


def kept(subject: Subject, leaf: Leaf) -> Iterator[str]:
    """The log that KFP keeps as an artifact, where the pipeline root is a bucket that we read.

    Raises:
        KfpDdpError: it cannot be had.
    """
    gone = f"the pod of {leaf.label} is gone"
    see = f": its log is in the UI, {subject.page}" if subject.page else ""
    if not subject.root.startswith(BUCKETS):
        raise InputError(f"{gone}{see or '; set pipeline_root to read the log that KFP keeps'}")
    where = open_destination(subject.root)
    prefix = f"{subject.pipeline}/{subject.id}/{leaf.step.name}/"
    names = [name for name, _ in where.list(prefix) if name.rpartition("/")[2] == KEPT]
    if not names:
        raise InputError(f"{gone}, and there is no log of it below {subject.root}/{prefix}{see}")
    for name in names:
        text = where.read(name, LARGEST) or b""
        yield from text.decode("utf-8", "replace").splitlines()


def follow(
    subject: Subject, word: str, api: Api, again: Callable[[], Subject], prefix: bool
) -> None:
    """Print the logs of steps as they are written, until the steps are over.

    Args:
        subject: The run.
        word: Names the steps, as for `chosen`.
        api: The namespace of its pods.
        again: Tells how the run is now.
        prefix: Write the step's name before each line.

    Raises:
        KfpDdpError: the server or the cluster does not answer.
    """
    printer = _Steps(prefix)
    labels: dict[str, str] = {}
    logs = PodLogs(api, (pods.MAIN,), printer, title=lambda pod: labels[pod["metadata"]["uid"]])
    began = [leaf for leaf in chosen(subject, word) if leaf.step.state in OVER]
    _print(subject, began, lambda: api, prefix)  # in their order, for they do not run side by side
    before = {leaf.label for leaf in began}
    try:
        while True:
            now = [leaf for leaf in chosen(subject, word) if leaf.label not in before]
            logs.follow(_of(pods.of_steps(api, subject.id), now, labels))
            over = subject.state in OVER or all(leaf.step.state in OVER for leaf in now)
            if over and logs.printed:
                return
            time.sleep(LOOK_SECONDS)
            subject = again()
    finally:
        logs.abandon()


def _of(
    there: Sequence[Object], wanted: Iterable[Leaf], labels: dict[str, str]
) -> dict[str, Object]:
    found = {}
    for leaf in wanted:
        pod = pods.of_step(there, leaf.step)
        if pod is not None:
            labels[pod["metadata"]["uid"]] = leaf.label
            found[pod["metadata"]["uid"]] = pod
    return found


class _Steps(Printer):
    """Prints what steps say themselves, with or without their names before it."""

    def __init__(self, prefix: bool) -> None:
        super().__init__()
        self._prefix = prefix
        self._own: dict[str, OwnWords] = {}

    def line(self, key: str, cursor: LogCursor, text: str) -> None:
        """Print a line, unless it is KFP's."""
        said = text.partition("] ")[2]
        if self._own.setdefault(key, OwnWords()).has(said):
            super().line(key, cursor, text if self._prefix else said)
        else:
            self.cursors[key] = cursor


class OwnWords:
    """Tells a step's own lines from what KFP's executor says before and after them.

    Among that are some hundred lines of JSON, the step's inputs.
    """

    def __init__(self) -> None:
        self._inputs = False

    def has(self, line: str) -> bool:
        """Whether the next line of the log is the step's own."""
        if self._inputs:
            self._inputs = line.rstrip() != "}"
            return False
        self._inputs = line.startswith(EXECUTOR) and line.rstrip().endswith(INPUTS)
        return not line.startswith(EXECUTOR)


def printed(subject: Subject, word: str, api: Callable[[], Api]) -> None:
    """Print the logs of steps as far as they are, one step after the other.

    Raises:
        KfpDdpError: none of them can be had.
    """
    wanted = chosen(subject, word)
    problems, some = _print(subject, wanted, api, prefix=len(wanted) > 1)
    if problems and not some:
        raise problems[0]
    for error in problems:
        sys.stdout.flush()
        sys.stderr.write(f"warning: {error}\n")


def _print(
    subject: Subject, wanted: Iterable[Leaf], api: Callable[[], Api], prefix: bool
) -> tuple[list[KfpDdpError], bool]:
    """Print the logs of steps; why some cannot be had, and whether there was a line."""
    problems: list[KfpDdpError] = []
    some = False
    for leaf in wanted:
        before = f"[{leaf.label}] " if prefix else ""
        try:
            for line in lines(subject, leaf, api):
                sys.stdout.write(f"{before}{line}\n")
                some = True
        except KfpDdpError as error:
            problems.append(error)
    return problems, some

"""Why a run failed or waits: step, cause, events, checkpoints, and what to do next."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kfp_ddp.client.kfp import pods
from kfp_ddp.client.kfp.steps import OVER, Leaf, leaves
from kfp_ddp.client.run import logs
from kfp_ddp.client.run.run_info import RunInfo, read_trainings
from kfp_ddp.core.errors import KfpDdpError
from kfp_ddp.core.step import last_error
from kfp_ddp.core.text import facts, one_line, printable
from kfp_ddp.jobs.failure import cause_in_pods, error_in_log
from kfp_ddp.jobs.identity import RUN
from kfp_ddp.k8s.api import Api, Object
from kfp_ddp.k8s.objects import phase
from kfp_ddp.k8s.pods import waiting_reason
from kfp_ddp.local.display import shown
from kfp_ddp.runs.record import TaskRecord
from kfp_ddp.runs.trials import TrialRecord, read_trials, table

LAST_LINES = 2000
"""Lines at the end of a log that are searched for the cause."""
UNWRITTEN = ("PENDING", "OMITTED", "SKIPPED")
"""States of a step that wrote no files."""
UNKNOWN = "not known"
EVENTS = 8
"""Number of printed events; --json has all."""
CHECKS = "preflight"
"""The step that fails because of the user's input."""


@dataclass
class Description:
    """A run with what was found out about it; unknown values are empty."""

    run: RunInfo
    failed: Leaf | None = None
    """The step that failed."""
    active: Leaf | None = None
    """The step that runs now, or ran when the run was cancelled."""
    cause: str = ""
    step_pods: Sequence[Object] = ()
    job_pods: Sequence[Object] = ()
    events: Sequence[pods.PodEvent] = ()
    trainings: Sequence[TaskRecord] = ()
    trials: Sequence[TrialRecord] = ()
    """Those of a sweep, the best first."""
    notes: list[str] = field(default_factory=list)
    """What could not be read."""

    @property
    def step(self) -> str:
        """Name of the step that failed, or runs now, or was cancelled."""
        leaf = self.failed or self.active
        return leaf.label if leaf else ""

    def waiting(self) -> list[tuple[str, str]]:
        """Return the pods that do not start, with the reasons."""
        every = [*self.step_pods, *self.job_pods]
        return [
            (pod["metadata"]["name"], reason.text)
            for pod in every
            if (reason := waiting_reason(pod))
        ]

    def next(self) -> Iterator[tuple[str, str]]:
        """Yield commands to run next, with the purpose of each."""
        run = self.run
        if run.state == "SUCCEEDED":
            yield from self._after_success()
        elif run.folder is None and run.state not in OVER:
            yield from self._while_active()
        else:
            yield from self._after_failure()

    def _after_success(self) -> Iterator[tuple[str, str]]:
        word = self.run.word
        if self.run.folder is None:
            yield f"kfp-ddp download {word}", "its results"
        else:
            if "bundle" in self.run.results:
                yield f"kfp-ddp predict {word} PICTURE", "classify a picture with its model"
            yield "kfp-ddp runs --local", "the runs in folders of this one"
        if self.trainings:
            yield f"kfp-ddp compare {word} OTHER", "compare its settings and metrics"

    def _while_active(self) -> Iterator[tuple[str, str]]:
        word = self.run.word
        if self.waiting():
            yield "kfp-ddp doctor", "check what the cluster lacks"
        # The log of a failed step is complete.
        follow = "" if self.failed else " -f"
        yield f"kfp-ddp logs {word} {self.step}".rstrip() + follow, "its log"
        yield f"kfp-ddp status {word} --follow", "its steps"

    def _after_failure(self) -> Iterator[tuple[str, str]]:
        """Yield the commands for a run that failed or was cancelled, and for each local one."""
        run = self.run
        failed = self.failed
        if failed is not None:
            yield f"kfp-ddp logs {run.word} {failed.label}", "the full log of the step"
        if run.folder is not None:
            if run.state == "RUNNING":
                yield f"kfp-ddp status {run.word}", "its steps"
            else:
                again = "the same command resumes; others are new runs"
                yield "kfp-ddp run SOURCE --local …", again
        elif failed is not None and failed.step.name == CHECKS:
            yield "kfp-ddp run …", "again, with corrected input"
        else:
            step = max((training.checkpoint or 0 for training in self.trainings), default=0)
            where = f" from step {step}" if step else ""
            yield f"kfp-ddp retry {run.word}", f"resume{where} when the cause is corrected"

    def __str__(self) -> str:
        return "\n".join(map(printable, self.lines()))

    def lines(self) -> Iterator[str]:
        """Yield what `kfp-ddp describe` prints."""
        yield self.run.headline()
        known = {
            "id": self.run.id,
            "page": self.run.page,
            "step": self.step,
            "cause": self.cause,
        }
        yield from facts(known)
        for pod, reason in self.waiting():
            yield f"  waiting     {pod}: {reason}"
        yield from table(self.trials, shutil.get_terminal_size().columns)
        for training in self.trainings:
            # The table has the others.
            if training.evaluation or not self.trials:
                yield from training.lines()
        yield from facts({title: shown(path) for title, path in self.run.results.items()})
        for event in self.events[-EVENTS:]:
            times = f" ({event.times} times)" if event.times > 1 else ""
            yield f"  event       {event.object}: {event.reason}: {event.message}{times}"
        for note in self.notes:
            yield f"  note        {note}"
        for line, purpose in self.next():
            yield f"  next        {line}   # {purpose}"

    def document(self) -> dict[str, Any]:
        """Return the description as JSON."""
        return {
            **self.run.document(),
            "step": self.step,
            "cause": self.cause,
            "waiting": [{"pod": pod, "reason": reason} for pod, reason in self.waiting()],
            "events": [
                {**event._asdict(), "last": event.last and event.last.isoformat()}
                for event in self.events
            ],
            "trainings": [training.document() for training in self.trainings],
            "trials": [trial.model_dump() for trial in self.trials],
            "next": [command for command, _ in self.next()],
            "notes": self.notes,
        }


def describe(run: RunInfo, api: Callable[[], Api], files: bool = True) -> Description:
    """Describe a run from the server's steps, its pods, and its files."""
    steps = list(leaves(run.steps))
    failed = next((leaf for leaf in steps if leaf.step.state == "FAILED"), None)
    result = Description(run, failed)
    if run.state not in OVER or run.cancelled:
        passed = OVER - {"CANCELED"}
        result.active = next((leaf for leaf in steps if leaf.step.state not in passed), None)
    if run.folder is None and run.state != "SUCCEEDED":
        _read_pods(result, api)
    if files and any(map(_wrote_files, steps)):
        _read_files(result)
    if run.state != "SUCCEEDED":
        result.cause = _cause(result, api)
    return result


def _wrote_files(leaf: Leaf) -> bool:
    """Return whether a step may have written files; the one with the checks writes none."""
    state = leaf.step.state
    return state == "CACHED" or (leaf.step.name != CHECKS and state not in UNWRITTEN)


def _read_pods(result: Description, api: Callable[[], Api]) -> None:
    """Add the pods of a run and their events, or a note why they are not known."""
    try:
        cluster = api()
        result.step_pods = pods.list_pods(cluster, result.run.id)
        result.job_pods = pods.list_pods(cluster, result.run.id, RUN)
        result.events = pods.warnings(cluster, [*result.step_pods, *result.job_pods])
    except KfpDdpError as error:
        result.notes.append(f"its pods were not read: {error}")


def _read_files(result: Description) -> None:
    """Add the trainings of a run by its files, or a note why they are not known."""
    try:
        with tempfile.TemporaryDirectory() as scratch:
            files = result.run.files()
            result.trainings = read_trainings(files, Path(scratch))
            result.trials = read_trials(Path(scratch))
        if files.note:
            result.notes.append(f"its files: {files.note}")
    except KfpDdpError as error:
        result.notes.append(f"its files were not read: {error}")


def _cause(result: Description, api: Callable[[], Api]) -> str:
    """Return why a run is not successful, from the most certain source that tells it."""
    run = result.run
    failed = result.failed
    if run.cancelled:
        return "cancelled by a user"
    if failed is None:
        unknown = UNKNOWN if run.state in OVER else ""
        return one_line(run.error) or unknown
    pod = pods.find_pod(result.step_pods, failed.step, failed.step.by_driver)
    if pod and (reason := pods.kill_reason(pod)):
        return reason
    log = _last_lines(result, failed, api)
    if message := last_error("\n".join(log)):
        return message
    if any(phase(pod) == "Failed" for pod in result.job_pods):
        return cause_in_pods(result.job_pods, "").error
    for training in result.trainings:
        if training.failure:
            return training.failure.error
    return one_line(error_in_log(log).text) or one_line(run.error) or UNKNOWN


def _last_lines(result: Description, failed: Leaf, api: Callable[[], Api]) -> list[str]:
    """Return the end of a step's log, that of KFP if the step wrote none; [] with a note."""
    try:
        own = list(logs.lines(result.run, failed, api))
        log = own or list(logs.lines(result.run, failed, api, every=True))
    except KfpDdpError as error:
        # The log and the pods often cannot be read for the same reason.
        if not any(str(error) in note for note in result.notes):
            result.notes.append(f"its log was not read: {error}")
        return []
    return log[-LAST_LINES:]

"""Why a run failed or waits: step, cause, events, checkpoints, and what to do next."""

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
from kfp_ddp.core.text import one_line
from kfp_ddp.jobs.failure import cause_in_pods, error_in_log
from kfp_ddp.jobs.identity import RUN
from kfp_ddp.k8s.api import Api, Object
from kfp_ddp.k8s.objects import phase
from kfp_ddp.k8s.pods import waiting_reason
from kfp_ddp.runs.record import TaskRecord

LAST_LINES = 2000
"""Lines at the end of a log that are searched for the cause."""
UNWRITTEN = ("PENDING", "OMITTED", "SKIPPED")
"""States of a step that wrote no files."""
UNKNOWN = "not known"
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
        reasons = ((pod["metadata"]["name"], waiting_reason(pod)) for pod in every)
        return [(name, reason.text) for name, reason in reasons if reason]

    def next(self) -> Iterator[tuple[str, str]]:
        """Yield commands to run next, with the purpose of each."""
        run, word, failed = self.run, self.run.word, self.failed
        if run.state == "SUCCEEDED":
            if run.folder is None:
                yield f"kfp-ddp download {word}", "its results"
            else:
                yield f"kfp-ddp predict {word} PICTURE", "classify a picture with its model"
            yield f"kfp-ddp compare {word} OTHER", "compare its settings and metrics"
            return
        if run.folder is None and run.state not in OVER:
            if self.waiting():
                yield "kfp-ddp doctor", "check what the cluster lacks"
            follow = "" if failed else " -f"
            yield f"kfp-ddp logs {word} {self.step}".rstrip() + follow, "its log"
            yield f"kfp-ddp status {word} --follow", "its steps"
            return
        if failed is not None:
            yield f"kfp-ddp logs {word} {failed.label}", "the full log of the step"
        if run.folder is not None and run.state == "RUNNING":
            yield f"kfp-ddp status {word}", "its steps"
        elif run.folder is not None:
            yield "kfp-ddp run SOURCE --local …", "the same command resumes; others are new runs"
        elif failed is not None and failed.step.name == CHECKS:
            yield "kfp-ddp run …", "again, with corrected input"
        else:
            step = max((training.checkpoint or 0 for training in self.trainings), default=0)
            where = f" from step {step}" if step else ""
            yield f"kfp-ddp retry {word}", f"resume{where} when the cause is corrected"

    def document(self) -> dict[str, Any]:
        """Return the description as JSON."""
        return {
            **self.run.document(),
            "step": self.step,
            "cause": self.cause,
            "waiting": [{"pod": pod, "reason": reason} for pod, reason in self.waiting()],
            "events": [e._asdict() | {"last": e.last and e.last.isoformat()} for e in self.events],
            "trainings": [training.document() for training in self.trainings],
            "next": [command for command, _ in self.next()],
            "notes": self.notes,
        }


def describe(run: RunInfo, api: Callable[[], Api], files: bool = True) -> Description:
    """Describe a run from the server's steps, its pods, and its files."""
    every = list(leaves(run.steps))
    result = Description(run, next((leaf for leaf in every if leaf.step.state == "FAILED"), None))
    if run.state not in OVER or run.cancelled:
        stopped = (leaf for leaf in every if leaf.step.state not in OVER - {"CANCELED"})
        result.active = next(stopped, None)
    if run.folder is None and run.state != "SUCCEEDED":
        try:
            cluster = api()
            result.step_pods = pods.list_pods(cluster, run.id)
            result.job_pods = pods.list_pods(cluster, run.id, RUN)
            result.events = pods.warnings(cluster, [*result.step_pods, *result.job_pods])
        except KfpDdpError as error:
            result.notes.append(f"its pods were not read: {error}")
    wrote = (leaf.step for leaf in every if leaf.step.state not in UNWRITTEN)
    if files and any(step.name != CHECKS or step.state == "CACHED" for step in wrote):
        try:
            with tempfile.TemporaryDirectory() as scratch:
                own = run.files()
                result.trainings = read_trainings(own, Path(scratch))
            result.notes += [f"its files: {own.note}"] * bool(own.note)
        except KfpDdpError as error:
            result.notes.append(f"its files were not read: {error}")
    if run.state != "SUCCEEDED":
        result.cause = _cause(result, api)
    return result


def _cause(result: Description, api: Callable[[], Api]) -> str:
    run, failed = result.run, result.failed
    if run.cancelled:
        return "cancelled by a user"
    if failed is None:
        return one_line(run.error) or ("" if run.state not in OVER else UNKNOWN)
    pod = pods.find_pod(result.step_pods, failed.step, failed.step.by_driver)
    if pod and (reason := pods.kill_reason(pod)):
        return reason
    try:
        log = list(logs.lines(run, failed, api))[-LAST_LINES:]
        log = log or list(logs.lines(run, failed, api, every=True))[-LAST_LINES:]
    except KfpDdpError as error:
        log = []
        if not any(str(error) in note for note in result.notes):
            result.notes.append(f"its log was not read: {error}")
    if message := last_error("\n".join(log)):
        return message
    if any(phase(pod) == "Failed" for pod in result.job_pods):
        return cause_in_pods(result.job_pods, "").error
    failures = [training.failure for training in result.trainings if training.failure]
    if failures:
        return failures[0].error
    return one_line(error_in_log(log).text) or one_line(run.error) or UNKNOWN

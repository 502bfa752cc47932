"""Why a run ended, or waits, as it does: step, cause, events, checkpoint, and what to do next."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kfp_ddp.client import pods
from kfp_ddp.client.inspection import logs
from kfp_ddp.client.inspection.subject import Subject
from kfp_ddp.client.inspection.trainings import Training, trainings
from kfp_ddp.client.pods import Event
from kfp_ddp.client.steps import OVER, Leaf, leaves
from kfp_ddp.core.errors import KfpDdpError
from kfp_ddp.core.step import last_error
from kfp_ddp.core.text import one_line
from kfp_ddp.jobs.failure import last_words, root_cause
from kfp_ddp.jobs.progress import TrainingProgress
from kfp_ddp.k8s.api import Api, Object
from kfp_ddp.k8s.objects import phase

LOOKED_AT = 2000
"""Lines at a log's end in which the cause is looked for."""
UNKNOWN = "not known"
CHECKS = "preflight"
"""The step that fails for what was given, not for what happened."""


@dataclass(frozen=True)
class Reached:
    """How far a training came."""

    task: str
    checkpoint: int | None
    progress: str
    verdict: str
    """The gate's reason."""
    bundle: str
    """Where the exported bundle is."""
    champion: bool


@dataclass(frozen=True)
class Description:
    """All that is told of a run; what is not known is empty."""

    subject: Subject
    step: str = ""
    """The one that failed, or runs now."""
    cause: str = ""
    waiting: tuple[tuple[str, str], ...] = ()
    """Pods that do not start, and why."""
    events: tuple[Event, ...] = ()
    reached: tuple[Reached, ...] = ()
    next: tuple[tuple[str, str], ...] = ()
    """Commands, and what each is for."""
    notes: tuple[str, ...] = ()
    """What could not be looked at."""

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        subject = self.subject
        times = {"start": subject.start, "end": subject.end}
        return {
            "run_id": subject.id,
            "name": subject.name,
            "state": subject.state,
            **{name: at.isoformat() if at else None for name, at in times.items()},
            "page": subject.page,
            "step": self.step,
            "cause": self.cause,
            "waiting": [{"pod": pod, "reason": reason} for pod, reason in self.waiting],
            "events": [
                asdict(each) | {"last": each.last.isoformat() if each.last else None}
                for each in self.events
            ],
            "trainings": [asdict(each) for each in self.reached],
            "next": [command for command, _ in self.next],
            "notes": list(self.notes),
        }


@dataclass
class _Seen:
    """What the cluster and the run's folder showed."""

    steps: Sequence[Object] = ()
    jobs: Sequence[Object] = ()
    events: Sequence[Event] = ()
    trained: Sequence[Training] = ()
    notes: list[str] = field(default_factory=list)


def describe(subject: Subject, api: Callable[[], Api], files: bool = True) -> Description:
    """Look at a run: at the server's steps, at its pods, and at its files.

    Args:
        subject: The run.
        api: Connects to its namespace.
        files: Look at its files, too.

    Returns:
        What was found; what could not be looked at is told in its notes.
    """
    seen = _Seen()
    every = list(leaves(subject.steps))
    failed = next((leaf for leaf in every if leaf.step.state == "FAILED"), None)
    runs = next((leaf for leaf in every if leaf.step.state not in OVER), None)
    at = failed or (None if subject.state in OVER else runs)
    if subject.folder is None and subject.state != "SUCCEEDED":
        _look(subject, api, seen)
    if files and any(leaf.step.state == "CACHED" or _began(leaf) for leaf in every):
        _read(subject, seen)
    found = Description(
        subject,
        step=at.label if at else "",
        cause=_cause(subject, failed, seen, api) if subject.state != "SUCCEEDED" else "",
        waiting=tuple(_waiting([*seen.steps, *seen.jobs])),
        events=tuple(seen.events),
        reached=tuple(_reached(each) for each in seen.trained),
        notes=tuple(seen.notes),
    )
    return replace(found, next=tuple(_next(found, failed)))


def _began(leaf: Leaf) -> bool:
    return leaf.step.name != CHECKS and leaf.step.state not in ("PENDING", "OMITTED", "SKIPPED")


def _look(subject: Subject, api: Callable[[], Api], seen: _Seen) -> None:
    try:
        known = api()
        seen.steps, seen.jobs = pods.of_steps(known, subject.id), pods.of_jobs(known, subject.id)
        seen.events = pods.events(known, [*seen.steps, *seen.jobs])
    except KfpDdpError as error:
        seen.notes.append(f"its pods were not looked at: {error}")


def _read(subject: Subject, seen: _Seen) -> None:
    try:
        with tempfile.TemporaryDirectory() as scratch:
            seen.trained = trainings(subject.files(), Path(scratch))
    except KfpDdpError as error:
        seen.notes.append(f"its files were not looked at: {error}")


def _waiting(found: Sequence[Object]) -> Iterator[tuple[str, str]]:
    for pod in found:
        if why := pods.waits_for(pod):
            yield pod["metadata"]["name"], why


def _reached(training: Training) -> Reached:
    progress = TrainingProgress()
    progress.update(training.events)
    return Reached(
        task=training.task,
        checkpoint=training.checkpoint,
        progress=progress.line().removesuffix(" · ETA 0:00") if progress.last else "",
        verdict=str(training.verdict.get("reason", "")),
        bundle=str(training.exported.get("uri", "")),
        champion=bool(training.exported.get("champion")),
    )


def _cause(subject: Subject, failed: Leaf | None, seen: _Seen, api: Callable[[], Api]) -> str:
    """Why it failed, from who knows best: Kubernetes, the step's log, its job, its files."""
    if subject.cancelled:
        return "somebody cancelled it"
    if failed is None:
        return one_line(subject.error) or ("" if subject.state not in OVER else UNKNOWN)
    pod = pods.of_step(seen.steps, failed.step, failed.step.by_driver)
    if pod and (ended := pods.ended_by(pod)):
        return ended
    try:
        said = list(logs.lines(subject, failed, api))[-LOOKED_AT:]
    except KfpDdpError as error:
        said = []
        if not any(str(error) in note for note in seen.notes):
            seen.notes.append(f"its log was not read: {error}")
    if told := last_error("\n".join(said)):
        return told
    if any(phase(each) == "Failed" for each in seen.jobs):
        return root_cause(seen.jobs, "").error
    written = [each.failure for each in seen.trained if each.failure]
    if written:
        return written[0].error
    return one_line(last_words(said).text) or one_line(subject.error) or UNKNOWN


def _next(found: Description, failed: Leaf | None) -> Iterator[tuple[str, str]]:
    subject, word = found.subject, found.subject.word
    if subject.folder is not None:
        yield from _next_here(found, failed)
    elif subject.state == "SUCCEEDED":
        yield f"kfp-ddp download {word}", "its bundle and its report"
        yield f"kfp-ddp compare {word} OTHER", "its settings and metrics beside another's"
    elif subject.state not in OVER:
        if found.waiting:
            yield "kfp-ddp doctor", "what the cluster lacks"
        follow = "" if failed else " -f"
        yield f"kfp-ddp logs {word} {found.step}".rstrip() + follow, "what it writes"
        yield f"kfp-ddp status {word} --follow", "its steps as they go on"
    else:
        if failed is not None:
            yield f"kfp-ddp logs {word} {failed.label}", "all that the step wrote"
        if failed is not None and failed.step.name == CHECKS:
            yield "kfp-ddp run …", "again, with what was given corrected"
        else:
            reached = max((each.checkpoint or 0 for each in found.reached), default=0)
            where = f"from step {reached}" if reached else "where it ended"
            yield f"kfp-ddp retry {word}", f"to go on {where} when the cause is gone"


def _next_here(found: Description, failed: Leaf | None) -> Iterator[tuple[str, str]]:
    word = found.subject.word
    if found.subject.state == "SUCCEEDED":
        yield f"kfp-ddp predict {word} PICTURE", "what its model sees in a picture"
        yield f"kfp-ddp compare {word} OTHER", "its settings and metrics beside another's"
        return
    if failed is not None:
        yield f"kfp-ddp logs {word} {failed.label}", "all that the step wrote"
    yield f"kfp-ddp run SOURCE --local --output {word}", "again, with what was given corrected"

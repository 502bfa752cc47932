"""What a task of a run recorded in its folder, and its newest checkpoint."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from statistics import median_high
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.failure import Failure, first_cause
from kfp_ddp.core.run_folder import EXPORTED, VERDICT, RunFolder
from kfp_ddp.core.settings import mapping_of
from kfp_ddp.jobs.progress import TrainingProgress
from kfp_ddp.models import evaluation
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.report.events import training_time
from kfp_ddp.runs import trials
from kfp_ddp.training.spec.manifest import MANIFEST, Manifest, read_manifest, step_dir, step_dirs
from kfp_ddp.training.spec.metrics import read_events
from kfp_ddp.training.spec.time_spent import Cost, cost_of

FILES = (
    *(RunFolder.CONFIG, RunFolder.METRICS, f"evaluation/{evaluation.FILE}"),
    *(f"{RunFolder.LOGS}/failure*.json", f"{RunFolder.CHECKPOINTS}/step-*/{MANIFEST}"),
    *(f"evaluation*/{VERDICT}", EXPORTED, trials.FILE),
)
"""The small files of a task that its record is read from."""


@dataclass(frozen=True)
class TaskRecord:
    """One task of a run, as far as it came; what it did not write is empty."""

    task: str
    settings: dict[str, Any]
    """With automatic values resolved; empty if no training started."""
    events: list[dict[str, Any]]
    progress: TrainingProgress
    evaluation: Evaluation | None
    checkpoint: int | None
    """Step of the newest complete checkpoint."""
    failure: Failure | None
    """The root cause that the ranks recorded, unless the training completed after it."""
    verdict: dict[str, Any]
    """The gate's: blessed, reason, and what it compared with; empty before the gate."""
    exported: dict[str, Any]
    """The export's: uri of the bundle, and whether it is the champion."""

    def select(self, kind: str) -> list[dict[str, Any]]:
        """Return its events of a kind, such as step or eval."""
        return [event for event in self.events if event.get("event") == kind]

    @property
    def cost(self) -> Cost:
        """Its cost so far."""
        return cost_of(self.events, self.settings)

    @property
    def ranks(self) -> Any:
        """Number of its processes; None if it never started."""
        starts = self.select("start")
        return starts[-1].get("world_size") if starts else None

    @property
    def speed(self) -> float | None:
        """Median of the images per second of its steps; None if unknown."""
        steps = self.select("step")
        speeds = [event["images_per_s"] for event in steps if "images_per_s" in event]
        return median_high(speeds) if speeds else None

    @property
    def seconds(self) -> float | None:
        """Time from its first to its last event, without pauses before a resume."""
        return training_time(self.events)[0] or None

    def lines(self) -> Iterator[str]:
        """Yield what `kfp-ddp describe` prints of it."""
        was_trained = self.settings or self.checkpoint is not None
        if was_trained:  # else it was only evaluated
            yield f"  checkpoint  {self._best()}"
        if self.cost.gpu_hours:
            yield f"  cost        {self.cost}"
        if verdict := self.verdict.get("reason"):
            yield f"  gate        {verdict}"
        if bundle := self.exported.get("uri"):
            champion = " (champion)" if self.exported.get("champion") else ""
            yield f"  bundle      {bundle}{champion}"

    def _best(self) -> str:
        """Return the best checkpoint, if it was evaluated, else the newest, with the progress."""
        record = self.evaluation
        if record:
            accuracy = f"{record.split} accuracy {record.accuracy:.1%}"
            return f"step {record.step} of {self.task}; {accuracy}"
        checkpoint = "none" if self.checkpoint is None else f"step {self.checkpoint}"
        progress = self.document()["progress"] or "no step yet"
        return f"{checkpoint} of {self.task}; {progress}"

    def document(self) -> dict[str, Any]:
        """Return its state as JSON."""
        return {
            "task": self.task,
            "checkpoint": self.checkpoint,
            "progress": self.progress.line() if self.progress.last else "",
            "verdict": str(self.verdict.get("reason", "")),
            "bundle": str(self.exported.get("uri", "")),
            "champion": bool(self.exported.get("champion")),
            "gpu_hours": self.cost.gpu_hours,
            "cost": self.cost.money,
        }


def files_of_records(names: Iterable[str]) -> list[str]:
    """Return those of a run's files, named `<task>/<file>`, that `read_run` reads."""
    patterns = [f"*/{file}" for file in FILES]

    def is_of_record(name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in patterns)

    return list(filter(is_of_record, names))


def read_run(folder: Path) -> list[TaskRecord]:
    """Return the records of the tasks in a run's folder, by their names."""
    return [read_task(path) for path in sorted(folder.glob("*")) if path.is_dir()]


def read_task(folder: Path) -> TaskRecord:
    """Return the record in a task's folder."""
    task = RunFolder(folder)
    newest = newest_checkpoint(folder)
    progress = TrainingProgress()
    events = read_events(task.metrics)
    evaluated = None
    failure = None
    progress.update(events)
    done = progress.end is not None and progress.end.get("status") == "done"
    with contextlib.suppress(InputError):
        evaluated = Evaluation.read(task.evaluation("val") / evaluation.FILE)
    with contextlib.suppress(OSError):
        texts = (path.read_text(errors="replace") for path in task.logs.glob("failure*.json"))
        failure = first_cause(filter(None, map(Failure.parse, texts)))
    verdicts = map(mapping_of, sorted(folder.glob(f"evaluation*/{VERDICT}")))
    return TaskRecord(
        task=folder.name,
        settings=mapping_of(task.config),
        events=events,
        progress=progress,
        evaluation=evaluated,
        checkpoint=newest.step if newest else None,
        failure=None if done else failure,
        verdict=next(filter(None, verdicts), {}),  # that of val comes first
        exported=mapping_of(folder / EXPORTED),
    )


def newest_checkpoint(folder: Path) -> Manifest | None:
    """Return a task's newest checkpoint with a manifest, which is written last; needs no torch."""
    with contextlib.suppress(OSError):
        checkpoints = map(_complete, step_dirs(RunFolder(folder).checkpoints))
        return next(filter(None, checkpoints), None)
    return None


def chosen_checkpoint(folder: Path) -> Manifest | None:
    """Return the best checkpoint of a training with keep_best, else the newest."""
    newest = newest_checkpoint(folder)
    if newest is None:
        return None
    best = newest.fields.get("best")
    if not best or not newest.fields["config"]["keep_best"]:
        return newest
    return _complete(step_dir(newest.path.parent, int(best["step"]))) or newest


def _complete(path: Path) -> Manifest | None:
    with contextlib.suppress(OSError, ValueError):
        return read_manifest(path)
    return None

"""The trainings of a run, read from the files of their tasks."""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from kfp_ddp.client.run_files import RunFiles
from kfp_ddp.core import failure
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.run_folder import EXPORTED, VERDICT, RunFolder
from kfp_ddp.core.settings import mapping_of
from kfp_ddp.jobs.progress import TrainingProgress
from kfp_ddp.models import evaluation
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.report.events import read_events
from kfp_ddp.runs.train.outputs import newest_checkpoint

FILES = (
    *("config.json", "metrics.jsonl", f"evaluation/{evaluation.FILE}"),
    *("logs/failure*.json", "checkpoints/step-*/manifest.json"),
    *(f"evaluation/{VERDICT}", EXPORTED),
)
"""The small files that a training is read from."""


@dataclass(frozen=True)
class Training:
    """One task of a run that trained or evaluated."""

    task: str
    settings: dict[str, Any]
    """With automatic values resolved; empty if it did not start."""
    events: list[dict[str, Any]]
    evaluation: Evaluation | None
    checkpoint: int | None
    """Step of the newest complete checkpoint."""
    failure: failure.Failure | None
    verdict: dict[str, Any]
    """The gate's: blessed, reason, and what it compared with; empty before the gate."""
    exported: dict[str, Any]
    """The export's: uri of the bundle, and whether it is the champion."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return its events of a kind, such as step or eval."""
        return [event for event in self.events if event.get("event") == kind]

    def document(self) -> dict[str, Any]:
        """Return its state as JSON."""
        progress = TrainingProgress()
        progress.update(self.events)
        return {
            "task": self.task,
            "checkpoint": self.checkpoint,
            "progress": progress.line().removesuffix(" · ETA 0:00") if progress.last else "",
            "verdict": str(self.verdict.get("reason", "")),
            "bundle": str(self.exported.get("uri", "")),
            "champion": bool(self.exported.get("champion")),
        }


def read_trainings(files: RunFiles, folder: Path) -> tuple[Training, ...]:
    """Return the trainings of a run, by the names of their tasks.

    Args:
        folder: An empty folder to download files to.
    """
    names = [n for n in files.sizes() if any(fnmatch(n, f"*/{pattern}") for pattern in FILES)]
    files.fetch(names, folder)
    return tuple(_read(folder))


def _read(folder: Path) -> Iterator[Training]:
    for path in sorted(child for child in folder.glob("*") if child.is_dir()):
        task = RunFolder(path)
        evaluated = task.evaluation("val") / evaluation.FILE
        if not any(file.exists() for file in (task.config, task.metrics, evaluated)):
            continue
        newest = newest_checkpoint(path)
        yield Training(
            task=path.name,
            settings=mapping_of(task.config),
            events=read_events(task.metrics),
            evaluation=_evaluation(evaluated),
            checkpoint=newest.step if newest else None,
            failure=_failure(task.logs),
            verdict=mapping_of(task.evaluation("val") / VERDICT),
            exported=mapping_of(path / EXPORTED),
        )


def _evaluation(path: Path) -> Evaluation | None:
    try:
        return Evaluation.read(path)
    except InputError:
        return None


def _failure(logs: Path) -> failure.Failure | None:
    """Return the first cause that the nodes' launchers recorded."""
    records = (failure.Failure.parse(path.read_text()) for path in logs.glob("failure*.json"))
    return failure.first_cause(record for record in records if record)

"""The trainings of a run, as the files of their folders tell them."""

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
from kfp_ddp.models import evaluation
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.report.events import read_events
from kfp_ddp.runs.train.outputs import newest_checkpoint

TOLD_BY = (
    *("config.json", "metrics.jsonl", f"evaluation/{evaluation.FILE}"),
    *("logs/failure*.json", "checkpoints/step-*/manifest.json"),
    *(f"evaluation/{VERDICT}", EXPORTED),
)
"""The small files that what follows is read from."""


@dataclass(frozen=True)
class Training:
    """One task of a run that trained, or evaluated: its settings, its figures, how far it came."""

    task: str
    settings: dict[str, Any]
    """With its automatic values filled in; empty where it did not get that far."""
    events: list[dict[str, Any]]
    evaluation: Evaluation | None
    checkpoint: int | None
    """Step of the newest whole checkpoint."""
    failure: failure.Failure | None
    verdict: dict[str, Any]
    """The gate's: blessed, reason, and what it compared with; empty before it."""
    exported: dict[str, Any]
    """What the export says of the bundle: its uri, and whether it is the champion."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Its events of a kind, such as step or eval."""
        return [each for each in self.events if each.get("event") == kind]


def trainings(files: RunFiles, folder: Path) -> tuple[Training, ...]:
    """Those of a run, by the names of their tasks.

    Args:
        files: The run's.
        folder: An empty one, for what is read.

    Raises:
        KfpDdpError: the files cannot be had.
    """
    names = [n for n in files.sizes() if any(fnmatch(n, f"*/{each}") for each in TOLD_BY)]
    files.bring(names, folder)
    return tuple(_found(folder))


def _found(folder: Path) -> Iterator[Training]:
    for path in sorted(each for each in folder.glob("*") if each.is_dir()):
        there = RunFolder(path)
        evaluated = there.evaluation("val") / evaluation.FILE
        if not any(each.exists() for each in (there.config, there.metrics, evaluated)):
            continue
        newest = newest_checkpoint(path)
        yield Training(
            task=path.name,
            settings=mapping_of(there.config),
            events=read_events(there.metrics),
            evaluation=_evaluation(evaluated),
            checkpoint=newest.step if newest else None,
            failure=_failure(there.logs),
            verdict=mapping_of(there.evaluation("val") / VERDICT),
            exported=mapping_of(path / EXPORTED),
        )


def _evaluation(path: Path) -> Evaluation | None:
    try:
        return Evaluation.read(path)
    except InputError:
        return None


def _failure(logs: Path) -> failure.Failure | None:
    """The first cause that the launchers of the nodes wrote."""
    found = (failure.Failure.parse(path.read_text()) for path in logs.glob("failure*.json"))
    return failure.first_cause(each for each in found if each)

"""What the trainings of a sweep came to, read from their folders."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.core.settings import mapping_of
from kfp_ddp.report.events import Point, curve, read_events
from kfp_ddp.runs.workspace import open_workspace
from kfp_ddp.training.config import TrainConfig


@dataclass(frozen=True)
class Trial:
    """One training."""

    run_dir: str
    checkpoint: str
    """Empty where it failed."""
    failure: str
    settings: dict[str, Any]
    accuracy: float
    """Of the checkpoint that it hands on, in its own evaluation; -1 where there is none."""
    loss: float | None
    epochs: float
    ended: str
    """Why it ended before its last epoch; empty where it did not."""
    curve: tuple[Point, ...]
    """Accuracy over the epochs."""


def read(run_dir: str, checkpoint: str, failure: str) -> Trial:
    """What a training left.

    Raises:
        KfpDdpError: its folder cannot be read.
    """
    with open_workspace(run_dir, "leaderboard") as folder:
        files = RunFolder(folder.path)
        events = read_events(files.metrics)
        settings = mapping_of(files.config)  # none where it failed before it began
    evaluations = [event for event in events if event.get("event") == "eval"]
    step = int(checkpoint.rpartition("-")[2] or -1) if checkpoint else -1
    told: dict[str, Any] = {"step": -1}
    told = next((each for each in evaluations if each.get("step") == step), told)
    ends = [event.get("reason") or "" for event in events if event.get("event") == "end"]
    points = curve(events, "eval", "accuracy")
    return Trial(
        run_dir=run_dir,
        checkpoint=checkpoint,
        failure=failure,
        settings=settings,
        accuracy=float(told.get("accuracy") or -1) if checkpoint else -1,
        loss=told.get("loss"),
        epochs=points[-1][0] if points else 0.0,
        ended=ends[-1] if ends and not failure else "",
        curve=tuple(points),
    )


def ranked(trials: Iterable[Trial]) -> list[Trial]:
    """The best first, by accuracy and then by loss; those that failed last."""

    def place(trial: Trial) -> tuple[bool, float, float]:
        return not trial.checkpoint, -trial.accuracy, trial.loss if trial.loss is not None else 1e9

    return sorted(trials, key=place)


def differing(trials: Sequence[Trial]) -> list[str]:
    """The settings in which they differ, in the order of the configuration."""
    told = [trial.settings for trial in trials if trial.settings]
    names = [name for name in TrainConfig.model_fields if name not in TrainConfig.own]
    values = {name: {json.dumps(each.get(name)) for each in told} for name in names}
    return [name for name, found in values.items() if len(found) > 1]

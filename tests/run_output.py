"""The folder of a `run --local`, without a run, and commands on it."""

import io
import json
from pathlib import Path
from typing import Any

from kfp_ddp.local.folder import LocalRun, LocalStep
from kfp_ddp.models import bundle
from kfp_ddp.models.evaluation import Evaluation
from tests.checkpoints import save
from tests.evaluations import record
from tests.files import write

RUN_ID = "4f1c2d3e-0000-4000-8000-5a6b7c8d9e0f"
STEPS = (
    *("preflight", "data-sync", "dataset-volume", "train"),
    *("evaluate", "export", "gate", "publish"),
)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


def make(
    folder: Path, *, failed: str = "", error: str = "", correct: int = 90, **settings: Any
) -> Path:
    """Create the output of a run with settings of its training, and return it.

    `failed` is the step that failed, with `error` as its output; `correct` is out of 100 samples.
    """
    done = STEPS[: STEPS.index(failed)] if failed else STEPS
    lines = ["10:00:00.000 - INFO - Running pipeline: 'train-resnet'"]
    steps, start = list[LocalStep](), 1e9
    for step in (*done, *([failed] if failed else []), "teardown"):
        lines.append(f"10:00:00.000 - INFO - Executing task '{step}'")
        lines += [error] if step == failed else []
        status = "FAILURE" if step == failed else "SUCCESS"
        lines.append(f"10:00:01.000 - INFO - Task '{step}' finished with status {status}")
        state = "FAILED" if step == failed else "SUCCEEDED"
        at = start + len(steps)
        steps.append(LocalStep(name=step, state=state, start=at, end=at + 1))
    (folder / "artifacts" / "train-resnet-2026-11-22-10-00-00-000000").mkdir(parents=True)
    (folder / "pipeline.log").write_text("\n".join(lines) + "\n")
    LocalRun(
        identity="",
        steps=tuple(steps),
        state="FAILED" if failed else "SUCCEEDED",
        start=start,
        end=start + len(steps),
        folder=folder,
    ).write()
    if "train" in (*done, failed):
        task(folder / "work" / RUN_ID / "train", done, correct, settings)
    return folder


def task(folder: Path, done: tuple[str, ...], correct: int, settings: dict[str, Any]) -> None:
    """Create the folder of a training with the files of the steps in `done`."""
    folder.mkdir(parents=True)
    data = {"data": "/data/versions/aaaabbbbcccc", "output_dir": str(folder)}
    (folder / "config.json").write_text(json.dumps(data | settings))
    start = {"event": "start", "time": 100.0, "world_size": 2, "steps_total": 40}
    events = [start]
    for epoch in (1, 2):
        at: dict[str, Any] = {"time": 100.0 + 10 * epoch, "step": 20 * epoch, "epoch": epoch}
        events.append({"event": "step", **at, "loss": 2 / epoch, "images_per_s": 50.0 * epoch})
        events.append({"event": "eval", **at, "loss": 1 / epoch, "accuracy": correct / 200 * epoch})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    save(folder, 40, config={})
    if "evaluate" in done:
        record = evaluation(correct).model_dump_json()
        write(folder / "evaluation" / "evaluation.json", record)
        (folder / "evaluation" / "report.html").write_text("<p>report</p>")
        (folder / "evaluation" / "predictions.csv").write_text("path\n")
    if "export" in done:
        with bundle.replacing(folder) as made:
            (made / "model.onnx").write_bytes(bytes(100_000))
            write(made / "serving" / "labels.txt", "a\nb\n")


def evaluation(correct: int, **fields: Any) -> Evaluation:
    """Return an evaluation of 100 samples."""
    return record(correct, **{"dataset_digest": "aaaabbbbcccc" + "0" * 52, **fields})

"""What is made of the folders of several trainings."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kfp_ddp.evaluation.leaderboard import run


def training(
    folder: Path, name: str, accuracies: list[float], loss: float = 1.0, **settings: Any
) -> str:
    """A folder as a training leaves it, with a checkpoint after each epoch of ten steps."""
    place = folder / name
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"output_dir": str(place), **settings}))
    events: list[dict[str, Any]] = [{"event": "start", "steps_total": 30}]
    for epoch, accuracy in enumerate(accuracies, 1):
        figures = {"epoch": epoch, "accuracy": accuracy, "loss": loss}
        events.append({"event": "eval", "step": 10 * epoch, **figures})
    reason = "behind" if len(accuracies) < 3 else ""
    events.append({"event": "end", "status": "done", "reason": reason})
    (place / "metrics.jsonl").write_text("\n".join(map(json.dumps, events)))
    return str(place)


class Metrics(SimpleNamespace):
    """Takes figures as KFP's artifact does."""

    def __init__(self) -> None:
        super().__init__(figures={})

    def log_metric(self, name: str, value: float) -> None:
        self.figures[name] = value


def _artifact(folder: Path, name: str) -> Any:
    return SimpleNamespace(path=str(folder / name))


def ranked(
    folder: Path, trials: list[tuple[str, str, str]]
) -> tuple[tuple[str, str], str, str, dict[str, float]]:
    page, table = (_artifact(folder, name) for name in ("page", "table"))
    metrics: Any = Metrics()
    run_dirs, checkpoints, failures = zip(*trials, strict=True)
    best = run(run_dirs, checkpoints, failures, page, metrics, table)
    return best, Path(page.path).read_text(), Path(table.path).read_text(), metrics.figures


def test_the_best_is_by_accuracy_of_its_checkpoint_and_then_by_loss(tmp_path: Path) -> None:
    peak = training(tmp_path, "peak", [0.9, 0.5, 0.4], learning_rate=0.4, model="a")
    low = training(tmp_path, "low", [0.2, 0.3, 0.8], 0.7, learning_rate=0.1, model="a")
    same = training(tmp_path, "same", [0.2, 0.3, 0.8], 0.5, learning_rate=0.2, model="a")
    early = training(tmp_path, "early", [0.1], learning_rate=0.01, model="a")
    gone = (str(tmp_path / "gone"), "", "rank 0: <b>no</b> memory")
    trials = [
        (peak, f"{peak}/checkpoints/step-00000030", ""),
        (low, f"{low}/checkpoints/step-00000030", ""),
        gone,
        (same, f"{same}/checkpoints/step-00000030", ""),
        (early, f"{early}/checkpoints/step-00000010", ""),
    ]
    best, page, table, figures = ranked(tmp_path, trials)
    assert best == (f"{same}/checkpoints/step-00000030", same)
    assert figures == {"trials": 5, "failed": 1, "ended_early": 1, "best_accuracy": 0.8}
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert [row[:3] for row in rows] == [
        ["1", "0.2", "80.00%"],
        ["2", "0.1", "80.00%"],
        ["3", "0.4", "40.00%"],
        ["4", "0.01", "10.00%"],
        ["", "", ""],
    ]
    assert rows[3][-1] == "behind"
    assert "model" not in table.splitlines()[0], "all have the same"
    assert "<b>no</b>" not in page
    assert "&lt;b&gt;no&lt;/b&gt; memory" in page


def test_with_keep_best_the_accuracy_is_that_of_the_checkpoint_kept(tmp_path: Path) -> None:
    peak = training(tmp_path, "peak", [0.9, 0.5, 0.4], learning_rate=0.4)
    low = training(tmp_path, "low", [0.2, 0.3, 0.8], learning_rate=0.1)
    best, *_, figures = ranked(
        tmp_path,
        [
            (low, f"{low}/checkpoints/step-00000030", ""),
            (peak, f"{peak}/checkpoints/step-00000010", ""),
        ],
    )
    assert best[1] == peak
    assert figures["best_accuracy"] == 0.9


@pytest.mark.parametrize(
    ("trials", "said"),
    [
        ([("/gone/1", "", "no room"), ("/gone/2", "", "no card")], "all 2 trials failed; the"),
        ([], "0 run_dirs, 0 checkpoints and 0 failures"),
    ],
)
def test_where_nothing_can_be_handed_on_the_step_fails(
    tmp_path: Path, trials: list[tuple[str, str, str]], said: str
) -> None:
    page, table = (_artifact(tmp_path, name) for name in ("page", "table"))
    metrics: Any = Metrics()
    run_dirs, checkpoints, failures = ([each[at] for each in trials] for at in range(3))
    with pytest.raises(SystemExit) as error:
        run(run_dirs, checkpoints, failures, page, metrics, table)
    assert said in str(error.value)
    assert Path(table.path).exists() == bool(trials), "the table tells why each failed"

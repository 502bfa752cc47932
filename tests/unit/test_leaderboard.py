"""The leaderboard of several trainings."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kfp_ddp.evaluation.leaderboard import run


def training(
    folder: Path, name: str, accuracies: list[float], loss: float = 1.0, **settings: Any
) -> str:
    """Write the folder of a training with ten steps and a checkpoint in each epoch."""
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"output_dir": str(path), **settings}))
    events: list[dict[str, Any]] = [{"event": "start", "steps_total": 30}]
    for epoch, accuracy in enumerate(accuracies, 1):
        figures = {"epoch": epoch, "accuracy": accuracy, "loss": loss}
        events.append({"event": "eval", "step": 10 * epoch, **figures})
    reason = "behind" if len(accuracies) < 3 else ""
    events.append({"event": "end", "status": "done", "reason": reason})
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, events)))
    return str(path)


def ranked(
    folder: Path, trials: list[tuple[str, str, str]]
) -> tuple[tuple[str, str], str, str, dict[str, float]]:
    """Return the best, page, table and metrics of trials: folder, checkpoint and failure."""
    page, table = (SimpleNamespace(path=str(folder / name)) for name in ("page", "table"))
    figures: dict[str, float] = {}
    metrics = SimpleNamespace(log_metric=figures.__setitem__)
    run_dirs, checkpoints, failures = ([trial[at] for trial in trials] for at in range(3))
    best = run(run_dirs, checkpoints, failures, page, metrics, table)
    return best, Path(page.path).read_text(), Path(table.path).read_text(), figures


def test_trials_are_ranked_by_accuracy_and_then_by_loss(tmp_path: Path) -> None:
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
    assert "model" not in table.splitlines()[0]  # which is equal in all
    assert "<b>no</b>" not in page
    assert "&lt;b&gt;no&lt;/b&gt; memory" in page


def test_the_accuracy_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    peak = training(tmp_path, "peak", [0.9, 0.5, 0.4], learning_rate=0.4)
    low = training(tmp_path, "low", [0.2, 0.3, 0.8], learning_rate=0.1)
    last, first = f"{low}/checkpoints/step-00000030", f"{peak}/checkpoints/step-00000010"
    best, *_, figures = ranked(tmp_path, [(low, last, ""), (peak, first, "")])
    assert best[1] == peak
    assert figures["best_accuracy"] == 0.9


def test_without_a_successful_trial_the_step_fails(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="0 run_dirs, 0 checkpoints and 0 failures"):
        ranked(tmp_path, [])
    with pytest.raises(SystemExit, match="all 2 trials failed; the first: no room"):
        ranked(tmp_path, [("/gone/1", "", "no room"), ("/gone/2", "", "no card")])
    assert "no card" in (tmp_path / "table").read_text()

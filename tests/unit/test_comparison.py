"""Models on the same samples, and the leaderboard of trainings."""

import json
import math
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.evaluation.comparison import compare, mcnemar, newcombe
from kfp_ddp.evaluation.leaderboard import run
from kfp_ddp.models.evaluation import ClassResult, Evaluation, Prediction, wilson
from kfp_ddp.runs.train.outputs import _figures
from kfp_ddp.training.state.manifest import Manifest
from tests import evaluations

Side = dict[str, Prediction]


def sides(rows: list[tuple[str, bool, bool]]) -> tuple[Side, Side]:
    """Class, and whether the challenger and the champion told it, of each sample."""
    ours = {f"{at}.png": Prediction(name, right) for at, (name, right, _) in enumerate(rows)}
    theirs = {f"{at}.png": Prediction(name, right) for at, (name, _, right) in enumerate(rows)}
    return ours, theirs


def record(side: Side) -> Evaluation:
    names = sorted({one.target for one in side.values()})
    classes = [ClassResult(name=name, samples=1, precision=0, recall=0, f1=0) for name in names]
    correct = sum(one.correct for one in side.values())
    return evaluations.record(correct, len(side), classes=classes)


@pytest.mark.parametrize(
    ("both", "won", "lost", "neither", "low", "high"),
    [
        (36, 12, 2, 0, 0.0569, 0.3404),  # Newcombe 1998, Statistics in Medicine 17:2635
        (14, 5, 0, 22, 0.0115, 0.2265),  # Altman 2000, Statistics with Confidence, table 6.2
        (1, 1, 7, 12, -0.5069, -0.0256),  # Fagerland 2014, Statistics in Medicine 33:2850
    ],
)
def test_newcombe(both: int, won: int, lost: int, neither: int, low: float, high: float) -> None:
    n = both + won + lost + neither
    assert newcombe(both + won, both + lost, won, n) == pytest.approx((low, high), abs=6e-5)


def test_the_interval_holds_the_gain_and_turns_around_with_the_sides() -> None:
    for both, won, lost, neither in product((0, 1, 7, 300), repeat=4):
        n = both + won + lost + neither
        if n:
            low, high = newcombe(both + won, both + lost, won, n)
            assert -1 <= low <= (won - lost) / n + 1e-12
            assert (won - lost) / n - 1e-12 <= high <= 1
            turned = newcombe(both + lost, both + won, lost, n)
            assert turned == pytest.approx((-high, -low), abs=1e-12)


def test_newcombe_where_one_share_leaves_no_correlation() -> None:
    (_, high), (low, _) = wilson(0, 20), wilson(5, 20)
    result = newcombe(0, 5, 0, 20)
    assert result[1] == pytest.approx(-0.25 + math.hypot(high, 0.25 - low))
    low, high = wilson(1, 2)  # and where the correction for continuity takes all of it
    half = math.hypot(0.5 - low, high - 0.5)
    assert newcombe(1, 1, 0, 2) == pytest.approx((-half, half))


def test_mcnemar_against_the_binomial_test() -> None:
    stats = pytest.importorskip("scipy.stats")
    for won, lost in [(0, 0), (0, 4), (4, 0), (30, 12), (500, 430), (3000, 2900)]:
        n = won + lost
        expected = stats.binomtest(won, n, 0.5, alternative="greater").pvalue if n else 1.0
        assert mcnemar(won, lost) == pytest.approx(expected, rel=1e-9)


def test_the_gain_is_told_with_its_interval_and_by_class() -> None:
    rows = [("cat", True, False)] * 6 + [("cat", True, True)] * 20 + [("dog", False, True)] * 2
    ours, theirs = sides(rows + [("dog", True, True)] * 22)
    mine, before = record(ours), record(theirs)
    result = compare(mine, before, (ours, theirs), where="gs://b/m", version="0123456789ab")
    assert result.gain == pytest.approx(mine.accuracy - before.accuracy) == pytest.approx(4 / 50)
    assert (result.low, result.high) == newcombe(48, 44, 6, 50)
    assert (result.won, result.lost, result.p_value) == (6, 2, mcnemar(6, 2))
    by_class = {one.name: (one.samples, one.won, one.lost, one.gain) for one in result.classes}
    assert by_class == {"cat": (26, 6, 0, 6 / 26), "dog": (24, 0, 2, -2 / 24)}
    assert (result.classes[0].low, result.classes[0].high) == newcombe(26, 20, 6, 26)
    assert result.champion_accuracy == before.accuracy


def test_other_samples_do_not_compare() -> None:
    ours, theirs = sides([("cat", True, False), ("dog", True, True)])
    theirs["other.png"] = theirs.pop("0.png")
    with pytest.raises(InputError, match="other samples than their evaluations"):
        compare(record(ours), record(theirs), (ours, theirs), where="m", version="")


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
    early = training(tmp_path, "early", [0.0], learning_rate=0.01, model="a")
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
        ["4", "0.01", "0.00%"],
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
    again = {"event": "eval", "step": 10, "epoch": 1, "accuracy": 0.85, "loss": 1.0}
    with Path(peak, "metrics.jsonl").open("a") as file:  # a resume repeats that step
        file.write(f"\n{json.dumps(again)}")
    assert ranked(tmp_path, [(low, last, ""), (peak, first, "")])[-1]["best_accuracy"] == 0.85
    newest = Manifest(Path(first), 10, "", {})
    assert _figures(Path(peak), newest)["val_accuracy"] == 0.85


def test_without_a_successful_trial_the_step_fails(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="0 run_dirs, 0 checkpoints and 0 failures"):
        ranked(tmp_path, [])
    with pytest.raises(SystemExit, match="all 2 trials failed; the first: no room"):
        ranked(tmp_path, [("/gone/1", "", "no room"), ("/gone/2", "", "no card")])
    assert "no card" in (tmp_path / "table").read_text()

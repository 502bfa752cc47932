"""Output of a local run: lines of its steps, the summary and paths."""

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.local import results, runs, screen
from kfp_ddp.local.screen import CLEAR_LINE, Phase, bar
from tests import run_output


def write(output: Path, step: str, /, **values: Any) -> None:
    """Write the output of a step."""
    folder = output / "artifacts" / "run" / step
    folder.mkdir(parents=True)
    artifact = {"metadata": values}
    document = {"artifacts": {"what": {"artifacts": [artifact]}}}
    (folder / "executor_output.json").write_text(json.dumps(document))


def test_report_of_the_gate_is_copied_to_the_top(tmp_path: Path) -> None:
    assert runs.report(tmp_path) == {}
    made = tmp_path / "artifacts" / "run" / "gate" / "gate_report"
    made.parent.mkdir(parents=True)
    made.write_text("<html>")
    assert runs.report(tmp_path) == {"report": str(tmp_path / "report.html")}
    assert (tmp_path / "report.html").read_text() == "<html>"


def test_line_of_a_step_in_any_pipeline(tmp_path: Path) -> None:
    write(tmp_path, "preflight", what="resnet18 at 64 px", gpus=0)
    write(tmp_path, "changes", changed=True, reason="nothing new")
    write(tmp_path, "leaderboard", trials=3)
    write(tmp_path, "train", loss=0.5)
    write(tmp_path, "export", formats="model.pt2, model.safetensors")
    assert runs.describe_step(tmp_path, "preflight") == "resnet18 at 64 px"
    assert runs.describe_step(tmp_path, "changes") == "nothing new"
    assert runs.describe_step(tmp_path, "leaderboard") == "trials 3"
    assert runs.describe_step(tmp_path, "train") == "loss 0.5"
    assert runs.describe_step(tmp_path, "export") == "safetensors and .pt2 match the checkpoint"


def test_line_of_a_step_in_a_loop_is_of_the_newest_iteration(tmp_path: Path) -> None:
    assert runs.describe_step(tmp_path, "train") == ""
    for iteration, step in enumerate((18, 24)):
        write(tmp_path, f"for-loop-1-iteration-{iteration}/train", step=step)
        written = tmp_path / f"artifacts/run/for-loop-1-iteration-{iteration}/train"
        os.utime(written / "executor_output.json", (9 - iteration, 9 - iteration))
    assert runs.describe_step(tmp_path, "train") == "18 steps"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_line_neither_wraps_nor_cuts_words(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream, words = Terminal(), [f"word{number}" for number in range(40)]
    with Phase("dataset-volume", stream) as phase:
        phase.show(" ".join(words))
    drawn = stream.getvalue().replace("\n", CLEAR_LINE).split(CLEAR_LINE)
    assert max(len(line) for line in drawn) < columns
    assert {word for line in drawn for word in line.split() if word[:4] == "word"} == {*words}


def test_time_left_stays_in_a_narrow_terminal(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run", failed="train")
    for width, parts in ((22, ["step", "ETA"]), (49, ["step", "val", "ETA"]), (66, ["██", "loss"])):
        line = results.Progress(run).line(width)
        assert len(line) <= width
        assert all(part in line for part in (*parts, "ETA")), line


def test_log_has_a_line_a_minute_and_one_per_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    with Phase("train", stream) as phase:
        phase.show("step 1")
        monkeypatch.setattr(screen, "LOG_SECONDS", 0.0)
        phase.show("step 2")
    lines = stream.getvalue().splitlines()
    assert [line.split()[:4] for line in lines] == [[m, "train", "step", "2"] for m in "…✓"]
    with pytest.raises(ValueError, match="no"), Phase("gate", stream):
        raise ValueError("no")
    assert "\n  ✗ gate" in stream.getvalue()


def test_bar_is_full_only_at_the_end() -> None:
    assert bar(0, 10, width=10) == "░" * 10
    assert bar(9, 10, width=10) == "█" * 9 + "░"
    assert bar(10, 10, width=10) == bar(11, 10, width=10) == "█" * 10
    assert bar(0, 0, width=10) == "░" * 10

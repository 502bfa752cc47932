"""What a run on this machine says of its steps, from what these wrote."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.local import results, runs


def wrote(output: Path, step: str, /, **found: Any) -> None:
    folder = output / "artifacts" / "run" / step
    folder.mkdir(parents=True)
    artifact = {"metadata": found}
    document = {"artifacts": {"what": {"artifacts": [artifact]}}}
    (folder / "executor_output.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("formats", "said"),
    [
        ("model.onnx, model.pt2, model.safetensors", "safetensors, ONNX and .pt2 agree"),
        ("model.pt2, model.safetensors", "safetensors and .pt2 agree"),
    ],
)
def test_only_formats_that_were_written_agree_with_the_checkpoint(
    formats: str, said: str, tmp_path: Path
) -> None:
    wrote(tmp_path, "export", formats=formats)
    assert results.detail(tmp_path, "export") == f"{said} with the checkpoint"


def test_a_script_that_tells_no_speed_has_none(tmp_path: Path) -> None:
    wrote(tmp_path, "train", step=18.0)
    assert results.detail(tmp_path, "train") == "18 steps"
    summary = {
        **dict.fromkeys(("bundle", "report", "loss_curve"), "x"),
        **dict.fromkeys(("accuracy", "images_per_second", "files", "files_copied"), 0),
        "ranks": 2,
        "blessed": True,
        "uploaded_to": "s3://models/flowers/1",
    }
    lines = results.summary_lines(summary)
    assert not [line for line in lines if "images/s" in line]
    assert "  uploaded    s3://models/flowers/1" in lines


def test_the_report_of_any_pipeline_stands_at_the_top_where_its_gate_made_one(
    tmp_path: Path,
) -> None:
    assert runs.report(tmp_path) == {}
    made = tmp_path / "artifacts" / "run" / "gate" / "gate_report"
    made.parent.mkdir(parents=True)
    made.write_text("<html>")
    assert runs.report(tmp_path) == {"report": str(tmp_path / "report.html")}
    assert (tmp_path / "report.html").read_text() == "<html>"


def test_steps_of_ours_say_in_any_pipeline_what_they_say_in_train_resnet(tmp_path: Path) -> None:
    wrote(tmp_path, "preflight", what="resnet18 at 64 px", gpus=0)
    wrote(tmp_path, "changes", changed=True, reason="nothing new")
    wrote(tmp_path, "leaderboard", trials=3)
    wrote(tmp_path, "train", loss=0.5)
    assert runs.describe_step(tmp_path, "preflight") == "resnet18 at 64 px"
    assert runs.describe_step(tmp_path, "changes") == "nothing new"
    assert runs.describe_step(tmp_path, "leaderboard") == "trials 3"
    assert runs.describe_step(tmp_path, "train") == "loss 0.5"


def test_a_step_of_a_loop_says_what_its_newest_iteration_wrote(tmp_path: Path) -> None:
    assert runs.describe_step(tmp_path, "train") == ""
    for iteration, step in enumerate((18, 24)):
        wrote(tmp_path, f"for-loop-1-iteration-{iteration}/train", step=step)
        written = tmp_path / f"artifacts/run/for-loop-1-iteration-{iteration}/train"
        os.utime(written / "executor_output.json", (9 - iteration, 9 - iteration))
    assert runs.describe_step(tmp_path, "train") == "18 steps"

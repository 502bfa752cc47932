"""The step that tells whether there is something new to train."""

from pathlib import Path
from typing import Any

import pytest
from kfp import dsl

from kfp_ddp.components.changes.component import changes
from kfp_ddp.components.gate.component import gate
from kfp_ddp.models import attempts
from kfp_ddp.storage.kinds import open_store
from tests.run_output import evaluation


def asked(tmp_path: Path, **given: Any) -> tuple[bool, str, dsl.Markdown]:
    summary = dsl.Markdown(name="change_summary", uri=str(tmp_path / "summary.md"))
    inputs = {"digest": "d" * 64, "destination": str(tmp_path), "model_name": "cats"}
    changed, attempt = changes.python_func(change_summary=summary, **{**inputs, **given})
    return changed, attempt, summary


def test_what_was_tried_is_not_new_and_the_step_says_what_came_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed, attempt, summary = asked(tmp_path, training={"epochs": 3}, job={"nodes": 1})
    assert (changed, summary.metadata["changed"]) == (True, True)
    where = open_store(f"{tmp_path}/cats")
    attempts.note(where, attempt, version="", champion="", reason="not blessed: too weak")

    again, same, summary = asked(tmp_path, training={"epochs": 3}, job={"nodes": 2})
    assert (again, same) == (False, attempt)
    reason = "nothing new: dataset dddddddddddd was trained on with the same settings: not blessed"
    assert summary.metadata["reason"].startswith(reason)
    assert reason in capsys.readouterr().out
    assert "seed" in Path(summary.path).read_text()

    assert asked(tmp_path, training={"epochs": 3}, job={"image": "mine:2"})[0]
    assert asked(tmp_path, training={"epochs": 4})[0]
    assert asked(tmp_path, training={"epochs": 3}, gate={"min_accuracy": 0.5})[0]


@pytest.mark.parametrize("least", [0.4, 0.6])
def test_the_gate_notes_what_it_does_not_bless_and_leaves_the_rest_to_the_export(
    least: float, tmp_path: Path
) -> None:
    _, attempt, _ = asked(tmp_path)
    record = tmp_path / "run" / "evaluation.json"
    record.parent.mkdir()
    record.write_text(evaluation(50).model_dump_json())
    blessed, _ = gate.python_func(
        accuracy=0.5,
        evaluation=str(record),
        rules={"min_accuracy": least},
        champion=str(tmp_path / "cats"),
        attempt=attempt,
        gate_verdict=dsl.Markdown(name="gate_verdict", uri=str(tmp_path / "verdict.md")),
        gate_report=dsl.HTML(name="gate_report", uri=str(tmp_path / "report.html")),
    )
    again, _, summary = asked(tmp_path)
    assert again is blessed is (least < 0.5)
    assert ("accuracy 0.5000 < 0.6" in summary.metadata["reason"]) is not blessed


@pytest.mark.parametrize(
    ("given", "line"),
    [({"destination": ""}, "destination is empty"), ({"model_name": "a/b"}, "model_name")],
)
def test_what_cannot_be_used_is_one_line(given: dict[str, str], line: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"^error: {line}"):
        asked(tmp_path, **given)

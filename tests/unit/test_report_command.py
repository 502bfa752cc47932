"""The command `report`."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from kfp_ddp.cli import app
from kfp_ddp.core.errors import InputError, StorageError
from tests import run_output


def report(*words: str) -> str:
    result = CliRunner().invoke(app, ["report", *words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output.strip()


def test_the_report_of_a_local_run_is_written_with_its_verdict(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run")
    beside = run / "work" / run_output.RUN_ID / "train" / "evaluation"
    (beside / "verdict.json").write_text(json.dumps({"blessed": False, "reason": "too <low>"}))
    formats = {"model.onnx": {"max_abs_difference": 2e-6, "same_top1": 1.0}}
    (beside.parent / "bundle" / "parity.json").write_text(json.dumps({"formats": formats}))
    assert report(str(run)) == str(beside / "report.html")
    made = (beside / "report.html").read_text()
    assert "<b>Not blessed</b><p>too &lt;low&gt;</p>" in made
    assert "Loss by epoch" in made
    assert "<td>model.onnx</td><td>2e-06</td>" in made
    for folder in (beside, beside.parent):
        assert report(str(folder), "-o", str(tmp_path / "out.html")) == str(tmp_path / "out.html")
        assert (tmp_path / "out.html").read_text() == made


def test_the_newest_evaluation_is_chosen(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run", correct=90)
    run_output.task(run / "work" / run_output.RUN_ID / "again", ("evaluate",), 70, {})
    old, new = (
        run / "work" / run_output.RUN_ID / name / "evaluation" / "evaluation.json"
        for name in ("train", "again")
    )
    os.utime(old, (1, 1))
    assert report(str(run)) == str(new.with_name("report.html"))


def test_a_missing_evaluation_or_folder_is_an_error(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run", failed="evaluate")
    for words in ([str(run)], [str(tmp_path / "none")], [str(run), "--split", "test"]):
        with pytest.raises(InputError, match=r"contains no evaluation of (val|test): name"):
            report(*words)
    run = run_output.make(tmp_path / "complete")
    with pytest.raises(StorageError, match=r"none/out\.html cannot be written: No such file"):
        report(str(run), "-o", str(tmp_path / "none" / "out.html"))


def test_an_evaluation_of_an_earlier_version_still_has_a_report(tmp_path: Path) -> None:
    run_output.task(tmp_path / "run", ("evaluate",), 90, {"model": "resnet18"})
    beside = tmp_path / "run" / "evaluation"
    record = json.loads((beside / "evaluation.json").read_text())
    later = ("intervals", "baseline", "compared", "slices", "hardware", "world_size", "written")
    (beside / "evaluation.json").write_text(
        json.dumps({name: value for name, value in record.items() if name not in later})
    )
    report(str(tmp_path / "run"))
    assert "90.00%" in (beside / "report.html").read_text()

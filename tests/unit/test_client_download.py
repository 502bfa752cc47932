"""`kfp-ddp download`, from folders of runs."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from kfp_ddp.cli import app
from kfp_ddp.client.download import download
from kfp_ddp.client.run_files import StoredFiles
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.models import bundle
from kfp_ddp.storage.store import sha256
from tests import run_output

TRAIN = f"work/{run_output.RUN_ID}/train"


def test_a_run_is_downloaded_with_bundle_and_reports(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run")
    output = tmp_path / "deep" / "here"
    answer = CliRunner().invoke(app, ["download", str(run), "--output", str(output), "--json"])
    assert answer.exit_code == 0, answer.output
    (task,) = json.loads(answer.stdout)["tasks"]
    assert task["bundle"] == str(output / "bundle")
    assert bundle.digest(output / "bundle") == bundle.digest(run / TRAIN / "bundle") != ""
    assert (output / "evaluation/report.html").read_text() == "<p>report</p>"
    assert "<svg" in (output / "loss_curve.html").read_text()
    assert sha256(output / "metrics.jsonl") == sha256(run / TRAIN / "metrics.jsonl")
    assert task["checkpoint"] is None
    assert not (output / "checkpoints").exists()


def test_the_newest_checkpoint_is_downloaded_on_request(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run")
    checkpoints = run / TRAIN / "checkpoints"
    for name in ("step-99999999", "step-100000000"):
        shutil.copytree(checkpoints / "step-00000040", checkpoints / name)
    download(StoredFiles(str(run / "work" / run_output.RUN_ID)), tmp_path / "x", checkpoint=True)
    names = [path.name for path in (tmp_path / "x" / "checkpoints").iterdir()]
    assert names == ["step-100000000"]
    assert (tmp_path / "x/checkpoints/step-100000000/state.pt").read_bytes() == b"state 40"


def test_each_task_has_a_folder(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run")
    shutil.copytree(run / TRAIN, run / f"{TRAIN}.2")
    answer = CliRunner().invoke(app, ["download", str(run), "-o", str(tmp_path / "to")])
    assert answer.exit_code == 0, answer.output
    assert (tmp_path / "to/train/bundle/_SUCCESS").exists()
    assert (tmp_path / "to/train.2/bundle/_SUCCESS").exists()


def test_a_damaged_bundle_leaves_no_files(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run")
    (run / TRAIN / "bundle" / "model.onnx").write_bytes(b"damaged")
    answer = CliRunner().invoke(app, ["download", str(run), "-o", str(tmp_path / "to" / "it")])
    assert isinstance(answer.exception, StorageError)
    assert "is damaged" in str(answer.exception)
    assert list((tmp_path / "to").iterdir()) == []


def test_a_run_without_a_bundle_is_downloaded(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run", failed="evaluate")
    answer = CliRunner().invoke(app, ["download", str(run), "-o", str(tmp_path / "to")])
    assert answer.exit_code == 0, answer.output
    assert "no bundle: the run exported none" in answer.stdout
    assert "predict" not in answer.stdout


@pytest.mark.parametrize(
    ("word", "output", "line"),
    [("run", "taken", "already exists"), ("early", "to", "there are no results")],
)
def test_invalid_input_writes_nothing(tmp_path: Path, word: str, output: str, line: str) -> None:
    run_output.make(tmp_path / "run")
    run_output.make(tmp_path / "early", failed="preflight")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    answer = CliRunner().invoke(
        app, ["download", str(tmp_path / word), "-o", str(tmp_path / output)]
    )
    assert isinstance(answer.exception, InputError)
    assert line in str(answer.exception)
    assert sorted(tmp_path.rglob("*")) == before

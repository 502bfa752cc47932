"""The commands compare and download, on folders of runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kfp_ddp.cli import app
from kfp_ddp.client.comparison import setting_text
from kfp_ddp.client.download import download
from kfp_ddp.client.run_files import StoredFiles
from kfp_ddp.core import packed
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.models import bundle
from kfp_ddp.storage.store import sha256
from tests import run_output


def compared(*words: Any) -> Any:
    """Return the document of a comparison."""
    return json.loads(run_output.command("compare", *words, "--json"))


def test_only_settings_that_differ_are_compared(tmp_path: Path) -> None:
    one = run_output.make(tmp_path / "one", learning_rate=0.1, epochs=2, mixup=0.0, cutmix=0.5)
    two = run_output.make(tmp_path / "two", learning_rate=0.2, epochs=2, ema_decay=0.9)
    document = compared(one, two)
    assert document["settings"] == {
        "learning_rate": [0.1, 0.2],
        "ema_decay": [0.0, 0.9],  # an old run had the default
        "cutmix": [0.5, 0.0],
    }
    assert [run["letter"] for run in document["runs"]] == ["A", "B"]
    assert setting_text(packed.pack(b"pass")) == "a file of 4 bytes, sha256 d74ff0ee8da3"


def test_accuracies_have_intervals_and_notes(tmp_path: Path) -> None:
    sides = [run_output.make(tmp_path / str(n), correct=n) for n in (90, 93, 60)]
    document = compared(*sides)
    first = document["metrics"]["accuracy"][0]
    assert first["value"] == 0.9
    assert 0.82 < first["low"] < 0.9 < first["high"] < 0.95
    assert document["notes"] == ["A and B: the intervals of their accuracies overlap"]
    other = run_output.evaluation(90, samples_digest="other").model_dump_json()
    (sides[1] / f"work/{run_output.RUN_ID}/train/evaluation/evaluation.json").write_text(other)
    assert compared(*sides[:2])["notes"] == [
        "A and B are evaluated on other samples: their metrics cannot be compared"
    ]


def test_the_time_between_two_starts_is_not_training_time(tmp_path: Path) -> None:
    folder = run_output.make(tmp_path / "one")
    metrics = folder / "work" / run_output.RUN_ID / "train" / "metrics.jsonl"
    again = [{"event": "start", "time": 9000.0}, {"event": "end", "time": 9005.0}]
    metrics.write_text(metrics.read_text() + "".join(json.dumps(e) + "\n" for e in again))
    document = compared(folder)["metrics"]
    assert document["training_seconds"][0]["value"] == 25
    assert document["images_per_s"][0]["value"] == 100


def test_runs_without_a_training_or_an_evaluation_are_compared(tmp_path: Path) -> None:
    one = run_output.make(tmp_path / "one", correct=90)
    two = run_output.make(tmp_path / "two", failed="evaluate")
    three = run_output.make(tmp_path / "three", correct=70)
    for name in ("config.json", "metrics.jsonl"):
        (three / "work" / run_output.RUN_ID / "train" / name).unlink()
    document = compared(one, two, three)
    accuracy = [figure and figure["value"] for figure in document["metrics"]["accuracy"]]
    assert accuracy == [0.9, None, 0.7]
    assert document["metrics"]["ranks"][2] is None
    assert "B: not evaluated" in document["notes"]
    assert [run["state"] for run in document["runs"]] == ["SUCCEEDED", "FAILED", "SUCCEEDED"]


def test_each_training_of_a_run_has_a_column(tmp_path: Path) -> None:
    one = run_output.make(tmp_path / "one", epochs=2)
    run_output.task(one / "work" / run_output.RUN_ID / "train.2", (), 50, {"epochs": 3})
    document = compared(one)
    assert [run["name"] for run in document["runs"]] == ["one/train", "one/train.2"]
    assert document["settings"]["epochs"] == [2, 3]


def test_a_page_has_the_curves_of_all_runs(tmp_path: Path) -> None:
    sides = [run_output.make(tmp_path / f"<{n}>", correct=n) for n in (80, 90)]
    page = tmp_path / "page.html"
    table = run_output.command("compare", *sides, "--html", page)
    (row,) = [line for line in table.splitlines() if line.startswith("accuracy")]
    assert row.endswith(" 90.0% (82.6% to 94.5%)")
    assert "80.0% (71.1% to 86.7%)" in row
    text = page.read_text()
    assert "Validation accuracy by epoch; last values: A 80.00%, B 90.00%" in text
    assert "&lt;80&gt;" in text
    assert "<80>" not in text


def test_invalid_input_is_an_error_of_one_line(tmp_path: Path) -> None:
    early = run_output.make(tmp_path / "early", failed="data-sync")
    (tmp_path / "empty").mkdir()
    messages = {
        (str(early),): "early has no training to compare: see kfp-ddp describe",
        (str(tmp_path / "empty"),): "contains no run: ",
        (str(tmp_path / "gone"),): "not found: give one of run --local",
        (str(run_output.make(tmp_path / "one")), "--html", "no/page"): "No such file or directory",
    }
    for words, message in messages.items():
        assert message in str(CliRunner().invoke(app, ["compare", *words]).exception)


@pytest.mark.parametrize(
    "torn", ["[" * 200_000 + "\n", '{"event": "st', "[1]\n", '{"event": "step", "step": 3}\n']
)
def test_invalid_events_are_ignored(tmp_path: Path, torn: str) -> None:
    one = run_output.make(tmp_path / "one")
    metrics = one / "work" / run_output.RUN_ID / "train" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + torn)
    assert compared(one)["metrics"]["step"][0]["value"] == 40


TRAIN = f"work/{run_output.RUN_ID}/train"


def test_a_run_is_downloaded_with_bundle_and_reports(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run")
    output = tmp_path / "deep" / "here"
    (task,) = json.loads(run_output.command("download", run, "-o", output, "--json"))["tasks"]
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
    run_output.command("download", run, "-o", tmp_path / "to")
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
    text = run_output.command("download", run, "-o", tmp_path / "to")
    assert "no bundle: the run exported none" in text
    assert "predict" not in text


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

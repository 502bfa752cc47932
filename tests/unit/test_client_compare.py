"""`kfp-ddp compare`, on folders of runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kfp_ddp.cli import app
from kfp_ddp.client.comparison import setting_text
from kfp_ddp.core import packed
from tests import run_output


def compared(*words: Any) -> Any:
    """The document of a comparison."""
    answer = CliRunner().invoke(app, ["compare", *map(str, words), "--json"])
    assert answer.exit_code == 0, answer.output
    return json.loads(answer.stdout)


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
    sides = [str(run_output.make(tmp_path / f"<{n}>", correct=n)) for n in (80, 90)]
    page = tmp_path / "page.html"
    answer = CliRunner().invoke(app, ["compare", *sides, "--html", str(page)])
    assert answer.exit_code == 0, answer.output
    (row,) = [line for line in answer.stdout.splitlines() if line.startswith("accuracy")]
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

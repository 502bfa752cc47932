"""`kfp-ddp compare`, on folders of runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kfp_ddp.cli import app
from kfp_ddp.client.comparison import setting_text
from kfp_ddp.core import packed
from kfp_ddp.core.errors import InputError
from tests import run_output


def compared(*words: Any) -> Any:
    """The document of a comparison."""
    answer = CliRunner().invoke(app, ["compare", *map(str, words), "--json"])
    assert answer.exit_code == 0, answer.output
    return json.loads(answer.stdout)


def test_settings_that_differ_stand_side_by_side_and_others_not_at_all(tmp_path: Path) -> None:
    one = run_output.make(tmp_path / "one", learning_rate=0.1, epochs=2)
    two = run_output.make(tmp_path / "two", learning_rate=0.2, epochs=2, ema_decay=0.9)
    found = compared(one, two)
    assert found["settings"] == {"learning_rate": [0.1, 0.2], "ema_decay": [0.0, 0.9]}
    assert [run["letter"] for run in found["runs"]] == ["A", "B"]


def test_a_file_of_code_is_told_by_size_and_digest() -> None:
    assert setting_text(packed.pack(b"pass")) == "a file of 4 bytes, sha256 d74ff0ee8da3"


def test_a_setting_that_a_run_is_older_than_was_its_default_there(tmp_path: Path) -> None:
    one = run_output.make(tmp_path / "one")
    two = run_output.make(tmp_path / "two", mixup=0.0, cutmix=0.5)
    assert compared(one, two)["settings"] == {"cutmix": [0.0, 0.5]}


def test_an_accuracy_has_its_interval_and_overlaps_are_told(tmp_path: Path) -> None:
    sides = [run_output.make(tmp_path / str(n), correct=n) for n in (90, 93, 60)]
    found = compared(*sides)
    first = found["metrics"]["accuracy"][0]
    assert first["value"] == 0.9
    assert 0.82 < first["low"] < 0.9 < first["high"] < 0.95
    assert found["notes"] == ["A and B: the intervals of their accuracies overlap"]


def test_a_training_takes_as_long_as_its_events_and_not_the_time_between_two_starts(
    tmp_path: Path,
) -> None:
    folder = run_output.make(tmp_path / "one")
    metrics = folder / "work" / run_output.RUN_ID / "train" / "metrics.jsonl"
    again = [{"event": "start", "time": 9000.0}, {"event": "end", "time": 9005.0}]
    metrics.write_text(metrics.read_text() + "".join(json.dumps(e) + "\n" for e in again))
    found = compared(folder)["metrics"]
    assert found["training_seconds"][0]["value"] == 25
    assert found["images_per_s"][0]["value"] == 100


def test_samples_that_differ_forbid_to_compare(tmp_path: Path) -> None:
    one, two = (run_output.make(tmp_path / name) for name in ("one", "two"))
    other = run_output.evaluation(90, samples_digest="other").model_dump_json()
    (two / f"work/{run_output.RUN_ID}/train/evaluation/evaluation.json").write_text(other)
    assert compared(one, two)["notes"] == [
        "A and B are evaluated on other samples: their metrics cannot be compared"
    ]


def test_a_run_that_was_not_evaluated_is_compared_all_the_same(tmp_path: Path) -> None:
    one = run_output.make(tmp_path / "one")
    two = run_output.make(tmp_path / "two", failed="evaluate")
    found = compared(one, two)
    assert found["metrics"]["accuracy"][1] is None
    assert found["notes"] == ["B: not evaluated"]
    assert [run["state"] for run in found["runs"]] == ["SUCCEEDED", "FAILED"]


def test_each_training_of_a_run_has_a_column(tmp_path: Path) -> None:
    one = run_output.make(tmp_path / "one", epochs=2)
    run_output.task(one / "work" / run_output.RUN_ID / "train.2", (), 50, {"epochs": 3})
    found = compared(one)
    assert [run["name"] for run in found["runs"]] == ["one/train", "one/train.2"]
    assert found["settings"]["epochs"] == [2, 3]


def test_a_page_holds_the_curves_of_all_runs_in_one_pair_of_axes(tmp_path: Path) -> None:
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


def test_what_cannot_be_compared_is_told_in_one_line(tmp_path: Path) -> None:
    early = run_output.make(tmp_path / "early", failed="data-sync")
    (tmp_path / "empty").mkdir()
    said = {
        str(early): "early has no training to compare: see kfp-ddp describe",
        str(tmp_path / "empty"): "contains no run: name the folder of run --local",
        str(tmp_path / "gone"): "not found: give one of run --local",
    }
    for word, line in said.items():
        answer = CliRunner().invoke(app, ["compare", word])
        assert isinstance(answer.exception, InputError)
        assert line in str(answer.exception)


def test_a_page_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    one = run_output.make(tmp_path / "one")
    answer = CliRunner().invoke(app, ["compare", str(one), "--html", str(tmp_path / "no/page")])
    assert "No such file or directory" in str(answer.exception)
    assert isinstance(answer.exception, Exception)


@pytest.mark.parametrize("torn", ['{"event": "st', "[1]\n", '{"event": "step", "step": 3}\n'])
def test_lines_that_are_no_events_are_passed_over(tmp_path: Path, torn: str) -> None:
    one = run_output.make(tmp_path / "one")
    metrics = one / "work" / run_output.RUN_ID / "train" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + torn)
    assert compared(one)["metrics"]["step"][0]["value"] == 40


def test_a_run_that_only_evaluated_is_compared_by_what_it_found(tmp_path: Path) -> None:
    one = run_output.make(tmp_path / "one", correct=90)
    two = run_output.make(tmp_path / "two", correct=70)
    for name in ("config.json", "metrics.jsonl"):
        (two / "work" / run_output.RUN_ID / "train" / name).unlink()
    found = compared(one, two)
    assert [each["value"] for each in found["metrics"]["accuracy"]] == [0.9, 0.7]
    assert found["metrics"]["ranks"][1] is None

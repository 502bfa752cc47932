"""What is measured beside what always is: slices, intervals, the gain on a champion."""

import csv
from collections import Counter
from pathlib import Path

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.evaluation.comparison import mcnemar
from kfp_ddp.evaluation.engine import evaluate
from kfp_ddp.models.evaluation import FILE, PREDICTIONS, Evaluation


def test_slices_intervals_and_the_gain_are_in_the_record(
    trained_checkpoint: Path, trained_dataset: Path, trained_run: Path, tmp_path: Path
) -> None:
    images = sorted((trained_dataset / "val").glob("*/*"))
    light = {path: "day" if at % 3 else "night" for at, path in enumerate(images)}
    rows = [f"val/{path.parent.name}/{path.name},{value}" for path, value in light.items()]
    (tmp_path / "tags.csv").write_text("\n".join(["path,light", *rows]) + "\n")

    options = {"tags": str(tmp_path / "tags.csv"), "resamples": 50}
    first = (trained_checkpoint, trained_run, trained_dataset, "val", 7, 3)
    record = evaluate(*first, options=options).result
    folder = trained_run / "evaluation"
    with (folder / PREDICTIONS).open() as file:
        told = {row["path"]: row["target"] == row["predicted"] for row in csv.DictReader(file)}
    by_name = {f"{path.parent.name}/{path.name}": value for path, value in light.items()}
    there, right = Counter(by_name.values()), Counter(v for p, v in by_name.items() if told[p])
    expected = [("light", value, there[value], right[value]) for value in ("day", "night")]
    assert [(s.name, s.value, s.samples, s.correct) for s in record.slices] == expected
    assert sum(one.samples for one in record.classes) == len(told)
    correct = sum(one.recall * one.samples for one in record.classes)
    assert correct == pytest.approx(record.correct)

    assert record.balanced_accuracy == pytest.approx(record.macro_recall)
    assert set(record.intervals) == {"balanced_accuracy", "macro_f1", "calibration_error"}
    for name, interval in record.intervals.items():
        assert interval.low <= getattr(record, name) <= interval.high
    assert record.baseline is not None
    assert (record.baseline.name, record.baseline.share) == ("red", 17 / 48)
    assert record.macro_roc_auc is not None
    assert record.compared is None

    # As a champion: one that told two more samples right, and one fewer.
    champion = tmp_path / "champion"
    champion.mkdir()
    swapped = {path: not hit for hit in (False, True) for path in _some(told, hit, 1 + (not hit))}
    lines = ["path,target,predicted,confidence,loss"]
    lines += [f"{p},a,{'a' if swapped.get(p, hit) else 'b'},1,0" for p, hit in told.items()]
    (champion / PREDICTIONS).write_text("\n".join(lines) + "\n")
    other = record.model_copy(
        update={"correct": record.correct + 1, "accuracy": (record.correct + 1) / 48}
    )
    (champion / FILE).write_text(other.model_dump_json())
    again = evaluate(*first, champion=str(champion)).result
    assert again.slices == []
    compared = Evaluation.read(folder / FILE).compared
    assert compared is not None
    assert again.compared == compared
    assert (compared.won, compared.lost, compared.p_value) == (1, 2, mcnemar(1, 2))
    assert compared.gain == pytest.approx(-1 / 48)
    assert compared.low is not None
    assert compared.high is not None
    assert compared.low < compared.gain < compared.high
    assert sum(one.won - one.lost for one in compared.classes) == -1


def _some(told: dict[str, bool], hit: bool, count: int) -> list[str]:
    return [path for path, own in sorted(told.items()) if own == hit][:count]


def test_a_table_of_tags_is_refused_before_anything_is_evaluated(
    trained_checkpoint: Path, trained_dataset: Path, trained_run: Path
) -> None:
    given = (trained_checkpoint, trained_run, trained_dataset, "val", 7, 3)
    with pytest.raises(InputError, match=r"tags is none\.csv, but this file is not found"):
        evaluate(*given, options={"tags": "none.csv"})
    assert not (trained_run / "evaluation" / FILE).exists()

"""Optional measurements: slices, bootstrap intervals, and the gain over a champion."""

from collections import Counter
from pathlib import Path

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.evaluation.comparison import mcnemar
from kfp_ddp.models.evaluation import FILE, PREDICTIONS, Evaluation
from tests.evaluations import Trained


def test_slices_intervals_and_gain_are_in_the_record(trained: Trained, tmp_path: Path) -> None:
    images = sorted((trained.dataset / "val").glob("*/*"))
    names = [f"{path.parent.name}/{path.name}" for path in images]
    light = {name: "day" if at % 3 else "night" for at, name in enumerate(names)}
    rows = [f"val/{name},{value}" for name, value in light.items()]
    (tmp_path / "tags.csv").write_text("\n".join(["path,light", *rows]) + "\n")

    options = {"tags": str(tmp_path / "tags.csv"), "resamples": 50}
    record = trained.evaluate(options=options).result
    folder = trained.evaluation.parent
    correct = {path: one.correct for path, one in record.read_predictions(folder).items()}
    samples = Counter(light.values())
    hits = Counter(value for name, value in light.items() if correct[name])
    expected = [("light", value, samples[value], hits[value]) for value in ("day", "night")]
    assert [(s.name, s.value, s.samples, s.correct) for s in record.slices] == expected

    assert record.balanced_accuracy == pytest.approx(record.macro_recall)
    assert set(record.intervals) == {"balanced_accuracy", "macro_f1", "calibration_error"}
    for name, interval in record.intervals.items():
        assert interval.low <= getattr(record, name) <= interval.high
    assert record.baseline is not None
    assert (record.baseline.name, record.baseline.share) == ("red", 17 / 48)
    assert record.macro_roc_auc is not None
    assert record.compared is None

    # A champion with two more correct samples, and one less.
    champion = tmp_path / "champion"
    champion.mkdir()
    better = [path for path, hit in sorted(correct.items()) if not hit][:2]
    worse = [path for path, hit in sorted(correct.items()) if hit][:1]
    swapped = {**correct, **dict.fromkeys(better, True), **dict.fromkeys(worse, False)}
    lines = [f"{path},a,{'a' if hit else 'b'},1,0" for path, hit in swapped.items()]
    header = "path,target,predicted,confidence,loss"
    (champion / PREDICTIONS).write_text("\n".join([header, *lines]) + "\n")
    counts = {"correct": record.correct + 1, "accuracy": (record.correct + 1) / 48}
    (champion / FILE).write_text(record.model_copy(update=counts).model_dump_json())
    again = trained.evaluate(champion=str(champion)).result
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


def test_an_invalid_table_of_tags_fails_before_the_evaluation(trained: Trained) -> None:
    with pytest.raises(InputError, match=r"tags is none\.csv, but this file is not found"):
        trained.evaluate(options={"tags": "none.csv"})
    assert not trained.evaluation.exists()

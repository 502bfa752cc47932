"""Images that training left out are left out of evaluation and export too."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from kfp import dsl

from kfp_ddp.components.evaluate.component import evaluate
from kfp_ddp.components.gate.component import gate
from kfp_ddp.core.errors import InputError
from kfp_ddp.evaluation.engine import evaluate as engine
from kfp_ddp.export.engine import make
from kfp_ddp.models import bundle
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.training import checkpoint as checkpoints

BROKEN = ("red/000.png", "green/003.png")


@pytest.fixture
def skipping(trained_checkpoint: Path, tmp_path: Path) -> Path:
    """The checkpoint of a training under on_bad_image=skip."""
    found = checkpoints.verify(trained_checkpoint)
    config = {**found.manifest["config"], "on_bad_image": "skip"}
    fields = {k: v for k, v in found.manifest.items() if k not in ("files", "step")}
    manifest = {**fields, "config": config}
    return checkpoints.write(tmp_path / "checkpoints", 40, found.state(), manifest)


@pytest.fixture
def damaged(trained_dataset: Path, tmp_path: Path) -> Path:
    """The dataset with two images of val that cannot be read."""
    dataset = tmp_path / "damaged"
    shutil.copytree(trained_dataset, dataset)
    for name in BROKEN:
        (dataset / "val" / name).write_bytes(b"no image")
    return dataset


def test_they_are_left_out_counted_and_said(
    skipping: Path, damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {"evaluation_metrics": dsl.Metrics, "confusion_matrix": dsl.ClassificationMetrics}
    kinds |= {"evaluation_report": dsl.HTML, "evaluation_summary": dsl.Markdown}
    filled: dict[str, Any] = {
        name: kind(name=name, uri=str(tmp_path / name)) for name, kind in kinds.items()
    }
    _, path = evaluate.python_func(
        checkpoint=str(skipping),
        run_dir=str(tmp_path / "run"),
        dataset_path=str(damaged),
        batch_size=7,
        **filled,
    )
    record = Evaluation.read(Path(path))
    assert (record.samples, record.skipped) == (46, 2)
    assert sum(one.samples for one in record.classes) == 46
    assert filled["evaluation_metrics"].metadata["skipped"] == 2
    assert "| images left out | 2 |" in (tmp_path / "evaluation_summary").read_text()
    assert "2 unreadable images are left out" in (tmp_path / "evaluation_report").read_text()
    assert f"on_bad_image=skip; the first: {BROKEN[1]}" in capsys.readouterr().out
    rows = (Path(path).parent / "predictions.csv").read_text().splitlines()[1:]
    assert not {row.split(",")[0] for row in rows} & set(BROKEN)
    assert len(record.read_predictions(Path(path).parent)) == 46


def test_the_others_come_to_what_they_come_to_without_them(
    skipping: Path, damaged: Path, tmp_path: Path
) -> None:
    found, _, _, _ = engine(skipping, tmp_path / "a", damaged, "val", 7, 0)
    for name in BROKEN:
        (damaged / "val" / name).unlink()
    whole, _, _, _ = engine(skipping, tmp_path / "b", damaged, "val", 64, 0)
    assert (found.correct, found.samples_digest) == (whole.correct, whole.samples_digest)


def test_one_that_cannot_be_read_fails_where_training_would_have_failed(
    trained_checkpoint: Path, damaged: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"cannot decode .*003\.png"):
        engine(trained_checkpoint, tmp_path / "run", damaged, "val", 64, 0)


def test_where_none_can_be_read_it_is_one_line(
    skipping: Path, damaged: Path, tmp_path: Path
) -> None:
    for image in damaged.glob("val/*/*"):
        image.write_bytes(b"no image")
    with pytest.raises(InputError, match="none of the 48 images") as caught:
        engine(skipping, tmp_path / "run", damaged, "val", 64, 0)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_champion_that_skipped_others_is_evaluated_on_what_the_challenger_read(
    skipping: Path, trained_checkpoint: Path, trained_dataset: Path, damaged: Path, tmp_path: Path
) -> None:
    engine(trained_checkpoint, tmp_path / "old", trained_dataset, "val", 64, 0)
    evaluation = tmp_path / "old" / "evaluation" / "evaluation.json"
    champion = make(
        trained_checkpoint, tmp_path / "old", trained_dataset / "val", evaluation, "squares"
    )
    mine, _, _, _ = engine(skipping, tmp_path / "run", damaged, "val", 64, 0, str(champion))
    folder = tmp_path / "run" / "evaluation"
    again = Evaluation.read(folder / "champion" / "evaluation.json")
    assert (again.samples, again.skipped, again.correct) == (46, 2, mine.correct)
    verdict = dsl.Markdown(name="verdict", uri=str(tmp_path / "verdict.md"))
    blessed, version = gate.python_func(
        accuracy=mine.accuracy,
        evaluation=str(folder / "evaluation.json"),
        champion=str(champion),
        gate_verdict=verdict,
        gate_report=dsl.HTML(name="report", uri=str(tmp_path / "report.html")),
        rules={"max_p_value": 1 - 1e-9},
    )
    assert version == bundle.version(champion)
    assert not blessed
    assert "(0 samples won, 0 lost)" in verdict.metadata["reason"]
    shutil.rmtree(folder / "champion")
    gate.python_func(
        accuracy=mine.accuracy,
        evaluation=str(folder / "evaluation.json"),
        champion=str(evaluation),
        gate_verdict=verdict,
        gate_report=dsl.HTML(name="report", uri=str(tmp_path / "report.html")),
        rules={},
    )
    assert "evaluated on other samples" in verdict.metadata["reason"]


def test_a_bundle_is_proven_on_images_that_can_be_read(
    skipping: Path, damaged: Path, tmp_path: Path
) -> None:
    kept = sorted(damaged.glob("val/*/*"))[20]
    for image in damaged.glob("val/*/*"):
        if image != kept:
            image.write_bytes(b"no image")
    engine(skipping, tmp_path / "run", damaged, "val", 64, 0)
    evaluation = tmp_path / "run" / "evaluation" / "evaluation.json"
    made = make(skipping, tmp_path / "run", damaged / "val", evaluation, "squares")
    assert json.loads((made / "parity.json").read_text())["samples"] == 1

"""Images that training skipped are skipped by evaluation and export, too."""

import json
import shutil
from pathlib import Path

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.export.engine import make
from kfp_ddp.models import bundle
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.training import checkpoint as checkpoints
from tests import gating
from tests.evaluations import evaluate, run_step

BROKEN = ("red/000.png", "green/003.png")


@pytest.fixture
def skipping(trained_checkpoint: Path, tmp_path: Path) -> Path:
    """The checkpoint of a training with on_bad_image=skip."""
    verified = checkpoints.verify(trained_checkpoint)
    config = {**verified.manifest["config"], "on_bad_image": "skip"}
    fields = {k: v for k, v in verified.manifest.items() if k not in ("files", "step")}
    manifest = {**fields, "config": config}
    return checkpoints.write(tmp_path / "checkpoints", 40, verified.state(), manifest)


@pytest.fixture
def damaged(trained_dataset: Path, tmp_path: Path) -> Path:
    """The dataset with two unreadable images in val."""
    dataset = tmp_path / "damaged"
    shutil.copytree(trained_dataset, dataset)
    for name in BROKEN:
        (dataset / "val" / name).write_bytes(b"no image")
    return dataset


def test_unreadable_images_are_skipped_and_counted(
    skipping: Path,
    trained_checkpoint: Path,
    damaged: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, record, filled = run_step(tmp_path, skipping, tmp_path / "run", damaged, batch_size=7)
    assert (record.samples, record.skipped) == (46, 2)
    assert sum(one.samples for one in record.classes) == 46
    assert filled["evaluation_metrics"].metadata["skipped"] == 2
    assert "| images left out | 2 |" in (tmp_path / "evaluation_summary").read_text()
    assert "2 unreadable images are left out" in (tmp_path / "evaluation_report").read_text()
    assert f"on_bad_image=skip; the first: {BROKEN[1]}" in capsys.readouterr().out
    predictions = record.read_predictions(folder)
    assert len(predictions) == 46
    assert not predictions.keys() & set(BROKEN)
    with pytest.raises(InputError, match=r"cannot decode .*003\.png"):
        evaluate(trained_checkpoint, tmp_path / "run", damaged)

    for name in BROKEN:
        (damaged / "val" / name).unlink()
    without = evaluate(skipping, tmp_path / "b", damaged).result
    assert (record.correct, record.samples_digest) == (without.correct, without.samples_digest)


@pytest.mark.slow
def test_a_champion_is_evaluated_on_the_images_that_the_challenger_could_read(
    skipping: Path, trained_checkpoint: Path, trained_dataset: Path, damaged: Path, tmp_path: Path
) -> None:
    evaluate(trained_checkpoint, tmp_path / "old", trained_dataset)
    before = tmp_path / "old" / "evaluation" / "evaluation.json"
    champion = make(trained_checkpoint, tmp_path / "old", trained_dataset / "val", before, "name")
    result = evaluate(skipping, tmp_path / "run", damaged, champion=str(champion)).result
    path = tmp_path / "run" / "evaluation" / "evaluation.json"
    again = Evaluation.read(path.parent / "champion" / "evaluation.json")
    assert (again.samples, again.skipped, again.correct) == (46, 2, result.correct)
    inputs = {"evaluation": str(path), "max_p_value": 1 - 1e-9}
    blessed, reason = gating.judged(tmp_path, result.accuracy, champion=str(champion), **inputs)
    assert not blessed
    assert "(0 samples won, 0 lost)" in reason
    verdict = json.loads((path.parent / "verdict.json").read_text())
    assert verdict["champion"] == bundle.version(champion)
    shutil.rmtree(path.parent / "champion")
    _, reason = gating.judged(tmp_path, result.accuracy, champion=str(before), **inputs)
    assert "evaluated on other samples" in reason


def test_bundle_needs_one_readable_image(skipping: Path, damaged: Path, tmp_path: Path) -> None:
    readable = sorted(damaged.glob("val/*/*"))[20]
    for image in damaged.glob("val/*/*"):
        if image != readable:
            image.write_bytes(b"no image")
    evaluate(skipping, tmp_path / "run", damaged)
    evaluation = tmp_path / "run" / "evaluation" / "evaluation.json"
    made = make(skipping, tmp_path / "run", damaged / "val", evaluation, "squares")
    assert json.loads((made / "parity.json").read_text())["samples"] == 1

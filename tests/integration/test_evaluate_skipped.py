"""Images that training skipped are skipped by evaluation and export, too."""

import json
import shutil
from pathlib import Path

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.models import bundle
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.training import checkpoint as checkpoints
from tests import gating
from tests.evaluations import Trained, run_step

BROKEN = ("red/000.png", "green/003.png")


@pytest.fixture
def skipping(trained: Trained, tmp_path: Path) -> Trained:
    """A training with on_bad_image=skip, and two unreadable images in val."""
    dataset = Path(shutil.copytree(trained.dataset, tmp_path / "damaged"))
    for name in BROKEN:
        (dataset / "val" / name).write_bytes(b"no image")
    known = checkpoints.verify(trained.checkpoint).manifest["config"]
    config = {**known, "on_bad_image": "skip"}
    return trained.rewritten(tmp_path / "checkpoints", config=config)._replace(dataset=dataset)


def test_unreadable_images_are_skipped_and_counted(
    skipping: Trained, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, record, filled = run_step(tmp_path, *skipping, batch_size=7)
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
        trained._replace(dataset=skipping.dataset).evaluate()

    for name in BROKEN:
        (skipping.dataset / "val" / name).unlink()
    without = skipping.evaluate().result
    assert (record.correct, record.samples_digest) == (without.correct, without.samples_digest)


@pytest.mark.slow
def test_a_champion_is_evaluated_on_the_images_that_the_challenger_could_read(
    skipping: Trained, trained: Trained, tmp_path: Path
) -> None:
    old = trained._replace(run_dir=tmp_path / "old")
    old.evaluate()
    champion = old.export()
    result = skipping.evaluate(champion=str(champion)).result
    path = skipping.evaluation
    again = Evaluation.read(path.parent / "champion" / "evaluation.json")
    assert (again.samples, again.skipped, again.correct) == (46, 2, result.correct)
    inputs = {"evaluation": str(path), "max_p_value": 1 - 1e-9}
    blessed, reason = gating.judged(tmp_path, result.accuracy, champion=str(champion), **inputs)
    assert not blessed
    assert "(0 samples won, 0 lost)" in reason
    verdict = json.loads((path.parent / "verdict.json").read_text())
    assert verdict["champion"] == bundle.version(champion)
    shutil.rmtree(path.parent / "champion")
    record = str(old.evaluation)
    _, reason = gating.judged(tmp_path, result.accuracy, champion=record, **inputs)
    assert "evaluated on other samples" in reason


def test_bundle_needs_one_readable_image(skipping: Trained) -> None:
    readable = sorted(skipping.dataset.glob("val/*/*"))[20]
    for image in skipping.dataset.glob("val/*/*"):
        if image != readable:
            image.write_bytes(b"no image")
    skipping.evaluate()
    assert json.loads((skipping.export() / "parity.json").read_text())["samples"] == 1

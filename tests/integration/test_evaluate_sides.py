"""Evaluation of the splits that the training had: val by name, and test beside val."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.evaluation.engine import log_metrics
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.report.summary import markdown
from kfp_ddp.training import checkpoint
from kfp_ddp.training.splits import splits_of
from tests.evaluations import Trained


def test_val_is_as_trained(trained: Trained, tmp_path: Path) -> None:
    """The images lie in class folders, without splits."""
    data = tmp_path / "data"
    for path in trained.dataset.glob("*/*/*.png"):
        name = data / path.parent.name / f"{path.parents[1].name}-{path.name}"
        name.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, name)
    known = checkpoint.verify(trained.checkpoint).manifest["config"]
    config = {**known, "data": str(data), "val_fraction": 0.3}
    split = trained.rewritten(tmp_path / "checkpoints", config=config)._replace(dataset=data)
    record = split.evaluate().result
    expected = {str(Path(p).relative_to(data)) for p in splits_of(data, 0.3).val.paths}
    assert record.read_predictions(split.evaluation.parent).keys() == expected
    assert (record.samples, record.split) == (len(expected), "val")


def test_the_test_split_is_evaluated_with_val(trained: Trained, tmp_path: Path) -> None:
    data = Path(shutil.copytree(trained.dataset, tmp_path / "data"))
    trained = trained._replace(dataset=data)
    test = trained.run_dir / "evaluation-test"
    without = trained.evaluate()
    assert without.test is None
    assert "Test split" not in without.document
    assert not test.exists()
    with pytest.raises(InputError, match="has no folder test/"):
        trained.evaluate(split="test")

    shutil.copytree(data / "val" / "red", data / "test" / "red")
    both = trained.evaluate()
    assert both.test is not None
    assert (both.result.samples, both.test.samples) == (48, 17)
    assert Evaluation.read(test / "evaluation.json") == both.test
    assert (test / "predictions.csv").is_file()
    assert f"{both.test.correct} of 17 samples" in both.document
    assert "## Test split" in markdown(both.result, both.test)
    logged: dict[str, float] = {}
    log_metrics(both.test, SimpleNamespace(log_metric=logged.__setitem__), "test_")
    assert logged["test_accuracy"] == pytest.approx(both.test.accuracy, abs=1e-6)
    only = trained.evaluate(split="test")
    assert only.test is None
    assert only.result.samples_digest == both.test.samples_digest

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
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.splits import splits_of
from tests.evaluations import evaluate


def test_val_is_as_trained(trained_checkpoint: Path, trained_dataset: Path, tmp_path: Path) -> None:
    """The images lie in class folders, without splits."""
    data, run_dir = tmp_path / "data", tmp_path / "run"
    for path in trained_dataset.glob("*/*/*.png"):
        name = data / path.parent.name / f"{path.parents[1].name}-{path.name}"
        name.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, name)
    verified = checkpoint.verify(trained_checkpoint)
    config = TrainConfig(
        data=str(data),
        output_dir=str(run_dir),
        model="cifar_resnet8",
        image_size=16,
        epochs=6,
        val_fraction=0.3,
    )
    excluded = ("files", "step", "config")
    fields = {k: v for k, v in verified.manifest.items() if k not in excluded}
    own = checkpoint.manifest_of(config, tuple(fields["classes"]), epoch=6, world_size=1)
    state, manifest = verified.state(), {**fields, **own}
    trained = checkpoint.write(run_dir / "checkpoints", 40, state, manifest)
    record = evaluate(trained, run_dir, data).result
    expected = {str(Path(p).relative_to(data)) for p in splits_of(data, 0.3).val.paths}
    assert record.read_predictions(run_dir / "evaluation").keys() == expected
    assert (record.samples, record.split) == (len(expected), "val")


def test_the_test_split_is_evaluated_with_val(
    trained_checkpoint: Path, trained_dataset: Path, trained_run: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(trained_dataset, data)
    without = evaluate(trained_checkpoint, trained_run, data)
    assert without.test is None
    assert "Test split" not in without.document
    assert not (trained_run / "evaluation-test").exists()
    with pytest.raises(InputError, match="has no folder test/"):
        evaluate(trained_checkpoint, trained_run, data, split="test")

    shutil.copytree(data / "val" / "red", data / "test" / "red")
    both = evaluate(trained_checkpoint, trained_run, data)
    assert both.test is not None
    assert (both.result.samples, both.test.samples) == (48, 17)
    assert Evaluation.read(trained_run / "evaluation-test" / "evaluation.json") == both.test
    assert (trained_run / "evaluation-test" / "predictions.csv").is_file()
    assert f"{both.test.correct} of 17 samples" in both.document
    assert "## Test split" in markdown(both.result, both.test)
    logged: dict[str, float] = {}
    log_metrics(both.test, SimpleNamespace(log_metric=logged.__setitem__), "test_")
    assert logged["test_accuracy"] == pytest.approx(both.test.accuracy, abs=1e-6)
    only = evaluate(trained_checkpoint, trained_run, data, split="test")
    assert only.test is None
    assert only.result.samples_digest == both.test.samples_digest

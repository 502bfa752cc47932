"""Evaluation on the sides that the training had: val by name, and test at the end."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.evaluation.engine import evaluate, log_metrics
from kfp_ddp.evaluation.results import split_digest
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.report.summary import markdown
from kfp_ddp.training import checkpoint
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.splits import splits_of


def unsplit(trained_dataset: Path, folder: Path) -> Path:
    """The images in class folders alone."""
    for path in trained_dataset.glob("*/*/*.png"):
        name = folder / path.parent.name / f"{path.parents[1].name}-{path.name}"
        name.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, name)
    return folder


def trained_by_name(trained_checkpoint: Path, dataset: Path, folder: Path) -> Path:
    """The checkpoint as if it was trained on 0.3 of them for validation."""
    found = checkpoint.verify(trained_checkpoint)
    config = TrainConfig(
        data=str(dataset),
        output_dir=str(folder),
        model="cifar_resnet8",
        image_size=16,
        epochs=6,
        val_fraction=0.3,
    )
    keep = {k: v for k, v in found.manifest.items() if k not in ("files", "step", "config")}
    again = checkpoint.manifest_of(config, tuple(keep["classes"]), epoch=6, world_size=1)
    return checkpoint.write(folder / "checkpoints", 40, found.state(), {**keep, **again})


def test_what_was_held_back_by_name_is_what_is_evaluated(
    trained_checkpoint: Path, trained_dataset: Path, tmp_path: Path
) -> None:
    data = unsplit(trained_dataset, tmp_path / "data")
    trained = trained_by_name(trained_checkpoint, data, tmp_path / "run")
    found = evaluate(trained, tmp_path / "run", data, "val", 64, 4).result
    held_back = {str(Path(p).relative_to(data)) for p in splits_of(data, 0.3).val.paths}
    lines = (tmp_path / "run" / "evaluation" / "predictions.csv").read_text().splitlines()
    assert {line.partition(",")[0] for line in lines[1:]} == held_back
    assert found.samples == len(held_back)
    assert found.split == "val"


def test_the_test_split_is_evaluated_once_beside_val(
    trained_checkpoint: Path, trained_dataset: Path, trained_run: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(trained_dataset, data)
    shutil.copytree(data / "val" / "red", data / "test" / "red")
    found = evaluate(trained_checkpoint, trained_run, data, "val", 64, 4)
    assert found.test is not None
    assert (found.result.samples, found.test.samples) == (48, 17)
    assert Evaluation.read(trained_run / "evaluation-test" / "evaluation.json") == found.test
    assert (trained_run / "evaluation-test" / "predictions.csv").is_file()
    assert f"{found.test.correct} of 17 samples" in found.document
    assert "## Test split" in markdown(found.result, found.test)
    logged: dict[str, float] = {}
    log_metrics(found.test, SimpleNamespace(log_metric=logged.__setitem__), "test_")
    assert logged["test_accuracy"] == pytest.approx(found.test.accuracy, abs=1e-6)
    alone = evaluate(trained_checkpoint, trained_run, data, "test", 64, 4)
    assert alone.test is None
    assert alone.result.samples_digest == found.test.samples_digest


def test_no_test_split_is_no_fault(
    trained_checkpoint: Path, trained_dataset: Path, trained_run: Path
) -> None:
    found = evaluate(trained_checkpoint, trained_run, trained_dataset, "val", 64, 4)
    assert found.test is None
    assert "Test split" not in found.document
    assert not (trained_run / "evaluation-test").exists()
    with pytest.raises(InputError, match="has no folder test/"):
        evaluate(trained_checkpoint, trained_run, trained_dataset, "test", 64, 4)


def test_a_digest_knows_samples_of_the_whole_dataset_by_their_full_names(tmp_path: Path) -> None:
    rows = ['{"format": 1}', '["cat/1.png", 5, "00000001", "00000001", 0]']
    (tmp_path / "_MANIFEST.jsonl").write_text("".join(f"{row}\n" for row in rows))
    assert split_digest(tmp_path, ["cat/1.png"])
    assert split_digest(tmp_path, ["1.png"], "cat")
    assert split_digest(tmp_path, ["1.png"]) == ""

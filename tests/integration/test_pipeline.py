"""The committed YAML through kfp.local: the demo, a small bucket, an error."""

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kfp_ddp.local.demo import run
from kfp_ddp.training.layout import lay_out
from tests.gcs_server import Bucket
from tests.local_pipeline import pipeline

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def summary(output: Path) -> dict[str, Any]:
    return run(output, ranks=2, arguments={})


def test_demo_trains_evaluates_and_exports(summary: dict[str, Any], output: Path) -> None:
    assert summary["accuracy"] >= 0.97
    assert (summary["files"], summary["files_copied"]) == (1797, 1797)
    assert summary["blessed"] is True
    assert json.loads((output / "summary.json").read_text()) == summary
    assert all(name in Path(summary["report"]).read_text() for name in ("<svg", "data:image/"))
    assert "<svg" in Path(summary["loss_curve"]).read_text()
    lines = next(output.glob("work/*/*/metrics.jsonl")).read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert next(event for event in events if event["event"] == "start")["world_size"] == 2
    assert (events[-1]["event"], events[-1]["status"]) == ("end", "done")


def test_bundle_is_complete(summary: dict[str, Any]) -> None:
    bundle = Path(summary["bundle"])
    lines = (bundle / "MANIFEST.sha256").read_text().splitlines()
    listed = [line.split("  ", 1) for line in lines]
    expected = {"model.safetensors", "model.onnx", "model.pt2", "signature.json"}
    assert expected <= {name for _, name in listed}
    for digest, name in listed:
        assert hashlib.sha256((bundle / name).read_bytes()).hexdigest() == digest


def test_second_demo_copies_and_uploads_nothing(summary: dict[str, Any], output: Path) -> None:
    again = run(output, ranks=1, arguments={"epochs": 1})
    assert again["files_copied"] == 0
    assert again["blessed"] is False
    assert (Path(again["bundle"]) / "_SUCCESS").is_file()
    assert "uploaded_to" not in again


def test_small_bucket_without_a_split_is_trained(bucket: Bucket, tmp_path: Path) -> None:
    """Warm-up and batch are sized by the images; the split is by name."""
    for label in ("cat", "dog"):
        for number in range(16):
            picture = io.BytesIO()
            shade = 15 * number + (9 if label == "cat" else 0)
            Image.new("RGB", (9, 8), (shade, 80, 80)).save(picture, "PNG")
            bucket.put(f"photos/{label}/{number}.png", picture.getvalue())
    arguments = {
        "source": "gs://bucket/photos",
        "model": "cifar_resnet8",
        "epochs": 2,
        "training": {"image_size": 8, "workers": 0, "val_fraction": 0.25},
        "backend": "local",
        "gate": {},
    }
    done = pipeline(arguments, tmp_path)
    assert done.returncode == 0, done.stdout
    names = [name.removeprefix("photos/") for name in bucket.objects]
    sides = lay_out(names, val_fraction=0.25)
    assert f"2 classes, {len(sides.train)} to train on, {len(sides.val)} to validate" in done.stdout
    (run_dir,) = tmp_path.glob("work/*/*/")
    config = json.loads((run_dir / "config.json").read_text())
    assert (config["epochs"], config["batch_size"]) == (2, 8)
    assert 0 < config["warmup_epochs"] < 2
    predictions = (run_dir / "evaluation" / "predictions.csv").read_text().splitlines()[1:]
    assert {row.partition(",")[0] for row in predictions} == {name for name, _ in sides.val}
    assert (run_dir / "bundle" / "_SUCCESS").is_file()


def test_error_of_a_step_is_one_line(tmp_path: Path) -> None:
    done = pipeline({"source": "file:///nowhere/at/all", "backend": "local"}, tmp_path)
    assert done.returncode != 0
    errors = [text.strip() for text in done.stdout.splitlines() if "error: " in text]
    assert errors, done.stdout
    assert all("/nowhere/at/all" in text for text in errors), errors

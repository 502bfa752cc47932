"""The pipelines `sweep` and `own_script` through kfp.local."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.local.results import outputs
from kfp_ddp.training import model_file
from tests.local_pipeline import pipeline
from tests.photographs import plain

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain(tmp_path_factory.mktemp("photographs"), 16)


def run(name: str, source: Path, folder: Path, **more: Any) -> "subprocess.CompletedProcess[str]":
    arguments: dict[str, Any] = {
        "source": str(source),
        "backend": "local",
        "job": {"nproc_per_node": 1},
        "sync": {"dataset": "shades"},
        "model_name": "shades",
        "destination": str(folder / "models"),
        "gate": {"min_accuracy": 0.9},
        **more,
    }
    return pipeline(arguments, folder, REPOSITORY / "compiled" / f"{name}.yaml")


def test_best_trial_is_exported_if_another_failed(photographs: Path, tmp_path: Path) -> None:
    done = run(
        "sweep",
        photographs,
        tmp_path,
        model="cifar_resnet8",
        epochs=2,
        training={"image_size": 16, "workers": 0, "val_fraction": 0.25, "warmup_epochs": 0.0},
        sweep={
            "trials": [
                {"model": "vgg11"},  # cannot take images of 16 px
                {"learning_rate": 0.05},
                {"learning_rate": 1e-9},
            ]
        },
        gate={"min_accuracy": 0.4},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = outputs(tmp_path, "leaderboard")
    assert (result["trials"], result["failed"]) == (3, 1)
    assert result["best_accuracy"] == pytest.approx(outputs(tmp_path, "evaluate")["accuracy"])
    config = json.loads((Path(result["run_dir"]) / "config.json").read_text())
    assert config["stop_behind_epochs"] == 1
    assert len(list((tmp_path / "models" / "shades").glob("*/_SUCCESS"))) == 1
    (page,) = tmp_path.glob("artifacts/*/*/sweep_report")
    assert "failed: training failed: rank 0: model=vgg11 cannot take images" in page.read_text()
    (table,) = tmp_path.glob("artifacts/*/*/sweep_summary")
    head, _, *rows = table.read_text().splitlines()
    assert head == "|  | learning_rate | accuracy | loss | epochs | ended |"
    assert [row[:4] for row in rows] == ["| 1 ", "| 2 ", "|  |"]


def test_own_script_is_evaluated_gated_and_exported(photographs: Path, tmp_path: Path) -> None:
    script = REPOSITORY / "examples" / "own_script.py"
    done = run(
        "own_script",
        photographs,
        tmp_path,
        script=model_file.pack(script),
        model="own_script.py:build",
        epochs=12,
        training={
            "batch_size": 8,
            "learning_rate": 0.05,
            "image_size": 16,
            "val_fraction": 0.25,
            "script_args": "--momentum 0.8",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert outputs(tmp_path, "evaluate")["accuracy"] >= 0.9
    (bundle,) = (path.parent for path in (tmp_path / "models" / "shades").glob("*/_SUCCESS"))
    assert "def build(num_classes: int)" in (bundle / "network.py").read_text()
    assert (bundle / "model.onnx").is_file()

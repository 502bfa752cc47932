"""The train step with ranks, by kfp.local."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from kfp_ddp import __version__
from tests.photographs import plain
from tests.waiting import until

CHILD = """
import json, sys, warnings
warnings.filterwarnings("ignore")
from kfp import local
from kfp_ddp.components.train.component import train
local.init(local.SubprocessRunner(use_venv=False), pipeline_root=sys.argv[1])
task = train(**json.loads(sys.argv[2]))
print("OUTPUTS", json.dumps({k: getattr(v, "metadata", v) for k, v in task.outputs.items()}))
"""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of plain images."""
    root = tmp_path_factory.mktemp("dataset")
    return plain(plain(root / "train", 24, 8).with_name("val"), 8, 8).parent


def arguments(dataset: Path, work_dir: Path, **training: Any) -> dict[str, Any]:
    """Return inputs of the step with these settings of the training."""
    return {
        "run_id": "run-1",
        "task_name": "train",
        "task_id": "",
        "backend": "local",
        "dataset_path": str(dataset),
        "work_dir": str(work_dir),
        "job": {"nproc_per_node": 2},
        "training": {
            "model": "cifar_resnet8",
            "image_size": 8,
            "epochs": 2,
            "batch_size": 16,
            "workers": 0,
            "log_steps": 1,
            **training,
        },
    }


def start(tmp_path: Path, given: dict[str, Any]) -> "subprocess.Popen[str]":
    with (tmp_path / "log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path / "outputs"), json.dumps(given)],
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def run(tmp_path: Path, given: dict[str, Any]) -> tuple[int, str]:
    code = start(tmp_path, given).wait(timeout=300)
    return code, (tmp_path / "log").read_text()


def launchers(work_dir: Path) -> list[psutil.Process]:
    """Return all launchers and ranks that work in a folder."""
    processes = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        ours = "kfp_ddp.training" in line and str(work_dir) in line
        if ours and "executor_main" not in line and process.info["status"] != "zombie":
            processes.append(process)
    return processes


@pytest.fixture(scope="module")
def trained(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder and log of a training of six steps."""
    folder = tmp_path_factory.mktemp("trained")
    code, output = run(folder, arguments(dataset, folder / "work"))
    assert code == 0, output
    return folder


@pytest.mark.slow
def test_train_writes_checkpoint_artifacts_and_progress(trained: Path) -> None:
    output = (trained / "log").read_text()
    outputs = json.loads(output.split("OUTPUTS ")[1].splitlines()[0])
    checkpoint = Path(outputs["checkpoint"])
    assert checkpoint == trained / "work/run-1/train/checkpoints/step-00000006"
    assert outputs["run_dir"] == str(trained / "work/run-1/train")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    model = outputs["trained_model"]
    assert model["digest"] == "sha256:" + manifest["files"]["state.pt"]["sha256"]
    assert model["path"] == str(checkpoint)
    assert model["kfp_ddp"] == {"version": __version__, "step": [], "workers": []}
    record = json.loads(next((trained / "outputs").rglob("training_job")).read_text())
    assert record["kfp_ddp"] == model["kfp_ddp"]
    assert outputs["train_metrics"]["step"] == 6
    assert outputs["train_metrics"]["train_loss"] > 0
    assert "loss" not in outputs["train_metrics"]  # as evaluate has such a metric
    assert outputs["train_metrics"]["val_accuracy"] == model["metrics"]["val_accuracy"]
    html = next((trained / "outputs").rglob("loss_curve")).read_text()
    assert "<svg" in html
    assert "step 6/6" in output
    assert "[rank0]" in output
    assert not (trained / "work/run-1/train/process.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "pigeon"}, "backend 'pigeon' is not known"),
        ({"training": {"precison": "bf16"}}, "training has no setting 'precison'; did you mean"),
        ({"training": {"output_dir": "/x"}}, "training sets output_dir, which the step sets"),
        ({"job": {"command": ["x"]}}, "job sets command, which the step sets itself"),
        (
            {"job": {"packages_to_install": ["timm==1.0.0"]}},
            "job sets packages_to_install, which evaluate and export would lack: build an image",
        ),
        ({"run_id": "../up"}, "run_id '../up' cannot name a folder"),
        ({"work_dir": "/proc/none"}, "mount the work PVC at /proc/none"),
        ({"job": {"nodes": 2}}, "backend local has one node"),
    ],
)
def test_invalid_input_fails_before_any_rank_starts(
    tmp_path: Path, dataset: Path, change: dict[str, Any], message: str
) -> None:
    from kfp_ddp.components.train.component import train

    names = ("trained_model", "train_metrics", "loss_curve", "training_job", "task_config")
    artifacts = dict.fromkeys(names)
    given = {**arguments(dataset, tmp_path / "work"), **change}
    with pytest.raises(SystemExit) as error:
        train.python_func(**artifacts, **given)
    assert message in str(error.value)
    assert not (tmp_path / "work" / "run-1" / "train" / "logs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left(tmp_path: Path, dataset: Path, number: signal.Signals) -> None:
    work = tmp_path / "work"
    metrics, log = work / "run-1" / "train" / "metrics.jsonl", tmp_path / "log"
    process = start(tmp_path, arguments(dataset, work, epochs=2000))
    try:
        until(lambda: metrics.exists() and '"step"' in metrics.read_text(), log.read_text)
        steps = psutil.Process(process.pid).children(recursive=True)
        executor = next(p for p in steps if "kfp.dsl.executor_main" in p.cmdline())
        assert len(launchers(work)) >= 3
        executor.send_signal(number)
        until(lambda: launchers(work) == [], log.read_text)
        assert process.wait(timeout=60) != 0
    finally:
        process.kill()
        process.wait()
    if number is signal.SIGTERM:
        assert "training was stopped; newest checkpoint: step" in log.read_text()

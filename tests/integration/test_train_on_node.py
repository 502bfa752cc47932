"""A worker without PVCs: it downloads the dataset and uploads its folder."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core import folders
from kfp_ddp.core.failure import Failure
from kfp_ddp.datasets.access import EachNode, options_on_nodes
from kfp_ddp.datasets.options import Options
from kfp_ddp.datasets.sync import sync
from kfp_ddp.runs.train.engine import node_command
from kfp_ddp.training.config import TrainConfig
from tests.waiting import until

LOOP: dict[str, Any] = {
    "model": "cifar_resnet8",
    "image_size": 16,
    "batch_size": 32,
    "workers": 0,
    "log_steps": 1,
    "checkpoint_minutes": 0.0,
    "device": "cpu",
}
STEPS = 3  # of an epoch of 123 images; the incomplete last batch is dropped


@pytest.fixture
def dataset(trained_dataset: Path, tmp_path: Path) -> str:
    listed = sync(str(trained_dataset), tmp_path / "none", Options(dry_run=True))
    options = options_on_nodes({"dry_run": True})
    return EachNode(str(trained_dataset), "squares", listed.digest, options).address()


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return tmp_path / "bucket/run-1/train"


class Worker:
    """A pod of the job, with its own folder."""

    def __init__(self, tmp_path: Path, name: str, work: Path, data: str, epochs: int) -> None:
        self.folder = tmp_path / name
        self.folder.mkdir()
        config = TrainConfig.create(
            data=data,
            output_dir=f"file://{work}",
            run_id="run-1/train",
            epochs=epochs,
            **LOOP,
        )
        _, *command = node_command(config)
        with (self.folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    folders.SCRATCH_VARIABLE: str(self.folder / "scratch"),
                    "KFP_DDP_TERMINATION_LOG": str(self.folder / "last-words"),
                },
            )

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def failure(self) -> Failure:
        failure = Failure.parse((self.folder / "last-words").read_text())
        assert failure is not None
        return failure


def newest(work: Path) -> int:
    paths = work.glob("checkpoints/*/manifest.json")
    return max((int(path.parent.name.removeprefix("step-")) for path in paths), default=0)


def last_event(work: Path) -> dict[str, object]:
    event: dict[str, object] = json.loads((work / "metrics.jsonl").read_text().splitlines()[-1])
    return event


STEP = """
import json, sys
from types import SimpleNamespace
from kfp_ddp.runs.train.engine import run
names = ("trained_model", "train_metrics", "loss_curve", "training_job")
artifacts = {name: SimpleNamespace(path=f"{sys.argv[1]}/{name}", metadata={}) for name in names}
artifacts["train_metrics"].log_metric = lambda name, value: None
print(*run(**json.loads(sys.argv[2]), **artifacts))
"""


def train(tmp_path: Path, work: Path, data: str, epochs: int) -> str:
    """Run the step with its own ranks and return its output."""
    inputs = {
        "run_id": "run-1",
        "task_name": "train",
        "task_id": "",
        "dataset_path": data,
        "training": {**LOOP, "epochs": epochs},
        "backend": "local",
        "job": {"nproc_per_node": 1},
        "image": "any",
        "work_dir": f"file://{work.parents[1]}",
        "task_config": None,
    }
    return subprocess.run(
        [sys.executable, "-c", STEP, str(tmp_path), json.dumps(inputs)],
        env={**os.environ, "OMP_NUM_THREADS": "1", folders.SCRATCH_VARIABLE: f"{tmp_path}/step"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


@pytest.mark.slow
def test_a_step_resumes_where_a_worker_stopped(tmp_path: Path, work: Path, dataset: str) -> None:
    first = Worker(tmp_path, "first", work, dataset, epochs=400)
    until(lambda: newest(work) > 0 or first.process.poll() is not None, lambda: first.log)
    first.process.terminate()
    assert first.process.wait(120) == 143, first.log
    stopped = last_event(work)
    assert stopped["status"] == "preempted"
    assert newest(work) == stopped["step"]
    assert first.failure.retryable

    step = int(str(stopped["step"]))
    log = train(tmp_path, work, dataset, epochs=math.ceil(step / STEPS) + 1)
    assert f"resumes from checkpoints/step-{step:08} of file://{work}" in log
    assert newest(work) > step
    last = f"file://{work}/checkpoints/step-{newest(work):08}"
    assert log.splitlines()[-1] == f"{last} file://{work} "  # and no failure
    assert last_event(work)["status"] == "done"


@pytest.mark.parametrize(
    ("digest", "code", "message", "retryable"),
    [
        ("f" * 64, 1, "by now, but the run started with ffffffffffff: start a new run", True),
        ("", 2, "names no dataset", False),
    ],
)
def test_a_dataset_that_cannot_be_synced_is_the_reported_failure(
    tmp_path: Path, work: Path, dataset: str, digest: str, code: int, message: str, retryable: bool
) -> None:
    address = replace(EachNode.parse(dataset), digest=digest).address()
    worker = Worker(tmp_path, "worker", work, address if digest else "each-node:{}", epochs=1)
    assert worker.process.wait(120) == code, worker.log
    assert message in worker.failure.error
    assert worker.failure.retryable is retryable

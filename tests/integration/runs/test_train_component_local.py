"""The train step on this machine and on a node without PVCs, and the timeout of collectives."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from kfp_ddp import __version__
from kfp_ddp.core import failure, folders
from kfp_ddp.core.failure import Failure
from kfp_ddp.datasets.access import EachNode, options_on_nodes
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.datasets.sync import sync
from kfp_ddp.runs.train.engine import node_command, with_timeout
from kfp_ddp.training.spec.config import TrainConfig
from tests.photographs import plain
from tests.serving import free_port
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
RANK = """
import json, os, sys
import torch
from torch import distributed
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.distributed import start

print("imported", flush=True)
sys.stdin.readline()
world = start(TrainConfig.create(data="/data", output_dir=sys.argv[2], **json.loads(sys.argv[1])))
group = world.control if sys.argv[3] == "control" else None
distributed.barrier(group=group)
if world.rank == 1:
    sys.stdin.read()  # it is alive and does nothing
    os._exit(0)
try:
    distributed.all_reduce(torch.ones(1), group=group)
except RuntimeError as error:
    print(error, flush=True)
    os._exit(7)
"""
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


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of plain images."""
    root = tmp_path_factory.mktemp("dataset")
    return plain(plain(root / "train", 24, 8).with_name("val"), 8, 8).parent


def arguments(dataset: Path | str, work_dir: Path | str, **training: Any) -> dict[str, Any]:
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


def start(tmp_path: Path, given: dict[str, Any], **env: str) -> "subprocess.Popen[str]":
    with (tmp_path / "log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path / "outputs"), json.dumps(given)],
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        )


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
    step = start(folder, arguments(dataset, folder / "work"))
    assert step.wait(timeout=300) == 0, (folder / "log").read_text()
    return folder


@pytest.mark.slow
def test_a_step_of_kfp_logs_into_its_mlflow_run(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KFP's MLflow plugin gives a step a run of its own, and ends it itself."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file://{tmp_path}/mlflow"
    server = MlflowClient(tracking_uri=uri)
    run = server.create_run(server.create_experiment("kfp")).info
    given = {"MLFLOW_TRACKING_URI": uri, "MLFLOW_RUN_ID": run.run_id}
    step = start(tmp_path, arguments(dataset, tmp_path / "work", epochs=1), **given)
    assert step.wait(timeout=300) == 0, (tmp_path / "log").read_text()
    (tracked,) = server.search_runs([run.experiment_id])
    assert (tracked.info.run_id, tracked.info.status) == (run.run_id, "RUNNING")
    history = server.get_metric_history(run.run_id, "step/loss")
    assert [point.step for point in history] == [1, 2, 3]


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
    copied = next((trained / "outputs").rglob("train_metrics")).read_text()
    assert copied == (trained / "work/run-1/train/metrics.jsonl").read_text()
    pointer = json.loads(next((trained / "outputs").rglob("trained_model")).read_text())
    assert pointer["settings"] == json.loads((trained / "work/run-1/train/config.json").read_text())
    html = next((trained / "outputs").rglob("loss_curve")).read_text()
    assert "<svg" in html
    assert "step 6/6" in output
    assert "[rank0]" in output
    assert not (trained / "work/run-1/train/process.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "pigeon"}, "backend 'pigeon' is not known"),
        ({"job": {"command": ["x"]}}, "job sets command, which the step sets itself"),
        ({"job": {"packages_to_install": ["timm==1"]}}, "which evaluate and export would lack"),
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


@pytest.mark.slow
@pytest.mark.parametrize("group", ["data", "control"])
def test_a_collective_with_a_silent_peer_ends_after_the_timeout(tmp_path: Path, group: str) -> None:
    training: dict[str, Any] = with_timeout({"device": "cpu"}, {"nccl_timeout_minutes": 0.1})
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", RANK, json.dumps(training), str(tmp_path), group]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:  # importing torch may take a rank longer than the timeout
            assert rank.stdout is not None
            assert rank.stdout.readline() == "imported\n"
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()
        ranks[0].wait(timeout=300)  # torch's default is 30 minutes
        output, _ = ranks[0].communicate()
        assert ranks[0].returncode == 7
        assert "6000ms" in output
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.fixture
def on_node(trained_dataset: Path, tmp_path: Path) -> str:
    listed = sync(str(trained_dataset), tmp_path / "none", SyncOptions(dry_run=True))
    options = options_on_nodes({"dry_run": True})
    return EachNode(str(trained_dataset), "squares", listed.digest, options).address()


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return tmp_path / "bucket/run-1/train"


class Worker:
    """A pod of the job, with its own folder."""

    def __init__(
        self,
        tmp_path: Path,
        name: str,
        work: Path,
        data: str,
        *torchrun: str,
        epochs: int = 400,
        port: int = 9,
    ) -> None:
        """Start it; `port` is that of a server for gs://."""
        self.folder = tmp_path / name
        self.folder.mkdir()
        config = TrainConfig.create(
            data=data, output_dir=f"file://{work}", run_id="run-1/train", epochs=epochs, **LOOP
        )
        _, *command = node_command(config)
        command[2:2] = torchrun
        with (self.folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
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
    # A folder that is still being written has another name.
    paths = work.glob("checkpoints/step-*[0-9]/manifest.json")
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
    inputs = arguments(data, f"file://{work.parents[1]}", **LOOP, epochs=epochs)
    inputs |= {"job": {"nproc_per_node": 1}, "image": "any", "task_config": None}
    return subprocess.run(
        [sys.executable, "-c", STEP, str(tmp_path), json.dumps(inputs)],
        env={**os.environ, "OMP_NUM_THREADS": "1", folders.SCRATCH_VARIABLE: f"{tmp_path}/step"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


@pytest.mark.slow
def test_a_step_resumes_where_a_worker_stopped(tmp_path: Path, work: Path, on_node: str) -> None:
    first = Worker(tmp_path, "first", work, on_node)
    until(lambda: newest(work) > 0 or first.process.poll() is not None, lambda: first.log)
    first.process.terminate()
    assert first.process.wait(120) == 143, first.log
    stopped = last_event(work)
    assert stopped["status"] == "preempted"
    assert newest(work) == stopped["step"]
    assert first.failure.retryable

    step = int(str(stopped["step"]))
    log = train(tmp_path, work, on_node, epochs=math.ceil(step / STEPS) + 1)
    assert f"resumes from checkpoints/step-{step:08} of file://{work}" in log
    assert newest(work) > step
    last = f"file://{work}/checkpoints/step-{newest(work):08}"
    assert log.splitlines()[-1] == f"{last} file://{work}"
    assert last_event(work)["status"] == "done"


@pytest.mark.parametrize(
    ("digest", "code", "message", "retryable"),
    [
        ("f" * 64, 1, "by now, but the run started with ffffffffffff: start a new run", True),
        ("", 2, "names no dataset", False),
    ],
)
def test_a_dataset_that_cannot_be_synced_is_the_reported_failure(
    tmp_path: Path, work: Path, on_node: str, digest: str, code: int, message: str, retryable: bool
) -> None:
    address = replace(EachNode.parse(on_node), digest=digest).address()
    worker = Worker(tmp_path, "worker", work, address if digest else "each-node:{}", epochs=1)
    assert worker.process.wait(120) == code, worker.log
    assert message in worker.failure.error
    assert worker.failure.retryable is retryable


@pytest.mark.slow
def test_a_worker_that_lost_a_rank_uploads(tmp_path: Path, work: Path, on_node: str) -> None:
    first = Worker(tmp_path, "first", work, on_node)
    until(lambda: newest(work) > 0 or first.process.poll() is not None, lambda: first.log)
    (rank,) = psutil.Process(first.process.pid).children()
    rank.kill()
    assert first.process.wait(60) == 137, first.log
    assert (first.failure.rank, first.failure.error) == (0, "ended by SIGKILL")
    assert failure.read(work / "logs") == first.failure
    (local,) = first.folder.glob("scratch/runs/*/*")
    assert newest(work) == newest(local)
    assert not list(work.glob(".leases/*"))


def test_a_worker_is_stopped_while_it_downloads(tmp_path: Path, work: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        data = EachNode("gs://bucket", "squares", "f" * 64, {}).address()
        worker = Worker(tmp_path, "worker", work, data, port=silent.getsockname()[1])
        with silent.accept()[0]:
            worker.process.terminate()
            assert worker.process.wait(30) == 143, worker.log
    assert worker.failure.retryable
    assert worker.failure.error == "stopped before the ranks started"
    assert not list(work.glob(".leases/*"))


@pytest.mark.slow
def test_a_worker_is_stopped_while_it_waits(tmp_path: Path, work: Path, on_node: str) -> None:
    """It waits in C++, where no Python handler runs; its last upload takes place all the same."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        first = ("--master-addr=127.0.0.1", f"--master-port={silent.getsockname()[1]}")
        worker = Worker(tmp_path, "worker", work, on_node, "--nnodes=2", "--node-rank=1", *first)
        with silent.accept()[0]:
            assert list(work.glob(".leases/*"))
            worker.process.terminate()
            assert worker.process.wait(30) == 143, worker.log
    (record,) = work.glob("logs/failure-*.json")
    assert "stopped by SIGTERM before all nodes had joined" in record.read_text()
    assert not list(work.glob(".leases/*"))

"""The launcher: exit codes, the root cause in one line, and no rank that outlives it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed.launcher import api

from kfp_ddp.core import failure, machine
from kfp_ddp.core.errors import InputError
from kfp_ddp.training import node
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.state import checkpoint
from kfp_ddp.training.watch import LAUNCH, PARENT
from tests.training_ranks import config, dataset, events, newest
from tests.waiting import until


class Launched:
    """A launcher in a process group of its own, which is killed whole at the end."""

    def __init__(
        self, run: TrainConfig, *flags: str, nproc: int = 2, under: Sequence[str] = (), **env: str
    ) -> None:
        self.run = run
        self.log = Path(run.output_dir).parent / f"launcher-{time.time_ns()}.log"
        command = [*under, sys.executable, "-m", "kfp_ddp.training.node"]
        command += ["--nproc-per-node", str(nproc), *flags, "--", *run.to_argv()]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **env}, start_new_session=True
            )

    def wait_for(self, text: str) -> None:
        self.wait_until(lambda: text in self.output())

    def wait_until(self, condition: Callable[[], bool]) -> None:
        def holds() -> bool:
            result = condition()
            assert result or self.process.poll() is None, self.output()
            return result

        until(holds, self.output, 90)

    def ends(self, code: int) -> None:
        assert self.process.wait(240) == code, self.output()

    def output(self) -> str:
        return self.log.read_text()

    def ranks(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def failure(self) -> failure.Failure:
        record = failure.read(Path(self.run.output_dir, "logs"))
        assert record is not None
        return record


Launch = Callable[..., Launched]


@pytest.fixture
def launch() -> Iterator[Launch]:
    started: list[Launched] = []

    def start(run: TrainConfig, *flags: str, **more: Any) -> Launched:
        started.append(Launched(run, *flags, **more))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait()


def endless(data: Path, output: Path) -> TrainConfig:
    return config(data, output, epochs=5000, warmup_epochs=0)


def preempted_at(run: TrainConfig) -> int:
    """The step of the durable checkpoint that a preempted run ended with."""
    end = events(Path(run.output_dir))[-1]
    assert (end["event"], end["status"]) == ("end", "preempted")
    assert newest(Path(run.output_dir)).step == end["step"]
    return int(end["step"])


@pytest.mark.slow
def test_torchrun_script_trains_a_recipe(data: Path, tmp_path: Path) -> None:
    """The command of the README, in a shell, without our launcher."""
    torchrun = f"{Path(sys.executable).with_name('torchrun')} --standalone --nproc-per-node 2"
    flags = f"--data {data} --output-dir {tmp_path}/run --epochs 2 --device cpu"
    recipe = f"{sys.executable} -m kfp_ddp.training.spec.recipes digits {flags}"
    done = subprocess.run(
        ["sh", "-euc", f"{torchrun} -m kfp_ddp.training $({recipe})"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    all_events = events(tmp_path / "run")
    assert (all_events[0]["world_size"], all_events[0]["steps_total"]) == (2, 2)
    assert (all_events[-1]["event"], all_events[-1]["status"]) == ("end", "done")
    _, info = checkpoint.load_model(tmp_path / "run" / "checkpoints" / "step-00000002")
    assert info.classes == ("class0", "class1", "class2")
    assert info.image_size == 16


def test_invalid_data_is_exit_code_2_and_one_line(tmp_path: Path, launch: Launch) -> None:
    (tmp_path / "data" / "train" / "only").mkdir(parents=True)
    (tmp_path / "data" / "train" / "only" / "1.png").touch()
    node = launch(config(tmp_path / "data", tmp_path / "run"))
    node.ends(2)
    record = node.failure()
    assert f"dataset {tmp_path}/data: there is one class only (only)" in record.error
    assert (record.rank, record.retryable, record.consequence) == (-1, False, False)


@pytest.mark.slow
def test_exit_codes_of_a_stop(data: Path, tmp_path: Path, launch: Launch) -> None:
    """SIGTERM twice: 143 with a checkpoint. Resumed, one rank SIGKILLed: 137 with its number."""
    message = tmp_path / "termination"
    run = endless(data, tmp_path / "run")
    first = launch(run, KFP_DDP_TERMINATION_LOG=str(message))
    first.wait_for("epoch 1/5000")
    for _ in range(2):
        first.process.send_signal(signal.SIGTERM)
    first.ends(143)
    step = preempted_at(run)
    record = json.loads(message.read_text())
    assert record["exit_code"] == 143
    assert record["error"] == f"stopped by SIGTERM; the checkpoint of step {step} is durable"
    assert message.read_text().count("\n") == 1

    second = launch(run, KFP_DDP_TERMINATION_LOG=str(message))
    second.wait_for("resumed from")
    second.wait_for(f"epoch {step // 12 + 2}/5000")
    next(p for p in second.ranks() if p.environ()["RANK"] == "1").kill()
    second.ends(137)
    record = json.loads(message.read_text())
    assert (record["rank"], record["error"]) == (1, "ended by SIGKILL")
    assert record["retryable"] is True


@pytest.mark.slow
def test_signal_to_all_stops_ranks_in_order(data: Path, tmp_path: Path, launch: Launch) -> None:
    """As Ctrl-C of a local run; then loaders whose rank was killed end."""
    run = endless(data, tmp_path / "run").model_copy(update={"workers": 1})
    for number in (signal.SIGTERM, signal.SIGKILL):
        started = launch(run, nproc=1)
        started.wait_for(": loss ")
        (rank,) = started.ranks()
        started.wait_until(lambda rank=rank: bool(rank.children()))  # type: ignore[misc]
        loaders = rank.children()
        for process in [*loaders, rank] if number == signal.SIGTERM else [rank]:
            process.send_signal(number)
        started.ends(143 if number == signal.SIGTERM else 137)
        assert psutil.wait_procs(loaders, timeout=30)[1] == []
        assert number == signal.SIGKILL or preempted_at(run) > 0


@pytest.mark.parametrize(("set_to", "threads"), [("", "4"), ("7", "7")])
def test_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_to: str, threads: str) -> None:
    for name in ("OMP_NUM_THREADS", PARENT, LAUNCH, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, set_to)
    if not set_to:
        monkeypatch.delenv("OMP_NUM_THREADS")
    for function in ("_stop_on_signals", "_ignore_signals"):
        monkeypatch.setattr(node, function, lambda *arguments: None)
    monkeypatch.setattr(machine, "cores", lambda: 9)
    monkeypatch.setattr(api, "elastic_launch", lambda settings, command: lambda *argv: None)
    nothing: dict[str, Any] = {"check": lambda args: None, "summary": str}
    assert node.launch(["--nproc-per-node", "2"], ["module"], tmp_path, **nothing) == 0
    assert os.environ["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize("nodes", ["1:2", "two", ""])
def test_a_number_of_nodes_that_is_not_fixed_is_refused(nodes: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"--nnodes {nodes} is not one number.*newest checkpoint"):
        node.launch([f"--nnodes={nodes}"], ["module"], tmp_path, check=print, summary=str)


@pytest.mark.slow
def test_stop_reports_no_false_save(data: Path, tmp_path: Path, launch: Launch) -> None:
    """First ranks that had to be killed; then a save that fails on SIGTERM."""
    run = config(data, tmp_path / "run", epochs=5000, warmup_epochs=0, checkpoint_epochs=0)
    frozen = launch(run, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1")
    frozen.wait_for("epoch 1/5000")
    for rank in frozen.ranks():
        rank.suspend()
    frozen.process.terminate()
    frozen.ends(143)
    assert "stopped by SIGTERM; no checkpoint was saved on stop" in frozen.failure().error

    failing = launch(run)
    failing.wait_for("epoch 1/5000")
    (tmp_path / "run" / "checkpoints").touch()  # a file is where the folder would be
    failing.process.terminate()
    failing.ends(1)
    assert "cannot save a checkpoint" in failing.failure().error
    assert failing.failure().rank == 0


@pytest.mark.slow
def test_missing_node_is_reported(data: Path, tmp_path: Path, launch: Launch) -> None:
    flags = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
    conf = "--rdzv-conf=join_timeout=2,is_host=true"
    launch(config(data, tmp_path / "run"), *flags, conf, nproc=1).ends(1)
    (file,) = (tmp_path / "run" / "logs").glob("failure-*.json")
    record = json.loads(file.read_text())
    assert record["error"].startswith("RendezvousTimeoutError")
    assert record["retryable"] is True


@pytest.mark.slow
def test_final_failure_is_not_restarted(tmp_path: Path, launch: Launch) -> None:
    root = dataset(tmp_path / "data")
    broken = sorted((root / "train" / "class1").iterdir())[7]
    broken.write_bytes(b"no image")
    node = launch(config(root, tmp_path / "run"), "--max-restarts=3")
    node.ends(2)
    assert broken.name in node.failure().error
    assert node.output().count("rank 0 of 2 on") == 1


@pytest.mark.slow
def test_completed_run_and_restarted_ranks(data: Path, tmp_path: Path, launch: Launch) -> None:
    """The first on a machine whose name has no address, which only root can arrange.

    The second start is from scratch, as set, and continues after the loss of a rank. Its ranks
    outlive no launcher.
    """
    renamed = ("unshare", "--uts", "sh", "-c", 'hostname of-no-address && exec "$@"', "sh")
    address = ("--master-addr", "of-no-address", "--master-port", "23456")
    run = config(data, tmp_path / "run", epochs=1, warmup_epochs=0, tensorboard=True)
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "failure-of-an-earlier-node.json").touch()
    if os.geteuid() == 0:
        launch(run, *address, under=renamed, GLOO_SOCKET_IFNAME="gone0").ends(0)
    else:
        launch(run).ends(0)
    assert list(logs.glob("failure*.json")) == []
    all_events = events(tmp_path / "run")
    kinds = [event["event"] for event in all_events if event["event"] != "step"]
    assert kinds == ["start", "eval", "checkpoint", "ranks", "end"]
    assert (all_events[0]["world_size"], all_events[0]["steps_total"]) == (2, 12)
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))

    again = endless(data, tmp_path / "run").model_copy(update={"resume": "never"})
    node = launch(again, "--max-restarts=3", nproc=1)
    node.wait_for("epoch 2/5000")
    assert "resumed from" not in node.output()
    node.ranks()[0].kill()
    node.wait_for("resumed from")
    assert [p.name for p in (tmp_path / "run").glob("checkpoints.old-*")] == ["checkpoints.old-0"]

    lines = node.output().count(": loss ")
    node.wait_until(lambda: node.output().count(": loss ") > lines)
    ranks = node.ranks()
    assert len(ranks) == 1
    node.process.kill()
    assert psutil.wait_procs(ranks, timeout=30)[1] == []
    assert preempted_at(again) > 0


@pytest.mark.slow
def test_stale_heartbeat_stops_it(data: Path, tmp_path: Path, launch: Launch) -> None:
    """What counts is that it changes; its time, by a clock that is off, does not."""
    heartbeat = tmp_path / "heartbeat"
    run = endless(data, tmp_path / "run").model_copy(
        update={"stop_when_stale": str(heartbeat), "stale_seconds": 3.0}
    )
    started = launch(run, "--max-restarts=3")
    began = time.time()
    while "epoch 1/5000" not in started.output() or time.time() - began < 8:
        heartbeat.touch()
        os.utime(heartbeat, (time.time() - 1e7,) * 2)
        assert started.process.poll() is None, started.output()
        time.sleep(0.5)
    started.ends(143)
    step = preempted_at(run)
    assert "heartbeat is stale" in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert started.output().count("rank 0 of 2 on") == 1
    assert (
        started.failure().error
        == f"the heartbeat is stale; the checkpoint of step {step} is durable"
    )

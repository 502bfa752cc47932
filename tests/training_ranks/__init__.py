"""Real ranks for tests of the training loop: forked from a server that has torch imported."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from kfp_ddp.training.distributed import World
from kfp_ddp.training.prepare import prepare
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.state import checkpoint
from kfp_ddp.training.trainer import Trainer
from tests.serving import free_port
from tests.waiting import until

ALONE = World(0, 1, 0, 1, torch.device("cpu"))
_CONTEXT = multiprocessing.get_context("forkserver")
# What a rank imports when it begins to train is more than half of its time in a test.
_LATER = ("torch._dynamo", "torch.distributed.fsdp", "torchcodec.decoders")
_CONTEXT.set_forkserver_preload(["tests.training_ranks", "kfp_ddp.training.trainer", *_LATER])


def dataset(root: Path, train: int = 96, val: int = 20, classes: int = 3, size: int = 8) -> Path:
    """Image folders whose classes differ in colour, in PNG."""
    draw = torch.Generator().manual_seed(5)
    for split, count in (("train", train), ("val", val)):
        for i in range(count):
            folder = root / split / f"class{i % classes}"
            folder.mkdir(parents=True, exist_ok=True)
            pixels = torch.rand(size, size, 3, generator=draw) * 160
            pixels[..., i % 3] += 30 * (i % classes + 1)
            Image.fromarray(pixels.clamp(max=255).byte().numpy()).save(folder / f"{i:04d}.png")
    return root


def config(data: Path, output: Path, **fields: Any) -> TrainConfig:
    """A run of 36 steps on `dataset`'s images, reproducible to the bit."""
    settings: dict[str, Any] = {
        "data": str(data),
        "output_dir": str(output),
        "model": "cifar_resnet8",
        "image_size": 8,
        "epochs": 3,
        "batch_size": 8,
        "learning_rate": 0.05,
        "warmup_epochs": 1,
        "ema_decay": 0.9,
        "workers": 0,
        "deterministic": True,
        "device": "cpu",
        "log_steps": 4,
        "cache_gb": 0,
    }
    return TrainConfig.create(**{**settings, **fields})


def run(root: Path | str = "/d", **fields: Any) -> TrainConfig:
    """Settings of a run whose data and output are in one folder."""
    small = {"model": "cifar_resnet8", "image_size": 16, "workers": 0, **fields}
    return TrainConfig.create(**{"data": str(root), "output_dir": str(root), **small})


def trainer(run: TrainConfig) -> Trainer:
    """The loop of a single rank in this process."""
    resolved, train, val = prepare(run, ALONE)
    return Trainer(resolved, ALONE, train, val)


def forked(target: Callable[..., None], *args: Any) -> BaseProcess:
    """A process that begins with a function, soon, as torch is there already."""
    process: BaseProcess = _CONTEXT.Process(target=target, args=args)
    process.start()
    return process


class Ranks:
    """Ranks without a launcher, so that a test kills whom it likes."""

    def __init__(
        self, run: TrainConfig, world: int, die_at: str = "", env: Mapping[str, str] | None = None
    ) -> None:
        self.log = Path(run.output_dir).parent / f"{Path(run.output_dir).name}-{time.time_ns()}"
        self.log.mkdir(parents=True)
        self.port = free_port()
        more = (world, self.port, str(self.log), die_at, dict(env or {}))
        self.processes: list[BaseProcess] = [
            _CONTEXT.Process(target=_rank, args=(run.to_argv(), rank, *more))
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def kill(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank, if it lives."""
        process = self.processes[rank]
        if process.is_alive() and process.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                os.kill(process.pid, number)

    def wait(self, seconds: float = 240, stop_peers: bool = True) -> list[int]:
        """Exit codes of all ranks; a failed rank's peers get SIGTERM, as from torch's agent."""
        end = time.monotonic() + seconds
        told = not stop_peers
        while any(process.is_alive() for process in self.processes):
            if time.monotonic() > end:
                for process in self.processes:
                    process.kill()
                raise AssertionError(f"ranks hang\n{self.output()}")
            if not told and any(process.exitcode for process in self.processes):
                told = True
                for rank in range(len(self.processes)):
                    self.kill(rank, signal.SIGTERM)
            time.sleep(0.02)
        return [process.exitcode or 0 for process in self.processes]

    def wait_for(self, text: str) -> None:
        """Until a rank has printed `text`."""
        until(lambda: self._lives(text in self.output()), self.output)

    def wait_for_steps(self, count: int) -> None:
        """Until rank 0 has reported so many steps since it started."""
        until(lambda: self._lives(self.output().count(": loss ") >= count), self.output, pause=2e-3)

    def _lives(self, reached: bool) -> bool:
        assert reached or any(process.is_alive() for process in self.processes), self.output()
        return reached

    def output(self) -> str:
        """What the ranks printed."""
        return "".join(path.read_text() for path in sorted(self.log.iterdir()))


def train_until_killed(run: TrainConfig, world: int, point: str, **more: Any) -> None:
    """Train until rank 0 kills itself inside its second save, before a function of os or torch."""
    ranks = Ranks(run, world, die_at=point, **more)
    assert ranks.wait()[0] == -signal.SIGKILL, ranks.output()


def output_of(run: TrainConfig, world: int, code: int = 0, **more: Any) -> str:
    """Output of a run of `world` ranks, which all end with the same exit code."""
    ranks = Ranks(run, world, **more)
    # Ranks that all fail end one after the other: a signal in between would change the code.
    assert ranks.wait(stop_peers=code != 1) == [code] * world, ranks.output()
    return ranks.output()


def events(run_dir: Path, kind: str = "") -> list[dict[str, Any]]:
    """Events of the metrics of a run; by default of all kinds."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if kind in ("", event["event"])]


def newest(run_dir: Path) -> checkpoint.Checkpoint:
    """The newest checkpoint of a run."""
    valid = checkpoint.newest_valid(run_dir / "checkpoints")
    assert valid is not None
    return valid


def state_hash(run: TrainConfig) -> str:
    """A digest of parameters, averaged weights and optimizer state of the newest checkpoint."""
    valid = newest(Path(run.output_dir))
    digest = hashlib.sha256(str(valid.step).encode())

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(value.contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key in value:
                digest.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list):
            for item in value:
                add(item)
        else:
            digest.update(repr(value).encode())

    add(valid.state())
    return digest.hexdigest()


def _rank(
    argv: list[str], rank: int, world: int, port: int, log: str, die_at: str, env: dict[str, str]
) -> None:
    output = os.open(f"{log}/{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.environ.update(env)
    torch.set_num_threads(1)
    from kfp_ddp.training.rank import main

    if die_at:
        _die_at(die_at)
    if env.get("SLOW_RANK") == str(rank):
        _compute_slowly()
    if "PROGRESS_SECONDS" in env:
        from kfp_ddp.training.watch import Progress

        Progress.INTERVAL_SECONDS = float(env["PROGRESS_SECONDS"])
    sys.exit(main(argv))


def _compute_slowly() -> None:
    """Take a quarter of a second more for each forward pass."""
    original = torch.nn.functional.cross_entropy

    def slow(*args: Any, **kwargs: Any) -> torch.Tensor:
        time.sleep(0.25)
        return original(*args, **kwargs)

    torch.nn.functional.cross_entropy = slow


def _die_at(point: str) -> None:
    """Kill this process inside its second save: before the `point`, a function of os or torch."""
    module, _, name = point.partition(".")
    owner = {"os": os, "torch": torch}[module]
    original = getattr(owner, name)
    calls = [0]

    def deadly(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == "progress":  # it writes files of its own
            return original(*args, **kwargs)
        calls[0] += 1
        # The first os.replace puts config.json in place.
        if calls[0] == {"os.replace": 3, "torch.save": 2}[point]:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, deadly)

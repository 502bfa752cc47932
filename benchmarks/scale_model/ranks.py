"""What the model is made from and held against here: real steps of real ranks on this machine."""

import contextlib
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.scale_model.collective import Gradient
from benchmarks.scale_model.sharing import AllReduce
from benchmarks.scale_model.step import Compute

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["kfp_ddp.training.trainer"])


@dataclass(frozen=True)
class Job:
    """What every rank trains, whatever their number: `batch` images a rank and step."""

    root: str
    network: str = "resnet18"
    size: int = 64
    batch: int = 8

    def trainer(self, ranks: int) -> Any:
        """Our trainer on one thread, in the group that the environment describes."""
        import torch

        from benchmarks.training import trainer_on

        torch.set_num_threads(1)
        fields = {"batch_size": self.batch * ranks, "cache_gb": 0.1}
        return trainer_on(Path(self.root), self.network, self.size, **fields)


def steps_of(job: Job, ranks: int, steps: int, joined: bool = True) -> list[list[float]]:
    """Each rank's seconds of each of `steps` steps; not `joined`, each trains for itself."""
    return _each(ranks, joined, _steps, job, steps)


def _steps(world: int, job: Job, steps: int) -> list[float]:
    trainer = job.trainer(world)
    batches = trainer.batches()
    for _ in range(4):  # DDP groups its buckets anew after the first
        trainer.advance(batches)
    trainer.world.barrier()
    return [_seconds(lambda: trainer.advance(batches)) for _ in range(steps)]


def profile_of(job: Job, steps: int) -> tuple[Compute, list[Gradient]]:
    """One rank's step alone, and when its gradients are ready, by the medians of `steps` steps."""
    [found] = _each(1, False, _profile, job, steps)
    return found


def _profile(world: int, job: Job, steps: int) -> tuple[Compute, list[Gradient]]:
    trainer = job.trainer(world)
    batches = trainer.batches()
    watched = Watched(trainer.learner.network)
    parts = []
    for _ in range(4 + steps):
        began = time.perf_counter()
        with watched.backward():
            trainer.advance(batches)
        over = time.perf_counter()
        parts.append((watched.began - began, watched.seconds, over - watched.began))
    before, backward, rest = (statistics.median(each) for each in zip(*parts[4:], strict=True))
    return Compute(before, backward, rest - backward), watched.gradients()


class Watched:
    """When the gradients of `network` are there, in the last backward pass."""

    def __init__(self, network: Any) -> None:
        self.began = self.seconds = 0.0
        self._ready: list[tuple[int, float]] = []
        for parameter in network.parameters():
            parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: Any) -> None:
        self._ready.append((parameter.numel() * parameter.element_size(), time.perf_counter()))

    @contextlib.contextmanager
    def backward(self) -> Any:
        """Watches the calls of torch.autograd.backward within."""
        import torch

        real = torch.autograd.backward

        def timed(*arguments: Any, **more: Any) -> None:
            self._ready.clear()
            self.began = time.perf_counter()
            real(*arguments, **more)
            self.seconds = time.perf_counter() - self.began

        torch.autograd.backward = timed
        try:
            yield
        finally:
            torch.autograd.backward = real

    def gradients(self) -> list[Gradient]:
        """In the order in which they were ready."""
        return [Gradient(size, (at - self.began) / self.seconds) for size, at in self._ready]


def all_reduces(sizes: Sequence[int], rounds: int = 15) -> list[AllReduce]:
    """Two gloo ranks' all-reduces on this machine while nothing else runs; medians."""
    return _each(2, True, _all_reduces, list(sizes), rounds)[0]


def _all_reduces(world: int, sizes: list[int], rounds: int) -> list[AllReduce]:
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    found = []
    for size in sizes:
        # As many buffers as a step touches in between, so that none is in the processor's cache.
        gradients, buckets = ([torch.ones(size // 4) for _ in range(4)] for _ in range(2))
        copies, walls, busy = [], [], []
        for number in range(4 + rounds):
            gradient, bucket = gradients[number % 4], buckets[number % 4]
            distributed.barrier()
            copies.append(_seconds(lambda g=gradient, b=bucket: torch.mul(g, 0.5, out=b)))
            used = time.process_time()
            walls.append(_seconds(lambda b=bucket: distributed.all_reduce(b)))
            busy.append(time.process_time() - used)
        medians = (statistics.median(each[4:]) for each in (walls, busy, copies))
        found.append(AllReduce(size, *medians))
    return found


def meeting(count: int) -> float:
    """Seconds until `count` ranks here are connected with each other."""
    return statistics.median(_each(count, True, _meeting))


def _meeting(world: int) -> float:
    from torch import distributed

    return _seconds(lambda: distributed.init_process_group("gloo"))


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _each(ranks: int, joined: bool, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work(world size, *arguments)` returned in each rank, a process each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pipes, processes = [], []
    for number in range(ranks):
        here, there = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(
            target=_rank, args=(number, ranks if joined else 1, port, there, work, arguments)
        )
        process.start()
        there.close()  # so that the end of a rank that fails is noticed
        pipes.append(here)
        processes.append(process)
    try:
        return [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def _rank(
    number: int,
    world: int,
    port: int,
    pipe: Connection,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    from torch import distributed

    if world > 1:
        os.environ.update(RANK=str(number), WORLD_SIZE=str(world))
        os.environ.update(LOCAL_RANK=str(number), LOCAL_WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        pipe.send(work(world, *arguments))
    if distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()

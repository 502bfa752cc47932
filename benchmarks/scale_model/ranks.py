"""What the model is made from and held against here: real steps of real ranks on this machine."""

import contextlib
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.scale_model.collective import Gradient
from benchmarks.scale_model.sharing import AllReduce
from benchmarks.scale_model.step import Compute

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["kfp_ddp.training.trainer"])
WARM_UP = 4  # DistributedDataParallel groups its buckets anew after the first step


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


class Group:
    """Processes that do the same when they are asked to, and wait without work until then.

    `joined` in one process group, else each for itself. `make(world size, *arguments)` returns in
    each what it does in its turn.
    """

    def __init__(
        self, ranks: int, joined: bool, make: Callable[..., Callable[[], Any]], *arguments: Any
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._pipes, self._processes = [], []
        for number in range(ranks):
            here, there = _CONTEXT.Pipe()
            given = (number, ranks if joined else 1, port, there, make, arguments)
            process = _CONTEXT.Process(target=_rank, args=given)
            process.start()
            there.close()  # so that the end of a rank that fails is noticed
            self._pipes.append(here)
            self._processes.append(process)

    def turn(self) -> list[Any]:
        """What each rank's work returned, in the order of ranks."""
        for pipe in self._pipes:
            pipe.send(True)
        return [pipe.recv() for pipe in self._pipes]

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()


def _rank(
    number: int,
    world: int,
    port: int,
    pipe: Connection,
    make: Callable[..., Callable[[], Any]],
    arguments: tuple[Any, ...],
) -> None:
    if world > 1:
        os.environ.update(RANK=str(number), WORLD_SIZE=str(world))
        os.environ.update(LOCAL_RANK=str(number), LOCAL_WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        work = make(world, *arguments)
        with contextlib.suppress(EOFError):
            while pipe.recv():
                pipe.send(work())


def training(world: int, job: Job, steps: int) -> Callable[[], list[float]]:
    """Each turn trains so many steps, and tells the seconds of each."""
    trainer = job.trainer(world)
    batches = trainer.batches()
    for _ in range(WARM_UP):
        trainer.advance(batches)

    def turn() -> list[float]:
        trainer.world.barrier()
        return [_seconds(lambda: trainer.advance(batches)) for _ in range(steps)]

    return turn


def profiling(world: int, job: Job, steps: int) -> Callable[[], tuple[Compute, list[Gradient]]]:
    """Each turn tells where one rank's step goes, and when its gradients are ready: medians."""
    trainer = job.trainer(world)
    batches = trainer.batches()
    watched = Watched(trainer.learner.network)

    def step() -> tuple[float, float, float]:
        began = time.perf_counter()
        with watched.backward():
            trainer.advance(batches)
        return watched.began - began, watched.seconds, time.perf_counter() - watched.began

    for _ in range(WARM_UP):
        step()

    def turn() -> tuple[Compute, list[Gradient]]:
        parts = [step() for _ in range(steps)]
        before, backward, rest = (statistics.median(each) for each in zip(*parts, strict=True))
        whole = statistics.median(before + rest for before, _, rest in parts)
        compute = Compute(before, backward, rest - backward)
        return compute.slowed(whole / compute.seconds), watched.gradients()

    return turn


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


def reducing(world: int, sizes: Sequence[int], rounds: int) -> Callable[[], list[AllReduce]]:
    """Each turn all-reduces each size so many times; medians, while nothing else runs."""
    from torch import distributed

    distributed.init_process_group("gloo")
    return lambda: [_all_reduce(size, rounds) for size in sizes]


def _all_reduce(size: int, rounds: int) -> AllReduce:
    import torch
    from torch import distributed

    # As many buffers as a step touches in between, so that none is in the processor's cache.
    gradients, buckets = ([torch.ones(size // 4) for _ in range(4)] for _ in range(2))
    copies, walls, busy = [], [], []
    for number in range(4 + rounds):
        gradient, bucket = gradients[number % 4], buckets[number % 4]
        distributed.barrier()
        copies.append(_seconds(partial(torch.mul, gradient, 0.5, out=bucket)))
        used = time.process_time()
        walls.append(_seconds(partial(distributed.all_reduce, bucket)))
        busy.append(time.process_time() - used)
    return AllReduce(size, *(statistics.median(each[4:]) for each in (walls, busy, copies)))


def meeting(world: int) -> Callable[[], float]:
    """A turn, the only one, tells the seconds until all ranks are connected with each other."""
    from torch import distributed

    return lambda: _seconds(lambda: distributed.init_process_group("gloo"))


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began

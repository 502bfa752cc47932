"""What the benchmarks share: interleaved rounds, their medians as a table, the machine."""

import contextlib
import functools
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

from kfp_ddp.core import machine as limits

Clock = Callable[[], float]


def machine() -> str:
    """Processor, cores and memory of this machine in words."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            name = next(line.split(":")[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        pass
    memory = limits.memory() / 2**30
    return f"{name}, {limits.cpus():g} cores, {memory:.0f} GiB, {platform.system()}"


def measure(
    calls: Mapping[str, Callable[[], object]], rounds: int, clock: Clock = time.process_time
) -> dict[str, list[float]]:
    """Seconds of each call in each round; the calls take turns, after one turn to warm up.

    CPU time by default: it does not count what else the machine is busy with.
    """
    timed = {name: functools.partial(_seconds, call, clock) for name, call in calls.items()}
    return take_turns(timed, rounds)


def take_turns(calls: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each call returned in each round, after one turn to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            took = call()
            if number:
                seconds[name].append(took)
    return seconds


def _seconds(call: Callable[[], object], clock: Clock) -> float:
    began = clock()
    call()
    return clock() - began


@contextlib.contextmanager
def apart(
    make: Callable[..., Callable[[], object]], *arguments: Any, clock: Clock = time.process_time
) -> Iterator[Callable[[], float]]:
    """The seconds of `make(*arguments)()`, made once and run in a process of its own.

    Where peers share a process they share an allocator's settings and its free memory.
    """
    context = multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    process = context.Process(target=_serve, args=(child, clock, make, arguments))
    process.start()
    child.close()

    def ask() -> float:
        parent.send(True)
        took: float = parent.recv()
        return took

    try:
        yield ask
    finally:
        parent.close()
        process.join()


def _serve(
    pipe: Connection, clock: Clock, make: Callable[..., Callable[[], object]], arguments: Any
) -> None:
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        call = make(*arguments)
        with contextlib.suppress(EOFError):
            while pipe.recv():
                pipe.send(_seconds(call, clock))


def ratio(seconds: Mapping[str, list[float]], ours: str, peer: str) -> float:
    """The median over rounds of the peer's time divided by ours."""
    return statistics.median(
        theirs / mine for mine, theirs in zip(seconds[ours], seconds[peer], strict=True)
    )


def add_to_meters(seen: list[float], loss: Any, output: Any, target: Any) -> None:
    """Sum up loss, top 1 and top 5 as pytorch/examples and torchvision's references do each step.

    Args:
        seen: The three sums.
        loss: Of the batch, a tensor of one value.
        output: Logits [N, C].
        target: Class numbers [N].
    """
    _, predicted = output.topk(5, 1, True, True)
    correct = predicted.t().eq(target.view(1, -1).expand_as(predicted.t()))
    top1, top5 = (correct[:k].reshape(-1).float().sum(0) for k in (1, 5))
    for i, value in enumerate((loss, top1, top5)):
        seen[i] += value.item() * len(target)


def table(title: str, seconds: Mapping[str, list[float]], per: int, unit: str) -> None:
    """Print each call's median with its spread, in milliseconds for one of `per` units."""
    print(f"\n{title}")
    for name, values in seconds.items():
        low, middle, high = (
            1000 * value / per for value in (min(values), statistics.median(values), max(values))
        )
        print(f"  {name:44} {middle:9.3f} ms/{unit}  [{low:.3f} .. {high:.3f}]")

"""What of a larger job can be measured on a small machine: saves, reads, decoding, starts."""

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.scale_model import ranks
from benchmarks.scale_model.collective import Gradient
from benchmarks.scale_model.expected import Feed, Saved
from benchmarks.scale_model.sharing import Loopback, Machine, spread
from benchmarks.scale_model.starting import Start
from benchmarks.scale_model.syncing import Sync

LARGE = 25 * 2**20
"""Bytes of a whole bucket."""


@dataclass(frozen=True)
class Round:
    """The constants of the model, and what it is held against, of the same minute."""

    machine: Machine
    steps: dict[int, float]
    """Seconds of a step, by the number of ranks."""


def rounds_here(job: ranks.Job, counts: Sequence[int], rounds: int = 6) -> list[Round]:
    """Ranks that share this machine, their groups in turn: a machine is not always as fast."""
    cores = os.cpu_count() or 1
    apart = sorted({min(count, cores) for count in counts} - {1})
    with contextlib.ExitStack() as groups:

        def group(*given: Any) -> ranks.Group:
            return groups.enter_context(ranks.Group(*given))

        alone = group(1, False, ranks.profiling, job, 4)
        pair = group(2, True, ranks.reducing, (64, LARGE), 4)
        silent = {count: group(count, False, ranks.training, job, 4) for count in apart}
        joined = {
            count: group(count, True, ranks.training, job, 4 if count < 4 else 2)
            for count in counts
        }

        def turn() -> Round:
            [(compute, gradients)] = alone.turn()
            small, large = pair.turn()[0]
            steps = {count: each.turn() for count, each in silent.items()}
            busy = {count: _median(each) for count, each in steps.items()}
            machine = Machine(
                cores,
                compute,
                gradients,
                Loopback.of(small, large),
                busy,
                statistics.mean(spread(each) for each in steps.values()),
            )
            return Round(machine, {count: _median(each.turn()) for count, each in joined.items()})

        return [turn() for _ in range(rounds + 1)][1:]


def _median(steps: Sequence[Sequence[float]]) -> float:
    return statistics.mean(statistics.median(each) for each in steps)


def gradients_of(name: str, size: int = 224) -> list[Gradient]:
    """When the gradients of a network are ready: by the time that its layers take here."""
    import torch

    from kfp_ddp.training.model import build

    network = build(name, 1000)
    watched = ranks.Watched(network)
    images = torch.rand(2, 3, size, size)
    for _ in range(2):
        loss = network(images).sum()
        with watched.backward():
            torch.autograd.backward(loss)
    return watched.gradients()


def checkpoint_here(folder: Path) -> tuple[Saved, float, float]:
    """A save of ResNet-50 with momentum, its bytes, and the bytes a second of reading it."""
    import torch

    from kfp_ddp.training import checkpoint
    from kfp_ddp.training.manifest import step_dir
    from kfp_ddp.training.model import build

    network = build("resnet50", 1000)
    momentum = {name: torch.zeros_like(value) for name, value in network.named_parameters()}
    writer = checkpoint.Writer(folder, keep=2)
    stalls, written = [], []
    for number in range(1, 5):
        began = time.perf_counter()
        writer.save(number, {"model": network.state_dict(), "optimizer": momentum}, {})
        stalls.append(time.perf_counter() - began)
        writer.wait()
        written.append(time.perf_counter() - began)
    path = step_dir(folder, 4)
    size = sum(each.stat().st_size for each in path.iterdir())
    seconds = _seconds(lambda: checkpoint.verify(path).state())
    saved = Saved(statistics.median(stalls[1:]), statistics.median(written[1:]))
    return saved, size, size / seconds


def feed_here(root: Path, batches: int = 4) -> dict[str, Feed]:
    """Images a second of one core at 224 px, from JPEG files and from the decoded cache."""
    import torch

    from benchmarks.training import trainer_on

    torch.set_num_threads(1)
    feeds = {}
    for name, cached in (("JPEG", 0.0), ("decoded cache", 0.5)):
        trainer = trainer_on(root, "cifar_resnet8", 224, batch_size=32, cache_gb=cached)
        loaded = trainer.batches()
        next(loaded)
        began = time.process_time()
        for _ in islice(loaded, batches):
            pass
        feeds[name] = Feed(32 * batches / (time.process_time() - began))
    return feeds


def start_here(checkpoint_bytes: float, read: float) -> Start:
    """The imports of a rank, and its connections to others, here."""
    command = [sys.executable, "-c", "import kfp_ddp.training.trainer"]
    imports = min(_seconds(lambda: subprocess.run(command, check=True)) for _ in range(2))
    two, eight = _met(2), _met(8)
    shared = min(8, os.cpu_count() or 1)
    each = max(0.0, eight - two) * shared / (8 * 7 - 2)
    return Start(imports, each, checkpoint_bytes, read)


def sync_here() -> Sync | None:
    """What our sync computes for a file and for a byte; None where Go is not there."""
    from benchmarks import sync

    files, large, small_size, large_size = 4000, 6, 20e3, 50e6
    with contextlib.ExitStack() as stack:
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=base)))
        program = sync.build(folder)
        if program is None:
            return None

        def computed(bucket: str, to: str, **sizes: int) -> float:
            with sync.serve(program, folder, **sizes) as server:
                target = folder / to
                target.mkdir(exist_ok=True)
                command = sync.ours(bucket, target)
                return sync.measure(command, server.environment(server.plain)).cpu

        start = computed("small", "one", small=1)
        byte = (computed("large", "large", large=large) - start) / (large * large_size)
        file = (computed("small", "many", small=files) - start) / files - small_size * byte
        unchanged = (computed("small", "many", small=files) - start) / files
    return Sync(start, max(file, 0.0), byte, max(unchanged, 0.0))


def _met(count: int) -> float:
    with ranks.Group(count, True, ranks.meeting) as group:
        seconds: list[float] = group.turn()
    return statistics.median(seconds)


def checkpoint_and_start() -> tuple[Saved, Start]:
    """Both, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        saved, size, read = checkpoint_here(Path(folder))
    return saved, start_here(size, read)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began

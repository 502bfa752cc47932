"""What of a larger job can be measured on a small machine: saves, reads, decoding, starts."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from benchmarks.scale_model import ranks
from benchmarks.scale_model.collective import Gradient
from benchmarks.scale_model.expected import Feed, Saved
from benchmarks.scale_model.sharing import Loopback, Machine, spread
from benchmarks.scale_model.starting import Start

STEPS = 12


def machine_for(job: ranks.Job, counts: Sequence[int]) -> Machine:
    """The constants of ranks that share this machine: no more than two of them ever talk here."""
    cores = os.cpu_count() or 1
    alone, gradients = ranks.profile_of(job, STEPS)
    slowed, jitter = {}, 0.0
    for count in sorted({min(count, cores) for count in counts} - {1}):
        steps = ranks.steps_of(job, count, STEPS, joined=False)
        slowed[count] = _median(steps) / alone.seconds
        jitter = spread(steps)
    small, *_, large = ranks.all_reduces((64, 25 * 2**20))
    return Machine(cores, alone, gradients, Loopback.of(small, large), slowed, jitter)


def steps_here(job: ranks.Job, count: int) -> float:
    """Seconds of a step of `count` ranks: what `machine_for` knows nothing of."""
    return _median(ranks.steps_of(job, count, max(8, STEPS // count)))


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
    two, eight = ranks.meeting(2), ranks.meeting(8)
    shared = min(8, os.cpu_count() or 1)
    each = max(0.0, eight - two) * shared / (8 * 7 - 2)
    return Start(imports, each, checkpoint_bytes, read)


def checkpoint_and_start() -> tuple[Saved, Start]:
    """Both, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        saved, size, read = checkpoint_here(Path(folder))
    return saved, start_here(size, read)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began

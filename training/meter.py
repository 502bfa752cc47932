"""Speed of a run between two lines of metrics: images, waiting for data, FLOPs, memory, ranks."""

import contextlib
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch

from kfp_ddp.base.run_folder import RunFolder
from kfp_ddp.training import model
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.distributed import World

T = TypeVar("T")

PEAK_TFLOPS = {
    "T4": 65.0,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A100": 312.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "B200": 2250.0,
}
"""Dense half-precision peak of a GPU, from NVIDIA's data sheets."""
STRAGGLES = 0.2
"""The share of a step that others must wait for a rank, to call it one that straggles."""


class Meter:
    """Measures from one report to the next; pauses (evaluation, saving) are left out."""

    def __init__(self, config: TrainConfig, world: World, num_classes: int) -> None:
        self.config, self.world = config, world
        name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
        self.device = name or "CPU"
        """What the first rank computes on."""
        self.peak = config.peak_tflops or peak_of(name)
        self.flops = training_flops(config, num_classes) if self.peak else 0.0
        self.restart(0)

    def restart(self, step: int) -> None:
        """Begin to measure at `step`."""
        self._began, self._step, self._waited = time.monotonic(), step, 0.0
        self._marks: list[tuple[Any, Any]] = []

    def waits(self, batches: Iterator[T]) -> Iterator[T]:
        """`batches`, with the time it takes to get one counted as waiting for data."""
        while True:
            began = time.monotonic()
            batch = next(batches, None)
            self._waited += time.monotonic() - began
            if batch is None:
                return
            yield batch

    def begin_step(self) -> None:
        """A step begins, data included."""
        self._step_began = self._mark()

    def join_others(self) -> None:
        """From here on the step waits for other ranks: so far its time is this rank's own."""
        self._marks.append((self._step_began, self._mark()))

    def _mark(self) -> Any:
        """The time now; on a GPU when it gets here, which nobody waits for."""
        if self.world.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def report(self, step: int) -> dict[str, float]:
        """Figures since the last report, by name; starts the next one."""
        seconds = time.monotonic() - self._began
        rate = (step - self._step) * self.config.batch_size / seconds
        figures = {
            "images_per_s": rate,
            "images_per_s_per_device": rate / self.world.size,
            "step_seconds": seconds / max(1, step - self._step),
            "data_wait_fraction": self._waited / seconds,
            "own_seconds": sum(_between(*marks) for marks in self._marks)
            / max(1, len(self._marks)),
        }
        if self.peak:
            figures["mfu"] = self.flops * rate / self.world.size / (self.peak * 1e12)
        if self.world.device.type == "cuda":
            figures["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
            figures["memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
        self.restart(step)
        return figures


def _between(before: Any, after: Any) -> float:
    """Seconds; a GPU must have got to `after`, as it has once its loss is known."""
    if isinstance(after, torch.cuda.Event):
        return float(before.elapsed_time(after)) / 1e3
    return float(after - before)


class Pace:
    """The ranks' own times of a step, and the slowest of them, which the others wait for."""

    def __init__(self, seconds: Sequence[float], step_seconds: float) -> None:
        self.seconds = [round(value, 6) for value in seconds]
        self.slowest = max(range(len(seconds)), key=lambda rank: seconds[rank])
        median = statistics.median_low(seconds)
        self.ratio = seconds[self.slowest] / median if median else 1.0
        """Of the slowest to the median."""
        late = seconds[self.slowest] - median > STRAGGLES * step_seconds
        self.straggler = (
            f"; rank {self.slowest} takes {self.ratio:.1f} times as long as the others"
            if late
            else ""
        )
        """Names the slowest where it makes the others wait; else empty."""


def profiler_of(config: TrainConfig) -> contextlib.AbstractContextManager[Any]:
    """A trace of `profile_steps` steps after ten, where it is asked for; else None."""
    if not config.profile_steps:
        return contextlib.nullcontext()
    from torch import profiler

    return profiler.profile(
        schedule=profiler.schedule(wait=8, warmup=2, active=config.profile_steps, repeat=1),
        on_trace_ready=profiler.tensorboard_trace_handler(
            str(RunFolder(config.output_dir).profile)
        ),
    )


def peak_of(name: str) -> float:
    """`PEAK_TFLOPS` of the GPU that torch calls so; 0 if it is not known."""
    return next((p for known, p in PEAK_TFLOPS.items() if re.search(rf"\b{known}\b", name)), 0.0)


def training_flops(config: TrainConfig, num_classes: int) -> float:
    """FLOPs of one training image: forward and backward at the final size, counted by torch.

    0 where it cannot be counted.
    """
    from torch.utils.flop_counter import FlopCounterMode

    size = config.train_image_size or config.image_size
    network = model.of(config, num_classes).to("meta")
    image = torch.empty(2, 3, size, size, device="meta")
    try:
        with FlopCounterMode(display=False) as counter:
            torch.autograd.backward(network(image).sum())
    except (RuntimeError, NotImplementedError):  # it looks at values, which are not there
        return 0.0
    return float(counter.get_total_flops()) / 2

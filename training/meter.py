"""Seconds of each phase of a step, and the speed of a run between two lines of metrics."""

import re
import time
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kfp_ddp.training import model
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.distributed import World
from kfp_ddp.training.time_spent import PHASES, TOLD, Phase


class Timeline:
    """Seconds in each phase by the processor's clock; a step costs it a microsecond or two."""

    def __init__(self, began: float | None = None) -> None:
        """Begin with the phase `start`, which has lasted since `perf_counter` told `began`."""
        now = perf_counter()
        self._seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._seconds["start"] = now - (now if began is None else began)
        self._phase: Phase = "start"
        self._since: Any = now

    def enter(self, phase: Phase) -> None:
        """Begin with a phase, which ends the one before."""
        now = perf_counter()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def read(self) -> dict[Phase, float]:
        """Seconds in each phase so far."""
        self.enter(self._phase)
        return dict(self._seconds)


class GpuTimeline(Timeline):
    """The same as a GPU gets to it: what the processor does meanwhile costs nothing there.

    Each phase begins with an event in the GPU's own queue. Nobody waits for them: they are read
    when they are past, at the latest where a report waits for the GPU anyway.
    """

    def __init__(self, began: float | None = None) -> None:
        super().__init__(began)
        self._marks: deque[tuple[Phase, Any]] = deque()
        self._free: list[Any] = []
        self.enter("start")

    def enter(self, phase: Phase) -> None:
        """Begin with a phase where the GPU will have done all that was asked of it so far."""
        self._phase = phase
        event = self._free.pop() if self._free else _event()
        event.record()
        self._marks.append((phase, event))
        while len(self._marks) > 1 and self._marks[1][1].query():
            self._take()

    def read(self) -> dict[Phase, float]:
        """Seconds in each phase so far; waits for the GPU."""
        self.enter(self._phase)
        self._marks[-1][1].synchronize()
        while len(self._marks) > 1:
            self._take()
        return dict(self._seconds)

    def _take(self) -> None:
        phase, before = self._marks.popleft()
        self._seconds[phase] += before.elapsed_time(self._marks[0][1]) / 1e3
        self._free.append(before)


def timeline_on(device: torch.device, began: float | None = None) -> Timeline:
    """The timeline of a rank that computes on `device`."""
    return GpuTimeline(began) if device.type == "cuda" else Timeline(began)


def when_own_gradients_are_there(loss: Tensor, then: Callable[[], None]) -> None:
    """Call `then` in the next backward pass of `loss`, before it waits for other ranks' gradients.

    The engine runs callbacks in the order in which they were queued when all gradients are
    computed; that in which DDP and FSDP wait for the exchange is queued later than this one.
    """
    engine = torch.autograd.Variable._execution_engine
    loss.register_hook(lambda _: engine.queue_callback(then))  # type: ignore[no-untyped-call]


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


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


class Meter:
    """Measures from one report to the next; pauses (evaluation, saving) are left out."""

    def __init__(self, config: TrainConfig, world: World, num_classes: int) -> None:
        self.config, self.world = config, world
        name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
        self.device = name or "CPU"
        """What the first rank computes on."""
        self.peak = config.peak_tflops or peak_of(name)
        self.flops = training_flops(config, num_classes) if self.peak else 0.0
        self.timeline = timeline_on(world.device)
        self.restart(0)

    def begin(self, step: int, began: float) -> None:
        """Begin with the run, after `step` steps; its start has lasted since `began`.

        That is a time on `perf_counter`'s clock.
        """
        self.timeline = timeline_on(self.world.device, began)
        self.timeline.enter("other")
        self.restart(step)

    def restart(self, step: int) -> None:
        """Begin to measure at `step`."""
        self._began, self._step = time.monotonic(), step
        self._before = self.timeline.read()

    def report(self, step: int) -> dict[str, float]:
        """Figures since the last report, by name; starts the next one."""
        seconds, steps = time.monotonic() - self._began, max(1, step - self._step)
        rate = (step - self._step) * self.config.batch_size / seconds
        before = self._before
        self.restart(step)
        spent = {phase: self._before[phase] - before[phase] for phase in TOLD}
        figures = {
            "images_per_s": rate,
            "images_per_s_per_device": rate / self.world.size,
            "step_seconds": seconds / steps,
            **{f"{phase}_seconds": took / steps for phase, took in spent.items()},
        }
        if self.peak:
            figures["mfu"] = self.mfu(rate)
        if self.world.device.type == "cuda":
            figures["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
            figures["memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
        return figures

    def mfu(self, rate: float) -> float:
        """The share of its devices' peak that a run of `rate` images a second needs."""
        return self.flops * rate / self.world.size / (self.peak * 1e12)


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

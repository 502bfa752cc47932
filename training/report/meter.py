"""Seconds of each phase of a step, and the speed of a run between two lines of metrics."""

import re
import time
import tomllib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kfp_ddp.training.distributed import World
from kfp_ddp.training.model import networks
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.time_spent import PHASES, REPORTED, Phase


class Timeline:
    """Seconds in each phase by the CPU's clock; it costs a step one or two microseconds."""

    def __init__(self, began: float | None = None) -> None:
        """Start in the phase `start`, which began at `began` on the clock of `perf_counter`."""
        now = perf_counter()
        self._seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._seconds["start"] = now - (now if began is None else began)
        self._phase: Phase = "start"
        self._since: Any = now

    def enter(self, phase: Phase) -> None:
        """Enter a phase; this ends the previous phase."""
        now = perf_counter()
        self._seconds[self._phase] += now - self._since
        self._phase = phase
        self._since = now

    def read(self) -> dict[Phase, float]:
        """Return the seconds in each phase so far."""
        self.enter(self._phase)
        return dict(self._seconds)


class GpuTimeline(Timeline):
    """Seconds in each phase by the GPU's clock: events in its queue, read once it passed them."""

    def __init__(self, began: float | None = None) -> None:
        super().__init__(began)
        self._marks: deque[tuple[Phase, Any]] = deque()
        self._free: list[Any] = []
        self.enter("start")

    def enter(self, phase: Phase) -> None:
        """Enter a phase at the point where the GPU has completed all work queued so far."""
        self._phase = phase
        event: Any = self._free.pop() if self._free else None
        event = event or torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append((phase, event))
        while len(self._marks) > 1 and self._marks[1][1].query():
            self._take()

    def read(self) -> dict[Phase, float]:
        """Return the seconds in each phase so far; waits for the GPU."""
        self.enter(self._phase)
        self._marks[-1][1].synchronize()
        while len(self._marks) > 1:
            self._take()
        return dict(self._seconds)

    def _take(self) -> None:
        phase, before = self._marks.popleft()
        self._seconds[phase] += before.elapsed_time(self._marks[0][1]) / 1e3
        self._free.append(before)


def before_exchange(loss: Tensor, then: Callable[[], None]) -> None:
    """Call `then` in the backward pass of `loss`, before DDP waits for other ranks."""
    # Callbacks run in queue order, and the one in which DDP waits is queued after this one.
    engine = torch.autograd.Variable._execution_engine
    loss.register_hook(lambda _: engine.queue_callback(then))  # type: ignore[no-untyped-call]


_PEAKS = Path(__file__).with_name("peak_tflops.toml")
PEAK_TFLOPS: dict[str, float] = tomllib.loads(_PEAKS.read_text(encoding="utf-8"))
"""Dense half-precision peak of a GPU with sums in float32, from its maker's data sheet."""


class Meter:
    """Measures from one report to the next; evaluations are left out."""

    def __init__(self, config: TrainConfig, world: World, num_classes: int) -> None:
        self.config = config
        self.world = world
        name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
        self.device = name or "CPU"
        """Name of the first rank's device."""
        self.peak = config.peak_tflops or peak_of(name)
        self.flops = training_flops(config, num_classes) if self.peak else 0.0
        self.begin(0)

    def begin(self, step: int, began: float | None = None) -> None:
        """Start with the run, after `step` steps; `began` is its start by `perf_counter`."""
        kind = GpuTimeline if self.world.device.type == "cuda" else Timeline
        self.timeline = kind(began)
        self.timeline.enter("other")
        self.restart(step)

    def restart(self, step: int) -> None:
        """Start to measure at `step`."""
        self._began = time.monotonic()
        self._step = step
        self._before = self.timeline.read()

    def report(self, step: int) -> dict[str, float]:
        """Return the figures since the last report, by name; start the next one."""
        seconds = time.monotonic() - self._began
        steps = max(1, step - self._step)
        rate = (step - self._step) * self.config.batch_size / seconds
        before = self._before
        self.restart(step)
        spent = {phase: self._before[phase] - before[phase] for phase in REPORTED}
        figures = {
            "images_per_s": rate,
            "images_per_s_per_device": rate / self.world.size,
            "step_seconds": seconds / steps,
            **{f"{phase}_seconds": took / steps for phase, took in spent.items()},
        }
        if self.flops:
            figures["mfu"] = self.mfu(rate)
        if self.world.device.type == "cuda":
            figures["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
            figures["memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
        return figures

    def mfu(self, rate: float) -> float:
        """Return the utilisation of the devices' peak by a run of `rate` images a second."""
        return self.flops * rate / self.world.size / (self.peak * 1e12)


_MAKER = re.compile(r"NVIDIA|AMD|Instinct|Tesla|GeForce|VF")
_FORM = re.compile(r"SXM\d*|PCIE|OAM|\d+GB?|HBM\d\w*", re.IGNORECASE)


def peak_of(name: str) -> float:
    """Return `PEAK_TFLOPS` of the GPU with this name; 0 if unknown, as for a part of it by MIG."""
    words = [word for word in re.split("[ -]", name) if not _MAKER.fullmatch(word)]
    product = [word for word in words if not _FORM.fullmatch(word)]
    return PEAK_TFLOPS.get(" ".join(words)) or PEAK_TFLOPS.get(" ".join(product), 0.0)


def training_flops(config: TrainConfig, num_classes: int) -> float:
    """Return the FLOPs of a training image, forward and backward; 0 if torch cannot count them."""
    from torch.utils.flop_counter import FlopCounterMode

    size = config.train_image_size or config.image_size
    network = networks.build_for(config, num_classes).to("meta")
    image = torch.empty(2, 3, size, size, device="meta")
    try:
        with FlopCounterMode(display=False) as counter:
            torch.autograd.backward(network(image).sum())
    except Exception:  # noqa: BLE001  a network may need values, which meta tensors do not have
        return 0.0
    return float(counter.get_total_flops()) / 2

"""What a rank does now, and how long it has done what: all of its time is in one phase."""

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kfp_ddp.training.time_spent import PHASES, Phase


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

"""Traces of a rank's steps by torch.profiler, by settings or on request while it runs."""

import os
from collections.abc import Callable
from typing import Any, Self

from kfp_ddp.core.run_folder import RunFolder, TraceRequest
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.distributed import World

_WAIT, _WARM = 8, 2
"""Steps before a trace by settings: first without the profiler, then its warm-up."""


class Traces:
    """The traces of this rank, by settings or a request: a file that a thread checks by `look`."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self._folder, self._rank = RunFolder(config.output_dir), world.rank
        self._steps = config.profile_steps if world.first else 0
        self._request: TraceRequest | None = None
        self._known = ""
        """Id of the newest request that was read."""
        self._profiler: Any = None
        self._complete = False

    def __enter__(self) -> Self:
        if self._steps:
            from torch.profiler import tensorboard_trace_handler

            into = tensorboard_trace_handler(str(self._folder.profile))
            self._begin(_WAIT, _WARM, self._steps, into)
        return self

    def __exit__(self, *_: object) -> None:
        if self._profiler is not None:
            self._profiler.stop()

    def look(self) -> None:
        """Check for a request for a trace of this rank that is not done yet."""
        request = TraceRequest.read(self._folder)
        if request is None or request.id == self._known:
            return
        self._known = request.id
        done = (request.matches(path.name) for path in self._folder.traces.glob("*"))
        if request.rank == self._rank and not any(done):
            self._request = request

    def step(self, step: int) -> None:
        """Record that step `step` (from 1) is done."""
        if self._profiler is not None:
            self._profiler.step()
            if self._complete:
                self._profiler.stop()
                self._profiler, self._complete = None, False
        elif self._request is not None:
            request, self._request = self._request, None
            first = step + 2  # the step before starts the profiler
            last = first + request.steps - 1
            print(f"rank {self._rank} traces the steps {first} to {last}", flush=True)
            self._begin(0, 1, request.steps, lambda profile: self._keep(profile, request, first))

    def _begin(self, wait: int, warm: int, steps: int, keep: Callable[[Any], None]) -> None:
        from torch import profiler

        def ready(profile: Any) -> None:
            keep(profile)
            self._complete = True

        plan = profiler.schedule(wait=wait, warmup=warm, active=steps, repeat=1)
        self._profiler = profiler.profile(schedule=plan, on_trace_ready=ready)
        self._profiler.start()

    def _keep(self, profile: Any, request: TraceRequest, first: int) -> None:
        """Write the trace; an error is only a warning."""
        path = self._folder.traces / request.trace_name(first)
        aside = path.with_name(f".{path.name}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(aside))
            os.replace(aside, path)
        except (OSError, RuntimeError) as error:
            print(f"warning: the trace {path} was not written: {error}", flush=True)
            return
        print(f"rank {self._rank} wrote {path}", flush=True)

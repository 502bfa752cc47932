"""Traces of a rank's steps by torch.profiler: as the settings ask, or as is asked while it runs."""

import os
from collections.abc import Callable
from typing import Any, Self

from kfp_ddp.core.run_folder import RunFolder, TraceRequest
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.distributed import World

_WAIT, _WARM = 8, 2
"""Steps before a trace that the settings ask for, of which the last are profiled in vain."""


class Traces:
    """What this rank traces; a step without a trace costs it the look at two attributes.

    A request lies in the run's folder. A thread looks for it by `look`, and the loop begins after
    the step that it is in. The other ranks wait meanwhile, as traced steps take longer.
    """

    def __init__(self, config: TrainConfig, world: World) -> None:
        self._folder, self._rank = RunFolder(config.output_dir), world.rank
        self._steps = config.profile_steps if world.first else 0
        self._asked: TraceRequest | None = None
        self._known = ""
        """Id of the newest request that was looked at."""
        self._profiler: Any = None
        self._over = False

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
        """See whether a trace of this rank is asked for, which it has not made."""
        found = TraceRequest.read(self._folder)
        if found is None or found.id == self._known:
            return
        self._known = found.id
        there = self._folder.traces.glob("*") if found.rank == self._rank else ()
        if found.rank == self._rank and not any(found.matches(path.name) for path in there):
            self._asked = found

    def step(self, step: int) -> None:
        """Note that step `step` (from 1) is done."""
        if self._profiler is not None:
            self._profiler.step()
            if self._over:
                self._profiler.stop()
                self._profiler, self._over = None, False
        elif self._asked is not None:
            asked, self._asked = self._asked, None
            first = step + 2  # the one before sets the profiler up
            last = first + asked.steps - 1
            print(f"rank {self._rank} traces the steps {first} to {last}", flush=True)
            self._begin(0, 1, asked.steps, lambda made: self._keep(made, asked, first))

    def _begin(self, wait: int, warm: int, steps: int, keep: Callable[[Any], None]) -> None:
        from torch import profiler

        def ready(made: Any) -> None:
            keep(made)
            self._over = True

        plan = profiler.schedule(wait=wait, warmup=warm, active=steps, repeat=1)
        self._profiler = profiler.profile(schedule=plan, on_trace_ready=ready)
        self._profiler.start()

    def _keep(self, made: Any, asked: TraceRequest, first: int) -> None:
        """Write the trace; a folder that takes nothing costs the run nothing."""
        path = self._folder.traces / asked.trace_name(first)
        aside = path.with_name(f".{path.name}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            made.export_chrome_trace(str(aside))
            os.replace(aside, path)
        except (OSError, RuntimeError) as error:
            print(f"warning: the trace {path} was not written: {error}", flush=True)
            return
        print(f"rank {self._rank} wrote {path}", flush=True)

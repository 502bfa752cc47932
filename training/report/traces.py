"""A trace of some steps of rank 0 by torch.profiler."""

import contextlib
from collections.abc import Callable, Iterator

from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.training.distributed import World
from kfp_ddp.training.spec.config import TrainConfig

_WAIT = 8
"""Steps before the profiler starts."""
_WARM = 2
"""Steps that the profiler does not keep."""


@contextlib.contextmanager
def trace(config: TrainConfig, world: World) -> Iterator[Callable[[], None]]:
    """Yield what is called after each step; it writes the trace that `profile_steps` asks for."""
    if not config.profile_steps or not world.first:
        yield lambda: None
        return
    from torch import profiler

    plan = profiler.schedule(wait=_WAIT, warmup=_WARM, active=config.profile_steps, repeat=1)
    keep = profiler.tensorboard_trace_handler(str(RunFolder(config.output_dir).profile))
    with profiler.profile(schedule=plan, on_trace_ready=keep) as profile:
        yield profile.step

"""One rank: read the flags, join the others, train, and report how it ended."""

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kfp_ddp.core.errors import (
    FULL,
    PREEMPTED,
    JobError,
    KfpDdpError,
    PeerLostError,
    StorageError,
    full,
)
from kfp_ddp.core.failure import Failure, full_memory, lost_peer, write_record
from kfp_ddp.core.log import log
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.training.spec.config import TrainConfig, parse
from kfp_ddp.training.watch import Heartbeat, Parent, Progress, end_for_good, remove_stale

if TYPE_CHECKING:
    from kfp_ddp.training.distributed import RankConfig, Stop

STALE = "the heartbeat is stale"
NO_MEMORY = (
    "Set micro_batch_size=auto, or halve its number: gradients are accumulated, so batch_size and "
    "the mathematics stay as they are"
)


C = TypeVar("C", bound="RankConfig")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; return 0, 143 when preempted, or the exit code of a KfpDdpError."""
    parent = Parent()

    def work(config: TrainConfig) -> bool:
        if config.script:
            from kfp_ddp.training import own_script

            return own_script.run(config)
        return run(config, parent)

    return run_and_report(lambda: parse(argv, prog="python -m kfp_ddp.training"), work)


def run_and_report(read: Callable[[], C], work: Callable[[C], bool]) -> int:
    """Call `work` with the settings of `read`; record a failure, and return the exit code."""
    try:
        config = read()
        done = work(config)
        return 0 if done else PREEMPTED
    except KfpDdpError as error:
        return _end(error)
    except Exception as error:  # the last resort: one line, and the kind that decides on retries
        if isinstance(error, OSError) and error.errno in FULL:
            return _end(StorageError(full(error, config.output_dir)))
        if line := full_memory(error):
            return _end(JobError(f"{line}. {NO_MEMORY}"))
        _record_unexpected(error)
        raise


def _record_unexpected(error: Exception) -> None:
    """Record an error of torch or of a user's code; a lost peer is the fault of another rank."""
    first = str(error).strip().partition("\n")[0]
    line = f"{type(error).__name__}: {first}"
    lost = isinstance(error, RuntimeError) and lost_peer(str(error))
    problem = PeerLostError(line) if lost else JobError(line)
    write_record(_failure(problem), final=False)


def run(config: TrainConfig, parent: Parent | None = None) -> bool:
    """Train; return False when preempted. Raise a KfpDdpError if that is not possible."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    import torch

    from kfp_ddp.training import distributed
    from kfp_ddp.training.prepare import prepare
    from kfp_ddp.training.trainer import Trainer

    torch.use_deterministic_algorithms(config.deterministic)
    torch.backends.cudnn.benchmark = not config.deterministic
    with distributed.joined(config) as world:
        where = f"{socket.gethostname()}, {world.device}"
        log.info(f"rank {world.rank} of {world.size} on {where}")
        with Progress(RunFolder(config.output_dir).ranks, world.rank) as progress:
            config, train, val = prepare(config, world)
            if world.first:
                remove_stale(RunFolder(config.output_dir).ranks, world.size)
            loop = Trainer(config, world, train, val, progress)
            _stop_on_request(loop.stop, config, parent)
            done = loop.fit()
        if not done and loop.stop.reason == STALE:
            write_record(Failure(PREEMPTED, world.rank, STALE, retryable=True), final=True)
            end_for_good()
        removes_cache = done and world.local_rank == 0
        if removes_cache and train.cache is not None:
            train.cache.remove()
    return done


def _stop_on_request(stop: "Stop", config: TrainConfig, parent: Parent | None) -> None:
    """Stop in order on a signal, without the launcher, or without its heartbeat."""
    stop.on_signals()
    if parent is not None:
        parent.on_gone = lambda: stop.ask("the launcher is gone")
    if config.stop_when_stale and stop.world.first:
        heartbeat = Path(config.stop_when_stale)
        Heartbeat(heartbeat, config.stale_seconds, lambda: stop.ask(STALE))


def _end(error: KfpDdpError) -> int:
    """Report the error, prevent restarts if they cannot help, and return the exit code."""
    failure = _failure(error)
    write_record(failure, final=True)
    with contextlib.suppress(OSError):  # the log may be on the full volume
        print(f"error: {error}", file=sys.stderr, flush=True)
    if not failure.retryable:
        end_for_good()
    return failure.exit_code


def _failure(error: KfpDdpError) -> Failure:
    """Create the record of an error; a consequence of another rank's error has its exit code."""
    lost = isinstance(error, PeerLostError)
    cause = error
    if lost and isinstance(error.__cause__, KfpDdpError):
        cause = error.__cause__
    rank = int(os.environ.get("RANK", "0"))
    return Failure(cause.exit_code, rank, str(error), cause.retryable, consequence=lost)

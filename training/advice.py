"""What would make a run faster, from what it spent its time on; in words. Pure."""

import contextlib
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.time_spent import TimeSpent, percent

WAITS, SAVES, EVALUATES, STARTS = 0.05, 0.05, 0.2, 0.2
"""Shares of the time that are worth a word."""
NETWORK = 0.1
LONG = 60.0
"""Seconds; a shorter run is mostly what each run does once."""
_CGROUP = Path("/sys/fs/cgroup/cpu.max")


class Setting(NamedTuple):
    """Where a run runs, as far as advice depends on it."""

    ranks: Sequence[str]
    """The node of each rank."""
    cpus: float
    """CPUs for each rank."""
    decoded: int
    """Bytes of all its images, decoded; 0 where they are kept so already."""
    room: int
    """Bytes that are free where they would be kept."""


def advice(spent: TimeSpent, config: TrainConfig, here: Setting) -> list[str]:
    """A line for each thing that took more than it should, the largest first."""
    found: list[tuple[float, str]] = []

    def tell(seconds: float, least: float, line: str) -> None:
        share = spent.share(seconds)
        if share >= least:
            found.append((share, f"{percent(share)} of the time {line}"))

    tell(spent.mean["data"], WAITS, f"waited for data: {_against_waiting(config, here)}")
    late = _slow_rank(spent, here)
    if late:
        found.append((spent.share(spent.for_the_slowest), late))
    tell(
        min(spent.of("communication")),
        NETWORK,
        "waited for the network: a larger batch_size, or a faster network "
        "(kfp-ddp netcheck measures it)",
    )
    if spent.total > LONG:
        _tell_of_pauses(spent, config, tell)
    return [line for _, line in sorted(found, key=lambda each: -each[0])]


def _tell_of_pauses(
    spent: TimeSpent, config: TrainConfig, tell: Callable[[float, float, str], None]
) -> None:
    tell(spent.mean["checkpoint"], SAVES, f"saved checkpoints: {_less_often(config)}")
    every = config.eval_epochs
    tell(spent.mean["evaluation"], EVALUATES, f"evaluated: eval_epochs={every} -> {2 * every}")
    less = f"verify_images={config.verify_images} -> 0, or " if config.verify_images else ""
    start = f"was the start, before the first step: {less}a longer run"
    tell(spent.mean["start"], STARTS, start)


def _against_waiting(config: TrainConfig, here: Setting) -> str:
    """More processes that load where there are CPUs for them, or a cache where there is room."""
    found = []
    cpus = int(here.cpus)
    if config.workers < cpus:
        found.append(f"workers={config.workers} -> {min(cpus, max(2, 2 * config.workers))}")
    if here.decoded and 1.1 * here.decoded < here.room:
        found.append(f"cache_gb={math.ceil(here.decoded / 1e9)}")
    size = config.train_image_size or config.image_size
    lack = f"more CPUs than {here.cpus:g} for a rank, or images stored at image_size={size}"
    return ", or ".join(found) or lack


def _slow_rank(spent: TimeSpent, here: Setting) -> str:
    pace = spent.pace
    if not pace.late:
        return ""
    waits = percent(spent.share(spent.for_the_slowest))
    data = pace.phase == "data"
    where = "its loaders and disk" if data else "its node (temperature, another tenant)"
    return (
        f"rank {pace.slowest} on {here.ranks[pace.slowest]} {pace.slow}, and they wait for it "
        f"{waits} of the time: look at {where}, or trace it (kfp-ddp trace --rank {pace.slowest})"
    )


def _less_often(config: TrainConfig) -> str:
    for name in ("checkpoint_steps", "checkpoint_epochs", "checkpoint_minutes"):
        if every := getattr(config, name):
            return f"{name}={every:g} -> {2 * every:g}"
    return "a faster volume"


def cpus_of_a_rank(local_ranks: int) -> float:
    """CPUs that this process may use, shared with the other ranks of its machine or pod.

    A pod's limit stands in cgroup v2's cpu.max: microseconds of CPU in each period.
    """
    cpus = float(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)
    with contextlib.suppress(OSError, ValueError):  # no limit is "max"
        quota, period = _CGROUP.read_text().split()
        cpus = min(cpus, int(quota) / int(period))
    return cpus / local_ranks


def room_for_a_cache(config: TrainConfig) -> int:
    """Bytes that are free where decoded images are kept; 0 where nobody can tell."""
    try:
        return shutil.disk_usage(config.cache_dir or tempfile.gettempdir()).free
    except OSError:
        return 0

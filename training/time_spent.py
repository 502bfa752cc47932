"""Where the time of the ranks went, and which settings would make a run faster; free of torch."""

import contextlib
import math
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from kfp_ddp.training.config import TrainConfig

Phase = Literal[
    "start",
    "data",
    "forward",
    "backward",
    "communication",
    "optimizer",
    "checkpoint",
    "evaluation",
    "other",
]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""`communication` is what of it the backward pass does not hide: from the end of a rank's own
gradients to the end of their exchange, waiting for slower ranks included. `other` is reports, the
agreement to stop, and traces."""
OWN: tuple[Phase, ...] = ("data", "forward", "backward")
"""What a rank does before it waits for the others in a step."""
STEP: tuple[Phase, ...] = (*OWN, "communication", "optimizer", "other")
TOLD: tuple[Phase, ...] = (*STEP, "checkpoint")
"""What may fall between two lines of metrics."""
STRAGGLES = 0.2
"""The share of a step that others must wait for a rank, to call it one that straggles."""
_LEAST = 0.005
"""The smallest share that is told."""


def percent(share: float) -> str:
    """A share in words, such as 12 %."""
    return f"{share:.0%}".replace("%", " %")


class Pace:
    """The ranks' own times of a step, and the slowest of them, which the others wait for."""

    def __init__(self, rows: Sequence[Sequence[float]], step_seconds: float) -> None:
        """Compare the ranks.

        Args:
            rows: Of each rank, its seconds in each phase of `OWN`.
            step_seconds: Of a whole step.
        """
        seconds = [sum(row) for row in rows]
        self.seconds = [round(value, 6) for value in seconds]
        self.slowest = max(range(len(seconds)), key=lambda rank: seconds[rank])
        median = statistics.median_low(seconds)
        self.ratio = seconds[self.slowest] / median if median else 1.0
        """Of the slowest to the median."""
        self.phase = _slow_at(rows, self.slowest)
        """What the slowest takes longer for, most of all."""
        self.late = seconds[self.slowest] - median > STRAGGLES * step_seconds
        """Whether it makes the others wait."""

    @property
    def slow(self) -> str:
        """How slow the slowest is."""
        return f"takes {self.ratio:.1f} times as long as the others, in {self.phase}"

    @property
    def straggler(self) -> str:
        """Names the slowest where it makes the others wait; else empty."""
        return f"; rank {self.slowest} {self.slow}" if self.late else ""


def _slow_at(rows: Sequence[Sequence[float]], rank: int) -> Phase:
    """What the rank takes longer for than the others do."""
    medians = [statistics.median_low(column) for column in zip(*rows, strict=True)]
    more = [value - median for value, median in zip(rows[rank], medians, strict=True)]
    return OWN[max(range(len(OWN)), key=more.__getitem__)]


class TimeSpent:
    """Seconds of each rank in each phase, in the order of `PHASES`."""

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        self.rows = rows
        self.mean: dict[Phase, float] = {
            phase: statistics.fmean(column)
            for phase, column in zip(PHASES, zip(*rows, strict=True), strict=True)
        }
        """Over the ranks."""
        self.total = sum(self.mean.values())
        self.stepping = sum(self.mean[phase] for phase in STEP)
        """Seconds in steps, without the start, checkpoints and evaluations."""
        own = [[each[PHASES.index(phase)] for phase in OWN] for each in rows]
        self.pace = Pace(own, self.stepping)

    def of(self, phase: Phase) -> list[float]:
        """Seconds of each rank in a phase."""
        return [each[PHASES.index(phase)] for each in self.rows]

    @property
    def for_the_slowest(self) -> float:
        """Seconds that a rank waited, on the average, for ranks slower than itself.

        The exchange itself takes no longer than the rank that is waited for sees it take.
        """
        return self.mean["communication"] - min(self.of("communication"))

    def share(self, seconds: float) -> float:
        """Of all the time."""
        return seconds / self.total if self.total else 0.0

    def line(self) -> str:
        """The shares of the phases, the largest first."""
        ranks = f" on {len(self.rows)} ranks" if len(self.rows) > 1 else ""
        shares = sorted(((self.share(s), p) for p, s in self.mean.items()), reverse=True)
        told = ", ".join(f"{phase} {percent(share)}" for share, phase in shares if share >= _LEAST)
        return f"the time went: {self.total:,.0f} s{ranks}: {told}"


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

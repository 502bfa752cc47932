"""Where the time of the ranks went, what it cost, and what would make a run faster; no torch."""

import math
import shutil
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from kfp_ddp.training.spec.config import TrainConfig

INSTANCE_TYPE = "node.kubernetes.io/instance-type"
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
"""`communication` is the part that the backward pass does not hide: from the end of a rank's own
gradients to the end of their exchange, including the wait for slower ranks. `other` is reports, the
agreement to stop, and traces."""
OWN: tuple[Phase, ...] = ("data", "forward", "backward")
"""Phases of a step in which a rank does not wait for the others."""
STEP: tuple[Phase, ...] = (*OWN, "communication", "optimizer", "other")
REPORTED: tuple[Phase, ...] = (*STEP, "checkpoint")
"""Phases that may occur between two lines of metrics."""
STRAGGLES = 0.2
"""Share of a step that others wait for a rank, from which it counts as a straggler."""
_LEAST = 0.005
"""The smallest share that is printed."""


def percent(share: float) -> str:
    """Format a share, such as 12 %."""
    return f"{share:.0%}".replace("%", " %")


class Pace:
    """The ranks' own times of a step, and the slowest rank, which the others wait for."""

    def __init__(self, rows: Sequence[Sequence[float]], step_seconds: float) -> None:
        """Compare seconds of each rank in each phase of `OWN`, and seconds of a complete step."""
        seconds = [sum(row) for row in rows]
        self.seconds = [round(value, 6) for value in seconds]
        self.slowest = max(range(len(seconds)), key=lambda rank: seconds[rank])
        median = statistics.median_low(seconds)
        self.ratio = seconds[self.slowest] / median if median else 1.0
        """Time of the slowest rank relative to the median."""
        medians = [statistics.median_low(column) for column in zip(*rows, strict=True)]
        more = [value - usual for value, usual in zip(rows[self.slowest], medians, strict=True)]
        self.phase = OWN[max(range(len(OWN)), key=more.__getitem__)]
        """The phase in which the slowest rank loses most time."""
        self.late = seconds[self.slowest] - median > STRAGGLES * step_seconds
        """Whether the others wait for the slowest rank."""

    @property
    def slow(self) -> str:
        """Description of how slow the slowest rank is."""
        return f"takes {self.ratio:.1f} times as long as the others, in {self.phase}"

    @property
    def straggler(self) -> str:
        """The slowest rank if the others wait for it; otherwise empty."""
        return f"; rank {self.slowest} {self.slow}" if self.late else ""


class TimeSpent:
    """Seconds of each rank in each phase, in the order of `PHASES`."""

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        self.rows = rows
        self.mean: dict[Phase, float] = {
            phase: statistics.fmean(column)
            for phase, column in zip(PHASES, zip(*rows, strict=True), strict=True)
        }
        """Mean over the ranks."""
        self.total = sum(self.mean.values())
        self.stepping = sum(self.mean[phase] for phase in STEP)
        """Seconds in steps, without the start, checkpoints and evaluations."""
        own = [[row[PHASES.index(phase)] for phase in OWN] for row in rows]
        self.pace = Pace(own, self.stepping)

    def by_rank(self, phase: Phase) -> list[float]:
        """Return the seconds of each rank in a phase."""
        return [row[PHASES.index(phase)] for row in self.rows]

    @property
    def wait_for_slowest(self) -> float:
        """Mean seconds of waiting for slower ranks; the slowest measures the exchange alone."""
        return self.mean["communication"] - min(self.by_rank("communication"))

    def share(self, seconds: float) -> float:
        """Return the share of the total time."""
        return seconds / self.total if self.total else 0.0

    def line(self) -> str:
        """Format the shares of the phases, the largest first."""
        ranks = f" on {len(self.rows)} ranks" if len(self.rows) > 1 else ""
        shares = [(self.share(seconds), phase) for phase, seconds in self.mean.items()]
        printed = [(share, phase) for share, phase in shares if share >= _LEAST]
        printed.sort(reverse=True)
        text = ", ".join(f"{phase} {percent(share)}" for share, phase in printed)
        return f"the time went: {self.total:,.0f} s{ranks}: {text}"


# Shares of the time from which advice is given.
WAITS = 0.05
SAVES = 0.05
EVALUATES = 0.2
STARTS = 0.2
NETWORK = 0.1
LONG = 60.0
"""Seconds; a shorter run is mostly start-up."""


class Environment(NamedTuple):
    """Properties of the machines of a run that advice depends on."""

    ranks: Sequence[str]
    """The node of each rank."""
    cpus: float
    """CPUs for each rank."""
    decoded: int
    """Bytes of all images, decoded; 0 if they are cached already."""
    room: int
    """Free bytes where they would be cached."""


def advice(spent: TimeSpent, config: TrainConfig, environment: Environment) -> list[str]:
    """Return a line of advice for each phase that took too long, the largest first."""
    lines: list[tuple[float, str]] = []

    def add(seconds: float, least: float, line: str) -> None:
        share = spent.share(seconds)
        if share >= least:
            lines.append((share, f"{percent(share)} of the time {line}"))

    add(spent.mean["data"], WAITS, f"waited for data: {_against_waiting(config, environment)}")
    if spent.pace.late:
        lines.append((spent.share(spent.wait_for_slowest), _slow_rank(spent, environment)))
    add(
        min(spent.by_rank("communication")),
        NETWORK,
        "waited for the network: a larger batch_size, or a faster network "
        "(all_reduce_perf of nccl-tests measures it)",
    )
    if spent.total > LONG:
        less = _fewer_checkpoints(config)
        add(spent.mean["checkpoint"], SAVES, f"went into checkpoints: {less}")
        less = f"eval_epochs={2 * config.eval_epochs} halves it"
        add(spent.mean["evaluation"], EVALUATES, f"went into evaluations: {less}")
        less = f"verify_images={config.verify_images} -> 0, or " if config.verify_images else ""
        start = f"was the start, before the first step: {less}a longer run"
        add(spent.mean["start"], STARTS, start)
    return [line for _, line in sorted(lines, key=lambda item: -item[0])]


def _fewer_checkpoints(config: TrainConfig) -> str:
    """Advise twice the interval that causes most checkpoints, if one is set."""
    for name in ("checkpoint_steps", "checkpoint_epochs", "checkpoint_minutes"):
        every = getattr(config, name)
        if every:
            return f"{name}={2 * every:g} halves it"
    return "a faster volume"


def _against_waiting(config: TrainConfig, environment: Environment) -> str:
    """Advise more loader processes if there are CPUs, a cache if there is disk space, or others."""
    changes = []
    cpus = int(environment.cpus)
    if config.workers < cpus:
        changes.append(f"workers={config.workers} -> {min(cpus, max(2, 2 * config.workers))}")
    if environment.decoded and 1.1 * environment.decoded < environment.room:
        changes.append(f"cache_gb={math.ceil(environment.decoded / 1e9)}")
    size = config.train_image_size or config.image_size
    lack = f"more CPUs than {environment.cpus:g} for a rank, images stored at image_size={size}"
    return ", or ".join(changes) or f"{lack}, or decode=auto on a GPU of NVIDIA"


def _slow_rank(spent: TimeSpent, environment: Environment) -> str:
    pace = spent.pace
    waits = percent(spent.share(spent.wait_for_slowest))
    data = pace.phase == "data"
    where = "its loaders and disk" if data else "its node (temperature, another tenant)"
    return (
        f"rank {pace.slowest} on {environment.ranks[pace.slowest]} {pace.slow}, and they wait "
        f"for it {waits} of the time: check {where}"
    )


def room_for_a_cache(config: TrainConfig) -> int:
    """Return the free bytes where decoded images are cached; 0 if unknown."""
    try:
        return shutil.disk_usage(config.cache_dir or tempfile.gettempdir()).free
    except OSError:
        return 0


class Cost(NamedTuple):
    """GPU-hours and their price; of ranks on CPUs, the hours of these ranks."""

    gpu_hours: float
    money: float | None
    """None without a price; its currency is that of the price."""
    unit: str

    def __str__(self) -> str:
        money = "" if self.money is None else f", cost {self.money:.2f}"
        return f"{round(self.gpu_hours, 4):,g} {self.unit}{money}"


def cost_of(events: Iterable[Mapping[str, Any]], settings: Mapping[str, Any]) -> Cost:
    """Return the cost of all attempts of a training with these settings.

    A rank has one GPU. An attempt lasts from the start of its processes to its last event.
    """
    seconds = 0.0
    ranks = 0.0
    previous = 0.0
    on_gpus = True
    for event in events:
        if not (now := _number(event.get("time"))):
            continue
        if event.get("event") == "start":
            ranks = _number(event.get("world_size"))
            seconds += ranks * _number(event.get("startup_seconds"))
            on_gpus &= event.get("device") != "CPU"
        else:
            seconds += ranks * max(0.0, now - previous)
        previous = now
    return priced(seconds / 3600, settings, on_gpus)


def priced(hours: float, settings: Mapping[str, Any], on_gpus: bool) -> Cost:
    """Return the cost of so many hours of ranks by the settings of a training."""
    price = _number(settings.get("gpu_hour_price"))
    unit = "GPU-hours" if on_gpus else "rank-hours"
    return Cost(hours, hours * price if price else None, unit)


def price_on(nodes: Sequence[Mapping[str, str]], prices: Mapping[str, float]) -> float:
    """Return the highest price that a table has for nodes of these labels; 0 for none.

    A key of the table is an instance type, or a label as NAME=VALUE.
    """
    by_label = {}
    for key, price in prices.items():
        label = key if "=" in key else f"{INSTANCE_TYPE}={key}"
        by_label[label] = price
    labels = {f"{name}={value}" for node in nodes for name, value in node.items()}
    return max((by_label[label] for label in labels & by_label.keys()), default=0.0)


def _number(value: object) -> float:
    """Return a positive, finite number; 0 for anything else, as in a damaged file."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return 0.0
    return max(0.0, value)

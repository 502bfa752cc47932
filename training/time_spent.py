"""What the ranks spent their time on, and which of them the others wait for; pure."""

import statistics
from collections.abc import Sequence
from typing import Literal, get_args

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

"""Time of a training by phase, and by rank."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from kfp_ddp.report.charts import Part, shares_bar
from kfp_ddp.report.events import Event, is_number
from kfp_ddp.report.render import duration, render
from kfp_ddp.training.time_spent import OWN, PHASES, Phase, TimeSpent

_COLOURS: Mapping[Phase, tuple[int, float]] = {
    "start": (5, 0.5),
    "data": (1, 1.0),
    "forward": (0, 1.0),
    "backward": (0, 0.75),
    "communication": (3, 1.0),
    "optimizer": (0, 0.5),
    "checkpoint": (2, 1.0),
    "evaluation": (4, 1.0),
    "other": (5, 1.0),
}
_MAX_RANKS = 16
"""Rows of the table of ranks."""
_COLUMNS: tuple[Phase, ...] = (*OWN, "communication", "optimizer")


def time_section(events: Sequence[Event]) -> Markup:
    """Return the section; empty if no event has the times.

    Attempts on as many ranks as the last one are added.
    """
    times = [(event, _seconds(event)) for event in events if event.get("event") == "ranks"]
    times = [(event, rows) for event, rows in times if rows]
    if not times:
        return Markup()
    last, rows = times[-1]
    attempts = [rows_ for _, rows_ in times if len(rows_) == len(rows)]
    spent = TimeSpent(
        [[sum(phase) for phase in zip(*rank, strict=True)] for rank in zip(*attempts, strict=True)]
    )
    title = duration(spent.total)
    title += f" on each of {len(rows)} ranks" if len(rows) > 1 else ""
    title += f", {len(attempts)} attempts" if len(attempts) > 1 else ""
    ends = [event for event in events if event.get("event") == "end"]
    return render(
        "time.html",
        shares=shares_bar(title, [Part(p, spent.mean[p], *_COLOURS[p]) for p in PHASES]),
        advice=_advice(ends[-1] if ends else {}),
        columns=_COLUMNS,
        ranks=_ranks(spent, last.get("nodes")),
        count=len(rows),
    )


def _seconds(event: Event) -> list[list[float]]:
    """Return the seconds of each rank in each phase; [] for an invalid event."""
    seconds = event.get("seconds")
    phases = [seconds.get(phase) for phase in PHASES] if isinstance(seconds, dict) else []
    columns = [column for column in phases if isinstance(column, list)]
    if len(columns) != len(PHASES) or len(set(map(len, columns))) != 1:
        return []
    rows = [list(row) for row in zip(*columns, strict=True)]
    valid = all(is_number(value) and value >= 0 for row in rows for value in row)
    return rows if valid else []


def _advice(end: Event) -> list[str]:
    """Return the advice of the run, and how much of the devices it used."""
    lines = [line for line in end.get("advice") or [] if isinstance(line, str)]
    mfu = end.get("mfu")
    if is_number(mfu):
        lines.append(f"{mfu * 100:.1f} % of the peak of its devices (MFU) during steps")
    return lines


def _ranks(spent: TimeSpent, nodes: object) -> list[dict[str, Any]]:
    """Return the seconds of the slowest ranks, the slowest first; [] for a single rank."""
    count = len(spent.rows)
    if count == 1:
        return []
    names = nodes if isinstance(nodes, list) and len(nodes) == count else [""] * count
    order = sorted(range(count), key=lambda rank: -spent.pace.seconds[rank])
    return [
        {
            "rank": rank,
            "node": str(names[rank] or "")[:63],
            "seconds": [spent.by_rank(phase)[rank] for phase in _COLUMNS],
        }
        for rank in order[:_MAX_RANKS]
    ]

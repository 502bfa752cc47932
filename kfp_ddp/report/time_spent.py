"""Where the time of a training went: the phases, what would help, and each rank."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kfp_ddp.report.material import Material
from kfp_ddp.report.pictures import Part, is_number, shares_bar
from kfp_ddp.report.text import duration, table
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
_RANKS = 16
"""Rows of the table at most; the slowest are in it."""
_COLUMNS: tuple[Phase, ...] = (*OWN, "communication", "optimizer")


def where_the_time_went(found: Material) -> str:
    """The section of a report; '' where the training did not tell."""
    return time_section(found.events)


def time_section(events: Sequence[Mapping[str, Any]]) -> str:
    """The same from the events of a training; attempts on as many ranks as the last count too."""
    of_ranks = [event for event in events if event.get("event") == "ranks"]
    told = [(event, rows) for event in of_ranks if (rows := _rows(event))]
    if not told:
        return ""
    last, rows = told[-1]
    ends = [event for event in events if event.get("event") == "end"]
    same = [each for _, each in told if len(each) == len(rows)]
    ranks = zip(*same, strict=True)
    spent = TimeSpent([[sum(of) for of in zip(*each, strict=True)] for each in ranks])
    parts = [Part(phase, spent.mean[phase], *_COLOURS[phase]) for phase in PHASES]
    return (
        f"<h2>Where the time went</h2>{shares_bar(_title(spent, len(same)), parts)}"
        f"{_said(ends[-1] if ends else {})}{_ranks(spent, last.get('nodes'))}"
    )


def _rows(event: Mapping[str, Any]) -> list[list[float]]:
    """Seconds of each rank in each phase; [] where the event has none, or something else."""
    told = event.get("seconds")
    found = [told.get(phase) for phase in PHASES] if isinstance(told, dict) else []
    columns = [each for each in found if isinstance(each, list)]
    if len(columns) != len(PHASES) or len(set(map(len, columns))) != 1:
        return []
    rows = [list(row) for row in zip(*columns, strict=True)]
    good = all(is_number(value) and value >= 0 for row in rows for value in row)
    return rows if good else []


def _title(spent: TimeSpent, attempts: int) -> str:
    ranks = f" on each of {len(spent.rows)} ranks" if len(spent.rows) > 1 else ""
    return f"{duration(spent.total)}{ranks}{f', {attempts} attempts' if attempts > 1 else ''}"


def _said(event: Mapping[str, Any]) -> str:
    """What would help, in the words of the run, and how much of the devices it used."""
    lines = [each for each in event.get("advice") or [] if isinstance(each, str)]
    used = event.get("mfu")
    if is_number(used):
        lines.append(f"{used * 100:.1f} % of the peak of its devices (MFU) while it stepped")
    return f"<ul>{''.join(f'<li>{escape(each)}</li>' for each in lines)}</ul>" if lines else ""


def _ranks(spent: TimeSpent, nodes: object) -> str:
    """Each rank's seconds in a step, the slowest first; '' for one alone."""
    count = len(spent.rows)
    if count == 1:
        return ""
    known = nodes if isinstance(nodes, list) and len(nodes) == count else [""] * count
    order = sorted(range(count), key=lambda rank: -spent.pace.seconds[rank])
    rows = [
        (
            f"{rank}{f' <small>{escape(str(known[rank])[:63])}</small>' if known[rank] else ''}",
            *(f"{spent.of(phase)[rank]:,.1f}" for phase in _COLUMNS),
        )
        for rank in order[:_RANKS]
    ]
    left = f", the slowest {_RANKS} of {count:,}" if count > _RANKS else ""
    note = (
        "The slowest rank comes first: the others wait for it in communication, which is what the "
        "backward pass does not hide of the exchange of gradients."
    )
    head = ("rank", *_COLUMNS)
    return f"<h3>Seconds of each rank{left}</h3>{table(head, rows)}<p class='soft'>{note}</p>"

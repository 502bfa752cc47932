"""Curves and times of a training, and its page without an evaluation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.core.settings import mapping_of
from kfp_ddp.report.charts import Marks, Part, Series, line_chart, shares_bar
from kfp_ddp.report.events import (
    Event,
    checkpoint_epochs,
    curve,
    is_number,
    of_kind,
    resumed_epochs,
    training_time,
)
from kfp_ddp.report.render import duration, render, timestamp
from kfp_ddp.training.spec.metrics import read_events
from kfp_ddp.training.spec.time_spent import OWN, PHASES, Phase, TimeSpent

_TOP5_HIDDEN_FROM = 0.995
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


def training_page(run_dir: Path) -> str:
    """Return the page of a run without an evaluation."""
    run = RunFolder(run_dir)
    events = read_events(run.metrics)
    config = mapping_of(run.config)
    model = str(config.get("model", ""))
    run_id = f"run {config['run_id']}" if model and config.get("run_id") else ""
    return render(
        "training.html",
        title=f"Training of {model}" if model else "Training",
        facts=[fact for fact in (run_id, training_line(events)) if fact],
        curves=training_curves(events),
        time=time_section(events),
    )


def training_curves(events: Sequence[Event]) -> Markup:
    """Return charts of loss, accuracy, learning rate and speed; empty without loss and accuracy."""

    def series(kind: str, name: str, key: str, colour: int) -> Series:
        return Series(name, curve(events, kind, key), colour)

    loss = [series("step", "training", "loss", 0), series("eval", "validation", "loss", 1)]
    accuracy = [series("eval", "top 1", "accuracy", 0)]
    top5 = series("eval", "top 5", "top5", 2)
    # A curve at the upper end of the axis would only hide the other one.
    if top5.points and top5.points[-1][1] <= _TOP5_HIDDEN_FROM:
        accuracy.append(top5)
    if not any(s.points for s in (*loss, *accuracy)):
        return Markup()
    marks = [
        Marks("resumed", resumed_epochs(events), line=True),
        Marks("| checkpoints", checkpoint_epochs(events)),
    ]
    large = [
        line_chart("Loss", loss, marks=marks),
        line_chart("Validation accuracy", accuracy, percent=True),
    ]
    rates = (
        ("Learning rate", series("step", "", "lr", 3), False),
        ("Images per second", series("step", "", "images_per_s", 0), False),
        ("Time waiting for data", series("step", "", "data_wait_fraction", 1), True),
    )
    small = [
        line_chart(title, [rate], percent=percent, from_zero=True)
        for title, rate, percent in rates
        if rate.points
    ]
    return render("curves.html", large=large, small=small)


def training_line(events: Sequence[Event]) -> str:
    """Return when, how long and on what the model was trained; '' if unknown."""
    seconds, end = training_time(events)
    if not end:
        return ""
    line = f"trained {timestamp(end)} in {duration(seconds)}"
    start = _last(events, "start")
    ranks = start.get("world_size")
    if is_number(ranks):
        line += f" on {ranks} rank{'s' if ranks != 1 else ''}"
    device = str(start.get("device") or "")
    return f"{line} ({device})" if device else line


def time_section(events: Sequence[Event]) -> Markup:
    """Return the section, empty without times; attempts on as many ranks as the last are added."""
    attempts = [event for event in of_kind(events, "ranks") if _seconds(event)]
    if not attempts:
        return Markup()
    last = attempts[-1]
    count = len(_seconds(last))
    equal = [rows for rows in map(_seconds, attempts) if len(rows) == count]
    spent = TimeSpent([_added(rows) for rows in zip(*equal, strict=True)])
    title = duration(spent.total)
    if count > 1:
        title += f" on each of {count} ranks"
    if len(equal) > 1:
        title += f", {len(equal)} attempts"
    return render(
        "time.html",
        shares=shares_bar(title, [Part(p, spent.mean[p], *_COLOURS[p]) for p in PHASES]),
        advice=_advice(_last(events, "end")),
        columns=_COLUMNS,
        ranks=_ranks(spent, last.get("nodes")),
        count=count,
    )


def _last(events: Sequence[Event], kind: str) -> Event:
    """Return the last event of a kind; {} without one."""
    chosen = of_kind(events, kind)
    return chosen[-1] if chosen else {}


def _advice(end: Event) -> list[str]:
    """Return the advice at the end of a training, and the use of its devices."""
    advice = [line for line in end.get("advice") or [] if isinstance(line, str)]
    mfu = end.get("mfu")
    if is_number(mfu):
        advice.append(f"{mfu * 100:.1f} % of the peak of its devices (MFU) during steps")
    return advice


def _added(attempts: Sequence[Sequence[float]]) -> list[float]:
    """Return the seconds of one rank in each phase, over all attempts."""
    return [sum(phase) for phase in zip(*attempts, strict=True)]


def _seconds(event: Event) -> list[list[float]]:
    """Return the seconds of each rank in each phase; [] for an invalid event."""
    seconds = event.get("seconds")
    if not isinstance(seconds, dict):
        return []
    phases = [seconds.get(phase) for phase in PHASES]
    columns = [column for column in phases if isinstance(column, list)]
    lengths = set(map(len, columns))
    if len(columns) != len(PHASES) or len(lengths) != 1:
        return []
    rows = [list(row) for row in zip(*columns, strict=True)]
    valid = all(_is_duration(value) for row in rows for value in row)
    return rows if valid else []


def _is_duration(value: object) -> bool:
    return is_number(value) and value >= 0


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

"""Curves of a training, and the page of a training without an evaluation."""

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.core.settings import mapping_of
from kfp_ddp.report.charts import Marks, Series, line_chart
from kfp_ddp.report.events import (
    Event,
    checkpoint_epochs,
    curve,
    is_number,
    read_events,
    resumed_epochs,
    training_time,
)
from kfp_ddp.report.render import duration, render, render_page, timestamp
from kfp_ddp.report.time_spent import time_section

_TOP5_HIDDEN_FROM = 0.995


def training_page(run_dir: Path) -> str:
    """Return the page of a run without an evaluation."""
    run = RunFolder(run_dir)
    events = read_events(run.metrics)
    config = mapping_of(run.config)
    model = str(config.get("model", ""))
    run_id = f"run {config['run_id']}" if model and config.get("run_id") else ""
    return render_page(
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
    accuracy = [series("eval", "top 1", "accuracy", 0), series("eval", "top 5", "top5", 2)]
    if accuracy[1].points and accuracy[1].points[-1][1] > _TOP5_HIDDEN_FROM:
        accuracy.pop()
    if not any(s.points for s in (*loss, *accuracy)):
        return Markup()
    marks = [
        Marks("resumed", resumed_epochs(events), line=True),
        Marks("| checkpoints", checkpoint_epochs(events)),
    ]
    large = [
        line_chart("Loss", loss, "epoch", marks=marks),
        line_chart("Validation accuracy", accuracy, "epoch", percent=True),
    ]
    rates = (
        ("Learning rate", series("step", "", "lr", 3), False),
        ("Images per second", series("step", "", "images_per_s", 0), False),
        ("Time waiting for data", series("step", "", "data_wait_fraction", 1), True),
    )
    small = [
        line_chart(title, [rate], "epoch", percent=percent, bottom=0.0, last_values=False)
        for title, rate, percent in rates
        if rate.points
    ]
    return render("curves.html", large=large, small=small)


def training_line(events: Sequence[Event]) -> str:
    """Return when, how long and on what the model was trained; '' if unknown."""
    seconds, end = training_time(events)
    if not end:
        return ""
    start = next((e for e in reversed(events) if e.get("event") == "start"), {})
    ranks, device = start.get("world_size"), str(start.get("device") or "")
    place = f" on {ranks} rank{'s' if ranks != 1 else ''}" if is_number(ranks) else ""
    place += f" ({device})" if device else ""
    return f"trained {timestamp(end)} in {duration(seconds)}{place}"

"""The training of the model: when, how long, on what, and its curves."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.core.settings import mapping_of
from kfp_ddp.report.material import Material
from kfp_ddp.report.pictures import is_number, page, read_events, training_curves
from kfp_ddp.report.text import duration, moment
from kfp_ddp.report.time_spent import time_section

_Events = Sequence[Mapping[str, Any]]


def training(found: Material) -> str:
    """Curves of the training; '' where nothing of it is at hand."""
    curves = training_curves(found.events)
    if not curves:
        return ""
    note = "The training loss includes augmentation and label smoothing."
    return f"<h2>Training</h2>{curves}<p class='soft'>{note}</p>"


def training_page(run_dir: Path) -> str:
    """A page of the curves alone, for a run whose evaluation is still to come."""
    run = RunFolder(run_dir)
    events = read_events(run.metrics)
    config = mapping_of(run.config)
    model = str(config.get("model", ""))
    of = f"run {config['run_id']}" if model and config.get("run_id") else ""
    said = " · ".join(escape(each) for each in (of, told(events)) if each)
    title = f"Training of {model}" if model else "Training"
    head = f"<h1>{escape(title)}</h1><p class='soft'>{said}</p>"
    return page(title, head + training_curves(events) + time_section(events))


def told(events: _Events) -> str:
    """When and how long it trained, on what; '' for unknown."""
    seconds, ended = trained(events)
    if not ended:
        return ""
    start = next((e for e in reversed(events) if e.get("event") == "start"), {})
    ranks, device = start.get("world_size"), str(start.get("device") or "")
    on = f" on {ranks} rank{'s' if ranks != 1 else ''}" if is_number(ranks) else ""
    on += f" ({device})" if device else ""
    return f"trained {moment(ended)} in {duration(seconds)}{on}"


def trained(events: _Events) -> tuple[float, float]:
    """Seconds that a training ran, breaks left out, and when it ended; (0, 0) for unknown."""
    seconds, before, last = 0.0, 0.0, 0.0
    for event in events:
        now = event.get("time")
        if not is_number(now):
            continue
        if before and event.get("event") != "start":
            seconds += max(0.0, now - before)
        before, last = now, max(last, now)
    return seconds, last

"""A comparison as a page of its own: tables, and the curves of all runs in one pair of axes."""

from collections.abc import Iterable, Sequence
from html import escape

from kfp_ddp.client.inspection.comparison import Comparison, shown
from kfp_ddp.report.pictures import COLOURS, Series, curve, line_chart, page

CHARTS = (
    ("Validation accuracy", "eval", "accuracy", True),
    ("Validation loss", "eval", "loss", False),
    ("Training loss", "step", "loss", False),
    ("Images per second", "step", "images_per_s", False),
)


def to_html(found: Comparison) -> str:
    """The whole document."""
    letters = [side.letter for side in found.sides]
    facts = [
        ("run", [side.name for side in found.sides]),
        ("id", [side.run_id for side in found.sides]),
        ("state", [side.state for side in found.sides]),
        ("started", [f"{s.start:%Y-%m-%d %H:%M} UTC" if s.start else "" for s in found.sides]),
    ]
    settings = [(name, [shown(each) for each in row]) for name, row in found.settings.items()]
    metrics = [(metric.name.replace("_", " "), metric.texts()) for metric in found.metrics]
    same = '<p class="soft">None: all were set alike.</p>'
    charts = "".join(_chart(found, *each) for each in CHARTS)
    notes = "".join(f'<p class="soft">{escape(each)}.</p>' for each in found.notes)
    body = (
        f"<h1>{len(found.sides)} trainings compared</h1>{_table(letters, facts)}"
        f"<h2>Metrics</h2>{_table(letters, metrics)}{notes}"
        f"<h2>Settings that differ</h2>{_table(letters, settings) if settings else same}"
        f'<h2>Curves</h2><div class="row">{charts}</div>'
    )
    return page("Runs compared", body)


def _chart(found: Comparison, title: str, kind: str, key: str, percent: bool) -> str:
    curves = [
        Series(side.letter, curve(side.training.events, kind, key), number % COLOURS)
        for number, side in enumerate(found.sides)
    ]
    return line_chart(title, curves, "epoch", percent=percent)


def _table(letters: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    head = "".join(
        f'<th><b style="color:var(--s{number % COLOURS})">{letter}</b></th>'
        for number, letter in enumerate(letters)
    )
    lines = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(each)}</td>' for each in row)}</tr>"
        for name, row in rows
    )
    return f'<div class="scroll"><table><tr><th></th>{head}</tr>{lines}</table></div>'

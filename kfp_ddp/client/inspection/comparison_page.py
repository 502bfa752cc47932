"""A comparison of runs as an HTML page: tables, and the curves of all runs in the same axes."""

from kfp_ddp.client.inspection.comparison import Comparison, shown
from kfp_ddp.report.charts import COLOURS, Series, line_chart
from kfp_ddp.report.events import curve
from kfp_ddp.report.render import render_page

CHARTS = (
    ("Validation accuracy", "eval", "accuracy", True),
    ("Validation loss", "eval", "loss", False),
    ("Training loss", "step", "loss", False),
    ("Images per second", "step", "images_per_s", False),
)


def to_html(comparison: Comparison) -> str:
    """Return the page."""
    sides = comparison.sides
    facts = [
        ("run", [side.name for side in sides]),
        ("id", [side.run_id for side in sides]),
        ("state", [side.state for side in sides]),
        ("started", [f"{s.start:%Y-%m-%d %H:%M} UTC" if s.start else "" for s in sides]),
    ]
    charts = []
    for title, kind, key, percent in CHARTS:
        series = [
            Series(side.letter, curve(side.training.events, kind, key), number % COLOURS)
            for number, side in enumerate(sides)
        ]
        charts.append(line_chart(title, series, "epoch", percent=percent))
    return render_page(
        "comparison.html",
        title="Runs compared",
        letters=[side.letter for side in sides],
        colours=COLOURS,
        facts=facts,
        metrics=[(m.name.replace("_", " "), m.texts()) for m in comparison.metrics],
        notes=comparison.notes,
        settings=[(name, map(shown, row)) for name, row in comparison.settings.items()],
        charts=charts,
    )

"""HTML, and Markdown, from Jinja2 templates: one environment, which escapes all in HTML.

The KFP UI shows it in an iframe with `sandbox="allow-scripts"`: no scripts, no external resources.
"""

from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from kfp_ddp.core.text import cell
from kfp_ddp.report.events import is_number


class Card(NamedTuple):
    """A headline number, with a detail such as its interval."""

    label: str
    value: str
    detail: str = ""


def render(template: str, **values: Any) -> Markup:
    """Return a rendered template. Only a `Markup` among the values is HTML; all else is text."""
    return Markup(_environment().get_template(template).render(values))  # noqa: S704


def render_text(template: str, **values: Any) -> str:
    """Return a rendered template of plain text, such as Markdown, in which nothing is escaped."""
    return _environment().get_template(template).render(values)


def framed(page: str) -> str:
    """Return a page for a notebook, whose styles neither meet those of the page nor run scripts."""
    style = "width:100%;height:440px;border:0"
    return f'<iframe sandbox="" srcdoc="{escape(str(page))}" style="{style}"></iframe>'


def points(gain: float) -> str:
    """Return a difference of two shares in percentage points, with its sign."""
    return f"{gain * 100:+.2f}".replace("-", "−")


def points_with_interval(gain: float, low: float | None, high: float | None) -> str:
    """Return a difference of two shares in percentage points, with its interval if known."""
    text = f"{points(gain)} points"
    return text if low is None or high is None else f"{text} ({points(low)} to {points(high)})"


def percents(low: float, high: float) -> str:
    """Return an interval of a share."""
    return f"{low * 100:.1f}–{high * 100:.1f} %"


def duration(seconds: float) -> str:
    """Return seconds, minutes or hours, depending on the length."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def timestamp(seconds: float) -> str:
    """Return a time in UTC, to the minute; '' if it is out of range."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OSError, OverflowError):
        return ""


def number(value: object, spec: str, scale: float = 1) -> str:
    """Return a number by a format specification; a dash for anything else."""
    return format(value * scale, spec) if is_number(value) else "–"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=select_autoescape(disabled_extensions=["md.jinja"], default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (points, points_with_interval, percents, number, cell)
    environment.filters |= {function.__name__: function for function in filters}
    return environment

"""Numbers and times as the report writes them, and its tables."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape


def points(gain: float) -> str:
    """A difference of two shares, in percentage points with its sign."""
    return f"{gain * 100:+.2f}".replace("-", "−")


def gained(gain: float, low: float | None, high: float | None) -> str:
    """The same with its interval."""
    said = f"{points(gain)} points"
    return said if low is None or high is None else f"{said} ({points(low)} to {points(high)})"


def percents(low: float, high: float) -> str:
    """An interval of a share."""
    return f"{low * 100:.1f}–{high * 100:.1f} %"


def duration(seconds: float) -> str:
    """Hours, minutes or seconds, as coarse as it is long."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def moment(seconds: float) -> str:
    """A time of the clock in UTC, to the minute."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OSError, OverflowError):
        return ""


def facts(rows: Mapping[str, object]) -> str:
    """A table of names and what they are."""
    lines = "".join(
        f"<tr><th scope='row'>{escape(key)}</th><td>{escape(str(value))}</td></tr>"
        for key, value in rows.items()
    )
    return f'<table class="plain">{lines}</table>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table of cells that are HTML already, which scrolls where it is too wide."""
    top = "".join(f"<th>{each}</th>" for each in head)
    lines = "".join(f"<tr>{''.join(f'<td>{each}</td>' for each in row)}</tr>" for row in rows)
    sort = f' class="{kind}"' if kind else ""
    return f'<div class="scroll"><table{sort}><tr>{top}</tr>{lines}</table></div>'

"""A pair of axes that fills its column: lines stretch, and text keeps its size at every width."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 640, 320
"""Of the drawing inside the axes, in its own units."""


class Key(NamedTuple):
    """A line of the legend: its text, and the class or the colour of the sign before it."""

    text: str
    colour: int | None = None
    sign: str = ""


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, with what stands at its ticks; `log` where each tenth is as long."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies, from 0 at the low end to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear(low: float, high: float, about: int, *, percent: bool = False) -> Axis:
    """An axis that ends at round numbers, with some `about` ticks."""
    found = _ticks(low, high, about)
    return Axis(found[0], found[-1], [(tick, _label(tick, percent)) for tick in found])


def logarithmic(low: float, high: float) -> Axis:
    """An axis from 1, 2 or 5 times a power of ten to another, for values above 0."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    steps = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    first = max(step for step in steps if step <= low * (1 + 1e-9))
    last = min(step for step in steps if step >= high * (1 - 1e-9) and step > first)
    shown = [step for step in steps if first <= step <= last]
    if len(shown) > 7:
        shown = [step for step in shown if f"{step:e}"[0] == "1"]
    return Axis(first, last, [(step, _label(step, False)) for step in shown], log=True)


def within(low: float, high: float, about: int) -> Axis:
    """An axis that ends where the values do, with ticks at round numbers between."""
    if low == high:
        low, high = low - 0.5, high + 0.5
    ticks = [t for t in _ticks(low, high, about) if low <= t <= high]
    return Axis(low, high, [(tick, _label(tick, False)) for tick in ticks])


def across(axis: Axis, x: float) -> float:
    """Units from the left end."""
    return axis.share(x) * WIDTH


def down(axis: Axis, y: float) -> float:
    """Units from the top."""
    return (1 - axis.share(y)) * HEIGHT


def plot(
    title: str,
    x: Axis,
    y: Axis,
    x_label: str,
    drawn: Iterable[str],
    keys: Iterable[Key],
    said: str,
) -> str:
    """A figure: heading, legend, axes with what is `drawn` in them as SVG, and the name of x.

    Args:
        title: Heading.
        x: The axis across.
        y: The axis up.
        x_label: What x is, with its unit.
        drawn: Elements in units of `WIDTH` and `HEIGHT`.
        keys: The legend.
        said: What a screen reader says.
    """
    grid = "".join(
        f'<path class="grid" d="M0 {down(y, tick):.1f}H{WIDTH}"/>' for tick, _ in y.ticks
    )
    labels = "".join(
        f'<span class="y" style="top:{100 - 100 * y.share(tick):.1f}%">{text}</span>'
        for tick, text in y.ticks
    ) + "".join(
        f'<span class="x" style="left:{100 * x.share(tick):.1f}%">{text}</span>'
        for tick, text in x.ticks
    )
    return (
        f'<figure class="chart" role="img" aria-label="{escape(said)}">'
        f'<figcaption>{escape(title)}</figcaption><div class="key">{"".join(map(_key, keys))}</div>'
        f'<div class="plot"><svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">'
        f"{grid}{''.join(drawn)}</svg>{labels}</div>"
        f'<p class="under">{escape(x_label)}</p></figure>'
    )


def empty(title: str) -> str:
    """A figure of which nothing is known."""
    said = f"{title}: nothing recorded"
    return (
        f'<figure class="chart" role="img" aria-label="{escape(said)}"><figcaption>{escape(title)}'
        '</figcaption><p class="soft">nothing recorded</p></figure>'
    )


def dot(x: float, y: float, colour: int) -> str:
    """A dot that stays round when the drawing is stretched."""
    return f'<path class="dot" stroke="var(--s{colour})" d="M{x:.1f} {y:.1f}h0"/>'


def _key(key: Key) -> str:
    sign = f' class="{key.sign}"' if key.sign else ""
    colour = "" if key.colour is None else f' style="background:var(--s{key.colour})"'
    shown = f"<i{sign}{colour}></i>" if sign or colour else ""
    return f"<span>{shown}{escape(key.text)}</span>"


def _label(tick: float, percent: bool) -> str:
    return f"{tick * 100:.4g}%" if percent else f"{tick:,.6g}"


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`, some `about` of them."""
    if high - low < 1e-9 * max(1.0, abs(high)):
        pad = abs(high) * 0.05 or 0.5
        low, high = low - pad, high + pad
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]

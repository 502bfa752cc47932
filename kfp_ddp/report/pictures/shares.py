"""Parts of a whole in one bar."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple


class Part(NamedTuple):
    """Its name, how much of the whole it is, its colour of `COLOURS`, and how strong that is."""

    name: str
    amount: float
    colour: int
    strength: float = 1.0


def shares_bar(title: str, parts: Sequence[Part]) -> str:
    """One bar of the parts in their order, each as long as its share, with the shares beneath.

    Args:
        title: Heading, and the name that a screen reader says.
        parts: None negative; without any amount there is nothing to draw, and it is ''.
    """
    whole = sum(part.amount for part in parts)
    if whole <= 0:
        return ""
    drawn = [(part, part.amount / whole) for part in parts if part.amount > 0]
    pieces = "".join(
        f'<i style="flex:{share:.4f};{_look(part)}" title="{escape(part.name)} {share:.1%}"></i>'
        for part, share in drawn
    )
    keys = "".join(
        f'<span><i class="box" style="{_look(part)}"></i>{escape(part.name)} {share:.1%}</span>'
        for part, share in drawn
    )
    said = ", ".join(f"{part.name} {share:.1%}" for part, share in drawn)
    return (
        f'<figure class="chart" role="img" aria-label="{escape(f"{title}: {said}")}">'
        f'<figcaption>{escape(title)}</figcaption><div class="shares">{pieces}</div>'
        f'<div class="key">{keys}</div></figure>'
    )


def _look(part: Part) -> str:
    return f"background:var(--s{part.colour});opacity:{part.strength:g}"

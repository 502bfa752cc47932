"""A compiled pipeline as a Mermaid flowchart, for Markdown."""

from collections.abc import Iterator
from pathlib import Path

from kfp_ddp.pipelines.graph import Node, nodes


def mermaid(compiled: Path) -> str:
    """The flowchart; groups are subgraphs."""
    return "\n".join(["flowchart LR", *_lines(nodes(compiled), "n", "  ")]) + "\n"


def _lines(level: tuple[Node, ...], above: str, indent: str) -> Iterator[str]:
    known = {node.name: f"{above}{number}" for number, node in enumerate(level)}
    for node in level:
        own = known[node.name]
        words = _text(node.title)
        if node.inner:
            yield f'{indent}subgraph {own}["{words}"]'
            yield from _lines(node.inner, f"{own}_", f"{indent}  ")
            yield f"{indent}end"
        else:
            yield f'{indent}{own}(["{words}"])' if node.on_exit else f'{indent}{own}["{words}"]'
    for node in level:
        for before in node.after:
            yield f"{indent}{known[before]} {'-.->' if node.on_exit else '-->'} {known[node.name]}"


def _text(title: str) -> str:
    """Entities are written with #, as Mermaid has them."""
    plain = " -_.,:()"
    return "".join(one if one.isalnum() or one in plain else f"#{ord(one)};" for one in title)

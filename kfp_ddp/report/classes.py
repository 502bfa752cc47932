"""How well each class and each slice of the samples is told."""

from collections.abc import Iterable
from html import escape
from itertools import groupby

from kfp_ddp.models.evaluation import ClassResult, Slice
from kfp_ddp.report.material import Material
from kfp_ddp.report.text import percents, table

_SHOWN = 20
_MOST = 1000
"""Rows of a page: of more classes it has those of the lowest F1."""
_FEW = 10
"""Samples below which an interval says more than a figure."""


def classes(found: Material) -> str:
    """Precision, recall with its interval and F1 of each class, the lowest F1 first."""
    result, training = found.result, found.left.dataset.training
    order = sorted(result.classes, key=lambda one: (one.samples == 0, one.f1, one.name))
    few = sum(0 < one.samples < _FEW for one in order)
    none = sum(one.samples == 0 for one in order)
    notes = [f"{few:,} classes have fewer than {_FEW} samples: see their intervals"] * bool(few)
    notes += [f"{none:,} classes have no sample in this split"] * bool(none)
    said = f'<p class="soft">{"; ".join(notes)}.</p>' if notes else ""
    text = f"<h2>Classes, the lowest F1 first</h2>{said}{_table(order[:_SHOWN], training)}"
    if rest := order[_SHOWN:_MOST]:
        more = f"{len(order) - _SHOWN:,} more"
        if len(order) > _MOST:
            more += f", {len(rest):,} of them here and all in evaluation.json"
        text += f"<details><summary>{more}</summary>{_table(rest, training)}</details>"
    return text


def slices(found: Material) -> str:
    """Accuracy of the samples that share a tag, the lowest first."""
    parts = []
    for name, group in groupby(found.result.slices, key=lambda one: one.name):
        order = sorted(group, key=lambda one: one.accuracy)
        parts.append(f"<h3>{escape(name)}</h3>{_slices(order[:_SHOWN])}")
        if rest := order[_SHOWN:_MOST]:
            more = f"{len(order) - _SHOWN:,} more"
            parts.append(f"<details><summary>{more}</summary>{_slices(rest)}</details>")
    return f"<h2>Slices, the lowest accuracy first</h2>{''.join(parts)}" if parts else ""


def _table(rows: Iterable[ClassResult], training: dict[str, int]) -> str:
    head = ["class", "samples", *(["trained on"] if training else [])]
    head += ["precision", "recall", "F1"]
    top = [*head[:-1], head[-1], '<span class="wide">&nbsp;</span>']
    return table(top, (_row(one, training) for one in rows), "taught" if training else "")


def _row(one: ClassResult, training: dict[str, int]) -> list[str]:
    recall = f"{one.recall:.3f}"
    if one.recall_low is not None and one.recall_high is not None:
        recall += f" <small>{one.recall_low:.2f}–{one.recall_high:.2f}</small>"
    bar = (
        f'<div class="bar wide" role="img" aria-label="F1 {one.f1:.2f}">'
        f'<i style="width:{one.f1 * 100:.0f}%"></i></div>'
    )
    taught = [f"{training.get(one.name, 0):,}"] if training else []
    figures = [f"{one.precision:.3f}", recall, f"{one.f1:.3f}", bar]
    return [escape(one.name), f"{one.samples:,}", *taught, *figures]


def _slices(rows: Iterable[Slice]) -> str:
    head = ("value", "samples", "right", "accuracy", "95 % interval")
    lines = (
        (
            escape(one.value) or "<i>none</i>",
            f"{one.samples:,}",
            f"{one.correct:,}",
            f"{one.accuracy:.2%}",
            percents(one.low, one.high),
        )
        for one in rows
    )
    return table(head, lines, "slices")

"""Who is taken for whom: the whole matrix of few classes, the confused part of many."""

from html import escape

from kfp_ddp.report.material import Material, Pair
from kfp_ddp.report.pictures import MAX_CELLS_SIDE, NUMBERED, confusion_matrix, legend
from kfp_ddp.report.text import table

_PAIRS = 12
_PART = 14
"""Classes in the confused part."""
_NOTE = (
    "First what most certainly is a large part of its class (lower end of the 95 % interval of the "
    "share), so that neither large classes nor single samples of small ones hide the others."
)


def confusion(found: Material) -> str:
    """The matrix, or the part of it where most is confused, and the pairs that stand out."""
    result = found.result
    if result.correct == result.samples:
        return "<h2>Confusion</h2><p>None: every sample is told right.</p>"
    parts = ["<h2>Confusion</h2>"]
    pairs = _pairs(found)
    if len(result.classes) <= NUMBERED and result.confusion is not None:
        names = [one.name for one in result.classes]
        picture = _shown(confusion_matrix(names, result.confusion))
    else:
        picture = _part(found)
    wide = ' class="row"' if len(result.classes) <= 10 else ""
    parts.append(f"<div{wide}><div>{picture}</div><div>{pairs}</div></div>")
    if result.confusion is not None and NUMBERED < len(result.classes) <= MAX_CELLS_SIDE:
        names = [one.name for one in result.classes]
        whole = _shown(confusion_matrix(names, result.confusion))
        parts.append(
            f"<details><summary>All {len(names)} classes, shaded by the share of the true class"
            f"</summary>{whole}</details>"
        )
    return "".join(parts)


def _shown(picture: str) -> str:
    return f'{legend()}<div class="scroll">{picture}</div>'


def _pairs(found: Material) -> str:
    if not found.pairs:
        return ""
    rows = (
        (
            escape(pair.target),
            escape(pair.predicted),
            f"{pair.count:,} of {pair.of:,}",
            f"{pair.share:.1%}",
        )
        for pair in found.pairs[:_PAIRS]
    )
    head = ("true", "taken for", "samples", "share")
    return (
        f'<h3>Confusions that stand out</h3>{table(head, rows, "pairs")}<p class="soft">{_NOTE}</p>'
    )


def _part(found: Material) -> str:
    """A matrix of the classes in the pairs that stand out, with a column for all others."""
    chosen = _chosen(found.pairs)
    classes = {one.name: one for one in found.result.classes}
    at = {name: number for number, name in enumerate(chosen)}
    counts = [[0] * len(chosen) for _ in chosen]
    wrong = dict.fromkeys(chosen, 0)
    for pair in found.pairs:
        if pair.target in at:
            wrong[pair.target] += pair.count
            if pair.predicted in at:
                counts[at[pair.target]][at[pair.predicted]] = pair.count
    others = []
    for name, number in at.items():
        others.append(wrong[name] - sum(counts[number]))
        counts[number][number] = classes[name].samples - wrong[name]
    if not chosen:
        return ""
    said = f"The {len(chosen)} of {len(classes):,} classes that are confused the most"
    return f"<h3>{said}</h3>{_shown(confusion_matrix(chosen, counts, others))}"


def _chosen(pairs: list[Pair]) -> list[str]:
    """Classes of the pairs that stand out, those of one pair side by side."""
    chosen: list[str] = []
    for pair in pairs:
        new = [name for name in (pair.target, pair.predicted) if name not in chosen]
        if len(chosen) + len(new) <= _PART:
            for name in new:
                mate = pair.predicted if name == pair.target else pair.target
                chosen.insert(chosen.index(mate) + 1 if mate in chosen else len(chosen), name)
    return chosen

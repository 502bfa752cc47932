"""An evaluation for people: a self-contained HTML report and a Markdown summary."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from kfp_ddp.base.run_folder import RunFolder
from kfp_ddp.components.shared.evaluation import Evaluation
from kfp_ddp.components.shared.markdown import cell
from kfp_ddp.components.shared.pictures import (
    MAX_CELLS_SIDE,
    Series,
    cards,
    confusion_matrix,
    line_chart,
    page,
    read_events,
    training_curves,
)
from kfp_ddp.training.config import MAX_PIXELS
from kfp_ddp.training.shards import Where

THUMBNAIL_SIDE = 112
_CONFUSED = 12


@dataclass(frozen=True)
class Mistake:
    """A sample told wrong: its bytes, path below the split, true and predicted class."""

    where: Where
    path: str
    target: str
    predicted: str
    confidence: float


def html(
    result: Evaluation,
    run_dir: Path,
    mistakes: Sequence[Mistake],
    config: Mapping[str, object],
    test: Evaluation | None = None,
) -> str:
    """The report: headline numbers, curves, confusion, classes, worst mistakes, provenance.

    `test` is what the same checkpoint came to on the test split.
    """
    sections = [_head(result), _test(test) if test else ""]
    curves = training_curves(read_events(RunFolder(run_dir).metrics))
    if curves:
        note = "The training loss includes augmentation and label smoothing."
        sections.append(f"<h2>Training</h2>{curves}<p class='soft'>{note}</p>")
    most = config.get("max_pixels", MAX_PIXELS)
    sections += [_confusion(result), _classes(result), _calibration(result)]
    sections.append(_mistakes(mistakes, most if isinstance(most, int) else MAX_PIXELS))
    sections.append(_provenance(result, config))
    return page(f"Evaluation of {result.model}", "".join(sections))


def markdown(result: Evaluation, test: Evaluation | None = None) -> str:
    """The headline numbers and the classes that went worst, for the KFP UI."""
    lines = [f"## {result.accuracy:.2%} of {result.samples} samples right", "", *figures(result)]
    if result.roc_auc is not None:
        lines.append(f"| ROC AUC | {result.roc_auc:.4f} |")
    worst = sorted((c for c in result.classes if c.samples), key=lambda c: c.recall)[:5]
    lines += ["", "Classes with the lowest recall:", "", "| class | samples | recall | precision |"]
    lines.append("|---|---|---|---|")
    lines += [
        f"| {cell(c.name)} | {c.samples} | {c.recall:.3f} | {c.precision:.3f} |" for c in worst
    ]
    confused = _most_confused(result)[:5]
    if confused:
        lines += ["", "Most confused:", "", "| true | taken for | samples |", "|---|---|---|"]
        lines += [f"| {cell(a)} | {cell(b)} | {n} |" for a, b, n in confused]
    if test is not None:
        lines += ["", f"## Test split: {test.accuracy:.2%} of {test.samples} samples right", ""]
        lines += figures(test)
    return "\n".join(lines) + "\n"


def figures(result: Evaluation) -> list[str]:
    """The lines of a Markdown table of the figures that every evaluation has."""
    low, high = result.accuracy_low, result.accuracy_high
    top5 = [] if result.top5 is None else [f"| top-5 accuracy | {result.top5:.4f} |"]
    return [
        "| metric | value |",
        "|---|---|",
        f"| accuracy | {result.accuracy:.4f} (95 % interval {low:.4f} to {high:.4f}) |",
        *top5,
        f"| loss | {result.loss:.4f} |",
        f"| macro F1 | {result.macro_f1:.4f} |",
        f"| calibration error | {result.calibration_error:.4f} |",
        *([f"| images left out | {result.skipped} |"] if result.skipped else []),
    ]


def _head(result: Evaluation) -> str:
    return (
        f"<h1>{escape(result.model)}, step {result.step}</h1>"
        f'<p class="soft">{result.correct} of {result.samples} samples of '
        f"{escape(result.split)} right, in {len(result.classes)} classes, each counted once"
        f"{_left_out(result)}</p>{_cards(result)}"
    )


def _test(result: Evaluation) -> str:
    return (
        f'<h2>Test split</h2><p class="soft">{result.correct} of {result.samples} samples that '
        f"nothing was chosen by right{_left_out(result)}</p>{_cards(result)}"
    )


def _cards(result: Evaluation) -> str:
    low, high = result.accuracy_low, result.accuracy_high
    values = [
        ("accuracy", f"{result.accuracy:.2%}"),
        ("95 % interval", f"{low * 100:.1f}–{high * 100:.1f}%"),
        ("loss", f"{result.loss:.4f}"),
        ("macro F1", f"{result.macro_f1:.4f}"),
        ("calibration error", f"{result.calibration_error:.4f}"),
    ]
    if result.top5 is not None:
        values.insert(2, ("top-5 accuracy", f"{result.top5:.2%}"))
    if result.roc_auc is not None:
        values.append(("ROC AUC", f"{result.roc_auc:.4f}"))
    return cards(values)


def _left_out(result: Evaluation) -> str:
    said = f"; {result.skipped} images that cannot be read are left out"
    return said if result.skipped else ""


def _confusion(result: Evaluation) -> str:
    parts = ["<h2>Confusion</h2>"]
    if result.confusion is not None and len(result.classes) <= MAX_CELLS_SIDE:
        names = [c.name for c in result.classes]
        parts.append(f'<div class="scroll">{confusion_matrix(names, result.confusion)}</div>')
    if len(result.classes) > 20:
        rows = "".join(
            f"<tr><td>{escape(true)}</td><td>{escape(said)}</td><td>{count}</td></tr>"
            for true, said, count in _most_confused(result)[:_CONFUSED]
        )
        parts.append(
            '<div class="scroll"><table class="pairs">'
            f"<tr><th>true</th><th>taken for</th><th>samples</th></tr>{rows}</table></div>"
        )
    return "".join(parts)


def _most_confused(result: Evaluation) -> list[tuple[str, str, int]]:
    """(true, predicted, samples) off the diagonal, the most first."""
    names = [c.name for c in result.classes]
    pairs = [
        (names[i], names[j], count)
        for i, row in enumerate(result.confusion or [])
        for j, count in enumerate(row)
        if count and i != j
    ]
    return sorted(pairs, key=lambda pair: -pair[2])


def _classes(result: Evaluation) -> str:
    def rows(results: Sequence[int]) -> str:
        return "".join(
            f"<tr><td>{escape(c.name)}</td><td>{c.samples}</td><td>{c.precision:.3f}</td>"
            f"<td>{c.recall:.3f}</td><td>{c.f1:.3f}</td>"
            f'<td><div class="bar" role="img" aria-label="F1 {c.f1:.2f}">'
            f'<i style="width:{c.f1 * 100:.0f}%"></i></div></td></tr>'
            for c in (result.classes[i] for i in results)
        )

    head = (
        "<tr><th>class</th><th>samples</th><th>precision</th><th>recall</th><th>F1</th>"
        '<th aria-hidden="true"></th></tr>'
    )
    order = sorted(range(len(result.classes)), key=lambda i: result.classes[i].f1)
    shown, folded = order[:20], order[20:]
    table = '<div class="scroll"><table>{}{}</table></div>'
    text = f"<h2>Classes, the lowest F1 first</h2>{table.format(head, rows(shown))}"
    if folded:
        rest = table.format(head, rows(folded))
        text += f"<details><summary>{len(folded)} more</summary>{rest}</details>"
    return text


def _calibration(result: Evaluation) -> str:
    measured = [(b.confidence * 100, b.accuracy) for b in result.calibration]
    ideal = Series("were it calibrated", [(0.0, 0.0), (100.0, 1.0)], 2)
    chart = line_chart(
        "Accuracy",
        [Series("measured", measured, 0), ideal],
        "confidence in %",
        percent=True,
        last_values=False,
    )
    return (
        "<h2>Calibration</h2><p class='soft'>How many were right among the samples told with so "
        f'much confidence; below the diagonal the model is too sure.</p><div class="narrow">{chart}'
        "</div>"
    )


def _mistakes(mistakes: Sequence[Mistake], max_pixels: int) -> str:
    if not mistakes:
        return "<h2>Worst mistakes</h2><p>None.</p>"
    items = "".join(
        f"<li>{_thumbnail(m.where, m.path, max_pixels)}<b>{escape(m.target)}</b> taken for "
        f"<b>{escape(m.predicted)}</b><br><span class='soft'>{m.confidence:.1%} sure</span></li>"
        for m in mistakes
    )
    return f'<h2>Worst mistakes, the highest loss first</h2><ul class="thumbs">{items}</ul>'


def _thumbnail(where: Where, name: str, max_pixels: int) -> str:
    """An `img` with the picture inline as WebP, at most 112 pixels a side."""
    from PIL import Image

    from kfp_ddp.training.images import read

    # Decoded as the model saw it, and so without a second decoder that might refuse it.
    picture = Image.fromarray(read(where, max_pixels=max_pixels).permute(1, 2, 0).numpy())
    tiny = max(picture.size) < THUMBNAIL_SIDE // 2
    picture.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", lossless=tiny, quality=80)
    data = base64.b64encode(buffer.getvalue()).decode()
    kind = ' class="tiny"' if tiny else ""
    said = escape(name)
    return f'<img{kind} src="data:image/webp;base64,{data}" alt="{said}" title="{said}">'


def _provenance(result: Evaluation, config: Mapping[str, object]) -> str:
    facts = {
        "checkpoint": result.checkpoint,
        "checkpoint sha256": result.checkpoint_digest,
        "dataset digest": result.dataset_digest or "not recorded beside the data",
        "samples digest": result.samples_digest,
        "image size": f"{result.image_size} x {result.image_size}",
        "evaluated on": f"{result.device}, in {result.seconds:.1f} s",
    }
    return (
        f"<h2>Where it comes from</h2>{_facts(facts)}"
        f"<details><summary>Configuration of the training</summary>{_facts(config)}</details>"
    )


def _facts(facts: Mapping[str, object]) -> str:
    rows = "".join(
        f"<tr><th scope='row'>{escape(key)}</th><td>{escape(str(value))}</td></tr>"
        for key, value in facts.items()
    )
    return f'<table class="plain">{rows}</table>'

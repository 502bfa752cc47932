"""An evaluation as Markdown, for the KFP UI and model cards."""

from kfp_ddp.core.text import cell
from kfp_ddp.models.evaluation import Evaluation, Figure, Place, figures_for
from kfp_ddp.report.data import confusions
from kfp_ddp.report.render import points_with_interval

_MAX_ROWS = 5
_FORMATS = {"share": ".4f", "number": ".4f", "count": "d"}


def markdown(result: Evaluation, test: Evaluation | None = None) -> str:
    """Return the headline metrics and the classes with the lowest recall."""
    lines = [f"## {result.accuracy:.2%} of {result.samples} samples correct", ""]
    lines += figures(result, "summary")
    if (compared := result.compared) is not None:
        gain = points_with_interval(compared.gain, compared.low, compared.high)
        lines.append(f"| against the champion {cell(compared.champion_version[:12])} | {gain} |")
    worst = sorted((c for c in result.classes if c.samples), key=lambda c: c.recall)[:_MAX_ROWS]
    lines += ["", "Classes with the lowest recall:", "", "| class | samples | recall | precision |"]
    lines.append("|---|---|---|---|")
    lines += [
        f"| {cell(c.name)} | {c.samples} | {c.recall:.3f} | {c.precision:.3f} |" for c in worst
    ]
    pairs = confusions(result)[:_MAX_ROWS]
    if pairs:
        lines += ["", "Most frequent confusions:", ""]
        lines += ["| true | predicted as | samples | of the class |", "|---|---|---|---|"]
        lines += [
            f"| {cell(p.target)} | {cell(p.predicted)} | {p.count} | {p.share:.1%} |" for p in pairs
        ]
    if test is not None:
        lines += ["", f"## Test split: {test.accuracy:.2%} of {test.samples} samples correct", ""]
        lines += figures(test)
    return "\n".join(lines) + "\n"


def figures(result: Evaluation, place: Place = "card") -> list[str]:
    """Return the lines of a Markdown table of metrics."""
    lines = [_figure(result, figure) for figure in figures_for(place)]
    return ["| metric | value |", "|---|---|", *(line for line in lines if line)]


def _figure(result: Evaluation, figure: Figure) -> str:
    """Return the line of a figure; '' if the record lacks it, or has a count of 0."""
    value = getattr(result, figure.name)
    if value is None or (figure.form == "count" and value == 0):
        return ""
    spec = _FORMATS[figure.form]
    text = format(value, spec)
    interval = result.interval(figure.name)
    if figure.interval == "always" and interval is not None:
        text += f" (95 % interval {interval.low:{spec}} to {interval.high:{spec}})"
    return f"| {figure.title} | {text} |"

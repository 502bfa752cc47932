"""An evaluation as Markdown, for the KFP UI and model cards."""

from kfp_ddp.core.text import cell
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.report.data import confusions
from kfp_ddp.report.render import points_with_interval

_MAX_ROWS = 5


def markdown(result: Evaluation, test: Evaluation | None = None) -> str:
    """Return the headline metrics and the classes with the lowest recall."""
    lines = [f"## {result.accuracy:.2%} of {result.samples} samples correct", ""]
    lines += figures(result)
    if result.roc_auc is not None:
        lines.append(f"| ROC AUC | {result.roc_auc:.4f} |")
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


def figures(result: Evaluation) -> list[str]:
    """Return the lines of a Markdown table of metrics."""
    low, high = result.accuracy_low, result.accuracy_high
    balanced, top5 = result.balanced_accuracy, result.top5
    return [
        "| metric | value |",
        "|---|---|",
        f"| accuracy | {result.accuracy:.4f} (95 % interval {low:.4f} to {high:.4f}) |",
        *([] if top5 is None else [f"| top-5 accuracy | {top5:.4f} |"]),
        *([] if balanced is None else [f"| balanced accuracy | {balanced:.4f} |"]),
        f"| loss | {result.loss:.4f} |",
        f"| macro F1 | {result.macro_f1:.4f} |",
        f"| calibration error | {result.calibration_error:.4f} |",
        *([f"| images left out | {result.skipped} |"] if result.skipped else []),
    ]

"""Each rule that looks at the model alone, as applied to it. Plain Python."""

from dataclasses import dataclass

from kfp_ddp.evaluation.gate.rules import Rules
from kfp_ddp.models.evaluation import Evaluation


@dataclass(frozen=True)
class Check:
    """One rule as applied: does it hold, the comparison in words, and its two sides."""

    rule: str
    """The setting, or what is always asked."""
    holds: bool
    words: str
    value: float | None = None
    bound: float | None = None


def at_least(rule: str, what: str, value: float, bound: float) -> Check:
    """Check `value >= bound`."""
    holds = value >= bound
    words = f"{what} {_shown(value, bound)} {'>=' if holds else '<'} {bound:g}"
    return Check(rule, holds, words, value, bound)


def at_most(rule: str, what: str, value: float, bound: float, decimals: int = 4) -> Check:
    """Check `value <= bound`, and tell it with so many decimals if they do."""
    holds = value <= bound
    words = f"{what} {_shown(value, bound, decimals)} {'<=' if holds else '>'} {bound:g}"
    return Check(rule, holds, words, value, bound)


def _shown(value: float, bound: float, decimals: int = 4) -> str:
    """So many decimals, or as many as it takes to tell `value` from 0 and from `bound`."""
    short = f"{value:.{decimals}f}"
    tells = float(short) not in (0.0, bound) or value in (0.0, bound)
    return short if tells else f"{value:.9g}"


def own_checks(rules: Rules, accuracy: float, evaluation: Evaluation | None) -> list[Check]:
    """The rules that look at the model alone.

    Args:
        rules: All of them.
        accuracy: Of the model.
        evaluation: Its record; None where no rule needs it.
    """
    if evaluation is None:
        return [at_least("min_accuracy", "accuracy", accuracy, rules.min_accuracy)]
    checks = [_accuracy(rules, accuracy, evaluation)]
    if rules.min_balanced_accuracy > 0:
        checks.append(_balanced(rules.min_balanced_accuracy, evaluation))
    if rules.min_class_recall > 0:
        checks.append(_class_recall(rules.min_class_recall, evaluation))
    if rules.min_slice_accuracy > 0:
        checks.append(_slices(rules.min_slice_accuracy, rules.min_slice_samples, evaluation))
    if rules.max_calibration_error < 1:
        error, bound = evaluation.calibration_error, rules.max_calibration_error
        checks.append(at_most("max_calibration_error", "calibration error", error, bound))
    return checks + _one_class(evaluation)


def _accuracy(rules: Rules, accuracy: float, evaluation: Evaluation) -> Check:
    what = "accuracy"
    if rules.use_lower_bound:
        what, accuracy = f"lower end of the 95 % interval of the {what}", evaluation.accuracy_low
    return at_least("min_accuracy", what, accuracy, rules.min_accuracy)


def _one_class(evaluation: Evaluation) -> list[Check]:
    """A failure where one class alone has samples: whoever always says it is right."""
    there = [one for one in evaluation.classes if one.samples]
    if len(there) != 1 or len(evaluation.classes) == 1:
        return []
    said = (
        f"all {there[0].samples} samples of {evaluation.split} are of class {there[0].name}, "
        "so nothing is told apart: evaluate on a split with others"
    )
    return [Check("classes", False, said)]


def _balanced(bound: float, evaluation: Evaluation) -> Check:
    rule, found = "min_balanced_accuracy", evaluation.balanced_accuracy
    recalls = [one.recall for one in evaluation.classes if one.samples]
    if found is None and recalls:  # a record of an earlier version
        found = sum(recalls) / len(recalls)
    if found is None:
        return Check(rule, False, f"no class has samples, so no balanced accuracy >= {bound:g}")
    return at_least(rule, "balanced accuracy", found, bound)


def _class_recall(bound: float, evaluation: Evaluation) -> Check:
    rule = "min_class_recall"
    absent = [one.name for one in evaluation.classes if not one.samples]
    if absent:
        more = f" and {len(absent) - 1} more" if absent[1:] else ""
        said = f"class {absent[0]}{more} has no samples in {evaluation.split}, so no recall"
        return Check(rule, False, f"{said} >= {bound:g}")
    if not evaluation.classes:
        return Check(rule, False, f"the evaluation tells of no class, so no recall >= {bound:g}")
    worst = min(evaluation.classes, key=lambda one: one.recall)
    return at_least(rule, f"lowest class recall ({worst.name})", worst.recall, bound)


def _slices(bound: float, least: int, evaluation: Evaluation) -> Check:
    rule, slices = "min_slice_accuracy", evaluation.slices
    if not slices:
        return Check(rule, False, f"no slices were evaluated, so none has accuracy >= {bound:g}")
    judged = [one for one in slices if one.samples >= least]
    if not judged:
        largest = max(slices, key=lambda one: one.samples)
        said = f"the largest slice ({largest.name}={largest.value}) has {largest.samples} samples"
        return Check(rule, False, f"{said}, and {least} are asked for", bound=bound)
    worst = min(judged, key=lambda one: one.accuracy)
    small = len(slices) - len(judged)
    note = f"; {small} with less than {least} not judged" if small else ""
    what = f"lowest slice accuracy ({worst.name}={worst.value}, {worst.samples} samples{note})"
    return at_least(rule, what, worst.accuracy, bound)

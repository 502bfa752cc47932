"""Rules of the gate, and the checks of those that look at the model alone."""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.settings import Settings
from kfp_ddp.core.step import KEY_NAME, KEY_NAME_MEANING
from kfp_ddp.evaluation.comparison import mcnemar
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.models.release import ChampionKey

SIGNIFICANT = 0.05
"""Maximum p-value of the gain over the majority class."""


class Rules(Settings):
    """Thresholds of the gate. By default a model must beat the majority class."""

    patterns: ClassVar = {KEY_NAME: KEY_NAME_MEANING}

    min_accuracy: float = Field(0.0, ge=0, le=1)
    """Minimum accuracy, as a share: 0.97 for 97 %. If it is not set, the model must be
    significantly better than always answering with the largest class of the split."""
    use_lower_bound: bool = False
    """Apply min_accuracy to the lower end of the accuracy's 95 % interval."""
    min_balanced_accuracy: float = Field(0.0, ge=0, le=1)
    """Minimum mean recall of the classes with samples, as a share."""
    min_class_recall: float = Field(0.0, ge=0, le=1)
    """Minimum recall of every class, as a share: 0.97 for 97 %. A class without samples fails."""
    min_slice_accuracy: float = Field(0.0, ge=0, le=1)
    """Minimum accuracy of every slice with at least min_slice_samples, as a share."""
    min_slice_samples: int = Field(30, ge=1)
    """Samples from which min_slice_accuracy applies to a slice."""
    max_calibration_error: float = Field(1.0, ge=0, le=1)
    """Maximum expected calibration error, as a share: 0.05 for 5 %."""
    min_improvement: float = Field(0.0, ge=-1, le=1)
    """Minimum gain of accuracy over the champion, as a share: 0.001 for 0.1 %. At 0 a tie
    passes."""
    max_p_value: float = Field(1.0, gt=0, le=1)
    """Maximum p-value of the gain, by McNemar's exact test on the same samples; 1 for no test."""
    champion_must_exist: bool = False
    """Fail if there is no champion yet, for example after a misspelt name; false for a first
    run."""
    champion_key: ChampionKey = ""
    max_latency_ms: float = Field(0.0, ge=0)
    """Maximum median latency of one image in milliseconds, measured during export; 0 for no
    limit."""
    budget_of: str = "model.onnx"
    """File of the bundle to which the limits of latency and memory apply."""
    max_bundle_mb: float = Field(0.0, ge=0)
    """Maximum size of all files of the bundle, in 10^6 bytes; 0 for no limit."""
    max_memory_mb: float = Field(0.0, ge=0)
    """Maximum memory of a process that only serves the model, in 10^6 bytes; 0 for no limit."""
    must_serve: bool = False
    """Fail if the bundle was not served by a process with only the runtime. Incorrect answers
    always fail."""
    max_variant_loss: float = Field(1.0, ge=0, le=1)
    """Maximum loss of accuracy of a variant against the model, as a share."""
    min_variant_agreement: float = Field(0.0, ge=0, le=1)
    """Minimum share of the samples for which a variant predicts the same class as the model."""

    @property
    def need_bundle(self) -> list[str]:
        """Return the rules that are set and need a bundle."""
        return self._set(
            *("max_latency_ms", "max_bundle_mb", "max_memory_mb", "must_serve"),
            *("max_variant_loss", "min_variant_agreement"),
        )

    def _set(self, *names: str) -> list[str]:
        fields = type(self).model_fields
        return [name for name in names if getattr(self, name) != fields[name].default]

    def check_champion(self, champion: str) -> None:
        """Reject rules that need a champion if there is none."""
        rules = self._set("min_improvement", "max_p_value", "champion_must_exist", "champion_key")
        if rules and not champion:
            raise InputError(
                f"{rules[0]} is set but champion is empty: give the champion's "
                "evaluation.json, its folder or its bundle"
            )

    def check_inputs(self, evaluation: str, bundle: str, champion: str) -> None:
        """Reject rules whose input is missing; InputError names the output to connect."""
        needed = self._set(
            *("use_lower_bound", "min_balanced_accuracy", "min_class_recall"),
            *("min_slice_accuracy", "max_calibration_error"),
        )
        needed += ["champion"] if champion else []
        needed += ["bundle"] if bundle else []
        if needed and not evaluation:
            raise InputError(
                f"{needed[0]} is set but evaluation is empty: connect the evaluation output of "
                "evaluate"
            )
        if self.need_bundle and not bundle:
            raise InputError(
                f"{self.need_bundle[0]} is set but bundle is empty: connect the bundle output of "
                "export"
            )
        self.check_champion(champion)


@dataclass(frozen=True)
class Check:
    """Result of one rule."""

    rule: str
    """Name of the setting, or of a check that always applies."""
    holds: bool
    words: str
    """The comparison as text."""
    value: float | None = None
    bound: float | None = None
    unproven: bool = False
    """It fails only because the samples are too few to tell."""


def check_minimum(rule: str, name: str, value: float, bound: float) -> Check:
    """Check `value >= bound`."""
    holds = value >= bound
    words = f"{name} {_format(value, bound)} {'>=' if holds else '<'} {bound:g}"
    return Check(rule, holds, words, value, bound)


def check_maximum(rule: str, name: str, value: float, bound: float, decimals: int = 4) -> Check:
    """Check `value <= bound`."""
    holds = value <= bound
    words = f"{name} {_format(value, bound, decimals)} {'<=' if holds else '>'} {bound:g}"
    return Check(rule, holds, words, value, bound)


def _format(value: float, bound: float, decimals: int = 4) -> str:
    """Return the value with enough decimals to distinguish it from 0 and from the bound."""
    short = f"{value:.{decimals}f}"
    distinct = float(short) not in (0.0, bound) or value in (0.0, bound)
    return short if distinct else f"{value:.9g}"


def model_checks(rules: Rules, accuracy: float, evaluation: Evaluation | None) -> list[Check]:
    """Apply the rules on the model alone; `evaluation` is None if it is not connected."""
    name = "accuracy"
    if rules.use_lower_bound and evaluation is not None:
        name = "lower end of the 95 % interval of the accuracy"
        accuracy = evaluation.accuracy_low
    if "min_accuracy" in rules.model_fields_set:
        checks = [check_minimum("min_accuracy", name, accuracy, rules.min_accuracy)]
    else:
        checks = [beats_majority(evaluation)]
    if evaluation is None:
        return checks
    if rules.min_balanced_accuracy > 0:
        checks.append(_balanced(rules.min_balanced_accuracy, evaluation))
    if rules.min_class_recall > 0:
        checks.append(_class_recall(rules.min_class_recall, evaluation))
    if rules.min_slice_accuracy > 0:
        checks.append(_slices(rules.min_slice_accuracy, rules.min_slice_samples, evaluation))
    if rules.max_calibration_error < 1:
        error = evaluation.calibration_error
        bound = rules.max_calibration_error
        checks.append(check_maximum("max_calibration_error", "calibration error", error, bound))
    return checks + _single_class(evaluation)


def beats_majority(evaluation: Evaluation | None) -> Check:
    """Compare with always answering the largest class of the split, on the same samples.

    McNemar's exact one-sided test, so the sign test on the samples that only one of the two answers
    correctly. Without results by class the gain is not known.
    """
    rule = "majority_class"
    if evaluation is None or not evaluation.classes:
        words = "no results by class, so it is not known whether the model is better than always "
        words += "answering one class: connect the evaluation output of evaluate, or set "
        return Check(rule, False, f"{words}min_accuracy", None, SIGNIFICANT)
    # Of equally large classes, the one whose answer the model is least significantly better than.
    largest = max(evaluation.classes, key=lambda one: (one.samples, -one.recall))
    shared = min(round(largest.recall * largest.samples), largest.samples, evaluation.correct)
    won = evaluation.correct - shared
    lost = largest.samples - shared
    p_value = mcnemar(won, lost)
    share = largest.samples / evaluation.samples
    other = f'always answering "{largest.name}" ({share * 100:.0f} %)'
    counts = f"{evaluation.correct:,} of {evaluation.samples:,} samples are correct"
    counts += f", {largest.samples:,} would be"
    if won <= lost:
        return Check(rule, False, f"no better than {other}: {counts}", p_value, SIGNIFICANT)
    counts += "; p < 0.001" if p_value < 0.001 else f"; p = {p_value:.2g}"
    if p_value <= SIGNIFICANT:
        return Check(rule, True, f"better than {other}: {counts}", p_value, SIGNIFICANT)
    words = f"too few samples to tell whether it is better than {other}: {counts}; validate on "
    words += "more images, or set min_accuracy"
    return Check(rule, False, words, p_value, SIGNIFICANT, unproven=True)


def _single_class(evaluation: Evaluation) -> list[Check]:
    """Return a failure if all samples are of one of several classes."""
    classes = [one for one in evaluation.classes if one.samples]
    if len(classes) != 1 or len(evaluation.classes) == 1:
        return []
    words = (
        f"all {classes[0].samples} samples of {evaluation.split} are of class {classes[0].name}, "
        "so the accuracy is meaningless: evaluate on a split with other classes"
    )
    return [Check("classes", False, words)]


def _balanced(bound: float, evaluation: Evaluation) -> Check:
    rule = "min_balanced_accuracy"
    value = evaluation.balanced_accuracy
    recalls = [one.recall for one in evaluation.classes if one.samples]
    if value is None and recalls:  # a record of an earlier version
        value = sum(recalls) / len(recalls)
    if value is None:
        return Check(rule, False, f"no class has samples, so no balanced accuracy >= {bound:g}")
    return check_minimum(rule, "balanced accuracy", value, bound)


def _class_recall(bound: float, evaluation: Evaluation) -> Check:
    rule = "min_class_recall"
    empty = [one.name for one in evaluation.classes if not one.samples]
    if empty:
        more = f" and {len(empty) - 1} more" if empty[1:] else ""
        words = f"class {empty[0]}{more} has no samples in {evaluation.split}, so no recall"
        return Check(rule, False, f"{words} >= {bound:g}")
    if not evaluation.classes:
        return Check(rule, False, f"the evaluation has no classes, so no recall >= {bound:g}")
    worst = min(evaluation.classes, key=lambda one: one.recall)
    return check_minimum(rule, f"lowest class recall ({worst.name})", worst.recall, bound)


def _slices(bound: float, min_samples: int, evaluation: Evaluation) -> Check:
    rule = "min_slice_accuracy"
    slices = evaluation.slices
    if not slices:
        return Check(rule, False, f"no slices were evaluated, so no accuracy >= {bound:g}")
    judged = [one for one in slices if one.samples >= min_samples]
    if not judged:
        largest = max(slices, key=lambda one: one.samples)
        words = f"the largest slice ({largest.name}={largest.value}) has {largest.samples} samples"
        return Check(rule, False, f"{words}, but {min_samples} are required", bound=bound)
    worst = min(judged, key=lambda one: one.accuracy)
    small = len(slices) - len(judged)
    note = f"; {small} with less than {min_samples} not judged" if small else ""
    name = f"lowest slice accuracy ({worst.name}={worst.value}, {worst.samples} samples{note})"
    return check_minimum(rule, name, worst.accuracy, bound)

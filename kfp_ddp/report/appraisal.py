"""What a verdict means, in plain words: how often the model errs, and the likely causes."""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.report import sections
from kfp_ddp.report.data import Material
from kfp_ddp.training.spec.network_settings import RANDOM

FEW = 100
"""Training images of a class; with fewer of them, more may help."""
_ROUNDING = 1e-9
_NAMED = 3
"""Classes in a cause."""
Level = Literal["yes", "maybe", "no"]
"""Green, amber or red."""
TITLES: Mapping[tuple[bool, bool], tuple[str, Level]] = {
    (True, False): ("Blessed", "yes"),
    (True, True): ("Blessed, but weak", "maybe"),
    (False, True): ("Not blessed: too few samples to tell", "maybe"),
    (False, False): ("Not blessed", "no"),
}
"""Title and colour of a verdict: whether it is good, and whether that is in doubt."""


class Appraisal(NamedTuple):
    """The title of a verdict with its colour, what holds, and why it is not better."""

    title: str
    level: Level
    words: str = ""
    causes: tuple[str, ...] = ()
    """The main one first; none for a model that is not weak."""


def appraise(material: Material, verdict: Mapping[str, Any]) -> Appraisal:
    """Return what a verdict on an evaluation means."""
    judged = sections.rules(verdict)
    blessed = verdict.get("blessed") is True
    weak = verdict.get("weak") is True
    unproven = bool(judged) and all(rule.holds or rule.unproven for rule in judged)
    title, level = TITLES[blessed, weak if blessed else unproven]
    causes = _causes(material) if weak else ()
    return Appraisal(title, level, expectation(material.result), causes)


def expectation(result: Evaluation) -> str:
    """Return how many new pictures will be wrong, of 10, 100, 1,000 and so on, by their share."""
    wrong = 1 - result.correct / result.samples
    least = (1 - result.accuracy_high) * 100
    most = (1 - result.accuracy_low) * 100
    if result.correct == result.samples:
        return f"none of {result.samples:,} was wrong; of new pictures at most {most:.2g} % will be"
    digits = math.ceil(-math.log10(wrong / 2) - _ROUNDING)
    of = 10**digits
    interval = f"interval {least:.{digits - 1}f} to {most:.{digits - 1}f} %"
    return f"about {wrong * of:.0f} of {of:,} new pictures will be wrong, {interval}"


def _causes(material: Material) -> tuple[str, ...]:
    """Return why a model may be weak, as far as the records of its training tell."""
    training = material.data.dataset.training
    trained = sum(training.values())
    never = material.result.never_right
    causes = []
    if material.config.get("pretrained") in RANDOM:
        causes.append("it began with random weights, not with published ones (pretrained=true)")
    if trained < FEW * len(training):
        causes.append(f"few pictures: {trained:,} to train on, in {len(training):,} classes")
    if never:
        causes.append(f"never right: {', '.join(never[:_NAMED])} ({len(never):,} in all)")
    return tuple(causes)

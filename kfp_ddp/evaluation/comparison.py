"""Comparison of two models on the same samples: gain, interval and p-value."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping

from kfp_ddp.core.errors import InputError
from kfp_ddp.models.evaluation import ClassChange, Compared, Evaluation, Prediction, wilson

LN_2 = math.log(2)


def compare(
    challenger: Evaluation,
    champion: Evaluation,
    predictions: tuple[Mapping[str, Prediction], Mapping[str, Prediction]] | None,
    *,
    where: str,
    version: str,
) -> Compared:
    """Compare a challenger with a champion whose evaluation is of the same samples.

    Without `predictions` of both sides, by path of the sample, only the gain is known. `where` is
    the URI of the champion; `version` is '' if it has none. Raise InputError if the samples of the
    two differ.
    """
    gain = (challenger.correct - champion.correct) / challenger.samples
    accuracy = champion.accuracy
    compared = Compared(
        champion=where, champion_version=version, champion_accuracy=accuracy, gain=gain
    )
    if predictions is None:
        return compared
    won, lost, classes = _differences(*predictions)
    low, high = newcombe(challenger.correct, champion.correct, won, challenger.samples)
    details = {"low": low, "high": high, "p_value": mcnemar(won, lost), "won": won, "lost": lost}
    changes = [classes[one.name] for one in challenger.classes if one.name in classes]
    return compared.model_copy(update={**details, "classes": changes})


def _differences(
    challenger: Mapping[str, Prediction], champion: Mapping[str, Prediction]
) -> tuple[int, int, dict[str, ClassChange]]:
    """Count the samples that one side alone predicted correctly, also by class."""
    if challenger.keys() != champion.keys():
        raise InputError(
            "the predictions of challenger and champion are of other samples than their "
            "evaluations: keep predictions.csv beside the evaluation.json it belongs to"
        )
    by_class: dict[str, Counter[tuple[bool, bool]]] = defaultdict(Counter)
    for path, one in challenger.items():
        by_class[one.target][one.correct, champion[path].correct] += 1
    changes = {}
    for name, counts in by_class.items():
        won = counts[True, False]
        lost = counts[False, True]
        both = counts[True, True]
        if won or lost:
            samples = counts.total()
            low, high = newcombe(both + won, both + lost, won, samples)
            counted = {"samples": samples, "won": won, "lost": lost}
            gain = (won - lost) / samples
            changes[name] = ClassChange(name=name, **counted, gain=gain, low=low, high=high)
    all_won = sum(change.won for change in changes.values())
    all_lost = sum(change.lost for change in changes.values())
    return all_won, all_lost, changes


def mcnemar(won: int, lost: int) -> float:
    """Return the exact one-sided p-value of the gain (McNemar 1947, Psychometrika 12).

    The probability of at least `won` heads in `won + lost` fair coin flips; 1 for no flips.
    """
    if won < lost:
        return 1 - mcnemar(lost + 1, won - 1) if won else 1.0
    n = won + lost
    term = math.exp(math.lgamma(n + 1) - math.lgamma(won + 1) - math.lgamma(lost + 1) - n * LN_2)
    total = term
    for heads in range(won + 1, n + 1):
        term *= (n - heads + 1) / heads
        total += term
    return min(total, 1.0)


def newcombe(first: int, second: int, won: int, samples: int) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two shares of the same samples.

    Newcombe 1998, Statistics in Medicine 17:2635, method 10: the squared sum of both Wilson
    intervals, with the correlation of the two. `first` and `second` are the correct samples of the
    models, `won` those that are only correct in the first.
    """
    lost = second - (first - won)
    p = first / samples
    q = second / samples
    p_low, p_high = wilson(first, samples)
    q_low, q_high = wilson(second, samples)
    margins = first * (samples - first) * second * (samples - second)
    determinant = (first - won) * (samples - second - won) - won * lost
    shrunk = max(determinant - samples / 2, 0.0) if determinant > 0 else determinant
    phi = shrunk / math.sqrt(margins) if margins else 0.0

    def half(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * phi * a * b + b * b, 0.0))

    low, high = half(p - p_low, q_high - q), half(p_high - p, q - q_low)
    return max(-1.0, p - q - low), min(1.0, p - q + high)

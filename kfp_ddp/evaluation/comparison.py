"""Comparison of two models on the same samples: gain, interval and p-value."""

import math
from collections.abc import Iterable, Mapping

from kfp_ddp.core.errors import InputError
from kfp_ddp.models.evaluation import ClassChange, Compared, Evaluation, Prediction, wilson


def compare(
    challenger: Evaluation,
    champion: Evaluation,
    predictions: tuple[Mapping[str, Prediction], Mapping[str, Prediction]] | None,
    *,
    where: str,
    version: str,
) -> Compared:
    """Compare the challenger with the champion.

    Args:
        challenger: Its evaluation.
        champion: Its evaluation, of the same samples.
        predictions: Of each side by path of the sample; None if unknown.
        where: URI of the champion.
        version: Of the champion; '' without one.

    Raises:
        InputError: The samples of the two differ.
    """
    gain = (challenger.correct - champion.correct) / challenger.samples
    compared = Compared(
        champion=where,
        champion_version=version,
        champion_accuracy=champion.accuracy,
        gain=gain,
    )
    if predictions is None:
        return compared
    won, lost = discordant(*({p: one.correct for p, one in side.items()} for side in predictions))
    low, high = newcombe(challenger.correct, champion.correct, won, challenger.samples)
    return compared.model_copy(
        update={
            "low": low,
            "high": high,
            "p_value": mcnemar(won, lost),
            "won": won,
            "lost": lost,
            "classes": _changes([one.name for one in challenger.classes], *predictions),
        }
    )


def _changes(
    names: Iterable[str], challenger: Mapping[str, Prediction], champion: Mapping[str, Prediction]
) -> list[ClassChange]:
    """Return the classes in which the two differ."""
    counts = {name: [0, 0, 0, 0] for name in names}
    for path, one in challenger.items():
        own = counts.get(one.target)
        if own is None:  # not a class of the evaluation
            continue
        ours, theirs = one.correct, champion[path].correct
        for at, is_so in enumerate((True, ours, theirs, ours and not theirs)):
            own[at] += is_so
    changes = []
    for name, (samples, right, right_before, won) in counts.items():
        lost = right_before - (right - won)
        if won or lost:
            low, high = newcombe(right, right_before, won, samples)
            counted = {"samples": samples, "won": won, "lost": lost}
            gain = (won - lost) / samples
            changes.append(ClassChange(name=name, **counted, gain=gain, low=low, high=high))
    return changes


def discordant(challenger: Mapping[str, bool], champion: Mapping[str, bool]) -> tuple[int, int]:
    """Count the samples that only the challenger, and that only the champion predicted correctly.

    Raises:
        InputError: The samples of the two differ.
    """
    if challenger.keys() != champion.keys():
        raise InputError(
            "the predictions of challenger and champion are of other samples than their "
            "evaluations: keep predictions.csv beside the evaluation.json it belongs to"
        )
    won = sum(hit and not champion[path] for path, hit in challenger.items())
    lost = sum(champion[path] and not hit for path, hit in challenger.items())
    return won, lost


def mcnemar(won: int, lost: int) -> float:
    """Return the exact one-sided p-value of the gain (McNemar 1947, Psychometrika 12).

    The probability of at least `won` heads in `won + lost` fair coin flips; 1 for no flips.
    """
    n = won + lost
    term = total = 1
    for heads in range(n, won, -1):
        term = term * heads // (n - heads + 1)
        total += term
    return total / (1 << n)


def newcombe(first: int, second: int, won: int, samples: int) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two shares of the same samples.

    Newcombe 1998, Statistics in Medicine 17:2635, method 10: the squared sum of both Wilson
    intervals, with the correlation of the two.

    Args:
        first: Correct samples of the first model.
        second: Correct samples of the second model.
        won: Samples that are only correct in the first model.
        samples: Number of samples.
    """
    lost = second - (first - won)
    p, q = first / samples, second / samples
    (p_low, p_high), (q_low, q_high) = wilson(first, samples), wilson(second, samples)
    margins = first * (samples - first) * second * (samples - second)
    determinant = (first - won) * (samples - second - won) - won * lost
    shrunk = max(determinant - samples / 2, 0.0) if determinant > 0 else determinant
    phi = shrunk / math.sqrt(margins) if margins else 0.0

    def half(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * phi * a * b + b * b, 0.0))

    low, high = half(p - p_low, q_high - q), half(p_high - p, q - q_low)
    return max(-1.0, p - q - low), min(1.0, p - q + high)

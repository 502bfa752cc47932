"""Two models on the same samples: who told which right, and what that says of the gain."""

import math
from collections.abc import Iterable, Mapping

from kfp_ddp.core.errors import InputError
from kfp_ddp.models.evaluation import ClassChange, Compared, Evaluation, Told, wilson


def compare(
    challenger: Evaluation,
    champion: Evaluation,
    told: tuple[Mapping[str, Told], Mapping[str, Told]] | None,
    *,
    where: str,
    version: str,
) -> Compared:
    """The challenger against the champion.

    Args:
        challenger: Its evaluation.
        champion: Its evaluation, of the same samples.
        told: What each said of each sample, by path; None where that is not known.
        where: Where the champion lies.
        version: Of the champion; '' where it has none.

    Raises:
        InputError: if the two do not hold the same samples.
    """
    gain = (challenger.correct - champion.correct) / challenger.samples
    known = Compared(
        champion=where,
        champion_version=version,
        champion_accuracy=champion.accuracy,
        gain=gain,
    )
    if told is None:
        return known
    won, lost = discordant(*({p: one.right for p, one in side.items()} for side in told))
    low, high = newcombe(challenger.correct, champion.correct, won, challenger.samples)
    return known.model_copy(
        update={
            "low": low,
            "high": high,
            "p_value": mcnemar(won, lost),
            "won": won,
            "lost": lost,
            "classes": _changes([one.name for one in challenger.classes], *told),
        }
    )


def _changes(
    names: Iterable[str], challenger: Mapping[str, Told], champion: Mapping[str, Told]
) -> list[ClassChange]:
    """The classes in which the two differ."""
    counts = {name: [0, 0, 0, 0] for name in names}
    for path, one in challenger.items():
        own = counts.get(one.target)
        if own is None:  # the evaluation does not name it
            continue
        ours, theirs = one.right, champion[path].right
        for at, is_so in enumerate((True, ours, theirs, ours and not theirs)):
            own[at] += is_so
    found = []
    for name, (samples, right, right_before, won) in counts.items():
        lost = right_before - (right - won)
        if won or lost:
            low, high = newcombe(right, right_before, won, samples)
            counted = {"samples": samples, "won": won, "lost": lost}
            gain = (won - lost) / samples
            found.append(ClassChange(name=name, **counted, gain=gain, low=low, high=high))
    return found


def discordant(challenger: Mapping[str, bool], champion: Mapping[str, bool]) -> tuple[int, int]:
    """Samples only the challenger got right, and those only the champion got right.

    Raises:
        InputError: if the two do not hold the same samples.
    """
    if challenger.keys() != champion.keys():
        raise InputError(
            "the predictions of challenger and champion name other samples than their "
            "evaluations: keep predictions.csv beside the evaluation.json it belongs to"
        )
    won = sum(hit and not champion[path] for path, hit in challenger.items())
    lost = sum(champion[path] and not hit for path, hit in challenger.items())
    return won, lost


def mcnemar(won: int, lost: int) -> float:
    """Exact one-sided p-value that the challenger is no better (McNemar 1947, Psychometrika 12).

    The chance of at least `won` heads in `won + lost` fair throws; 1 without any.
    """
    n = won + lost
    term = total = 1
    for heads in range(n, won, -1):
        term = term * heads // (n - heads + 1)
        total += term
    return total / (1 << n)


def newcombe(first: int, second: int, won: int, samples: int) -> tuple[float, float]:
    """The 95 % interval of the difference of two shares of the same samples.

    Newcombe 1998, Statistics in Medicine 17:2635, method 10: Wilson's intervals of the two, added
    as squares with the correlation of the two.

    Args:
        first: Samples that the first told right.
        second: Samples that the second told right.
        won: Samples that only the first told right.
        samples: All.
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

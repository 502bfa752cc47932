"""Models on the same samples."""

import math
from itertools import product

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.evaluation.comparison import compare, mcnemar, newcombe
from kfp_ddp.models.evaluation import ClassResult, Evaluation, Prediction, wilson
from tests import evaluations

Side = dict[str, Prediction]


def sides(rows: list[tuple[str, bool, bool]]) -> tuple[Side, Side]:
    """Class, and whether the challenger and the champion told it, of each sample."""
    ours = {f"{at}.png": Prediction(name, right) for at, (name, right, _) in enumerate(rows)}
    theirs = {f"{at}.png": Prediction(name, right) for at, (name, _, right) in enumerate(rows)}
    return ours, theirs


def record(side: Side) -> Evaluation:
    names = sorted({one.target for one in side.values()})
    classes = [ClassResult(name=name, samples=1, precision=0, recall=0, f1=0) for name in names]
    correct = sum(one.correct for one in side.values())
    return evaluations.record(correct, len(side), classes=classes)


@pytest.mark.parametrize(
    ("both", "won", "lost", "neither", "low", "high"),
    [
        (36, 12, 2, 0, 0.0569, 0.3404),  # Newcombe 1998, Statistics in Medicine 17:2635
        (14, 5, 0, 22, 0.0115, 0.2265),  # Altman 2000, Statistics with Confidence, table 6.2
        (1, 1, 7, 12, -0.5069, -0.0256),  # Fagerland 2014, Statistics in Medicine 33:2850
    ],
)
def test_newcombe(both: int, won: int, lost: int, neither: int, low: float, high: float) -> None:
    n = both + won + lost + neither
    assert newcombe(both + won, both + lost, won, n) == pytest.approx((low, high), abs=6e-5)


def test_the_interval_holds_the_gain_and_turns_around_with_the_sides() -> None:
    for both, won, lost, neither in product((0, 1, 7, 300), repeat=4):
        n = both + won + lost + neither
        if n:
            low, high = newcombe(both + won, both + lost, won, n)
            assert -1 <= low <= (won - lost) / n + 1e-12
            assert (won - lost) / n - 1e-12 <= high <= 1
            turned = newcombe(both + lost, both + won, lost, n)
            assert turned == pytest.approx((-high, -low), abs=1e-12)


def test_newcombe_where_one_share_leaves_no_correlation() -> None:
    (_, high), (low, _) = wilson(0, 20), wilson(5, 20)
    result = newcombe(0, 5, 0, 20)
    assert result[1] == pytest.approx(-0.25 + math.hypot(high, 0.25 - low))
    low, high = wilson(1, 2)  # and where the correction for continuity takes all of it
    half = math.hypot(0.5 - low, high - 0.5)
    assert newcombe(1, 1, 0, 2) == pytest.approx((-half, half))


def test_mcnemar_against_the_binomial_test() -> None:
    stats = pytest.importorskip("scipy.stats")
    for won, lost in [(0, 0), (0, 4), (4, 0), (30, 12), (500, 430), (3000, 2900)]:
        n = won + lost
        expected = stats.binomtest(won, n, 0.5, alternative="greater").pvalue if n else 1.0
        assert mcnemar(won, lost) == pytest.approx(expected, rel=1e-9)


def test_the_gain_is_told_with_its_interval_and_by_class() -> None:
    rows = [("cat", True, False)] * 6 + [("cat", True, True)] * 20 + [("dog", False, True)] * 2
    ours, theirs = sides(rows + [("dog", True, True)] * 22)
    mine, before = record(ours), record(theirs)
    result = compare(mine, before, (ours, theirs), where="gs://b/m", version="0123456789ab")
    assert result.gain == pytest.approx(mine.accuracy - before.accuracy) == pytest.approx(4 / 50)
    assert (result.low, result.high) == newcombe(48, 44, 6, 50)
    assert (result.won, result.lost, result.p_value) == (6, 2, mcnemar(6, 2))
    by_class = {one.name: (one.samples, one.won, one.lost, one.gain) for one in result.classes}
    assert by_class == {"cat": (26, 6, 0, 6 / 26), "dog": (24, 0, 2, -2 / 24)}
    assert (result.classes[0].low, result.classes[0].high) == newcombe(26, 20, 6, 26)
    assert result.champion_accuracy == before.accuracy


def test_other_samples_do_not_compare() -> None:
    ours, theirs = sides([("cat", True, False), ("dog", True, True)])
    theirs["other.png"] = theirs.pop("0.png")
    with pytest.raises(InputError, match="other samples than their evaluations"):
        compare(record(ours), record(theirs), (ours, theirs), where="m", version="")

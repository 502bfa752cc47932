"""The ROC and the areas under it."""

from decimal import Decimal, localcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kfp_ddp.evaluation import measure, roc
from kfp_ddp.evaluation.measure import Tally
from kfp_ddp.evaluation.roc import Roc

SCALES = (1e-6, 1e-3, 0.01, 0.3, 1.0, 5.0, 30.0, 300.0, 1e4)


def logits_and_targets(n: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return informative logits, with equal rows, and targets."""
    draw = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (n,), generator=draw)
    targets[:2] = torch.tensor([0, 1])
    logits = torch.randn(n, classes, generator=draw)
    logits[torch.arange(n), targets] += 1.2
    logits[n // 2 : n // 2 + n // 8] = logits[: n // 8]
    return logits, targets


def tally_of(logits: Tensor, targets: Tensor, size: int = 10_000) -> Tally:
    tally = Tally(logits.shape[1])
    for part, truth in zip(torch.split(logits, size), torch.split(targets, size), strict=True):
        tally.update(part, truth)
    return tally


def curve_of(logits: Tensor, targets: Tensor) -> Roc:
    curve = tally_of(logits, targets).areas().roc
    assert curve is not None
    return curve


def exact_area(logits: Tensor, targets: Tensor) -> float:
    """Return the share of pairs whose positive is higher, scores compared with 60 digits."""
    positive: list[Decimal] = []
    negative: list[Decimal] = []
    with localcontext() as context:
        context.prec = 60  # more than needed, so that equal odds are equal after rounding
        context.Emin, context.Emax = -(10**9), 10**9
        for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
            powers = [Decimal(value).exp() for value in row]
            for name in [1] if len(row) == 2 else range(len(row)):
                others = sum(sorted(p for at, p in enumerate(powers) if at != name))
                odds = (powers[name] / others).ln().quantize(Decimal("1e-40"))
                (positive if name == target else negative).append(odds)
    wins = sum((p > n) + 0.5 * (p == n) for p in positive for n in negative)
    return wins / (len(positive) * len(negative))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.sampled_from([2, 3, 10]), st.sampled_from(SCALES), st.integers(0, 99), st.booleans())
def test_area_is_that_of_all_pairs(classes: int, scale: float, seed: int, coarse: bool) -> None:
    logits, targets = logits_and_targets(48, classes, seed)
    logits = (2 * logits).round() / 2 if coarse else logits * scale  # coarse logits have ties
    areas = tally_of(logits, targets, 7 + seed % 9).areas()
    assert areas.roc is not None
    assert areas.roc.area == pytest.approx(exact_area(logits, targets), abs=1e-12)


@pytest.mark.parametrize("classes", [2, 10, 60])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_areas_agree_with_sklearn(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    monkeypatch.setattr(roc, "_BLOCK", 1000)  # so that there are many blocks
    logits, targets = logits_and_targets(400, classes, seed=2)
    targets[targets == 59] = 0
    areas = tally_of(logits, targets, 250).areas()
    score = logits.double().softmax(1)
    truth = torch.nn.functional.one_hot(targets, classes)
    known = range(min(classes, 59))
    expected = [sklearn.roc_auc_score(truth[:, name], score[:, name]) for name in known]
    assert areas.per_class == pytest.approx([*expected, *[None] * (classes - len(known))])
    assert areas.macro == pytest.approx(sum(expected) / len(known))
    curve = areas.roc
    assert curve is not None
    pooled = (targets, score[:, 1]) if classes == 2 else (truth.ravel(), score.ravel())
    assert curve.area == pytest.approx(sklearn.roc_auc_score(*pooled), abs=1e-12)
    false, true = curve.false_positive_rate, curve.true_positive_rate
    assert len(false) == len(true) == len(curve.threshold) <= 200
    assert (false[0], true[0], curve.threshold[0]) == (0, 0, 1)
    assert (false[-1], true[-1]) == (1, 1)
    assert sorted(false) == false
    assert torch.tensor([false, true, curve.threshold]).isfinite().all()


def test_curve_is_made_of_points_of_the_exact_one() -> None:
    logits, targets = logits_and_targets(3000, 2, seed=1)
    curve = curve_of(2 * logits, targets)
    scores = 2 * (logits[:, 1].double() - logits[:, 0].double())
    points = zip(curve.threshold, curve.false_positive_rate, curve.true_positive_rate, strict=True)
    next(points)
    for threshold, fpr, tpr in points:
        positive = scores.sigmoid() >= threshold - 1e-12
        assert fpr == pytest.approx(float(positive[targets == 0].double().mean()), abs=2e-3)
        assert tpr == pytest.approx(float(positive[targets == 1].double().mean()), abs=2e-3)
    ends = [1.0, *(float(end.sigmoid()) for end in (scores.max(), scores.min()))]
    assert [*curve.threshold[:2], curve.threshold[-1]] == pytest.approx(ends, abs=1e-12)


def test_curve_has_99_levels_of_each_side_and_the_origin() -> None:
    logits, targets = torch.zeros(1960, 2), torch.arange(1960) % 2
    logits[:, 1] = torch.linspace(-3, 3, 1960)
    curve = curve_of(logits, targets)
    assert len(curve.threshold) == len(curve.true_positive_rate) == 199


def test_areas_are_empty_without_scores_and_with_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Tally(3).areas().roc is None
    one_class = tally_of(logits_and_targets(50, 2)[0], torch.zeros(50, dtype=torch.int64)).areas()
    assert (one_class.roc, one_class.per_class, one_class.macro) == (None, [None, None], None)
    logits, targets = logits_and_targets(100, 3)
    few = tally_of(logits, targets)
    assert few.areas().roc is not None
    monkeypatch.setattr(measure, "MOST_SCORES", 3 * 100)
    many = tally_of(logits.repeat(2, 1), targets.repeat(2), 100)
    merged = Tally(3)
    merged.merge([few.state(), many.state()])
    for tally, samples in ((many, 200), (merged, 300)):
        areas = tally.areas()
        assert (tally.samples, len(tally.state()["logits"])) == (samples, 0)
        assert (areas.roc, areas.macro) == (None, None)


def test_curve_counts_the_negatives_of_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three classes with a block each."""
    monkeypatch.setattr(roc, "_BLOCK", 60)
    logits, targets = logits_and_targets(60, 3, seed=5)
    curve = curve_of(logits, targets)
    others = [logits.double()[:, [at for at in range(3) if at != c]] for c in range(3)]
    odds = torch.stack([logits.double()[:, c] - o.logsumexp(1) for c, o in enumerate(others)], 1)
    negative = odds[torch.nn.functional.one_hot(targets, 3) == 0].sigmoid()
    assert len(curve.threshold) > 20
    for threshold, rate in zip(curve.threshold[1:], curve.false_positive_rate[1:], strict=True):
        assert rate == pytest.approx(float((negative >= threshold - 1e-12).double().mean()))

"""The area under the ROC is exact, however the logits are scaled."""

from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor

from kfp_ddp.evaluation import measure, roc
from kfp_ddp.evaluation.measure import Tally

SCALES = (1e-6, 1e-3, 0.01, 0.3, 1.0, 5.0, 30.0, 300.0, 1e4)


def drawn(n: int, classes: int, scale: float, seed: int) -> tuple[Tensor, Tensor]:
    """Logits that know something, some rows of them twice, so that there are ties."""
    draw = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (n,), generator=draw)
    targets[:2] = torch.tensor([0, 1])
    logits = torch.randn(n, classes, generator=draw)
    logits[torch.arange(n), targets] += 1.2
    logits[n // 2 : n // 2 + n // 8] = logits[: n // 8]
    return logits * scale, targets


def exact(logits: Tensor, targets: Tensor) -> float:
    """Pairs won by the positive over all pairs, scores compared with 60 digits."""
    positive: list[Decimal] = []
    negative: list[Decimal] = []
    with localcontext() as context:
        context.prec = 60
        context.Emin, context.Emax = -(10**9), 10**9
        for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
            powers = [Decimal(value).exp() for value in row]
            for name in [1] if len(row) == 2 else range(len(row)):
                others = sum((p for at, p in enumerate(powers) if at != name), Decimal(0))
                (positive if name == target else negative).append(powers[name] / others)
    wins = sum((p > n) + 0.5 * (p == n) for p in positive for n in negative)
    return wins / (len(positive) * len(negative))


def area(logits: Tensor, targets: Tensor, sizes: int) -> float:
    tally = Tally(logits.shape[1])
    for some, truth in zip(torch.split(logits, sizes), torch.split(targets, sizes), strict=True):
        tally.update(some, truth)
    roc = tally.roc()
    assert roc is not None
    return roc.area


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("scale", SCALES)
def test_the_area_is_that_of_all_pairs(classes: int, scale: float) -> None:
    for seed in range(8):
        logits, targets = drawn(48, classes, scale, seed)
        assert area(logits, targets, 7 + seed) == pytest.approx(exact(logits, targets), abs=1e-12)


def test_the_curve_goes_through_points_of_the_exact_one() -> None:
    logits, targets = drawn(3000, 2, 2.0, 1)
    tally = Tally(2)
    tally.update(logits, targets)
    roc = tally.roc()
    assert roc is not None
    scores = (logits[:, 1] - logits[:, 0]).double().sigmoid()
    points = zip(roc.threshold, roc.false_positive_rate, roc.true_positive_rate, strict=True)
    next(points)
    for threshold, fpr, tpr in points:
        told = scores >= threshold - 1e-12
        assert fpr == pytest.approx(float(told[targets == 0].double().mean()), abs=2e-3)
        assert tpr == pytest.approx(float(told[targets == 1].double().mean()), abs=2e-3)


def test_the_curve_has_as_many_points_as_can_be_told() -> None:
    """99 levels of the scores of each side, and the origin."""
    logits, targets = torch.zeros(1960, 2), torch.arange(1960) % 2
    logits[:, 1] = torch.linspace(-3, 3, 1960)
    tally = Tally(2)
    tally.update(logits, targets)
    roc = tally.roc()
    assert roc is not None
    assert len(roc.threshold) == len(roc.true_positive_rate) == 199


def test_more_scores_than_are_kept_give_no_roc_and_hold_no_more_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "MOST_SCORES", 3 * 100)
    logits, targets = drawn(100, 3, 1.0, 0)
    tally = Tally(3)
    tally.update(logits, targets)
    assert tally.roc() is not None
    for _ in range(5):
        tally.update(logits, targets)
    assert tally.roc() is None
    assert tally.logits_in_memory == 0
    assert tally.samples == 600


def test_the_curve_begins_before_the_highest_score_and_ends_at_the_lowest() -> None:
    logits, targets = drawn(5000, 2, 1.0, 3)
    tally = Tally(2)
    tally.update(logits, targets)
    roc = tally.roc()
    assert roc is not None
    odds = logits.double()[:, 1] - logits.double()[:, 0]
    assert roc.threshold[0] == 1.0
    assert roc.threshold[1] == pytest.approx(float(odds.max().sigmoid()), abs=1e-12)
    assert roc.threshold[-1] == pytest.approx(float(odds.min().sigmoid()), abs=1e-12)


@pytest.mark.parametrize(
    ("odds", "levels", "false", "true"),
    [
        (range(12), [11, 9, 7, 6, 5, 3, 1, 0], [0, 1, 2, 3, 3, 4, 5, 6], [1, 2, 3, 3, 4, 5, 6, 6]),
        (
            range(11, -1, -1),
            [11, 9, 8, 7, 5, 3, 2, 1, 0],
            [0, 1, 2, 2, 3, 4, 5, 5, 6],
            [1, 2, 2, 3, 4, 5, 5, 6, 6],
        ),
    ],
)
def test_of_many_scores_some_and_the_lowest_are_levels(
    odds: range,
    levels: list[int],
    false: list[int],
    true: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The odd of 12 log-odds are positive. Of all every third is drawn, and of those the even."""
    monkeypatch.setattr(roc, "_BLOCK", 4)
    score, tally = torch.tensor(odds), Tally(2)
    tally.update(torch.stack([torch.zeros(12), score.float()], 1), score % 2)
    found = tally.roc()
    assert found is not None
    told = torch.tensor(levels).double().sigmoid().tolist()
    assert found.threshold == pytest.approx([1.0, *told], abs=1e-15)
    assert found.false_positive_rate == pytest.approx([0, *(n / 6 for n in false)])
    assert found.true_positive_rate == pytest.approx([0, *(n / 6 for n in true)])
    assert found.area == 21 / 36
    assert tally.areas().per_class == [21 / 36, 21 / 36]


def test_the_curve_counts_the_negatives_of_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block for each class, where three times as many scores as a block holds are there."""
    monkeypatch.setattr(roc, "_BLOCK", 60)
    logits, targets = drawn(60, 3, 1.0, 5)
    tally = Tally(3)
    tally.update(logits, targets)
    found = tally.roc()
    assert found is not None
    others = [logits.double()[:, [at for at in range(3) if at != c]] for c in range(3)]
    odds = torch.stack([logits.double()[:, c] - o.logsumexp(1) for c, o in enumerate(others)], 1)
    negative = odds[torch.nn.functional.one_hot(targets, 3) == 0].sigmoid()
    assert len(found.threshold) > 20
    for threshold, rate in zip(found.threshold[1:], found.false_positive_rate[1:], strict=True):
        assert rate == pytest.approx(float((negative >= threshold - 1e-12).double().mean()))


def test_logits_without_their_targets_have_no_areas() -> None:
    logits, targets = torch.eye(2).numpy(), torch.arange(2).numpy()
    with pytest.raises(ValueError, match="zip"):
        roc.areas([logits], [targets, targets], 2)

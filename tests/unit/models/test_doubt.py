"""Which predictions are sure, by the files of a bundle."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.models import bundle as bundles
from kfp_ddp.models.doubt import UNKNOWN, Thresholds, read
from kfp_ddp.models.evaluation import PREDICTIONS, Prediction, best_cut, cuts
from tests.evaluations import record

RIGHT, WRONG = (True, False)


def predictions(*parts: tuple[float, int, bool]) -> list[Prediction]:
    """Return predictions by their probability, number, and whether they are right."""
    return [Prediction("a", right, sure) for sure, many, right in parts for _ in range(many)]


MIXED = predictions((0.9, 60, RIGHT), (0.5, 20, RIGHT), (0.9, 2, WRONG), (0.5, 10, WRONG))


def bundle(folder: Path, some: list[Prediction], energy: list[float]) -> Path:
    """Write the files of a bundle of an evaluation, and seal it."""
    folder.mkdir(exist_ok=True)
    rows = [
        f"{at}.png,a,{'a' if one.correct else 'b'},{one.confidence:.6f},0.1\n"
        for at, one in enumerate(some)
    ]
    (folder / PREDICTIONS).write_text("path,target,predicted,confidence,loss\n" + "".join(rows))
    right = sum(one.correct for one in some)
    (folder / bundles.METRICS).write_text(record(right, len(some)).model_dump_json())
    lines = "".join(f"0.9,{value},1,2\n" for value in energy)
    reference = f"confidence,energy,embedding_0,embedding_1\n{lines}"
    (folder / bundles.REFERENCE).write_text(reference)
    bundles.seal(folder)
    return folder


def logits(confidence: float, energy: float) -> list[float]:
    """Return the logits of two classes with these values."""
    return [energy + math.log(confidence), energy + math.log1p(-confidence)]


def test_equal_probabilities_are_kept_together() -> None:
    high, low = cuts(MIXED)
    assert tuple(high) == pytest.approx((0.9, 62, 30 / 92, 2 / 62))
    assert tuple(low) == pytest.approx((0.5, 92, 0, 12 / 92))
    assert cuts(reversed(MIXED)) == cuts(MIXED)


@pytest.mark.parametrize(
    "some",
    [
        [],
        predictions((0.9, 500, RIGHT)),  # no mistake
        predictions((0.9, 500, RIGHT), (0.5, 2, WRONG)),  # too few
        predictions((0.9, 5, RIGHT), (0.5, 5, WRONG)),
        predictions((0.9, 300, RIGHT), (0.9, 200, WRONG)),  # all alike
        predictions((0.9, 200, WRONG), (0.5, 300, RIGHT)),  # the sure ones are wrong
        predictions((0.9, 300, WRONG)),
        predictions((math.nan, 30, RIGHT), (0.5, 20, WRONG)),
    ],
    ids=str,
)
def test_there_may_be_no_threshold_of_the_probability(some: list[Prediction]) -> None:
    result = record(sum(one.correct for one in some), max(len(some), 1))
    with pytest.raises(InputError, match="evaluat"):
        best_cut(result, cuts(some))


def test_what_is_kept_errs_half_as_often_and_is_as_much_as_can_be() -> None:
    draw = np.random.default_rng(0)
    sure = draw.uniform(0.5, 1, 2000).round(3)
    right = draw.random(2000) < sure
    some = [Prediction("a", bool(good), float(one)) for one, good in zip(sure, right, strict=True)]
    chosen = best_cut(record(int(right.sum()), 2000), cuts(some))
    shares = {
        float(least): float((~right)[sure >= least].mean())
        for least in np.unique(sure)
        if (sure >= least).sum() >= 20
    }
    half = (~right).mean() / 2
    assert chosen.probability == min(least for least, share in shares.items() if share <= half)
    assert chosen.wrong == pytest.approx(shares[chosen.probability])
    assert chosen.passed_on == pytest.approx((sure < chosen.probability).mean())


def test_sure_is_what_is_likely_and_usual(tmp_path: Path) -> None:
    folder = bundle(tmp_path, MIXED, [float(at) for at in range(101)])
    thresholds = read(bundles.local_bundle(folder))
    assert (thresholds.probability, thresholds.notes) == (0.9, ())
    assert thresholds.energy == pytest.approx(5, abs=0.02)
    rows = [(0.95, 6), (0.9, 6), (0.899, 6), (0.95, 4), (0.6, 4), (0.95, 100), (0.95, 101)]
    scores = np.array([logits(*row) for row in rows], np.float32)
    assert thresholds.sure(scores) == [True, True, False, False, False, True, False]
    assert thresholds.sure(scores[:0]) == []
    assert thresholds.sure(np.array([[np.nan, 0]], np.float32)) == [False]


def test_the_most_probable_images_are_sure_though_six_digits_round_them_up(tmp_path: Path) -> None:
    some = predictions((1.0, 60, RIGHT), (0.5, 20, WRONG))
    thresholds = read(bundles.local_bundle(bundle(tmp_path, some, [1.0] * 30)))
    assert thresholds.sure(np.array([logits(0.9999997, 1)])) == [True]
    assert thresholds.sure(np.array([logits(0.9999, 1 - 1e-6)])) == [False]


@pytest.mark.parametrize(
    ("lacking", "has"),
    [
        ((), ("energy", "probability")),
        ((PREDICTIONS,), ("energy",)),
        ((bundles.METRICS,), ("energy",)),
        ((bundles.REFERENCE,), ("probability",)),
        ((PREDICTIONS, bundles.REFERENCE), ()),
    ],
)
@pytest.mark.parametrize("how", ["never written", "lost", "changed"])
def test_what_a_bundle_lacks_is_said_and_the_rest_decides(
    tmp_path: Path, lacking: tuple[str, ...], has: tuple[str, ...], how: str
) -> None:
    folder = bundle(tmp_path, MIXED, [float(at) for at in range(101)])
    for name in lacking:
        if how == "changed":
            (folder / name).write_text("{}")
        else:
            (folder / name).unlink()
    if how == "never written":
        bundles.seal(folder)
    thresholds = read(bundles.local_bundle(folder))
    missing = {"energy", "probability"} - set(has)
    assert len(thresholds.notes) == len(missing)
    assert all(any(name in note for note in thresholds.notes) for name in missing)
    assert thresholds.known == bool(has)
    scores = np.array([logits(0.95, 6), logits(0.6, 6), logits(0.95, 1)])
    expected = [True, "probability" not in has, "energy" not in has]
    assert thresholds.sure(scores) == (expected if has else [None] * 3)


def test_a_small_or_invalid_reference_decides_nothing(tmp_path: Path) -> None:
    for name, energy in (("few", [1.0] * 19), ("none", []), ("infinite", [1.0, math.inf] * 20)):
        thresholds = read(bundles.local_bundle(bundle(tmp_path / name, MIXED, energy)))
        assert (thresholds.probability, thresholds.energy) == (0.9, UNKNOWN.energy)
        assert json.dumps(thresholds.notes).count(bundles.REFERENCE) == 1


def test_nothing_is_known_without_thresholds() -> None:
    assert not UNKNOWN.known
    assert Thresholds(energy=-3.0).known

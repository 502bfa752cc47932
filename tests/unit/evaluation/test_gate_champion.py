"""Comparison of a model with the champion, and when the two are comparable."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError, KfpDdpError
from kfp_ddp.evaluation.gate.engine import Judgement, judge
from kfp_ddp.evaluation.gate.rules import Check, Rules
from kfp_ddp.evaluation.results import samples_digest
from kfp_ddp.models.bundle import local_bundle
from kfp_ddp.models.champion import CHAMPION
from kfp_ddp.models.evaluation import ClassResult, Evaluation
from tests.evaluations import written
from tests.gating import evaluation, exported

CATS = 60
"""Samples of class cat; the other 40 are of class dog."""
DIGESTS = [(split, dataset) for split in ("", "5" * 64, "6" * 64) for dataset in ("", "d" * 64)]


def judgement(path: str, champion: object, **rules: Any) -> Judgement:
    accuracy = Evaluation.read(Path(path)).accuracy
    return judge(Rules(**rules), accuracy, path, str(champion))


def checks(path: str, champion: object, **rules: Any) -> dict[str, Check]:
    return {check.rule: check for check in judgement(path, champion, **rules).checks}


def blessed(path: str, champion: object, **rules: Any) -> bool:
    return all(check.holds for check in checks(path, champion, **rules).values())


def test_a_champion_is_an_evaluation_a_bundle_or_of_a_folder(tmp_path: Path) -> None:
    path = evaluation(tmp_path / "run", 3)
    file = evaluation(tmp_path / "champion", 5)
    models = tmp_path / "models"
    versions = [exported(models, wrong) for wrong in (8, 5)]
    (models / CHAMPION).write_text(f"{versions[1]}\n")
    places = (file, tmp_path / "champion", models / versions[1], models, models.as_uri())
    assert [checks(path, place)["min_improvement"].value for place in places] == [0.02] * 5
    (models / CHAMPION).write_text(f"{versions[0]}\n")
    assert checks(path, models)["min_improvement"].value == 0.05
    (models / CHAMPION).write_text("bbbbbbbbbbbb\n")
    with pytest.raises(KfpDdpError, match=f"{CHAMPION} names {models}/bbbbbbbbbbbb"):
        judgement(path, models)
    on_volume = "/dev/gone/models/resnet"  # /dev is mounted everywhere
    assert checks(path, on_volume)["champion_must_exist"].holds
    record = f"{tmp_path}/gone/evaluation.json"
    for missing, must_exist in (("/gone/resnet", False), (on_volume, True), (record, False)):
        with pytest.raises(InputError, match=f"champion is {missing}"):
            judgement(path, missing, champion_must_exist=must_exist)


def test_a_tie_passes_and_a_worse_model_only_with_a_negative_bound(tmp_path: Path) -> None:
    better = evaluation(tmp_path / "better", 3)
    worse = evaluation(tmp_path / "worse", 5)
    assert blessed(better, better)
    assert "equal to the champion" in checks(better, better)["min_improvement"].words
    assert "equal to the champion" not in checks(better, worse)["min_improvement"].words
    assert not blessed(better, better, min_improvement=0.001)
    assert not blessed(worse, better)
    assert blessed(worse, better, min_improvement=-0.02)
    assert blessed(better, worse, max_p_value=0.25)
    assert not blessed(better, worse, max_p_value=0.24)


@pytest.mark.parametrize("without", ["run", "champion"])
def test_without_predictions_only_accuracies_are_compared(without: str, tmp_path: Path) -> None:
    champion = evaluation(tmp_path / "champion", 5)
    path = evaluation(tmp_path / "run", 3)
    (tmp_path / without / "predictions.csv").unlink()
    compared = judgement(path, champion).compared
    assert compared is not None
    assert (compared.gain, compared.won, compared.p_value) == (0.02, None, None)
    with pytest.raises(InputError, match="predictions"):
        judgement(path, champion, max_p_value=0.05)


def test_digests_of_the_content_decide_if_both_sides_have_one(tmp_path: Path) -> None:
    """If neither side has a digest, paths decide."""
    for own, other in product(DIGESTS, DIGESTS):
        sides = [
            evaluation(tmp_path / name, wrong, split_digest=split, dataset_digest=dataset)
            for name, wrong, (split, dataset) in (("run", 3, own), ("champion", 5, other))
        ]
        both = [one == two for one, two in zip(own, other, strict=True) if one and two]
        neither = not any((*own, *other))
        by_rule = checks(*sides)
        assert ("champion" not in by_rule) == (both[0] if both else neither)
        words = "neither side has a digest"
        assert not neither or words in by_rule["min_improvement"].words
    other_paths = evaluation(tmp_path / "champion", 5, samples_digest="e" * 64)
    assert not blessed(evaluation(tmp_path / "run", 3), other_paths)


def classes(*names: str) -> list[ClassResult]:
    counts = {"cat": CATS, "dog": 100 - CATS}
    return [
        ClassResult(name=name, samples=counts.get(name, 0), precision=1, recall=1, f1=1)
        for name in names
    ]


def with_classes(folder: Path, wrong: int, only: str = "", **changed: Any) -> str:
    """Write an evaluation of the samples of both classes, or of one of them."""
    samples = {f"{i}.png": "cat" if i < CATS else "dog" for i in range(100)}
    samples = {path: name for path, name in samples.items() if only in ("", name)}
    digest = samples_digest(samples.items())
    path = written(folder, wrong, samples=len(samples), **{"samples_digest": digest} | changed)
    rows = [
        f"{file},{name},{'other' if at < wrong else name},0.9,0.1"
        for at, (file, name) in enumerate(samples.items())
    ]
    text = "\n".join(["path,target,predicted,confidence,loss", *rows, ""])
    path.with_name("predictions.csv").write_text(text)
    return str(path)


def against(
    root: Path, known: tuple[str, ...], again: dict[str, Any] | None = None, **rules: Any
) -> tuple[Judgement, dict[str, Check]]:
    """Judge a model of cat and dog; the champion's own evaluation is of other samples.

    Args:
        root: An empty folder.
        known: Classes of the champion.
        again: Fields of its evaluation on the samples of the model; None for none.
        rules: That are set.
    """
    models = root / "models"
    version = exported(models, 10, classes=classes(*known), samples_digest="0" * 64)
    digest = local_bundle(models / version).digest
    (models / CHAMPION).write_text(version)
    path = with_classes(root / "run", 3, classes=classes("cat", "dog"))
    if again is not None:
        fields = {"bundle_digest": digest, "classes": classes(*known), **again}
        only = "" if "dog" in known else "cat"
        with_classes(root / "run" / "champion", 9, only=only, **fields)
    result = judgement(path, models, **rules)
    return result, {check.rule: check for check in result.checks}


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (("cat", "dog"), ""),
        (("dog", "cat"), "another order"),
        (("cat", "dog", "eel"), "removed 'eel'"),
        (("ant", "bee", "cat", "cow", "dog", "eel"), "removed 'ant' 'bee' 'cow' and 1 more"),
    ],
)
def test_its_new_evaluation_is_compared(known: tuple[str, ...], words: str, tmp_path: Path) -> None:
    result, by_rule = against(tmp_path, known, {})
    assert by_rule["min_improvement"].value == pytest.approx(0.06)
    assert f"champion {result.champion} re-evaluated on" in by_rule["min_improvement"].words
    assert ("classes" in by_rule) == bool(words)
    assert not words or words in by_rule["classes"].words


def test_a_champion_without_a_class_is_compared_on_the_others(tmp_path: Path) -> None:
    result, by_rule = against(tmp_path / "a", ("cat",), {}, max_p_value=0.05)
    assert result.compared is not None
    assert result.compared.champion_accuracy == 51 / CATS
    assert by_rule["min_improvement"].value == 6 / CATS
    assert by_rule["max_p_value"].value == pytest.approx(0.5**6)
    assert "added 'dog'" in by_rule["classes"].words
    _, by_rule = against(tmp_path / "b", ("cat", "eel"), {})
    assert "added 'dog', removed 'eel'" in by_rule["classes"].words


@pytest.mark.parametrize("known", [("cat",), ("cat", "dog")])
@pytest.mark.parametrize("field", ["", "bundle_digest", "samples_digest", "dataset_digest"])
def test_another_evaluation_is_ignored(field: str, known: tuple[str, ...], tmp_path: Path) -> None:
    again = {field: "b" * 64} if field else None
    result, by_rule = against(tmp_path, known, again)
    assert result.compared is None
    assert [rule for rule, check in by_rule.items() if not check.holds] == ["champion"]
    advice = "give evaluate the same champion" if "dog" in known else "run once with champion empty"
    assert advice in by_rule["champion"].words


@pytest.mark.parametrize(("other", "similar"), [("Dogs", True), ("submarine", False)])
def test_a_removed_class_may_be_renamed(other: str, similar: bool, tmp_path: Path) -> None:
    _, by_rule = against(tmp_path, ("cat", other))
    assert (f"(was {other!r} renamed?" in by_rule["champion"].words) == similar

"""A champion whose classes are not the model's: compared where that is right, else in words."""

import json
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.run_folder import VERDICT
from kfp_ddp.evaluation.samples import samples_digest
from kfp_ddp.models.evaluation import ClassResult
from tests.gating import evaluation, exported, hits, judged

CATS = 60
"""The first so many of 100 samples are of class cat, the others of class dog."""


def classes(*names: str) -> list[ClassResult]:
    counts = {"cat": CATS, "dog": 100 - CATS}
    return [
        ClassResult(name=name, samples=counts.get(name, 0), precision=1, recall=1, f1=1)
        for name in names
    ]


def of_both(folder: Path, right: list[bool], only: str = "", **changed: Any) -> str:
    """Write an evaluation of the samples of both classes, or of one of them."""
    samples = {f"{at}.png": "cat" if at < CATS else "dog" for at in range(100)}
    chosen = {p: name for p, name in samples.items() if only in ("", name)}
    right = right[: len(chosen)]
    digest = samples_digest(chosen.items())
    path = Path(evaluation(folder, right, **{"samples_digest": digest} | changed))
    rows = [
        f"{name_of},{name},{name if hit else 'other'},0.9,0.1"
        for (name_of, name), hit in zip(chosen.items(), right, strict=True)
    ]
    head = "path,target,predicted,confidence,loss"
    path.with_name("predictions.csv").write_text("\n".join([head, *rows, ""]))
    return str(path)


def against(root: Path, known: list[ClassResult], mine: list[ClassResult], **rules: Any) -> Any:
    """What the gate says of a model with 3 wrong, whose champion was evaluated on other samples."""
    models = root / "models"
    other = {"samples_digest": "0" * 64, "checkpoint_digest": "a" * 64}
    version = exported(models, 10, classes=known, **other)
    (models / "CHAMPION").write_text(version)
    path = of_both(root / "run", hits(3), classes=mine)
    return judged(root, 0.97, evaluation=path, champion=str(models), **rules)


def test_a_new_class_leaves_the_samples_of_those_that_both_know_to_compare_on(
    tmp_path: Path,
) -> None:
    again = {"checkpoint_digest": "a" * 64, "classes": classes("cat")}
    of_both(tmp_path / "run" / "champion", hits(9), only="cat", **again)
    blessed, reason = against(tmp_path, classes("cat"), classes("cat", "dog"), max_p_value=0.05)
    assert blessed
    gain = f"improvement on the champion {6 / CATS:.4f} >= 0"
    assert f"{gain} (champion " in reason
    assert f"re-evaluated on the {CATS} samples of classes that it knows: 0.8500)" in reason
    assert "McNemar p-value (6 samples won, 0 lost) 0.0156 <= 0.05" in reason
    assert "classes are not the champion's: new 'dog'" in reason
    said = json.loads((tmp_path / "run" / VERDICT).read_text())
    assert said["champion_accuracy"] == 51 / CATS
    assert said["compared"]["gain"] == 6 / CATS
    assert not against_more(tmp_path, min_improvement=0.11)[0]


def against_more(root: Path, **rules: Any) -> tuple[bool, str]:
    """The same two again, under other rules."""
    path, models = root / "run" / "evaluation.json", root / "models"
    return judged(root, 0.97, evaluation=str(path), champion=str(models), **rules)


@pytest.mark.parametrize("without", ["run", "champion"])
def test_what_lacks_predictions_is_compared_by_its_accuracy_alone(
    without: str, tmp_path: Path
) -> None:
    champion = of_both(tmp_path / "champion", hits(5), classes=classes("cat", "dog"))
    path = of_both(tmp_path / "run", hits(3), classes=classes("cat", "dog"))
    (tmp_path / without / "predictions.csv").unlink()
    blessed, reason = judged(tmp_path, 0.97, evaluation=path, champion=champion)
    assert blessed
    assert "improvement on the champion 0.0200 >= 0" in reason
    compared = json.loads((tmp_path / "run" / VERDICT).read_text())["compared"]
    assert (compared["gain"], compared["won"], compared["p_value"]) == (0.02, None, None)
    with pytest.raises(SystemExit, match="predictions"):
        judged(tmp_path, 0.97, evaluation=path, champion=champion, max_p_value=0.05)


def test_what_does_not_compare_fails_as_the_champion(tmp_path: Path) -> None:
    again = {"checkpoint_digest": "a" * 64, "classes": classes("cat", "eel")}
    of_both(tmp_path / "run" / "champion", hits(9), only="cat", **again)
    _, reason = against(tmp_path, classes("cat", "eel"), classes("cat", "dog"))
    assert "classes are not the champion's: new 'dog', gone 'eel'" in reason
    (tmp_path / "run" / "champion" / "evaluation.json").unlink()
    assert not against_more(tmp_path)[0]
    told = json.loads((tmp_path / "run" / VERDICT).read_text())["rules"]
    assert [each["rule"] for each in told if not each["holds"]] == ["champion"]


@pytest.mark.parametrize(
    "changed",
    [
        {"checkpoint_digest": "b" * 64},
        {"samples_digest": "b" * 64},
        {"dataset_digest": "b" * 64},
    ],
)
def test_what_was_found_of_another_champion_or_other_samples_does_not_count(
    changed: dict[str, str], tmp_path: Path
) -> None:
    again: dict[str, Any] = {"checkpoint_digest": "a" * 64, "classes": classes("cat")}
    of_both(tmp_path / "run" / "champion", hits(9), only="cat", **again | changed)
    blessed, reason = against(tmp_path, classes("cat"), classes("cat", "dog"))
    assert not blessed
    assert "so the two do not compare, and it does not know the class 'dog' of this" in reason


def test_a_class_that_was_renamed_is_asked_after(tmp_path: Path) -> None:
    blessed, reason = against(tmp_path, classes("cat", "Dogs"), classes("cat", "dog"))
    assert not blessed
    assert (
        "it does not know the class 'dog' of this split (was 'Dogs' renamed? then name it as "
        "before): run once with champion empty" in reason
    )


def test_a_class_that_is_like_none_was_not_renamed(tmp_path: Path) -> None:
    _, reason = against(tmp_path, classes("cat", "submarine"), classes("cat", "dog"))
    assert "it does not know the class 'dog' of this split: run once with" in reason


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (("cat", "dog"), ""),
        (("dog", "cat"), "the champion has the same classes in another order"),
        (("cat", "dog", "eel"), "classes are not the champion's: gone 'eel'"),
        (
            ("ant", "bee", "cat", "cow", "dog", "eel"),
            "classes are not the champion's: gone 'ant' 'bee' 'cow' and 1 more",
        ),
    ],
)
def test_a_champion_that_knows_all_classes_compares_and_what_differs_is_said(
    known: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    again: dict[str, Any] = {"checkpoint_digest": "a" * 64, "classes": classes(*known)}
    of_both(tmp_path / "run" / "champion", hits(9), **again)
    blessed, reason = against(tmp_path, classes(*known), classes("cat", "dog"))
    assert blessed
    assert "improvement on the champion 0.0600 >= 0" in reason
    assert said in reason
    assert ("class" in reason) == bool(said)
    assert not said or f"{said}; " in f"{reason}; "
    told = json.loads((tmp_path / "run" / VERDICT).read_text())["rules"]
    assert [each["words"] for each in told if each["rule"] == "classes"] == [said][: bool(said)]

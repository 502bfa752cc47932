import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.run_folder import VERDICT
from kfp_ddp.models import bundle
from kfp_ddp.models.champion import CHAMPION
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.storage.destination import sha256
from tests.gating import CLASSES, evaluation, exported, hits, judged


@pytest.mark.parametrize(
    ("accuracy", "minimum", "blessed", "reason"),
    [
        (0.98, 0.97, True, "blessed: accuracy 0.9800 >= 0.97"),
        (0.97, 0.97, True, "blessed: accuracy 0.9700 >= 0.97"),
        (0.9699, 0.97, False, "not blessed: accuracy 0.9699 < 0.97"),
        (0.0, 0.0, True, "blessed: accuracy 0.0000 >= 0"),
    ],
)
def test_accuracy_alone(
    tmp_path: Path, accuracy: float, minimum: float, blessed: bool, reason: str
) -> None:
    assert judged(tmp_path, accuracy, min_accuracy=minimum) == (blessed, reason)


def test_the_verdict_lies_beside_the_evaluation_with_what_it_compared(tmp_path: Path) -> None:
    exports = tmp_path / "exports"
    version = exported(exports, 5)
    (exports / CHAMPION).write_text(version)
    path = evaluation(tmp_path / "run", hits(3))
    given = {"evaluation": path, "champion": str(exports), "min_improvement": 0.02}
    _, reason = judged(tmp_path, 0.97, **given)
    written = (tmp_path / "run" / VERDICT).read_bytes()
    said = json.loads(written)
    assert said == {
        "format": 1,
        "blessed": True,
        "reason": reason,
        "model": "resnet18",
        "split": "val",
        "samples": 100,
        "accuracy": 0.97,
        "checkpoint_digest": "c" * 64,
        "dataset_digest": "d" * 64,
        "samples_digest": Evaluation.read(Path(path)).samples_digest,
        "evaluation_sha256": sha256(Path(path)),
        "bundle": "",
        "champion": version,
        "champion_uri": f"{exports}/{version}",
        "champion_accuracy": 0.95,
        "compared": said["compared"],
        "asked": {"min_improvement": 0.02},
        "rules": [
            {
                "rule": "min_accuracy",
                "holds": True,
                "value": 0.97,
                "bound": 0.0,
                "words": "accuracy 0.9700 >= 0",
            },
            {
                "rule": "min_improvement",
                "holds": True,
                "value": 0.02,
                "bound": 0.02,
                "words": "improvement on the champion 0.0200 >= 0.02",
            },
        ],
    }
    compared = said["compared"]
    assert compared["low"] < compared["gain"] == 0.02 < compared["high"]
    assert [compared[name] for name in ("won", "lost", "p_value")] == [2, 0, 0.25]
    judged(tmp_path, 0.97, **given)
    assert (tmp_path / "run" / VERDICT).read_bytes() == written


def test_an_accuracy_just_below_its_bound_does_not_read_as_equal(tmp_path: Path) -> None:
    _, reason = judged(tmp_path, 0.96999999, min_accuracy=0.97)
    assert reason == "not blessed: accuracy 0.96999999 < 0.97"


def test_the_lower_bound_is_harder_to_meet(tmp_path: Path) -> None:
    path = evaluation(tmp_path / "run", hits(3))
    assert judged(tmp_path, 0.97, min_accuracy=0.95, evaluation=path)[0]
    blessed, reason = judged(
        tmp_path, 0.97, min_accuracy=0.95, evaluation=path, use_lower_bound=True
    )
    assert not blessed
    assert "lower end of the 95 % interval of the accuracy 0.9155 < 0.95" in reason


def test_the_weakest_class_is_named(tmp_path: Path) -> None:
    path = evaluation(tmp_path / "run", hits(3), classes=CLASSES[:2])
    given = {"evaluation": path, "max_calibration_error": 0.05}
    assert judged(tmp_path, 0.97, min_class_recall=0.8, **given)[0]
    blessed, reason = judged(tmp_path, 0.97, min_class_recall=0.81, **given)
    assert (blessed, reason) == (
        False,
        "not blessed: lowest class recall (dog|x) 0.8000 < 0.81",
    )
    assert "dog&#124;x" in (tmp_path / "verdict.md").read_text()
    assert "- holds: calibration error 0.0400 &#60;= 0.05" in (tmp_path / "verdict.md").read_text()


def test_a_class_without_samples_has_not_the_recall_that_every_class_must_have(
    tmp_path: Path,
) -> None:
    path = evaluation(tmp_path / "run", hits(3))
    assert judged(tmp_path, 0.97, evaluation=path)[0]
    blessed, reason = judged(tmp_path, 0.97, evaluation=path, min_class_recall=0.01)
    assert (blessed, reason) == (
        False,
        "not blessed: class absent has no samples in val, so no recall >= 0.01",
    )


def test_a_calibration_error_too_large(tmp_path: Path) -> None:
    path = evaluation(tmp_path / "run", hits(3))
    blessed, reason = judged(tmp_path, 0.97, evaluation=path, max_calibration_error=0.03)
    assert (blessed, reason) == (False, "not blessed: calibration error 0.0400 > 0.03")


def test_a_challenger_must_gain_what_is_asked(tmp_path: Path) -> None:
    champion = evaluation(tmp_path / "champion", hits(5))
    path = evaluation(tmp_path / "run", hits(3))
    given = {"evaluation": path, "champion": champion}
    assert judged(tmp_path, 0.97, min_improvement=0.02, **given)[0]
    blessed, reason = judged(tmp_path, 0.97, min_improvement=0.021, **given)
    assert not blessed
    assert "improvement on the champion 0.0200 < 0.021" in reason
    worse = {"evaluation": champion, "champion": path}
    assert not judged(tmp_path, 0.95, **worse)[0]
    assert judged(tmp_path, 0.95, min_improvement=-0.02, **worse)[0]


def test_luck_is_told_from_gain_sample_by_sample(tmp_path: Path) -> None:
    champion = evaluation(tmp_path / "champion", hits(8))
    path = evaluation(tmp_path / "run", hits(3))
    given = {"evaluation": path, "champion": str(tmp_path / "champion")}
    blessed, reason = judged(tmp_path, 0.97, max_p_value=0.05, **given)
    assert blessed
    assert "McNemar p-value (5 samples won, 0 lost) 0.0312 <= 0.05" in reason
    assert not judged(tmp_path, 0.97, max_p_value=0.03, **given)[0]
    Path(champion).with_name("predictions.csv").unlink()
    with pytest.raises(SystemExit, match=r"there is no .*champion/predictions\.csv"):
        judged(tmp_path, 0.97, max_p_value=0.03, **given)


@pytest.mark.parametrize(
    "changed",
    [{"dataset_digest": "e" * 64}, {"samples_digest": "e" * 64}, {"split_digest": "e" * 64}],
)
def test_a_champion_of_other_samples_does_not_compare(
    tmp_path: Path, changed: dict[str, str]
) -> None:
    champion = evaluation(tmp_path / "champion", hits(50), **changed)
    path = evaluation(tmp_path / "run", hits(3), split_digest="d" * 64)
    blessed, reason = judged(tmp_path, 0.97, evaluation=path, champion=champion)
    assert not blessed
    assert "evaluated on other samples" in reason


def test_what_is_outside_of_the_split_does_not_matter(tmp_path: Path) -> None:
    split = {"split_digest": "5" * 64}
    champion = evaluation(tmp_path / "champion", hits(5), dataset_digest="e" * 64, **split)
    path = evaluation(tmp_path / "run", hits(3), **split)
    assert judged(tmp_path, 0.97, evaluation=path, champion=champion)[0]


@pytest.mark.parametrize(("digest", "compares"), [("d" * 64, True), ("e" * 64, False)])
def test_an_evaluation_from_before_there_were_digests_of_splits_is_read(
    tmp_path: Path, digest: str, compares: bool
) -> None:
    champion = Path(evaluation(tmp_path / "champion", hits(5), dataset_digest=digest))
    before = json.loads(champion.read_text())
    del before["split_digest"]
    champion.write_text(json.dumps(before))
    path = evaluation(tmp_path / "run", hits(3), split_digest="5" * 64)
    blessed, _ = judged(tmp_path, 0.97, evaluation=path, champion=str(champion))
    assert blessed == compares


DIGESTS = [
    {"split_digest": split, "dataset_digest": dataset}
    for split in ("", "5" * 64, "6" * 64)
    for dataset in ("", "d" * 64, "e" * 64)
]


@pytest.mark.parametrize("mine", DIGESTS)
@pytest.mark.parametrize("its", DIGESTS)
def test_content_decides_where_both_sides_know_it_and_paths_where_neither_does(
    tmp_path: Path, mine: dict[str, str], its: dict[str, str]
) -> None:
    champion = evaluation(tmp_path / "champion", hits(5), **its)
    path = evaluation(tmp_path / "run", hits(3), **mine)
    blessed, reason = judged(tmp_path, 0.97, evaluation=path, champion=champion)
    known = [(mine[name], its[name]) for name in ("split_digest", "dataset_digest")]
    both = [one == other for one, other in known if one and other]
    neither = not any(one or other for one, other in known)
    assert blessed == (both[0] if both else neither)
    note = " >= 0 (their samples have the same names; neither side knows a digest of them)"
    assert reason.endswith(note) == neither
    assert ("but one side knows no digest of them" in reason) == (not both and not neither)


def test_a_champion_that_must_exist_is_not_beaten_by_every_model_while_it_does_not(
    tmp_path: Path,
) -> None:
    given = {"evaluation": evaluation(tmp_path / "run", hits(3)), "champion_must_exist": True}
    absent = str(tmp_path / "misspelt")
    blessed, reason = judged(tmp_path, 0.97, champion=absent, **given)
    assert (blessed, reason) == (False, f"not blessed: there is no champion at {absent} yet")
    champion = evaluation(tmp_path / "champion", hits(5))
    assert judged(tmp_path, 0.97, champion=champion, **given)[0]
    with pytest.raises(SystemExit, match="champion_must_exist is set but champion is empty"):
        judged(tmp_path, 0.97, **given)


@pytest.mark.parametrize(
    "changed", [{}, {"checkpoint_digest": "f" * 64}, {"samples_digest": "f" * 64}]
)
def test_the_champion_evaluated_again_counts_if_it_is_of_this_model_and_these_samples(
    tmp_path: Path, changed: dict[str, str]
) -> None:
    before = {"dataset_digest": "e" * 64, "checkpoint_digest": "a" * 64}
    champion = Path(evaluation(tmp_path / "champion", hits(50), **before))
    champion.rename(champion.with_name("metrics.json"))
    version = bundle.seal(champion.parent)[:12]
    path = evaluation(tmp_path / "run", hits(3))
    evaluation(tmp_path / "run" / "champion", hits(2), **{"checkpoint_digest": "a" * 64} | changed)
    asked = {"evaluation": path, "champion": str(champion.parent), "max_p_value": 1 - 1e-9}
    blessed, reason = judged(tmp_path, 0.97, **asked)
    assert not blessed
    if changed:
        assert "give evaluate the same champion" in reason
    else:
        note = f"(champion {version} re-evaluated on this split: 0.9800)"
        assert f"improvement on the champion -0.0100 < 0 {note}" in reason
        assert "(0 samples won, 1 lost)" in reason


def test_a_tie_passes_unless_a_gain_is_asked_for(tmp_path: Path) -> None:
    champion = evaluation(tmp_path / "champion", hits(3))
    given = {"evaluation": evaluation(tmp_path / "run", hits(3)), "champion": champion}
    assert judged(tmp_path, 0.97, **given)[0]
    assert not judged(tmp_path, 0.97, min_improvement=0.001, **given)[0]


def test_without_a_champion_yet_the_first_model_passes_and_the_reason_says_so(
    tmp_path: Path,
) -> None:
    path = evaluation(tmp_path / "run", hits(3))
    absent = str(tmp_path / "absent")
    blessed, reason = judged(tmp_path, 0.97, evaluation=path, champion=absent, max_p_value=0.05)
    assert blessed
    assert f"there is no champion at {absent} yet" in reason


@pytest.mark.parametrize("name", ["gone/bundle", "gone/evaluation.json"])
def test_a_champion_below_a_folder_that_is_gone_is_refused(tmp_path: Path, name: str) -> None:
    path = evaluation(tmp_path / "run", hits(3))
    gone = str(tmp_path / name)
    with pytest.raises(SystemExit) as caught:
        judged(tmp_path, 0.97, evaluation=path, champion=gone)
    said = str(caught.value)
    assert f"champion is {gone}, but there is no folder {tmp_path}/gone: correct the path" in said
    assert "\n" not in said


def test_a_pointer_to_a_version_that_is_gone_is_no_first_model(tmp_path: Path) -> None:
    path = evaluation(tmp_path / "run", hits(3))
    exports = tmp_path / "models"
    exports.mkdir()
    (exports / "CHAMPION").write_text("bbbbbbbbbbbb\n")
    says = f"{exports}/CHAMPION names {exports}/bbbbbbbbbbbb, where no bundle lies"
    with pytest.raises(SystemExit, match=re.escape(says)):
        judged(tmp_path, 0.97, evaluation=path, champion=str(exports))


def test_a_bundle_is_a_champion_too(tmp_path: Path) -> None:
    champion = Path(evaluation(tmp_path / "bundle", hits(5)))
    champion.rename(champion.with_name("metrics.json"))
    path = evaluation(tmp_path / "run", hits(3))
    blessed, reason = judged(tmp_path, 0.97, evaluation=path, champion=champion.parent.as_uri())
    assert blessed
    assert "improvement on the champion 0.0200 >= 0" in reason


def test_the_exports_of_a_model_stand_for_the_last_of_them(tmp_path: Path) -> None:
    exports = tmp_path / "models" / "digits"
    versions = [exported(exports, hit) for hit in (8, 5)]
    (exports / "CHAMPION").write_text(f"{versions[1]}\n")
    path = evaluation(tmp_path / "run", hits(3))
    _, reason = judged(tmp_path, 0.97, evaluation=path, champion=str(exports))
    assert "improvement on the champion 0.0200 >= 0" in reason
    (exports / "CHAMPION").write_text(f"{versions[0]}\n")
    _, reason = judged(tmp_path, 0.97, evaluation=path, champion=str(exports))
    assert "improvement on the champion 0.0500 >= 0" in reason


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (
            {"min_accuracy": 97.0},
            "min_accuracy=97.0 cannot be used: it should be less than or equal to 1",
        ),
        ({"min_accuracy": -0.1}, "min_accuracy=-0.1"),
        (
            {"min_accuracy": math.nan},
            "min_accuracy=nan cannot be used: it should be a finite number",
        ),
        ({"max_p_value": 0.0}, "max_p_value=0.0"),
        ({"use_lower_bound": True}, "use_lower_bound is set but evaluation is empty"),
        ({"min_class_recall": 0.5}, "min_class_recall is set but evaluation is empty"),
        ({"champion": "/c"}, "champion is set but evaluation is empty"),
        ({"bundle": "/b"}, "bundle is set but evaluation is empty"),
        ({"min_improvement": 0.1}, "min_improvement is set but champion is empty"),
        ({"evaluation": "/nowhere/evaluation.json"}, "cannot be read: No such file"),
        ({"evaluation": "RUN", "champion": "ftp://c"}, "ftp://c cannot be used"),
        (
            {"evaluation": "RUN", "champion": "BROKEN"},
            "is not an evaluation: split: Field required",
        ),
        ({"evaluation": "OTHER"}, "connect both to the same evaluate step"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, rules: dict[str, Any], says: str) -> None:
    (tmp_path / "broken.json").write_text('{"samples": 5, "correct": 4, "accuracy": 3}')
    named = {
        "RUN": evaluation(tmp_path / "run", hits(3)),
        "OTHER": evaluation(tmp_path / "other", hits(9)),
        "BROKEN": str(tmp_path / "broken.json"),
    }
    given = {name: named.get(value, value) for name, value in rules.items()}
    with pytest.raises(SystemExit, match=re.escape(says)) as caught:
        judged(tmp_path, 0.97, **given)
    assert "\n" not in str(caught.value)


def test_a_percentage_is_told_how_shares_are_written(tmp_path: Path) -> None:
    with pytest.raises(
        SystemExit, match=r"\(Accuracy that the model must have, as a share: 0\.97 for 97 %\)"
    ):
        judged(tmp_path, 0.97, min_accuracy=97)


@pytest.mark.parametrize("accuracy", [math.nan, math.inf, -0.1, 1.1])
def test_an_accuracy_that_is_none(tmp_path: Path, accuracy: float) -> None:
    with pytest.raises(SystemExit, match="it is a share of the samples"):
        judged(tmp_path, accuracy)

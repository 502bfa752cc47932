"""Rules of the gate: bounds, slices, files of a bundle, the verdict, and invalid input."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.files import sha256
from kfp_ddp.core.run_folder import VERDICT
from kfp_ddp.evaluation.comparison import mcnemar
from kfp_ddp.evaluation.gate import engine as bundles
from kfp_ddp.evaluation.gate.engine import verdict_of
from kfp_ddp.evaluation.gate.rules import Check, Rules, check_maximum, check_minimum, model_checks
from kfp_ddp.models.champion import CHAMPION
from kfp_ddp.models.evaluation import ClassResult, Evaluation, slice_of, wilson
from tests import gating
from tests.evaluations import record
from tests.gating import evaluation, exported, judged


def test_a_value_is_not_shown_as_its_bound() -> None:
    pairs = ((0.50001, 0.5), (0.00001, 0.5), (0.99999, 1.0), (1.0, 1.0))
    shown = [check_maximum("rule", "x", *pair).words.split()[1] for pair in pairs]
    assert shown == ["0.50001", "1e-05", "0.99999", "1.0000"]


def test_a_model_of_one_class_may_have_a_split_of_one_class() -> None:
    classes = [ClassResult(name="a", samples=5, precision=1, recall=1, f1=1)]
    assert len(model_checks(Rules(min_accuracy=0.5), 0.9, record(90, classes=classes))) == 1


@pytest.mark.parametrize(
    ("right", "largest", "others", "expected"),
    [  # of `largest` and of `others` samples, the model has (first, second) right
        ((60, 35), 60, 40, (True, False)),
        ((59, 6), 60, 40, (False, True)),  # 6 won, 1 lost: p = 8 / 128
        ((59, 7), 60, 40, (True, False)),  # 7 won, 1 lost: p = 9 / 256
        ((60, 4), 60, 40, (False, True)),
        ((40, 20), 60, 40, (False, False)),
        ((2, 3), 8, 9, (False, False)),  # 29 % against 47 %
        ((2, 2), 2, 2, (False, True)),
    ],
)
def test_by_default_a_model_must_beat_its_largest_class(
    right: tuple[int, int], largest: int, others: int, expected: tuple[bool, bool]
) -> None:
    """The p-value is the binomial tail of the samples that only one of the two has right."""
    recall, samples = right[0] / largest, largest + others
    big = ClassResult(name="food", samples=largest, precision=1, recall=recall, f1=1)
    rest = ClassResult(name="x", samples=1, precision=1, recall=1, f1=1)
    one = record(sum(right), samples, classes=[rest, big])
    (check,) = model_checks(Rules(), 0.5, one)
    won, lost = right[1], largest - right[0]
    tail = sum(math.comb(won + lost, heads) for heads in range(won, won + lost + 1))
    assert check.value == pytest.approx(tail / 2 ** (won + lost))
    assert (check.holds, check.unproven) == expected
    assert '"food"' in check.words
    assert model_checks(Rules(min_accuracy=0.0), 0.5, one)[0].holds


@pytest.mark.parametrize("first", [0, 1])
def test_of_equally_large_classes_the_order_does_not_matter(first: int) -> None:
    classes = [  # 7 won and 0 lost against b, 50 won and 43 lost against a
        ClassResult(name="b", samples=50, precision=1, recall=1, f1=1),
        ClassResult(name="a", samples=50, precision=1, recall=0.14, f1=1),
    ]
    (check,) = model_checks(Rules(), 0.57, record(57, classes=classes[first:] + classes[:first]))
    assert (check.holds, check.unproven) == (False, True)
    assert check.value == pytest.approx(mcnemar(50, 43))
    assert '"a"' in check.words


def test_without_results_by_class_the_gain_is_not_known() -> None:
    for one in (None, record(90)):
        (check,) = model_checks(Rules(), 0.9, one)
        assert (check.holds, check.unproven, check.value) == (False, False, None)


def test_the_worst_slice_with_enough_samples_is_judged() -> None:
    counts = {"fog": (9, 10), "snow": (0, 9), "rain": (14, 20), "sun": (18, 20)}
    slices = [slice_of("weather", name, *count) for name, count in counts.items()]

    def check(min_samples: int) -> Check:
        rules = Rules(min_slice_accuracy=0.7, min_slice_samples=min_samples)
        return model_checks(rules, 0.9, record(90, slices=slices))[1]

    assert (check(10).holds, check(10).value) == (True, 0.7)
    assert "weather=rain, 20 samples; 1 with less than 10" in check(10).words
    assert (check(9).holds, check(9).value) == (False, 0.0)
    assert (check(21).holds, check(21).value, check(21).bound) == (False, None, 0.7)


def test_the_reason_names_the_checks_that_decided() -> None:
    holds, fails = check_minimum("rule", "a", 0.5, 0.1), check_minimum("rule", "b", 0.2, 0.5)
    assert verdict_of([fails, holds]) == (False, "not blessed: b 0.2000 < 0.5")
    assert verdict_of([holds, holds]) == (True, f"blessed: {holds.words}; {holds.words}")


def checks_of(root: Path, content: dict[str, Any], **rules: Any) -> dict[str, list[Check]]:
    """Return the checks of a bundle with these JSON files, by rule."""
    run = evaluation(root / "run", 3)
    if "gain" in content:
        content["variants"] = gating.variant(run, gain=content.pop("gain"))
    bundle = bundles.read_bundle(gating.bundled(root / "bundle", run, **content), Path(run))
    by_rule: dict[str, list[Check]] = {}
    for check in bundles.bundle_checks(Rules(**rules), bundle):
        by_rule.setdefault(check.rule, []).append(check)
    return by_rule


@pytest.mark.parametrize(
    ("name", "content", "field"),
    [
        ("infra", {"passed": "maybe"}, "passed"),
        ("latency", {"runtimes": {"eager": {"batch_1": {}}}}, "runtimes.eager.batch_1.median_ms"),
        ("variants", [], "the document"),
    ],
)
def test_an_invalid_record_is_named(tmp_path: Path, name: str, content: Any, field: str) -> None:
    with pytest.raises(InputError, match=rf"{name}\.json is invalid: {field}: "):
        checks_of(tmp_path, {name: content})


def test_limits_apply_to_the_measurements_of_one_file(tmp_path: Path) -> None:
    served = {"batch_1": {"median_ms": 3}}
    files = dict[str, Any](
        a={"memory_mb": 120.0, "latency": served}, b={"memory_mb": None}, c={"memory_mb": 80.0}
    )
    content = {
        "infra": gating.infra(files=files),
        "latency": {"runtimes": {"a": {"batch_1": {"median_ms": 4}}}},
        "variants": {"left_out": {"int8": "differs"}},
        "megabytes": 0.5,
    }
    limits = {"max_latency_ms": 5, "max_memory_mb": 100, "max_bundle_mb": 1}
    checks = checks_of(tmp_path / "a", dict(content), budget_of="a", **limits)
    assert [(c.holds, c.value) for c in checks["max_latency_ms"]] == [(True, 3)]
    assert [(c.holds, c.value) for c in checks["max_memory_mb"]] == [(False, 120)]
    assert [c.holds for c in checks["must_serve"] + checks["variants"]] == [True, True]
    size = sum(path.stat().st_size for path in (tmp_path / "a" / "bundle").iterdir())
    assert [c.value for c in checks["max_bundle_mb"]] == [size / 10**6]
    (check,) = checks_of(tmp_path / "b", dict(content), budget_of="b", **limits)["max_memory_mb"]
    assert (check.holds, check.value, check.bound) == (False, None, 100)
    assert "(measured: a, c)" in check.words


def test_a_variant_must_meet_the_rules_of_the_model_too(tmp_path: Path) -> None:
    low, _ = wilson(94, 100)
    cases: list[tuple[dict[str, Any], dict[str, tuple[bool, float, float]]]] = [
        ({"min_accuracy": 0.9, "use_lower_bound": True}, {"min_accuracy": (False, low, 0.9)}),
        (
            {"max_calibration_error": 0.03, "max_variant_loss": 0.03},
            {"max_calibration_error": (False, 0.04, 0.03), "max_variant_loss": (True, 0.03, 0.03)},
        ),
    ]
    for number, (rules, expected) in enumerate(cases):
        checks = checks_of(tmp_path / str(number), {"gain": -0.03}, **rules)
        results = {rule: (c.holds, c.value, c.bound) for rule, (c,) in checks.items()}
        assert results.items() >= expected.items()


def test_the_verdict_is_written_beside_the_evaluation(tmp_path: Path) -> None:
    exports = tmp_path / "exports"
    version = exported(exports, 5, classes=gating.CLASSES[:2])
    (exports / CHAMPION).write_text(version)
    path = evaluation(tmp_path / "run", 3, classes=gating.CLASSES[:2])
    inputs = {"evaluation": path, "champion": str(exports), "min_improvement": 0.02}
    _, reason = judged(tmp_path, 0.97, min_class_recall=0.8, **inputs)
    assert "dog&#124;x" in (tmp_path / "verdict.md").read_text()
    written = (tmp_path / "run" / VERDICT).read_bytes()
    verdict = json.loads(written)
    compared, rules = verdict.pop("compared"), verdict.pop("rules")
    assert verdict == {
        "format": 1,
        "blessed": True,
        "weak": False,
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
        "asked": {"min_class_recall": 0.8, "min_improvement": 0.02},
    }
    assert [(r["rule"], r["holds"], r["value"], r["bound"]) for r in rules] == [
        ("majority_class", True, mcnemar(57, 10), 0.05),
        ("min_class_recall", True, 0.8, 0.8),
        ("min_improvement", True, 0.02, 0.02),
    ]
    assert compared["low"] < compared["gain"] == 0.02 < compared["high"]
    assert [compared[name] for name in ("won", "lost", "p_value")] == [2, 0, pytest.approx(0.25)]
    judged(tmp_path, 0.97, min_class_recall=0.8, **inputs)
    assert (tmp_path / "run" / VERDICT).read_bytes() == written


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"min_accuracy": 97.0}, "min_accuracy=97.0 cannot be used: it should be less than or"),
        ({"min_accuracy": 97}, "as a share: 0.97 for 97 %"),
        ({"champion": "/c"}, "champion is set but evaluation is empty"),
        ({"bundle": "/b"}, "bundle is set but evaluation is empty"),
        ({"evaluation": "/nowhere/evaluation.json"}, "cannot be read: No such file"),
        ({"evaluation": "RUN", "champion": "ftp://c"}, "ftp://c: give gs://"),
        ({"evaluation": "RUN", "champion": "BROKEN"}, "is not an evaluation: split"),
        ({"evaluation": "OTHER"}, "connect both to the same evaluate step"),
        *(({"accuracy": value}, "0 to 1") for value in (math.nan, math.inf, -0.1, 1.1)),
    ],
)
def test_invalid_input_is_one_line(tmp_path: Path, inputs: dict[str, Any], message: str) -> None:
    (tmp_path / "broken.json").write_text('{"samples": 5, "correct": 4, "accuracy": 3}')
    paths = {
        "RUN": evaluation(tmp_path / "run", 3),
        "OTHER": evaluation(tmp_path / "other", 9),
        "BROKEN": str(tmp_path / "broken.json"),
    }
    values = {name: paths.get(value, value) for name, value in inputs.items()}
    with pytest.raises(SystemExit, match=re.escape(message)):
        judged(tmp_path, values.pop("accuracy", 0.97), **values)

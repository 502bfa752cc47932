"""Each rule at its bound, and what is said of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.run_folder import VERDICT
from kfp_ddp.evaluation.comparison import compare
from kfp_ddp.evaluation.gate.against import champion_checks
from kfp_ddp.evaluation.gate.checks import at_least, at_most, own_checks
from kfp_ddp.evaluation.gate.rules import Rules
from kfp_ddp.evaluation.gate.verdict import verdict_of
from kfp_ddp.models.evaluation import ClassResult, Evaluation, slice_of, wilson
from tests import gating


def evaluation(**changed: Any) -> Evaluation:
    return Evaluation.model_construct(
        **{
            "split": "val",
            "samples": 100,
            "correct": 90,
            "accuracy": 0.9,
            "accuracy_low": 0.85,
            "calibration_error": 0.25,
            "classes": [],
            **changed,
        }
    )


def of(*samples: int) -> list[ClassResult]:
    return [
        ClassResult(name=f"c{i}", samples=count, precision=1, recall=0.5 + i / 10, f1=1)
        for i, count in enumerate(samples)
    ]


def test_a_bound_itself_is_met() -> None:
    assert (at_least("rule", "x", 0.5, 0.5).holds, at_least("rule", "x", 0.4999, 0.5).holds) == (
        True,
        False,
    )
    assert (at_most("rule", "x", 0.5, 0.5).holds, at_most("rule", "x", 0.5001, 0.5).holds) == (
        True,
        False,
    )


@pytest.mark.parametrize(
    ("value", "bound", "said"),
    [
        (0.5, 0.25, "x 0.5000 > 0.25"),
        (0.5, 0.5, "x 0.5000 <= 0.5"),
        (0.50001, 0.5, "x 0.50001 > 0.5"),
        (0.00001, 0.5, "x 1e-05 <= 0.5"),
        (0.0, 0.5, "x 0.0000 <= 0.5"),
        (0.99999, 1.0, "x 0.99999 <= 1"),
        (0.99999, 0.5, "x 1.0000 > 0.5"),
        (1.0, 0.5, "x 1.0000 > 0.5"),
        (1.0, 1.0, "x 1.0000 <= 1"),
    ],
)
def test_as_many_decimals_as_tell_a_value_from_its_bound(
    value: float, bound: float, said: str
) -> None:
    assert at_most("rule", "x", value, bound).words == said


def test_calibration_is_asked_where_it_is_bounded_and_known() -> None:
    asked = Rules(max_calibration_error=0.2)
    assert [check.holds for check in own_checks(asked, 0.9, evaluation())] == [True, False]
    assert len(own_checks(asked, 0.9, None)) == 1
    assert len(own_checks(Rules(), 0.9, evaluation())) == 1
    assert [check.rule for check in own_checks(Rules(), 0.9, None)] == ["min_accuracy"]


def test_one_class_alone_tells_nothing_apart() -> None:
    rules = [check.rule for check in own_checks(Rules(), 0.9, evaluation(classes=of(5, 0)))]
    assert rules == ["min_accuracy", "classes"]
    assert len(own_checks(Rules(), 0.9, evaluation(classes=of(5)))) == 1


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ((1, 0, 1), "class c1 has no samples in val, so no recall >= 0.1"),
        ((0, 0, 1), "class c0 and 1 more has no samples in val, so no recall >= 0.1"),
        ((0, 0, 0), "class c0 and 2 more has no samples in val, so no recall >= 0.1"),
        ((), "the evaluation tells of no class, so no recall >= 0.1"),
    ],
)
def test_classes_without_samples_are_counted(samples: tuple[int, ...], said: str) -> None:
    rules = Rules(min_class_recall=0.1)
    check = own_checks(rules, 0.9, evaluation(classes=of(*samples)))[1]
    assert (check.rule, check.holds, check.words) == ("min_class_recall", False, said)


def test_of_slices_with_enough_samples_the_worst_is_judged() -> None:
    fog, rain, sun, snow = (
        slice_of("weather", name, correct, samples)
        for name, correct, samples in (
            ("fog", 9, 10),
            ("rain", 14, 20),
            ("sun", 18, 20),
            ("snow", 0, 9),
        )
    )
    rules = Rules(min_slice_accuracy=0.7, min_slice_samples=10)
    check = own_checks(rules, 0.9, evaluation(slices=[fog, snow, rain, sun]))[1]
    words = "(weather=rain, 20 samples; 1 with less than 10 not judged)"
    assert (check.holds, check.words) == (True, f"lowest slice accuracy {words} 0.7000 >= 0.7")
    check = own_checks(rules, 0.9, evaluation(slices=[fog, rain]))[1]
    assert "(weather=rain, 20 samples) 0.7000" in check.words
    rules = Rules(min_slice_accuracy=0.7, min_slice_samples=21)
    check = own_checks(rules, 0.9, evaluation(slices=[fog, rain, snow]))[1]
    assert (check.holds, check.bound) == (False, 0.7)
    said = "the largest slice (weather=rain) has 20 samples, and 21 are asked for"
    assert check.words == said


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("infra", {"passed": "what"}, "infra.json cannot be judged: passed: "),
        (
            "latency",
            {"runtimes": {"eager": {"batch_1": {}}}},
            "latency.json cannot be judged: runtimes.eager.batch_1.median_ms: Field required; ",
        ),
        ("variants", [], "variants.json cannot be judged: the document: "),
    ],
)
def test_a_record_of_a_bundle_that_says_something_else_is_named_with_its_field(
    tmp_path: Path, name: str, content: Any, said: str
) -> None:
    run = gating.evaluation(tmp_path / "run", gating.hits(3))
    bundle = gating.bundled(tmp_path / "bundle", run, **{name: content})
    with pytest.raises(SystemExit) as caught:
        gating.judged(tmp_path, 0.97, evaluation=run, bundle=bundle)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_of_what_was_not_measured_is_said_what_was(tmp_path: Path) -> None:
    run = gating.evaluation(tmp_path / "run", gating.hits(3))
    unasked = gating.infra(files={}, reason="onnxruntime is not there")
    latency = {"runtimes": {name: {"batch_1": {"median_ms": 1}} for name in ("onnx", "eager")}}
    bundle = gating.bundled(tmp_path / "bundle", run, infra=unasked, latency=latency)
    rules = {"must_serve": True, "max_latency_ms": 5, "budget_of": "other"}
    _, reason = gating.judged(tmp_path, 0.97, evaluation=run, bundle=bundle, **rules)
    assert reason == (
        "not blessed: the bundle is not known to serve: onnxruntime is not there; "
        "no latency of other was measured (known: eager, onnx)"
    )
    told = json.loads((tmp_path / "run" / VERDICT).read_text())["rules"]
    assert [each["bound"] for each in told if each["rule"] == "max_latency_ms"] == [5]


def test_what_a_bundle_says_of_itself_is_judged_by_file(tmp_path: Path) -> None:
    run = gating.evaluation(tmp_path / "run", gating.hits(3))
    files = {"a": {"memory_mb": 120.0}, "b": {"memory_mb": None}, "c": {"memory_mb": 80.0}}
    content = {
        "infra": gating.infra(files=files),
        "latency": {"runtimes": {"a": {"batch_1": {"median_ms": 4}}}},
        "variants": {"left_out": {"int8": "it tells another class"}},
    }
    bundle = gating.bundled(tmp_path / "bundle", run, **content)

    def said(name: str) -> dict[str, tuple[bool, float | None, str]]:
        rules = {"max_latency_ms": 5, "max_memory_mb": 100, "budget_of": name}
        gating.judged(tmp_path, 0.97, evaluation=run, bundle=bundle, **rules)
        told = json.loads((tmp_path / "run" / VERDICT).read_text())["rules"]
        return {each["rule"]: (each["holds"], each["bound"], each["words"]) for each in told}

    told = said("a")
    assert told["must_serve"] == (True, None, "the bundle serves: a, b, c")
    words = "variant int8 is left out: it tells another class"
    assert told["variants"] == (True, None, words)
    assert told["max_latency_ms"] == (True, 5, "milliseconds for one image by a 4.00 <= 5")
    assert told["max_memory_mb"] == (False, 100, "MB of memory to serve a 120.0 > 100")
    words = "no memory of b was measured (known: a, c)"
    assert said("b")["max_memory_mb"] == (False, 100, words)


def test_a_variant_meets_the_rules_for_the_model_too(tmp_path: Path) -> None:
    run = gating.evaluation(tmp_path / "run", gating.hits(3))
    bundle = gating.bundled(tmp_path / "bundle", run, variants=gating.variant(run, gain=-0.03))

    def said(**rules: Any) -> dict[str, tuple[bool, float | None, float | None]]:
        gating.judged(tmp_path, 0.97, evaluation=run, bundle=bundle, **rules)
        told = json.loads((tmp_path / "run" / VERDICT).read_text())["rules"]
        of_variant = [each for each in told if each["words"].startswith("variant int8: ")]
        return {each["rule"]: (each["holds"], each["value"], each["bound"]) for each in of_variant}

    assert said() == {"min_accuracy": (True, 0.94, 0)}
    assert said(min_accuracy=0.9) == {"min_accuracy": (True, 0.94, 0.9)}
    holds, low, _ = said(min_accuracy=0.9, use_lower_bound=True)["min_accuracy"]
    assert (holds, low) == (False, wilson(94, 100)[0])
    told = said(max_calibration_error=0.03, max_variant_loss=0.03, min_variant_agreement=0.99)
    assert told["max_calibration_error"] == (False, 0.04, 0.03)
    assert told["max_variant_loss"] == (True, 0.03, 0.03)
    assert told["min_variant_agreement"] == (False, 0.98, 0.99)


def test_a_bundle_without_variants_loses_nothing_by_them(tmp_path: Path) -> None:
    run = gating.evaluation(tmp_path / "run", gating.hits(3))
    bundle = gating.bundled(tmp_path / "bundle", run)
    gating.judged(tmp_path, 0.97, evaluation=run, bundle=bundle, max_variant_loss=0.01)
    told = json.loads((tmp_path / "run" / VERDICT).read_text())["rules"]
    words = "the bundle has no variants"
    assert {"max_variant_loss": (True, words)} == {
        each["rule"]: (each["holds"], each["words"]) for each in told if each["words"] == words
    }


def test_the_size_of_a_bundle_is_that_of_all_its_files_in_millions_of_bytes(tmp_path: Path) -> None:
    run = gating.evaluation(tmp_path / "run", gating.hits(3))
    bundle = gating.bundled(tmp_path / "bundle", run, megabytes=0.5)
    gating.judged(tmp_path, 0.97, evaluation=run, bundle=bundle, max_bundle_mb=1)
    told = json.loads((tmp_path / "run" / VERDICT).read_text())["rules"]
    (size,) = [each["value"] for each in told if each["rule"] == "max_bundle_mb"]
    assert size == sum(path.stat().st_size for path in Path(bundle).iterdir()) / 10**6


def test_a_process_that_failed_without_a_word_is_said_to(tmp_path: Path) -> None:
    run = gating.evaluation(tmp_path / "run", gating.hits(3))
    bundle = gating.bundled(tmp_path / "bundle", run, infra=gating.infra(passed=False))
    said = gating.judged(tmp_path, 0.97, evaluation=run, bundle=bundle)
    assert said == (False, "not blessed: the bundle does not serve: it failed")


def test_a_verdict_tells_what_decided_it() -> None:
    compared = compare(evaluation(), evaluation(correct=80), None, where="there", version="")
    (gained,) = champion_checks(Rules(min_improvement=0.1), compared)
    assert gained.words == "improvement on the champion 0.1000 >= 0.1"
    missed = [at_least("rule", "a", 0.1, 0.5), gained, at_least("rule", "b", 0.2, 0.5)]
    assert verdict_of(missed) == (False, "not blessed: a 0.1000 < 0.5; b 0.2000 < 0.5")
    passed, words = verdict_of([gained, gained])
    assert passed
    assert words == f"blessed: {gained.words}; {gained.words}"

"""Rules that could only fail, and settings of a release, are refused before a byte moves."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_preflight_trials import plan


def test_rules_measures_and_release_are_handed_on_apart(tmp_path: Path) -> None:
    found = plan(
        tmp_path,
        gate={"min_slice_accuracy": 0.9, "tags": "tags.csv", "max_latency_ms": 20},
        release={"variants": ["int8"], "calibration_images": 64},
    )
    assert found.gate == {"min_slice_accuracy": 0.9, "max_latency_ms": 20}
    assert found.measuring == {"tags": "tags.csv"}
    assert found.release == {"variants": ["int8"], "calibration_images": 64}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"gate": {"min_slice_accuracy": 0.9}}, "no tags for slices"),
        ({"gate": {"max_latency_ms": 9}, "checkpoint": "/work/b"}, "gate sets max_latency_ms"),
        ({"gate": {"must_serve": True}, "checkpoint": "/work/b"}, "this pipeline exports none"),
        ({"gate": {"min_acuracy": 0.9}}, "did you mean 'min_accuracy'?"),
        ({"release": {"variants": ["int4"]}}, "variants"),
        ({"release": {"variant": ["int8"]}}, "did you mean 'variants'?"),
        ({"release": {"service": "Shop"}}, "service"),
    ],
)
def test_what_cannot_hold_is_one_line(given: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        plan(tmp_path, **given)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)

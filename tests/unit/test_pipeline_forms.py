"""The forms of the committed pipelines: short, described, and asking for what each needs."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from kfp_ddp.pipelines import NAMES

COMPILED = Path(__file__).parents[2] / "compiled"
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
ASKED = {
    "retrain": {"source", "destination"},
    "finetune": {"source", "init_from"},
    "evaluate_checkpoint": {"source", "checkpoint"},
    "sync_dataset": {"source"},
}


def spec(name: str) -> dict[str, Any]:
    with (COMPILED / f"{name}.yaml").open() as file:
        found: dict[str, Any] = next(yaml.load_all(file, Loader=LOADER))
    return found


def form(name: str) -> dict[str, Any]:
    found: dict[str, Any] = spec(name)["root"]["inputDefinitions"]["parameters"]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_no_form_is_long_and_every_box_is_described(name: str) -> None:
    boxes = form(name)
    assert len(boxes) <= 18
    assert [each for each, box in boxes.items() if not box.get("description")] == []


@pytest.mark.parametrize("name", ASKED)
def test_a_form_asks_for_what_the_pipeline_needs(name: str) -> None:
    boxes = form(name)
    assert {each for each, box in boxes.items() if not box.get("isOptional")} == ASKED[name]


def test_the_boxes_that_two_forms_share_are_the_same() -> None:
    own = {"retrain": {"gate", "destination"}}
    ours = form("train_resnet")
    for name in ("retrain", "finetune"):
        boxes = form(name)
        shared = boxes.keys() & ours.keys() - own.get(name, set())
        assert {each: boxes[each] for each in shared} == {each: ours[each] for each in shared}


def test_retrain_looks_for_changes_before_it_publishes_or_trains() -> None:
    components = spec("retrain")["components"]
    group = components["comp-exit-handler-1"]["dag"]["tasks"]
    (inner,) = (name for name in group if name.startswith("condition"))
    assert group.keys() - {inner} == {"data-sync", "changes"}
    changed = components[group[inner]["componentRef"]["name"]]["dag"]["tasks"]
    assert {"dataset-volume", "train", "evaluate", "gate"} <= changed.keys()
    given = changed["gate"]["inputs"]["parameters"]
    assert {"attempt", "champion"} <= given.keys()

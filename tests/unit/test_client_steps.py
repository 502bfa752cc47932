import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp_server_api import ApiClient, V2beta1Run

from kfp_ddp.client.steps import OVER, Step, every_step, leaves, node_id, steps_of
from tests.kfp_nodes import Nodes

COMPILED = Path(__file__).parents[2] / "kfp_ddp" / "compiled"
RECORDED = Path(__file__).parent / "recorded" / "kfp_api"


def _run(answer: dict[str, Any]) -> V2beta1Run:
    answer = {name: value for name, value in answer.items() if name != "pipeline_spec"}
    data = type("Answer", (), {"data": json.dumps(answer)})
    run = ApiClient().deserialize(data, "V2beta1Run")
    assert isinstance(run, V2beta1Run)
    return run


def _recorded(name: str) -> V2beta1Run:
    return _run(json.loads((RECORDED / f"{name}.json").read_text())["answer"])


def _states(steps: tuple[Step, ...]) -> dict[str, str]:
    return {step.name: step.state for step in every_step(steps)}


def test_the_nodes_of_a_recorded_run_are_a_tree_of_steps() -> None:
    assert node_id("train-resnet-pxrp4", "train-resnet-pxrp4(0)") == "train-resnet-pxrp4-277175473"
    steps = steps_of(_recorded("run_get_failed"))
    assert [step.name for step in steps] == ["preflight", "exit-handler-1", "teardown"]
    omitted = dict.fromkeys(("evaluate", "gate", "condition-2"), "OMITTED")
    done = dict.fromkeys(("preflight", "data-sync", "dataset-volume", "teardown"), "SUCCEEDED")
    assert _states(steps) == done | omitted | {"exit-handler-1": "FAILED", "train": "FAILED"}
    train = next(step for step in every_step(steps) if step.name == "train")
    assert train.start == datetime(2026, 11, 21, 22, 52, 5, tzinfo=UTC)
    assert train.end == datetime(2026, 11, 21, 22, 55, 35, tzinfo=UTC)
    assert train.pods == ("train-resnet-pxrp4-3502054445",)
    assert train.driver == "train-resnet-pxrp4-213436800"


SPEC = next(yaml.safe_load_all((COMPILED / "train_resnet.yaml").read_text()))
LOOP = {
    "root": {
        "dag": {
            "tasks": {
                "plan": {"componentRef": {"name": "comp-plan"}},
                "for-loop-1": {
                    "componentRef": {"name": "comp-for-loop-1"},
                    "dependentTasks": ["plan"],
                    "parameterIterator": {"itemInput": "x"},
                    "taskInfo": {"name": "trials"},
                },
                "best": {
                    "componentRef": {"name": "comp-best"},
                    "dependentTasks": ["for-loop-1"],
                    "taskInfo": {"name": "choose the best"},
                },
            }
        }
    },
    "components": {
        "comp-plan": {},
        "comp-best": {},
        "comp-trial": {},
        "comp-for-loop-1": {"dag": {"tasks": {"trial": {"componentRef": {"name": "comp-trial"}}}}},
    },
}


def _laid(states: dict[str, Any], over: bool, spec: dict[str, Any] = SPEC) -> V2beta1Run:
    details = Nodes(spec, "run-1", "train-resnet-pxrp4", over).lay(states)
    state = ("FAILED" if "FAILED" in str(states) else "SUCCEEDED") if over else "RUNNING"
    return _run({"run_id": "run-1", "state": state, "run_details": {"task_details": details}})


@pytest.mark.parametrize(
    ("node", "state", "by_driver"),
    [
        ("SUCCEEDED", "SUCCEEDED", False),
        ("CACHED", "CACHED", False),
        ("PENDING", "PENDING", False),
        ("RUNNING", "RUNNING", False),
        ("DRIVING", "RUNNING", True),
        ("UNDRIVEN", "FAILED", True),
    ],
)
def test_the_state_of_a_step_is_that_of_its_driver_or_pod(
    node: str, state: str, by_driver: bool
) -> None:
    step = steps_of(_laid({"preflight": node}, over=False))[0]
    assert (step.name, step.state, step.by_driver) == ("preflight", state, by_driver)


def test_a_failed_driver_or_a_pending_pod_is_that_of_its_step() -> None:
    run = _laid({"preflight": "SUCCEEDED", "data-sync": "UNDRIVEN"}, over=True)
    sync = next(step for step in every_step(steps_of(run)) if step.name == "data-sync")
    assert (sync.state, sync.by_driver) == ("FAILED", True)
    before = dict.fromkeys(("preflight", "data-sync", "dataset-volume"), "SUCCEEDED")
    run = _laid(before | {"train": "PENDING"}, over=False)
    assert _states(steps_of(run))["train"] == "PENDING"


@pytest.mark.parametrize("name", ["run_get_failed", "run_get_succeeded", "run_get_terminated"])
def test_all_steps_of_a_finished_run_are_over(name: str) -> None:
    steps = steps_of(_recorded(name), SPEC)
    assert set(_states(steps).values()) <= OVER


def test_steps_that_have_not_started_are_pending_if_the_pipeline_is_known() -> None:
    run = _laid({"preflight": "SUCCEEDED", "data-sync": "RUNNING"}, over=False)
    known = {"preflight": "SUCCEEDED", "exit-handler-1": "RUNNING", "data-sync": "RUNNING"}
    assert _states(steps_of(run)) == known
    names = ("dataset-volume", "train", "evaluate", "export", "gate", "condition-2", "publish")
    pending = dict.fromkeys((*names, "condition-3", "deploy", "teardown"), "PENDING")
    steps = steps_of(run, SPEC)
    assert _states(steps) == known | pending
    titles = {step.name: step.title for step in every_step(steps)}
    assert (titles["exit-handler-1"], titles["condition-2"]) == ("training", "blessed")
    run = _run({"run_id": "run-1", "state": "PENDING"})
    assert steps_of(run) == ()
    assert set(_states(steps_of(run, SPEC)).values()) == {"PENDING"}


def test_a_false_condition_is_skipped_with_its_content() -> None:
    states = dict.fromkeys(("preflight", "data-sync", "train", "gate", "teardown"), "SUCCEEDED")
    states |= {"dataset-volume": "SUCCEEDED", "evaluate": "SUCCEEDED", "condition-2": "SKIPPED"}
    names = _states(steps_of(_laid(states, over=True), SPEC))
    assert (names["condition-2"], names["publish"], names["train"]) == (
        *("SKIPPED", "OMITTED", "SUCCEEDED"),
    )


def test_iterations_of_a_loop_are_steps_with_unique_names() -> None:
    trials = [{"trial": "SUCCEEDED"}, {"trial": "FAILED"}, {"trial": "RUNNING"}]
    run = _laid({"plan": "SUCCEEDED", "for-loop-1": trials}, over=False, spec=LOOP)
    steps = steps_of(run, LOOP)
    plan, loop, best = steps
    assert (plan.state, loop.title, best.state) == ("SUCCEEDED", "trials", "PENDING")
    assert [(one.name, one.steps[0].name, one.steps[0].state) for one in loop.steps] == [
        ("0", "trial", "SUCCEEDED"),
        ("1", "trial", "FAILED"),
        ("2", "trial", "RUNNING"),
    ]
    assert len({one.steps[0].pods for one in loop.steps}) == 3
    assert [(leaf.title, leaf.label) for leaf in leaves(steps)] == [
        ("plan", "plan"),
        *((f"trials/{number}/trial", f"{number}/trial") for number in range(3)),
        ("choose the best", "best"),
    ]

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


def test_the_id_of_a_node_is_the_one_that_argo_gave() -> None:
    assert node_id("train-resnet-pxrp4", "train-resnet-pxrp4(0)") == "train-resnet-pxrp4-277175473"


def test_forty_nodes_of_a_recorded_run_are_eight_steps_and_a_group() -> None:
    steps = steps_of(_recorded("run_get_failed"))
    assert [step.name for step in steps] == ["preflight", "exit-handler-1", "teardown"]
    assert _states(steps) == {
        "preflight": "SUCCEEDED",
        "exit-handler-1": "FAILED",
        "data-sync": "SUCCEEDED",
        "dataset-volume": "SUCCEEDED",
        "train": "FAILED",
        "evaluate": "OMITTED",
        "gate": "OMITTED",
        "condition-2": "OMITTED",
        "teardown": "SUCCEEDED",
    }


def test_a_step_has_the_times_and_the_pods_of_its_program() -> None:
    steps = every_step(steps_of(_recorded("run_get_failed")))
    train = next(step for step in steps if step.name == "train")
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
    ("given", "state", "by_driver"),
    [
        ("SUCCEEDED", "SUCCEEDED", False),
        ("CACHED", "CACHED", False),
        ("PENDING", "PENDING", False),
        ("RUNNING", "RUNNING", False),
        ("DRIVING", "RUNNING", True),
        ("UNDRIVEN", "FAILED", True),
    ],
)
def test_a_step_is_what_its_driver_or_its_pod_is(given: str, state: str, by_driver: bool) -> None:
    step = steps_of(_laid({"preflight": given}, over=False))[0]
    assert (step.name, step.state, step.by_driver) == ("preflight", state, by_driver)


def test_a_step_whose_driver_failed_is_not_one_that_was_left_out() -> None:
    run = _laid({"preflight": "SUCCEEDED", "data-sync": "UNDRIVEN"}, over=True)
    sync = next(step for step in every_step(steps_of(run)) if step.name == "data-sync")
    assert (sync.state, sync.by_driver) == ("FAILED", True)


def test_a_pod_that_waits_is_that_of_its_own_step() -> None:
    before = dict.fromkeys(("preflight", "data-sync", "dataset-volume"), "SUCCEEDED")
    run = _laid(before | {"train": "PENDING"}, over=False)
    assert _states(steps_of(run))["train"] == "PENDING"


@pytest.mark.parametrize("name", ["run_get_failed", "run_get_succeeded", "run_get_terminated"])
def test_no_step_of_a_run_that_is_over_goes_on(name: str) -> None:
    steps = steps_of(_recorded(name), SPEC)
    assert set(_states(steps).values()) <= OVER


def test_steps_that_have_not_begun_are_pending_where_the_pipeline_is_known() -> None:
    run = _laid({"preflight": "SUCCEEDED", "data-sync": "RUNNING"}, over=False)
    assert list(_states(steps_of(run))) == ["preflight", "exit-handler-1", "data-sync"]
    assert _states(steps_of(run, SPEC)) == {
        "preflight": "SUCCEEDED",
        "exit-handler-1": "RUNNING",
        "data-sync": "RUNNING",
        "dataset-volume": "PENDING",
        "train": "PENDING",
        "evaluate": "PENDING",
        "export": "PENDING",
        "gate": "PENDING",
        "condition-2": "PENDING",
        "publish": "PENDING",
        "condition-3": "PENDING",
        "deploy": "PENDING",
        "teardown": "PENDING",
    }


def test_a_condition_that_did_not_hold_is_skipped_with_all_in_it() -> None:
    states = dict.fromkeys(("preflight", "data-sync", "train", "gate", "teardown"), "SUCCEEDED")
    states |= {"dataset-volume": "SUCCEEDED", "evaluate": "SUCCEEDED", "condition-2": "SKIPPED"}
    told = _states(steps_of(_laid(states, over=True), SPEC))
    assert (told["condition-2"], told["publish"], told["train"]) == (
        *("SKIPPED", "OMITTED", "SUCCEEDED"),
    )


def test_groups_have_the_names_that_the_pipeline_shows() -> None:
    run = _laid({"preflight": "SUCCEEDED", "data-sync": "RUNNING"}, over=False)
    titles = {step.name: step.title for step in every_step(steps_of(run, SPEC))}
    assert (titles["exit-handler-1"], titles["condition-2"]) == ("training", "blessed")


def test_iterations_of_a_loop_are_its_steps() -> None:
    trials = [{"trial": "SUCCEEDED"}, {"trial": "FAILED"}, {"trial": "RUNNING"}]
    run = _laid({"plan": "SUCCEEDED", "for-loop-1": trials}, over=False, spec=LOOP)
    plan, loop, best = steps_of(run, LOOP)
    assert (plan.state, loop.title, best.state) == ("SUCCEEDED", "trials", "PENDING")
    assert [(one.name, one.steps[0].name, one.steps[0].state) for one in loop.steps] == [
        ("0", "trial", "SUCCEEDED"),
        ("1", "trial", "FAILED"),
        ("2", "trial", "RUNNING"),
    ]
    assert len({one.steps[0].pods for one in loop.steps}) == 3


def test_a_run_without_nodes_yet_has_the_steps_of_its_pipeline() -> None:
    run = _run({"run_id": "run-1", "state": "PENDING"})
    assert steps_of(run) == ()
    assert set(_states(steps_of(run, SPEC)).values()) == {"PENDING"}


def test_steps_of_iterations_are_told_apart_in_a_list() -> None:
    trials = [{"trial": "SUCCEEDED"}, {"trial": "RUNNING"}]
    run = _laid({"plan": "SUCCEEDED", "for-loop-1": trials}, over=False, spec=LOOP)
    found = [*leaves(steps_of(run, LOOP))]
    assert [leaf.title for leaf in found] == [
        *("plan", "trials/0/trial", "trials/1/trial", "choose the best"),
    ]
    assert [leaf.label for leaf in found] == ["plan", "0/trial", "1/trial", "best"]

"""Steps of a run, from the nodes of its Workflow or from those that the KFP API lists."""

import base64
import gzip
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp_server_api import ApiClient, V2beta1Run

from kfp_ddp.client.kfp.pods import list_nodes
from kfp_ddp.client.kfp.steps import Step, every_step, leaves, steps_of
from kfp_ddp.k8s.resource import WORKFLOWS
from tests.cluster import FakeApi
from tests.kfp_nodes import Node, Workflow, details
from tests.kfp_server.server import RECORDED

ROOT = Path(__file__).parents[3]
SPEC = next(yaml.safe_load_all((ROOT / "compiled" / "train_resnet.yaml").read_text()))
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
DONE = dict.fromkeys(("preflight", "data-sync", "dataset-volume"), "SUCCEEDED")
NAME = "train-resnet-pxrp4"


def _run(answer: dict[str, Any]) -> V2beta1Run:
    answer = {name: value for name, value in answer.items() if name != "pipeline_spec"}
    data = type("Answer", (), {"data": json.dumps(answer)})
    run = ApiClient().deserialize(data, "V2beta1Run")
    assert isinstance(run, V2beta1Run)
    return run


def _recorded(path: Path) -> V2beta1Run:
    return _run(json.loads(path.read_text())["answer"])


def _states(steps: tuple[Step, ...]) -> dict[str, str]:
    return {step.name: step.state for step in every_step(steps)}


def _laid(
    states: dict[str, Any], over: bool, spec: dict[str, Any] = SPEC
) -> tuple[V2beta1Run, list[Node]]:
    """Return a run of these states, and the nodes of its Workflow."""
    nodes = Workflow(spec, NAME, over).lay(states)
    state = ("FAILED" if "FAILED" in str(states) else "SUCCEEDED") if over else "RUNNING"
    listed = {"task_details": details(nodes, "run-1")}
    return _run({"run_id": "run-1", "state": state, "run_details": listed}), nodes


def test_recorded_nodes_of_a_failed_run_are_steps_in_the_pipelines_tree() -> None:
    steps = steps_of(_recorded(RECORDED / "run_get_failed.json"), SPEC)
    assert [step.name for step in steps] == ["preflight", "exit-handler-1", "teardown"]
    states = _states(steps)
    assert {name for name, state in states.items() if state == "SUCCEEDED"} == {*DONE, "teardown"}
    assert (states["exit-handler-1"], states["train"]) == ("FAILED", "FAILED")
    assert states["evaluate"] == states["condition-2"] == states["publish"] == "OMITTED"
    train = next(step for step in every_step(steps) if step.name == "train")
    assert train.start == datetime(2026, 11, 21, 22, 52, 5, tzinfo=UTC)
    assert train.end == datetime(2026, 11, 21, 22, 55, 35, tzinfo=UTC)


def test_what_a_cancel_ended_was_cancelled() -> None:
    run = _recorded(RECORDED / "run_get_terminated.json")
    states = _states(steps_of(run, SPEC))
    assert {states[name] for name in ("train", "exit-handler-1", "teardown")} == {"CANCELED"}
    assert {states[name] for name in DONE} == {"SUCCEEDED"}
    assert (states["gate"], states["publish"]) == ("OMITTED", "OMITTED")
    run.state_history[-2].update_time = cancel = datetime(2026, 11, 21, 23, 6, 24, tzinfo=UTC)
    for node in run.run_details.task_details:
        if node.display_name == "exit-handler-1(0)":
            node.end_time = cancel
    states = _states(steps_of(run, SPEC))  # train failed before, and its group ended after that
    assert (states["train"], states["exit-handler-1"]) == ("FAILED", "FAILED")
    assert states["teardown"] == "CANCELED"


def test_steps_that_kfp_lost_are_unknown_or_those_of_the_workflow() -> None:
    path = Path(__file__).parents[1] / "recorded/kfp_api/run_get_succeeded_stale_details.json"
    run = _recorded(path)
    states = _states(steps_of(run, SPEC))
    assert (states["export"], states["gate"]) == ("SUCCEEDED", "SUCCEEDED")
    lost = ("publish", "deploy", "teardown", "condition-2", "exit-handler-1")
    assert {name: states[name] for name in lost} == dict.fromkeys(lost, "UNKNOWN")
    done = ("train", "evaluate", "export", "gate", "publish", "teardown")
    nodes = Workflow(SPEC, NAME, over=True).lay(
        DONE | dict.fromkeys(done, "SUCCEEDED") | {"condition-3": "SKIPPED"}
    )
    by_id = {node["id"]: node for node in nodes}
    packed = base64.b64encode(gzip.compress(json.dumps(by_id).encode())).decode()
    for status in ({"nodes": by_id}, {"compressedNodes": packed}):
        api = FakeApi({WORKFLOWS.path("space"): {"items": [{"status": status}]}})
        states = _states(steps_of(run, SPEC, list_nodes(api, "run-1")))
        assert api.queries == [{"labelSelector": "pipeline/runid=run-1"}]
        assert {states[name] for name in done} == {"SUCCEEDED"}
        assert (states["condition-3"], states["deploy"]) == ("SKIPPED", "OMITTED")


@pytest.mark.parametrize(
    ("node", "state", "by_driver"),
    [
        *(("SUCCEEDED", "SUCCEEDED", False), ("CACHED", "CACHED", False)),
        *(("PENDING", "PENDING", False), ("RUNNING", "RUNNING", False)),
        *(("DRIVING", "RUNNING", True), ("UNDRIVEN", "FAILED", True)),
    ],
)
def test_a_steps_state_is_of_its_driver_or_pod(node: str, state: str, by_driver: bool) -> None:
    run, nodes = _laid({"preflight": node}, over=False)
    step = steps_of(run, nodes=nodes)[0]
    assert (step.name, step.state, step.by_driver) == ("preflight", state, by_driver)
    names = {one["id"]: one["name"] for one in nodes}
    assert names[step.driver] == f"{NAME}(0).root(0).preflight-driver(0)"
    if state == "RUNNING" and not by_driver:
        assert [names[one] for one in step.pods] == [f"{NAME}(0).root(0).preflight(0).executor(0)"]


@pytest.mark.parametrize("workflow", [True, False])
def test_a_failed_driver_is_the_failure_of_its_step(workflow: bool) -> None:
    run, nodes = _laid({"preflight": "SUCCEEDED", "data-sync": "UNDRIVEN"}, over=True)
    steps = steps_of(run, nodes=nodes if workflow else [])
    sync = next(step for step in every_step(steps) if step.name == "data-sync")
    assert (sync.state, sync.by_driver) == ("FAILED", True)


@pytest.mark.parametrize("workflow", [True, False])
def test_steps_that_have_not_started_are_pending_if_the_pipeline_is_known(workflow: bool) -> None:
    run, nodes = _laid({"preflight": "SUCCEEDED", "data-sync": "RUNNING"}, over=False)
    nodes = nodes if workflow else []
    known = {"preflight": "SUCCEEDED", "exit-handler-1": "RUNNING", "data-sync": "RUNNING"}
    tree = _states(steps_of(run, nodes=nodes))
    assert tree == known if workflow else tree.items() <= known.items()
    names = ("dataset-volume", "train", "evaluate", "export", "gate", "condition-2", "publish")
    pending = dict.fromkeys((*names, "condition-3", "deploy", "teardown"), "PENDING")
    steps = steps_of(run, SPEC, nodes)
    assert _states(steps) == known | pending
    titles = {step.name: step.title for step in every_step(steps)}
    assert (titles["exit-handler-1"], titles["condition-2"]) == ("training", "blessed")
    assert [step.name for step in steps[1].steps][:3] == ["data-sync", "dataset-volume", "train"]
    run = _run({"run_id": "run-1", "state": "PENDING"})
    assert steps_of(run) == ()
    assert set(_states(steps_of(run, SPEC)).values()) == {"PENDING"}


def test_a_false_condition_is_skipped_with_its_content() -> None:
    done = dict.fromkeys(("train", "gate", "teardown", "evaluate"), "SUCCEEDED")
    run, nodes = _laid(DONE | done | {"condition-2": "SKIPPED"}, over=True)
    for states in (_states(steps_of(run, SPEC, nodes)), _states(steps_of(run, SPEC))):
        assert (states["condition-2"], states["publish"], states["train"]) == (
            *("SKIPPED", "OMITTED", "SUCCEEDED"),
        )


def test_a_repeated_step_has_the_pods_of_all_attempts() -> None:
    _, nodes = _laid({"preflight": "RUNNING"}, over=False)
    executor = next(one for one in nodes if one["displayName"] == "executor(0)")
    again = executor | {"id": "again", "displayName": "executor(1)"}
    (step,) = steps_of(_run({"run_id": "run-1", "state": "RUNNING"}), nodes=[*nodes, again])
    assert step.pods == (executor["id"], "again")


def test_a_repeated_group_has_the_steps_of_its_last_attempt() -> None:
    (_, first), (run, again) = (_laid({"preflight": s}, over=False) for s in ("FAILED", "RUNNING"))
    inside = [one for one in again if one["name"].startswith(f"{NAME}(0).root(0).")]
    root = next(one for one in again if one["displayName"] == "root(0)")
    ids = {one["id"]: f"{one['id']}-again" for one in (root, *inside)}
    second = [root | {"id": ids[root["id"]], "displayName": "root(1)"}]
    second += [one | {"id": ids[one["id"]], "boundaryID": ids[one["boundaryID"]]} for one in inside]
    for nodes in (first + second, second + first):
        assert _states(steps_of(run, nodes=nodes)) == {"preflight": "RUNNING"}


def test_iterations_of_a_loop_are_steps_with_unique_names() -> None:
    trials = [{"trial": "SUCCEEDED"}, {"trial": "FAILED"}, {"trial": "RUNNING"}]
    run, nodes = _laid({"plan": "SUCCEEDED", "for-loop-1": trials}, over=False, spec=LOOP)
    steps = steps_of(run, LOOP, nodes)
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
    flat = next(step for step in every_step(steps_of(run, LOOP)) if step.name == "trial")
    iterations = [one.steps[0].nodes[0] for one in loop.steps]
    assert [sorted(ids) for ids in flat.nodes] == [sorted(ids) for ids in iterations]
    assert [ids[-1] for ids in flat.nodes] == [one.steps[0].pods[-1] for one in loop.steps]
    assert _states(steps_of(run, LOOP)) == {
        "plan": "SUCCEEDED", "for-loop-1": "FAILED", "trial": "FAILED", "best": "PENDING"
    }  # fmt: skip

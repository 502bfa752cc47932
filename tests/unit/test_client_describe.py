"""`kfp-ddp describe` and `logs` on local runs, and the reasons of pods."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kfp_ddp.cli import app
from kfp_ddp.client import pods
from kfp_ddp.client.steps import Step
from kfp_ddp.core.config import Connection
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.failure import Failure
from tests import run_output

CAUSE = "error: rank 1: it broke; mend it"
STEP = Step("train", "train", "FAILED", pods=("wf-abc-1", "wf-abc-22"), driver="wf-abc-3")


def described(folder: Path) -> Any:
    """Return the description of a run."""
    return json.loads(run_output.command("describe", folder, "--json"))


def pod(name: str, node: str = "", **status: Any) -> dict[str, Any]:
    """Return a pod of the node with this id or name."""
    key = "workflows.argoproj.io/node-" + ("name" if "." in node else "id")
    return {"metadata": {"name": name, "annotations": {key: node}}, "status": status}


def name_of(pod: dict[str, Any] | None) -> str:
    return str(pod["metadata"]["name"]) if pod else ""


def test_a_failed_run_has_a_step_a_cause_and_next_commands(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run", failed="train", error=CAUSE)
    document = described(run)
    assert (document["state"], document["step"]) == ("FAILED", "train")
    assert document["cause"] == "rank 1: it broke; mend it"
    assert document["trainings"][0]["checkpoint"] == 40
    assert document["next"][0] == f"kfp-ddp logs {run} train"
    assert document["next"][1] == "kfp-ddp run SOURCE --local …"
    assert run_output.command("logs", run, "train") == f"{CAUSE}\n"
    assert run_output.command("logs", run) == f"[train] {CAUSE}\n"
    missing = CliRunner().invoke(app, ["logs", str(run), "trian"])
    assert isinstance(missing.exception, InputError)
    assert "no step 'trian': it has preflight, data-sync, " in str(missing.exception)


def test_without_an_error_in_the_log_the_cause_is_that_of_the_ranks(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run", failed="train", error="Killed")
    logs = run / "work" / run_output.RUN_ID / "train" / "logs"
    logs.mkdir()
    for name, at, error in (("failure-a", 20.0, "later"), ("failure-b", 10.0, "out of memory")):
        record = Failure(1, 3, error, retryable=False, time=at)
        (logs / f"{name}.json").write_text(record.to_json())
    assert described(run)["cause"] == "out of memory"


def test_without_an_error_the_cause_is_the_last_line_of_the_log(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run", failed="evaluate", error="Segmentation fault")
    assert described(run)["cause"] == "Segmentation fault"
    run = run_output.make(tmp_path / "hostile", failed="gate", error="error: \x1b[2Jcleared")
    assert "\\x1b[2Jcleared" in run_output.command("describe", run)


def test_a_run_without_an_end_is_unfinished(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run", failed="evaluate")
    log = run / "pipeline.log"
    log.write_text(log.read_text().partition("INFO - Task 'train' finished")[0])
    document = described(run)
    assert (document["state"], document["step"], document["end"]) == ("UNFINISHED", "train", None)


def test_a_successful_run_has_a_verdict_and_next_commands(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run")
    task = run / "work" / run_output.RUN_ID / "train"
    (task / "evaluation" / "verdict.json").write_text('{"blessed": true, "reason": "blessed: ok"}')
    (task / "exported.json").write_text('{"uri": "gs://models/abc", "champion": true}')
    text = run_output.command("describe", run)
    assert "run  SUCCEEDED" in text
    assert "gate        blessed: ok" in text
    assert "bundle      gs://models/abc (champion)" in text
    assert f"next        kfp-ddp predict {run} PICTURE" in text
    assert "cause" not in text
    for name in ("config.json", "metrics.jsonl", "checkpoints"):
        (task / name).rename(tmp_path / name)
    assert "checkpoint" not in run_output.command("describe", run)


def test_lines_of_kfp_and_argo_are_left_out(tmp_path: Path) -> None:
    executor = "    [KFP Executor 2026-11-22 07:12:21,481 INFO]: "
    lines = [f"{executor}Got executor_input:", "    {", '        "inputs": {', "        }", "    }"]
    lines += ["    hello", "    }", f"{executor}Wrote executor output file to x."]
    lines += ["    I1123 08:20:37.123456      12 launcher_v2.go:185] publish success."]
    lines += ['    time=2026-11-23T08:20:37.1Z level=INFO msg="sub-process exited" argo=true']
    run = run_output.make(tmp_path / "run", failed="gate", error="\n".join(lines))
    assert run_output.command("logs", run, "gate") == "hello\n}\n"
    assert len(run_output.command("logs", run, "--all").splitlines()) == 10


def test_the_newest_pod_of_a_step_is_found_by_its_node() -> None:
    nodes = {"other": "wf-xyz-22", "first": "wf-abc-1", "main": "wf-abc-22", "driver": "wf-abc-3"}
    items = [pod(name, node) for name, node in nodes.items()]
    assert name_of(pods.find_pod(items, STEP)) == "main"
    assert name_of(pods.find_pod(items, STEP, driver=True)) == "driver"
    assert pods.find_pod(items[:1], STEP) is None
    flat = Step("train", "train", "FAILED")
    group = "wf(0).root(0).exit-handler-1(0)"
    ends = ("train-driver(0)", "train(0).executor(0)", "train(0).executor(1)", "data-train(0).exec")
    items = [pod(end, f"{group}.{end}") for end in ends]
    assert name_of(pods.find_pod(items, flat)) == "train(0).executor(1)"
    assert name_of(pods.find_pod(items, flat, driver=True)) == "train-driver(0)"


@pytest.mark.parametrize(
    ("namespace", "multi_user", "used"),
    [("", False, "kubeflow"), ("", True, "of-the-context"), ("mine", False, "mine")],
)
def test_pods_of_a_single_user_kfp_are_in_its_own_namespace(
    monkeypatch: pytest.MonkeyPatch, namespace: str, multi_user: bool, used: str
) -> None:
    monkeypatch.setattr(pods, "own_namespace", lambda context: "of-the-context")
    monkeypatch.setattr("kfp_ddp.k8s.api.Api.connect", lambda namespace, context: namespace)
    assert str(pods.api_of(Connection(namespace=namespace), multi_user)) == used


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (
            {
                "containerStatuses": [
                    {"name": "wait", "state": {"terminated": {"reason": "Completed"}}},
                    {"name": "main", "state": {"terminated": {"reason": "OOMKilled"}}},
                ],
            },
            "out of memory (OOMKilled): give the step more memory",
        ),
        (
            {"conditions": [{"type": "DisruptionTarget", "status": "True", "message": "drained"}]},
            "drained",
        ),
        ({"reason": "Evicted", "message": "low on disk"}, "Evicted: low on disk"),
        ({"containerStatuses": [{"name": "main", "state": {}}]}, ""),
    ],
)
def test_the_reason_of_a_killed_pod(status: dict[str, Any], reason: str) -> None:
    assert pods.kill_reason(pod("p", phase="Failed", **status)) == reason


def test_a_pod_without_a_node_has_a_reason() -> None:
    why = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    other = {"type": "Ready", "status": "False", "message": "not ready"}
    assert pods.waiting_reason(pod("p", phase="Pending", conditions=[other, why])) == (
        "cannot be scheduled (0/3 nodes are available)"
    )
    waiting = pods.waiting_reason(pod("p", phase="Pending", conditions=[other]))
    assert waiting == "waiting for a node"
    assert pods.waiting_reason(pod("p", phase="Running", conditions=[why])) == ""

"""`kfp-ddp describe` and `logs`, on folders of runs, and what pods say of themselves."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kfp_ddp.cli import app
from kfp_ddp.client import pods
from kfp_ddp.client.steps import Step
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.failure import Failure
from tests import run_output

CAUSE = "error: rank 1: it broke; mend it"
STEP = Step("train", "train", "FAILED", pods=("wf-abc-1", "wf-abc-22"), driver="wf-abc-3")


def described(folder: Path) -> Any:
    """What is told of a run."""
    answer = CliRunner().invoke(app, ["describe", str(folder), "--json"])
    assert answer.exit_code == 0, answer.output
    return json.loads(answer.stdout)


def pod(name: str, **status: Any) -> dict[str, Any]:
    """One, with annotations where `node` names Argo's id."""
    node = status.pop("node", None)
    annotations = {"workflows.argoproj.io/node-id": node} if node else {}
    return {"metadata": {"name": name, "annotations": annotations}, "status": status}


def name_of(found: dict[str, Any] | None) -> str:
    """That of a pod."""
    return str(found["metadata"]["name"]) if found else ""


def test_a_failed_run_has_its_step_its_cause_and_what_to_do(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run", failed="train", said=CAUSE)
    found = described(run)
    assert (found["state"], found["step"]) == ("FAILED", "train")
    assert found["cause"] == "rank 1: it broke; mend it"
    assert found["trainings"][0]["checkpoint"] == 40
    assert found["next"][0] == f"kfp-ddp logs {run} train"
    assert found["next"][1] == f"kfp-ddp run SOURCE --local --output {run}"


def test_a_cause_is_taken_from_the_ranks_where_the_log_says_nothing(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run", failed="train", said="Killed")
    logs = run / "work" / run_output.RUN_ID / "train" / "logs"
    logs.mkdir()
    for name, at, error in (("failure-a", 20.0, "later"), ("failure-b", 10.0, "out of memory")):
        record = Failure(1, 3, error, retryable=False, time=at)
        (logs / f"{name}.json").write_text(record.to_json())
    assert described(run)["cause"] == "out of memory"


def test_a_run_without_a_word_says_its_last_line(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run", failed="evaluate", said="Segmentation fault")
    assert described(run)["cause"] == "Segmentation fault"


def test_a_run_that_did_not_come_to_its_end_is_unfinished(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run", failed="evaluate")
    log = run / "pipeline.log"
    log.write_text(log.read_text().partition("INFO - Task 'train' finished")[0])
    found = described(run)
    assert (found["state"], found["step"], found["end"]) == ("UNFINISHED", "train", None)


def test_a_run_that_succeeded_says_what_the_gate_said_and_what_to_do(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run")
    task = run / "work" / run_output.RUN_ID / "train"
    (task / "evaluation" / "verdict.json").write_text('{"blessed": true, "reason": "blessed: ok"}')
    (task / "exported.json").write_text('{"uri": "gs://models/abc", "champion": true}')
    answer = CliRunner().invoke(app, ["describe", str(run)])
    assert answer.exit_code == 0, answer.output
    assert "run  SUCCEEDED" in answer.stdout
    assert "gate        blessed: ok" in answer.stdout
    assert "bundle      gs://models/abc (champion)" in answer.stdout
    assert f"next        kfp-ddp predict {run} PICTURE" in answer.stdout
    assert "cause" not in answer.stdout


def test_what_a_log_says_moves_no_cursor(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run", failed="gate", said="error: \x1b[2Jcleared")
    assert "\\x1b[2Jcleared" in CliRunner().invoke(app, ["describe", str(run)]).stdout


def test_logs_are_those_of_a_step_or_of_all_by_name(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run", failed="train", said=CAUSE)
    assert CliRunner().invoke(app, ["logs", str(run), "train"]).stdout == f"{CAUSE}\n"
    assert CliRunner().invoke(app, ["logs", str(run)]).stdout == f"[train] {CAUSE}\n"


def test_a_log_has_what_the_step_said_and_not_its_inputs(tmp_path: Path) -> None:
    executor = "    [KFP Executor 2026-11-22 07:12:21,481 INFO]: "
    said = [f"{executor}Got executor_input:", "    {", '        "inputs": {', "        }", "    }"]
    said += ["    hello", "    }", f"{executor}Wrote executor output file to x."]
    run = run_output.make(tmp_path / "run", failed="gate", said="\n".join(said))
    assert CliRunner().invoke(app, ["logs", str(run), "gate"]).stdout == "hello\n}\n"


def test_a_step_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    run = run_output.make(tmp_path / "run", failed="data-sync")
    answer = CliRunner().invoke(app, ["logs", str(run), "trian"])
    assert isinstance(answer.exception, InputError)
    assert "no step 'trian': it has preflight, data-sync, teardown" in str(answer.exception)


def test_a_steps_pod_is_its_newest_whichever_way_argo_names_pods() -> None:
    names = ("wf-xyz-main-22", "wf-abc-main-1", "wf-abc-main-22", "wf-abc-3")
    there = [pod(name) for name in names]
    assert name_of(pods.find_pod(there, STEP)) == "wf-abc-main-22"
    assert name_of(pods.find_pod(there, STEP, driver=True)) == "wf-abc-3"
    assert pods.find_pod([pod("wf-abc-main-22", node="wf-abc-9")], STEP) is None
    assert name_of(pods.find_pod([pod("any", node="wf-abc-22")], STEP)) == "any"


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (
            {
                "phase": "Failed",
                "containerStatuses": [
                    {"name": "wait", "state": {"terminated": {"reason": "Completed"}}},
                    {"name": "main", "state": {"terminated": {"reason": "OOMKilled"}}},
                ],
            },
            "out of memory (OOMKilled): give the step more memory",
        ),
        (
            {
                "phase": "Failed",
                "conditions": [
                    {"type": "DisruptionTarget", "status": "True", "message": "node drained"}
                ],
            },
            "node drained",
        ),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "low on disk"},
            "Evicted: low on disk",
        ),
        ({"phase": "Failed", "containerStatuses": [{"name": "main", "state": {}}]}, ""),
    ],
)
def test_kubernetes_tells_what_ended_a_pod_where_its_program_did_not(
    status: dict[str, Any], told: str
) -> None:
    assert pods.kill_reason(pod("p", **status)) == told


def test_a_pod_without_a_node_says_why() -> None:
    why = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    other = {"type": "Ready", "status": "False", "message": "not ready"}
    assert pods.waiting_reason(pod("p", phase="Pending", conditions=[other, why])) == (
        "cannot be scheduled (0/3 nodes are available)"
    )
    assert (
        pods.waiting_reason(pod("p", phase="Pending", conditions=[other])) == "waiting for a node"
    )
    assert pods.waiting_reason(pod("p", phase="Running", conditions=[why])) == ""


def test_a_run_is_looked_into_without_what_only_runs_here_need() -> None:
    probe = (
        "import sys, kfp_ddp.client.description, kfp_ddp.client.comparison\n"
        "import kfp_ddp.client.download, kfp_ddp.client.logs\n"
        "print(sorted({'PIL', 'numpy', 'onnx', 'psutil', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

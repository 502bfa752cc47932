"""Inspect runs of a KFP server without a cluster: their files are in a bucket."""

import json
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError, ServerError
from kfp_ddp.export.publish import Lineage
from kfp_ddp.models.bundle import LINEAGE
from kfp_ddp.storage.kinds import open_store
from tests import run_output
from tests.exports import exported
from tests.kfp_server import faults
from tests.kfp_server.server import KfpServer
from tests.schedules import Call

RUN = "8fa2b9a1-6d87-4473-ad43-69c2efa3bcc0"


def fill(s3: Any, tmp_path: Path, task: Path) -> str:
    """Upload the folder of a task, and return the URI of the runs."""
    for path in task.rglob("*"):
        if path.is_file():
            name = f"runs/{RUN}/{task.name}/{path.relative_to(task).as_posix()}"
            s3.upload_file(str(path), "bucket", name)
    return "s3://bucket/runs"


def test_a_run_in_a_bucket_is_inspected(
    call: Call, kfp_server: KfpServer, s3: Any, tmp_path: Path
) -> None:
    run_output.task(tmp_path / "train", ("train", "evaluate", "export"), 80, {"epochs": 2})
    work = fill(s3, tmp_path, tmp_path / "train")
    kfp_server.record("run_get_failed", runtime_config={"parameters": {"work": work}})
    here = run_output.make(tmp_path / "here", correct=90, epochs=3)

    described = json.loads(call("describe", "shapes-1", "--json").stdout)
    assert (described["state"], described["step"]) == ("FAILED", "train")
    assert described["trainings"][0]["checkpoint"] == 40
    assert described["next"][-1] == "kfp-ddp retry 8fa2b9a1"
    assert "its pods were not read: no cluster is configured" in described["notes"][0]

    compared = json.loads(call("compare", "last", str(here), "--json").stdout)
    assert [figure["value"] for figure in compared["metrics"]["accuracy"]] == [0.8, 0.9]
    assert compared["settings"]["epochs"] == [2, 3]

    done = call("download", "8fa2b9a1", "--json")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "shapes-1/bundle/model.onnx").stat().st_size == 100_000
    assert [path.name for path in tmp_path.glob(".*")] == [".config"]


def test_a_log_stored_by_kfp_is_read_if_the_pod_cannot_be(
    call: Call, kfp_server: KfpServer, s3: Any
) -> None:
    spec = {"pipelineInfo": {"name": "train-resnet"}, "root": {"dag": {"tasks": {}}}}
    root = {"parameters": {}, "pipeline_root": "s3://bucket/kfp"}
    kfp_server.record("run_get_failed", pipeline_spec=spec, runtime_config=root)
    key = f"kfp/train-resnet/{RUN}/train/0a1b/executor-logs"
    s3.put_object(Bucket="bucket", Key=key, Body=b"step 1\nerror: rank 0: no room\n")
    assert call("logs", RUN, "train").stdout == "step 1\nerror: rank 0: no room\n"
    document = json.loads(call("describe", RUN, "--json").stdout)
    assert document["cause"] == "rank 0: no room"


def test_what_cannot_be_read_is_an_error_of_one_line(call: Call, kfp_server: KfpServer) -> None:
    kfp_server.record("run_get_failed", runtime_config={"parameters": {}})
    messages = {
        ("compare", RUN): "its pipeline has no parameter work or work_claim",
        ("download", RUN): "its pipeline has no parameter work or work_claim",
        ("logs", RUN, "train"): "no cluster is configured",
        ("logs", RUN, "trian"): "shapes-1 has no step 'trian'",
        ("describe", "shapes-2"): "there is no run 'shapes-2'",
    }
    for words, message in messages.items():
        answer = call(*words)
        assert isinstance(answer.exception, InputError), words
        assert message in str(answer.exception)
        assert "\n" not in str(answer.exception)
    kfp_server.fail("*", faults.status(503, "no healthy upstream"))
    assert isinstance(call("describe", "last").exception, ServerError)


@pytest.mark.parametrize(
    ("recorded", "more", "cause"),
    [
        ("run_get_terminated", {}, "cancelled by a user"),
        ("run_get_failed", {}, "not known"),
        (
            "run_get_failed",
            {"run_details": {"task_details": []}, "error": {"code": 3, "message": "no such spec"}},
            "no such spec",
        ),
    ],
)
def test_a_failed_run_has_the_cause_of_the_server(
    call: Call, kfp_server: KfpServer, recorded: str, more: dict[str, Any], cause: str
) -> None:
    run_id = kfp_server.record(recorded, **more)
    document = json.loads(call("describe", run_id, "--json").stdout)
    assert document["cause"] == cause
    assert document["next"][-1] == f"kfp-ddp retry {run_id[:8]}"


def test_a_run_that_succeeded_needs_no_pods(call: Call, kfp_server: KfpServer) -> None:
    kfp_server.record("run_get_succeeded")
    answer = call("describe", "shapes-2", "--no-files")
    assert answer.exit_code == 0, answer.output
    assert "shapes-2  SUCCEEDED after 3:34, started 2026-11-21 22:56 UTC" in answer.stdout
    assert "next        kfp-ddp download 1cb3d7e4" in answer.stdout
    assert "note" not in answer.stdout


def test_a_bundle_comes_from_the_destination(
    call: Call, kfp_server: KfpServer, tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    where = open_store(str(tmp_path / "models"))
    for number, run_id in enumerate(("another", RUN)):
        lineage = Lineage(run_id, f"{where.uri}/flowers", "")
        exported(where, "flowers", tmp_path / str(number), 7 + number, lineage)
    given = {"work_claim": "w", "destination": where.uri, "model_name": "flowers"}
    kfp_server.record("run_get_failed", runtime_config={"parameters": given})
    answer = call("download", RUN, "--output", "here", "--json")
    assert answer.exit_code == 0, answer.output
    assert "warning: no cluster is configured" in answer.stderr
    (task,) = json.loads(answer.stdout)["tasks"]
    lineage_file = json.loads((Path(task["bundle"]) / LINEAGE).read_text())
    assert lineage_file["run_id"] == RUN

    kfp_server.store.runs[RUN]["runtime_config"]["parameters"]["model_name"] = "trees"
    answer = call("download", RUN, "--output", "there")
    assert "no cluster is configured" in str(answer.exception)
    assert not (tmp_path / "there").exists()

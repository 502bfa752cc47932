"""What teardown finds a run to have come to, and that telling it fails nothing."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from kubernetes import client

from kfp_ddp.k8s.api import Api
from kfp_ddp.runs.teardown import outcome as outcomes
from kfp_ddp.runs.teardown.engine import run
from kfp_ddp.runs.teardown.outcome import outcome
from tests.serving import serving

VERDICT = {
    "blessed": True,
    "reason": "blessed: accuracy 0.9918 >= 0.97",
    "model": "resnet18",
    "accuracy": 0.9918,
    "dataset_digest": "67c0cb93c78b",
    "champion": "0123456789ab",
    "champion_accuracy": 0.98,
}
EXPORTED = {"name": "digits", "uri": "gs://models/digits/ab", "champion": True}


def left(work: Path, name: str, content: object) -> None:
    path = work / "run-1" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def state(work: Path, address: str = "") -> tuple[str, str]:
    found = outcome("run-1", str(work), address)
    return found.state, found.reason


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))


def test_the_folder_tells_how_far_a_run_went(tmp_path: Path) -> None:
    assert state(tmp_path) == ("unchanged", "")
    left(tmp_path, "train/metrics.jsonl", {})
    assert state(tmp_path) == ("trained", "")
    left(tmp_path, "train/logs/failure.json", {"rank": 1, "error": "Boom: x", "exit_code": 1})
    assert state(tmp_path) == ("failed", "rank 1: Boom: x")
    left(tmp_path, "train/evaluation/verdict.json", VERDICT | {"blessed": False, "reason": "not"})
    assert state(tmp_path) == ("not blessed", "not")
    left(tmp_path, "train/evaluation/verdict.json", VERDICT)
    assert state(tmp_path) == ("blessed", "accuracy 0.9918 >= 0.97")
    stays = "another came first"
    left(tmp_path, "train/exported.json", EXPORTED | {"champion": False, "champion_stays": stays})
    assert state(tmp_path) == ("exported", stays)
    left(tmp_path, "train/exported.json", EXPORTED)
    found = outcome("run-1", str(tmp_path), "https://ui/#/runs/details/run-1")
    assert (found.state, found.model, found.bundle) == ("promoted", "digits", EXPORTED["uri"])
    assert found.title() == (
        "digits promoted: accuracy 99.18%, +1.18 points on the champion 0123456789ab"
    )
    assert found.lines()[-1] == "run: https://ui/#/runs/details/run-1"


def test_of_several_trainings_the_one_that_went_furthest_is_told(tmp_path: Path) -> None:
    for name in ("train", "train-2", "train-3"):
        left(tmp_path, f"{name}/metrics.jsonl", {})
    left(tmp_path, "train-2/evaluation/verdict.json", VERDICT)
    left(tmp_path, "train-2/exported.json", EXPORTED)
    left(tmp_path, "train-3/evaluation/verdict.json", VERDICT | {"blessed": False})
    assert state(tmp_path) == ("promoted", "")


def test_a_damaged_record_is_passed_over(tmp_path: Path) -> None:
    left(tmp_path, "train/metrics.jsonl", {})
    left(tmp_path, "train/evaluation/verdict.json", ["no", "object"])
    (tmp_path / "run-1/train/exported.json").write_text("{")
    assert state(tmp_path) == ("trained", "")


def pod(node: str, phase: str, ended: str = "", reason: str = "Error") -> dict[str, Any]:
    name = node.replace("(", "-").replace(")", "")
    end = {"exitCode": int(phase == "Failed"), "reason": reason, "finishedAt": ended}
    return {
        "metadata": {
            "name": name,
            "creationTimestamp": ended,
            "annotations": {outcomes.NODE: f"wf.root.{node}"},
        },
        "spec": {"containers": [{"name": "main"}, {"name": "wait"}]},
        "status": {"phase": phase, "containerStatuses": [{"state": {"terminated": end}}]},
    }


@contextmanager
def cluster(
    monkeypatch: pytest.MonkeyPatch, pods: list[Any], logs: dict[str, str], **workflow: object
) -> Iterator[list[str]]:
    """An API server that has these pods and a Workflow, as a real one answers; yields the paths."""
    asked = []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            asked.append(url.path)
            kind, _, name = url.path.removesuffix("/log").partition("/pods/")
            if url.path.endswith("/log"):
                assert parse_qs(url.query)["container"] == ["main"]
                body = logs.get(name, "")
            else:
                assert parse_qs(url.query)["labelSelector"] == ["pipeline/runid=run-1"]
                items = [{"spec": workflow}] if "workflows" in kind else pods
                body = json.dumps({"items": items})
            self.send_response(200)
            self.send_header("Content-Length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    with serving(HTTPServer(("127.0.0.1", 0), Answers)) as address:
        api = Api(client.ApiClient(client.Configuration(host=address)), "ns")
        monkeypatch.setattr(Api, "connect", lambda: api)
        yield asked
        api.client.close()


def test_the_step_that_failed_first_is_told_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods = [
        pod("preflight.executor", "Succeeded", "2026-11-22T12:00:00Z"),
        pod("training.sync.executor(0)", "Failed", "2026-11-22T12:01:00Z"),
        pod("training.sync.executor(1)", "Succeeded", "2026-11-22T12:02:00Z"),
        pod("training.train.executor(0)", "Failed", "2026-11-22T12:03:00Z"),
        pod("training.other-driver", "Failed", "2026-11-22T12:04:00Z"),
        pod("teardown.executor", "Running", "2026-11-22T12:05:00Z"),
    ]
    log = "I1122 launching\nstep 3\nerror: training failed: rank 1: Boom: x\nexit status 1\n"
    with cluster(monkeypatch, pods, {"training.train.executor-0": log}):
        found = outcome("run-1", str(tmp_path), "")
    assert (found.state, found.step) == ("failed", "train")
    assert found.reason == "training failed: rank 1: Boom: x"
    assert found.title() == "run failed in train"


def test_a_step_that_left_no_word_is_told_with_what_kubernetes_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods = [pod("training.evaluate.executor", "Failed", "2026-11-22T12:01:00Z", "OOMKilled")]
    with cluster(monkeypatch, pods, {}):
        assert state(tmp_path) == ("failed", "out of memory (OOMKilled)")


def test_a_cancelled_run_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pods = [pod("training.train.executor", "Failed", "2026-11-22T12:01:00Z")]
    with cluster(monkeypatch, pods, {}, activeDeadlineSeconds=0):
        assert state(tmp_path) == ("cancelled", "")


def test_telling_fails_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not if the setting is wrong, the key is not there, nor if the folder cannot be read."""
    for job, said in (
        (
            {"notify_on": "no"},
            "no notification of the run's end was sent: notify_on='no' is",
        ),
        ({"notify_slack": "NO_SUCH_KEY"}, "nothing was sent to NO_SUCH_KEY: the bucket's secret"),
    ):
        assert run("run-1", "local", job, str(tmp_path)) == "nothing was left to end"
        assert said in capsys.readouterr().out
    monkeypatch.setattr(outcomes, "open_store", lambda place: 1 / 0)
    given = {"notify_slack": "KEY"}
    assert run("run-1", "local", given, str(tmp_path)) == "nothing was left to end"
    assert "warning: no notification of the run's end was sent: division" in capsys.readouterr().out


def test_nobody_looks_for_an_outcome_that_nobody_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(monkeypatch, [], {}) as asked:
        run("run-1", "local", {}, str(tmp_path))
    assert asked == []

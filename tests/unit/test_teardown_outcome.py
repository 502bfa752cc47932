"""How a run ended, by its folder and its pods."""

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


def write(work: Path, name: str, content: object) -> None:
    path = work / "run-1" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def state(work: Path) -> tuple[str, str]:
    result = outcome("run-1", str(work), "")
    return result.state, result.reason


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))


def test_the_folder_has_the_last_state(tmp_path: Path) -> None:
    assert state(tmp_path) == ("unchanged", "")
    write(tmp_path, "train/metrics.jsonl", {})
    write(tmp_path, "train/evaluation/verdict.json", ["no", "object"])  # damaged records
    (tmp_path / "run-1/train/exported.json").write_text("{")
    assert state(tmp_path) == ("trained", "")
    write(tmp_path, "train/logs/failure.json", {"rank": 1, "error": "Boom: x", "exit_code": 1})
    assert state(tmp_path) == ("failed", "rank 1: Boom: x")
    write(tmp_path, "train/evaluation/verdict.json", VERDICT | {"blessed": False, "reason": "not"})
    assert state(tmp_path) == ("not blessed", "not")
    write(tmp_path, "train/evaluation/verdict.json", VERDICT)
    assert state(tmp_path) == ("blessed", "accuracy 0.9918 >= 0.97")
    reason = "another came first"
    write(tmp_path, "train/exported.json", EXPORTED | {"champion": False, "champion_stays": reason})
    assert state(tmp_path) == ("exported", reason)
    write(tmp_path, "train/exported.json", EXPORTED)
    result = outcome("run-1", str(tmp_path), "https://ui/#/runs/details/run-1")
    assert (result.state, result.model, result.bundle) == ("promoted", "digits", EXPORTED["uri"])
    assert result.gain == pytest.approx(0.0118)
    assert result.lines()[-1] == "run: https://ui/#/runs/details/run-1"

    # The most advanced of several trainings counts.
    for name in ("train-2", "train-3"):
        write(tmp_path, f"{name}/metrics.jsonl", {})
    write(tmp_path, "train-3/evaluation/verdict.json", VERDICT | {"blessed": False})
    assert state(tmp_path) == ("promoted", "")


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
    """Serve pods, their logs and a Workflow; yield the requested paths."""
    paths = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            paths.append(url.path)
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
            """Log nothing."""

    with serving(HTTPServer(("127.0.0.1", 0), Handler)) as address:
        api = Api(client.ApiClient(client.Configuration(host=address)), "ns")
        monkeypatch.setattr(Api, "connect", lambda: api)
        yield paths
        api.client.close()


def test_the_first_failed_step_is_named_with_its_error(
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
        result = outcome("run-1", str(tmp_path), "")
    assert (result.state, result.step) == ("failed", "train")
    assert result.reason == "training failed: rank 1: Boom: x"
    assert result.title() == "run failed in train"


@pytest.mark.parametrize(
    ("workflow", "expected"),
    [
        ({}, ("failed", "out of memory (OOMKilled)")),
        ({"activeDeadlineSeconds": 0}, ("cancelled", "")),
    ],
)
def test_a_step_without_a_log_has_the_reason_of_kubernetes(
    workflow: dict[str, Any],
    expected: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cancelled run has not failed."""
    pods = [pod("training.evaluate.executor", "Failed", "2026-11-22T12:01:00Z", "OOMKilled")]
    with cluster(monkeypatch, pods, {}, **workflow):
        assert state(tmp_path) == expected


def test_a_notification_never_fails_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The setting is invalid, the key is missing, or the folder cannot be read."""
    prefix = "no notification of the run's end was sent:"
    for job, message in (
        ({"notify_on": "no"}, f"{prefix} notify_on='no' is"),
        ({"notify_slack": "NO_SUCH_KEY"}, "nothing was sent to NO_SUCH_KEY: the bucket's secret"),
    ):
        assert run("run-1", "local", job, str(tmp_path)) == "nothing was left to end"
        assert message in capsys.readouterr().out
    monkeypatch.setattr(outcomes, "open_store", lambda work: 1 / 0)
    job = {"notify_slack": "KEY"}
    assert run("run-1", "local", job, str(tmp_path)) == "nothing was left to end"
    assert f"warning: {prefix} division" in capsys.readouterr().out


def test_without_a_notification_nothing_is_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(monkeypatch, [], {}) as paths:
        run("run-1", "local", {}, str(tmp_path))
    assert paths == []

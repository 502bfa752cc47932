"""Whom the status of a TrainJob is told."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.training.sinks import TrainJobStatus
from tests.serving import serving


class Handler(BaseHTTPRequestHandler):
    """Notes who asks, and sends on where `server.onward` says."""

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.heard.append((self.command, dict(self.headers)))  # type: ignore[attr-defined]
        onward = getattr(self.server, "onward", None)
        self.send_response(onward[0] if onward else 200)
        if onward:
            self.send_header("Location", onward[1])
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


def server(**fields: Any) -> Any:
    made = HTTPServer(("127.0.0.1", 0), Handler)
    for name, value in {"heard": [], **fields}.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_the_token_does_not_follow_a_redirect(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("secret")
    elsewhere = server()
    with serving(elsewhere) as there:
        first = server(onward=(code, f"{there}/status"))
        with serving(first) as url:
            monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"{url}/status")
            monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
            status = TrainJobStatus()
            status("start", {"steps_total": 10, "resumed_from_step": 0})
            status("end", {"status": "done", "step": 10})
    assert [headers["Authorization"] for _, headers in first.heard] == ["Bearer secret"]
    assert elsewhere.heard == []
    assert "status was not updated" in capsys.readouterr().out


def test_a_report_tells_how_far_the_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "http://127.0.0.1:9/status")
    status = TrainJobStatus()
    status("start", {"steps_total": 200, "resumed_from_step": 50})
    told = json.loads(status._body(100, status._began[0] + 100))["trainerStatus"]
    assert told["progressPercentage"] == 50
    assert told["estimatedRemainingSeconds"] == 200
    assert {"name": "start_steps_total", "value": "200"} in told["metrics"]
    early = json.loads(status._body(50, status._began[0] + 100))["trainerStatus"]
    assert "estimatedRemainingSeconds" not in early

"""`kfp-ddp doctor --host` on servers that answer as KFP's API server does, and on others."""

import http.server
import importlib.metadata
import json
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kfp_ddp.checks.doctor import examine
from kfp_ddp.checks.finding import Requirements
from kfp_ddp.cli import app
from kfp_ddp.client.connection import own_namespace
from kfp_ddp.client.port_forward import service
from kfp_ddp.core.errors import InputError
from tests.serving import serving

pytestmark = pytest.mark.usefixtures("no_cluster")
KUBECONFIG = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
"""Where the client took KUBECONFIG from when it was imported."""
SDK = importlib.metadata.version("kfp")


@pytest.fixture
def no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubeconfig that names no server, and no proxy before the servers of this test."""
    config = tmp_path / "kubeconfig"
    config.write_text("apiVersion: v1\nkind: Config\n")
    monkeypatch.setenv("KUBECONFIG", str(config))
    monkeypatch.setenv("NO_PROXY", "*")


def healthz(tag: str) -> bytes:
    """What KFP 2.17 answers, by startHTTPProxy in its backend/src/apiserver/main.go."""
    head = f'{{"commit_sha":"unknown", "tag_name":"{tag}", "multi_user":false, '
    return (head + '"pipeline_store": "database"}').encode()


@contextmanager
def server(body: bytes, status: int = 200) -> Iterator[str]:
    """A server that answers KFP's health path so, and everything else with 404; its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/pipeline/apis/v2beta1/healthz" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}/pipeline/"
        finally:
            listening.shutdown()
            thread.join()


@contextmanager
def talking(answer: bytes) -> Iterator[str]:
    """A server that says the same to everybody, whatever it is asked; its URL."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            self.wfile.write(answer)

    with serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)) as url:
        yield url


@pytest.mark.parametrize(
    "tag", [SDK, ".".join(SDK.split(".")[:2]) + ".99", f"v{SDK}", "2.99.0", "2.100.1"]
)
def test_a_server_of_the_sdks_minor_version_or_a_newer_one_is_fine(tag: str) -> None:
    with server(healthz(tag)) as url:
        found = doctor(url)
    assert found == {"state": "ok", "what": "KFP", "said": f"SDK {SDK}, API server {tag}"}


@pytest.mark.parametrize("tag", ["2.5.0", "2.16.1", "v1.8.22", "2.0.0-alpha.7"])
def test_a_server_before_2_17_stops_a_run(tag: str) -> None:
    """An SDK that fits it is none that this package can be installed with."""
    with server(healthz(tag)) as url:
        found = doctor(url)
    assert (found["state"], found["said"]) == ("bad", f"SDK {SDK}, API server {tag}")
    assert found["remedy"] == "upgrade KFP to 2.17 or newer"


@pytest.mark.parametrize(
    ("tag", "remedy"),
    [
        ("3.0.0", "look for a newer kfp-ddp for KFP 3"),
        ("unknown", "check that its images are of 2.17 or newer"),
        ("", "check that its images are of 2.17 or newer"),
    ],
)
def test_a_server_of_another_version_is_a_warning_with_a_remedy(tag: str, remedy: str) -> None:
    with server(healthz(tag)) as url:
        found = doctor(url)
    assert (found["state"], found["remedy"]) == ("warn", remedy)
    assert tag in found["said"]


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"Jwt is missing", 401, "answers 401 Unauthorized"),
        (b"RBAC: access denied", 403, "answers 403 Forbidden"),
        (b"<html>Log in</html>", 200, "is not answered by a KFP API server"),
        (b"[]", 200, "is not answered by a KFP API server"),
        (b'{"multi_user": false}', 200, "is not answered by a KFP API server"),
    ],
)
def test_a_login_or_another_server_is_an_error_with_a_remedy(
    body: bytes, status: int, says: str
) -> None:
    with server(body, status) as url:
        found = doctor(url)
    assert found["state"] == "bad"
    assert says in found["said"]
    assert "kubectl port-forward" in found["remedy"]


def test_a_host_where_nobody_listens_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    found = doctor(f"http://127.0.0.1:{port}")
    assert found["state"] == "bad"
    assert "does not answer (" in found["said"]
    assert "Connection refused" in found["said"]
    assert found["remedy"]


def test_a_host_that_is_no_url_is_an_error() -> None:
    found = doctor("localhost:8888")
    assert found["state"] == "bad"
    assert found["remedy"] == "give one as http://localhost:8888"


@pytest.mark.parametrize(
    "host", ["http://local host:8888", "http://localhost:port", "http://\x1b[31m", "http://[::1"]
)
def test_a_host_that_no_request_can_be_sent_to_is_an_error(host: str) -> None:
    found = doctor(host)
    assert found["said"] == f"{host!r} is not an http(s) URL"


def test_a_login_in_the_host_is_not_shown() -> None:
    for host in ("http://me:secret@localhost:8888", "me:secret@localhost"):
        found = doctor(host)
        assert found["said"] == "the host contains a login, which is not used"
        assert "secret" not in str(found)


@pytest.mark.parametrize(
    "answer",
    [
        b"no HTTP at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"[" * 100_000,
        b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"tag_name": "9\\u001b[31m"}',
    ],
)
def test_what_answers_with_anything_is_told_and_the_rest_is_still_found(answer: bytes) -> None:
    with talking(answer) as url:
        assert doctor(url)["state"] in ("bad", "warn")


def test_a_kubeconfig_that_is_none_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "broken"
    monkeypatch.setattr(KUBECONFIG, str(file))
    for content in (b"a: [b\n c", b"- 1", b"\xff\xfe\x00"):
        file.write_bytes(content)
        (found,) = examine(Requirements())
        assert "no Kubernetes cluster is configured (" in found.message
        with pytest.raises(InputError, match="no address of KFP is set"):
            service("ml-pipeline", "kubeflow", 8888).__enter__()
        assert own_namespace() == ""


def test_a_login_page_before_the_cluster_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config"
    monkeypatch.setattr(KUBECONFIG, str(file))
    page = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\n<html>"
    with talking(page) as url:
        cluster = {"name": "it", "cluster": {"server": url}}
        context = {"name": "it", "context": {"cluster": "it", "user": "me"}}
        user = {"name": "me", "user": {"token": "secret"}}
        named = {"clusters": [cluster], "contexts": [context], "users": [user]}
        file.write_text(json.dumps({"kind": "Config", "current-context": "it", **named}))
        (found,) = examine(Requirements())
        assert "not a Kubernetes API server" in found.message


def test_for_people_each_finding_is_a_line_in_columns_and_its_remedy_another() -> None:
    with server(healthz("2.5.0")) as url:
        done = subprocess.run(
            [sys.executable, "-m", "kfp_ddp", "doctor", "--host", url],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert [line[0] for line in lines] == ["✗", " ", "✗", " "]
    assert lines[0].startswith("✗ API server  ")
    assert lines[2].startswith("✗ KFP         SDK")
    for line in (lines[1], lines[3]):
        assert line.index("→") == len("✗ API server  ")


def test_the_context_that_is_set_once_is_the_one_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text(
        json.dumps(
            {"contexts": [{"name": "mine", "context": {"cluster": "c", "user": "u"}}]}
            | {"current-context": "mine", "kind": "Config", "clusters": [], "users": []}
        )
    )
    monkeypatch.setattr(KUBECONFIG, str(tmp_path / "config"))
    monkeypatch.setenv("KFP_DDP_CONTEXT", "staging")
    answer = CliRunner().invoke(app, ["doctor", "--json"])
    (found,) = json.loads(answer.output)["findings"]
    assert (found["what"], found["state"]) == ("API server", "bad")
    assert "staging" in found["said"]


def doctor(host: str) -> dict[str, str]:
    """What is found of KFP, where no cluster is reached."""
    cluster, found = (finding.to_json() for finding in examine(Requirements(host=host)))
    assert (cluster["what"], cluster["state"]) == ("API server", "bad")
    assert found["what"] == "KFP"
    assert all("\n" not in text for text in found.values())
    return {key: text for key, text in found.items() if text}

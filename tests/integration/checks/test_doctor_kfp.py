"""`kfp-ddp doctor --host` with KFP's API server and with other servers."""

import importlib.metadata
import json
import socketserver
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.checks.doctor import examine
from kfp_ddp.checks.finding import Requirements
from kfp_ddp.client.kfp.connection import forwarded_port, own_namespace
from kfp_ddp.core.errors import InputError
from kfp_ddp.k8s.api import Api
from tests.commands import call
from tests.serving import Handler, head, serving, serving_by

pytestmark = pytest.mark.usefixtures("no_cluster")
KUBECONFIG = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
"""Where the client took KUBECONFIG from when it was imported."""
SDK = importlib.metadata.version("kfp")


@pytest.fixture
def no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a kubeconfig without a server, and no proxy."""
    config = tmp_path / "kubeconfig"
    config.write_text("apiVersion: v1\nkind: Config\n")
    monkeypatch.setenv("KUBECONFIG", str(config))
    monkeypatch.setenv("NO_PROXY", "*")


def healthz(tag: str) -> bytes:
    """Return the answer of KFP 2.17, by startHTTPProxy in its backend/src/apiserver/main.go."""
    head = f'{{"commit_sha":"unknown", "tag_name":"{tag}", "multi_user":false, '
    return (head + '"pipeline_store": "database"}').encode()


@contextmanager
def server(body: bytes, status: int = 200) -> Iterator[str]:
    """Yield the URL of a server that answers KFP's health path, and 404 for other paths."""

    class Health(Handler):
        def do_GET(self) -> None:
            known = self.path == "/pipeline/apis/v2beta1/healthz"
            self.answer(status if known else 404, body)

    with serving_by(Health) as url:
        yield f"{url}/pipeline/"


@contextmanager
def talking(answer: bytes) -> Iterator[str]:
    """Yield the URL of a server with one answer to all requests."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            self.wfile.write(answer)

    with serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)) as url:
        yield url


@pytest.mark.parametrize(
    ("tag", "state", "remedy"),
    [
        *((tag, "ok", "") for tag in (SDK, f"v{SDK}", "2.99.0", "2.100.1")),
        *((tag, "bad", "upgrade KFP to 2.17") for tag in ("2.5.0", "2.16.1", "v1.8.22", "2.0.0-a")),
        ("3.0.0", "warn", "look for a newer kfp-ddp for KFP 3"),
        ("unknown", "warn", "check that its images are of 2.17 or newer"),
        ("", "warn", "check that its images are of 2.17 or newer"),
    ],
)
def test_version_of_the_server_is_compared_with_the_sdk(tag: str, state: str, remedy: str) -> None:
    with server(healthz(tag)) as url:
        finding = doctor(url)
    assert finding["state"] == state
    assert finding.get("remedy", "").startswith(remedy)
    assert f"SDK {SDK}, API server" in finding["message"]
    assert tag in finding["message"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"Jwt is missing", 401, "requires a login (401: Jwt is missing)"),
        (b"RBAC: access denied", 403, "(403: RBAC: access denied)"),
        (b"<html>Log in</html>", 200, "instead of JSON"),
    ],
)
def test_login_or_another_server_is_bad(body: bytes, status: int, message: str) -> None:
    with server(body, status) as url:
        finding = doctor(url)
    assert finding["state"] == "bad"
    assert message in finding["message"]
    assert finding["remedy"]


@pytest.mark.parametrize(
    "answer",
    [
        b"no HTTP at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"[" * 100_000,
        b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"tag_name": "9\\u001b[31m"}',
    ],
)
def test_invalid_answer_does_not_end_the_other_checks(answer: bytes) -> None:
    with talking(answer) as url:
        assert doctor(url)["state"] in ("bad", "warn")


def test_invalid_kubeconfig_is_one_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "broken"
    monkeypatch.setattr(KUBECONFIG, str(file))
    for content in (b"a: [b\n c", b"- 1", b"\xff\xfe\x00"):
        file.write_bytes(content)
        (finding,) = examine(Requirements(), str)
        assert "no Kubernetes cluster is configured (" in finding.message
        with pytest.raises(InputError, match="no address of KFP is set"):
            forwarded_port("kubeflow").__enter__()
        assert own_namespace() == ""


def test_cluster_behind_a_login_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config"
    monkeypatch.setattr(KUBECONFIG, str(file))
    page = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\n<html>"
    with talking(page) as url:
        write_kubeconfig(file, url)
        (finding,) = examine(Requirements(), str)
        assert "not a Kubernetes API server" in finding.message


@pytest.mark.parametrize(
    "spec",
    [
        {"type": "ExternalName", "externalName": "kfp.example.com"},
        {"ports": [{"port": 8888}]},
        {"ports": [{"port": 8888}], "selector": {}},
    ],
)
def test_service_without_pods_needs_a_host(
    spec: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KUBECONFIG, str(tmp_path / "config"))
    body = json.dumps({"metadata": {"name": "ml-pipeline"}, "spec": spec}).encode()
    with talking(head(body) + body) as url:
        write_kubeconfig(tmp_path / "config", url)
        with pytest.raises(InputError, match=r"give --host$"):
            forwarded_port("kubeflow").__enter__()


def test_output_has_columns_and_a_line_for_each_remedy() -> None:
    with server(healthz("2.5.0")) as url:
        done = call("doctor", "--host", url)
    assert (done.exit_code, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert [line[0] for line in lines] == ["✗", " ", "✗", " "]
    assert lines[0].startswith("✗ API server  ")
    assert lines[2].startswith("✗ KFP         SDK")
    for line in (lines[1], lines[3]):
        assert line.index("→") == len("✗ API server  ")


def test_configured_context_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kubeconfig(tmp_path / "config", "https://theirs")
    monkeypatch.setattr(KUBECONFIG, str(tmp_path / "config"))
    monkeypatch.setenv("KFP_DDP_CONTEXT", "staging")
    (finding,) = json.loads(call("doctor", "--json").output)["findings"]
    assert (finding["what"], finding["state"]) == ("API server", "bad")
    assert "staging" in finding["message"]


def test_a_context_in_a_pod_is_one_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise `install --context it` would change the pod's own cluster."""
    write_kubeconfig(tmp_path / "config", "https://theirs")
    (tmp_path / "namespace").write_text("own")
    monkeypatch.setattr(KUBECONFIG, str(tmp_path / "config"))
    monkeypatch.setattr("kubernetes.config.load_incluster_config", lambda configuration: None)
    for module in ("kfp_ddp.k8s.api", "kfp_ddp.client.kfp.connection"):
        monkeypatch.setattr(f"{module}.NAMESPACE_FILE", tmp_path / "namespace")
    assert (Api.connect().namespace, own_namespace()) == ("own", "own")
    api = Api.connect(context="it")
    assert (api.client.configuration.host, api.namespace) == ("https://theirs", "default")
    assert own_namespace("it") == ""


def test_a_step_uses_the_token_of_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its token: the certificate and the namespace are those of the pod."""
    for name in ("own", "ca.crt", "namespace"):
        (tmp_path / name).write_text(name)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    for name, file in (("TOKEN", "own"), ("CERT", "ca.crt")):
        incluster = f"kubernetes.config.incluster_config.SERVICE_{name}_FILENAME"
        monkeypatch.setattr(incluster, str(tmp_path / file))
    monkeypatch.setattr("kfp_ddp.k8s.api.NAMESPACE_FILE", tmp_path / "namespace")
    monkeypatch.setattr("kfp_ddp.k8s.api.LAUNCHER_DIR", str(tmp_path / "mounted"))

    def token() -> str:
        return str(Api.connect().client.configuration.api_key["authorization"])

    assert token() == "bearer own"
    (tmp_path / "mounted").mkdir()
    assert token() == "bearer own", "the secret is not installed"
    (tmp_path / "mounted" / "token").write_text("launcher")
    assert token() == "bearer launcher"


def write_kubeconfig(file: Path, server: str) -> None:
    """Write one with the context `it`, whose namespace is empty."""
    cluster = {"name": "it", "cluster": {"server": server}}
    context = {"name": "it", "context": {"cluster": "it", "user": "me", "namespace": ""}}
    user = {"name": "me", "user": {"token": "secret"}}
    named = {"clusters": [cluster], "contexts": [context], "users": [user]}
    file.write_text(json.dumps({"kind": "Config", "current-context": "it", **named}))


def doctor(host: str) -> dict[str, str]:
    """Return the finding about KFP, without a cluster."""
    cluster, finding = json.loads(call("doctor", "--host", host, "--json").stdout)["findings"]
    assert (cluster["what"], cluster["state"]) == ("API server", "bad")
    assert finding["what"] == "KFP"
    assert all("\n" not in text for text in finding.values())
    return {key: text for key, text in finding.items() if text}

"""Connections to a KFP server, and logins at Dex and at Identity-Aware Proxy."""

import os
from pathlib import Path
from typing import Any

import kfp
import pytest

from kfp_ddp.client.kfp import login
from kfp_ddp.client.kfp.connection import open_client
from kfp_ddp.core.config import Connection
from kfp_ddp.core.errors import InputError, KfpDdpError, RefusedError, ServerError
from tests import tls
from tests.files import write
from tests.gcs_server import Bucket
from tests.kfp_server import faults
from tests.kfp_server.dex import guarding
from tests.kfp_server.server import KfpServer, serving
from tests.serving import Fault, free_port

SECRET = "eyJhbGciOi-the-token"
USER = "user@example.com"


def error_of(connection: Connection) -> str:
    """Return the error of one line with which a request ends."""
    with pytest.raises(KfpDdpError) as caught, open_client(connection) as client:
        client.get_run("1acbe56d")
    line = str(caught.value)
    assert SECRET not in line
    return line


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKEN", "COOKIE", "PASSWORD", "HOST"):
        monkeypatch.delenv(f"KFP_DDP_{name}", raising=False)


def test_version_and_mode_of_the_server_are_known(
    kfp_server: KfpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with open_client(Connection(host=f"{kfp_server.url}/", namespace="mine")) as client:
        assert (client.version, client.multi_user) == ("2.17.0", False)
        client.list_runs()
        client.set_user_namespace("mine")
    assert kfp_server.requests_for("list_runs")[0].query.get("namespace", "") == ""
    assert not list(tmp_path.iterdir()), "nothing is written to the home folder"


def test_https_goes_through_a_proxy(kfp_server: KfpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", kfp_server.url)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert "Tunnel connection failed" in error_of(Connection(host="https://kfp.example.com"))
    assert "Connection refused" in error_of(Connection(host="https://127.0.0.1:1"))
    monkeypatch.setenv("KFP_DDP_PASSWORD", SECRET)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/missing")  # ca_file goes before it
    dex = Connection(host="https://kfp.example.com", username="me", ca_file=__file__)
    assert "does not answer: ProxyError" in error_of(dex)


def test_a_multi_user_server_needs_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(multi_user=True) as server:
        with open_client(Connection(host=server.url, namespace="kubeflow-user")) as client:
            client.list_runs()
        assert server.requests_for("list_runs")[0].query["namespace"] == "kubeflow-user"
        with open_client(Connection(host=server.url, namespace="theirs")) as client:
            with pytest.raises(RefusedError, match="check that --namespace is one") as caught:
                client.list_runs()
            assert caught.value.status == 403
        monkeypatch.setattr("kfp_ddp.client.kfp.connection.own_namespace", lambda context: "")
        assert error_of(Connection(host=server.url)).endswith(
            "has several users: give --namespace, the one of your profile"
        )
        assert not server.violations


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (faults.gone, "the answer was cut off"),
        (faults.cut, "the answer was cut off"),
        (faults.silence, "timeout after 0.2 s"),
        (faults.stack_trace, r"failed \(500\): Internal Server Error; try again later"),
        (faults.proxy_error(502), r"failed \(502\): 502 upstream connect error"),
        (faults.status(429, "slow down"), r"failed \(429\): slow down"),
    ],
)
def test_server_fault_is_retried(kfp_server: KfpServer, fault: Fault, message: str) -> None:
    kfp_server.fail("get_run", fault)
    with open_client(Connection(host=kfp_server.url, timeout=0.2)) as client:
        with pytest.raises(ServerError, match=message) as caught:
            client.get_run("1acbe56d")
        assert caught.value.exit_code == 1
        kfp_server.heal()
        with pytest.raises(RefusedError, match=r"KFP refuses this \(404\): Run 1acbe56d not found"):
            client.get_run("1acbe56d")


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (faults.login_page, "set a token, a cookie or a Dex user"),
        (faults.proxy_error(404), "has no KFP API (404)"),
        *((faults.answer(text), "with JSON that KFP does not") for text in ("null", "[]", "1")),
        (faults.answer("[" * 100_000), "the answer was cut off"),
    ],
)
def test_a_foreign_answer_is_refused(kfp_server: KfpServer, fault: Fault, line: str) -> None:
    kfp_server.fail("*", fault)
    assert line in error_of(Connection(host=kfp_server.url))


def test_create_is_not_repeated(kfp_server: KfpServer, capsys: pytest.CaptureFixture[str]) -> None:
    host = kfp_server.url.removeprefix("http://")  # a local address needs no scheme
    with open_client(Connection(host=host)) as client:
        kfp_server.fail("create_experiment", faults.gone, 1)
        with pytest.raises(ServerError, match="was cut off"):
            client.create_experiment("nightly")
        assert len(kfp_server.requests_for("create_experiment")) == 1
        created = client.create_experiment("nightly")
        assert client.create_experiment("nightly").experiment_id == created.experiment_id
    assert len(kfp_server.requests_for("create_experiment")) == 2
    assert capsys.readouterr().out == ""
    assert "print" not in vars(kfp.client.client), "our import does not change kfp"


@pytest.mark.parametrize(
    ("host", "line"),
    [
        *((host, f"host={host!r} is not a URL") for host in ("ftp://kfp", "http://[::1")),
        (f"https://me:{SECRET}@kfp", "host contains a user or password"),
        ("http://127.0.0.1:1", "http://127.0.0.1:1 does not answer: Connection refused"),
    ],
)
def test_an_invalid_or_unreachable_host_is_an_error(host: str, line: str) -> None:
    assert line in error_of(Connection(host=host))


def test_a_server_without_a_certificate(kfp_server: KfpServer, tmp_path: Path) -> None:
    https = kfp_server.url.replace("http:", "https:")
    assert f"{https} does not answer" in error_of(Connection(host=https, timeout=0.2))
    missing = tmp_path / "ca.pem"
    assert "ca.pem" in error_of(Connection(host=https, ca_file=str(missing)))


def test_a_token_file_is_read_for_each_request(kfp_server: KfpServer, tmp_path: Path) -> None:
    kfp_server.token, file = SECRET, tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    with open_client(Connection(host=kfp_server.url, token_file=str(file))) as client:
        kfp_server.token = "the-next"
        file.write_text("the-next")
        assert client.list_runs().runs is None
    assert {request.headers["authorization"] for request in kfp_server.requests} == {
        f"Bearer {SECRET}",
        "Bearer the-next",
    }


def test_the_error_names_the_login_that_was_refused(
    kfp_server: KfpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kfp_server.token, file = "another", tmp_path / "token"
    assert "requires a login (401" in error_of(Connection(host=kfp_server.url))
    file.write_text(SECRET)
    line = error_of(Connection(host=kfp_server.url, token_file=str(file)))
    assert f"rejects the token in {file} (401" in line
    monkeypatch.setenv("KFP_DDP_TOKEN", SECRET)
    assert "rejects the token of KFP_DDP_TOKEN (401" in error_of(Connection(host=kfp_server.url))


def test_the_service_account_token_of_the_pod_is_used(
    kfp_server: KfpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(write(tmp_path / "token", SECRET)))
    kfp_server.token = SECRET
    with open_client(Connection(host=kfp_server.url)) as client:
        assert client.version == "2.17.0"


def test_an_invalid_token_file_is_an_error(kfp_server: KfpServer, tmp_path: Path) -> None:
    file = tmp_path / "token"
    connection = Connection(host=kfp_server.url, token_file=str(file))
    assert error_of(connection) == f"cannot read {file}: No such file or directory"
    file.write_text("\n")
    assert "is empty" in error_of(connection)
    file.write_bytes(b"\xff\xfe")
    assert error_of(connection) == f"cannot read {file}: it is not text"
    assert not kfp_server.requests


@pytest.mark.parametrize("secret", [f"{SECRET}\nsecond", f"“{SECRET}”", f"{SECRET}\r\nX: 1"])
def test_a_secret_that_no_header_can_contain_is_not_printed(
    kfp_server: KfpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    file = write(tmp_path / "token", secret)
    assert f"{file} contains" in error_of(Connection(host=kfp_server.url, token_file=str(file)))
    for name in ("KFP_DDP_COOKIE", "KFP_DDP_TOKEN"):
        monkeypatch.setenv(name, secret)
        assert f"{name} contains line breaks" in error_of(Connection(host=kfp_server.url))
    assert not kfp_server.requests


def test_the_cookie_of_a_session(kfp_server: KfpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    kfp_server.cookie = "authservice_session=MTY1"
    assert "answers with a redirect to a login" in error_of(Connection(host=kfp_server.url))
    monkeypatch.setenv("KFP_DDP_COOKIE", "authservice_session=expired")
    line = error_of(Connection(host=kfp_server.url))
    assert "the cookie of KFP_DDP_COOKIE is not accepted" in line
    assert "expired" not in line
    monkeypatch.setenv("KFP_DDP_COOKIE", kfp_server.cookie)
    with open_client(Connection(host=kfp_server.url)) as client:
        assert client.version == "2.17.0"


@pytest.mark.parametrize("host", ["http://10.0.0.1:1/pipeline", "http://kubeflow.example.com"])
def test_login_needs_https(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = str(write(tmp_path / "password", SECRET))
    dex = Connection(host=host, username="me", password_file=secret)
    for connection in (dex, Connection(host=host, cookie_file=secret)):
        assert error_of(connection).startswith(f"a login is not sent to {host} without https")
    monkeypatch.setenv("KFP_DDP_TOKEN", SECRET)
    assert "without https" in error_of(Connection(host=host))


def test_pod_login_is_sent_in_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login, "NAMESPACE_FILE", tmp_path)
    for name in ("kfp", "ml-pipeline.kubeflow", "a.b.svc", "a.b.svc.example.org"):
        login.check_private(f"http://{name}:8888")
    for name in ("example.com", "a.b", "kubeflow.example.com"):
        with pytest.raises(InputError, match="without https"):
            login.check_private(f"http://{name}")


def test_missing_settings_are_named(kfp_server: KfpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    line = error_of(Connection(host=kfp_server.url, username="me@example.com"))
    assert line.startswith("there is no password for me@example.com: set KFP_DDP_PASSWORD")
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", "/nowhere")
    assert error_of(Connection()).startswith("no address of KFP is set")


def test_the_token_has_precedence(kfp_server: KfpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KFP_DDP_COOKIE", "session=1")
    monkeypatch.setenv("KFP_DDP_TOKEN", SECRET)
    with open_client(Connection(host=kfp_server.url, username="me@example.com")):
        pass
    (request,) = kfp_server.requests
    assert request.headers["authorization"] == f"Bearer {SECRET}"
    assert "cookie" not in request.headers


def connection(url: str, folder: Path, password: str = "correct horse") -> Connection:
    file = str(write(folder / "password", f"{password}\n"))
    return Connection(host=f"{url}/pipeline", username=USER, password_file=file, timeout=5)


@pytest.mark.parametrize("more", [{}, {"several": True}, {"approval": True}])
def test_login_by_the_form(kfp_server: KfpServer, tmp_path: Path, more: dict[str, bool]) -> None:
    with guarding(kfp_server.url, **more) as dex:
        with open_client(connection(dex.url, tmp_path)) as client:
            assert client.list_experiments().experiments[0].display_name == "Default"
        assert dex.posted[0] == {"login": [USER], "password": ["correct horse"]}
        assert {*dex.cookies} == {f"oauth2_proxy_kubeflow={dex.session}"}


@pytest.mark.parametrize("more", [{"action": "http://intruder.example/login"}, {"resent": True}])
def test_password_stays(kfp_server: KfpServer, tmp_path: Path, more: dict[str, Any]) -> None:
    with guarding(kfp_server.url, **more) as dex:
        with pytest.raises(InputError, match=r"without https|sends the password on"):
            open_client(connection(dex.url, tmp_path)).__enter__()
        assert len(dex.posted) == ("resent" in more)


def test_a_wrong_password_is_not_shown(kfp_server: KfpServer, tmp_path: Path) -> None:
    with guarding(kfp_server.url) as dex, pytest.raises(KfpDdpError) as caught:
        open_client(connection(dex.url, tmp_path, "hunter2")).__enter__()
    assert str(caught.value) == f"Dex refuses {USER}: the user or the password is wrong"
    assert not kfp_server.requests


def test_an_expired_session_is_renewed_once(kfp_server: KfpServer, tmp_path: Path) -> None:
    with guarding(kfp_server.url) as dex, open_client(connection(dex.url, tmp_path)) as client:
        dex.session = "another"
        client.list_runs()
        assert len(dex.posted) == 2
        (tmp_path / "password").write_text("changed")
        dex.session = "third"
        with pytest.raises(KfpDdpError, match="the user or the password is wrong"):
            client.list_runs()


def test_the_password_is_sent_only_to_a_form(kfp_server: KfpServer, tmp_path: Path) -> None:
    with pytest.raises(KfpDdpError, match="has no form for a user and a password"):
        open_client(connection(kfp_server.url, tmp_path)).__enter__()
    assert all(request.method == "GET" for request in kfp_server.requests)
    kfp_server.violations.clear()  # the front page is not part of the API
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(KfpDdpError, match=r"the login at .* does not answer: ConnectionError"):
        open_client(connection(url, tmp_path)).__enter__()


@pytest.fixture
def account(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a service account, whose tokens the stand-in of Google Cloud Storage gives."""
    url = f"{os.environ['STORAGE_EMULATOR_HOST']}/token"
    monkeypatch.setattr("kfp.client.auth.OAUTH_TOKEN_URI", url)
    monkeypatch.setattr("kfp.client.auth.LOCAL_KFP_CREDENTIAL", str(tmp_path / "none"))
    return tls.google_account(tmp_path, url, monkeypatch)


def test_service_account_of_iap(kfp_server: KfpServer, account: Path, bucket: Bucket) -> None:
    kfp_server.token = "token-2"  # the first one authorises the request for it
    connection = Connection(host=kfp_server.url, iap_client_id="123.apps.googleusercontent.com")
    with open_client(connection) as client:
        assert client.version == "2.17.0"
        kfp_server.token = "another"
        with pytest.raises(KfpDdpError, match="rejects Identity-Aware Proxy"):
            client.list_runs()
    assert bucket.tokens_given == 4  # the second login is refused too

from pathlib import Path

import pytest

from kfp_ddp.client.connection import open_client
from kfp_ddp.core.config import Connection
from kfp_ddp.core.errors import KfpDdpError, RefusedError, ServerError
from tests.kfp_server import faults
from tests.kfp_server.server import KfpServer, serving
from tests.serving import free_port

SECRET = "eyJhbGciOi-the-token"


def asked(connection: Connection) -> str:
    """The one line of what is said of a run that is asked for."""
    with pytest.raises(KfpDdpError) as caught, open_client(connection) as client:
        client.get_run("1acbe56d")
    line = str(caught.value)
    assert "\n" not in line
    assert "Traceback" not in line
    assert SECRET not in line
    return line


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKEN", "COOKIE", "PASSWORD", "HOST"):
        monkeypatch.delenv(f"KFP_DDP_{name}", raising=False)


def test_the_server_tells_its_version_and_whether_it_knows_users(kfp_server: KfpServer) -> None:
    with open_client(Connection(host=f"{kfp_server.url}/", namespace="mine")) as client:
        assert (client.version, client.multi_user) == ("2.17.0", False)
        client.list_runs()
    assert kfp_server.asked("list_runs")[0].query.get("namespace", "") == ""


def test_a_server_with_users_is_asked_for_their_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(multi_user=True) as server:
        with open_client(Connection(host=server.url, namespace="kubeflow-user")) as client:
            client.list_runs()
        assert server.asked("list_runs")[0].query["namespace"] == "kubeflow-user"
        with open_client(Connection(host=server.url, namespace="theirs")) as client:
            with pytest.raises(
                RefusedError, match="check that --namespace is one of yours"
            ) as caught:
                client.list_runs()
            assert caught.value.status == 403
        monkeypatch.setattr("kfp_ddp.client.connection.own_namespace", lambda context: "")
        assert asked(Connection(host=server.url)).endswith(
            "has several users: give --namespace, the one of your profile"
        )
        assert not server.violations


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (faults.gone, "the answer was cut off"),
        (faults.cut, "the answer was cut off"),
        (faults.half, "the answer was cut off"),
        (faults.silence, "timeout after 0.2 s"),
        (faults.stack_trace, r"failed \(500\): Internal Server Error; try again later"),
        (faults.proxy_error(502), r"failed \(502\): 502 upstream connect error"),
        (faults.status(429, "slow down"), r"failed \(429\): slow down"),
    ],
)
def test_a_server_that_fails_may_be_asked_again(
    kfp_server: KfpServer, fault: faults.Fault, told: str
) -> None:
    kfp_server.fail("get_run", fault)
    with open_client(Connection(host=kfp_server.url, timeout=0.2)) as client:
        with pytest.raises(ServerError, match=told) as caught:
            client.get_run("1acbe56d")
        assert caught.value.exit_code == 1
        kfp_server.heal()
        with pytest.raises(RefusedError, match=r"KFP refuses this \(404\): Run 1acbe56d not found"):
            client.get_run("1acbe56d")


@pytest.mark.parametrize("fault", [faults.login_page, faults.page])
def test_a_login_page_is_no_answer(kfp_server: KfpServer, fault: faults.Fault) -> None:
    kfp_server.fail("*", fault)
    assert "set a token, a cookie or a Dex user" in asked(Connection(host=kfp_server.url))


@pytest.mark.parametrize("text", ["null", "[]", "1", '"ok"'])
def test_json_of_something_else_is_no_answer(kfp_server: KfpServer, text: str) -> None:
    kfp_server.fail("*", faults.other_json(text))
    assert "answers with JSON that KFP does not write" in asked(Connection(host=kfp_server.url))


def test_json_without_an_end_to_its_brackets_is_no_answer(kfp_server: KfpServer) -> None:
    kfp_server.fail("*", faults.other_json("[" * 100_000))
    assert "the answer was cut off" in asked(Connection(host=kfp_server.url))


def test_nothing_that_creates_is_sent_twice(kfp_server: KfpServer) -> None:
    with open_client(Connection(host=kfp_server.url)) as client:
        kfp_server.fail("create_experiment", faults.gone)
        with pytest.raises(ServerError, match="was cut off"):
            client.create_experiment("nightly")
    assert len(kfp_server.asked("create_experiment")) == 1


def test_what_kfp_prints_does_not_reach_stdout(
    kfp_server: KfpServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_client(Connection(host=kfp_server.url)) as client:
        client.create_experiment("nightly")
    assert capsys.readouterr().out == ""


def test_an_address_of_this_machine_needs_no_scheme(kfp_server: KfpServer) -> None:
    with open_client(Connection(host=kfp_server.url.removeprefix("http://"))) as client:
        assert client.version == "2.17.0"


def test_nobody_listens() -> None:
    host = f"http://127.0.0.1:{free_port()}"
    assert f"{host} does not answer: Connection refused" in asked(Connection(host=host))


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("http://", "host='http://' is not a URL"),
        ("ftp://kfp", "host='ftp://kfp' is not a URL"),
        ("http://kfp:port", "host='http://kfp:port' is not a URL"),
        ("http://[::1", "host='http://[::1' is not a URL"),
        (f"https://me:{SECRET}@kfp", "host contains a user or password"),
    ],
)
def test_a_host_that_is_none(host: str, told: str) -> None:
    assert told in asked(Connection(host=host))


def test_a_server_without_a_certificate(kfp_server: KfpServer, tmp_path: Path) -> None:
    https = kfp_server.url.replace("http:", "https:")
    assert f"{https} does not answer" in asked(Connection(host=https, timeout=0.2))
    missing = tmp_path / "ca.pem"
    assert "ca.pem" in asked(Connection(host=https, ca_file=str(missing)))


def test_a_token_of_a_file_is_read_anew_for_each_request(
    kfp_server: KfpServer, tmp_path: Path
) -> None:
    kfp_server.token, file = SECRET, tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    with open_client(Connection(host=kfp_server.url, token_file=str(file))) as client:
        kfp_server.token = "the-next"
        file.write_text("the-next")
        assert client.list_runs().runs is None
    assert {each.headers["authorization"] for each in kfp_server.requests} == {
        f"Bearer {SECRET}",
        "Bearer the-next",
    }


def test_the_line_names_the_login_that_was_refused(
    kfp_server: KfpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kfp_server.token = "another"
    assert "requires a login (401" in asked(Connection(host=kfp_server.url))
    (tmp_path / "token").write_text(SECRET)
    file = str(tmp_path / "token")
    line = asked(Connection(host=kfp_server.url, token_file=file))
    assert f"rejects the token in {file} (401" in line
    monkeypatch.setenv("KFP_DDP_TOKEN", SECRET)
    assert "rejects the token of KFP_DDP_TOKEN (401" in asked(Connection(host=kfp_server.url))


def test_the_token_of_the_pod_is_used_where_there_is_one(
    kfp_server: KfpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(SECRET)
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "token"))
    kfp_server.token = SECRET
    with open_client(Connection(host=kfp_server.url)) as client:
        assert client.version == "2.17.0"


def test_a_token_file_that_cannot_be_used(kfp_server: KfpServer, tmp_path: Path) -> None:
    file = tmp_path / "token"
    connection = Connection(host=kfp_server.url, token_file=str(file))
    assert asked(connection) == f"cannot read {file}: No such file or directory"
    file.write_text("\n")
    assert "is empty" in asked(connection)
    file.write_bytes(b"\xff\xfe")
    assert asked(connection) == f"cannot read {file}: it is not text"
    assert not kfp_server.requests


@pytest.mark.parametrize("secret", [f"{SECRET}\nsecond", f"“{SECRET}”", f"{SECRET}\r\nX: 1"])
def test_a_login_that_fits_into_no_header_is_not_shown(
    kfp_server: KfpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    file = tmp_path / "token"
    file.write_text(secret)
    line = asked(Connection(host=kfp_server.url, token_file=str(file)))
    assert line.startswith(f"the token in {file} contains line breaks or non-ASCII")
    monkeypatch.setenv("KFP_DDP_COOKIE", secret)
    assert asked(Connection(host=kfp_server.url)).startswith(
        "the cookie of KFP_DDP_COOKIE contains"
    )
    monkeypatch.setenv("KFP_DDP_TOKEN", secret)
    assert asked(Connection(host=kfp_server.url)).startswith("the token of KFP_DDP_TOKEN contains")
    assert not kfp_server.requests


def test_the_cookie_of_a_session(kfp_server: KfpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    kfp_server.cookie = "authservice_session=MTY1"
    assert "answers with a redirect to a login" in asked(Connection(host=kfp_server.url))
    monkeypatch.setenv("KFP_DDP_COOKIE", "authservice_session=expired")
    line = asked(Connection(host=kfp_server.url))
    assert "the cookie of KFP_DDP_COOKIE is not accepted" in line
    assert "expired" not in line
    monkeypatch.setenv("KFP_DDP_COOKIE", kfp_server.cookie)
    with open_client(Connection(host=kfp_server.url)) as client:
        assert client.version == "2.17.0"


def test_a_user_of_dex_needs_a_password(kfp_server: KfpServer) -> None:
    line = asked(Connection(host=kfp_server.url, username="me@example.com"))
    assert line.startswith("there is no password for me@example.com: set KFP_DDP_PASSWORD")


def test_kfp_of_the_home_folder_is_left_alone(
    kfp_server: KfpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with open_client(Connection(host=kfp_server.url)) as client:
        client.set_user_namespace("mine")
    assert not list(tmp_path.iterdir())


def test_without_an_address_or_a_kubeconfig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", "/nowhere")
    assert asked(Connection()).startswith("no address of KFP is set and no port can be forwarded")


def test_of_several_logins_the_token_is_used(
    kfp_server: KfpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KFP_DDP_COOKIE", "session=1")
    monkeypatch.setenv("KFP_DDP_TOKEN", SECRET)
    with open_client(Connection(host=kfp_server.url, username="me@example.com")):
        pass
    (asked,) = kfp_server.requests
    assert asked.headers["authorization"] == f"Bearer {SECRET}"
    assert "cookie" not in asked.headers

"""Logins at Dex and at Identity-Aware Proxy."""

import os
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.client.connection import open_client
from kfp_ddp.core.config import Connection
from kfp_ddp.core.errors import InputError, KfpDdpError
from tests import tls
from tests.gcs_server import Bucket
from tests.kfp_server.dex import guarding
from tests.kfp_server.server import KfpServer
from tests.serving import free_port

USER = "user@example.com"


def connection(url: str, folder: Path, password: str = "correct horse") -> Connection:
    (folder / "password").write_text(f"{password}\n")
    return Connection(
        host=f"{url}/pipeline", username=USER, password_file=str(folder / "password"), timeout=5
    )


@pytest.mark.parametrize("more", [{}, {"several": True}, {"approval": True}])
def test_login_by_the_form(kfp_server: KfpServer, tmp_path: Path, more: dict[str, bool]) -> None:
    with guarding(kfp_server.url, **more) as dex:
        with open_client(connection(dex.url, tmp_path)) as client:
            assert client.list_experiments().experiments[0].display_name == "Default"
        assert dex.posted[0] == {"login": [USER], "password": ["correct horse"]}
        assert {*dex.cookies} == {f"oauth2_proxy_kubeflow={dex.session}"}


@pytest.mark.parametrize("more", [{"action": "http://intruder.example/login"}, {"resent": True}])
def test_the_password_is_not_sent_to_another_address(
    kfp_server: KfpServer, tmp_path: Path, more: dict[str, Any]
) -> None:
    with guarding(kfp_server.url, **more) as dex:
        with pytest.raises(InputError, match=r"without https|sends the password on"):
            open_client(connection(dex.url, tmp_path)).__enter__()
        assert len(dex.posted) == ("resent" in more)


def test_a_wrong_password_is_not_shown(kfp_server: KfpServer, tmp_path: Path) -> None:
    with guarding(kfp_server.url) as dex, pytest.raises(KfpDdpError) as caught:
        open_client(connection(dex.url, tmp_path, "hunter2")).__enter__()
    assert str(caught.value) == f"Dex refuses {USER}: the user or the password is wrong"
    assert not kfp_server.requests


def test_an_expired_session_is_an_error(kfp_server: KfpServer, tmp_path: Path) -> None:
    with guarding(kfp_server.url) as dex, open_client(connection(dex.url, tmp_path)) as client:
        dex.session = "another"
        with pytest.raises(KfpDdpError, match=f"Dex, as {USER} is not accepted"):
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


def test_a_service_account_gets_a_proxy_token(
    kfp_server: KfpServer, account: Path, bucket: Bucket
) -> None:
    kfp_server.token = "token-2"  # the first one authorises the request for it
    connection = Connection(host=kfp_server.url, iap_client_id="123.apps.googleusercontent.com")
    with open_client(connection) as client:
        assert client.version == "2.17.0"
        kfp_server.token = "another"
        with pytest.raises(KfpDdpError, match="rejects Identity-Aware Proxy"):
            client.list_runs()
    assert bucket.tokens_given == 2


def test_no_account_is_one_line(kfp_server: KfpServer, account: Path) -> None:
    account.unlink()
    connection = Connection(host=kfp_server.url, iap_client_id="123.apps.googleusercontent.com")
    with pytest.raises(KfpDdpError, match="no token for Identity-Aware Proxy") as caught:
        open_client(connection).__enter__()
    assert "\n" not in str(caught.value)

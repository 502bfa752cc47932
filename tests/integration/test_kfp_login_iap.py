import json
from collections.abc import Iterator
from http.server import HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from kfp_ddp.client.connection import open_client
from kfp_ddp.core.config import Connection
from kfp_ddp.core.errors import KfpDdpError
from tests.kfp_server.server import KfpServer
from tests.serving import Handler, serving

TOKEN = "an-id-token-of-google"


class Google(Handler):
    """The token endpoint of Google."""

    grants: ClassVar[list[bytes]] = []

    def do_POST(self) -> None:
        self.grants.append(self.rfile.read(int(self.headers["Content-Length"])))
        answer = {"access_token": "a", "id_token": TOKEN, "expires_in": 3600, "token_type": "b"}
        self.answer(200, json.dumps(answer).encode(), Content_Type="application/json")


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """The grants that were requested with the key of a service account."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    Google.grants.clear()
    with serving(HTTPServer(("127.0.0.1", 0), Google)) as url:
        account = {
            "type": "service_account",
            "client_email": "ci@project.iam.gserviceaccount.com",
            "private_key": key.decode(),
            "private_key_id": "1",
            "token_uri": url,
        }
        (tmp_path / "key.json").write_text(json.dumps(account))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
        monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "project")
        monkeypatch.setattr("kfp.client.auth.OAUTH_TOKEN_URI", url)
        monkeypatch.setattr("kfp.client.auth.LOCAL_KFP_CREDENTIAL", str(tmp_path / "none"))
        yield Google.grants


def test_a_service_account_gets_a_proxy_token(kfp_server: KfpServer, google: list[bytes]) -> None:
    kfp_server.token = TOKEN
    connection = Connection(host=kfp_server.url, iap_client_id="123.apps.googleusercontent.com")
    with open_client(connection) as client:
        assert client.version == "2.17.0"
        kfp_server.token = "another"
        with pytest.raises(KfpDdpError, match="rejects Identity-Aware Proxy"):
            client.list_runs()
    assert google


def test_no_account_is_one_line(kfp_server: KfpServer, google: list[bytes], tmp_path: Path) -> None:
    (tmp_path / "key.json").unlink()
    connection = Connection(host=kfp_server.url, iap_client_id="123.apps.googleusercontent.com")
    with pytest.raises(KfpDdpError, match="no token for Identity-Aware Proxy") as caught:
        open_client(connection).__enter__()
    assert "\n" not in str(caught.value)

import os
from pathlib import Path

import pytest

from kfp_ddp.client.connection import open_client
from kfp_ddp.core.config import Connection
from kfp_ddp.core.errors import KfpDdpError
from tests import tls
from tests.gcs_server import Bucket
from tests.kfp_server.server import KfpServer


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

"""Requests for objects of S3: botocore's own signer is what they are compared with."""

import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_ddp.storage import event_loop
from kfp_ddp.storage.http import client
from kfp_ddp.storage.http.origin import Request
from kfp_ddp.storage.s3_objects import S3Objects, s3_client
from kfp_ddp.storage.source import Entry

TAG = "900150983cd24fb0d6963f7d28e17f72"
KEY = Credentials("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "a/token+of=STS")


@pytest.fixture(autouse=True)
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An account in the environment; its configuration file is returned."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEY.secret_key)
    monkeypatch.setenv("AWS_SESSION_TOKEN", KEY.token)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    return tmp_path / "config"


def objects(**settings: Any) -> S3Objects:
    client = s3_client("s3://bucket/ds", **settings)
    return S3Objects(client, "s3://bucket/ds", "bucket", "ds/")


def lines(request: Request) -> dict[str, str]:
    """Return the headers of a request by name."""
    rows = request.encoded().decode().split("\r\n")[1:-2]
    return {name.lower(): value for name, _, value in (row.partition(": ") for row in rows)}


def signature(url: str, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the header Authorization that botocore gives the same request at its time."""
    import datetime

    now = datetime.datetime.strptime(headers["x-amz-date"], "%Y%m%dT%H%M%SZ")
    names = headers["authorization"].partition("SignedHeaders=")[2].partition(",")[0].split(";")
    request = AWSRequest("GET", url, {name: headers[name] for name in names if name != "host"})
    with monkeypatch.context() as patch:
        patch.setattr("botocore.auth.get_current_datetime", lambda: now)
        S3SigV4Auth(KEY, "s3", "eu-central-1").add_auth(request)
    return str(request.headers["Authorization"])


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40)


@pytest.mark.parametrize("endpoint", ["", "http://127.0.0.1:9000", "https://store.example:8443/s3"])
def test_each_name_is_signed_as_by_botocore(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    made = objects()
    event_loop.run(made.authorise())

    @settings(max_examples=50, derandomize=True, deadline=None)
    @given(NAMES)
    def check(name: str) -> None:
        entry = Entry(name, 0, TAG, 3)
        sent, theirs = made.request(entry, 0), made._prepare(entry)
        assert sent.target == theirs.request(entry).target
        assert unquote(sent.target).endswith(f"/ds/{name}")
        address = f"http{'s' * sent.origin.secure}://{sent.origin.authority.decode()}"
        headers = lines(sent)
        assert headers["if-match"] == f'"{TAG}"'
        assert headers["x-amz-security-token"] == KEY.token
        expected = signature(address + sent.target, headers, monkeypatch)
        assert headers["authorization"] == expected

    check()


def test_botocore_prepares_all_requests_that_are_signed_otherwise() -> None:
    made = objects(signature_version="s3")
    event_loop.run(made.authorise())
    entry = Entry("a b", 0, TAG, 3)
    sent = made.request(entry, 0)
    assert lines(sent)["authorization"].startswith(f"AWS {KEY.access_key}:")
    assert unquote(urlsplit(sent.target).path).endswith("/ds/a b")


def test_credentials_that_change_are_used_at_the_next_renewal(
    account: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a role, which botocore renews before they expire."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    process = tmp_path / "process.py"
    process.write_text(
        "import datetime, json\n"
        "now = datetime.datetime.now(datetime.UTC)\n"
        "end = (now + datetime.timedelta(seconds=60)).isoformat()\n"
        "key = {'AccessKeyId': now.strftime('KEY%f'), 'SecretAccessKey': 's'}\n"
        "print(json.dumps({'Version': 1, 'SessionToken': 't', 'Expiration': end, **key}))\n"
    )
    account.write_text(f"[default]\ncredential_process = {sys.executable} {process}\n")
    monkeypatch.setattr(client, "TRUSTED_SECONDS", 0.0)
    source, seen = objects(), set()
    for _ in range(3):
        event_loop.run(source.authorise())
        sent = lines(source.request(Entry("a", 0, TAG, 3), 0))
        seen.add(sent["authorization"].partition("Credential=")[2].partition("/")[0])
    assert len(seen) > 1

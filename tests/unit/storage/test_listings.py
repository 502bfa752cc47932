"""Listings of sources."""

import base64
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_ddp.core.errors import InputError
from kfp_ddp.storage import event_loop
from kfp_ddp.storage.gcs import GcsSource
from kfp_ddp.storage.http import client
from kfp_ddp.storage.http.origin import Request
from kfp_ddp.storage.listing import Listing
from kfp_ddp.storage.s3_objects import S3Objects, s3_client
from kfp_ddp.storage.source import Entry, Pages, SourceOptions, Transient
from kfp_ddp.storage.web import MAX_LINE, ManifestRows
from tests.sync_runs import mangled

MANGLED = 10_000
DEEP = "[" * 100_000
WEIRD: list[Any] = [
    *(None, True, -1, 0, 7, 2**32, 2**64, 1e400, float("nan"), 0.5, "", "x", "-1", "9" * 5000),
    *([], {}, [[]], {"a": 1}, "\ud800", "é\n", "0x10", "1_0", " 1", "../x", "a\0b", "AAAA", "٥"),
]
TAG = "900150983cd24fb0d6963f7d28e17f72"
KEY = Credentials("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "a/token+of=STS")


def weird(choose: random.Random, document: Any) -> Any:
    """The same with something else in one place."""
    if isinstance(document, list | dict) and document and choose.random() < 0.8:
        made = document.copy()
        key = choose.choice(list(made) if isinstance(made, dict) else range(len(made)))
        if choose.random() < 0.1:
            del made[key]
        else:
            made[key] = weird(choose, made[key])
        return made
    return choose.choice(WEIRD)


def judge(read: Callable[[], list[tuple[str, int, int]]], outcomes: list[str]) -> None:
    """Read, and hold that it gives good rows, or one line."""
    try:
        rows = read()
    except (InputError, Transient) as error:
        outcomes.append(str(error))
    else:
        outcomes.append("")
        for name, size, crc in rows:
            assert isinstance(name, str)
            assert 0 <= size < 2**63
            assert 0 <= crc < 2**32


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> GcsSource:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:9")
    return GcsSource("gs://bucket/ds", SourceOptions(timeout=1))


def page(choose: random.Random) -> dict[str, Any]:
    crc = base64.b64encode(choose.randbytes(4)).decode()
    items = [
        {"name": f"ds/{n}", "size": str(n), "generation": str(10**15 + n), "crc32c": crc}
        for n in range(choose.randint(1, 3))
    ]
    return {"items": items, "nextPageToken": "abc"}


def test_mangled_pages_are_rows_or_one_line(source: GcsSource) -> None:
    choose, outcomes = random.Random(4), list[str]()
    for _ in range(MANGLED):
        text = json.dumps(weird(choose, page(choose))).encode()
        body = bytearray(mangled(choose, text) if choose.random() < 0.5 else text)
        judge(lambda body=body: [r[:3] for r in source._parse(body, Pages("", "ds/"))[0]], outcomes)  # type: ignore[misc]
    assert not [line for line in outcomes if "\n" in line]
    assert MANGLED // 8 < outcomes.count("") < MANGLED * 3 // 4


def read(choose: random.Random, text: bytes) -> Listing:
    """What is made of a manifest that arrives in pieces."""
    rows = ManifestRows("https://host/m.jsonl")
    while text:
        size = choose.choice([1, 10, len(text)])
        rows.take(text[:size])
        text = text[size:]
    return rows.end()


def rows_of(listing: Listing) -> list[tuple[str, int, int]]:
    return list(zip(listing.names, listing.sizes, listing.crcs, strict=True))


def manifest(choose: random.Random) -> list[Any]:
    count = choose.randint(1, 3)
    header = {"format": 1, "source": "gs://b", "digest": "ab", "files": count, "pack": "none"}
    crc = f"{choose.randrange(2**32):08x}"
    return [header, *([f"a/{n}", n, crc, crc, 17 + n] for n in range(count))]


def test_whole_manifests_are_read_however_they_arrive() -> None:
    choose = random.Random(5)
    for _ in range(1000):
        lines = manifest(choose)
        end = choose.choice(["", "\n"])
        listing = read(choose, ("\n".join(map(json.dumps, lines)) + end).encode())
        assert rows_of(listing) == [(row[0], row[1], int(row[3], 16)) for row in lines[1:]]


def test_mangled_manifests_are_rows_or_one_line() -> None:
    choose, outcomes = random.Random(6), list[str]()
    for _ in range(MANGLED):
        lines = manifest(choose)
        at = choose.randrange(len(lines))
        lines[at] = weird(choose, lines[at])
        text = "\n".join(map(json.dumps, lines)).encode()
        text = mangled(choose, text) if choose.random() < 0.5 else text
        judge(lambda text=text: rows_of(read(choose, text)), outcomes)  # type: ignore[misc]
    assert not [line for line in outcomes if "\n" in line]
    assert MANGLED // 8 < outcomes.count("") < MANGLED * 3 // 4


@pytest.mark.parametrize(
    ("line", "why"),
    [
        *(('[7, 1, "x", "00000000"]', "is no"), ('["\\ud800", 1, "x", "00000000"]', "is no")),
        *(('["a", true, "x", "00000000"]', "is no"), ('["a", -1, "x", "00000000"]', "is no")),
        *((f'["a", {2**64}, "x", "00000000"]', "is no"), ('["a", 1, "x", "-0000001"]', "is no")),
        *(('["a", 1, "x", 7]', "is no"), ('{"a": 1}', "is no"), ("", "is not JSON")),
        *((DEEP[: MAX_LINE - 1], "is not JSON"), ("[" + "9" * 5000 + "]", "is not JSON")),
        ("x" * (MAX_LINE + 1), "is too long"),
    ],
)
def test_lines_that_are_of_no_manifest(line: str, why: str) -> None:
    rows = ManifestRows("https://host/m.jsonl")
    rows.take(b'{"format": 1}\n["a", 1, 0, "00000000"]\n')
    with pytest.raises(InputError, match=rf"^https://host/m.jsonl is [^\n]*: line 3 {why}[^\n]*$"):
        rows.take(f"{line}\n".encode())


def test_line_without_end_is_given_up() -> None:
    rows = ManifestRows("https://host/m.jsonl")
    rows.take(b"x" * MAX_LINE)
    with pytest.raises(InputError, match="line 0 has no end"):
        rows.take(b"x")


def test_manifest_that_was_cut_is_asked_for_again() -> None:
    rows = ManifestRows("https://host/m.jsonl")
    rows.take(b'{"format": 1, "files": 2}\n["a", 1, 0, "00000000"]\n')
    with pytest.raises(Transient, match="1 lines of 2 files"):
        rows.end()


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
    return S3Objects(s3_client("s3://bucket/ds", **settings), "s3://bucket/ds", 1)


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


def test_credentials_rotate(account: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

"""Listings of stores that lie, are cut or do not end, and answers of other content."""

import itertools
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from huggingface_hub import close_session

from kfp_ddp.core.errors import InputError, KfpDdpError
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.storage import event_loop
from kfp_ddp.storage.kinds import open_source, open_store
from kfp_ddp.storage.source import Changed, Entry, Retry
from tests.serving import Handler, serving, serving_by
from tests.store_servers import COMMIT, TAG, Reply, Server, as_java, aws, listed, use
from tests.sync_runs import content, sync

# google-cloud-storage closes no response with an error status.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SOURCES = {scheme: f"{scheme}://bucket/x" for scheme in ("gs", "s3", "az")}
SOURCES["hf"] = "hf://datasets/owner/pets/x"
UNICODE = ["ä", "e\u0301", "日本", "\U0001f436", "\u00a0", "\u2028"]
ODD = ["Golden Retriever/a b.jpg", "a+b", "a%20b", "a%2Bb", "%"]


def nested(scheme: str, body: bytes) -> bytes:
    """Return a page with an element or a list that is nested 100,000 times."""
    if scheme in ("gs", "hf"):
        return b'{"items": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    end = body.rindex(b"</")
    return body[:end] + b"<A>" * 100_000 + b"</A>" * 100_000 + body[end:]


SIZES = {
    "gs": b'"size": "3", ',
    "hf": b'"size": 3, ',
    "s3": b"<Size>3</Size>",
    "az": b"<Content-Length>3</Content-Length>",
}
LIES: dict[str, Callable[[str, int], tuple[str, bytes]]] = {
    "one token": lambda scheme, n: ("t", listed(scheme, [f"x/{n}"], "t")),
    "two tokens": lambda scheme, n: ("ab"[n % 2], listed(scheme, [f"x/{n}"], "ab"[n % 2])),
    "empty pages": lambda scheme, n: ("t", listed(scheme, [], "t")),
    "prefix": lambda scheme, n: ("", listed(scheme, ["x/a", "else/where/b"])),
    "nested": lambda scheme, n: ("", nested(scheme, listed(scheme, ["x/a"]))),
    "no size": lambda scheme, n: ("", listed(scheme, ["x/a"]).replace(SIZES[scheme], b"")),
    "no tag": lambda scheme, n: ("", listed(scheme, ["x/a"]).replace(TAG.encode(), b"")),
    "page": lambda scheme, n: ("", b"<html><body>Sign in</body></html>"),
    "no token": lambda scheme, n: ("", listed(scheme, ["x/a"]).replace(b"false", b"true")),
    "V1": lambda scheme, n: (
        "",
        listed(scheme, ["x/a"], "x/a").replace(b"NextContinuationToken", b"NextMarker"),
    ),
}
ALL = ["one token", "two tokens", "empty pages", "prefix", "nested", "no size"]


@pytest.mark.parametrize(
    ("scheme", "lie"),
    [
        *(row for row in itertools.product(SOURCES, ALL) if row != ("az", "nested")),  # ignored
        *(("s3", "no tag"), ("az", "no tag"), ("s3", "no token"), ("s3", "V1"), ("s3", "page")),
    ],
)
def test_lying_listing_is_refused(scheme: str, lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfp_ddp.storage.gcs.Retry", lambda: Retry(2, pause=0.01))
    pages, address = itertools.count(), list[str]()

    def reply(_: str, path: str) -> Reply:
        if "/revision/" in path or path.endswith("?expand=sha"):
            return 200, b'{"id": "owner/pets", "sha": "%s"}' % COMMIT.encode(), {}
        number = next(pages)
        assert number < 50
        token, body = LIES[lie](scheme, number)
        kind = "json" if scheme in ("gs", "hf") else "xml"
        link = {"Link": f'<{address[0]}/x?cursor={token}>; rel="next"'} if token else {}
        return 200, body, {"Content_Type": f"application/{kind}"} | link

    with serving(Server(reply)) as url:
        address.append(url)
        use(url, monkeypatch)
        asks: list[Callable[[], object]] = [open_source(SOURCES[scheme]).listing]
        if scheme != "hf" and lie != "no tag":
            asks.append(lambda: list(open_store(SOURCES[scheme]).list("")))
        for ask in asks:
            with pytest.raises(KfpDdpError) as caught:
                ask()
            assert not caught.value.retryable
            assert "\n" not in str(caught.value)
    close_session()


@pytest.mark.parametrize("encode", [as_java, None])
def test_names_of_s3_are_those_of_botocore(
    encode: Callable[[str], str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3

    first = 1 if encode else 32  # XML cannot have the others
    names = [f"x/{chr(code)}/{code}" for code in range(first, 128)]
    names += [f"x/{name}" for name in UNICODE + ODD]
    with serving(aws(names, encode)) as url:
        use(url, monkeypatch)
        client = boto3.client("s3")
        theirs = [item["Key"] for item in client.list_objects_v2(Bucket="bucket")["Contents"]]
        client.close()
        assert theirs == names
        assert [f"x/{name}" for name in open_source("s3://bucket/x").listing().names] == names
        assert [f"x/{name}" for name, _ in open_store("s3://bucket/x").list("")] == names
        options = SyncOptions(include=tuple(f"**/{name}" for name in ODD))
        assert content(sync("s3://bucket/x", tmp_path, options).path) == dict.fromkeys(ODD, b"abc")


GOOD = {"ETag": f'"{TAG}"'}
PART = {"Content_Range": "bytes 0-2/3"}


@pytest.mark.parametrize(
    ("scheme", "status", "headers", "accepted"),
    [
        *(("s3", 200, GOOD, True), ("s3", 200, {"ETag": f'"{COMMIT}"'}, False)),
        *(("s3", 200, {}, False), ("s3", 206, GOOD, False), ("az", 206, GOOD | PART, True)),
        *(("az", 206, {"ETag": "other"} | PART, False), ("az", 206, PART, False)),
        *(("az", 206, GOOD | {"Content_Range": "bytes 0-2/4"}, False), ("gs", 200, {}, True)),
        ("gs", 200, {"x_goog_generation": "7"}, True),
        *(("gs", 200, {"x_goog_generation": "8"}, False), ("gs", 206, PART, True)),
        ("gs", 206, {"Content_Range": "bytes 3-5/6"}, False),
    ],
)
def test_an_answer_is_of_the_content_that_was_listed(
    scheme: str,
    status: int,
    headers: dict[str, str],
    accepted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry, body = Entry("a", 7, "" if scheme == "gs" else TAG, 3), b""
    with serving(Server(lambda *_: (status, b"abc", headers))) as url:
        use(url, monkeypatch)
        reader = open_source(SOURCES[scheme]).reader(None)
        try:
            body = event_loop.run(reader.read(entry))
        except Changed:
            assert not accepted
        finally:
            reader.close()
    assert bool(body) == accepted


@pytest.mark.parametrize("sha", ["../../x", "A" * 40, "a" * 41, 7, None])
def test_a_commit_of_the_hub_is_a_digest(sha: object, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    about = json.dumps({"id": "owner/pets", "sha": sha}).encode()
    with serving(Server(lambda *_: (200, about, {"Content_Type": "application/json"}))) as url:
        use(url, monkeypatch)
        with pytest.raises(KfpDdpError, match="invalid"):
            open_source(SOURCES["hf"]).listing()
    close_session()


class Paying(Handler):
    """Buckets of which each request says who pays, and signs that for S3."""

    protocol_version = "HTTP/1.1"
    timeout = 10

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        signed = self.headers.get("Authorization", "")
        refusal: tuple[int, object]
        if "/storage/v1/" in url.path:
            is_paid = query.get("userProject") == ["payer"]
            refusal = 400, {"error": {"message": "requester pays, but no user project provided."}}
            is_object = "alt" in query
        else:
            is_paid = self.headers.get("x-amz-request-payer") == "requester"
            is_paid = is_paid and "x-amz-request-payer" in signed
            refusal = 403, b"<Error><Code>AccessDenied</Code><Message>Denied</Message></Error>"
            is_object = "list-type" not in query
        scheme = "gs" if "/storage/v1/" in url.path else "s3"
        if not is_paid:
            self.answer(*refusal)
        elif is_object:
            self.answer(200, b"abc", ETag=f'"{TAG}"')
        else:
            self.answer(200, listed(scheme, ["x/a", "x/b"]))


@pytest.mark.parametrize(("scheme", "payer"), [("gs", "payer"), ("s3", "requester")])
def test_requester_pays_for_a_listing_and_its_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, payer: str
) -> None:
    with serving_by(Paying) as url:
        use(url, monkeypatch)
        with pytest.raises(InputError, match="requester_pays"):
            sync(SOURCES[scheme], tmp_path, SyncOptions())
        options = SyncOptions(requester_pays=payer)
        result = sync(SOURCES[scheme], tmp_path, options)
        assert content(result.path) == {"a": b"abc", "b": b"abc"}

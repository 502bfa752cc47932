"""What each kind of store raises: a fault of the network may be retried, a wrong name may not."""

import contextlib
import errno
import gc
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from azure.core.exceptions import ClientAuthenticationError
from huggingface_hub import close_session

from kfp_ddp.core.errors import InputError, KfpDdpError, UnavailableError
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.storage import azure, huggingface, s3_objects, store
from kfp_ddp.storage.kinds import open_source, open_store
from kfp_ddp.storage.source import Retry, SourceOptions
from tests.serving import Handler, free_port, serving, serving_by
from tests.store_servers import TAG, Reply, Server, listed, page, use
from tests.sync_runs import content, sync

# google-cloud-storage closes no response with an error status.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CODES = {
    "s3": {403: "AccessDenied", 404: "NoSuchBucket", 503: "SlowDown"},
    "az": {403: "AuthorizationFailure", 404: "ContainerNotFound", 503: "ServerBusy"},
    "hf": {403: "GatedRepo", 404: "RepoNotFound"},
}
"""The error codes of each protocol, by status."""
ERROR = "<Error><Code>{}</Code><Message>m</Message></Error>"
SOURCES = {scheme: f"{scheme}://bucket/x" for scheme in ("gs", "s3", "az")}
SOURCES |= {"hf": "hf://datasets/owner/pets", "http": "{url}/_MANIFEST.jsonl"}


@pytest.fixture(params=[0, 403, 404, 408, 429, 503])
def fault(request: pytest.FixtureRequest) -> int:
    """A status, or 0 for a port where no server listens."""
    return int(request.param)


@pytest.fixture
def address(scheme: str, fault: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server with the fault, to which the settings of the store point."""
    monkeypatch.setattr(store, "PATIENCE", 0.2)
    monkeypatch.setattr(store, "TRIES", 1)
    monkeypatch.setattr("kfp_ddp.storage.gcs.Retry", lambda: Retry(1))
    monkeypatch.setattr("kfp_ddp.storage.web.Retry", lambda: Retry(1))
    code = CODES.get(scheme, {}).get(fault, "")
    body = ERROR.format(code).encode() if scheme == "s3" else b""
    name = "x_ms_error_code" if scheme == "az" else "X_Error_Code"
    with serving(Server(lambda *_: (fault, body, {name: code} if code else {}))) as url:
        url = url if fault else f"http://127.0.0.1:{free_port()}"
        use(url, monkeypatch)
        yield url
    close_session()
    gc.collect()


def check(ask: Callable[[], object], fault: int) -> None:
    with pytest.raises(KfpDdpError) as caught:
        ask()
    assert "\n" not in str(caught.value)
    if fault in (403, 404):
        assert isinstance(caught.value, InputError)
        assert not caught.value.retryable
    else:
        assert isinstance(caught.value, UnavailableError), caught.value
        assert caught.value.retryable


@pytest.mark.parametrize("scheme", ["gs", "s3", "az"])
def test_store_faults_are_retried(scheme: str, fault: int, address: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"content")
    where = open_store(f"{scheme}://bucket/x")
    check(where.prepare, fault)
    check(lambda: where.put(file, "name"), fault)
    check(lambda: where.update("name", lambda _: b"new"), fault)
    check(lambda: list(where.list("")), fault)
    check(lambda: where.read("name", 9), fault)
    check(lambda: where.has_files(), fault)
    if fault != 404:
        check(lambda: where.exists("name"), fault)
        check(lambda: where.delete("name"), fault)


@pytest.mark.parametrize("scheme", ["gs", "s3", "az", "hf", "http"])
def test_faults_of_a_source_may_be_retried_or_not(scheme: str, fault: int, address: str) -> None:
    source = open_source(SOURCES[scheme].format(url=address), SourceOptions(timeout=2))
    check(source.listing, fault)


PAGE = 1 << 20


class Endless(Handler):
    """Sends more than any page has, as far as it is read."""

    sent: ClassVar[int]
    status: ClassVar[int]

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        with contextlib.suppress(OSError):
            while Endless.sent < 64 * PAGE:
                Endless.sent += self.wfile.write(b" " * (1 << 16))


@pytest.mark.parametrize("status", [200, 403])
@pytest.mark.parametrize("scheme", ["s3", "az", "hf"])
def test_an_endless_page_is_cut(monkeypatch: pytest.MonkeyPatch, scheme: str, status: int) -> None:
    for module in (s3_objects, azure, huggingface):
        monkeypatch.setattr(module, "MAX_PAGE", PAGE)
    Endless.sent, Endless.status = 0, status
    with serving_by(Endless) as url:
        use(url, monkeypatch)
        asks: list[Callable[[], object]] = [open_source(SOURCES[scheme]).listing]
        if scheme != "hf":
            asks.append(lambda: list(open_store(f"{scheme}://bucket/models").list("x")))
        for ask in asks:
            with pytest.raises(InputError, match=r"^.* sends more than 1,048,576 bytes in one"):
                ask()
        if scheme != "hf" and status == 403:
            with pytest.raises(InputError):
                open_store(f"{scheme}://bucket/models").read("x", 5)
    assert Endless.sent < 32 * PAGE, "the client closed the connection"
    close_session()


@pytest.mark.parametrize(
    ("number", "expected"),
    [("ENOSPC", "StorageError"), ("EIO", "StorageError"), ("ESTALE", "UnavailableError")],
)
def test_a_volume_that_is_full_or_broken_is_not_an_input_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str, expected: str
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)))

    file = tmp_path / "file"
    file.write_bytes(b"content")
    where = open_store(str(tmp_path / "results"))
    where.prepare()
    monkeypatch.setattr("shutil.copyfileobj", fail)
    with pytest.raises(KfpDdpError) as caught:
        where.put(file, "name")
    assert type(caught.value).__name__ == expected


@pytest.mark.parametrize("scheme", ["gs", "s3", "az"])
def test_the_first_name_takes_one_request(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[str] = []

    def reply(_: str, path: str) -> Reply:
        if not path.startswith("/storage/v1/b/bucket?"):  # of google-cloud-storage itself
            requests.append(path)
        kind = {"Content_Type": f"application/{'json' if scheme == 'gs' else 'xml'}"}
        return 200, page(scheme, path), kind

    with serving(Server(reply)) as url:
        use(url, monkeypatch)
        where = open_store(f"{scheme}://bucket/x")
        names = where.list("")
        assert next(names) == ("0", 3)
        assert len(requests) == 1
        assert [name for name, _ in names] == ["1", "2", "3", "4"]
        assert len(requests) == 3
        requests.clear()
        assert where.has_files()
        assert len(requests) == 1
        assert re.search(r"(maxResults|max-keys|maxresults)=1\b", requests[0])


@pytest.mark.parametrize(
    ("scheme", "status", "code", "expected"),
    [
        ("s3", 503, "SlowDown", ""),
        ("s3", 403, "AccessDenied", "no permission to read 'a' of"),
        ("s3", 403, "InvalidObjectState", "archive"),
        ("s3", 412, "PreconditionFailed", "changed during each of two attempts"),
        ("s3", 400, "ExpiredToken", "credentials for 'a' of .* are invalid"),
        ("s3", 403, "RequestTimeTooSkewed", "correct its clock"),
        ("az", 503, "ServerBusy", ""),
        ("az", 401, "InvalidAuthenticationInfo", ""),
        ("az", 403, "AuthorizationFailure", "no permission to read 'a' of"),
        ("az", 409, "BlobArchived", "archive"),
        ("az", 412, "ConditionNotMet", "changed during each of two attempts"),
    ],
)
def test_the_sdk_explains_a_refused_request_and_renews_its_credentials(
    scheme: str,
    status: int,
    code: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = [99 if expected else 1]

    def reply(_: str, path: str) -> Reply:
        """List the object `a` of three bytes, or refuse or answer a request for it."""
        headers = {"Content_Type": "application/xml", "ETag": f'"{TAG}"'}
        if "list-type=2" in path or "comp=list" in path:
            return 200, listed(scheme, ["x/a"]), headers
        left[0] -= 1
        if left[0] >= 0:
            return status, ERROR.format(code).encode(), headers | {"x_ms_error_code": code}
        return 200, b"abc", headers | {"Content_Range": "bytes 0-0/3"}

    with serving(Server(reply)) as url:
        use(url, monkeypatch)
        monkeypatch.setattr("kfp_ddp.storage.store.TRIES", 1)
        if expected:
            with pytest.raises(KfpDdpError, match=expected):
                sync(f"{scheme}://bucket/x", tmp_path, SyncOptions(timeout=5))
        else:
            result = sync(f"{scheme}://bucket/x", tmp_path, SyncOptions(timeout=5))
            assert content(result.path) == {"a": b"abc"}
            assert result.retries


def test_azure_without_access_is_not_a_missing_blob(monkeypatch: pytest.MonkeyPatch) -> None:
    body = ERROR.format("ResourceNotFound").encode()  # what anonymous requests get
    headers = {"Content_Type": "application/xml", "x_ms_error_code": "ResourceNotFound"}
    with serving(Server(lambda *_: (404, body, headers))) as url:
        use(url, monkeypatch)
        where = open_store("az://bucket/x")
        for ask in (lambda: where.read("a", 9), lambda: where.write("a", b""), where.has_files):
            with pytest.raises(InputError, match=r"^no permission to "):
                ask()


def test_azure_with_an_identity_is_never_anonymous(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ClientAuthenticationError("no answer")

    monkeypatch.setattr("azure.identity.DefaultAzureCredential.get_token", refuse)
    for name in ("AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN", *azure._IDENTITY):
        monkeypatch.delenv(name, raising=False)
    assert azure._credential() is None
    monkeypatch.setenv("AZURE_CLIENT_ID", "id")
    with pytest.raises(UnavailableError, match="no answer"):
        azure._credential()


@pytest.mark.parametrize("size", ["abc", "-5", "9" * 30])
def test_s3_with_an_impossible_size_is_one_line(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = listed("s3", ["x/a"]).replace(b"<Size>3<", f"<Size>{size}<".encode())
    with serving(Server(lambda *_: (200, body, {"Content_Type": "application/xml"}))) as url:
        use(url, monkeypatch)
        with pytest.raises(InputError, match="response is invalid"):
            open_source("s3://bucket/x").listing()

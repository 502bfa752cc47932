"""Pages of a listing that do not end: who lists holds a page of them at most."""

from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.storage import azure, huggingface, s3_objects
from kfp_ddp.storage.kinds import open_source, open_store
from tests.serving import Handler, serving

PAGE = 1 << 20
SENT = 64 * PAGE
CUT = r"^.* sends more than 1,048,576 bytes in one response, which no page"


class Talkative(ThreadingHTTPServer):
    """Answers everything with more than anybody wants, as far as it is read."""

    def __init__(self, status: int) -> None:
        self.status, self.sent = status, 0
        super().__init__(("127.0.0.1", 0), Answer)


class Answer(Handler):
    server: Talkative

    def do_GET(self) -> None:
        self.send_response(self.server.status)
        self.end_headers()
        try:
            while self.server.sent < SENT:
                self.server.sent += self.wfile.write(b" " * (1 << 16))
        except OSError:
            pass


@pytest.fixture(params=[200, 403])
def talkative(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Talkative]:
    server = Talkative(request.param)
    for module in (s3_objects, azure, huggingface):
        monkeypatch.setattr(module, "MAX_PAGE", PAGE)
    with serving(server) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv(
            "AZURE_STORAGE_CONNECTION_STRING",
            f"AccountName=a;AccountKey=a2V5;BlobEndpoint={url}/a",
        )
        yield server
    from huggingface_hub import close_session

    close_session()


@pytest.mark.parametrize("source", ["s3://bucket/ds", "az://bucket/ds", "hf://datasets/owner/pets"])
def test_a_page_without_end_is_one_line(talkative: Talkative, source: str) -> None:
    with pytest.raises(InputError, match=CUT) as caught:
        open_source(source).listing()
    assert "\n" not in str(caught.value)
    assert talkative.sent < SENT / 2, "it was hung up on"


@pytest.mark.parametrize("place", ["s3://bucket/models", "az://bucket/models"])
def test_places_of_results_hold_a_page_at_most_too(talkative: Talkative, place: str) -> None:
    with pytest.raises(InputError, match=CUT):
        list(open_store(place).list("x"))
    if talkative.status == 403:
        with pytest.raises(InputError):
            open_store(place).read("x", 5)
    assert talkative.sent < SENT, "it was hung up on"

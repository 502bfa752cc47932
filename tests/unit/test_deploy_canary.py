"""The sample that a service is tried with: which answers of a real server count."""

import http.server
import json
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.models import bundle
from kfp_ddp.models.bundle import Bundle
from kfp_ddp.models.serving import canary
from kfp_ddp.models.serving.canary import Sample, address, ask, try_out
from kfp_ddp.storage.kinds import open_store
from tests.serving import serving

LOGITS = (2.0, -50.0, 3.0)
SAMPLE = Sample(b'{"inputs": []}', "logits", LOGITS, 0.5)
Answer = tuple[int, bytes]


def answer(*logits: float, name: str = "logits") -> bytes:
    return json.dumps({"outputs": [{"name": name, "data": logits}]}).encode()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[Answer]], str]]:
    """Starts a server with such answers, the last one for good; its address."""
    monkeypatch.setattr(canary, "_PAUSE", 0.0)
    running: list[http.server.ThreadingHTTPServer] = []

    def start(answers: list[Answer]) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                status, body = answers.pop(0) if len(answers) > 1 else answers[0]
                self.send_response(status if self.path == "/v2/models/flowers/infer" else 404)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        running.append(made)
        return f"http://127.0.0.1:{made.server_port}"

    yield start
    for each in running:
        each.shutdown()
        each.server_close()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (answer(*LOGITS), ""),
        (answer(2.4, -50.4, 2.6), ""),
        (answer(2.0, -50.0, 3.6), "its logits differ from the bundle's by 0.6, 0.5 is allowed"),
        (answer(2.0, -50.0), "it has 2 logits, the bundle 3"),
        (answer(*LOGITS, name="scores"), "it is not a v2 answer with logits: {"),
        (b'{"outputs": [{"name": "logits", "data": [NaN, 1, 2]}]}', "its logits differ"),
        (b'{"outputs": [{"name": "logits", "data": [2, NaN, 3]}]}', "its logits differ from the"),
        (b'{"outputs": [{"name": "logits", "data": ["a", 1, 2]}]}', "it is not a v2 answer"),
        (answer(2.0, -50.0, 10**400), "it is not a v2 answer"),
        (b"[" * 100_000, "it is not a v2 answer"),
        (b"\xff<html>", "it is not a v2 answer with logits: "),
    ],
)
def test_an_answer_is_right_within_what_is_allowed(content: bytes, said: str) -> None:
    found = SAMPLE.difference(content)
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_it_has_to_answer_rightly_so_often_in_a_row(
    server: Callable[[list[Answer]], str],
) -> None:
    right, wrong = (200, answer(*LOGITS)), (200, answer(0, 0, 0))
    answers = [right, right, (503, b"starting"), right, wrong, right, right, right]
    assert try_out(server(answers), "flowers", SAMPLE, 3, 5) > 0
    assert len(answers) == 1


def test_what_goes_on_for_too_long_ends_it(
    server: Callable[[list[Answer]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(canary, "WRONG_SECONDS", 0.0)
    url = server([(200, answer(0, 0, 0))])
    with pytest.raises(JobError, match=r"/v2/models/flowers/infer answers wrongly: its logits"):
        try_out(url, "flowers", SAMPLE, 1, 5)
    with pytest.raises(JobError, match=r"/v2/models/other/infer answers 404: "):
        try_out(url, "other", SAMPLE, 1, 5)
    with pytest.raises(JobError, match=r"http://127\.0\.0\.1:1/v2/models/flowers/infer does not"):
        try_out("http://127.0.0.1:1", "flowers", SAMPLE, 1, 5)


def test_a_run_that_is_cancelled_asks_no_more(server: Callable[[list[Answer]], str]) -> None:
    def cancelled() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        try_out(server([(503, b"")]), "flowers", SAMPLE, 1, 5, cancelled)


def test_a_server_that_is_late_is_told_as_late(server: Callable[[list[Answer]], str]) -> None:
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        said, _ = ask(f"http://127.0.0.1:{silent.getsockname()[1]}", "flowers", SAMPLE, 0.1)
    assert said.endswith("/v2/models/flowers/infer did not answer within 0.1 s")


def test_a_server_that_never_comes_to_an_end_is_late() -> None:
    over = threading.Event()

    class Drip(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            while not over.wait(0.02):
                self.wfile.write(b" ")

        def log_message(self, *_: Any) -> None:
            pass

    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Drip)) as url:
        try:
            said, _ = ask(url, "flowers", SAMPLE, 0.5)
        finally:
            over.set()
    assert said.endswith("/v2/models/flowers/infer did not answer within 0.5 s")


def test_a_sample_without_a_number_for_each_logit_is_none(tmp_path: Path) -> None:
    for place, logit, allowed in (("a", math.nan, 1e-3), ("b", 1.0, math.inf)):
        outputs = [{"name": "logits", "data": [logit]}]
        said = {"outputs": outputs, "parameters": {"allowed_abs_difference": allowed}}
        with pytest.raises(InputError, match="a number in it is not finite"):
            Sample.of(sealed(tmp_path / place, json.dumps(said)))


def sealed(folder: Path, response: str) -> Bundle:
    (folder / "sample").mkdir(parents=True)
    (folder / "sample/request.json").write_text('{"inputs": []}')
    (folder / "sample/response.json").write_text(response)
    bundle.seal(folder)
    return Bundle.at(open_store(str(folder)), "", "the bundle", "publish it again")


def test_the_sample_is_the_bundle_s_and_believed_only_where_it_is_listed(tmp_path: Path) -> None:
    parameters = {"allowed_abs_difference": 1e-3}
    output = {"name": "logits", "data": LOGITS}
    response = json.dumps({"outputs": [output], "parameters": parameters})
    found = Sample.of(sealed(tmp_path / "a", response))
    assert (found.logits, found.output, found.allowed) == (LOGITS, "logits", 0.5)
    strict = {**output, "data": [0.001]}
    response = json.dumps({"outputs": [strict], "parameters": parameters})
    assert Sample.of(sealed(tmp_path / "b", response)).allowed == 1e-3
    with pytest.raises(InputError, match=r"the bundle .* is damaged: sample/response\.json holds"):
        Sample.of(sealed(tmp_path / "c", '{"outputs": []}'))
    changed = sealed(tmp_path / "d", response)
    (tmp_path / "d/sample/response.json").write_text("{}")
    with pytest.raises(InputError, match="is not what MANIFEST"):
        Sample.of(changed)
    bare = tmp_path / "e"
    bare.mkdir()
    bundle.seal(bare)
    old = Bundle.at(open_store(str(bare)), "", "the bundle", "publish it again")
    with pytest.raises(InputError, match=r"has no sample/request\.json to try a service with"):
        Sample.of(old)


HOST = "http://shop-predictor.here.svc.cluster.local"


@pytest.mark.parametrize(
    ("status", "all_of_it", "newest"),
    [
        ({"address": {"url": HOST}}, HOST, HOST),
        (
            {
                "address": {"url": "http://shop.here"},
                "components": {
                    "predictor": {"address": {"url": HOST}, "traffic": [{"tag": "latest"}]}
                },
            },
            HOST,
            HOST.replace("://", "://latest-"),
        ),
        ({"url": "http://shop.example.com"}, *["http://shop.example.com"] * 2),
    ],
)
def test_the_newest_predictor_has_an_address_of_its_own_with_knative(
    status: dict[str, Any], all_of_it: str, newest: str
) -> None:
    service = {"metadata": {"name": "shop"}, "status": status}
    assert (address(service), address(service, newest=True)) == (all_of_it, newest)


def test_a_service_without_address_is_one_line() -> None:
    with pytest.raises(JobError, match="KServe reports no address of InferenceService shop"):
        address({"metadata": {"name": "shop"}})

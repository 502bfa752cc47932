"""The step deploy without a rollout, and the test of a service with the sample of its bundle."""

import contextlib
import json
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kfp import dsl

from kfp_ddp.components.deploy.component import deploy
from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.k8s.api import Api
from kfp_ddp.models import bundle
from kfp_ddp.models.bundle import Bundle
from kfp_ddp.models.interface import Sample, _Image
from kfp_ddp.rollout import engine as canary
from kfp_ddp.rollout.engine import address, ask, check_canary, difference, sample_of
from tests.exports import sealed
from tests.serving import Handler, serving_by


def run(tmp_path: Path, address: str, **release: Any) -> tuple[tuple[str, str], str]:
    """Run the step; return its outputs and its report."""
    report = dsl.Markdown(uri=str(tmp_path / "report.md"))
    outputs = deploy.python_func(bundle=address, deploy_report=report, release=release)
    return tuple(outputs), Path(report.path).read_text()


def bare(folder: Path) -> str:
    """Write a bundle without a sample to a folder named by its version; return its path."""
    (folder / "new").mkdir(parents=True)
    bundle.seal(folder / "new")
    version = bundle.version(folder / "new")
    (folder / "new").rename(folder / version)
    return str(folder / version)


def test_without_a_service_an_upload_or_a_champion_nothing_is_done(tmp_path: Path) -> None:
    outputs, report = run(tmp_path, "gs://models/exports/flowers/0123456789ab")
    assert (outputs, "no service is named" in report) == (("", ""), True)
    outputs, report = run(tmp_path, "", service="shop")
    assert (outputs, "nothing was uploaded" in report) == (("", ""), True)
    address = bare(tmp_path / "flowers")
    (tmp_path / "flowers/CHAMPION").write_text("ba9876543210\n")
    outputs, report = run(tmp_path, address, service="shop")
    assert (outputs, "ba9876543210 is the champion now" in report) == (("", ""), True)


def test_invalid_input_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Api, "connect", lambda: Api(None, "here"))
    address = bare(tmp_path / "flowers")
    (tmp_path / "flowers/CHAMPION").write_text(f"{Path(address).name}\n")
    with pytest.raises(SystemExit, match=r"has no sample/request\.json to try a service with"):
        run(tmp_path, address, service="shop")
    (Path(address) / "MANIFEST.sha256").unlink()
    with pytest.raises(SystemExit, match=r"is damaged: MANIFEST\.sha256 is missing"):
        run(tmp_path, address, service="shop")
    with pytest.raises(SystemExit, match="release has no setting 'servis'"):
        run(tmp_path, address, servis="shop")


LOGITS = (2.0, -50.0, 3.0)
SAMPLE = Sample(
    b'{"inputs": []}', _Image(name="images", shape=(1,), data=(0,)), "logits", LOGITS, 0.5
)
Answer = tuple[int, bytes]


def answer(*logits: float, name: str = "logits") -> bytes:
    return json.dumps({"outputs": [{"name": name, "data": logits}]}).encode()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[Answer]], str]]:
    """Start a server with these answers, the last of which repeats; return its URL."""
    monkeypatch.setattr(canary, "_PAUSE", 0.0)
    with contextlib.ExitStack() as running:

        def start(answers: list[Answer]) -> str:
            class Model(Handler):
                def do_POST(self) -> None:
                    self.rfile.read(int(self.headers["Content-Length"]))
                    status, body = answers.pop(0) if len(answers) > 1 else answers[0]
                    self.answer(status if self.path == "/v2/models/flowers/infer" else 404, body)

            return running.enter_context(serving_by(Model))

        yield start


@pytest.mark.parametrize(
    ("content", "problem"),
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
def test_logits_may_differ_within_the_limit(content: bytes, problem: str) -> None:
    result = difference(SAMPLE, content)
    assert result.startswith(problem)
    assert bool(result) == bool(problem)


def test_several_answers_in_a_row_must_be_correct(server: Callable[[list[Answer]], str]) -> None:
    right, wrong = (200, answer(*LOGITS)), (200, answer(0, 0, 0))
    answers = [right, right, (503, b"starting"), right, wrong, right, right, right]
    assert check_canary(server(answers), "flowers", SAMPLE, 3, 5) > 0
    assert len(answers) == 1


def test_time_counts_from_the_first_wrong_answer_in_a_row(
    server: Callable[[list[Answer]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    right, busy, answers = (200, answer(*LOGITS)), (503, b"busy"), list[Answer]()
    monkeypatch.setattr(canary, "ask", lambda *_: (answers.pop(0)[1] == b"busy" and "busy", 9.0))
    answers.extend([*[right] * 8, busy, *[right] * 9])
    assert check_canary("", "", SAMPLE, 9, 5) > 0
    answers.extend([right, busy] * 500)
    with pytest.raises(JobError, match="busy"):
        check_canary("", "", SAMPLE, 9, 5)
    assert len(answers) > 900


def test_problem(server: Callable[[list[Answer]], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(canary, "WRONG_SECONDS", 0.0)
    url = server([(200, answer(0, 0, 0))])
    for address_, model, text in (
        (url, "flowers", "returns a wrong result: its logits"),
        (url, "other", "answers 404: "),
        ("http://127.0.0.1:1", "flowers", "does not"),
    ):
        with pytest.raises(JobError, match=f"/v2/models/{model}/infer {text}"):
            check_canary(address_, model, SAMPLE, 1, 5)


def test_a_cancelled_run_sends_no_requests(server: Callable[[list[Answer]], str]) -> None:
    def cancelled() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_canary(server([(503, b"")]), "flowers", SAMPLE, 1, 5, cancelled)


@pytest.mark.parametrize("drips", [False, True])
def test_a_slow_server_times_out(drips: bool) -> None:
    over = threading.Event()

    class Slow(Handler):
        def do_POST(self) -> None:
            if drips:
                self.send_response(200)
                self.end_headers()
            while not over.wait(0.02):
                if drips:
                    self.wfile.write(b" ")

    with serving_by(Slow) as url:
        try:
            problem, _ = ask(url, "flowers", SAMPLE, 0.3)
        finally:
            over.set()
    assert problem.endswith("/v2/models/flowers/infer did not answer within 0.3 s")


def sampled(folder: Path, logits: list[float], **changed: Any) -> Bundle:
    """Return a bundle with a sample."""
    image = {"name": "images", "shape": [1, 1, 1, 1], "data": [7]}
    response = {
        "outputs": [{"name": "logits", "data": logits}],
        "parameters": {"allowed_abs_difference": 1e-3},
        **changed,
    }
    return sealed(folder, {bundle.REQUEST: {"inputs": [image]}, bundle.RESPONSE: response})


def test_the_sample_is_read_from_the_bundle(tmp_path: Path) -> None:
    sample = sample_of(sampled(tmp_path / "a", list(LOGITS)))
    assert (sample.logits, sample.output, sample.allowed) == (LOGITS, "logits", 0.5)
    assert sample_of(sampled(tmp_path / "b", [0.001])).allowed == 1e-3
    for invalid in (
        sampled(tmp_path / "c", [math.nan]),
        sampled(tmp_path / "d", [1.0], parameters={"allowed_abs_difference": math.inf}),
        sampled(tmp_path / "e", [1.0], outputs=[]),
    ):
        with pytest.raises(InputError, match=r"is damaged: sample/response\.json"):
            sample_of(invalid)
    changed = sampled(tmp_path / "f", [1.0])
    (tmp_path / "f" / bundle.RESPONSE).write_text("{}")
    with pytest.raises(InputError, match="is not what MANIFEST"):
        sample_of(changed)


HOST = "http://shop-predictor.here.svc.cluster.local"
TRIAL = {"canary": [{"predictor": {"name": "trial", "labels": {"kfp-ddp/spec": "new"}}}]}
PARTS = {"predictor": {"address": {"url": HOST}}}


@pytest.mark.parametrize(
    ("status", "url", "of_canary"),
    [
        ({"address": {"url": HOST}}, HOST, HOST.replace("shop-", "shop-trial-")),
        (
            {"address": {"url": "http://shop.here"}, "components": PARTS},
            HOST,
            HOST.replace("shop-", "shop-trial-"),
        ),
        ({"url": "http://shop.example.com"}, *["http://shop.example.com"] * 2),
    ],
)
def test_service_and_canary_have_an_address(
    status: dict[str, Any], url: str, of_canary: str
) -> None:
    service = {"metadata": {"name": "shop"}, "spec": TRIAL, "status": status}
    assert (address(service), address(service, "new")) == (url, of_canary)
    assert address({**service, "spec": {}}, "new") == url


def test_a_service_without_an_address_is_an_error() -> None:
    with pytest.raises(JobError, match="KServe reports no address of InferenceService shop"):
        address({"metadata": {"name": "shop"}})

"""Telling what a run came to, over real HTTP and SMTP on this machine."""

import json
import socketserver
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.runs import notify as channels
from kfp_ddp.runs.notify import Notification, Outcome, send
from tests.serving import free_port, serving

PROMOTED = Outcome(
    "1f0c",
    "promoted",
    model="resnet",
    accuracy=0.992,
    champion="0123456789ab",
    champion_accuracy=0.987,
    bundle="gs://models/resnet/ba9876543210",
    dataset="67c0cb93c78b" + "0" * 52,
    address="https://kfp.example.com/#/runs/details/1f0c",
)
FAILED = Outcome("1f0c", "failed", "rank 1: <class 'X'> & more", step="train")


class Hook(BaseHTTPRequestHandler):
    """Keeps what is posted; answers with the next of `answers`, then 200."""

    posted: list[tuple[str, Any]]
    answers: list[int]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.posted.append((self.path, json.loads(body)))
        self.send_response(self.answers.pop(0) if self.answers else 200)
        self.send_header("Location", "http://elsewhere.invalid/")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@contextmanager
def hook(*answers: int) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    handler = type("Kept", (Hook,), {"posted": [], "answers": list(answers)})
    server = HTTPServer(("127.0.0.1", 0), handler)
    with serving(server) as address:
        yield address, handler.posted  # type: ignore[attr-defined]


def told(monkeypatch: pytest.MonkeyPatch, outcome: Outcome, **given: str) -> list[str]:
    """What `send` says, where the environment has the secret's keys."""
    settings = {name: value for name, value in given.items() if name != name.upper()}
    for name, value in given.items():
        if name not in settings:
            monkeypatch.setenv(name, value)
    return send(Notification.create(**settings), outcome)


def test_a_webhook_gets_all_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    with hook() as (address, posted):
        said = told(monkeypatch, PROMOTED, notify_webhook="HOOK", HOOK=f"{address}/in?token=s3cr3t")
    assert said == ["notify_webhook: sent"]
    ((path, body),) = posted
    assert path == "/in?token=s3cr3t"
    assert (body["format"], body["state"], body["accuracy"]) == (1, "promoted", 0.992)
    assert body["gain"] == pytest.approx(0.005)
    assert body["title"] == (
        "resnet promoted: accuracy 99.20%, +0.50 points on the champion 0123456789ab"
    )
    assert body["text"].splitlines() == [
        "bundle: gs://models/resnet/ba9876543210",
        "dataset: 67c0cb93c78b",
        "run: https://kfp.example.com/#/runs/details/1f0c",
    ]


def test_slack_gets_its_form_with_nothing_in_it_that_slack_would_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with hook() as (address, posted):
        told(monkeypatch, FAILED, notify_slack="HOOK", HOOK=address)
    ((_, body),) = posted
    assert body == {
        "text": "*run failed in train*\nreason: rank 1: &lt;class 'X'&gt; &amp; more\nrun: 1f0c"
    }


def test_a_server_that_is_away_for_a_moment_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "PAUSES", (0.0, 0.0))
    with hook(503, 429) as (address, posted):
        assert told(monkeypatch, FAILED, notify_webhook="H", H=address) == ["notify_webhook: sent"]
    assert len(posted) == 3


@pytest.mark.parametrize(
    ("address", "answer", "why"),
    [
        ("", 404, "the server answered 404"),
        ("", 302, "the server answered 302"),
        ("ftp://x/s3cr3t", 0, "it is not an address that begins with https://"),
        ("http://[s3cr3t/", 0, "ValueError"),
        (None, 0, "Connection refused"),
    ],
)
def test_why_nothing_was_sent_is_told_without_the_address(
    monkeypatch: pytest.MonkeyPatch, address: str | None, answer: int, why: str
) -> None:
    monkeypatch.setattr(channels, "PAUSES", (0.0,))
    with hook(answer) as (there, posted):
        gone = f"http://127.0.0.1:{free_port()}/s3cr3t"
        place = gone if address is None else address or f"{there}/s3cr3t"
        (said,) = told(monkeypatch, FAILED, notify_slack="HOOK", HOOK=place)
    assert said == f"warning: notify_slack: nothing was sent to HOOK: {why}"
    assert len(posted) == bool(answer)


class Mail(socketserver.StreamRequestHandler):
    """A mail server that takes one message, and offers no TLS."""

    got: list[str]

    def handle(self) -> None:
        self.say("220 here")
        while line := self.rfile.readline().decode().strip():
            self.got.append(line)
            if line.upper() == "DATA":
                self.say("354 go on")
                while (line := self.rfile.readline().decode().rstrip("\r\n")) != ".":
                    self.got.append(line)
            self.say("221 bye" if line.upper() == "QUIT" else "250 fine")

    def say(self, line: str) -> None:
        self.wfile.write(f"{line}\r\n".encode())


@contextmanager
def mail_server() -> Iterator[tuple[str, list[str]]]:
    handler = type("Kept", (Mail,), {"got": []})
    with serving(socketserver.TCPServer(("127.0.0.1", 0), handler)) as url:
        yield url.removeprefix("http://"), handler.got  # type: ignore[attr-defined]


def test_an_e_mail_goes_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    to = "ana@example.com,ben@example.com"
    with mail_server() as (address, got):
        said = told(monkeypatch, PROMOTED, notify_smtp="M", notify_email=to, M=f"smtp://{address}")
    assert said == ["notify_smtp: sent"]
    assert {"rcpt TO:<ana@example.com>", "rcpt TO:<ben@example.com>"} <= set(got)
    assert "From: ana@example.com" in got
    assert any(line.startswith("Subject: [kfp-ddp] resnet promoted: accuracy") for line in got)
    assert "bundle: gs://models/resnet/ba9876543210" in got


def test_a_password_goes_to_no_mail_server_without_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    with mail_server() as (address, got):
        (said,) = told(
            monkeypatch,
            FAILED,
            notify_smtp="M",
            notify_email="ana@example.com",
            M=f"smtp://ana:s3cr3t@{address}",
        )
    assert said.endswith("the mail server offers no TLS, so no password is sent to it")
    assert not any("AUTH" in line or "rcpt" in line for line in got)


@pytest.mark.parametrize(
    ("which", "state", "sent"),
    [
        ("always", "unchanged", True),
        ("change", "unchanged", False),
        ("change", "not blessed", True),
        ("failure", "promoted", False),
        ("failure", "cancelled", True),
        ("failure", "failed", True),
    ],
)
def test_who_wants_to_know_less_is_told_less(
    monkeypatch: pytest.MonkeyPatch, which: str, state: Any, sent: bool
) -> None:
    with hook() as (address, posted):
        given = {"notify_webhook": "H", "notify_on": which, "H": address}
        told(monkeypatch, Outcome("1f0c", state), **given)
    assert bool(posted) == sent


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"notify_slack": "https://hooks.slack.com/s3cr3t"}, "the name of a key of the bucket's"),
        ({"notify_email": "ana@example.com"}, "an e-mail needs both notify_smtp and"),
        ({"notify_smtp": "MAIL"}, "an e-mail needs both notify_smtp and notify_email"),
        ({"notify_smtp": "MAIL", "notify_email": "ana"}, "addresses such as ana@example.com,ben@"),
        ({"notify_on": "success"}, "it is one of always, change, failure"),
        ({"kfp_ui": "kfp.example.com"}, "an address such as https://"),
        ({"notify_slak": "HOOK"}, "did you mean 'notify_slack'"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(given: dict[str, str], why: str) -> None:
    with pytest.raises(InputError) as caught:
        Notification.create(**given)
    assert why in str(caught.value)
    assert "s3cr3t" not in str(caught.value)

"""Notifications of the end of a run, over HTTP and SMTP on this machine."""

import json
import re
import socketserver
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.runs import notify as channels
from kfp_ddp.runs.notify import Notification, Outcome, send
from tests.serving import Recorder, free_port, serving

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


@contextmanager
def hook(*answers: int) -> Iterator[tuple[str, list[tuple[str, str, bytes]]]]:
    server = Recorder(*((status, "http://elsewhere.invalid/") for status in answers))
    with serving(server) as address:
        yield address, server.seen


def sent(monkeypatch: pytest.MonkeyPatch, outcome: Outcome, **values: str) -> list[str]:
    """Return the lines of `send`; values with a name in capitals are keys of the secret."""
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    settings = {name: value for name, value in values.items() if name != name.upper()}
    return send(Notification.create(**settings), outcome)


def test_a_webhook_receives_json(monkeypatch: pytest.MonkeyPatch) -> None:
    with hook() as (address, posted):
        lines = sent(monkeypatch, PROMOTED, notify_webhook="HOOK", HOOK=f"{address}/i?token=s3cr3t")
    assert lines == ["notify_webhook: sent"]
    ((path, _, content),) = posted
    body = json.loads(content)
    assert path == "/i?token=s3cr3t"
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


def test_slack_receives_escaped_text_after_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "PAUSES", (0.0, 0.0))
    with hook(503, 429) as (address, posted):
        lines = sent(monkeypatch, FAILED, notify_slack="HOOK", HOOK=address)
    assert lines == ["notify_slack: sent"]
    body = {
        "text": "*run failed in train*\nreason: rank 1: &lt;class 'X'&gt; &amp; more\nrun: 1f0c"
    }
    assert [json.loads(content) for *_, content in posted] == [body] * 3


@pytest.mark.parametrize(
    ("address", "answer", "reason"),
    [
        ("", 404, "the server answered 404"),
        ("", 302, "the server answered 302"),
        ("ftp://x/s3cr3t", 0, "it is not an address that begins with https://"),
        ("http://[s3cr3t/", 0, "ValueError"),
        (None, 0, "Connection refused"),
    ],
)
def test_an_error_does_not_contain_the_address(
    monkeypatch: pytest.MonkeyPatch, address: str | None, answer: int, reason: str
) -> None:
    monkeypatch.setattr(channels, "PAUSES", (0.0,))
    with hook(answer) as (server, posted):
        gone = f"http://127.0.0.1:{free_port()}/s3cr3t"
        uri = gone if address is None else address or f"{server}/s3cr3t"
        (line,) = sent(monkeypatch, FAILED, notify_slack="HOOK", HOOK=uri)
    assert line == f"warning: notify_slack: nothing was sent to HOOK: {reason}"
    assert len(posted) == bool(answer)


class Mail(socketserver.StreamRequestHandler):
    """A mail server for one message, without TLS."""

    received: list[str]

    def handle(self) -> None:
        self.reply("220 here")
        while line := self.rfile.readline().decode().strip():
            self.received.append(line)
            if line.upper() == "DATA":
                self.reply("354 data")
                while (line := self.rfile.readline().decode().rstrip("\r\n")) != ".":
                    self.received.append(line)
            self.reply("221 bye" if line.upper() == "QUIT" else "250 fine")

    def reply(self, line: str) -> None:
        self.wfile.write(f"{line}\r\n".encode())


@contextmanager
def mail_server() -> Iterator[tuple[str, list[str]]]:
    handler = type("Kept", (Mail,), {"received": []})
    with serving(socketserver.TCPServer(("127.0.0.1", 0), handler)) as url:
        yield url.removeprefix("http://"), handler.received  # type: ignore[attr-defined]


def test_an_e_mail_is_sent_to_all_recipients(monkeypatch: pytest.MonkeyPatch) -> None:
    to = "ana@example.com,ben@example.com"
    with mail_server() as (address, received):
        lines = sent(monkeypatch, PROMOTED, notify_smtp="M", notify_email=to, M=f"smtp://{address}")
    assert lines == ["notify_smtp: sent"]
    assert {"rcpt TO:<ana@example.com>", "rcpt TO:<ben@example.com>"} <= set(received)
    assert "From: ana@example.com" in received
    assert any(line.startswith("Subject: [kfp-ddp] resnet promoted: accuracy") for line in received)
    assert "bundle: gs://models/resnet/ba9876543210" in received


def test_no_password_is_sent_without_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    with mail_server() as (address, received):
        values = {"notify_smtp": "M", "notify_email": "ana@example.com"}
        (line,) = sent(monkeypatch, FAILED, **values, M=f"smtp://ana:s3cr3t@{address}")
    assert line.endswith("the mail server offers no TLS, so no password is sent to it")
    assert not any("AUTH" in line or "rcpt" in line for line in received)


@pytest.mark.parametrize(
    ("which", "state", "expected"),
    [
        ("always", "unchanged", True),
        ("change", "unchanged", False),
        ("change", "not blessed", True),
        ("failure", "promoted", False),
        ("failure", "cancelled", True),
        ("failure", "failed", True),
    ],
)
def test_notify_on(monkeypatch: pytest.MonkeyPatch, which: str, state: Any, expected: bool) -> None:
    with hook() as (address, posted):
        values = {"notify_webhook": "H", "notify_on": which, "H": address}
        sent(monkeypatch, Outcome("1f0c", state), **values)
    assert bool(posted) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"notify_slack": "https://hooks.slack.com/s3cr3t"}, "the name of a key of the bucket's"),
        ({"notify_email": "ana@example.com"}, "an e-mail needs both notify_smtp and"),
        ({"notify_smtp": "MAIL", "notify_email": "ana"}, "addresses such as ana@example.com,ben@"),
        ({"notify_on": "success"}, "it is one of always, change, failure"),
        ({"kfp_ui": "kfp.example.com"}, "an address such as https://"),
        ({"notify_slak": "HOOK"}, "did you mean 'notify_slack'"),
    ],
)
def test_invalid_settings_are_errors(settings: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        Notification.create(**settings)
    assert "s3cr3t" not in str(caught.value)

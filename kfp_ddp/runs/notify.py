"""Notifications of the end of a run by a webhook, Slack or e-mail."""

import contextlib
import dataclasses
import functools
import html
import json
import os
import smtplib
import ssl
import time
import urllib.error
from collections.abc import Callable, Mapping
from email.message import EmailMessage
from typing import Any, ClassVar, Literal, Self, TypeVar
from urllib.parse import unquote, urlsplit

from pydantic import Field, model_validator

from kfp_ddp.core.errors import InputError, KfpDdpError
from kfp_ddp.core.http import post
from kfp_ddp.core.log import log
from kfp_ddp.core.settings import Settings
from kfp_ddp.core.step import KEY_NAME, KEY_NAME_MEANING, needed_secret, secret

State = Literal[
    "promoted", "exported", "blessed", "not blessed", "trained", "unchanged", "failed", "cancelled"
]
SECONDS = 10.0
PAUSES = (1.0, 3.0)
"""Seconds before each retry of a server that does not respond."""
R = TypeVar("R")
Step = Callable[[dict[str, Any]], R]
_ADDRESSES = r"^$|^[^@\s,<>]+@[^@\s,<>]+(,[^@\s,<>]+@[^@\s,<>]+)*$"
_MAIL_PORTS = {"smtp": 587, "smtps": 465}
CHANNELS = ("notify_webhook", "notify_slack", "notify_smtp")


class Notification(Settings):
    """Channels that report the end of a run, and which ends they report."""

    patterns: ClassVar = {
        KEY_NAME: KEY_NAME_MEANING,
        _ADDRESSES: "addresses such as ana@example.com,ben@example.com",
        r"^$|^https?://\S+$": "an address such as https://kubeflow.example.com/pipeline",
    }
    secret: ClassVar = frozenset(CHANNELS)

    notify_webhook: str = Field("", pattern=KEY_NAME)
    """Key of the bucket's secret that holds an address, which receives the end of a run as JSON."""
    notify_slack: str = Field("", pattern=KEY_NAME)
    """Key of that secret that holds the address of an incoming webhook of Slack, or of a
    server with the same format, such as Mattermost."""
    notify_smtp: str = Field("", pattern=KEY_NAME)
    """Key of that secret that holds a mail server, as smtp://user:password@host:587, or smtps://
    for TLS from the start; a password is only sent over TLS."""
    notify_email: str = Field("", pattern=_ADDRESSES)
    """Recipients of the e-mail over notify_smtp, separated by commas."""
    notify_from: str = Field("", pattern=_ADDRESSES)
    """Sender of the e-mails; empty for the first recipient."""
    notify_on: Literal["always", "change", "failure"] = "always"
    """Which ends are reported: all; all except runs that trained nothing (change); failures."""
    kfp_ui: str = Field("", pattern=r"^$|^https?://\S+$")
    """Address of the KFP UI, for a link to the run."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if bool(self.notify_smtp) != bool(self.notify_email):
            name = "notify_smtp" if self.notify_smtp else "notify_email"
            raise ValueError(f"{name} is set: an e-mail needs both notify_smtp and notify_email")
        return self

    @classmethod
    def among(cls, job: Mapping[str, Any]) -> Self:
        """Return the notification settings among those of a job; raise InputError."""
        return cls.create(**{name: job[name] for name in cls.model_fields if name in job})

    @property
    def keys(self) -> dict[str, str]:
        """Return the keys of the secret by the names of their settings."""
        return {name: key for name in CHANNELS if (key := getattr(self, name))}

    def link(self, run_id: str) -> str:
        """Return the run's page in the UI; '' if the UI is not known."""
        return f"{self.kfp_ui.rstrip('/')}/#/runs/details/{run_id}" if self.kfp_ui else ""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a run; unknown fields are empty."""

    run_id: str
    state: State
    reason: str = ""
    """Why it failed or was not blessed, in one line."""
    step: str = ""
    """The step that failed."""
    model: str = ""
    """Name of the exported model, else of the network."""
    accuracy: float | None = None
    champion: str = ""
    """The version that it was compared with."""
    champion_accuracy: float | None = None
    """On the same samples."""
    bundle: str = ""
    """URI of the exported bundle."""
    dataset: str = ""
    """Digest of the version that it was evaluated on."""
    address: str = ""
    """The run's page in the UI."""

    @property
    def gain(self) -> float | None:
        """Return the accuracy minus that of the champion."""
        if self.accuracy is None or self.champion_accuracy is None:
            return None
        return self.accuracy - self.champion_accuracy

    def to_json(self) -> dict[str, Any]:
        """Return all fields as a JSON document."""
        document = {"format": 1, **dataclasses.asdict(self), "gain": self.gain}
        return {**document, "title": self.title(), "text": "\n".join(self.lines())}

    def title(self) -> str:
        """Return a summary in one line."""
        name = self.model or "run"
        match self.state:
            case "failed":
                where = f" in {self.step}" if self.step else ""
                return f"{name} failed{where}"
            case "cancelled":
                return f"{name} was cancelled"
            case "unchanged":
                return "nothing was trained"
        return f"{name} {self.state}{self._accuracies()}"

    def lines(self) -> list[str]:
        """Return the details, one per line."""
        facts = {
            "reason": self.reason,
            "bundle": self.bundle,
            "dataset": self.dataset[:12],
            "run": self.address or self.run_id,
        }
        return [f"{name}: {value}" for name, value in facts.items() if value]

    def _accuracies(self) -> str:
        if self.accuracy is None:
            return ""
        text = f": accuracy {self.accuracy:.2%}"
        if self.gain is None:
            return text
        return f"{text}, {self.gain * 100:+.2f} points on the champion {self.champion}".rstrip()


def send(notification: Notification, outcome: Outcome) -> list[str]:
    """Send an outcome to all channels; return a line of log for each, an error's too."""
    failed = outcome.state in ("failed", "cancelled")
    silent = {"failure": not failed, "change": outcome.state == "unchanged"}
    if silent.get(notification.notify_on):
        return []
    lines = []
    for name, key in notification.keys.items():
        try:
            _send(name, secret(key), notification, outcome)
            lines.append(f"{name}: sent")
        except Exception as error:  # noqa: BLE001 - a notification never fails a run
            lines.append(f"warning: {name}: nothing was sent to {key}: {_reason(error)}")
    return lines


def _send(name: str, address: str, notification: Notification, outcome: Outcome) -> None:
    if not address:
        raise InputError("the bucket's secret has no such key")
    if name == "notify_smtp":
        _mail(address, notification, outcome)
        return
    body = outcome.to_json()
    if name == "notify_slack":
        lines = "\n".join([f"*{outcome.title()}*", *outcome.lines()])
        body = {"text": html.escape(lines, quote=False)}
    if urlsplit(address).scheme not in ("http", "https"):
        raise InputError("it is not an address that begins with https://")
    for pause in (*PAUSES, None):
        try:
            post(address, json.dumps(body).encode(), {"User-Agent": "kfp-ddp"}, SECONDS)
            break
        except OSError as error:
            code = error.code if isinstance(error, urllib.error.HTTPError) else 500
            may_pass = code >= 500 or code == 429
            if pause is None or not may_pass:
                raise
        time.sleep(pause)


def _mail(address: str, notification: Notification, outcome: Outcome) -> None:
    server = urlsplit(address)
    if server.scheme not in _MAIL_PORTS or not server.hostname:
        raise InputError("it is not a mail server such as smtp://user:password@host:587")
    mail = _message(notification, outcome)
    context = ssl.create_default_context()
    encrypted = server.scheme == "smtps"
    port = server.port or _MAIL_PORTS[server.scheme]
    connect: Callable[..., smtplib.SMTP] = smtplib.SMTP
    if encrypted:
        connect = functools.partial(smtplib.SMTP_SSL, context=context)
    with connect(server.hostname, port, timeout=SECONDS) as session:
        session.ehlo()
        if not encrypted and session.has_extn("starttls"):
            session.starttls(context=context)
            encrypted = True
        if server.username:
            if not encrypted:
                raise InputError("the mail server offers no TLS, so no password is sent to it")
            session.login(unquote(server.username), unquote(server.password or ""))
        session.send_message(mail)


def _message(notification: Notification, outcome: Outcome) -> EmailMessage:
    title = outcome.title()
    mail = EmailMessage()
    mail["Subject"] = f"[kfp-ddp] {title}"[:200]
    mail["To"] = notification.notify_email.replace(",", ", ")
    mail["From"] = notification.notify_from or notification.notify_email.partition(",")[0]
    mail.set_content("\n".join([title, "", *outcome.lines()]) + "\n")
    return mail


def _reason(error: Exception) -> str:
    """Return the reason in one line, without the address, which may be secret."""
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code}"
    if isinstance(error, urllib.error.URLError):
        error = error.reason if isinstance(error.reason, Exception) else error
    if isinstance(error, smtplib.SMTPResponseException):
        return f"the mail server answered {error.smtp_code}"
    if isinstance(error, smtplib.SMTPException):
        return type(error).__name__
    if isinstance(error, InputError):
        return str(error)
    return getattr(error, "strerror", "") or type(error).__name__


def _notify_of_refusal(inputs: dict[str, Any], reason: str) -> None:
    notification = Notification.among(inputs["job"])
    run_id = inputs["run_id"]
    address = notification.link(run_id)
    failed = Outcome(run_id, "failed", reason, step="preflight", address=address)
    for line in send(notification, failed):
        log.info(line)


def notify_of_refusal(run: Step[R]) -> Step[R]:
    """Make the first step notify of its own errors, as no exit handler runs for them."""

    @functools.wraps(run)
    def wrapper(inputs: dict[str, Any]) -> R:
        try:
            if os.environ.get("KFP_POD_NAME"):  # elsewhere the secret may not be available
                for name, key in Notification.among(inputs["job"]).keys.items():
                    needed_secret(key, name)
            return run(inputs)
        except KfpDdpError as error:
            if inputs.get("run_id"):
                with contextlib.suppress(KfpDdpError):
                    _notify_of_refusal(inputs, str(error))
            raise

    return wrapper

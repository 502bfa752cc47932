"""Send what a run came to; that it cannot be sent is a line in the log, and no more."""

import json
import smtplib
import ssl
import time
import urllib.error
import urllib.request
from email.message import EmailMessage
from typing import Any
from urllib.parse import unquote, urlsplit

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.step import secret
from kfp_ddp.runs.notify.outcome import Outcome
from kfp_ddp.runs.notify.settings import Notification

SECONDS = 10.0
PAUSES = (1.0, 3.0)
"""Seconds before each further try of a server that is away."""
_FAILED = ("failed", "cancelled")


def send(notification: Notification, outcome: Outcome) -> list[str]:
    """Tell everybody who is to be told; a line for each channel, without what is secret.

    It raises nothing: who was not told can look into the log.
    """
    failed = outcome.state in _FAILED
    if notification.notify_on == "failure" and not failed:
        return []
    if notification.notify_on == "change" and outcome.state == "unchanged":
        return []
    said = []
    for name, key in notification.keys.items():
        try:
            _send(name, secret(key), notification, outcome)
            said.append(f"{name}: sent")
        except Exception as error:  # noqa: BLE001 - whatever it is, the run has ended well
            said.append(f"warning: {name}: nothing was sent to {key}: {_reason(error)}")
    return said


def _send(name: str, address: str, notification: Notification, outcome: Outcome) -> None:
    if not address:
        raise InputError("the bucket's secret has no such key")
    if name == "notify_smtp":
        _mail(address, notification, outcome)
    else:
        _post_patiently(address, outcome.to_json() if name == "notify_webhook" else _slack(outcome))


def _post_patiently(address: str, body: dict[str, Any]) -> None:
    for pause in (*PAUSES, None):
        try:
            _post(address, body)
            break
        except urllib.error.HTTPError as error:
            if (error.code < 500 and error.code != 429) or pause is None:
                raise
        except OSError:
            if pause is None:
                raise
        time.sleep(pause)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Makes an error of a redirect, which would take what is told elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _post(address: str, body: dict[str, Any]) -> None:
    if urlsplit(address).scheme not in ("http", "https"):
        raise InputError("it holds no address that begins with https://")
    headers = {"Content-Type": "application/json", "User-Agent": "kfp-ddp"}
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)  # noqa: S310
    with urllib.request.build_opener(_NoRedirect()).open(request, timeout=SECONDS):
        pass


def _slack(outcome: Outcome) -> dict[str, str]:
    lines = [f"*{_escaped(outcome.title())}*", *map(_escaped, outcome.lines())]
    return {"text": "\n".join(lines)}


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _mail(address: str, notification: Notification, outcome: Outcome) -> None:
    server = urlsplit(address)
    if server.scheme not in ("smtp", "smtps") or not server.hostname:
        raise InputError("it holds no mail server such as smtp://user:password@host:587")
    mail = EmailMessage()
    mail["Subject"] = f"[kfp-ddp] {outcome.title()}"[:200]
    mail["To"] = notification.notify_email.replace(",", ", ")
    mail["From"] = notification.notify_from or notification.notify_email.partition(",")[0]
    mail.set_content("\n".join([outcome.title(), "", *outcome.lines()]) + "\n")
    context = ssl.create_default_context()
    if server.scheme == "smtps":
        session: smtplib.SMTP = smtplib.SMTP_SSL(
            server.hostname, server.port or 465, timeout=SECONDS, context=context
        )
    else:
        session = smtplib.SMTP(server.hostname, server.port or 587, timeout=SECONDS)
    with session:
        session.ehlo()
        encrypted = server.scheme == "smtps"
        if not encrypted and session.has_extn("starttls"):
            session.starttls(context=context)
            encrypted = True
        if server.username:
            if not encrypted:
                raise InputError("the mail server offers no TLS, so no password is sent to it")
            session.login(unquote(server.username), unquote(server.password or ""))
        session.send_message(mail)


def _reason(error: Exception) -> str:
    """Why, in one line; not what an error says of the address, which may be secret."""
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code}"
    if isinstance(error, urllib.error.URLError):
        error = error.reason if isinstance(error.reason, Exception) else error
    if isinstance(error, smtplib.SMTPResponseException):
        return f"the mail server answered {error.smtp_code}"
    if isinstance(error, smtplib.SMTPException):
        return type(error).__name__
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if isinstance(error, InputError):
        return str(error)
    return type(error).__name__

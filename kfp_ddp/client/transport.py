"""Requests to the KFP API server: each with a time-out, each failure one line of ours."""

import json
import logging
import re
import warnings
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kfp
import kfp_server_api
import urllib3
from kfp_server_api.rest import RESTClientObject

from kfp_ddp.client.connection import own_namespace
from kfp_ddp.client.login import Login
from kfp_ddp.core.config import Connection
from kfp_ddp.core.errors import InputError, RefusedError, ServerError
from kfp_ddp.core.text import one_line

CONNECT_SECONDS = 10.0
LOGINS = "set a token, a cookie or a user of Dex (kfp-ddp config --help tells how)"
# kfp prints links to stdout, where a command's own output goes.
kfp.client.client.print = lambda *_, **__: None


def checked_host(host: str) -> str:
    """The address without a slash at its end.

    Raises:
        InputError: it is none, or holds a password.
    """
    scheme = "http" if re.match(r"(localhost|127\.0\.0\.1)(:|/|$)", host) else "https"
    try:
        parts = urlsplit(host if "://" in host else f"{scheme}://{host}")
        named = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        named = False
    if not named:
        raise InputError(f"host={host!r} is no address: one is as https://kubeflow.example.com")
    if parts.username or parts.password:
        raise InputError("host holds a user or password: set a token, cookie or username instead")
    return parts._replace(query="", fragment="").geturl().rstrip("/")


class Client(kfp.Client):  # type: ignore[misc]
    """kfp.Client with its server, login and namespace as given, reading nobody's home folder."""

    def __init__(self, connection: Connection, host: str, place: str, login: Login) -> None:
        self._connection, self._place = connection, place
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # that servers of KFP 1 are not served
            super().__init__(host=host, namespace="kubeflow")
        api: Any = self._run_api.api_client
        api.rest_client = Transport(self._existing_config, place, connection.timeout, login)
        health = self._healthz_api.healthz_service_get_healthz()
        self.multi_user: bool = bool(health.multi_user)
        answer = json.loads(api.last_response.data)  # kfp-server-api has no field for the version
        self.version = str(answer.get("tag_name", ""))
        self._context_setting["namespace"] = self._namespace() if self.multi_user else ""

    def _namespace(self) -> str:
        found = self._connection.namespace or own_namespace(self._connection.context)
        if not found:
            raise InputError(
                f"KFP at {self._place} has several users: give --namespace, the one of your profile"
            )
        return found

    def _load_config(self, host: str, *_: Any) -> kfp_server_api.Configuration:
        config = kfp_server_api.Configuration()
        config.host = host
        config.ssl_ca_cert = _existing(self._connection.ca_file)
        config.retries = urllib3.Retry(
            total=2, connect=2, read=1, redirect=False, status=0, other=0, backoff_factor=0.2
        )
        return config

    def _load_context_setting_or_default(self) -> None:
        self._context_setting = {"namespace": "asked once the server is reached"}

    def set_user_namespace(self, namespace: str) -> None:
        """Ask for this namespace from now on; nothing is written to the home folder."""
        self._context_setting["namespace"] = namespace


class Transport(RESTClientObject):  # type: ignore[misc]
    """What sends a request, and refuses what is no answer of KFP."""

    def __init__(
        self, config: kfp_server_api.Configuration, place: str, seconds: float, login: Login
    ) -> None:
        super().__init__(config)
        self._place, self._seconds, self._login = place, seconds, login

    def request(self, method: str, url: str, **more: Any) -> Any:
        """The answer, which is JSON.

        Raises:
            RefusedError: it refuses what was asked, or who asked.
            ServerError: there is none, or one of a fault.
        """
        limit = (min(self._seconds, CONNECT_SECONDS), self._seconds)
        more["_request_timeout"] = more.get("_request_timeout") or limit
        more["headers"] = {**more.get("headers", {}), **self._login.headers()}
        try:
            answer = super().request(method, url, **more)
        except kfp_server_api.ApiException as error:
            if not error.status:  # a certificate, the only one of them that has no answer
                raise ServerError(
                    self._silence(urllib3.exceptions.SSLError(error.reason))
                ) from None
            raise self._refusal(error) from None
        except urllib3.exceptions.HTTPError as error:
            raise ServerError(self._silence(error)) from None
        self._check(answer)
        return answer

    def _check(self, answer: Any) -> None:
        """Refuse what is no JSON object."""
        try:
            found = json.loads(answer.data)
        except (ValueError, RecursionError):
            if "json" in (kind := _kind(answer)):
                raise ServerError(self._silent("the answer broke off")) from None
            raise self._stranger(f"with {kind} where KFP answers JSON") from None
        if not isinstance(found, dict):
            raise self._stranger("with JSON that is none of KFP's")

    def _silent(self, said: str) -> str:
        return (
            f"the KFP API server at {self._place} does not answer: {said}; see that it is up and "
            "that --host is its address (kfp-ddp config show)"
        )

    def _silence(self, error: urllib3.exceptions.HTTPError) -> str:
        reason: Any = getattr(error, "reason", None) or error
        if isinstance(reason, urllib3.exceptions.NameResolutionError):
            said = "there is no such host"
        elif isinstance(reason, urllib3.exceptions.NewConnectionError):
            said = one_line(str(reason).rpartition("] ")[2])
        elif isinstance(reason, urllib3.exceptions.TimeoutError):
            said = f"nothing came for {self._seconds:g} s"
        elif isinstance(reason, urllib3.exceptions.ProtocolError):
            said = "the answer broke off"
        elif isinstance(reason, urllib3.exceptions.SSLError):
            said = f"{one_line(str(reason))}; --ca-file gives the certificates to trust"
        else:
            said = one_line(str(reason))
        return self._silent(said)

    def _refusal(self, error: kfp_server_api.ApiException) -> RefusedError | ServerError:
        if error.status in (301, 302, 303, 307, 308):
            to = str(error.headers.get("location", "another address"))
            if to.split("?")[0].replace("https:", "http:").startswith(f"{self._place}/"):
                return self._stranger(f"by sending on to {to.partition('/apis/')[0]}")
            return self._stranger("by asking for a login")
        code, said = int(error.status), _message(error.body)
        if code == HTTPStatus.UNAUTHORIZED:
            what = f"refuses {self._login.name} (401: {said}): it has expired or is for another"
            if not self._login:
                what = f"asks for a login (401: {said}) and none is set; {LOGINS}"
            return RefusedError(f"{self._place} {what}", 401)
        if code == HTTPStatus.FORBIDDEN:
            return RefusedError(
                f"KFP does not allow this to {self._login.name} (403: {said}); see that "
                "--namespace is one of yours",
                403,
            )
        if code >= HTTPStatus.INTERNAL_SERVER_ERROR or code == HTTPStatus.TOO_MANY_REQUESTS:
            return ServerError(f"the KFP API server failed ({code}): {said}; try again later")
        return RefusedError(f"KFP refuses this ({code}): {said}", code)

    def _stranger(self, how: str) -> RefusedError:
        used = f"{self._login.name} is not taken, or" if self._login else f"{LOGINS}, or"
        return RefusedError(
            f"{self._place} answers {how}: {used} --host should be the address of KFP's API, which "
            "often ends in /pipeline",
            401,
        )


def _existing(path: str) -> str | None:
    if path and not Path(path).is_file():
        raise InputError(f"ca_file={path!r} is no file")
    return path or None


def _message(body: Any) -> str:
    """What an answer says for people: both shapes that KFP has, in one line, without its stack."""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else str(body or "")
    try:
        answer = json.loads(text)
    except ValueError:
        answer = re.sub(r"<[^>]*>", " ", text)
    if isinstance(answer, dict):
        found = answer.get("message") or answer.get("error_message") or answer.get("error") or ""
        details = answer.get("details") or []
        inner = [
            str(each["message"]) for each in details if isinstance(each, dict) and "message" in each
        ]
        answer = inner[0] if inner else found
    return one_line(str(answer)) or "it does not say why"


def _kind(answer: Any) -> str:
    return str(answer.getheader("content-type") or "bytes").split(";")[0]


logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # each retry is a line else

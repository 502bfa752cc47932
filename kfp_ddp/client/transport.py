"""Requests to the KFP API server: each has a timeout, each failure is an error of one line."""

import json
import logging
import re
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import kfp_server_api
import urllib3
from kfp_server_api.rest import RESTClientObject

from kfp_ddp.client.login import Login
from kfp_ddp.core.errors import InputError, RefusedError, ServerError
from kfp_ddp.core.settings import mapping_in
from kfp_ddp.core.text import one_line

CONNECT_SECONDS = 10.0
LOGINS = "set a token, a cookie or a Dex user (see kfp-ddp config --help)"


def checked_host(host: str) -> str:
    """Return the URL without a slash at its end.

    Raises:
        InputError: the URL is invalid, or contains a password.
    """
    scheme = "http" if re.match(r"(localhost|127\.0\.0\.1)(:|/|$)", host) else "https"
    try:
        parts = urlsplit(host if "://" in host else f"{scheme}://{host}")
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise InputError(f"host={host!r} is not a URL such as https://kubeflow.example.com")
    if parts.username or parts.password:
        raise InputError(
            "host contains a user or password: set a token, cookie or username instead"
        )
    return parts._replace(query="", fragment="").geturl().rstrip("/")


def checked_ca_file(path: str) -> str:
    """Return the path of a file of certificates; raise InputError if it does not exist."""
    if path and not Path(path).is_file():
        raise InputError(f"ca_file={path!r} is not a file")
    return path


class Transport(RESTClientObject):  # type: ignore[misc]
    """Sends requests with a login, and refuses answers that KFP did not write."""

    def __init__(
        self, config: kfp_server_api.Configuration, server: str, seconds: float, login: Login
    ) -> None:
        config.proxy = _proxy(config.host)
        super().__init__(config)
        self._server, self._seconds, self._login = server, seconds, login

    def request(self, method: str, url: str, **more: Any) -> Any:
        """Return the answer, whose body is a JSON object."""
        limit = (min(self._seconds, CONNECT_SECONDS), self._seconds)
        more["_request_timeout"] = more.get("_request_timeout") or limit
        more["headers"] = {**more.get("headers", {}), **self._login.headers()}
        try:
            answer = super().request(method, url, **more)
        except kfp_server_api.ApiException as error:
            if not error.status:  # an invalid certificate, the only one without an answer
                raise self._no_answer(urllib3.exceptions.SSLError(error.reason)) from None
            raise self._refusal(error) from None
        except urllib3.exceptions.HTTPError as error:
            raise self._no_answer(error) from None
        self._check(answer)
        return answer

    def _check(self, answer: Any) -> None:
        """Refuse a body that is not a JSON object."""
        try:
            document = json.loads(answer.data)
        except (ValueError, RecursionError):
            kind = str(answer.getheader("content-type") or "bytes").split(";")[0]
            if "json" in kind:
                raise self._unreachable("the answer was cut off") from None
            raise self._not_kfp(f"with {kind} instead of JSON") from None
        if not isinstance(document, dict):
            raise self._not_kfp("with JSON that KFP does not write")

    def _unreachable(self, reason: str) -> ServerError:
        return ServerError(
            f"the KFP API server at {self._server} does not answer: {reason}; check that it is up "
            "and that --host is its address (kfp-ddp config show)"
        )

    def _no_answer(self, error: urllib3.exceptions.HTTPError) -> ServerError:
        reason: Any = getattr(error, "reason", None) or error
        if isinstance(reason, urllib3.exceptions.NameResolutionError):
            return self._unreachable("host not found")
        if isinstance(reason, urllib3.exceptions.NewConnectionError):
            return self._unreachable(one_line(str(reason).rpartition("] ")[2]))
        if isinstance(reason, urllib3.exceptions.TimeoutError):
            return self._unreachable(f"timeout after {self._seconds:g} s")
        if isinstance(reason, urllib3.exceptions.ProtocolError):
            return self._unreachable("the answer was cut off")
        if isinstance(reason, urllib3.exceptions.SSLError):
            return self._unreachable(
                f"{one_line(reason)}; set the certificates to trust by --ca-file"
            )
        return self._unreachable(one_line(reason))

    def _refusal(self, error: kfp_server_api.ApiException) -> RefusedError | ServerError:
        if error.status in (301, 302, 303, 307, 308):
            target = str(error.headers.get("location", "another address"))
            if target.split("?")[0].replace("https:", "http:").startswith(f"{self._server}/"):
                return self._not_kfp(f"with a redirect to {target.partition('/apis/')[0]}")
            return self._not_kfp("with a redirect to a login")
        code, message = int(error.status), _message(error.body)
        if code == HTTPStatus.UNAUTHORIZED:
            what = f"rejects {self._login.name} (401: {message}): expired, or issued for another"
            if not self._login:
                what = f"requires a login (401: {message}), and none is set; {LOGINS}"
            return RefusedError(f"{self._server} {what}", 401)
        if code == HTTPStatus.FORBIDDEN:
            return RefusedError(
                f"KFP does not allow this for {self._login.name} (403: {message}); check that "
                "--namespace is one of yours",
                403,
            )
        if code == HTTPStatus.NOT_FOUND and not mapping_in(error.body):
            return RefusedError(
                f"{self._server} has no KFP API (404): --host should be its address; does it end "
                "in /pipeline?",
                HTTPStatus.MISDIRECTED_REQUEST,
            )
        if code >= HTTPStatus.INTERNAL_SERVER_ERROR or code == HTTPStatus.TOO_MANY_REQUESTS:
            return ServerError(f"the KFP API server failed ({code}): {message}; try again later")
        return RefusedError(f"KFP refuses this ({code}): {message}", code)

    def _not_kfp(self, how: str) -> RefusedError:
        login = f"{self._login.name} is not accepted, or" if self._login else f"{LOGINS}, or"
        return RefusedError(
            f"{self._server} answers {how}: {login} --host should be the address of KFP's API, "
            "which often ends in /pipeline",
            401,
        )


def _proxy(host: str) -> str | None:
    """Return the proxy of HTTPS_PROXY, which sees no login; None for http and by NO_PROXY."""
    parts = urlsplit(host)
    if parts.scheme != "https" or proxy_bypass(parts.hostname or ""):
        return None
    return getproxies().get("https")


def _message(body: Any) -> str:
    """Return an answer's message in one line, without a stack trace; KFP has two shapes of it."""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else str(body or "")
    try:
        document = json.loads(text)
    except ValueError:
        document = re.sub(r"<[^>]*>", " ", text)
    if not isinstance(document, dict):
        return one_line(str(document)) or "no reason given"
    details = document.get("details") or []
    inner = [one["message"] for one in details if isinstance(one, dict) and "message" in one]
    outer = document.get("message") or document.get("error_message") or document.get("error")
    return one_line(str(inner[0] if inner else outer or "")) or "no reason given"


logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # or each retry is a warning

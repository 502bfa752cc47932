"""The parts of kfp that this package uses, read at kfp 2.17.0 and kfp-server-api 2.17.3.

No other module reaches into kfp: check this one when kfp is upgraded. Each request has a timeout,
each failure is an error of one line.
"""

import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import kfp
import kfp_server_api
import urllib3
from kfp_server_api.rest import RESTClientObject

from kfp_ddp.client.kfp.login import Login
from kfp_ddp.core.errors import InputError, RefusedError, ServerError
from kfp_ddp.core.settings import mapping_in
from kfp_ddp.core.text import from_json, one_line

CONNECT_SECONDS = 10.0
CUT_OFF = "the answer was cut off"
LOGINS = "set a token, a cookie or a Dex user (see kfp-ddp config --help)"


def checked_host(host: str) -> str:
    """Return the URL without a slash at its end; InputError if it is invalid, or has a password."""
    scheme = "http" if re.match(r"(localhost|127\.0\.0\.1)(:|/|$)", host) else "https"
    try:
        parts = urlsplit(host if "://" in host else f"{scheme}://{host}")
        usable = parts.hostname and parts.port != 0  # reading the port may raise
        valid = usable and parts.scheme in ("http", "https")
    except ValueError:
        valid = False
    if not valid:
        raise InputError(f"host={host!r} is not a URL such as https://kubeflow.example.com")
    if parts.username or parts.password:
        raise InputError(
            "host contains a user or password: set a token, cookie or username instead"
        )
    return parts._replace(query="", fragment="").geturl().rstrip("/")


class Transport(RESTClientObject):  # type: ignore[misc]
    """Sends requests with a login, and refuses answers that KFP did not write."""

    def __init__(
        self, config: kfp_server_api.Configuration, server: str, seconds: float, login: Login
    ) -> None:
        parts = urlsplit(config.host)
        if parts.scheme == "https" and not proxy_bypass(parts.hostname or ""):
            config.proxy = getproxies().get("https")  # of HTTPS_PROXY, which sees no login
        super().__init__(config)
        self._server = server
        self._seconds = seconds
        self._login = login

    def request(self, method: str, url: str, **more: Any) -> Any:
        """Return the answer; a login that has expired is renewed once."""
        try:
            return self._request(method, url, **more)
        except RefusedError as error:
            if error.status != HTTPStatus.UNAUTHORIZED or self._login.renew is None:
                raise
        self._login = self._login.renew()
        return self._request(method, url, **more)

    def _request(self, method: str, url: str, **more: Any) -> Any:
        """Return the answer; refuse one whose body is not a JSON object, or a page if unread."""
        answer = self._send(method, url, **more)
        kind = str(answer.getheader("content-type") or "bytes").split(";")[0]
        if more.get("_preload_content", True):
            self._check_body(answer.data, kind)
        elif kind == "text/html":  # a login, or the UI, which answers so for any path
            answer.close()
            raise self._not_kfp("with a page")
        return answer

    def _send(self, method: str, url: str, **more: Any) -> Any:
        """Return the answer of the server, unchecked; raise an error of one line without one."""
        limit = (min(self._seconds, CONNECT_SECONDS), self._seconds)
        more["_request_timeout"] = more.get("_request_timeout") or limit
        more["headers"] = {**more.get("headers", {}), **self._login.headers()}
        try:
            return super().request(method, url, **more)
        except kfp_server_api.ApiException as error:
            if not error.status:  # an invalid certificate, the only one without an answer
                raise self.no_answer(urllib3.exceptions.SSLError(error.reason)) from None
            raise self._refusal(error) from None
        except urllib3.exceptions.HTTPError as error:
            raise self.no_answer(error) from None

    def _check_body(self, data: bytes, kind: str) -> None:
        """Raise the error of a body that is not a JSON object; `kind` is its content type."""
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            if "json" in kind:
                raise self.no_answer(CUT_OFF) from None
            raise self._not_kfp(f"with {kind} instead of JSON") from None
        if not isinstance(document, dict):
            raise self._not_kfp("with JSON that KFP does not write")

    def no_answer(self, error: urllib3.exceptions.HTTPError | str) -> ServerError:
        """Return the error of a request without an answer, or with a part of one."""
        reason: Any = getattr(error, "reason", None) or error
        text = one_line(reason)
        if isinstance(reason, urllib3.exceptions.NameResolutionError):
            text = "host not found"
        elif isinstance(reason, urllib3.exceptions.NewConnectionError):
            text = one_line(str(reason).rpartition("] ")[2])
        elif isinstance(reason, urllib3.exceptions.TimeoutError):
            text = f"timeout after {self._seconds:g} s"
        elif isinstance(reason, urllib3.exceptions.ProtocolError):
            text = CUT_OFF
        elif isinstance(reason, urllib3.exceptions.SSLError):
            text += "; set the certificates to trust by --ca-file"
        return ServerError(
            f"the KFP API server at {self._server} does not answer: {text}; check that it is up "
            "and that --host is its address (kfp-ddp config show)"
        )

    def _refusal(self, error: kfp_server_api.ApiException) -> RefusedError | ServerError:
        """Return the error of an answer that is not a success."""
        if error.status in (301, 302, 303, 307, 308):
            return self._redirected(error)
        code = int(error.status)
        message = _message(error.body)
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
        temporary = code >= HTTPStatus.INTERNAL_SERVER_ERROR or code == HTTPStatus.TOO_MANY_REQUESTS
        if temporary:
            return ServerError(f"the KFP API server failed ({code}): {message}; try again later")
        return RefusedError(f"KFP refuses this ({code}): {message}", code)

    def _redirected(self, error: kfp_server_api.ApiException) -> RefusedError:
        target = str(error.headers.get("location", "another address"))
        address = target.split("?")[0].replace("https:", "http:")
        # The same host, which wants https or another path.
        if address.startswith(f"{self._server}/"):
            return self._not_kfp(f"with a redirect to {target.partition('/apis/')[0]}")
        return self._not_kfp("with a redirect to a login")

    def _not_kfp(self, how: str) -> RefusedError:
        login = f"{LOGINS}, or"
        if self._login:
            login = f"{self._login.name} is not accepted, or"
        return RefusedError(
            f"{self._server} answers {how}: {login} --host should be the address of KFP's API, "
            "which often ends in /pipeline",
            401,
        )


def _message(body: Any) -> str:
    """Return an answer's message in one line, without a stack trace; KFP has two shapes of it."""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else str(body or "")
    try:
        document = from_json(text)
    except ValueError:
        document = re.sub(r"<[^>]*>", " ", text)
    if isinstance(document, dict):
        document = _field_of(document)
    return one_line(str(document)) or "no reason given"


def _field_of(document: Mapping[str, Any]) -> Any:
    """Return the message of an error's document: that of its details is plain, without a trace."""
    for detail in document.get("details") or []:
        if isinstance(detail, dict) and "message" in detail:
            return detail["message"]
    for name in ("message", "error_message", "error"):
        if document.get(name):
            return document[name]
    return ""


logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # or each retry is a warning


class Client(kfp.Client):  # type: ignore[misc]
    """kfp.Client that neither uses the home folder nor prints links to stdout."""

    def __init__(self, host: str, ca_file: str, server: str, seconds: float, login: Login) -> None:
        """Connect to a checked host, and read the server's health; raise as `open_client` does.

        `server` is its name in messages, `seconds` the timeout of a request.
        """
        if ca_file and not Path(ca_file).is_file():
            raise InputError(f"ca_file={ca_file!r} is not a file")
        self._ca_file = ca_file or None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # KFP 1 is not supported
            super().__init__(host=host, namespace="kubeflow")
        self.api: Any = self._run_api.api_client
        self.api.rest_client = Transport(self._existing_config, server, seconds, login)
        self.run_service: Any = self._run_api
        self.pipeline_service: Any = self._pipelines_api
        self.upload_service: Any = self._upload_api
        self.schedule_service: Any = self._recurring_run_api
        health = self._healthz_api.healthz_service_get_healthz()
        self.multi_user: bool = bool(health.multi_user)
        body = json.loads(self.api.last_response.data)  # kfp-server-api has no field for this
        self.version = str(body.get("tag_name", ""))
        self.set_user_namespace("")
        self.new_experiment = ""

    def _load_config(self, host: str, *_: Any) -> kfp_server_api.Configuration:
        config = kfp_server_api.Configuration()
        config.host = host
        config.ssl_ca_cert = self._ca_file
        config.retries = urllib3.Retry(
            total=2, connect=2, read=1, redirect=False, status=0, other=0, backoff_factor=0.2
        )
        return config

    def _load_context_setting_or_default(self) -> None:
        # Without a namespace kfp sends a request here, before the login is set.
        self._context_setting = {"namespace": "not known yet"}

    def set_user_namespace(self, namespace: str) -> None:
        """Use this namespace from now on; kfp's own also writes it to the home folder."""
        self._context_setting["namespace"] = namespace

    def blocks(self, path: str, query: dict[str, str], **parts: str) -> Iterator[bytes]:
        """Yield the blocks of an answer that is not JSON, as they arrive; `parts` of the path."""
        more: Any = {"auth_settings": ["Bearer"], "_preload_content": False}
        answer = self.api.call_api(path, "GET", parts, list(query.items()), **more)
        try:
            while block := answer.read1(65536):
                yield block
        except urllib3.exceptions.HTTPError as error:
            raise self.api.rest_client.no_answer(error) from None
        finally:
            answer.close()

    def create_experiment(self, name: str) -> Any:
        """Return an experiment, created (`new_experiment`) if missing; kfp's own prints a link."""
        namespace = self.get_user_namespace()
        try:
            return self.get_experiment(experiment_name=name, namespace=namespace)
        except ValueError as error:
            if not str(error).startswith("No experiment is found with name"):
                raise
        experiment = kfp_server_api.V2beta1Experiment(display_name=name, namespace=namespace)
        self.new_experiment = name
        return self._experiment_api.experiment_service_create_experiment(experiment=experiment)

"""Logins: a token, a session cookie, a Dex user, or Google's Identity-Aware Proxy."""

import functools
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

from kfp_ddp.core.config import Connection
from kfp_ddp.core.errors import InputError, RefusedError, ServerError
from kfp_ddp.core.text import one_line
from kfp_ddp.k8s.api import NAMESPACE_FILE

if TYPE_CHECKING:
    import requests

IN_CLUSTER_TOKEN = "/var/run/secrets/kubeflow/pipelines/token"  # noqa: S105
LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1")
SERVICE = re.compile(r"[\w-]+|ml-pipeline[\w-]*\.[\w-]+|[\w-]+\.[\w-]+\.svc(\.[\w.-]+)?")
"""Names of services in this cluster; of two labels only KFP's, as example.com has two."""
IAP_SETUP = "https://cloud.google.com/iap/docs/authentication-howto"
FORM = re.compile(r"<form[^>]*?\baction=[\"']([^\"']*)[\"']", re.IGNORECASE)
PASSWORD_FIELD = re.compile(r"<input[^>]*\btype=[\"']password[\"']", re.IGNORECASE)
LINK = re.compile(r"href=[\"']([^\"']*/auth/local[^\"']*)[\"']", re.IGNORECASE)
HIDDEN = re.compile(
    r"<input[^>]*\btype=[\"']hidden[\"'][^>]*\bname=[\"']([^\"']+)[\"'][^>]*\bvalue=[\"']([^\"']*)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Login:
    """Credentials that are sent with each request."""

    name: str
    """For messages."""
    token: str = ""
    token_file: str = ""
    """Read for each request, since a mounted token is renewed."""
    cookie: str = ""
    renew: "Callable[[], Login] | None" = None
    """Returns another login when this one has expired."""

    def __bool__(self) -> bool:
        return bool(self.token or self.token_file or self.cookie)

    def headers(self) -> dict[str, str]:
        """Return the headers of the next request; raise InputError if the secret cannot be sent."""
        token = self.token
        if self.token_file and not token:
            token = _secret("KFP_DDP_TOKEN", self.token_file)
        secret = self.cookie or token
        if not (secret.isascii() and secret.isprintable()):  # the error of http would show it
            raise InputError(
                f"{self.name} contains line breaks or non-ASCII characters: give it in one line, "
                "as it was issued"
            )
        if self.cookie:
            return {"Cookie": secret}
        if secret:
            return {"Authorization": f"Bearer {secret}"}
        return {}


def check_private(host: str) -> None:
    """Raise InputError for an address at which others could read the login that is sent."""
    parts = urlsplit(host)
    name = parts.hostname or ""
    if parts.scheme == "https" or LOOPBACK.fullmatch(name):
        return
    if NAMESPACE_FILE.exists() and SERVICE.fullmatch(name):
        return  # it does not leave the cluster
    raise InputError(
        f"a login is not sent to {host} without https, as others could read it: give an https "
        "address, or that of a forwarded port, which --port-forward opens to KFP"
    )


def choose(connection: Connection, host: str) -> Login:
    """Return the configured login, or that of this pod's service account, or an empty one."""
    if connection.token_file:
        _secret("KFP_DDP_TOKEN", connection.token_file)
        return Login(f"the token in {connection.token_file}", token_file=connection.token_file)
    token = os.environ.get("KFP_DDP_TOKEN", "").strip()
    if token:
        return Login("the token of KFP_DDP_TOKEN", token=token)
    cookie = _secret("KFP_DDP_COOKIE", connection.cookie_file).strip()
    if cookie:
        origin = connection.cookie_file or "KFP_DDP_COOKIE"
        return Login(f"the cookie of {origin}", cookie=cookie)
    again = functools.partial(choose, connection, host)
    if connection.username:
        password = _secret("KFP_DDP_PASSWORD", connection.password_file)
        if not password:
            raise InputError(
                f"there is no password for {connection.username}: set KFP_DDP_PASSWORD or "
                "--password-file"
            )
        cookie = _dex_session(host, connection, password)
        return Login(f"Dex, as {connection.username}", cookie=cookie, renew=again)
    if connection.iap_client_id:
        token = _iap_token(connection.iap_client_id)
        return Login("Identity-Aware Proxy", token=token, renew=again)
    mounted = os.environ.get("KF_PIPELINES_SA_TOKEN_PATH") or IN_CLUSTER_TOKEN
    if Path(mounted).exists():
        return Login("the token of this pod's service account", token_file=mounted)
    return Login("no login")


def _secret(variable: str, path: str) -> str:
    """Return the content of a file, or of an environment variable; '' if neither is set."""
    if not path:
        return os.environ.get(variable, "")
    try:
        secret = Path(path).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InputError(f"cannot read {path}: {reason}") from None
    if not secret:
        raise InputError(f"{path} is empty: write into it what {variable} would hold")
    return secret


def _dex_session(host: str, connection: Connection, password: str) -> str:
    """Fill in the form of a Kubeflow platform's Dex, and return the cookie of the session."""
    import requests

    check_private(host)
    with requests.Session() as browser:
        browser.verify = connection.ca_file or True
        browser.trust_env = False  # a bundle of the environment would go before ca_file
        if host.startswith("https://"):  # else a proxy could read the password
            browser.proxies = requests.utils.get_environ_proxies(host)
        try:
            page = _login_page(browser, host, connection.timeout)
            _log_in(browser, page, connection, password)
        except requests.RequestException as error:
            why = type(error).__name__
            raise ServerError(f"the login at {host} does not answer: {why}; try again") from None
        request = requests.Request("GET", f"{host}/apis").prepare()
        cookie = requests.cookies.get_cookie_header(browser.cookies, request)  # of this host alone
    if not cookie:
        raise ServerError(f"the login of {connection.username} opened no session at {host}")
    return str(cookie)


def _login_page(browser: "requests.Session", host: str, seconds: float) -> "requests.Response":
    page = browser.get(f"{host}/", timeout=seconds)
    if page.status_code in (401, 403):  # a proxy that redirects only its own page to the login
        page = browser.get(urljoin(host, "/oauth2/start?rd=/"), timeout=seconds)
    link = LINK.search(page.text)
    if link and not PASSWORD_FIELD.search(page.text):  # Dex offers several ways to log in
        page = browser.get(urljoin(page.url, unescape(link[1])), timeout=seconds)
    if not PASSWORD_FIELD.search(page.text):
        raise InputError(
            f"{host} has no form for a user and a password: leave out username, or give a token "
            "or a cookie"
        )
    return page


def _log_in(
    browser: "requests.Session", page: "requests.Response", connection: Connection, password: str
) -> None:
    """Send the form of a login page; raise RefusedError if the password is wrong."""
    form = FORM.search(page.text)
    action = unescape(form[1]) if form else ""
    target = urljoin(page.url, action)
    for url in (page.url, target):
        check_private(url.partition("?")[0])
    seconds = connection.timeout
    fields = {"login": connection.username, "password": password}
    answer = browser.post(target, data=fields, timeout=seconds, allow_redirects=False)
    if answer.status_code in (307, 308):
        raise InputError(f"{target.partition('?')[0]} sends the password on to another address")
    if answer.next is not None:
        answer = browser.get(str(answer.next.url), timeout=seconds)
    if PASSWORD_FIELD.search(answer.text) or answer.status_code in (401, 403):
        raise RefusedError(
            f"Dex refuses {connection.username}: the user or the password is wrong", 401
        )
    if urlsplit(answer.url).path.endswith("/approval"):
        approval = dict(HIDDEN.findall(answer.text)) | {"approval": "approve"}
        answer = browser.post(answer.url, data=approval, timeout=seconds)
    if answer.status_code >= 500:
        raise ServerError(f"the login of {connection.username} ended with {answer.status_code}")


def _iap_token(client_id: str) -> str:
    from google.auth import exceptions
    from kfp.client import auth

    other = os.environ.get("KF_PIPELINES_APP_OAUTH2_CLIENT_ID")
    secret = os.environ.get("KF_PIPELINES_APP_OAUTH2_CLIENT_SECRET")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            token, _ = auth.get_auth_token(client_id, other, secret)
    except exceptions.GoogleAuthError as error:
        message = one_line(error.args[0] if error.args else error)
        raise InputError(f"no token for Identity-Aware Proxy: {message}") from None
    if not token:
        raise InputError(
            "no token for Identity-Aware Proxy: a user's own credentials are not enough; set "
            "GOOGLE_APPLICATION_CREDENTIALS to a service account's key, or both of "
            f"KF_PIPELINES_APP_OAUTH2_CLIENT_ID and _SECRET ({IAP_SETUP})"
        )
    return str(token)

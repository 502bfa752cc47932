"""A session at a Kubeflow platform: the form of its Dex, filled in as a browser would."""

import re
from html import unescape
from urllib.parse import urljoin, urlsplit

import requests

from kfp_ddp.core.config import Connection
from kfp_ddp.core.errors import InputError, RefusedError, ServerError

FORM = re.compile(r"<form[^>]*?\baction=[\"']([^\"']*)[\"']", re.IGNORECASE)
PASSWORD_FIELD = re.compile(r"<input[^>]*\btype=[\"']password[\"']", re.IGNORECASE)
LINK = re.compile(r"href=[\"']([^\"']*/auth/local[^\"']*)[\"']", re.IGNORECASE)
HIDDEN = re.compile(
    r"<input[^>]*\btype=[\"']hidden[\"'][^>]*\bname=[\"']([^\"']+)[\"'][^>]*\bvalue=[\"']([^\"']*)",
    re.IGNORECASE,
)


def session(host: str, connection: Connection, password: str) -> str:
    """The cookie of a session of `connection.username`.

    Raises:
        InputError: no login form stands before this host.
        RefusedError: the user or the password is wrong.
        ServerError: there is no answer.
    """
    with requests.Session() as browser:
        browser.verify = connection.ca_file or True
        try:
            form = _login_page(browser, host, connection.timeout)
            return _log_in(browser, form, connection, password)
        except requests.RequestException as error:
            why = type(error).__name__
            raise ServerError(f"the login at {host} does not answer: {why}; try again") from None


def _login_page(browser: requests.Session, host: str, seconds: float) -> requests.Response:
    page = browser.get(f"{host}/", timeout=seconds)
    if page.status_code in (401, 403):  # a proxy that sends only its own page on to the login
        page = browser.get(urljoin(host, "/oauth2/start?rd=/"), timeout=seconds)
    if not PASSWORD_FIELD.search(page.text) and (link := LINK.search(page.text)):
        page = browser.get(urljoin(page.url, unescape(link[1])), timeout=seconds)
    if not PASSWORD_FIELD.search(page.text):
        raise InputError(
            f"{host} shows no form for a user and a password: leave username away, or give a token "
            "or a cookie"
        )
    if urlsplit(host).scheme == "https" and urlsplit(page.url).scheme != "https":
        raise InputError(f"{page.url.partition('?')[0]} asks for the password without https")
    return page


def _log_in(
    browser: requests.Session, page: requests.Response, connection: Connection, password: str
) -> str:
    action = FORM.search(page.text)
    target = urljoin(page.url, unescape(action[1]) if action else "")
    filled = {"login": connection.username, "password": password}
    answer = browser.post(target, data=filled, timeout=connection.timeout)
    if PASSWORD_FIELD.search(answer.text) or answer.status_code in (401, 403):
        raise RefusedError(
            f"Dex refuses {connection.username}: the user or the password is wrong", 401
        )
    if urlsplit(answer.url).path.endswith("/approval"):
        granted = dict(HIDDEN.findall(answer.text)) | {"approval": "approve"}
        answer = browser.post(answer.url, data=granted, timeout=connection.timeout)
    if answer.status_code >= requests.codes.server_error or not browser.cookies:
        raise ServerError(f"the login of {connection.username} ended with {answer.status_code}")
    return "; ".join(f"{each.name}={each.value}" for each in browser.cookies)

"""A stand-in for Dex and the proxy of a Kubeflow platform: login by a form, session by a cookie.

Its redirects and the names of its fields are those of Dex's own password form; what it
passes on goes to the contract server below `/pipeline`.
"""

import contextlib
import json
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.error import HTTPError
from urllib.parse import parse_qs, urlsplit

from tests.serving import Handler, serving_by

FORM = """<html><form method="post" action="{}">
<input type="text" name="login"/><input type="password" name="password"/></form></html>"""
CHOICE = '<html><a href="/dex/auth/local?client_id=x&amp;state=abc">Log in with Email</a></html>'


@dataclass
class Dex:
    """What it asks for, and what it saw."""

    behind: str
    """Address of the server that it stands before."""
    password: str = "correct horse"
    session: str = "MTY1-session"
    several: bool = False
    """Whether there are several ways to log in, to choose from."""
    approval: bool = False
    """Whether the user is asked to grant access after the login."""
    action: str = "/dex/auth/local/login?back=&amp;state=abc"
    """Where the form sends the password."""
    resent: bool = False
    """Whether the password is sent on by a 307."""
    url: str = ""
    cookies: list[str] = field(default_factory=list)
    """Those of requests for the API."""
    posted: list[dict[str, list[str]]] = field(default_factory=list)


@contextlib.contextmanager
def guarding(behind: str, **more: Any) -> Iterator[Dex]:
    """Stand before a server until the block ends."""
    dex = Dex(behind, **more)
    handler = type("Handler", (_Handler,), {"dex": dex})
    with serving_by(handler) as dex.url:
        yield dex


class _Handler(Handler):
    dex: Dex
    lock = threading.Lock()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/dex/auth":
            self._page(CHOICE if self.dex.several else FORM.format(self.dex.action))
        elif path == "/dex/auth/local":
            self._page(FORM.format(self.dex.action))
        elif path == "/dex/approval":
            hidden = '<form method="post"><input type="hidden" name="req" value="abc"/></form>'
            self._page(f"<html>{hidden}</html>")
        elif path == "/oauth2/callback":
            cookie = f"oauth2_proxy_kubeflow={self.dex.session}; Path=/; HttpOnly"
            self.answer(303, Location="/", Set_Cookie=cookie)
        elif f"oauth2_proxy_kubeflow={self.dex.session}" not in self.headers.get("Cookie", ""):
            self.answer(303, Location="/dex/auth?client_id=x&state=abc")
        elif path.startswith("/pipeline/apis"):
            self.dex.cookies.append(self.headers["Cookie"])
            self._pass_on()
        else:
            self._page("<html>Kubeflow</html>")

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        with self.lock:
            self.dex.posted.append(form)
        if urlsplit(self.path).path == "/dex/approval":
            assert form == {"req": ["abc"], "approval": ["approve"]}, form
            self.answer(303, Location="/oauth2/callback")
        elif self.dex.resent:
            self.answer(307, Location="http://127.0.0.1:1/elsewhere")
        elif form.get("password") != [self.dex.password]:
            self._page(FORM.format(self.dex.action))
        else:
            target = "/dex/approval" if self.dex.approval else "/oauth2/callback"
            self.answer(303, Location=target, Set_Cookie="dex=of-the-provider; Path=/dex")

    def _pass_on(self) -> None:
        try:
            with urllib.request.urlopen(self.dex.behind + self.path[len("/pipeline") :]) as answer:
                self.answer(200, json.load(answer))
        except HTTPError as error:
            self.answer(error.code, json.load(error))

    def _page(self, text: str) -> None:
        self.answer(200, text.encode(), Content_Type="text/html")

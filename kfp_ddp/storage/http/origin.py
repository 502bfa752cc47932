"""Addresses of servers, requests to them, and their credentials."""

import base64
import functools
import os
import re
import ssl
import sys
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from kfp_ddp.core.errors import InputError

_PLAIN = re.compile(r"[A-Za-z0-9._~/-]*")
_TARGET = re.compile(r"/[!-~]*")
_PARTS = re.compile(r"([^/?#]*)([^?#]*)(.*)", re.DOTALL)
_LOOPBACK = re.compile(r"127\.\d+\.\d+\.\d+|::1")
_UNQUOTED = "".join(map(chr, range(33, 127)))


@functools.cache
def tls(authorities: str) -> ssl.SSLContext:
    """Return the TLS settings, once, as it takes 20 ms; `authorities` is a file, a folder or ''."""
    if os.path.isdir(authorities):
        return ssl.create_default_context(capath=authorities)
    return ssl.create_default_context(cafile=authorities or None)


@dataclass(frozen=True)
class Origin:
    """A server: http or https, host and port, the proxy to it, and the authorities of `tls`."""

    secure: bool
    host: str
    port: int
    proxy: str = field(default="", compare=False)
    authorities: str = field(default="", compare=False)

    @classmethod
    def of(cls, url: str, authorities: str = "") -> "Origin":
        """Return the server of an address; raise InputError for an invalid one."""
        try:
            parts = urlsplit(url)
            secure = parts.scheme == "https"
            port = parts.port or _default_port(secure)
            host = parts.hostname or ""
            host = host if ":" in host else host.encode("idna").decode()
        except ValueError as error:
            raise InputError(f"{display(url)!r} is not an address; check host and port") from error
        if parts.scheme not in ("http", "https") or not host:
            raise InputError(f"{display(url)!r} is not an address; give it as https://host/path")
        return cls(secure, host, port, _proxy(parts.scheme, host, port), authorities)

    @functools.cached_property
    def authority(self) -> bytes:
        """The value of the header Host, without a default port."""
        port = 0 if self.port == _default_port(self.secure) else self.port
        return _authority(self.host, port)

    @property
    def exposed(self) -> bool:
        """Whether the network can read and change the traffic."""
        return not self.secure and self.host != "localhost" and not _LOOPBACK.fullmatch(self.host)

    def tunnel(self) -> tuple[str, int, bytes]:
        """Return host and port of the proxy, and the request for a connection to this server."""
        parts = urlsplit(self.proxy if "//" in self.proxy else f"//{self.proxy}")
        if parts.scheme not in ("", "http"):
            raise InputError(
                f"proxy {display(self.proxy)} uses {parts.scheme}, which is not supported: give "
                "http://host:port"
            )
        to = _authority(self.host, self.port)
        login = credentials(parts, b"Proxy-Authorization")
        request = b"CONNECT %b HTTP/1.1\r\nHost: %b\r\n%b\r\n" % (to, to, login)
        return parts.hostname or "", parts.port or 80, request


class Request(NamedTuple):
    """A GET; `headers` and `secret` are complete lines, and `secret` is for this server alone."""

    origin: Origin
    target: str
    limit: int
    headers: bytes = b""
    secret: bytes = b""

    def encoded(self) -> bytes:
        """Return the bytes to send."""
        return b"GET %b HTTP/1.1\r\nHost: %b\r\n%b%b\r\n" % (
            self.target.encode("ascii"),
            self.origin.authority,
            self.secret,
            self.headers,
        )

    def redirected(self, location: str) -> "Request":
        """Return the request for another address, which may be relative; raise InputError."""
        scheme = "https" if self.origin.secure else "http"
        current = f"{scheme}://{self.origin.authority.decode()}{self.target}"
        try:
            address = urljoin(current, location)
        except ValueError:
            address = location
        origin = Origin.of(address, self.origin.authorities)
        if self.origin.secure and not origin.secure:
            raise InputError(
                f"{self.origin.host} redirects from https to http, to {origin.host}; "
                "give the address of a server that stays with https"
            )
        target = target_of(urlsplit(address))
        # Another server must not get the credentials of this one.
        secret = self.secret if origin == self.origin else b""
        return self._replace(origin=origin, target=target, secret=secret)


def target_of(parts: SplitResult) -> str:
    """Return path and query of an address, quoted where necessary."""
    target = parts.path or "/"
    if parts.query:
        target += f"?{parts.query}"
    return target if _TARGET.fullmatch(target) else quote(target, safe=_UNQUOTED)


def quoted(name: str) -> str:
    """Return an object's name as part of a path; quote() is slow, and most names do not need it."""
    return name if _PLAIN.fullmatch(name) else quote(name, safe="/", errors="surrogateescape")


def credentials(parts: SplitResult, header: bytes = b"Authorization") -> bytes:
    """Return the header line for the user and password of an address; b'' without."""
    if parts.username is None and parts.password is None:
        return b""
    return _basic(header, unquote(parts.username or ""), unquote(parts.password or ""))


def netrc_login(host: str) -> bytes:
    """Return the header line for a host's login in the netrc file; b'' without."""
    path = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")
    # A file that NETRC names must exist.
    if "NETRC" not in os.environ and not os.path.exists(path):
        return b""
    import netrc

    try:
        login = netrc.netrc(path).authenticators(host)
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or f"line {getattr(error, 'lineno', '?')} is wrong"
        raise InputError(
            f"cannot read the netrc file {path}: {why}; correct it, or unset NETRC"
        ) from None
    return _basic(b"Authorization", login[0], login[2]) if login else b""


def display(url: str) -> str:
    """Return the address without user, password, query and fragment, to store and print."""
    scheme, slashes, rest = url.partition("//") if "//" in url else ("", "", url)
    place, path, more = _PARTS.fullmatch(rest).groups()  # type: ignore[union-attr]
    port = place.rpartition(":")[2]
    is_server = path and (port.isdigit() or ":" not in place)
    if "@" in path + more and not is_server:
        return f"{scheme}{slashes}…"  # perhaps a password with such a character in it
    return f"{scheme}{slashes}{place.rpartition('@')[2]}{path}"


def _basic(header: bytes, user: str, password: str) -> bytes:
    return b"%b: Basic %b\r\n" % (header, base64.b64encode(f"{user}:{password}".encode()))


def _default_port(secure: bool) -> int:
    return 443 if secure else 80


def _authority(host: str, port: int) -> bytes:
    name = f"[{host}]" if ":" in host else host
    return (f"{name}:{port}" if port else name).encode("ascii")


def _proxy(scheme: str, host: str, port: int) -> str:
    is_set = any(name.lower().endswith("_proxy") for name in os.environ)
    if sys.platform == "linux" and not is_set:
        return ""  # urllib.request takes 40 ms to import
    import urllib.request

    if urllib.request.proxy_bypass(f"{host}:{port}"):
        return ""
    return urllib.request.getproxies().get(scheme, "")

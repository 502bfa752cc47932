"""One HTTP request to an address that a setting names."""

import ssl
import urllib.request
from collections.abc import Mapping
from typing import Any


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Raises an error for a redirect, which would send content and token to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


def post(
    url: str, body: bytes, headers: Mapping[str, str], seconds: float, cafile: str | None = None
) -> None:
    """Send JSON; raise OSError unless the server accepts it within a timeout in seconds."""
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(url, body, headers)  # noqa: S310
    context = ssl.create_default_context(cafile=cafile)
    handlers = [_NoRedirect(), urllib.request.HTTPSHandler(context=context)]
    urllib.request.build_opener(*handlers).open(request, timeout=seconds).close()

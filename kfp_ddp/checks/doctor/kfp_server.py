"""The version of the KFP API server: dicts between steps, menus and more are of 2.17."""

import importlib.metadata
import json
import re
import urllib.error
import urllib.request
from http.client import HTTPException
from urllib.parse import urlsplit

from kfp_ddp.checks.doctor.finding import Finding
from kfp_ddp.core.text import printable

NEEDED_MINOR = (2, 17)
NEEDED = "2.17"
_LARGEST = 1 << 20


def kfp_server(host: str) -> Finding:
    """The KFP API server's version against the SDK's; only where a host is given."""
    sdk = importlib.metadata.version("kfp")
    if not host:
        return Finding(
            "warn",
            "KFP",
            f"SDK {sdk}; the API server was not asked",
            "give --host, to see its version",
        )
    if "@" in host.rpartition("://")[2].partition("/")[0]:
        remedy = "give one without, as http://localhost:8888"
        return Finding("bad", "KFP", "the host holds a login, which is not used", remedy)
    if not _is_address(host):
        remedy = "give one as http://localhost:8888"
        return Finding("bad", "KFP", f"{host!r} is not an http(s) URL", remedy)
    url = f"{host.rstrip('/')}/apis/v2beta1/healthz"
    forward = "kubectl port-forward -n kubeflow svc/ml-pipeline 8888; --host http://localhost:8888"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310
            server = printable(str(json.loads(answer.read(_LARGEST))["tag_name"]))[:100]
    except urllib.error.HTTPError as error:
        error.close()
        said = f"{url} answers {error.code} {error.reason}"
        return Finding("bad", "KFP", said, f"bypass the login: {forward}")
    except (OSError, HTTPException) as error:
        reason = printable(str(getattr(error, "reason", error)))
        return Finding("bad", "KFP", f"{url} does not answer ({reason})", forward)
    except (ValueError, KeyError, TypeError, RecursionError):
        said = f"{url} is not answered by a KFP API server"
        return Finding("bad", "KFP", said, f"if it is a login page, bypass it: {forward}")
    said = f"SDK {sdk}, API server {server}"
    number = _minor(server)
    if number is None:  # what a server says that was built without its tag
        said = f"SDK {sdk}, API server of {server} version"
        return Finding("warn", "KFP", said, f"see that its images are of {NEEDED} or newer")
    if number < NEEDED_MINOR:
        return Finding("bad", "KFP", said, f"upgrade KFP to {NEEDED} or newer")
    own = _minor(sdk) or NEEDED_MINOR
    if number[0] > own[0]:
        return Finding("warn", "KFP", said, f"see whether a newer kfp-ddp is for KFP {number[0]}")
    if number < own:
        remedy = f"compile with kfp {number[0]}.{number[1]}: a newer one may write what it ignores"
        return Finding("warn", "KFP", said, remedy)
    return Finding("ok", "KFP", said)


def _is_address(host: str) -> bool:
    """Whether a request can be sent there."""
    try:
        parts = urlsplit(host)
        whole = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    plain = host.isascii() and host.isprintable() and " " not in host
    return whole and plain and parts.scheme in ("http", "https")


def _minor(version: str) -> tuple[int, int] | None:
    """Major and minor of a version; None where it says none."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None

"""The checks of `kfp-ddp doctor`."""

import importlib.metadata
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from urllib.parse import urlsplit

from kfp_ddp.checks.access import rights, secret
from kfp_ddp.checks.admission import admitted
from kfp_ddp.checks.claims import claims, storage
from kfp_ddp.checks.finding import Cluster, Finding, Requirements
from kfp_ddp.checks.nodes import gpus, room
from kfp_ddp.checks.operators import gangs, kserve, operators, queues
from kfp_ddp.core.errors import KfpDdpError
from kfp_ddp.core.text import printable
from kfp_ddp.k8s.api import Api, ApiError, Object
from kfp_ddp.k8s.nodes import schedulable

NEEDED_MINOR = (2, 17)
NEEDED = "2.17"
_MAX_BYTES = 1 << 20


CHECKS: tuple[Callable[[Cluster], list[Finding]], ...] = (
    *(operators, gangs, kserve, rights, claims, storage, secret, admitted, room, gpus, queues),
)


def examine(run: Requirements) -> list[Finding]:
    """Return all findings about a cluster for a run."""
    try:
        api = Api.connect(run.namespace, run.context)
        version = api.call("GET", "/version")
    except KfpDdpError as error:
        message = str(error).splitlines()[0].partition("; ")[0]
        remedy = "let KUBECONFIG name a cluster that `kubectl cluster-info` reaches"
        unreachable = Finding("bad", "API server", message, remedy)
        return [unreachable, check_host(run.host)] if run.host else [unreachable]
    nodes: list[Object] | None
    try:
        nodes = schedulable(api)
    except ApiError:
        nodes = None
    server = Finding("ok", "API server", f"Kubernetes {version['gitVersion']}")
    cluster = Cluster(api, run, nodes)
    findings = [finding for check in CHECKS for finding in check(cluster)]
    return [server, *findings, check_host(run.host)]


def check_host(host: str) -> Finding:
    """Compare the version of the KFP API server at `host` with the SDK's."""
    sdk = importlib.metadata.version("kfp")
    if not host:
        message = f"SDK {sdk}; the API server was not checked"
        return Finding("warn", "KFP", message, "give --host, to see its version")
    if "@" in host.rpartition("://")[2].partition("/")[0]:
        remedy = "give one without, as http://localhost:8888"
        return Finding("bad", "KFP", "the host contains a login, which is not used", remedy)
    if not _is_url(host):
        remedy = "give one as http://localhost:8888"
        return Finding("bad", "KFP", f"{host!r} is not an http(s) URL", remedy)
    url = f"{host.rstrip('/')}/apis/v2beta1/healthz"
    forward = "kubectl port-forward -n kubeflow svc/ml-pipeline 8888; --host http://localhost:8888"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310
            server = printable(str(json.loads(answer.read(_MAX_BYTES))["tag_name"]))[:100]
    except urllib.error.HTTPError as error:
        error.close()
        message = f"{url} answers {error.code} {error.reason}"
        return Finding("bad", "KFP", message, f"bypass the login: {forward}")
    except (OSError, HTTPException) as error:
        reason = printable(str(getattr(error, "reason", error)))
        return Finding("bad", "KFP", f"{url} does not answer ({reason})", forward)
    except (ValueError, KeyError, TypeError, RecursionError):
        message = f"{url} is not answered by a KFP API server"
        return Finding("bad", "KFP", message, f"if it is a login page, bypass it: {forward}")
    return _compare(sdk, server)


def _compare(sdk: str, server: str) -> Finding:
    message = f"SDK {sdk}, API server {server}"
    number = _minor(server)
    if number is None:  # a server that was built without a tag
        message = f"SDK {sdk}, API server of {server} version"
        remedy = f"check that its images are of {NEEDED} or newer"
        return Finding("warn", "KFP", message, remedy)
    if number < NEEDED_MINOR:
        return Finding("bad", "KFP", message, f"upgrade KFP to {NEEDED} or newer")
    own = _minor(sdk) or NEEDED_MINOR
    if number[0] > own[0]:
        remedy = f"look for a newer kfp-ddp for KFP {number[0]}"
        return Finding("warn", "KFP", message, remedy)
    if number < own:
        remedy = f"compile with kfp {number[0]}.{number[1]}: the server may ignore newer fields"
        return Finding("warn", "KFP", message, remedy)
    return Finding("ok", "KFP", message)


def _is_url(host: str) -> bool:
    try:
        parts = urlsplit(host)
        is_complete = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    is_plain = host.isascii() and host.isprintable() and " " not in host
    return is_complete and is_plain and parts.scheme in ("http", "https")


def _minor(version: str) -> tuple[int, int] | None:
    """Return major and minor of a version; None if it has none."""
    match = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None

"""The checks of `kfp-ddp doctor`."""

import contextlib
import importlib.metadata
import json
import re
import urllib.error
import urllib.request
from http.client import HTTPException

from kfp_ddp.checks.access import admitted, rights, secret
from kfp_ddp.checks.claims import claims, storage
from kfp_ddp.checks.finding import Cluster, Finding, Requirements
from kfp_ddp.checks.nodes import gpus, room
from kfp_ddp.checks.operators import gangs, kserve, operators, queues
from kfp_ddp.core.errors import KfpDdpError
from kfp_ddp.core.text import printable
from kfp_ddp.k8s.api import Api, ApiError, Object, schedulable_nodes

NEEDED = (2, 17)
URL = re.compile(
    r"https?://(\[[\da-f:.]+\]|[\w.-]+)(:[1-9]\d*)?(/[!-~]*)?", re.ASCII | re.IGNORECASE
)
_MAX_BYTES = 1 << 20
CHECKS = (operators, gangs, kserve, rights, claims, storage, secret, admitted, room, gpus, queues)


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
    nodes: list[Object] | None = None
    with contextlib.suppress(ApiError):
        nodes = schedulable_nodes(api)
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
    if not URL.fullmatch(host):
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
    message = f"SDK {sdk}, API server {server}"
    number, own = _minor(server), _minor(sdk) or NEEDED
    if number is None:  # a server that was built without a tag
        message = f"SDK {sdk}, API server of {server} version"
        return Finding("warn", "KFP", message, "check that its images are of 2.17 or newer")
    if number < NEEDED:
        return Finding("bad", "KFP", message, "upgrade KFP to 2.17 or newer")
    remedy = ""
    if number[0] > own[0]:
        remedy = f"look for a newer kfp-ddp for KFP {number[0]}"
    elif number < own:
        remedy = f"compile with kfp {number[0]}.{number[1]}: the server may ignore newer fields"
    return Finding("warn" if remedy else "ok", "KFP", message, remedy)


def _minor(version: str) -> tuple[int, int] | None:
    """Return major and minor of a version; None if it has none."""
    match = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None

"""The checks of `kfp-ddp doctor`."""

import contextlib
import importlib.metadata
import re
from collections.abc import Callable

from kfp_ddp.checks.access import admitted, rights, secret
from kfp_ddp.checks.claims import claims, storage
from kfp_ddp.checks.finding import CheckContext, Finding, Requirements
from kfp_ddp.checks.network import network
from kfp_ddp.checks.nodes import gpus, room
from kfp_ddp.checks.operators import gangs, kserve, operators, queues
from kfp_ddp.checks.public_images import public_images
from kfp_ddp.core.errors import KfpDdpError
from kfp_ddp.core.text import printable
from kfp_ddp.k8s.api import Api, ApiError, Object, schedulable_nodes

NEEDED = (2, 17)
LOGIN = "kfp-ddp config show --origin lists the address and the login"
CHECKS = (
    *(operators, gangs, kserve, rights, claims, storage, secret, admitted, network, public_images),
    *(room, gpus, queues),
)


def examine(run: Requirements, version: Callable[[], str]) -> list[Finding]:
    """Return all findings about a cluster for a run; `version` reads that of the KFP server."""
    try:
        api = Api.connect(run.namespace, run.context)
        kubernetes = api.call("GET", "/version")["gitVersion"]
    except KfpDdpError as error:
        message = str(error).splitlines()[0].partition("; ")[0]
        remedy = "let KUBECONFIG name a cluster that `kubectl cluster-info` reaches"
        unreachable = Finding("bad", "API server", message, remedy)
        return [unreachable, check_kfp(run, version)] if run.host else [unreachable]
    nodes: list[Object] | None = None
    with contextlib.suppress(ApiError):
        nodes = schedulable_nodes(api)
    server = Finding("ok", "API server", f"Kubernetes {kubernetes}")
    cluster = CheckContext(api, run, nodes)
    findings = [finding for check in CHECKS for finding in check(cluster)]
    return [server, *findings, check_kfp(run, version)]


def check_kfp(run: Requirements, version: Callable[[], str]) -> Finding:
    """Compare the version of the KFP API server with the SDK's."""
    sdk = importlib.metadata.version("kfp")
    try:
        server = printable(version())[:100]
    except KfpDdpError as error:
        message, _, remedy = str(error).partition("; ")
        return Finding("bad" if run.host else "warn", "KFP", message, remedy or LOGIN)
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

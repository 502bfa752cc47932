"""The checks of `kfp-ddp doctor`, and those of network policies and public images."""

import contextlib
import importlib.metadata
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kfp_ddp.checks.access import admitted, quota, rights, secret
from kfp_ddp.checks.claims import claims, storage
from kfp_ddp.checks.finding import (
    ASK_ADMIN,
    CheckContext,
    Finding,
    Requirements,
    State,
    items,
)
from kfp_ddp.checks.nodes import gpus, room
from kfp_ddp.checks.operators import gangs, kserve, operators, queues
from kfp_ddp.core import config
from kfp_ddp.core.container_images import SETTINGS, Images
from kfp_ddp.core.errors import KfpDdpError
from kfp_ddp.core.text import printable
from kfp_ddp.jobs.identity import KFP_RUN, RUN, STEP
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.shipping.own_package import has_source, map_name
from kfp_ddp.k8s.api import Api, ApiError, Object, schedulable_nodes
from kfp_ddp.k8s.objects import condition
from kfp_ddp.k8s.resource import CONFIG_MAPS, JOBS, Resource

POLICIES = Resource("networking.k8s.io/v1", "networkpolicies", role="")
KFP = (KFP_RUN, "pipelines.kubeflow.org/v2_component", "workflows.argoproj.io/workflow")
JOB_LABELS = {RUN, *(kind.job_label for kind in KINDS.values())}


class Policy(NamedTuple):
    """A policy of deploy/network."""

    name: str
    labels: set[str]
    """Labels of the pods that it selects."""
    directions: tuple[str, ...]
    """Directions that a run needs."""


OURS = (
    Policy("kfp-ddp-steps", {STEP, *KFP}, ("Egress",)),
    Policy("kfp-ddp-jobs", JOB_LABELS, ("Ingress", "Egress")),
)
# A rule for all connections, and one for all from the namespace.
OPEN: tuple[Object, ...] = ({}, {"from": [{"podSelector": {}}]})


def network(cluster: CheckContext) -> list[Finding]:
    """Check whether policies deny by default what ours allow, while ours are missing."""
    title = "network policies"
    policies = items(cluster.api, POLICIES)
    if policies is None:
        return [Finding("warn", title, "may not be read", ASK_ADMIN)]
    specs = {policy["metadata"]["name"]: policy["spec"] for policy in policies}
    present = [ours.name for ours in OURS if ours.name in specs]
    denying: set[str] = set()
    for ours in OURS:
        if ours.name not in specs:
            denying |= _denying(specs, ours)
    if denying:
        message = f"{', '.join(sorted(denying))}: what a run connects to is denied by default"
        remedy = f"kfp-ddp install -n {cluster.api.namespace} --network-policy"
        return [Finding("warn", title, message, remedy)]
    return [Finding("ok", title, ", ".join(present) or "our pods are not restricted")]


def _denying(specs: Mapping[str, Object], ours: Policy) -> set[str]:
    """Return the policies that deny our pods a direction, as no rule of any of them is open."""
    denying: set[str] = set()
    for direction in ours.directions:
        names = {
            name
            for name, spec in specs.items()
            if direction in spec.get("policyTypes", ()) and _may_select(spec, ours.labels)
        }
        if not any(_is_open(specs[name], direction) for name in names):
            denying |= names
    return denying


def _is_open(spec: Object, direction: str) -> bool:
    return any(rule in OPEN for rule in spec.get(direction.lower()) or ())


def _may_select(spec: Object, labels: set[str]) -> bool:
    """Return whether a policy may select pods with these labels, of which any value counts."""
    selector = spec.get("podSelector") or {}
    terms = selector.get("matchExpressions") or ()
    absent = {term["key"] for term in terms if term["operator"] == "DoesNotExist"}
    present = {term["key"] for term in terms if term["operator"] in ("In", "Exists")}
    return {*(selector.get("matchLabels") or ()), *present} <= labels and not absent & labels


INDEX_JOB = "kfp-ddp-index"


def public_images(cluster: CheckContext) -> list[Finding]:
    """Report the ConfigMap of this version, and whether a pod reached the package index."""
    if not Images.create(config.chosen(*SETTINGS)).public:
        return []
    api = cluster.api
    try:
        source = api.get(CONFIG_MAPS, map_name())
        job = api.get(JOBS, INDEX_JOB)
    except ApiError as error:
        remedy = "ask for the right to read ConfigMaps"
        return [Finding("warn", "public images", error.message, remedy)]
    return [_source_finding(api.namespace, source, job)]


def _source_finding(namespace: str, source: Object | None, job: Object | None) -> Finding:
    """Judge the ConfigMap with our source, and the job that tries the package index."""
    what = "public images"
    name = map_name()
    install = f"kfp-ddp install -n {namespace}, or set registry for your own images"
    if source is None:
        return Finding("warn", what, f"there is no ConfigMap {name} with our source", install)
    if not has_source(source):
        message = f"{name} has another source than its name: steps refuse it"
        return Finding("warn", what, message, install)
    if job is not None and condition(job, "Failed"):
        remedy = f"kubectl logs -n {namespace} job/{INDEX_JOB} shows why; --pip-index-url"
        return Finding("bad", what, "pods do not reach the package index", remedy)
    if job is None or not condition(job, "Complete"):
        return Finding("warn", what, "not known yet whether pods reach the package index", install)
    return Finding("ok", what, f"source in {name}, and pods reach the package index")


NEEDED = (2, 17)
LOGIN = "kfp-ddp config show --origin lists the address and the login"
CHECKS = (
    *(operators, gangs, kserve, rights, claims, storage, secret, admitted, quota, network),
    *(public_images, room, gpus, queues),
)


def examine(run: Requirements, version: Callable[[], str]) -> list[Finding]:
    """Return all findings about a cluster for a run; `version` reads that of the KFP server."""
    try:
        api = Api.connect(run.namespace, run.context)
        kubernetes = api.call("GET", "/version")["gitVersion"]
    except KfpDdpError as error:
        message = error.problem.what.splitlines()[0]
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
        problem = error.problem
        state: State = "bad" if run.host else "warn"
        return Finding(state, "KFP", problem.what, problem.remedy or LOGIN)
    return _compared(sdk, server)


def _compared(sdk: str, server: str) -> Finding:
    """Compare two versions of KFP; the server's is a stranger's text."""
    message = f"SDK {sdk}, API server {server}"
    number = _minor(server)
    own = _minor(sdk) or NEEDED
    if number is None:  # a server that was built without a tag
        message = f"SDK {sdk}, API server of {server} version"
        return Finding("warn", "KFP", message, "check that its images are of 2.17 or newer")
    if number < NEEDED:
        return Finding("bad", "KFP", message, "upgrade KFP to 2.17 or newer")
    major, minor = number
    if major > own[0]:
        return Finding("warn", "KFP", message, f"look for a newer kfp-ddp for KFP {major}")
    if number < own:
        remedy = f"compile with kfp {major}.{minor}: the server may ignore newer fields"
        return Finding("warn", "KFP", message, remedy)
    return Finding("ok", "KFP", message)


def _minor(version: str) -> tuple[int, int] | None:
    """Return major and minor of a version; None if it has none."""
    match = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None

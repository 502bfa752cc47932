"""The checks of `kfp-ddp doctor`, and those of network policies and public images."""

import contextlib
import importlib.metadata
import re
from collections.abc import Callable

from kfp_ddp.checks.access import admitted, rights, secret
from kfp_ddp.checks.claims import claims, storage
from kfp_ddp.checks.finding import ASK_ADMIN, CheckContext, Finding, Requirements, items
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
# Policy of deploy/network, labels of the pods that it selects, and directions that a run needs.
OURS = (
    ("kfp-ddp-steps", {STEP, *KFP}, ("Egress",)),
    ("kfp-ddp-jobs", {RUN, *(kind.job_label for kind in KINDS.values())}, ("Ingress", "Egress")),
)


# A rule for all connections, and one for all from the namespace.
OPEN: tuple[Object, ...] = ({}, {"from": [{"podSelector": {}}]})


def network(cluster: CheckContext) -> list[Finding]:
    """Check whether policies deny by default what ours allow, while ours are missing."""
    title, policies = "network policies", items(cluster.api, POLICIES)
    if policies is None:
        return [Finding("warn", title, "may not be read", ASK_ADMIN)]
    specs = {policy["metadata"]["name"]: policy["spec"] for policy in policies}
    denying: set[str] = set()
    for ours, labels, directions in OURS:
        for direction in directions if ours not in specs else ():
            of_pods = {n: s for n, s in specs.items() if direction in s.get("policyTypes", ())}
            of_pods = {n: s for n, s in of_pods.items() if _may_select(s, labels)}
            rules = [rule for s in of_pods.values() for rule in s.get(direction.lower()) or ()]
            denying |= set() if any(rule in OPEN for rule in rules) else of_pods.keys()
    if denying:
        message = f"{', '.join(sorted(denying))}: what a run connects to is denied by default"
        remedy = f"kfp-ddp install -n {cluster.api.namespace} --network-policy"
        return [Finding("warn", title, message, remedy)]
    present = [ours for ours, *_ in OURS if ours in specs]
    return [Finding("ok", title, ", ".join(present) or "our pods are not restricted")]


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
    what, api, name = "public images", cluster.api, map_name()
    install = f"kfp-ddp install -n {api.namespace}, or set registry for your own images"
    try:
        source = api.get(CONFIG_MAPS, name)
        job = api.get(JOBS, INDEX_JOB)
    except ApiError as error:
        return [Finding("warn", what, error.message, "ask for the right to read ConfigMaps")]
    if source is None:
        return [Finding("warn", what, f"there is no ConfigMap {name} with our source", install)]
    if not has_source(source):
        message = f"{name} has another source than its name: steps refuse it"
        return [Finding("warn", what, message, install)]
    if job is not None and condition(job, "Failed"):
        remedy = f"kubectl logs -n {api.namespace} job/{INDEX_JOB} shows why; --pip-index-url"
        return [Finding("bad", what, "pods do not reach the package index", remedy)]
    if job is None or not condition(job, "Complete"):
        message = "not known yet whether pods reach the package index"
        return [Finding("warn", what, message, install)]
    return [Finding("ok", what, f"source in {name}, and pods reach the package index")]


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

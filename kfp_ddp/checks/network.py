"""Check that policies of the network leave the connections that a run needs."""

from kfp_ddp.checks.finding import ASK_ADMIN, CheckContext, Finding, items
from kfp_ddp.jobs.identity import KFP_RUN, RUN, STEP
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.k8s.api import Object
from kfp_ddp.k8s.resource import Resource

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

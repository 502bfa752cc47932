"""Pods that are held back for minutes by an admission policy."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.e2e.harness.grounds import Grounds, patiently, until

INDEX = "training.kubeflow.org/replica-index"
GATE = "test.kfp-ddp/late"
GATES = f'JSONPatch{{op: "add", path: "/spec/schedulingGates", value: [{{"name": "{GATE}"}}]}}'


@contextmanager
def late(grounds: Grounds, index: int) -> Iterator[Callable[[], None]]:
    """Gate every such pod of this namespace's jobs; yields a function that lets them go."""
    custom, group = grounds.custom, ("admissionregistration.k8s.io", "v1")
    name = f"late-{uuid.uuid4().hex[:8]}.kfp-ddp.test"
    of_job = f"object.metadata.?labels[?'{INDEX}'].orValue('') == '{index}'"
    rule = {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": ["CREATE"],
        "resources": ["pods"],
    }
    spec = {
        "matchConstraints": {"resourceRules": [rule]},
        "matchConditions": [{"name": "index", "expression": of_job}],
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": f"[{GATES}]"}}],
        "reinvocationPolicy": "Never",
        "failurePolicy": "Fail",
    }
    space = {"matchLabels": {"kubernetes.io/metadata.name": grounds.namespace}}
    binding = {"policyName": name, "matchResources": {"namespaceSelector": space}}
    version, meta = "/".join(group), {"name": name}
    objects = {
        "mutatingadmissionpolicies": {"kind": "MutatingAdmissionPolicy", "spec": spec},
        "mutatingadmissionpolicybindings": {
            "kind": "MutatingAdmissionPolicyBinding",
            "spec": binding,
        },
    }
    for plural, item in objects.items():
        body = {"apiVersion": version, "metadata": meta, **item}
        custom.create_cluster_custom_object(*group, plural, body)

    def let_go() -> None:
        for pod in gated(grounds):
            free: Any = {"spec": {"schedulingGates": None}}
            grounds.core.patch_namespaced_pod(pod, grounds.namespace, free)

    try:
        _holds(grounds, index)
        yield let_go
    finally:
        for plural in reversed(objects):
            custom.delete_cluster_custom_object(*group, plural, name)


def gated(grounds: Grounds) -> list[str]:
    """The pods that are held back now."""
    result = patiently(lambda: grounds.core.list_namespaced_pod(grounds.namespace)).items
    return [pod.metadata.name for pod in result if pod.spec.scheduling_gates]


def _holds(grounds: Grounds, index: int) -> None:
    """Wait until the policy is in force, which takes the API server a moment."""
    container = {"name": "main", "image": "none:1"}
    meta = {"name": "probe", "labels": {INDEX: str(index)}}
    body: Any = {"metadata": meta, "spec": {"containers": [container]}}

    def is_held() -> bool:
        created = grounds.core.create_namespaced_pod(grounds.namespace, body, dry_run="All")
        return bool(created.spec.scheduling_gates)

    until(is_held, "the policy")

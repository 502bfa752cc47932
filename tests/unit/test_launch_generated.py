"""Properties of the manifests of every kind of job, with generated settings."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kubernetes.utils import parse_quantity

from kfp_ddp.jobs.identity import identify, metadata
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.objects import amount
from tests.launch_specs import QUANTITIES, specifications
from tests.unit.test_launch_pods import templates

EXAMPLES = settings(
    max_examples=50,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


def manifest(spec: LaunchSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a job and its metadata."""
    meta = metadata(spec, identify("run", "train", "7", spec), "space", 0, None)
    return spec.job_kind.manifest(spec, meta), meta


@pytest.mark.parametrize("kind", list(KINDS))
@EXAMPLES
@given(data=st.data())
def test_every_pod_has_our_labels_no_rights_and_resources(kind: str, data: st.DataObject) -> None:
    spec = data.draw(specifications(kind))
    job, meta = manifest(spec)
    ours = {key: value for key, value in meta["labels"].items() if key.startswith("kfp-ddp/")}
    limited = {"cpu": spec.cpu or not spec.cpu_request}
    limited["memory"] = spec.memory or not spec.memory_request
    for role, template in templates(job["spec"]).items():
        pod, (container,) = template["spec"], template["spec"]["containers"]
        assert template["metadata"]["labels"].items() >= ours.items()
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        if kind == "trainjob":
            resources = [job["spec"]["trainer"]["resourcesPerNode"]]
            mounted = [mount["name"] for mount in container["volumeMounts"]]
            assert len(mounted) == len(set(mounted) & {item["name"] for item in pod["volumes"]})
        else:
            containers = [container, *pod.get("initContainers", [])]
            resources = [item["resources"] for item in containers]
            no_token = not spec.service_account and role != "Launcher"
            assert (pod.get("automountServiceAccountToken") is False) == no_token
        for item in resources:
            for name in ("cpu", "memory"):
                assert name in item["requests"]
                assert name in item.get("limits", {}) or not limited[name]


@settings(max_examples=200, derandomize=True, deadline=None)
@given(text=QUANTITIES)
def test_a_quantity_is_parsed_as_by_the_kubernetes_client(text: str) -> None:
    assert amount(text) == Fraction(parse_quantity(text))

"""The policies of deploy/network: their pods and ports, and what the doctor reports of others."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from kfp_ddp.checks.doctor import OURS, POLICIES, network
from kfp_ddp.checks.finding import CheckContext, Requirements
from kfp_ddp.client.kfp.connection import PORT as KFP_PORT
from kfp_ddp.jobs.identity import STEP, identify
from kfp_ddp.jobs.kinds import KINDS, pod
from kfp_ddp.jobs.kinds.rayjob import DASHBOARD_PORT
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import Object
from kfp_ddp.models.inference_service import PORT as SERVICE_PORT
from tests.cluster import FakeApi
from tests.commands import output

DEPLOY = Path(__file__).parents[3] / "deploy"
STEPS, JOBS, METRICS = (
    yaml.safe_load((DEPLOY / "network" / f"{name}.yaml").read_text())
    for name in ("steps", "jobs", "metrics")
)
KEY = "matchExpressions"
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
SPEC = LaunchSpec.create(image="a:1", nodes=2, metrics_port=8000)
LABELS = identify("run", "train", "1", SPEC).labels(0)


def ports(*rules: Object) -> set[int]:
    """Return the ports of rules, without those inside of a range."""
    return {one["port"] for rule in rules for one in rule["ports"] if "endPort" not in one}


def test_jobs_allow_the_ports_at_which_ranks_meet_and_the_ephemeral_ones() -> None:
    within, kuberay = JOBS["spec"]["ingress"]
    assert JOBS["spec"]["egress"][0] == {"to": within["from"], "ports": within["ports"]}
    meeting = {kind.rendezvous_port for kind in KINDS.values()} - {0}
    assert ports(within) == meeting | {DASHBOARD_PORT}
    assert ports(kuberay) == {DASHBOARD_PORT}
    (ephemeral,) = (one for one in within["ports"] if "endPort" in one)
    if RANGE.exists():
        assert [ephemeral["port"], ephemeral["endPort"]] == [*map(int, RANGE.read_text().split())]


def test_steps_allow_kfp_a_service_and_what_jobs_allow_outside() -> None:
    (kfp,) = (one for one in STEPS["spec"]["egress"] if "namespaceSelector" in str(one))
    (service,) = (one for one in STEPS["spec"]["egress"] if "podSelector" in str(one))
    assert {KFP_PORT} < ports(kfp)
    assert ports(service) == {SERVICE_PORT}
    assert "ingress" not in STEPS["spec"], "nothing connects to a step"
    assert STEPS["spec"]["egress"][:3] == JOBS["spec"]["egress"][1:]


def test_metrics_port_is_that_of_the_service() -> None:
    services = (DEPLOY / "monitoring" / "service" / "service.yaml").read_text()
    listed = {ports(service["spec"]).pop() for service in yaml.safe_load_all(services)}
    assert listed == ports(METRICS["spec"]["ingress"][0])


def test_pods_of_jobs_are_selected() -> None:
    labels = pod.template(SPEC, LABELS, "pytorch")["metadata"]["labels"]
    assert {term["key"] for term in JOBS["spec"]["podSelector"][KEY]} <= labels.keys()
    assert METRICS["spec"]["podSelector"]["matchLabels"].items() <= labels.items()


def test_ports_of_options_are_added() -> None:
    printed = output("install", "--print", "--egress-port", "9998")
    assert printed.count("port: 9998") == len(OURS)
    assert "NetworkPolicy" not in output("install", "--print")


def policy(name: str, *types: str, selector: Object | None = None, **rules: Any) -> Object:
    spec = {"podSelector": selector or {}, "policyTypes": list(types), **rules}
    return {"metadata": {"name": name}, "spec": spec}


KFP = {"matchLabels": {"pipelines.kubeflow.org/v2_component": "true"}}
WITHOUT = {KEY: [{"key": STEP, "operator": "DoesNotExist"}]}
JOB_PODS = {KEY: [{"key": "kfp-ddp/run-id", "operator": "In", "values": ["any"]}]}
DNS = [{"ports": [{"port": 53}]}]


@pytest.mark.parametrize(
    ("policies", "named"),
    [
        ([policy("deny", "Egress"), policy("dns", "Egress", egress=DNS)], "deny, dns"),
        ([policy("deny", "Egress"), policy("open", "Egress", egress=[{}])], ""),
        ([policy("near", "Ingress", ingress=[{"from": [{"podSelector": {}}]}])], ""),
        ([policy("web", "Egress", selector={"matchLabels": {"app": "web"}})], ""),
        ([policy("runs", "Egress", selector=KFP)], "runs"),
        ([policy("runs", "Ingress", selector=KFP)], ""),
        ([policy("jobs", "Ingress", selector=JOB_PODS)], "jobs"),
        ([policy("rest", "Egress", selector=WITHOUT)], "rest"),
        ([policy("deny", "Ingress", "Egress"), JOBS], "deny"),
        ([policy("deny", "Ingress", "Egress"), STEPS, JOBS], ""),
    ],
)
def test_doctor_names_policies_that_deny_by_default(policies: list[Object], named: str) -> None:
    api = FakeApi({POLICIES.path("space"): {"items": policies}})
    (finding,) = network(CheckContext(api, Requirements(), None))
    assert finding.state == ("warn" if named else "ok")
    assert finding.message.partition(":")[0] == named or not named
    assert ("--network-policy" in finding.remedy) == bool(named)


def test_doctor_without_the_right_to_read_policies() -> None:
    (finding,) = network(CheckContext(FakeApi({POLICIES.path("space"): 403}), Requirements(), None))
    assert (finding.state, finding.message) == ("warn", "may not be read")

"""The Roles of people in deploy/multi-team, with a token of each, and the overlay of the page."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from kfp_ddp.checks.doctor import OURS
from kfp_ddp.install.manifests import Installation, manifests
from kfp_ddp.k8s.api import Api, review
from tests.e2e.harness.namespace import namespace
from tests.e2e.harness.programs import kubectl
from tests.e2e.harness.rights import DEPLOY, act_as
from tests.overlays import write_overlay

# Verb, group, resource and subresource, and who may.
RIGHTS = {
    ("list", "", "pods", ""): "look run pods promote",
    ("get", "", "pods", "log"): "look run pods promote",
    ("get", "pipelines.kubeflow.org", "runs", ""): "look run pods promote",
    ("list", "kubeflow.org", "pytorchjobs", ""): "look run pods promote",
    ("create", "pipelines.kubeflow.org", "runs", ""): "run",
    ("terminate", "pipelines.kubeflow.org", "runs", ""): "run",
    ("create", "pipelines.kubeflow.org", "jobs", ""): "run",
    ("create", "", "pods", ""): "pods",
    ("create", "", "pods", "exec"): "pods",
    ("create", "trainer.kubeflow.org", "trainjobs", ""): "pods",
    ("delete", "trainer.kubeflow.org", "trainjobs", ""): "run pods",
    ("patch", "serving.kserve.io", "inferenceservices", ""): "promote",
    ("create", "serving.kserve.io", "inferenceservices", ""): "",
    ("delete", "serving.kserve.io", "inferenceservices", ""): "",
    ("create", "", "pods", "ephemeralcontainers"): "",
    ("create", "", "serviceaccounts", "token"): "",
    ("impersonate", "", "serviceaccounts", ""): "",
    ("get", "", "secrets", ""): "",
    ("create", "", "configmaps", ""): "",
    ("patch", "argoproj.io", "workflows", ""): "",
    ("create", "rbac.authorization.k8s.io", "rolebindings", ""): "",
    ("delete", "", "persistentvolumeclaims", ""): "",
    ("delete", "networking.k8s.io", "networkpolicies", ""): "",
}


@pytest.mark.smoke
def test_people_may_what_their_role_is_for(cluster: client.ApiClient) -> None:
    with namespace(cluster, ours=False) as ground:
        built = kubectl("kustomize", str(DEPLOY / "multi-team"))
        for document in yaml.safe_load_all(built):
            for subject in document.get("subjects", ()):
                name = subject["name"].removeprefix("kfp-ddp-")
                subject.clear()  # a token of a group's member needs a login outside of the cluster
                subject |= {"kind": "ServiceAccount", "name": name, "namespace": ground.namespace}
            kubectl("apply", "-n", ground.namespace, "-f", "-", text=yaml.safe_dump(document))
        for person in ("look", "run", "pods", "promote"):
            kubectl("create", "serviceaccount", person, "-n", ground.namespace)
            with act_as(cluster, ground.namespace, person) as acts:
                api = Api(acts, ground.namespace)
                for right, who in RIGHTS.items():
                    assert review(api, *right) == (person in who.split()), (person, right)


def test_overlay_of_the_page_is_what_install_applies(tmp_path: Path) -> None:
    write_overlay(tmp_path, "vision")
    built = list(yaml.safe_load_all(kubectl("kustomize", str(tmp_path))))
    assert {item["metadata"]["namespace"] for item in built} == {"vision"}
    specs = {(item["kind"], item["metadata"]["name"]): item.get("spec") for item in built}
    options: dict[str, Any] = {"size": "200Gi", "see_nodes": False, "source": False}
    target = Installation("vision", "nfs", egress_ports=(9000,), **options)
    installed = {
        (one["kind"], one["metadata"]["name"]): one.get("spec") for one in manifests(target)
    }
    for name, *_ in OURS:  # the protocol is that of the default
        specs["NetworkPolicy", name]["egress"][-1]["ports"][0].pop("protocol")
    assert installed.items() <= specs.items()
    rest = {kind for kind, _ in specs.keys() - installed.keys()}
    assert rest == {"ConfigMap", "Role", "RoleBinding", "LimitRange", "PodMonitor"}

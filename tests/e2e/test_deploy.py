"""The manifests in deploy/: the API server takes each, and the metrics Services find the jobs."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from tests.e2e.harness import workflow
from tests.e2e.harness.grounds import Grounds, until, with_retries
from tests.e2e.harness.play import Run
from tests.e2e.harness.programs import kubectl
from tests.e2e.harness.rights import DEPLOY
from tests.e2e.harness.scene import Scene, namespace
from tests.e2e.harness.trainings import Begin

pytestmark = pytest.mark.smoke

FOLDERS = sorted(path.parent for path in DEPLOY.rglob("kustomization.yaml"))
BUILT = {
    folder / name
    for folder in FOLDERS
    for name in yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
}
LOOSE = sorted({*DEPLOY.rglob("*.yaml")} - BUILT - {*DEPLOY.rglob("kustomization.yaml")})
# What the Prometheus Operator defines; a cluster without it cannot check them.
FOREIGN = "monitoring.coreos.com"
SERVICES = {"pytorchjob": "kfp-ddp-metrics", "trainjob": "kfp-ddp-metrics-trainjob"}


@pytest.mark.parametrize("path", [*FOLDERS, *LOOSE], ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_manifest_is_accepted_by_the_server(cluster: client.ApiClient, path: Path) -> None:
    documents = _built(path)
    assert documents
    with namespace(cluster) as grounds:
        for document in documents:
            if document["apiVersion"].startswith(FOREIGN) and not _served(grounds):
                continue
            if "namespace" in document["metadata"]:
                document["metadata"]["namespace"] = grounds.namespace
            text = yaml.safe_dump(document)
            kubectl("apply", "-n", grounds.namespace, "--dry-run=server", "-f", "-", text=text)


def test_monitors_select_the_services_and_pods() -> None:
    """What ties the objects together is only text: labels and the name of a port."""
    built = _built(DEPLOY / "monitoring" / "service")
    (monitor,) = (item for item in built if item["kind"] == "ServiceMonitor")
    services = [item for item in built if item["kind"] == "Service"]
    assert {item["metadata"]["name"] for item in services} == set(SERVICES.values())
    expected = monitor["spec"]["selector"]["matchLabels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    for service in services:
        assert expected <= service["metadata"]["labels"].items()
        assert [port["name"] for port in service["spec"]["ports"]] == [endpoint["port"]]


@pytest.mark.parametrize("backend", list(SERVICES))
def test_metrics_service_selects_rank_0(scene: Scene, begin: Begin, backend: str) -> None:
    grounds = scene.grounds
    for service in _built(DEPLOY / "monitoring" / "service"):
        if service["kind"] == "Service":
            kubectl("apply", "-n", grounds.namespace, "-f", "-", text=yaml.safe_dump(service))
    run = begin(backend=backend, epochs=1000, prometheus_port=8000)
    try:
        result = until(lambda: _figures(grounds, SERVICES[backend]), "figures of a step", 180)
        known = {
            (event["step"], round(event["loss"], 9))
            for event in scene.events(run)
            if event["event"] == "step"
        }
        (pod,) = _endpoints(grounds, SERVICES[backend])
        others = [_endpoints(grounds, name) for name in SERVICES.values()]
    finally:
        _end(scene, run)
    assert (result["kfp_ddp_step_step"], round(result["kfp_ddp_step_loss"], 9)) in known
    assert result["kfp_ddp_start_world_size"] == 2
    assert re.search(r"-worker-0$|-node-0-0-\w+$", pod), pod
    assert sum(map(len, others)) == 1  # of two pods, and of two Services


def _end(scene: Scene, run: Run) -> None:
    workflow.terminate(scene.grounds, run.workflow["metadata"]["name"])
    run.wait()
    grounds = scene.grounds
    for name in SERVICES.values():
        delete = functools.partial(grounds.core.delete_namespaced_service, name, grounds.namespace)
        with_retries(delete)


def _figures(grounds: Grounds, service: str) -> dict[str, float] | None:
    """The samples that the Service's endpoint serves; None while there is no step among them."""
    path = f"/api/v1/namespaces/{grounds.namespace}/services/http:{service}:metrics/proxy/metrics"
    try:
        text = grounds.api.call_api(
            path, "GET", auth_settings=["BearerToken"], response_type="str"
        )[0]
    except client.ApiException as error:
        if error.status in (500, 502, 503):  # no endpoint yet, or nobody listens yet
            return None
        raise
    samples = re.findall(r"^(kfp_ddp_\w+) (\S+)$", text, re.MULTILINE)
    figures = {name: float(value) for name, value in samples}
    return figures if "kfp_ddp_step_loss" in figures else None


def _endpoints(grounds: Grounds, service: str) -> list[str]:
    """The pods that a Service leads to."""
    slices = grounds.custom.list_namespaced_custom_object(
        "discovery.k8s.io",
        "v1",
        grounds.namespace,
        "endpointslices",
        label_selector=f"kubernetes.io/service-name={service}",
    )
    result = [item for part in slices["items"] for item in part["endpoints"] or []]
    return [item["targetRef"]["name"] for item in result if item["conditions"]["ready"]]


def _served(grounds: Grounds) -> bool:
    groups = client.ApisApi(grounds.api).get_api_versions().groups
    return any(group.name == FOREIGN for group in groups)


def _built(path: Path) -> list[dict[str, Any]]:
    """The documents of a file, or of a folder as kustomize builds it."""
    text = kubectl("kustomize", str(path)) if path.is_dir() else path.read_text()
    return [json.loads(json.dumps(item)) for item in yaml.safe_load_all(text) if item]

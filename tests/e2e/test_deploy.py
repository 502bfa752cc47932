"""The objects of an installation: the manifests of deploy/, and `kfp-ddp install`."""

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from kfp_ddp.core.container_images import REGISTRY
from kfp_ddp.core.errors import InputError
from kfp_ddp.install.apply import apply
from kfp_ddp.install.manifests import PART_OF, Installation, manifests
from kfp_ddp.jobs.shipping.own_package import map_name
from kfp_ddp.k8s.api import Api
from tests.e2e.harness import grounds, step_pod, workflow
from tests.e2e.harness.grounds import IMAGE, UID, Grounds, until, with_retries
from tests.e2e.harness.namespace import DATA, WORK, namespace
from tests.e2e.harness.play import Run
from tests.e2e.harness.programs import kfp_ddp, kubectl
from tests.e2e.harness.rights import DEPLOY
from tests.e2e.harness.scene import Scene
from tests.e2e.harness.trainings import Begin
from tests.overlays import write_overlay

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
LEVEL = "pod-security.kubernetes.io/enforce"
SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
WITH = ("--storage-class", "standard", "--size", "1Gi")


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
        # No endpoint yet, nobody listens yet, or the proxy has not seen the new Service.
        if error.status in (404, 500, 502, 503):
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


@pytest.fixture(scope="module")
def ground(cluster: client.ApiClient) -> Iterator[Grounds]:
    """A namespace with both claims, whose volumes belong to root."""
    with namespace(cluster) as space:
        for name in (DATA, WORK):
            grounds.claim(space, name)
        owned = "chown 0:0 /data /work; chmod 755 /data /work"
        assert _run(space, "root", owned, {"runAsUser": 0}, {}) == "Succeeded"
        patch = {"metadata": {"labels": {LEVEL: "restricted"}}}
        space.core.patch_namespace(space.namespace, patch)
        yield space


def test_the_job_with_an_fs_group_makes_volumes_writable(ground: Grounds) -> None:
    """It replaces chown.yaml, which is not permitted."""
    write = "touch /data/mine /work/mine"
    step = {"runAsUser": UID, "runAsGroup": UID, "runAsNonRoot": True}
    assert _run(ground, "before", write, step, SECURITY) == "Failed"

    _apply(ground, "storage/chown.yaml")
    refused = until(lambda: _events(ground, "kfp-ddp-chown"), "its refusal", 30)
    assert not refused[0].count("Created")

    _apply(ground, "storage/fsgroup.yaml")
    batch = client.BatchV1Api(ground.api)

    def ended() -> set[str]:
        status = batch.read_namespaced_job("kfp-ddp-fsgroup", ground.namespace).status
        return {item.type for item in status.conditions or ()} & {"Complete", "Failed"}

    assert until(ended, "the job's end", 60) == {"Complete"}
    assert _run(ground, "after", write, step, SECURITY) == "Succeeded"


def _apply(ground: Grounds, file: str) -> None:
    kubectl("apply", "-n", ground.namespace, "-f", str(DEPLOY / file))


def _events(ground: Grounds, name: str) -> list[str]:
    """Return the reasons of the events of an object."""
    selector = f"involvedObject.name={name}"
    events = ground.core.list_namespaced_event(ground.namespace, field_selector=selector).items
    return [event.reason for event in events]


def _run(
    ground: Grounds, name: str, script: str, pod: dict[str, Any], container: dict[str, Any]
) -> str:
    """Run a script with both claims mounted; the phase that its pod ended in."""
    body = step_pod.bare(name, ["sh", "-ec", script], data=DATA, work=WORK)
    body["spec"]["securityContext"] = pod
    body["spec"]["containers"][0]["securityContext"] = container
    ground.core.create_namespaced_pod(ground.namespace, body)
    return grounds.wait_for_end(ground, name, 60)


@pytest.mark.smoke
def test_dry_run_creates_and_a_repeat_changes_nothing(cluster: client.ApiClient) -> None:
    with namespace(cluster, ours=False) as ground:
        code, rehearsed = _install(ground, "--dry-run")
        assert code == 0
        assert _claims(ground) == {}
        try:
            code, created = _install(ground, "--image", IMAGE)
            assert code == 0
            code, again = _install(ground)
        finally:
            _drop_the_binding(ground)
        assert code == 0
        assert {item["state"] for item in again["objects"]} == {"unchanged", "left"}
        assert set(_claims(ground)) == {DATA, WORK}
        states = {item["kind"]: item["state"] for item in rehearsed["objects"]}
        assert states.pop("ClusterRole") in ("made", "unchanged")
        assert set(states.values()) == {"made"}
        jobs = [item["name"] for item in created["objects"] if item["kind"] == "Job"]
        assert jobs == ["kfp-ddp-chown"]
        touched = ["touch", f"/{DATA}/x", f"/{WORK}/x"]
        step_pod.run(ground, "writes", touched, **{DATA: DATA, WORK: WORK})
        doctor = kfp_ddp("doctor", "-n", ground.namespace, "--gpus-per-node", "0", "--json")
        assert doctor.returncode == 0, doctor.stdout


def test_changed_role_is_restored_and_pvcs_are_not_changed(cluster: client.ApiClient) -> None:
    with namespace(cluster, ours=False) as ground:
        _install(ground, "--no-see-nodes", "--chown", "no")
        rights = client.RbacAuthorizationV1Api(ground.api)
        role = "kfp-ddp-launcher", ground.namespace
        rules = len(rights.read_namespaced_role(*role).rules)
        rights.patch_namespaced_role(*role, {"rules": []})
        code, findings = _install(ground, "--no-see-nodes", "--size", "5Gi")
        assert code == 0
        states = {
            item["name"]: item["state"] for item in findings["objects"] if item["kind"] != "Role"
        }
        assert states == {DATA: "left", WORK: "left", role[0]: "unchanged", "kfp-ddp": "unchanged"}
        assert len(rights.read_namespaced_role(*role).rules) == rules
        assert _claims(ground)[DATA].spec.resources.requests["storage"] == "1Gi"


def test_nothing_is_created_if_one_object_is_refused(cluster: client.ApiClient) -> None:
    """KFP's account may create PVCs, but no roles with rights that it lacks."""
    with namespace(cluster, ours=False) as ground:
        account = client.ApiClient(cluster.configuration)
        who = f"system:serviceaccount:{ground.namespace}:{ground.service_account}"
        account.set_default_header("Impersonate-User", who)
        api = Api(account, ground.namespace)
        objects = manifests(Installation(ground.namespace, "standard", size="1Gi", source=False))
        with pytest.raises(InputError, match=r"^Role kfp-ddp-launcher is refused: .*; nothing was"):
            apply(api, objects)
        assert _claims(ground) == {}


def test_restricted_namespace_gets_a_job_and_limits(cluster: client.ApiClient) -> None:
    with namespace(cluster, ours=False, labels=RESTRICTED) as ground:
        quota = {"metadata": {"name": "all"}, "spec": {"hard": {"limits.memory": "64Gi"}}}
        ground.core.create_namespaced_resource_quota(ground.namespace, quota)
        code, findings = _install(ground, "--no-see-nodes", "--image", IMAGE)
        created = {
            item["name"] for item in findings["objects"] if item["kind"] in ("Job", "LimitRange")
        }
    assert code == 0
    assert created == {"kfp-ddp-fsgroup", "kfp-ddp"}


@pytest.mark.smoke
def test_installed_objects_are_those_of_deploy(cluster: client.ApiClient) -> None:
    import yaml

    from kfp_ddp.install.manifests import DEPLOY

    target = Installation("kubeflow", divide_accounts=True)
    ours = {_key(item): item for item in manifests(target)}
    for folder in ("rbac", "rbac/divided", "rbac/nodes", "storage", "eviction"):
        built = kubectl("kustomize", str(DEPLOY.resolve() / folder))
        for document in yaml.safe_load_all(built):
            mine = ours[_key(document)]
            for part in ("rules", "roleRef", "spec", "type"):
                assert mine.get(part) == document.get(part)
            named = [item["name"] for item in document.get("subjects", ())]
            assert [item["name"] for item in mine.get("subjects", ())] == named


@pytest.mark.parametrize("how", ["printed", "overlay"])
def test_files_in_git_make_what_install_would_make(
    cluster: client.ApiClient, tmp_path: Path, how: str
) -> None:
    """With public images: the source is in a file of its own."""
    with namespace(cluster, ours=False) as ground:
        where = ("-n", ground.namespace, "--no-see-nodes")
        if how == "printed":
            done = kfp_ddp("install", "--print", str(tmp_path), *where, *WITH)
            assert done.returncode == 0, done.stderr
        else:
            left_out = () if _served(ground) else ("/monitoring",)
            write_overlay(tmp_path, ground.namespace, left_out)
        kubectl("apply", "--server-side", "-k", str(tmp_path))
        rehearsed = kfp_ddp("install", "--dry-run", "--json", "--chown", "no", *where, *WITH)
        assert rehearsed.returncode == 0, rehearsed.stderr
        objects = json.loads(rehearsed.stdout)["objects"]
        differ = {item["kind"] for item in objects if item["state"] not in ("unchanged", "left")}
        # Kustomize leaves out the namespace of subjects, for which that of the binding counts.
        assert differ <= ({"RoleBinding"} if how == "overlay" else set())
        doctor = json.loads(kfp_ddp("doctor", "--json", "-n", ground.namespace).stdout)
        (source,) = (one for one in doctor["findings"] if one["what"] == "public images")
        assert map_name() not in source["message"]  # it is neither missing nor another one


def test_uninstall_removes_all_but_the_claims(cluster: client.ApiClient) -> None:
    with namespace(cluster, ours=False) as ground:
        where = ("-n", ground.namespace)
        options = ("--divide-accounts", "--network-policy", "--copies", "--chown", "no")
        code, created = _install(ground, *options)
        assert code == 0
        made = {(item["kind"], item["name"]) for item in created["objects"]}
        old = {"name": "kfp-ddp-source-0-1-0-old", "labels": PART_OF}
        ground.core.create_namespaced_config_map(ground.namespace, {"metadata": old})
        rehearsed = kfp_ddp("uninstall", "--dry-run", "--json", *where)
        done = kfp_ddp("uninstall", "--json", *where)
        assert (rehearsed.returncode, done.returncode) == (0, 0), done.stderr
        deleted = {
            (item["kind"], item["name"])
            for item in json.loads(done.stdout)["objects"]
            if item["state"] == "deleted"
        }
        of_cluster = {one for one in made if one[0] == "ClusterRole"}  # another may use it
        claims = {("PersistentVolumeClaim", DATA), ("PersistentVolumeClaim", WORK)}
        assert deleted - of_cluster == made - of_cluster - claims | {("ConfigMap", old["name"])}
        assert set(_claims(ground)) == {DATA, WORK}
        done = kfp_ddp("uninstall", "--json", "--claims", "both", *where)
        assert done.returncode == 0, done.stderr
        until(lambda: not _claims(ground), "the end of both claims")


def _key(document: dict[str, Any]) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def _install(ground: Grounds, *options: str) -> tuple[int, dict[str, Any]]:
    arguments = options if "--size" in options else (*WITH, *options)
    own = ("--registry", REGISTRY)  # test_public_images.py has the source in a ConfigMap
    done = kfp_ddp("install", "-n", ground.namespace, "--json", *own, *WITH[:2], *arguments)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def _claims(ground: Grounds) -> dict[str, Any]:
    findings = ground.core.list_namespaced_persistent_volume_claim(ground.namespace).items
    return {item.metadata.name: item for item in findings}


def _drop_the_binding(ground: Grounds) -> None:
    name = f"kfp-ddp-nodes.{ground.namespace}"
    client.RbacAuthorizationV1Api(ground.api).delete_cluster_role_binding(name)

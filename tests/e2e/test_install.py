"""`kfp-ddp install` into new and existing namespaces, and without the right to."""

import json
from typing import Any

import pytest
from kubernetes import client

from kfp_ddp.core.errors import InputError
from kfp_ddp.install import Installation, apply, manifests
from kfp_ddp.k8s.api import Api
from tests.e2e.harness import step_pod
from tests.e2e.harness.grounds import IMAGE, Grounds
from tests.e2e.harness.programs import kfp_ddp, kubectl
from tests.e2e.harness.scene import DATA, WORK, namespace

pytestmark = pytest.mark.smoke

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
WITH = ("--storage-class", "standard", "--size", "1Gi")


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
        objects = manifests(Installation(ground.namespace, "standard", size="1Gi"))
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


def test_installed_objects_are_those_of_deploy(cluster: client.ApiClient) -> None:
    import yaml

    from kfp_ddp.install import DEPLOY

    ours = {_key(item): item for item in manifests(Installation("kubeflow", copies=True))}
    for folder in ("rbac", "rbac/nodes", "storage", "eviction"):
        built = kubectl("kustomize", str(DEPLOY.resolve() / folder))
        for document in yaml.safe_load_all(built):
            mine = ours[_key(document)]
            for part in ("rules", "roleRef", "spec"):
                assert mine.get(part) == document.get(part)
            named = [item["name"] for item in document.get("subjects", ())]
            assert [item["name"] for item in mine.get("subjects", ())] == named


def _key(document: dict[str, Any]) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def _install(ground: Grounds, *options: str) -> tuple[int, dict[str, Any]]:
    arguments = options if "--size" in options else (*WITH, *options)
    done = kfp_ddp("install", "-n", ground.namespace, "--json", *WITH[:2], *arguments)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def _claims(ground: Grounds) -> dict[str, Any]:
    findings = ground.core.list_namespaced_persistent_volume_claim(ground.namespace).items
    return {item.metadata.name: item for item in findings}


def _drop_the_binding(ground: Grounds) -> None:
    name = f"kfp-ddp-nodes.{ground.namespace}"
    client.RbacAuthorizationV1Api(ground.api).delete_cluster_role_binding(name)

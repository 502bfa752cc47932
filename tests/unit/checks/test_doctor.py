"""The checks of `kfp-ddp doctor` against recorded answers of a cluster."""

import base64
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_ddp.checks.access import KUEUE_RIGHTS, launch_rights, quota, rights, secret
from kfp_ddp.checks.claims import DEFAULT, claims
from kfp_ddp.checks.finding import CheckContext, Finding, Requirements
from kfp_ddp.checks.nodes import gpus, room
from kfp_ddp.checks.operators import kserve, operators
from kfp_ddp.jobs.gangs import GANGS
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.k8s.api import LAUNCHER, STEPS, Api, ApiError, Object, explanation
from kfp_ddp.k8s.resource import PODS, STORAGE_CLASSES, Resource
from kfp_ddp.rollout.rollout import OURS
from tests.cluster import FakeApi

DEPLOY = Path(__file__).parents[3] / "deploy"
CLASS = {"metadata": {"name": "standard"}, "provisioner": "x", "volumeBindingMode": "Immediate"}
PVCS = "/api/v1/namespaces/space/persistentvolumeclaims/"
NODES = [{"metadata": {}, "spec": {}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}}] * 3


def cluster(api: Api, existing: list[Object] | None = None, **fields: Any) -> CheckContext:
    return CheckContext(api, Requirements(**fields), existing)


def claim(name: str, phase: str = "Bound", mode: str = "ReadWriteMany", **spec: Any) -> Object:
    return {
        "metadata": {"name": name},
        "spec": {"accessModes": [mode], **spec},
        "status": {"phase": phase},
    }


def of_claims(data: Object, nodes: list[Object] | None = NODES, **fields: Any) -> Finding:
    """Return the finding about the data PVC, next to a correct work PVC."""
    objects = {PVCS + "kfp-ddp-data": data, PVCS + "kfp-ddp-work": claim("kfp-ddp-work")}
    api = FakeApi({**objects, STORAGE_CLASSES.path(""): {"items": [CLASS]}})
    finding, work = claims(cluster(api, nodes, **fields))
    assert work.state == "ok"
    return finding


@pytest.mark.parametrize("nodes", [NODES, None])
def test_pvc_of_one_node_is_bad_on_several(nodes: list[Object] | None) -> None:
    finding = of_claims(claim("kfp-ddp-data", mode="ReadWriteOnce"), nodes)
    assert finding.state == "bad"
    assert finding.message.startswith("is ReadWriteOnce, ")
    assert finding.remedy.endswith("or give --publish clone")
    assert ("number of nodes" in finding.message) == (nodes is None)
    for enough in ({"publish": "clone"}, {"backend": "local"}):
        assert of_claims(claim("kfp-ddp-data", mode="ReadWriteOnce"), nodes, **enough).state == "ok"


@pytest.mark.parametrize(
    ("fields", "hard"),
    [
        ({"nodes": 1, "gpus_per_node": 0}, "pods=4 1 2Gi 6 9Gi"),
        ({"backend": "local"}, "pods=3 1 2Gi 5 9Gi"),
        ({"nodes": 2, "gpus_per_node": 8}, "pods=5 33 130Gi 130 514Gi nvidia.com/gpu=16"),
        ({"nodes": 3, "gpus_per_node": 2, "gpu_resource": "amd.com/gpu"}, "amd.com/gpu=6"),
    ],
)
def test_quota_for_one_run_is_a_command(fields: dict[str, Any], hard: str) -> None:
    """The workers and what KFP runs beside them, or the step that computes if it needs more."""
    (finding,) = quota(cluster(FakeApi({}), **fields))
    command, _, amounts = finding.message.partition(" --hard=")
    assert command == "kubectl create quota kfp-ddp -n space"
    for name in ("requests.", "limits.", "cpu=", "memory="):
        amounts = amounts.replace(name, "")
    assert amounts.replace(",", " ").endswith(hard)


@pytest.mark.parametrize(
    ("phase", "spec", "message"),
    [
        ("Lost", {}, "is Lost: its volume is gone"),
        ("Pending", {"storageClassName": "standard"}, "is Pending"),
        ("Pending", {"storageClassName": "gold"}, "waits for the storage class gold, which does"),
    ],
)
def test_pvc_that_cannot_be_mounted_is_bad(phase: str, spec: Object, message: str) -> None:
    finding = of_claims(claim("kfp-ddp-data", phase, **spec))
    assert (finding.state, finding.message[: len(message)]) == ("bad", message)
    assert finding.remedy
    deleted = claim("kfp-ddp-data")
    deleted["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert of_claims(deleted).message == "is being deleted"


@pytest.mark.parametrize(
    ("classes", "default", "remedy"),
    [
        (["gold"], "gold", "kfp-ddp install -n space --work-claim mine"),
        (["a", "b"], "", "kfp-ddp install -n space --work-claim mine --storage-class CLASS, one"),
        ([], "", "install a CSI driver whose volumes many nodes can mount, then kfp-ddp install"),
    ],
)
def test_remedy_of_missing_pvcs_is_install(classes: list[str], default: str, remedy: str) -> None:
    listed = []
    for name in classes:
        annotations = {DEFAULT: str(name == default).lower()}
        listed.append({**CLASS, "metadata": {"name": name, "annotations": annotations}})
    api = FakeApi({STORAGE_CLASSES.path(""): {"items": listed}})
    findings = claims(cluster(api, NODES, work_claim="mine"))
    assert {finding.state for finding in findings} == {"bad"}
    assert all(finding.remedy.startswith(remedy) for finding in findings)


@pytest.mark.parametrize(("condition", "bad"), [("Failed", 1), ("", 1), ("Complete", 0)])
def test_volumes_whose_job_did_not_complete_are_bad(condition: str, bad: int) -> None:
    names = ("kfp-ddp-data", "kfp-ddp-work")
    objects: dict[str, Object] = {PVCS + name: claim(name) for name in names}
    conditions = [{"type": condition, "status": "True"}] if condition else []
    job = {"status": {"conditions": conditions}}
    objects["/apis/batch/v1/namespaces/space/jobs/kfp-ddp-chown"] = job
    findings = claims(cluster(FakeApi(objects)))
    assert [one.what for one in findings if one.state == "bad"] == ["owner of volumes"] * bad


def served(**fields: Object) -> FakeApi:
    """All kinds of jobs, whose specifications have these fields by the kind's name."""
    objects: dict[str, Object] = {}
    for kind in KINDS.values():
        group, _, version = kind.resource.group_version.partition("/")
        objects[f"/apis/{group}"] = {"versions": [{"version": version}]}
        names = [{"name": kind.resource.plural} for kind in KINDS.values()]
        objects[f"/apis/{kind.resource.group_version}"] = {"resources": names}
        schemas = objects.setdefault(
            f"/openapi/v3/apis/{kind.resource.group_version}", {"components": {"schemas": {}}}
        )["components"]["schemas"]
        spec = {"properties": fields.get(kind.title, {})}
        schemas[f"org.kubeflow.{kind.title}"] = {"properties": {"spec": spec}}
    return FakeApi(objects)


def schema(path: tuple[str, ...], lists: tuple[str, ...]) -> Object:
    """Return the properties of a specification with the field at this path."""
    name, *rest = path
    inner: Object = {"properties": schema(tuple(rest), lists)} if rest else {"type": "string"}
    return {name: {"type": "array", "items": inner} if name in lists else inner}


LISTS = ("runtimePatches", "replicatedJobs")
NEW = {
    KINDS[name].title: schema(KINDS[name].newest_field, LISTS)
    for name in ("pytorchjob", "trainjob")
}
OLD: Object = {
    "PyTorchJob": {"runPolicy": {"properties": {}}},
    "TrainJob": {"runtimePatches": {"type": "array", "items": {"properties": {}}}},
}


@pytest.mark.parametrize("backend", ["pytorchjob", "trainjob"])
@pytest.mark.parametrize("old", ["", "PyTorchJob", "TrainJob"])
def test_older_operator_lacks_a_field(backend: str, old: str) -> None:
    fields = {**NEW, old: OLD[old]} if old else NEW
    findings = operators(cluster(served(**fields), backend=backend))
    states = {finding.what: finding.state for finding in findings if finding.state != "ok"}
    assert states == ({old: "bad" if old.lower() == backend else "warn"} if old else {})
    for finding in findings:
        is_old = finding.message.startswith("is older: its jobs have no spec.")
        assert is_old == (finding.what == old)


def test_operator_without_pods_is_bad() -> None:
    api = served(**NEW)
    stopped = {"metadata": {"namespace": "kubeflow", "name": "training-operator"}, "status": {}}
    api.objects["/apis/apps/v1/deployments"] = {"items": [stopped]}
    torch = operators(cluster(api))[0]
    assert (torch.state, torch.message) == ("bad", "kubeflow/training-operator is not running")
    assert torch.remedy.startswith("kubectl describe deployments -A -l control-plane=")


INFERENCE = "/apis/serving.kserve.io/v1beta1"
SERVICES = {"name": "inferenceservices"}
SHOP = f"{INFERENCE}/namespaces/space/inferenceservices/shop"


@pytest.mark.parametrize(
    ("objects", "state", "message", "remedy"),
    [
        ({}, "bad", "this cluster has no inferenceservices", "install KServe"),
        ({INFERENCE: {"resources": [SERVICES]}}, "ok", "shop will be created", ""),
        ({SHOP: {"metadata": {"labels": OURS}}}, "ok", "shop exists", ""),
        ({SHOP: {"metadata": {}}}, "bad", "was not made by kfp-ddp", "name another"),
    ],
)
def test_kserve(objects: dict[str, Object], state: str, message: str, remedy: str) -> None:
    api = FakeApi({"/readyz": {}, **objects})
    assert kserve(cluster(api)) == []
    (finding,) = kserve(cluster(api, service="shop"))
    assert (finding.state, finding.remedy.startswith(remedy)) == (state, True)
    assert message in finding.message


@pytest.mark.parametrize(
    ("resource", "account", "remedy"),
    [
        (PODS, "system:serviceaccount:space:default", "apply deploy/rbac there"),
        (STORAGE_CLASSES, "system:serviceaccount:space:default", "apply deploy/storage there"),
        (PODS, "system:serviceaccount:space:kfp-ddp-steps", "mount the secret kfp-ddp-launcher at"),
        (PODS, "jane", "ask an administrator for it"),
        (Resource("v1", "services", role=""), "system:serviceaccount:a:b", "ask an administrator"),
    ],
)
def test_remedy_of_a_missing_right(resource: Resource, account: str, remedy: str) -> None:
    message = f'x is forbidden: User "{account}" cannot list resource'
    line = explanation(ApiError(403, "Forbidden", message), "list", resource, "space")
    assert f"no right to list {resource.plural} " in line
    assert f"as {account}; {remedy}" in line


class Reviews(FakeApi):
    """A server that grants all rights, and records whose it was asked for."""

    def __init__(self) -> None:
        super().__init__({})
        self.users: set[str] = set()

    def call(self, method: str, path: str, *more: Any, **named: Any) -> Object:
        if not path.endswith("/subjectaccessreviews"):
            return super().call(method, path, *more, **named)
        self.users.add(more[0]["spec"]["user"].rpartition(":")[2])
        return {"status": {"allowed": True}}


@pytest.mark.parametrize(
    ("account", "checked"), [("pipeline-runner", "pipeline-runner"), (STEPS, LAUNCHER)]
)
def test_rights_to_launch_are_those_of_the_account_that_launches(
    account: str, checked: str
) -> None:
    api = Reviews()
    findings = rights(cluster(api, service_account=account, gpus_per_node=0))
    assert {finding.state for finding in findings} == {"ok"}
    assert api.users == {checked}


def granted(file: Path) -> set[tuple[str, str, str]]:
    """Return group, resource and verb of the rules of a Role."""
    return {
        (group, resource, verb)
        for rule in yaml.safe_load(file.read_text())["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_checked_rights_are_those_of_deploy() -> None:
    required = [*launch_rights("pytorchjob", "shop", *GANGS), *KUEUE_RIGHTS]
    checked = {(g, kind, verb) for g, kind, verbs, _ in required for verb in verbs.split()}
    assert checked == granted(DEPLOY / "rbac" / "role.yaml")


def test_steps_of_divided_accounts_write_nothing_but_what_argo_needs() -> None:
    file = DEPLOY / "rbac" / "divided" / "role.yaml"
    given = granted(file)
    writes = {right for right in given if right[2] not in ("get", "list", "watch")}
    results = "argoproj.io", "workflowtaskresults"
    assert writes == {(*results, "create"), (*results, "patch")}
    named = {
        (resource, name)
        for rule in yaml.safe_load(file.read_text())["rules"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", ["*"])
        if resource in ("secrets", "configmaps")
    }
    assert named == {("secrets", "mlpipeline-minio-artifact"), ("configmaps", "kfp-launcher")}
    # Whether a run is alive: a kind that may not be listed counts as not there.
    live = {(kind.resource.group, kind.resource.plural, "list") for kind in KINDS.values()}
    assert live <= given


KEY = {"type": "service_account", "client_email": "a", "private_key": "b"}
VALUES = {
    "AWS_ACCESS_KEY_ID": "a",
    "AWS_SECRET_ACCESS_KEY": "b",
    "netrc": "",
    "AZURE_STORAGE_ACCOUNT": "a",
    "AZURE_STORAGE_CONNECTION_STRING": "b",
    "HF_TOKEN": "c",
}


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.sets(st.sampled_from(sorted(VALUES))),
    st.sampled_from([None, json.dumps(KEY), json.dumps(KEY)[1:], "[]", "", "\xff"])
    | st.sampled_from(sorted(KEY)).map(
        lambda name: json.dumps({key: text for key, text in KEY.items() if key != name})
    ),
)
def test_secret_needs_valid_keys(names: set[str], google: str | None) -> None:
    values = {name: VALUES[name] for name in names}
    values |= {} if google is None else {"key.json": google}
    data = {k: base64.b64encode(text.encode("latin-1")).decode() for k, text in values.items()}
    path = "/api/v1/namespaces/space/secrets/kfp-ddp-bucket"
    (finding,) = secret(cluster(FakeApi({path: {"data": data}})))
    pair = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} & names
    valid = google in (None, json.dumps(KEY))
    assert (finding.state == "ok") == (bool(values) and len(pair) != 1 and valid), finding
    assert bool(finding.remedy) == (finding.state != "ok")
    assert "\n" not in finding.message


@pytest.mark.parametrize(("name", "state"), [("kfp-ddp-bucket", "warn"), ("mine", "bad")])
def test_missing_secret_has_a_remedy(name: str, state: str) -> None:
    (finding,) = secret(cluster(FakeApi({}), bucket_secret=name))
    assert (finding.state, finding.message.partition(":")[0]) == (state, "does not exist")
    assert "kubectl create secret" in finding.remedy


def test_step_that_fits_on_no_node_is_a_warning() -> None:
    api = FakeApi({})
    small = [{"spec": {}, "status": {"allocatable": {"cpu": "90m", "memory": "7Gi"}}}]
    finding = room(cluster(api, small))
    assert [finding.what for finding in finding] == ["room for data-sync", "room for evaluate"]
    assert {finding.state for finding in finding} == {"warn"}
    assert {finding.remedy for finding in finding} == {"add one that has"}
    large = [{"spec": {}, "status": {"allocatable": {"cpu": "3920m", "memory": "12Gi"}}}]
    assert room(cluster(api, large)) == room(cluster(api)) == []


@pytest.mark.parametrize(
    ("minimum", "resource", "nodes"),
    list(itertools.product([-1, 0, 1, 8, 9], ["nvidia.com/gpu", "amd.com/gpu"], [1, 3, 4])),
)
def test_gpus_are_counted_by_name_and_node(minimum: int, resource: str, nodes: int) -> None:
    fields: dict[str, Any] = {"gpus_per_node": minimum, "gpu_resource": resource, "nodes": nodes}
    (finding,) = gpus(cluster(FakeApi({}), NODES, **fields))
    state = "ok" if nodes <= 3 and minimum <= 8 else "warn"
    if resource == "amd.com/gpu":
        state = "bad"
    assert finding.state == ("ok" if minimum == 0 else state)
    assert bool(finding.remedy) == (finding.state != "ok")

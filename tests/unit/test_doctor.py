"""What the doctor makes of answers that no cluster of one node and new operators gives."""

import base64
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from kfp_ddp.checks.doctor.finding import Asked, Finding
from kfp_ddp.checks.doctor.nodes import gpus, room
from kfp_ddp.checks.doctor.operators import kserve, operators
from kfp_ddp.checks.doctor.rights import KUEUE_RIGHTS, RIGHTS, of_gangs, of_jobs, of_service
from kfp_ddp.checks.doctor.secret import secret
from kfp_ddp.checks.doctor.storage import CLASSES, claims
from kfp_ddp.jobs.gang import GANGS
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.k8s.api import Api, ApiError, Object
from kfp_ddp.models.serving.rollout import OURS

DEPLOY = Path(__file__).parents[2] / "deploy"
CLASS = {"metadata": {"name": "standard"}, "provisioner": "x", "volumeBindingMode": "Immediate"}
PVCS = "/api/v1/namespaces/here/persistentvolumeclaims/"
NODES = [{"spec": {}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}}] * 3


class Answers(Api):
    """A server that has these objects by path and nothing else."""

    def __init__(self, objects: dict[str, Object]) -> None:
        super().__init__(None, "here")
        self.objects = objects

    def call(self, method: str, path: str, *more: Any, **named: Any) -> Object:
        if path not in self.objects:
            raise ApiError(404, "Not Found", f"{path} not found")
        return self.objects[path]


def claim(name: str, phase: str = "Bound", mode: str = "ReadWriteMany", **spec: Any) -> Object:
    return {
        "metadata": {"name": name},
        "spec": {"accessModes": [mode], **spec},
        "status": {"phase": phase},
    }


def of_claims(data: Object, nodes: list[Object] | None = NODES, **asked: Any) -> Finding:
    """What is found of the claim for data, beside a work claim that fits."""
    objects = {PVCS + "kfp-ddp-data": data, PVCS + "kfp-ddp-work": claim("kfp-ddp-work")}
    api = Answers({**objects, CLASSES: {"items": [CLASS]}})
    found, work = claims(api, Asked(**asked), nodes)
    assert work.state == "ok"
    return found


@pytest.mark.parametrize("nodes", [NODES, None])
def test_a_claim_for_one_node_stops_a_run_on_several(nodes: list[Object] | None) -> None:
    found = of_claims(claim("kfp-ddp-data", mode="ReadWriteOnce"), nodes)
    assert found.state == "bad"
    assert found.said.startswith("is ReadWriteOnce, and the launching step and the workers mount")
    assert found.remedy == "make it anew as ReadWriteMany, or give --publish clone"
    assert ("how many there are may not be seen" in found.said) == (nodes is None)


@pytest.mark.parametrize("asked", [{"publish": "clone"}, {"backend": "local"}])
def test_where_a_copy_is_mounted_or_no_worker_it_does_not(asked: dict[str, Any]) -> None:
    assert of_claims(claim("kfp-ddp-data", mode="ReadWriteOnce"), **asked).state == "ok"


@pytest.mark.parametrize(
    ("phase", "spec", "said"),
    [
        ("Lost", {}, "is Lost: its volume is gone"),
        ("Pending", {"storageClassName": "standard"}, "is Pending"),
        ("Pending", {}, "is Pending"),
        ("Pending", {"storageClassName": "gold"}, "waits for the storage class gold, which is not"),
    ],
)
def test_a_claim_that_no_pod_can_mount_stops_a_run(phase: str, spec: Object, said: str) -> None:
    found = of_claims(claim("kfp-ddp-data", phase, **spec))
    assert (found.state, found.said[: len(said)]) == ("bad", said)
    assert found.remedy


def test_a_claim_that_is_being_deleted_stops_a_run() -> None:
    going = claim("kfp-ddp-data")
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert of_claims(going).said == "is being deleted"


@pytest.mark.parametrize(
    ("classes", "remedy"),
    [
        (["gold"], "kubectl apply -n here -f {file}"),
        (["a", "b"], "set storageClassName in {file}, now gold, to one of a, b, then kubectl"),
        ([], "install a CSI driver whose volumes many nodes can mount, then kubectl apply -n here"),
    ],
)
def test_missing_claims_are_made_with_a_class_that_is_there(
    classes: list[str], remedy: str, tmp_path: Path
) -> None:
    file = tmp_path / "claims.yaml"
    file.write_text("spec: {storageClassName: gold}\n---\nspec: {storageClassName: gold}\n")
    listed = [{**CLASS, "metadata": {"name": name}} for name in classes]
    found = claims(Answers({CLASSES: {"items": listed}}), Asked(claims_file=file), NODES)
    assert {each.state for each in found} == {"bad"}
    assert all(each.remedy.startswith(remedy.format(file=file)) for each in found)


def served(**fields: Object) -> Answers:
    """All kinds of jobs, whose specifications have these fields by the kind's name."""
    objects: dict[str, Object] = {}
    for kind in KINDS.values():
        group, _, version = kind.group_version.partition("/")
        objects[f"/apis/{group}"] = {"versions": [{"version": version}]}
        names = [{"name": each.plural} for each in KINDS.values()]
        objects[f"/apis/{kind.group_version}"] = {"resources": names}
        schemas = objects.setdefault(
            f"/openapi/v3/apis/{kind.group_version}", {"components": {"schemas": {}}}
        )["components"]["schemas"]
        spec = {"properties": fields.get(kind.title, {})}
        schemas[f"org.kubeflow.{kind.title}"] = {"properties": {"spec": spec}}
    return Answers(objects)


NEW: Object = {
    "PyTorchJob": {"runPolicy": {"properties": {"managedBy": {"type": "string"}}}},
    "TrainJob": {"runtimePatches": {"type": "array"}},
}


@pytest.mark.parametrize("backend", ["pytorchjob", "trainjob"])
@pytest.mark.parametrize("old", ["", "PyTorchJob", "TrainJob"])
def test_an_older_operator_is_told_by_what_its_jobs_lack(backend: str, old: str) -> None:
    fields = {**NEW, old: {"runPolicy": {"properties": {}}}} if old else NEW
    found = operators(served(**fields), Asked(backend=backend))
    states = {each.what: each.state for each in found if each.state != "ok"}
    assert states == ({old: "bad" if old.lower() == backend else "warn"} if old else {})
    for each in found:
        assert (each.said.startswith("is older: its jobs have no spec.")) == (each.what == old)


def test_an_operator_that_does_not_run_stops_a_run() -> None:
    api = served(**NEW)
    stopped = {"metadata": {"namespace": "kubeflow", "name": "training-operator"}, "status": {}}
    api.objects["/apis/apps/v1/deployments"] = {"items": [stopped]}
    torch = operators(api, Asked())[0]
    assert (torch.state, torch.said) == ("bad", "kubeflow/training-operator is not running")
    assert torch.remedy.startswith("kubectl describe deployments -A -l control-plane=")


INFERENCE = "/apis/serving.kserve.io/v1beta1"
SERVICES = {"name": "inferenceservices"}
SHOP = f"{INFERENCE}/namespaces/here/inferenceservices/shop"


@pytest.mark.parametrize(
    ("there", "state", "said", "remedy"),
    [
        ({}, "bad", "this cluster has no inferenceservices", "install KServe"),
        ({INFERENCE: {"resources": [SERVICES]}}, "ok", "shop will be made", ""),
        ({SHOP: {"metadata": {"labels": OURS}}}, "ok", "shop is there", ""),
        ({SHOP: {"metadata": {}}}, "bad", "was not made by kfp-ddp", "name another"),
    ],
)
def test_kserve_is_looked_for_where_a_service_is_named(
    there: dict[str, Object], state: str, said: str, remedy: str
) -> None:
    api = Answers({"/readyz": {}, **there})
    assert kserve(api, Asked()) == []
    (found,) = kserve(api, Asked(service="shop"))
    assert (found.state, found.remedy.startswith(remedy)) == (state, True)
    assert said in found.said


def test_the_rights_that_are_asked_for_are_those_that_deploy_gives() -> None:
    role = yaml.safe_load((DEPLOY / "rbac" / "role.yaml").read_text())
    given = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    asked = (*of_jobs("pytorchjob"), *RIGHTS, *of_gangs(*GANGS), *KUEUE_RIGHTS)
    asked += of_service("shop")
    assert {
        (g, resource, verb) for g, resource, verbs, _ in asked for verb in verbs.split()
    } == given


@pytest.mark.parametrize("seed", range(200))
def test_a_secret_has_what_steps_read_or_is_refused(seed: int) -> None:
    dice = random.Random(seed)
    keys = {"type": "service_account", "client_email": "a", "private_key": "b"}
    lacking = dice.choice([None, None, *keys])
    google = json.dumps({name: text for name, text in keys.items() if name != lacking})
    damage = dice.choice([google, google, google, google[1:], "[]", "", "\xff"])
    given = {
        "key.json": damage,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "netrc": "",
        "AZURE_STORAGE_ACCOUNT": "a",
        "AZURE_STORAGE_CONNECTION_STRING": "b",
        "HF_TOKEN": "c",
    }
    chosen = {name: given[name] for name in given if dice.random() < 0.5}
    data = {k: base64.b64encode(text.encode("latin-1")).decode() for k, text in chosen.items()}
    path = "/api/v1/namespaces/here/secrets/kfp-ddp-bucket"
    found = secret(Answers({path: {"data": data}}), Asked())

    pair = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} & chosen.keys()
    good_key = "key.json" not in chosen or (damage == google and lacking is None)
    assert (found.state == "ok") == (bool(chosen) and len(pair) != 1 and good_key), found
    assert bool(found.remedy) == (found.state != "ok")
    assert "\n" not in found.said


def test_steps_that_no_node_has_room_for_are_a_warning_each() -> None:
    small = [{"spec": {}, "status": {"allocatable": {"cpu": "90m", "memory": "7Gi"}}}]
    found = room(Asked(), small)
    assert [each.what for each in found] == ["room for data-sync", "room for evaluate"]
    assert {each.state for each in found} == {"warn"}
    assert {each.remedy for each in found} == {"add one that has"}
    large = [{"spec": {}, "status": {"allocatable": {"cpu": "3920m", "memory": "12Gi"}}}]
    assert room(Asked(), large) == room(Asked(), None) == []


@pytest.mark.parametrize(
    ("wanted", "resource", "nodes"),
    list(itertools.product([-1, 0, 1, 8, 9], ["nvidia.com/gpu", "amd.com/gpu"], [1, 3, 4])),
)
def test_gpus_are_counted_by_name_and_node(wanted: int, resource: str, nodes: int) -> None:
    found = gpus(Asked(gpus_per_node=wanted, gpu_resource=resource, nodes=nodes), NODES)
    state = "ok" if nodes <= 3 and wanted <= 8 else "warn"
    if resource == "amd.com/gpu":
        state = "bad"
    assert found.state == ("ok" if wanted == 0 else state)
    assert bool(found.remedy) == (found.state != "ok")

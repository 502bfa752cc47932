"""The objects of `kfp-ddp install`, and its checks."""

from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from kfp_ddp.checks.claims import CLASSES
from kfp_ddp.cli import app
from kfp_ddp.core.errors import InputError
from kfp_ddp.install import Installation, check, manifests, owner, path
from kfp_ddp.k8s.api import Api, ApiError, Object


class Answers(Api):
    """A server that has these storage classes, by name and driver, and one namespace."""

    def __init__(self, **classes: str) -> None:
        super().__init__(None, "here")
        made = [{"metadata": {"name": name}, "provisioner": classes[name]} for name in classes]
        self.objects: dict[str, Object] = {
            CLASSES: {"items": made},
            "/api/v1/namespaces": {"items": [{"metadata": {"name": "here"}}]},
            "/api/v1/namespaces/here": {"metadata": {"name": "here"}},
        }

    def call(self, method: str, path: str, *more: Any, **named: Any) -> Object:
        if path not in self.objects:
            raise ApiError(404, "Not Found", f"{path} not found")
        return self.objects[path]


def printed(*options: str) -> list[Object]:
    answer = CliRunner().invoke(app, ["install", "--print", "-n", "team", *options])
    assert answer.exit_code == 0, answer.output
    return list(yaml.safe_load_all(answer.output))


@pytest.mark.parametrize(
    ("options", "user"),
    [((), None), (("--chown", "no"), None), (("--chown", "root"), 0), (("--chown", "group"), 1000)],
)
def test_the_job_for_volumes_is_printed_where_it_is_asked_for(
    options: tuple[str, ...], user: int | None
) -> None:
    jobs = [each for each in printed(*options) if each["kind"] == "Job"]
    assert [each["metadata"]["namespace"] for each in jobs] == (
        ["team"] if user is not None else []
    )
    users = [each["spec"]["template"]["spec"]["securityContext"]["runAsUser"] for each in jobs]
    assert users == ([user] if user is not None else [])


def test_the_yaml_is_set_for_the_namespace_wherever_it_is_named() -> None:
    for each in printed("--storage-class", "nfs", "--copies"):
        of_cluster = each["kind"].startswith("Cluster")
        assert each["metadata"].get("namespace") == (None if of_cluster else "team")
        assert {one["namespace"] for one in each.get("subjects", ())} <= {"team"}
        if each["kind"] == "ClusterRoleBinding":
            assert each["metadata"]["name"].endswith(".team")


def test_the_namespace_may_be_set_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KFP_DDP_NAMESPACE", "vision")
    answer = CliRunner().invoke(app, ["install", "--print"])
    found = list(yaml.safe_load_all(answer.output))
    assert {each["metadata"].get("namespace", "vision") for each in found} == {"vision"}


def test_claims_are_of_the_class_size_and_mode_that_are_given() -> None:
    options = ("--storage-class", "nfs", "--size", "20Gi", "--access-mode", "ReadWriteOnce")
    claims = [each for each in printed(*options) if each["kind"] == "PersistentVolumeClaim"]
    assert [each["metadata"]["name"] for each in claims] == ["kfp-ddp-data", "kfp-ddp-work"]
    for each in claims:
        assert each["spec"] == {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "nfs",
            "resources": {"requests": {"storage": "20Gi"}},
        }


@pytest.mark.parametrize(("which", "names"), [("data", ["mine"]), ("none", [])])
def test_only_the_claims_are_made_that_the_pipeline_mounts(which: str, names: list[str]) -> None:
    made = printed("--claims", which, "--data-claim", "mine")
    assert [e["metadata"]["name"] for e in made if e["kind"] == "PersistentVolumeClaim"] == names


def test_the_job_for_volumes_mounts_the_claims_that_are_wanted() -> None:
    job = owner(Installation("team", data_claim="mine", work_claim="", image="mine:1"), "root")
    pod = job["spec"]["template"]["spec"]
    assert [each["persistentVolumeClaim"] for each in pod["volumes"]] == [{"claimName": "mine"}]
    assert [each["mountPath"] for each in pod["containers"][0]["volumeMounts"]] == ["/claims/data"]
    assert pod["containers"][0]["image"] == "mine:1"


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (Installation("hare"), "namespace hare does not exist; did you mean 'here'?"),
        (Installation("here", "nsf"), "storage class nsf does not exist; did you mean 'nfs'?"),
        (Installation("here", "gold"), "storage class gold does not exist; it is one of"),
        (
            Installation("here"),
            "no storage class is the default; give",
        ),
        (
            Installation("here", "nfs", size="10GB"),
            "--size 10GB cannot be used: it should be such as 500Gi",
        ),
        (
            Installation("here", "disk"),
            "storage class disk (ebs.csi.aws.com) creates",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_made(wanted: Installation, said: str) -> None:
    with pytest.raises(InputError) as error:
        check(Answers(nfs="nfs.csi.k8s.io", disk="ebs.csi.aws.com"), wanted)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    "wanted",
    [
        Installation("here", "disk", "ReadWriteOnce"),
        Installation("here", data_claim="", work_claim=""),
    ],
)
def test_what_can_be_is_let_through(wanted: Installation) -> None:
    check(Answers(disk="ebs.csi.aws.com"), wanted)


def test_every_kind_has_its_path_on_the_server() -> None:
    paths = {each["kind"]: path(each, "x") for each in manifests(Installation("team"))}
    of_rights = "/apis/rbac.authorization.k8s.io/v1"
    assert paths == {
        "PersistentVolumeClaim": "/api/v1/namespaces/team/persistentvolumeclaims/x",
        "Role": f"{of_rights}/namespaces/team/roles/x",
        "RoleBinding": f"{of_rights}/namespaces/team/rolebindings/x",
        "PodDisruptionBudget": "/apis/policy/v1/namespaces/team/poddisruptionbudgets/x",
        "ClusterRole": f"{of_rights}/clusterroles/x",
        "ClusterRoleBinding": f"{of_rights}/clusterrolebindings/x",
    }

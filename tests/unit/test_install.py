"""The objects of `kfp-ddp install`, and its checks."""

from typing import Any

import pytest
import yaml

from kfp_ddp import __version__
from kfp_ddp.checks.claims import unfinished_owner
from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.install import Installation, apply, check, into, owner, replace, wait
from kfp_ddp.jobs.shipping.own_package import config_map, has_source, map_name
from kfp_ddp.k8s.api import LAUNCHER, STEPS, Object
from kfp_ddp.k8s.resource import CONFIG_MAPS, STORAGE_CLASSES
from tests.cluster import FakeApi, pod, waiting
from tests.commands import output


def existing(**classes: str) -> dict[str, Object]:
    """Return storage classes, by name and driver, and one namespace, by path."""
    items = [{"metadata": {"name": name}, "provisioner": classes[name]} for name in classes]
    return {
        STORAGE_CLASSES.path(""): {"items": items},
        "/api/v1/namespaces": {"items": [{"metadata": {"name": "here"}}]},
        "/api/v1/namespaces/here": {"metadata": {"name": "here"}},
    }


def printed(*options: str) -> list[Object]:
    return list(yaml.safe_load_all(output("install", "--print", "-n", "team", *options)))


@pytest.mark.parametrize(
    ("options", "user", "image"),
    [
        ((), None, ""),
        (("--chown", "no"), None, ""),
        (("--chown", "root", "--registry", "a.io/ml/"), 0, f"a.io/ml/launcher:{__version__}"),
        (("--chown", "group", "--launcher-image", "a.io/mine:2"), 1000, "a.io/mine:2"),
        (("--chown", "root", "--image", "busybox:1"), 0, "busybox:1"),
    ],
)
def test_chown_job_is_printed_on_request(
    options: tuple[str, ...], user: int | None, image: str
) -> None:
    """Its image is that of the launcher."""
    jobs = [item for item in printed(*options) if item["kind"] == "Job"]
    pods = [job["spec"]["template"]["spec"] for job in jobs]
    results = [
        (job["metadata"]["namespace"], pod["securityContext"]["runAsUser"], one["image"])
        for job, pod in zip(jobs, pods, strict=True)
        for one in pod["containers"]
    ]
    assert results == ([] if user is None else [("team", user, image)])


def test_manifests_have_the_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    for item in printed("--storage-class", "nfs", "--copies"):
        of_cluster = item["kind"].startswith("Cluster")
        assert item["metadata"].get("namespace") == (None if of_cluster else "team")
        assert {one["namespace"] for one in item.get("subjects", ())} <= {"team"}
        if item["kind"] == "ClusterRoleBinding":
            assert item["metadata"]["name"].endswith(".team")
    monkeypatch.setenv("KFP_DDP_NAMESPACE", "vision")
    items = yaml.safe_load_all(output("install", "--print"))
    names = {item["metadata"].get("namespace", "vision") for item in items}
    assert names == {"vision"}


def test_pvcs_have_the_class_size_and_mode_of_the_options() -> None:
    options = ("--storage-class", "nfs", "--size", "20Gi", "--access-mode", "ReadWriteOnce")
    claims = [item for item in printed(*options) if item["kind"] == "PersistentVolumeClaim"]
    assert [item["metadata"]["name"] for item in claims] == ["kfp-ddp-data", "kfp-ddp-work"]
    for item in claims:
        assert item["spec"] == {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "nfs",
            "resources": {"requests": {"storage": "20Gi"}},
        }


def test_divided_accounts_are_bound_to_what_each_may() -> None:
    kinds = {item["kind"]: item for item in printed() if "subjects" not in item}
    assert not {"ServiceAccount", "Secret"} & kinds.keys()
    items = printed("--divide-accounts")
    (token,) = (item for item in items if item["kind"] == "Secret")
    assert token["type"] == "kubernetes.io/service-account-token"
    assert token["metadata"]["name"] == LAUNCHER
    assert set(token["metadata"]["annotations"].values()) == {LAUNCHER}
    roles = {
        item["roleRef"]["name"]: {one["name"] for one in item["subjects"]} & {STEPS, LAUNCHER}
        for item in items
        if "subjects" in item
    }
    assert {role for role, accounts in roles.items() if STEPS in accounts} == {STEPS}
    assert all(LAUNCHER in accounts for accounts in roles.values())
    assert {"kfp-ddp-launcher", "kfp-ddp-storage"} <= roles.keys()


@pytest.mark.parametrize(("which", "names"), [("data", ["mine"]), ("none", [])])
def test_pvcs_are_those_of_the_options(which: str, names: list[str]) -> None:
    items = printed("--claims", which, "--data-claim", "mine")
    assert [e["metadata"]["name"] for e in items if e["kind"] == "PersistentVolumeClaim"] == names


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Installation("hare"), "namespace hare does not exist; did you mean 'here'?"),
        (Installation("here", "nsf"), "storage class nsf does not exist; did you mean 'nfs'?"),
        (Installation("here"), "no storage class is the default; give"),
        (Installation("here", "nfs", size="10GB"), "--size 10GB cannot be used"),
        (Installation("here", "disk"), "storage class disk (ebs.csi.aws.com) creates"),
    ],
)
def test_invalid_installation_is_an_error(target: Installation, message: str) -> None:
    with pytest.raises(InputError) as error:
        check(FakeApi(existing(nfs="nfs.csi.k8s.io", disk="ebs.csi.aws.com"), "here"), target)
    assert str(error.value).startswith(message)


class Merging(FakeApi):
    """A server that also merges changes."""

    def call(self, method: str, path: str, *more: Any, **named: Any) -> Object:
        existing = super().call(method, path, *more, **named)
        if method != "PATCH":
            return existing
        merged = {**existing, **named["body"]}
        if not named.get("query"):
            self.objects[path] = merged
        return merged


def test_source_is_created_once_and_an_existing_one_is_compared_by_its_bytes() -> None:
    """Another state has another name, so an install never changes the code of a run."""
    api = Merging({}, "here")
    first = into(config_map(map_name()), "here")
    other = into(config_map(f"{map_name()[:-32]}{'0' * 32}"), "here")
    assert [one.state for one in apply(api, [first, other])] == ["made", "made"]
    assert [one.state for one in apply(api, [first])] == ["unchanged"]
    index = into(config_map(map_name(), "https://mirror.a/simple"), "here")
    assert [one[2:] for one in apply(api, [index])] == [("changed", "")]
    path = f"{CONFIG_MAPS.path('here')}/{map_name()}"
    planted = {"source.tar.xz": "Y29kZQ=="}
    api.objects[path] = {**index, "binaryData": planted, "metadata": {"labels": {"a": "b"}}}
    (done,) = apply(api, [index])
    assert done.state == "changed"
    assert "another source" in done.message
    assert has_source(api.objects[path])
    assert not api.deleted()


JOB = "/apis/batch/v1/namespaces/here/jobs/kfp-ddp-chown"


class Pulls(FakeApi):
    """A server whose nodes cannot pull the image of an earlier job, but `image`."""

    def __init__(self, image: str) -> None:
        super().__init__({**existing(nfs="nfs.csi.k8s.io"), JOB: OWNER}, "here")
        self.image, self.looks = image, 0

    def call(self, method: str, path: str, *more: Any, **named: Any) -> Object:
        if path.endswith("/pods"):
            self.looks += 1
            reason = "ImagePullBackOff" if self.looks % 2 == 0 else "ErrImagePull"
            return {"items": [pod("owner", waiting(reason))]}
        found = super().call(method, path, *more, **named)
        if (method, path) != ("GET", JOB):
            return found
        container = found["spec"]["template"]["spec"]["containers"][0]
        pulled = container["image"] == self.image
        return {
            **found,
            "status": {"conditions": [{"type": "Complete", "status": "True"}] if pulled else []},
        }


OWNER = owner(Installation("here", image="old:1"), "root")


def test_second_install_replaces_an_incomplete_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    api = Pulls("new:1")
    with pytest.raises(JobError, match="give --image"):
        list(wait(api, OWNER))
    assert api.looks == 4, "after the second ImagePullBackOff"
    assert unfinished_owner(api) == "kfp-ddp-chown"
    job = owner(Installation("here", image="new:1"), "root")
    assert [item.state for item in replace(api, job)] == ["made"]
    assert list(wait(api, job)) == []
    assert unfinished_owner(api) == ""
    del api.objects[JOB]  # as where its creation was refused
    with pytest.raises(JobError, match="does not exist"):
        list(wait(api, job, seconds=10**9))

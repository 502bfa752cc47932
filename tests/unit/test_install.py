"""The objects of `kfp-ddp install`, and its checks."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kfp_ddp import __version__
from kfp_ddp.checks.claims import unfinished_owner
from kfp_ddp.core.container_images import PUBLIC
from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.install.apply import BINDINGS, apply, remove, replace, resource_of, wait
from kfp_ddp.install.manifests import (
    OWNERS,
    PART_OF,
    Installation,
    check,
    index,
    into,
    limits,
    manifests,
    owner,
)
from kfp_ddp.jobs.shipping.own_package import config_map, has_source, map_name
from kfp_ddp.k8s.api import LAUNCHER, STEPS, Object
from kfp_ddp.k8s.resource import CONFIG_MAPS, STORAGE_CLASSES
from tests.cluster import FakeApi, pod, waiting
from tests.commands import document, output, refused
from tests.overlays import write_overlay


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
        (Installation("here", "disk"), "storage class disk (ebs.csi.aws.com) creates"),
    ],
)
def test_invalid_installation_is_an_error(target: Installation, message: str) -> None:
    with pytest.raises(InputError) as error:
        check(FakeApi(existing(nfs="nfs.csi.k8s.io", disk="ebs.csi.aws.com"), "here"), target)
    assert str(error.value).startswith(message)


INVALID = {
    "--namespace": ("Team_Vision", "team.vision", "a" * 64, "-team", "team-"),
    "--size": ("10GB", "0Gi", "10", "-5Gi", "500m", "Gi", " 5Gi"),
    "--storage-class": ("My_Class", "a b"),
    "--data-claim": ("kfp_data", "a/b"),
    "--work-claim": ("Work", "work-"),
    "--image": ("Busybox:1", "https://a.io/b", "a.io/b:"),
}


@pytest.mark.parametrize("option", INVALID)
def test_names_and_sizes_are_checked_without_a_cluster(option: str) -> None:
    for text in INVALID[option]:
        assert refused("install", "--print", f"{option}={text}").startswith(f"{option} ")


def test_files_are_a_kustomization_with_the_source_apart(tmp_path: Path) -> None:
    """What kustomize builds of them is what `--print` prints."""
    folder = tmp_path / "team"
    options = ("-n", "team", "--storage-class", "nfs", "--chown", "root", "--network-policy")
    shown = output("install", "--print", folder, *options)
    assert f"kubectl apply --server-side -k {folder}" in shown
    assert f"kubectl apply -f {folder / 'job.yaml'}" in shown
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert sizes.pop("source.yaml") > 1 << 18
    assert max(sizes.values()) < 10_000
    expected = {key(item): item for item in printed("--chown", "root", *options[2:])}
    built = {key(item): item for item in kustomized(folder)}
    assert expected.keys() - built.keys() == {("Job", "kfp-ddp-chown")}
    for name, item in built.items():
        kept = item["metadata"].pop("annotations", {})
        assert bool(kept) == (name[0] in ("PersistentVolumeClaim", "ConfigMap"))
        assert item == expected[name]


def test_files_replace_their_own_and_no_others(tmp_path: Path) -> None:
    for more in ((), ("--registry", "a.io/ml")):
        output("install", "--print", tmp_path, *more)
    assert all(item["kind"] != "ConfigMap" for item in kustomized(tmp_path))
    (tmp_path / "role.yaml").write_text("kind: Role\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert str(tmp_path / "role.yaml") in refused("install", "--print", tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_overlay_of_the_readme_has_the_source(tmp_path: Path) -> None:
    """As printed, with the addresses of this repository as paths."""
    write_overlay(tmp_path, "vision")
    objects = {key(item): item for item in kustomized(tmp_path)}
    assert {item["metadata"]["namespace"] for item in objects.values()} == {"vision"}
    assert has_source(objects["ConfigMap", map_name()])
    claims = [item["spec"] for name, item in objects.items() if name[0] == "PersistentVolumeClaim"]
    assert {spec["storageClassName"] for spec in claims} == {"nfs"}
    assert {spec["resources"]["requests"]["storage"] for spec in claims} == {"200Gi"}
    expected = {key(item) for item in printed("--no-see-nodes", "--network-policy")}
    assert expected <= objects.keys()


def key(item: Object) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]


def kustomized(folder: Path) -> list[Object]:
    if not shutil.which("kubectl"):
        pytest.skip("no kubectl, which has kustomize")
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize(
    ("options", "images"),
    [
        ((), PUBLIC),
        (
            ("--registry", "a.io/ml"),
            {name: f"a.io/ml/{name}:{__version__}" for name in ("launcher", "trainer")},
        ),
        (
            ("--launcher-image", "a.io/b:1"),
            {"launcher": "a.io/b:1", "trainer": PUBLIC["trainer"]},
        ),
    ],
)
def test_images_of_runs_are_listed(options: tuple[str, ...], images: dict[str, str]) -> None:
    assert document("install", "--list-images", *options) == images
    lines = output("install", "--list-images", *options).splitlines()
    assert [tuple(line.split()) for line in lines] == [*images.items()]


EVERYTHING = {
    "see_nodes": True,
    "copies": True,
    "divide_accounts": True,
    "network_policy": True,
    "image": "a:1",
}


def installed(*more: Object, **fields: Any) -> FakeApi:
    """Return a server with a namespace `here` in which all was made, and further objects."""
    target = Installation("here", "nfs", **fields)
    api = FakeApi({resource.path("here"): {"items": []} for resource in LISTED}, "here")
    jobs = [owner(target, how) for how in OWNERS]
    for item in (*manifests(target), *jobs, limits(target), index(target), *more):
        resource = resource_of(item)
        api.objects[resource.path("here", item["metadata"]["name"])] = item
        listed = api.objects.setdefault(resource.path("here"), {"items": []})
        listed["items"].append(item)
    return api


LISTED = (CONFIG_MAPS, BINDINGS)


def old_map(**labels: str) -> Object:
    metadata = {"name": "kfp-ddp-source-0-1-0-abc", "namespace": "here", "labels": labels}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}


def removed(api: FakeApi, **claims: str) -> dict[tuple[str, str], str]:
    """Return the states of what a removal met, without PVCs unless they are named."""
    given = {"data_claim": "", "work_claim": "", **claims}
    target = Installation("here", source=False, **EVERYTHING, **given)  # type: ignore[arg-type]
    return {done[:2]: done.state for done in remove(api, target)}


def test_uninstall_removes_what_install_made_and_older_sources() -> None:
    api = installed(old_map(**PART_OF), **EVERYTHING)
    made = {path for path, item in api.objects.items() if "items" not in item}
    claims = {path for path in made if "/persistentvolumeclaims/" in path}
    assert set(removed(api).values()) == {"deleted"}
    assert set(api.deleted()) == made - claims
    assert len(claims) == 2
    named = removed(api, data_claim="kfp-ddp-data")
    assert {name for kind, name in named if kind == "PersistentVolumeClaim"} == {"kfp-ddp-data"}


def test_uninstall_leaves_what_others_made_or_use() -> None:
    other = into(cluster_binding(), "there")
    api = installed(old_map(), other)
    states = removed(api)
    assert states["ClusterRole", "kfp-ddp-nodes"] == "left"
    assert states["ClusterRoleBinding", "kfp-ddp-nodes.here"] == "deleted"
    assert ("ClusterRoleBinding", "kfp-ddp-nodes.there") not in states
    assert states["ConfigMap", "kfp-ddp-source-0-1-0-abc"] == "left"


def cluster_binding() -> Object:
    (binding,) = (item for item in printed() if item["kind"] == "ClusterRoleBinding")
    return binding


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

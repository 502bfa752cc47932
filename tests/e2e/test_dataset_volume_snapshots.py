"""Snapshots of datasets, and the manifests of deploy/ for them."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from kfp_ddp.core.errors import StorageError
from kfp_ddp.datasets.volume import publish as publishing
from kfp_ddp.datasets.volume.cluster import (
    SNAPSHOT_CLASSES,
    SNAPSHOTS,
)
from kfp_ddp.datasets.volume.publish import collect, publish
from kfp_ddp.k8s.api import Api
from tests.e2e.harness.grounds import until, wait_for_end
from tests.e2e.harness.programs import kubectl
from tests.e2e.harness.volumes import Ground, ground, request

__all__ = ["ground"]
STORAGE = Path(__file__).parents[2] / "deploy" / "storage"


def test_failing_snapshot_is_removed(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = ground.staging("standard")
    demand = request(staging, "6" * 64, publish="snapshot", snapshot_class="nope")
    monkeypatch.setattr(publishing, "_LASTING", 3.0)
    with pytest.raises(StorageError, match=rf"the snapshot of claim {staging} failed"):
        publish(ground.stock, demand)
    assert ground.stock.get(SNAPSHOTS, demand.name) is None


def test_slow_snapshot_is_not_removed(ground: Ground) -> None:
    """A class of a driver that is not there yet: its snapshot stays pending, without an error."""
    staging = ground.staging("standard")
    slow: dict[str, Any] = {"snapshot_class": ground.namespace, "wait_seconds": 3.0}
    demand = request(staging, "8" * 64, publish="snapshot", **slow)
    body = {
        "apiVersion": "snapshot.storage.k8s.io/v1",
        "kind": "VolumeSnapshotClass",
        "metadata": {"name": ground.namespace},
        "driver": "slow.example.com",
        "deletionPolicy": "Retain",
    }
    ground.admin.create(SNAPSHOT_CLASSES, body)
    try:
        uids = []
        for _ in range(2):
            with pytest.raises(StorageError, match=rf"{demand.name} of .* not ready after 3 s"):
                publish(ground.stock, demand)
            snapshot_object = ground.stock.get(SNAPSHOTS, demand.name)
            assert snapshot_object is not None
            assert "deletionTimestamp" not in snapshot_object["metadata"]
            uids.append(snapshot_object["metadata"]["uid"])
        assert uids[0] == uids[1]
    finally:
        ground.stock.delete(SNAPSHOTS, demand.name)
        ground.admin.delete(SNAPSHOT_CLASSES, ground.namespace)
        _forget(ground, demand.name)


def test_snapshot_under_deletion_is_replaced(ground: Ground) -> None:
    staging = ground.staging("standard")
    demand = request(staging, "9" * 64, publish="snapshot", wait_seconds=3.0)
    ground.admin.create(
        SNAPSHOTS,
        {
            "apiVersion": "snapshot.storage.k8s.io/v1",
            "kind": "VolumeSnapshot",
            "metadata": {"name": demand.name, "finalizers": ["kfp-ddp.dev/test"]},
            "spec": {"source": {"persistentVolumeClaimName": staging}},
        },
    )
    try:
        until(lambda: _ready(ground.admin, demand.name), "the first snapshot")
        ground.admin.delete(SNAPSHOTS, demand.name)
        with pytest.raises(StorageError, match="is still being deleted after 3 s"):
            publish(ground.stock, demand)
        demand = demand.model_copy(update={"wait_seconds": 60.0})
        release = threading.Timer(3, _release, [ground, demand.name])
        release.start()
        result = publish(ground.stock, demand)
        release.join()
    finally:
        _release(ground, demand.name)
    assert result.strategy == "snapshot"
    assert _ready(ground.admin, demand.name)
    assert ground.claim(demand.name).status.phase == "Bound"


def _ready(cluster: Api, name: str) -> bool:
    snapshot_object = cluster.get(SNAPSHOTS, name)
    assert snapshot_object is not None
    leaving = "deletionTimestamp" in snapshot_object["metadata"]
    return not leaving and bool(snapshot_object.get("status", {}).get("readyToUse"))


def _forget(ground: Ground, snapshot: str) -> None:
    """Remove what only the driver that is not there would remove."""
    until(lambda: ground.stock.get(SNAPSHOTS, snapshot) is None, "the end of the snapshot")
    api = client.CustomObjectsApi(ground.api)
    kind = (*SNAPSHOTS.group_version.split("/"), "volumesnapshotcontents")
    for content in api.list_cluster_custom_object(*kind)["items"]:
        of = content["spec"]["volumeSnapshotRef"]
        if (of["namespace"], of["name"]) == (ground.namespace, snapshot):
            name = content["metadata"]["name"]
            api.delete_cluster_custom_object(*kind, name)  # first: no finalizer comes after it
            with contextlib.suppress(client.ApiException):  # it had none, and is gone
                api.patch_cluster_custom_object(*kind, name, {"metadata": {"finalizers": []}})


def _release(ground: Ground, name: str) -> None:
    """Take the test's own finalizer away, and no other."""
    snapshot_object = ground.admin.get(SNAPSHOTS, name)
    assert snapshot_object is not None
    finalizers = [
        item
        for item in snapshot_object["metadata"].get("finalizers", [])
        if item != "kfp-ddp.dev/test"
    ]
    ground.admin.patch(SNAPSHOTS, name, {"metadata": {"finalizers": finalizers}})


@contextlib.contextmanager
def applied(ground: Ground, folder: Path) -> Iterator[None]:
    """`kubectl apply -k deploy/storage`, with the namespace set as its first line says."""
    for name in ("kustomization.yaml", "rbac.yaml"):
        text = (STORAGE / name).read_text()
        if name == "kustomization.yaml":
            assert "\nnamespace: kubeflow\n" in text
            text = text.replace("\nnamespace: kubeflow\n", f"\nnamespace: {ground.namespace}\n")
        (folder / name).write_text(text)
    kubectl("apply", "-k", str(folder), "--validate=strict")
    try:
        yield
    finally:
        kubectl("delete", "-k", str(folder), "--wait=false")


def test_account_of_a_profile_can_do_all_with_deploy(ground: Ground, tmp_path: Path) -> None:
    editor = ground.account_with(name="default-editor")
    staging = ground.staging("standard")
    auto = request(staging, "2" * 64, publish="auto", dataset="roses")
    with pytest.raises(StorageError, match="no right to get persistentvolumeclaims"):
        publish(editor, auto)
    with applied(ground, tmp_path):
        result = publish(editor, auto)
        assert (result.strategy, result.claim) == ("snapshot", "ds-roses-222222222222")
        assert "has a snapshot class" in result.notes[0]
        assert not any("cannot be seen" in note for note in result.notes)
        for digit in "34":
            more = {"publish": "clone", "dataset": "roses", "keep_claims": 1}
            demand = request(staging, digit * 64, **more)
            result = publish(editor, demand)
        assert set(collect(editor, demand, result.claim)) == {
            "ds-roses-222222222222", "ds-roses-333333333333",
        }  # fmt: skip
    with pytest.raises(StorageError, match="no right to get persistentvolumeclaims"):
        publish(editor, auto)


def test_init_container_example_runs(ground: Ground) -> None:
    (pod,) = yaml.safe_load_all((STORAGE / "init-container.yaml").read_text())
    spec = pod["spec"]
    spec["volumes"][0]["persistentVolumeClaim"]["claimName"] = ground.staging("standard")
    command = spec["initContainers"][0]["command"]
    assert command[-2] == "gs://bucket/photos"
    command[-2] = "/usr/share/zoneinfo/Europe"  # what every image has; no bucket is in reach
    command.insert(2, "--symlinks=follow")
    ground.core.create_namespaced_pod(ground.namespace, pod)
    name = pod["metadata"]["name"]
    assert wait_for_end(ground.grounds, name) == "Succeeded"
    log = ground.core.read_namespaced_pod_log(name, ground.namespace, container="main")
    assert "Vienna" in log
    assert len(log.splitlines()[-1]) == 64


def test_examples_are_valid(ground: Ground) -> None:
    for name in ("claims.yaml", "snapshot-class.yaml", "init-container.yaml", "chown.yaml"):
        for document in yaml.safe_load_all((STORAGE / name).read_text()):
            resource = _resource(document, ground.namespace)
            document["metadata"]["name"] += "-example"
            ground.api.call_api(
                resource,
                "POST",
                body=document,
                query_params=[("dryRun", "All"), ("fieldValidation", "Strict")],
                auth_settings=["BearerToken"],
            )


def _resource(document: dict[str, Any], namespace: str) -> str:
    version, kind = document["apiVersion"], document["kind"]
    plural = kind.lower() + ("es" if kind.endswith("s") else "s")
    cluster_wide = kind.startswith("Cluster") or kind == "VolumeSnapshotClass"
    place = "" if cluster_wide else f"/namespaces/{namespace}"
    return f"/{'apis' if '/' in version else 'api'}/{version}{place}/{plural}"

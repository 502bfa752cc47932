"""Snapshots that fail, that take long, and that are on their way out."""

import contextlib
import threading
from typing import Any

import pytest
from kubernetes import client

from kfp_ddp.core.errors import StorageError
from kfp_ddp.datasets.volume import publish as publishing
from kfp_ddp.datasets.volume.cluster import SNAPSHOTS, Cluster
from kfp_ddp.datasets.volume.publish import publish
from tests.e2e.harness.grounds import until
from tests.e2e.harness.volumes import Ground, ground, request

pytestmark = pytest.mark.smoke

__all__ = ["ground"]


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
    classes = client.CustomObjectsApi(ground.api)
    body = {
        "apiVersion": "snapshot.storage.k8s.io/v1",
        "kind": "VolumeSnapshotClass",
        "metadata": {"name": ground.namespace},
        "driver": "slow.example.com",
        "deletionPolicy": "Retain",
    }
    classes.create_cluster_custom_object(*SNAPSHOTS[:2], "volumesnapshotclasses", body)
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
        classes.delete_cluster_custom_object(
            *SNAPSHOTS[:2], "volumesnapshotclasses", ground.namespace
        )
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


def _ready(cluster: Cluster, name: str) -> bool:
    snapshot_object = cluster.get(SNAPSHOTS, name)
    assert snapshot_object is not None
    leaving = "deletionTimestamp" in snapshot_object["metadata"]
    return not leaving and bool(snapshot_object.get("status", {}).get("readyToUse"))


def _forget(ground: Ground, snapshot: str) -> None:
    """Remove what only the driver that is not there would remove."""
    until(lambda: ground.stock.get(SNAPSHOTS, snapshot) is None, "the end of the snapshot")
    api = client.CustomObjectsApi(ground.api)
    kind = (*SNAPSHOTS[:2], "volumesnapshotcontents")
    for content in api.list_cluster_custom_object(*kind)["items"]:
        of = content["spec"]["volumeSnapshotRef"]
        if (of["namespace"], of["name"]) == (ground.namespace, snapshot):
            name = content["metadata"]["name"]
            api.delete_cluster_custom_object(*kind, name)  # first: no finalizer comes after it
            with contextlib.suppress(client.ApiException):  # it had none, and is gone
                api.patch_cluster_custom_object(*kind, name, {"metadata": {"finalizers": []}})


def _release(ground: Ground, name: str) -> None:
    """Take the test's own finalizer away, and no other."""
    api = client.CustomObjectsApi(ground.api)
    where = (*SNAPSHOTS[:2], ground.namespace, SNAPSHOTS[2], name)
    snapshot_object = api.get_namespaced_custom_object(*where)
    finalizers = [
        item
        for item in snapshot_object["metadata"].get("finalizers", [])
        if item != "kfp-ddp.dev/test"
    ]
    api.patch_namespaced_custom_object(*where, {"metadata": {"finalizers": finalizers}})

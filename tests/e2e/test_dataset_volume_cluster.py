"""Publishing on a real cluster, with the rights of KFP's stock account and no more."""

import threading
import time
import uuid
from typing import Any

import pytest
from kubernetes import client

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.datasets.volume.cluster import CLAIMS, SNAPSHOTS, delete_unchanged, pods_mounting
from kfp_ddp.datasets.volume.publish import collect, publish
from kfp_ddp.datasets.volume.request import DOMAIN, Published
from kfp_ddp.jobs.identity import RUN
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.k8s.api import Api
from tests.e2e.harness.grounds import until, wait_for_end
from tests.e2e.harness.volumes import SIZE, Ground, ground, request

__all__ = ["ground"]

SYNC = """
import sys
from pathlib import Path
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.datasets.sync import sync
source = Path("/tmp/source/train/a")
source.mkdir(parents=True)
for i in range(20):
    (source / f"{i}.png").write_bytes(bytes([i]) * 1000)
print(sync("/tmp/source", Path("/data"), SyncOptions()).digest)
"""
READ = """
from pathlib import Path
import google_crc32c
from kfp_ddp.storage import manifest
version = Path("/data/versions/{short}")
assert (version / "_SUCCESS").read_text().strip() == "{digest}"
rows = list(manifest.rows(version / manifest.NAME))
assert len(rows) == 20
assert all(google_crc32c.value((version / row.name).read_bytes()) == row.crc for row in rows)
try:
    (version / "new").write_text("x")
except OSError as error:
    print("refused:", error.strerror)
"""
STEP = """
import os
from kfp_ddp.datasets.volume.engine import run
class Report: path, metadata = "/tmp/report.md", dict()
print(run(volume_report=Report(), options=dict(), **{request}).claim)
"""


@pytest.mark.parametrize("storage_class", ["standard", "late"])
@pytest.mark.parametrize("strategy", ["clone", "snapshot"])
def test_copy_is_read_only_and_reused(ground: Ground, strategy: str, storage_class: str) -> None:
    staging = ground.staging(storage_class)
    digest = ground.run(SYNC, staging)
    demand = request(staging, digest, publish=strategy, dataset=f"{strategy}-{storage_class}")
    result = publish(ground.stock, demand)
    assert (result.claim, result.path) == (demand.name, demand.path)
    claim = ground.claim(result.claim)
    assert claim.spec.access_modes == ["ReadOnlyMany"]
    assert claim.spec.resources.requests == {"storage": SIZE}
    assert claim.spec.storage_class_name == storage_class
    assert claim.spec.data_source.kind == (
        "VolumeSnapshot" if strategy == "snapshot" else "PersistentVolumeClaim"
    )
    if storage_class == "late":
        node = "volume.kubernetes.io/selected-node"
        assert claim.metadata.annotations[node] == ground.claim(staging).metadata.annotations[node]
    else:
        assert claim.status.phase == "Bound"
    read = READ.format(short=digest[:12], digest=digest)
    assert ground.run(read, result.claim, read_only=True) == "refused: Read-only file system"
    again = publish(ground.stock, demand)
    assert any("used again" in note for note in again.notes)
    assert ground.claim(again.claim).metadata.uid == claim.metadata.uid


def test_step_in_a_pod_finds_its_cluster(ground: Ground) -> None:
    staging = ground.staging("standard", "ReadWriteMany")
    digest = "5" * 64
    demand = {
        "dataset": "digits", "digest": digest, "path": "/data/versions/555555555555",
        "claim": staging, "publish": "auto",
    }  # fmt: skip
    log = ground.run(STEP.format(request=demand))
    assert "auto: in-place, as the claim can be mounted by many" in log
    assert log.endswith(staging)
    assert ground.claim(staging).metadata.annotations["kfp-ddp.dev/digest"] == digest


def test_notebook_in_a_pod_uses_its_own_folder(ground: Ground) -> None:
    """As kfp.local does in a Kubeflow notebook: a pod, a folder, and no claim."""
    demand = {"dataset": "digits", "claim": "none", "publish": "auto"}
    step = STEP.replace("**{request}", f"**{demand}, digest=done.digest, path=str(done.path)")
    sync = SYNC.replace("print(", "done = (").replace("/data", "/tmp/data").replace(".digest)", ")")
    log = ground.run(sync + step)
    assert "no claim none here" in log
    with ground.pod(STEP.format(request=demand | {"digest": "5" * 64, "path": "/nope"})) as name:
        wait_for_end(ground.grounds, name)
        log = ground.core.read_namespaced_pod_log(name, ground.namespace)
    assert log.strip().endswith("create it, and sync")


def test_step_in_a_pod_without_a_token_says_what_to_set(ground: Ground) -> None:
    demand = {"dataset": "digits", "digest": "5" * 64, "path": "/nope", "claim": "none"}
    with ground.pod(STEP.format(request=demand), token=False) as name:
        assert wait_for_end(ground.grounds, name) == "Failed"
        log = ground.core.read_namespaced_pod_log(name, ground.namespace)
    assert (
        log.strip()
        .splitlines()[-1]
        .endswith("the pod has no service account token; set automountServiceAccountToken to true")
    )


def test_auto_without_right_to_storage_classes_reads_in_place(ground: Ground) -> None:
    staging = ground.staging("standard")
    result = publish(ground.stock, request(staging, "1" * 64, publish="auto"))
    assert (result.claim, result.strategy) == (staging, "in-place")
    assert "auto: in-place, as the storage class standard is not visible" in result.notes[0]
    assert any("only one node" in note for note in result.notes)


def test_in_place_needs_only_the_right_to_get_the_pvc(ground: Ground) -> None:
    staging = ground.staging("standard")
    claims = {"apiGroups": [""], "resources": ["persistentvolumeclaims"]}
    result = publish(ground.account_with({**claims, "verbs": ["get"]}), request(staging, "c" * 64))
    assert (result.claim, result.strategy) == (staging, "in-place")
    assert "not labelled with the dataset and digest (no right to patch" in "".join(result.notes)
    for strategy, advice in (("in-place", "none"), ("clone", "in-place")):
        says = f"no right to get persistentvolumeclaims .* or use publish={advice}$"
        with pytest.raises(StorageError, match=says):
            publish(ground.account_with(), request(staging, "c" * 64, publish=strategy))


def test_copy_waits_for_the_writer_and_names_it(ground: Ground) -> None:
    staging = ground.staging("standard")
    demand = request(staging, "3" * 64, publish="clone", wait_seconds=1.0)
    with (
        ground.pod("import time; time.sleep(60)", staging) as writer,
        pytest.raises(StorageError, match=f"{staging} is still mounted by {writer}"),
    ):
        publish(ground.stock, demand)
    until(lambda: not pods_mounting(ground.stock, staging), "the end of the writer")
    assert publish(ground.stock, request(staging, "3" * 64, publish="clone")).notes[-1] == (
        "it is bound"
    )


def test_copy_waits_until_the_volume_is_detached(ground: Ground) -> None:
    """This cluster's driver attaches nothing, so the attachment is made by hand."""
    staging = ground.staging("standard")
    demand = request(staging, "d" * 64, publish="clone", wait_seconds=2.0)
    until(lambda: ground.claim(staging).status.phase == "Bound", "a volume")
    storage = client.StorageV1Api(ground.api)
    (node,) = [item.metadata.name for item in ground.core.list_node().items]
    volume = {"persistentVolumeName": ground.claim(staging).spec.volume_name}
    spec = {"attacher": "none.example.com", "nodeName": node, "source": volume}
    name = f"{ground.namespace}-attachment"
    storage.create_volume_attachment({"metadata": {"name": name}, "spec": spec})
    remove = threading.Timer(3, storage.delete_volume_attachment, [name])
    try:
        with pytest.raises(StorageError, match=rf"claim {staging} is still attached to {node}"):
            publish(ground.admin, demand)
    finally:
        remove.start()
    demand = demand.model_copy(update={"wait_seconds": 60.0})
    assert publish(ground.admin, demand).notes[-1] == "it is bound"
    remove.join()
    unseen = request(staging, "d" * 64, publish="clone", dataset="unseen")
    assert "(no right to list volumeattachments" in publish(ground.stock, unseen).notes[0]


@pytest.mark.parametrize(
    ("digit", "notes", "why"),
    [
        ("4", {}, "is not a ReadOnlyMany claim of this digest"),
        ("5", {"kfp-ddp.dev/strategy": "populator"}, "lays its files out in another way"),
    ],
    ids=["of others", "of an earlier release"],
)
def test_foreign_pvc_is_not_changed(
    ground: Ground, digit: str, notes: dict[str, str], why: str
) -> None:
    staging = ground.staging("standard")
    body = {
        "metadata": {"name": f"ds-digits-{digit * 12}", "annotations": notes},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": SIZE}}},
    }
    ground.core.create_namespaced_persistent_volume_claim(ground.namespace, body)
    with pytest.raises(StorageError, match=why):
        publish(ground.stock, request(staging, digit * 64, publish="clone"))


def test_missing_pvc_is_an_error_of_one_line(ground: Ground) -> None:
    with pytest.raises(InputError, match=r"claim none is not in namespace .*create it"):
        publish(ground.stock, request("none", "6" * 64))


def test_old_unused_pvcs_are_deleted(ground: Ground) -> None:
    staging = ground.staging("standard")
    copies: list[Published] = []
    for letter in "abcd":
        demand = request(staging, letter * 64, publish="snapshot", dataset="many")
        copies.append(publish(ground.stock, demand))
        time.sleep(1.1)  # creation times have seconds
    names = [published.claim for published in copies]
    demand = demand.model_copy(update={"keep_claims": 2})
    with ground.pod("import time; time.sleep(60)", names[0], read_only=True):
        assert collect(ground.stock, demand, names[3]) == [names[1]]
    assert [ground.gone(name) for name in names] == [False, True, False, False]
    until(lambda: ground.stock.get(SNAPSHOTS, names[1]) is None, "the end of the old snapshot")
    until(lambda: not pods_mounting(ground.stock, names[0]), "the end of the reader")
    assert collect(ground.stock, demand, names[3]) == [names[0]]


def _suspended_job(ground: Ground, run_id: str) -> dict[str, Any]:
    """A job of a run that its queue has not let in: no pod mounts anything."""
    pod = {"containers": [{"name": "pytorch", "image": "none:1"}]}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "queued", "namespace": ground.namespace, "labels": {RUN: run_id}},
        "spec": {
            "runPolicy": {"suspend": True},
            "pytorchReplicaSpecs": {"Master": {"replicas": 1, "template": {"spec": pod}}},
        },
    }


def test_pvc_of_a_live_run_is_not_deleted(ground: Ground) -> None:
    staging = ground.staging("standard")
    run, kind = uuid.uuid4().hex, KINDS["pytorchjob"]
    admin = Api(ground.api, ground.namespace)
    job = admin.create(kind.resource, _suspended_job(ground, run))
    copies = []
    for letter, run_id in (("a", run), ("b", ""), ("c", "")):
        demand = request(staging, letter * 64, publish="clone", dataset="held", run_id=run_id)
        copies.append(publish(ground.stock, demand).claim)
        time.sleep(1.1)  # creation times have seconds
    demand = demand.model_copy(update={"keep_claims": 1})
    assert collect(ground.stock, demand, copies[2]) == [copies[1]]
    again = request(staging, "a" * 64, publish="clone", dataset="held", run_id="another")
    assert publish(ground.stock, again).claim == copies[0]
    assert collect(ground.stock, demand, copies[2]) == []
    admin.delete(kind.resource, job["metadata"]["name"])
    assert collect(ground.stock, demand, copies[2]) == [copies[0]]


def test_pvc_leased_meanwhile_is_not_deleted(ground: Ground) -> None:
    staging = ground.staging("standard")
    signed = "https://data.example/m.jsonl?signature=secret"
    first = {"dataset": "raced", "run_id": "first", "source": signed}
    demand = request(staging, "d" * 64, publish="clone", **first)
    name = publish(ground.stock, demand).claim
    existing = ground.stock.get(CLAIMS, name)
    assert existing is not None
    assert existing["metadata"]["annotations"][f"{DOMAIN}/source"] == "https://data.example/m.jsonl"
    publish(ground.stock, demand.model_copy(update={"run_id": "second"}))
    assert not delete_unchanged(ground.stock, existing)
    assert not ground.gone(name)
    now = ground.stock.get(CLAIMS, name)
    assert now is not None
    assert delete_unchanged(ground.stock, now)


def test_no_pvc_is_deleted_without_the_right_to_list_runs(ground: Ground) -> None:
    staging = ground.staging("standard")
    blind = ground.account_with(
        {"apiGroups": [""], "resources": ["persistentvolumeclaims", "pods"], "verbs": ["*"]}
    )
    for letter in "ef":
        demand = request(staging, letter * 64, publish="clone", dataset="unseen", keep_claims=1)
        name = publish(blind, demand).claim
        time.sleep(1.1)
    with pytest.raises(StorageError, match="which runs live cannot be seen"):
        collect(blind, demand, name)

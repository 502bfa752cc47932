"""Publishing on a real cluster, with the rights of KFP's stock account and no more."""

import threading
import time
import uuid
from typing import Any

import pytest
from kubernetes import client

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.datasets.volume.cluster import CLAIMS, SNAPSHOTS, Cluster
from kfp_ddp.datasets.volume.publish import collect, publish
from kfp_ddp.datasets.volume.request import DOMAIN, Published
from kfp_ddp.jobs.identity import RUN
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.k8s.api import Api
from tests.e2e.harness.grounds import ended, until
from tests.e2e.harness.volumes import SIZE, Ground, ground, request

pytestmark = pytest.mark.smoke

__all__ = ["ground"]

SYNC = """
import sys
from pathlib import Path
from kfp_ddp.datasets.options import Options
from kfp_ddp.datasets.sync import sync
source = Path("/tmp/source/train/a")
source.mkdir(parents=True)
for i in range(20):
    (source / f"{i}.png").write_bytes(bytes([i]) * 1000)
print(sync("/tmp/source", Path("/data"), Options()).digest)
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
class Report: path = "/tmp/report.md"
print(run(volume_report=Report(), options=dict(), **{request}).claim)
"""


@pytest.mark.parametrize("storage_class", ["standard", "late", "small"])
@pytest.mark.parametrize("strategy", ["clone", "snapshot"])
def test_copy_is_read_only_and_made_once(ground: Ground, strategy: str, storage_class: str) -> None:
    staging = ground.staging(storage_class)
    digest = ground.run(SYNC, staging)
    wanted = request(staging, digest, publish=strategy, dataset=f"{strategy}-{storage_class}")
    done = publish(ground.stock, wanted)
    assert (done.claim, done.path) == (wanted.name, wanted.path)
    claim = ground.claim(done.claim)
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
    assert ground.run(read, done.claim, read_only=True) == "refused: Read-only file system"
    again = publish(ground.stock, wanted)
    assert any("used again" in note for note in again.notes)
    assert ground.claim(again.claim).metadata.uid == claim.metadata.uid


def test_step_in_a_pod_finds_its_cluster(ground: Ground) -> None:
    staging = ground.staging("standard", "ReadWriteMany")
    digest = "5" * 64
    wanted = {
        "dataset": "digits", "digest": digest, "path": "/data/versions/555555555555",
        "claim": staging, "publish": "auto",
    }  # fmt: skip
    log = ground.run(STEP.format(request=wanted))
    assert "auto: in-place, as the claim can be mounted by many" in log
    assert log.endswith(staging)
    assert ground.claim(staging).metadata.annotations["kfp-ddp.dev/digest"] == digest


def test_notebook_in_a_pod_uses_its_own_folder(ground: Ground) -> None:
    """As kfp.local does in a Kubeflow notebook: a pod, a folder, and no claim."""
    wanted = {"dataset": "digits", "claim": "none", "publish": "auto"}
    step = STEP.replace("**{request}", f"**{wanted}, digest=done.digest, path=str(done.path)")
    sync = SYNC.replace("print(", "done = (").replace("/data", "/tmp/data").replace(".digest)", ")")
    log = ground.run(sync + step)
    assert "no claim none here" in log
    with ground.pod(STEP.format(request=wanted | {"digest": "5" * 64, "path": "/nope"})) as name:
        ended(ground.grounds, name)
        log = ground.core.read_namespaced_pod_log(name, ground.namespace)
    assert log.strip().endswith("create it, and sync")


def test_step_in_a_pod_without_a_token_says_what_to_set(ground: Ground) -> None:
    wanted = {"dataset": "digits", "digest": "5" * 64, "path": "/nope", "claim": "none"}
    with ground.pod(STEP.format(request=wanted), token=False) as name:
        assert ended(ground.grounds, name) == "Failed"
        log = ground.core.read_namespaced_pod_log(name, ground.namespace)
    assert (
        log.strip()
        .splitlines()[-1]
        .endswith("the pod has no service account token; set automountServiceAccountToken to true")
    )


def test_auto_without_a_view_of_classes_is_in_place_and_says_so(ground: Ground) -> None:
    staging = ground.staging("standard")
    done = publish(ground.stock, request(staging, "1" * 64, publish="auto"))
    assert (done.claim, done.strategy) == (staging, "in-place")
    assert "auto: in-place, as the storage class standard is not visible" in done.notes[0]
    assert any("only one node" in note for note in done.notes)


def test_in_place_needs_no_right_but_to_see_the_claim(ground: Ground) -> None:
    staging = ground.staging("standard")
    claims = {"apiGroups": [""], "resources": ["persistentvolumeclaims"]}
    done = publish(ground.account_with({**claims, "verbs": ["get"]}), request(staging, "c" * 64))
    assert (done.claim, done.strategy) == (staging, "in-place")
    assert "not labelled with the dataset and digest (patch claim" in "".join(done.notes)
    for strategy, advice in (("in-place", "none"), ("clone", "in-place")):
        with pytest.raises(StorageError, match=f"cannot get claim .* or use publish={advice}$"):
            publish(ground.account_with(), request(staging, "c" * 64, publish=strategy))


def test_copy_waits_for_the_writer_and_names_it(ground: Ground) -> None:
    staging = ground.staging("standard")
    wanted = request(staging, "3" * 64, publish="clone", wait_seconds=1.0)
    with (
        ground.pod("import time; time.sleep(60)", staging) as writer,
        pytest.raises(StorageError, match=f"{staging} is still mounted by {writer}"),
    ):
        publish(ground.stock, wanted)
    until(lambda: not ground.stock.users(staging), "the end of the writer")
    assert publish(ground.stock, request(staging, "3" * 64, publish="clone")).notes[-1] == (
        "it is bound"
    )


def test_copy_waits_until_the_volume_is_detached(ground: Ground) -> None:
    """This cluster's driver attaches nothing, so the attachment is made by hand."""
    staging = ground.staging("standard")
    wanted = request(staging, "d" * 64, publish="clone", wait_seconds=2.0)
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
            publish(ground.admin, wanted)
    finally:
        remove.start()
    wanted = wanted.model_copy(update={"wait_seconds": 60.0})
    assert publish(ground.admin, wanted).notes[-1] == "it is bound"
    remove.join()
    unseen = request(staging, "d" * 64, publish="clone", dataset="unseen")
    assert "cannot be seen (list volumeattachments" in publish(ground.stock, unseen).notes[0]


def test_claim_that_is_not_ours_is_left_alone(ground: Ground) -> None:
    staging = ground.staging("standard")
    body = {
        "metadata": {"name": "ds-digits-444444444444"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": SIZE}}},
    }
    ground.core.create_namespaced_persistent_volume_claim(ground.namespace, body)
    with pytest.raises(StorageError, match="is not a ReadOnlyMany claim of this digest"):
        publish(ground.stock, request(staging, "4" * 64, publish="clone"))


def test_creating_an_existing_claim_changes_nothing(ground: Ground) -> None:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": SIZE}}}
    body = {"metadata": {"name": "made-first"}, "spec": spec}
    assert ground.stock.create(CLAIMS, body) is not None
    assert ground.stock.create(CLAIMS, body) is None


def test_what_the_server_finds_wrong_is_told_in_its_own_words(ground: Ground) -> None:
    wanted = request(ground.staging("standard"), "e" * 64, publish="clone", storage_class="No!")
    says = rf'^cannot create claim {wanted.name}: .* "{wanted.name}" is invalid: .*storageClassName'
    with pytest.raises(StorageError, match=says):
        publish(ground.stock, wanted)


def test_server_that_is_away_for_long_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    retry = Api.retry
    monkeypatch.setattr(Api, "retry", lambda self, request, seconds: retry(self, request, 1.0))
    nowhere = client.ApiClient(client.Configuration(host="http://127.0.0.1:1"))
    with pytest.raises(
        StorageError, match=r"^cannot get claim a: no response from the API server: .+"
    ):
        Cluster(Api(nowhere, "space")).get(CLAIMS, "a")


def test_missing_claim_is_one_line(ground: Ground) -> None:
    with pytest.raises(InputError, match=r"claim none is not in namespace .*create it"):
        publish(ground.stock, request("none", "6" * 64))


def test_old_claims_that_no_pod_uses_are_deleted(ground: Ground) -> None:
    staging = ground.staging("standard")
    made: list[Published] = []
    for letter in "abcd":
        wanted = request(staging, letter * 64, publish="snapshot", dataset="many")
        made.append(publish(ground.stock, wanted))
        time.sleep(1.1)  # creation times have seconds
    names = [published.claim for published in made]
    wanted = wanted.model_copy(update={"keep_claims": 2})
    with ground.pod("import time; time.sleep(60)", names[0], read_only=True):
        assert collect(ground.stock, wanted, names[3]) == [names[1]]
    assert [ground.gone(name) for name in names] == [False, True, False, False]
    until(lambda: ground.stock.get(SNAPSHOTS, names[1]) is None, "the end of the old snapshot")
    until(lambda: not ground.stock.users(names[0]), "the end of the reader")
    assert collect(ground.stock, wanted, names[3]) == [names[0]]


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


def test_a_claim_is_kept_for_a_run_that_lives_though_no_pod_mounts_it(ground: Ground) -> None:
    staging = ground.staging("standard")
    run, kind = uuid.uuid4().hex, KINDS["pytorchjob"]
    admin = Api(ground.api, ground.namespace)
    job = admin.call("POST", kind.path(ground.namespace), _suspended_job(ground, run))
    made = []
    for letter, run_id in (("a", run), ("b", ""), ("c", "")):
        wanted = request(staging, letter * 64, publish="clone", dataset="held", run_id=run_id)
        made.append(publish(ground.stock, wanted).claim)
        time.sleep(1.1)  # creation times have seconds
    wanted = wanted.model_copy(update={"keep_claims": 1})
    assert collect(ground.stock, wanted, made[2]) == [made[1]]
    again = request(staging, "a" * 64, publish="clone", dataset="held", run_id="another")
    assert publish(ground.stock, again).claim == made[0]
    assert collect(ground.stock, wanted, made[2]) == []
    admin.delete(kind.path(ground.namespace, job["metadata"]["name"]))
    assert collect(ground.stock, wanted, made[2]) == [made[0]]


def test_a_claim_that_was_handed_out_meanwhile_is_not_deleted(ground: Ground) -> None:
    staging = ground.staging("standard")
    signed = "https://data.example/m.jsonl?signature=secret"
    first = {"dataset": "raced", "run_id": "first", "source": signed}
    wanted = request(staging, "d" * 64, publish="clone", **first)
    name = publish(ground.stock, wanted).claim
    seen = ground.stock.get(CLAIMS, name)
    assert seen is not None
    assert seen["metadata"]["annotations"][f"{DOMAIN}/source"] == "https://data.example/m.jsonl"
    publish(ground.stock, wanted.model_copy(update={"run_id": "second"}))
    assert not ground.stock.delete_unchanged(seen)
    assert not ground.gone(name)
    now = ground.stock.get(CLAIMS, name)
    assert now is not None
    assert ground.stock.delete_unchanged(now)


def test_where_live_runs_cannot_be_seen_no_claim_is_deleted(ground: Ground) -> None:
    staging = ground.staging("standard")
    blind = ground.account_with(
        {"apiGroups": [""], "resources": ["persistentvolumeclaims", "pods"], "verbs": ["*"]}
    )
    for letter in "ef":
        wanted = request(staging, letter * 64, publish="clone", dataset="unseen", keep_claims=1)
        name = publish(blind, wanted).claim
        time.sleep(1.1)
    with pytest.raises(StorageError, match="which runs live cannot be seen"):
        collect(blind, wanted, name)

"""What `kfp-ddp gc` deletes at a destination and in a namespace, and what remains."""

import json
from pathlib import Path

import pytest

from kfp_ddp.client.models import bundles, copies
from kfp_ddp.core.errors import StorageError
from kfp_ddp.datasets.volume.cluster import CLAIMS
from kfp_ddp.datasets.volume.request import DOMAIN, LEASE, MANAGED
from kfp_ddp.export.publish import Lineage
from kfp_ddp.jobs.identity import KFP_RUN
from kfp_ddp.k8s.api import Api, Object
from kfp_ddp.k8s.resource import PODS, WORKFLOWS
from kfp_ddp.models.bundle import LINEAGE, SUCCESS
from kfp_ddp.models.champion import list_versions, move
from kfp_ddp.rollout.rollout import OURS, SERVICES, VERSION
from kfp_ddp.storage.store import Store
from tests.cluster import FakeApi
from tests.commands import document, output
from tests.exports import exported

RUNS = {"items": [{"metadata": {"labels": {KFP_RUN: "lives"}}, "status": {"phase": "Running"}}]}
OLD = "2026-01-01T00:00:00Z"


def copy(name: str, day: int, dataset: str = "many", **annotations: str) -> Object:
    labels = MANAGED | {f"{DOMAIN}/dataset": dataset}
    at = f"2026-01-0{day}T00:00:00Z"
    metadata = {"name": name, "uid": name, "resourceVersion": "1", "creationTimestamp": at}
    return {"metadata": metadata | {"labels": labels, "annotations": annotations}}


@pytest.fixture
def api() -> FakeApi:
    """A cluster with copies: the oldest of them mounted, leased, not ours, and unused."""
    claims = [
        copy("ds-many-mounted", 1),
        copy("ds-many-leased", 2, **{f"{LEASE}1": "lives"}),
        copy("ds-many-unused", 3, **{f"{LEASE}1": "gone"}),
        copy("not-ours", 1),
        copy("ds-many-new", 9),
        copy("ds-other-only", 1, "other"),
    ]
    volume = {"persistentVolumeClaim": {"claimName": "ds-many-mounted"}}
    pod = {"metadata": {"name": "reader"}, "spec": {"volumes": [volume]}, "status": {}}
    paths = {CLAIMS.path("space", one["metadata"]["name"]): one for one in claims}
    listed = {PODS.path("space"): {"items": [pod]}, WORKFLOWS.path("space"): RUNS}
    return FakeApi({**paths, **listed})


def publish(where: Store, folder: Path, day: int, run: str) -> str:
    """Publish a version of flowers of a day; return its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.strftime", lambda *_: f"2026-01-0{day}T00:00:00Z")
        return exported(where, "flowers", folder / str(day), 9 - day, Lineage(run))


def test_the_newest_and_those_in_use_remain(where: Store, api: FakeApi, tmp_path: Path) -> None:
    runs = ("run-1", "run-2", "", "run-4", "run-5", "run-6")
    made = [publish(where, tmp_path, day, run) for day, run in enumerate(runs, 1)]
    first, second, _, old, served, _ = made
    assert list(bundles(api, where, 1, dry_run=False)) == [], "there is no champion"
    move(where, "flowers", first, "")
    move(where, "flowers", second, first)
    labels = {**OURS, VERSION: served}
    predictor = {"metadata": {"labels": labels}, "spec": {"predictor": {"labels": labels}}}
    api.objects[SERVICES.path("space")] = {"items": [predictor]}
    assert list(bundles(api, where, 1, dry_run=True)) == [f"flowers/{old}"]
    assert set(list_versions(where)["flowers"]) == set(made)
    assert list(bundles(api, where, 1, dry_run=False)) == [f"flowers/{old}"]
    assert set(list_versions(where)["flowers"]) == {*made} - {old}


def test_only_an_upload_that_a_run_left_is_deleted(where: Store, api: FakeApi) -> None:
    runs = [("gone", OLD), ("lives", OLD), ("", OLD), ("gone", "2999"), ("gone", ""), ("gone", OLD)]
    left, *others, whole = (f"birds/{letter * 12}" for letter in "abcdef")
    for name, (run, at) in zip((left, *others, whole), runs, strict=True):
        lineage = json.dumps({"run_id": run, "exported_at": at})
        where.write(f"{name}/{LINEAGE}", lineage.encode())
    for file in (f"{left}/weights", f"{whole}/{SUCCESS}", f"birds/notes/{LINEAGE}"):
        where.write(file, b"{}")
    assert list(bundles(api, where, 3, dry_run=True)) == [left]
    assert where.exists(f"{left}/weights")
    assert list(bundles(api, where, 3, dry_run=False)) == [left]
    assert not where.has_files(f"{left}/")
    assert all(where.exists(f"{name}/{LINEAGE}") for name in (*others, whole, "birds/notes"))


def test_nothing_is_deleted_where_runs_cannot_be_listed(where: Store, api: FakeApi) -> None:
    api.objects[WORKFLOWS.path("space")] = 403
    for names in (copies(api, 1, dry_run=False), bundles(api, where, 1, dry_run=False)):
        with pytest.raises(StorageError, match="runs live cannot be seen"):
            list(names)
    assert api.deleted() == []


def test_command_names_unused(where: Store, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Api, "connect", lambda *_, **__: api)
    words = ("gc", "--keep", "1", "--destination", where.uri)
    assert document(*words, "--dry-run") == {"unused": ["claim ds-many-unused"]}
    assert api.deleted() == []
    lines = output(*words).splitlines()
    assert lines == ["unused: claim ds-many-unused", "deleted: claim ds-many-unused"]
    assert api.deleted()[0] == CLAIMS.path("space", "ds-many-unused")
    assert document(*words) == {"deleted": []}

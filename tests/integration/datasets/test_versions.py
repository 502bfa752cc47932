"""Versions on a claim: what a new one keeps, which are removed, and which are in use."""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kfp_ddp.core.errors import InputError, KfpDdpError, StorageError
from kfp_ddp.core.text import cell
from kfp_ddp.datasets import report
from kfp_ddp.datasets.context import Throttle
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.datasets.report import Result
from kfp_ddp.datasets.sync import sync
from kfp_ddp.datasets.versions import DatasetVersions, leases_of
from kfp_ddp.jobs import live_runs
from kfp_ddp.storage.leases import folder_lease
from tests.gcs_server import Bucket
from tests.sync_runs import content, fill, run, small_disk, write


def test_max_delete_refuses_to_lose_most_of_a_dataset(tmp_path: Path) -> None:
    """Also from another source of the dataset, and under another name of the dataset."""
    source, other, target = (tmp_path / name for name in ("source", "other", "target"))
    write(source, {str(number): b"x" for number in range(10)})
    write(other, {"0": b"x"})
    first = sync(str(source), target, SyncOptions(dataset="photos"))
    for number in range(9):
        (source / str(number)).unlink()
    for address, dataset in (
        (source, "photos"),
        (other, "photos"),
        (f"file://localhost{source}/", "renamed"),
    ):
        with pytest.raises(InputError, match=r"lacks 9 of the 10 files .* max_delete to 1"):
            sync(str(address), target, SyncOptions(dataset=dataset))
        assert (target / "current").resolve() == first.path
    sync(str(other), target, SyncOptions(dataset="another"))
    shrunk = sync(str(source), target, SyncOptions(dataset="photos", max_delete=1))
    assert len(content(shrunk.path)) == 1


def test_old_versions_are_collected(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket, 4)
    seen = []
    for at in range(4):
        bucket.put("ds/extra", bytes([at]))
        seen.append(run(tmp_path, keep_versions=2, keep_hours=0).digest[:12])
    assert {path.name for path in (tmp_path / "versions").iterdir()} == set(seen[-2:])
    bucket.put("ds/extra", bytes([0]))
    run(tmp_path, keep_versions=2, keep_hours=0, dataset="other")
    assert len(list((tmp_path / "versions").iterdir())) == 3
    bucket.put("ds/extra", b"that has no room beside the two")
    bucket.fault("ds/extra", "403")
    with pytest.raises(InputError):
        run(tmp_path, keep_versions=1, keep_hours=0)
    assert not (tmp_path / "versions" / seen[-2]).exists()


def test_datasets_in_turns_are_compared_with_their_own(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill(bucket)
    for name, data in objects.items():
        bucket.put(f"other/{name}", data[::-1])

    def other() -> Result:
        return sync("gs://bucket/other", tmp_path, SyncOptions(dataset="b"))

    first = run(tmp_path, dataset="a")
    assert (other().linked, len(other().changes.removed)) == (0, 0)
    assert (tmp_path / "current").resolve() == other().path
    bucket.put("ds/train/c0/new.png", b"new")
    planned = run(tmp_path, dataset="a", dry_run=True)
    assert report.table(planned)[-1] == "1 to add, 0 to replace, 0 to delete, 40 unchanged"
    grown = run(tmp_path, dataset="a")
    assert (grown.linked, grown.downloaded) == (40, 1)
    assert other().unchanged
    for name in list(objects)[:30]:
        del bucket.objects[f"ds/{name}"]
    with pytest.raises(InputError, match=r"lacks 30 of the 41 files .* max_delete to 1"):
        run(tmp_path, dataset="a")
    assert first.path.is_dir()


def test_a_new_dataset_links_files_and_removes_no_other(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket)
    bucket.put("other/train/c0/0000.png", bucket.objects["ds/train/c0/0000.png"].data)
    bucket.put("other/train/c1/0001.png", b"else")
    run(tmp_path)
    result = sync("gs://bucket/other", tmp_path, SyncOptions())
    assert (result.files, result.linked, result.downloaded) == (2, 1, 1)
    changes = result.changes
    assert (changes.added, changes.changed, changes.removed) == ([1], [], [])


def test_version_that_a_run_got_lately_is_kept(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket, 4)
    got = []
    for at in range(4):
        bucket.put("ds/extra", bytes([at]))
        got.append(run(tmp_path, keep_versions=1).path)
    assert all(path.is_dir() for path in got)
    day_ago = time.time() - 25 * 3600
    for path in got:
        os.utime(path / "_SUCCESS", (day_ago, day_ago))
    assert run(tmp_path, keep_versions=1, keep_hours=24).unchanged, "nothing to remove yet"
    bucket.put("ds/extra", bytes([1]))
    assert run(tmp_path, keep_versions=1, keep_hours=24).unchanged
    assert (tmp_path / "current").resolve() == got[1]
    bucket.put("ds/extra", bytes([4]))
    run(tmp_path, keep_versions=1, keep_hours=24)
    assert [path.is_dir() for path in got] == [False, True, False, True], "given out again"


def test_dry_run_writes_nothing_and_tells_all(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket, 4)
    target = tmp_path / "target"
    run(target, dry_run=True)
    assert not target.exists()
    run(target)
    bucket.put("ds/train/c0/0000.png", b"new")
    bucket.put("ds/added", b"added")
    del bucket.objects["ds/train/c1/0001.png"]
    before = sorted(target.rglob("*"))
    result = run(target, dry_run=True)
    assert report.table(result) == [
        "action            bytes  name",
        "add                   5  added",
        "replace               3  train/c0/0000.png",
        "delete                   train/c1/0001.png",
        "1 to add, 1 to replace, 1 to delete, 2 unchanged",
    ]
    assert sorted(target.rglob("*")) == before
    assert "dry run, nothing written" in report.line(result)


def test_dry_run_says_why_a_run_would_fail(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill(bucket)
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        for target in (disk, disk / "not" / "there"):
            _refused_alike(target, r"free, but 120.0 kB will be written")
    with small_disk(tmp_path / "inodes", "size=8m,nr_inodes=30") as disk:
        _refused_alike(disk, r"inodes free")
    assert bucket.gets == []
    target = tmp_path / "target"
    run(target)
    for name in list(objects)[:30]:
        del bucket.objects[f"ds/{name}"]
    _refused_alike(target, "max_delete", kind=InputError)
    assert run(target, max_delete=1, dry_run=True).refusal == ""


def test_name_in_a_manifest_cannot_draw_on_the_terminal(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket, 4)
    listed = run(tmp_path).path / "_MANIFEST.jsonl"
    head, *rows = listed.read_text().splitlines()
    extra = json.dumps(["a\x1b[2J\n\x9b\u202ex`", *json.loads(rows[0])[1:]])
    listed.write_text("\n".join([head, extra, *rows]))
    bucket.put("ds/new", b"new")
    result = run(tmp_path, max_delete=1, dry_run=True)
    assert len(result.changes.removed) == 1
    for text in ("".join(report.table(result)), report.markdown(result).replace("\n", "")):
        assert text.isprintable()


def test_dry_run_counts_what_an_interrupted_run_has_brought(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket)
    bucket.fault("ds/train/c3/0039.png", "403")
    with small_disk(tmp_path / "disk", "size=260k") as disk:
        with pytest.raises(InputError, match="403"):
            run(disk)
        assert run(disk, dry_run=True).refusal == ""
        run(disk)


def _refused_alike(target: Path, why: str, kind: type[KfpDdpError] = StorageError) -> None:
    """A dry run names what the run itself is then refused for."""
    planned = run(target, dry_run=True)
    assert re.search(why, planned.refusal)
    assert report.table(planned)[-1] == f"would be refused: {planned.refusal}"
    assert cell(planned.refusal).partition(" free and")[2] in report.markdown(planned)
    with pytest.raises(kind, match=why):
        run(target)


def test_an_object_that_is_no_image_is_refused_by_its_size(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("ds/cat/1.png", b"x" * 1000)
    bucket.put("ds/backup.tar", b"x" * 1001)
    with pytest.raises(InputError, match=r"holds 'backup.tar' of 1.0 kB, over the max_object_mb"):
        run(tmp_path, max_object_mb=0.001)
    assert not list(tmp_path.iterdir()), "refused before a byte"
    assert run(tmp_path, max_object_mb=0.001, exclude=("*.tar",)).downloaded == 1
    assert run(tmp_path, max_object_mb=0.0011).downloaded == 1


def test_bandwidth_limit(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, int]] = []

    def delay(self: Throttle, count: int) -> float:
        seen.append((self.rate, count))
        return 0

    fill(bucket, 40, 10_000)
    with monkeypatch.context() as patch:
        patch.setattr(Throttle, "delay", delay)  # the real one takes its time
        run(tmp_path, bandwidth_mb=1.5)
    assert seen == [(1.5e6, 10_000)] * 40


def test_throttle_lets_bytes_pass_one_after_another() -> None:
    slow = Throttle(1e-3)  # bytes a second: what this test takes does not show
    assert [slow.delay(1000) for _ in range(3)] == pytest.approx([1e6, 2e6, 3e6], rel=1e-3)
    assert Throttle(0).delay(1000) == 0


ONE = SyncOptions(keep_versions=1, keep_hours=0)


class Claim:
    """A source of one file and a target of its versions."""

    def __init__(self, folder: Path) -> None:
        self.source, self.target = folder / "source", folder / "target"
        self.source.mkdir()

    def version(self, number: int, run_id: str = "", options: SyncOptions = ONE) -> Result:
        """Sync the source as it is at that number."""
        (self.source / "x").write_bytes(bytes([number]))
        return sync(str(self.source), self.target, options, run_id=run_id)

    def age(self, days: float = 30) -> None:
        """Let that many days go by for all that is there."""
        then = time.time() - days * 86400
        for path in [*self.target.glob("versions/*/_SUCCESS"), *self._leases()]:
            os.utime(path, (then, then))

    def _leases(self) -> list[Path]:
        return list(self.target.glob(".kfsync/leases/*/*"))


@pytest.fixture
def claim(tmp_path: Path) -> Claim:
    return Claim(tmp_path)


def cluster(monkeypatch: pytest.MonkeyPatch, alive: Callable[[str], bool]) -> None:
    monkeypatch.setattr(live_runs, "live_runs", lambda: alive)  # a cluster cannot be had here


def test_version_of_a_live_run_stays(claim: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    live = {"run-1"}
    cluster(monkeypatch, live.__contains__)
    first = claim.version(1, "run-1")
    claim.age()
    assert claim.version(2, "run-2").removed_versions == ()
    claim.age()
    third = claim.version(3, "run-3")
    assert len(third.removed_versions) == 1, "that of run-2, which is over"
    assert first.path.is_dir()
    live.clear()
    claim.age()
    last = claim.version(4, "run-4")
    assert set(last.removed_versions) == {first.path.name, third.path.name}
    held = claim.target / ".kfsync" / "leases"
    assert [path.name for path in held.iterdir()] == [last.path.name], "none of what is gone"


def test_version_that_a_step_reads_now_stays(claim: Claim) -> None:
    first = claim.version(1)
    claim.age()
    leases = leases_of(first.path)
    assert leases is not None
    with folder_lease(leases, "a step"):
        assert claim.version(2).removed_versions == ()
    claim.age()
    assert claim.version(3).removed_versions != ()
    assert not first.path.exists()


def test_nothing_goes_without_a_cluster(claim: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Callable[[str], bool]:
        raise StorageError("which runs live cannot be seen (forbidden); apply deploy/rbac")

    monkeypatch.setattr(live_runs, "live_runs", refuse)
    first = claim.version(1)
    claim.age()
    second = claim.version(2)
    assert first.path.is_dir()
    assert "which runs live cannot be seen" in second.kept_why
    assert "none, though there are: which runs live" in report.markdown(second)
    assert "no old version was removed: which runs live cannot be seen" in report.line(second)


def test_version_handed_out_meanwhile_stays(claim: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removing one takes minutes: what was seen before it says nothing about the next."""
    found = [claim.version(number, options=SyncOptions(keep_versions=0)) for number in range(3)]
    for at, each in enumerate(found):
        os.utime(each.path / "_SUCCESS", (10**9 + at, 10**9 + at))
    cluster(monkeypatch, lambda run_id: False)
    clear = DatasetVersions.clear
    oldest = found[0]

    def slowly(self: DatasetVersions, gone: list[str]) -> None:
        clear(self, gone)
        if any(found[1].path.name in name for name in gone):
            assert DatasetVersions(claim.target).record_use(oldest.digest)

    monkeypatch.setattr(DatasetVersions, "clear", slowly)
    last = claim.version(9, options=SyncOptions(keep_versions=1, keep_hours=0.1))
    assert set(last.removed_versions) == {found[1].path.name, found[2].path.name}
    assert oldest.path.is_dir(), "it was handed out a moment ago"

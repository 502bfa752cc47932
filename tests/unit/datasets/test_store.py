"""Versions of a target on disk, without a source: published, current, handed out, removed."""

import os
from pathlib import Path

import pytest

from kfp_ddp.core.errors import StorageError
from kfp_ddp.datasets.versions import DatasetVersions, success
from kfp_ddp.storage import manifest
from tests.files import write

ONE, OTHER = "1" * 64, "2" * 64


@pytest.fixture
def store(tmp_path: Path) -> DatasetVersions:
    made = DatasetVersions(tmp_path / "target")
    made.prepare()
    return made


def published(store: DatasetVersions, digest: str = ONE) -> Path:
    tree = store.build_folder(digest) / "tree"
    write(tree / "file", "data")
    store.publish(tree.parent, digest)
    return store.version(digest)


def test_published_is_complete(store: DatasetVersions, monkeypatch: pytest.MonkeyPatch) -> None:
    version = published(store)
    assert sorted(path.name for path in version.iterdir()) == ["_SUCCESS", "file"]
    assert (version / "_SUCCESS").read_text() == f"{ONE}\n"
    assert store.complete(ONE)
    assert not store.complete(ONE[:12] + OTHER[12:])
    assert not store.complete(OTHER)
    assert list((store.work / "trash").iterdir()) == []
    monkeypatch.setattr(store, "clear", lambda _: version.stat())
    published(store)  # a damaged one is replaced before it is deleted


def test_a_version_is_marked_beside_its_tree(store: DatasetVersions, tmp_path: Path) -> None:
    """Where that is a link it is replaced, not followed, and a build that is a link is refused."""
    build, outside = store.build_folder(ONE), tmp_path / "outside"
    write(outside / "file", "theirs")
    (build / "tree").mkdir(parents=True)
    (build / "_SUCCESS").symlink_to(outside / "file")
    store.publish(build, ONE)
    assert not (build / "_SUCCESS").is_symlink()
    assert (outside / "file").read_text() == "theirs"
    build.rmdir()
    (outside / "tree").mkdir()
    build.symlink_to(outside)
    with pytest.raises(OSError, match=r"Too many levels|Not a directory"):
        store.publish(build, ONE)
    assert sorted(path.name for path in outside.iterdir()) == ["file", "tree"]
    assert list((outside / "tree").iterdir()) == []


def test_current_points_at_the_version_flipped_to_last(store: DatasetVersions) -> None:
    assert store.current() is None
    for digest in (ONE, OTHER, OTHER, ONE):
        published(store, digest)
        store.set_current(digest)
        assert os.readlink(store.root / "current") == f"versions/{digest[:12]}"
        assert store.current() == store.version(digest)
    assert sorted(path.name for path in store.root.iterdir()) == [".kfsync", "current", "versions"]
    (store.version(ONE) / "_SUCCESS").unlink()
    assert store.current() is None


@pytest.mark.parametrize(
    "target", ["versions/../versions/{}", "other/{}", "{}", "/versions/{}", "versions/{}/x"]
)
def test_a_link_to_elsewhere_is_no_current_version(store: DatasetVersions, target: str) -> None:
    version = published(store)
    (store.root / "current").symlink_to(target.format(version.name))
    assert store.current() is None


def test_flipping_keeps_what_stands_in_the_way(store: DatasetVersions) -> None:
    (store.root / "current").mkdir()
    with pytest.raises(StorageError, match="current is a folder where a link must be; move it"):
        store.set_current(ONE)
    (store.root / "current").rmdir()
    store.work.rename(store.root / "moved")
    with pytest.raises(StorageError, match=f"^cannot write to {store.work}: No such file"):
        store.set_current(ONE)
    assert not (store.root / "current").is_symlink()


def test_a_version_that_is_gone_is_not_handed_out(store: DatasetVersions) -> None:
    assert not store.record_use(ONE, "run")
    version = published(store)
    (version / "_SUCCESS").unlink()
    assert not store.record_use(ONE, "run")
    assert not store.leases(ONE).exists()


def test_a_read_only_version_is_handed_out(store: DatasetVersions, tmp_path: Path) -> None:
    """A link, through which nothing is written, stands for a volume that is mounted read-only."""
    elsewhere = published(store).rename(tmp_path / "elsewhere")
    os.utime(elsewhere / "_SUCCESS", (1, 1))
    store.version(ONE).symlink_to(elsewhere)
    assert store.record_use(ONE, "run")
    assert (elsewhere / "_SUCCESS").stat().st_mtime == 1
    assert not store.leases(ONE).exists()


def test_of_a_linked_mark_the_link_is_renewed(store: DatasetVersions, tmp_path: Path) -> None:
    version, theirs = published(store), tmp_path / "theirs"
    theirs.touch()
    os.utime(theirs, (1, 1))
    (version / "_SUCCESS").unlink()
    (version / "_SUCCESS").symlink_to(theirs)
    assert store.record_use(ONE)
    assert theirs.stat().st_mtime == 1
    assert success(version) == ""


def test_no_lease_is_left_through_a_link(store: DatasetVersions, tmp_path: Path) -> None:
    published(store)
    (tmp_path / "outside").mkdir()
    (store.work / "leases").symlink_to(tmp_path / "outside")
    with pytest.raises(StorageError, match=f"^cannot write to {store.work}/leases: "):
        store.record_use(ONE, "run")
    assert list((tmp_path / "outside").iterdir()) == []


def test_removed_version_is_none(store: DatasetVersions, monkeypatch: pytest.MonkeyPatch) -> None:
    for digest in (ONE, OTHER):
        published(store, digest)
    assert [path for _, path in store.versions_of("")] == [store.version(OTHER), store.version(ONE)]
    dataset = manifest.dataset

    def removed(version: Path) -> str:
        said = dataset(version)
        if version == store.version(ONE):
            store.clear([store.move_to_trash(version)])
        return said

    monkeypatch.setattr(manifest, "dataset", removed)
    assert [path for _, path in store.versions_of("")] == [store.version(OTHER)]


@pytest.mark.parametrize("content", ["", "\n", "\xe9", "x" * 200, " " * 100 + ONE])
def test_a_mark_without_digest_makes_nothing_whole(store: DatasetVersions, content: str) -> None:
    version = published(store)
    (version / "_SUCCESS").write_text(content)
    assert not store.complete(ONE)
    assert not store.complete("x" * 200)
    assert success(Path("/")) == ""

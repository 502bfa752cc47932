"""Moves of CHAMPION by compare-and-set, their history, and deletions of other versions."""

import io
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.export.publish import Lineage
from kfp_ddp.models import attempts, bundle
from kfp_ddp.models import champion as champions
from kfp_ddp.models.champion import compared_with, delete, find, move, read_pointer
from kfp_ddp.storage.folder import Folder
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Change, Store
from tests.exports import exported
from tests.files import write
from tests.gcs_server import Bucket

A, B, C = "a" * 12, "b" * 12, "c" * 12


@pytest.fixture(params=["folder", "bucket"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A destination of each kind, with the versions A, B and C of the model m."""
    address = str(tmp_path / "exports")
    if request.param == "bucket":
        request.getfixturevalue("bucket")
        address = "gs://bucket/exports"
    where = open_store(address)
    add_versions(where, A, B, C)
    return where


def add_versions(where: Store, *versions: str) -> None:
    for version in versions:
        where.write(f"m/{version}/_SUCCESS", version.encode())


def test_the_second_of_two_challengers_does_not_become_champion(where: Store) -> None:
    assert move(where, "m", A, "") == A
    expected = [compared_with(f"{where.uri}/m", A, where, "m") for _ in range(2)]
    assert move(where, "m", B, expected[0]) == B
    assert move(where, "m", C, expected[1]) == B
    assert read_pointer(where, "m") == B


def test_a_model_without_a_champion_to_beat_replaces_none(where: Store) -> None:
    assert move(where, "m", B, A) == "", "A was deleted"
    expected = compared_with(f"{where.uri}/m", "", where, "m")
    assert move(where, "m", A, "") == A
    assert move(where, "m", B, expected) == A


@pytest.mark.parametrize(
    ("champion", "own"),
    [
        *(("{}/m", True), ("{}/m/" + B, True), (f"{{}}/m/{B}/metrics.json", True), ("", False)),
        *(("{}", False), ("{}/other/" + B, False)),
    ],
)
def test_only_a_champion_of_this_model_is_expected(where: Store, champion: str, own: bool) -> None:
    move(where, "m", A, "")
    assert compared_with(champion.format(where.uri), B, where, "m") == (B if own else A)


def test_spellings_of_a_folder_are_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "exports")
    where = open_store((tmp_path / "exports").as_uri())
    add_versions(where, A)
    move(where, "m", A, "")
    for champion in (f"{tmp_path}/link/m", f"{tmp_path}//exports/m/", f"{tmp_path}/x/../exports/m"):
        assert compared_with(champion, B, where, "m") == B


@pytest.mark.parametrize("content", [b"", b"../x", b"A" * 12, b"a" * 11, b"a" * 13, b"\xff" * 12])
def test_an_invalid_pointer_is_refused_and_not_changed(where: Store, content: bytes) -> None:
    where.update("m/CHAMPION", lambda _: content)
    for call in (lambda: find(f"{where.uri}/m"), lambda: move(where, "m", A, "")):
        with pytest.raises(InputError, match="names no version"):
            call()
    assert where.read("m/CHAMPION", 99) == content
    where.update("m/CHAMPION", lambda _: f"  {A}\r\n".encode())  # written by hand
    assert move(where, "m", B, A) == B


def moves(where: Store) -> list[tuple[str, str, str]]:
    return [(one.version, one.replaced, one.by) for one in champions.history(where, "m")]


def test_each_move_is_recorded_once(where: Store) -> None:
    move(where, "m", A, "", "run-1")
    move(where, "m", B, A, "run-2")
    move(where, "m", B, A, "run-2")
    assert move(where, "m", C, A, "run-3") == B
    assert moves(where) == [(A, "", "run-1"), (B, A, "run-2")]
    assert champions.history(open_store(f"{where.uri}/m")) == champions.history(where, "m")


def test_a_rollback_does_not_change_the_order_of_versions(where: Store) -> None:
    for version, expected, by in ((A, "", "run"), (B, A, "run"), (C, B, "promote")):
        move(where, "m", version, expected, by)
    move(where, "m", B, C, champions.ROLLBACK)
    known = champions.history(where, "m")
    assert [champions.replaced_by(known, version) for version in (A, B, C)] == ["", A, B]
    assert champions.replaced_by(known, "d" * 12) is None


def test_changes_without_a_move_are_skipped(where: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(version: str, expected: str, by: str) -> None:
        """Write a move to the history alone, as a killed command does."""
        with monkeypatch.context() as patch:
            update = type(where).update
            patch.setattr(
                type(where),
                "update",
                lambda self, name, change: (
                    update(self, name, change) if name.endswith("CHAMPIONS") else None
                ),
            )
            move(where, "m", version, expected, by)

    for version, expected in ((A, ""), (B, A), (C, B)):
        move(where, "m", version, expected, "run")
    kill(B, C, "promote")
    assert champions.replaced_by(champions.history(where, "m"), C) == B
    move(where, "m", B, C, champions.ROLLBACK)
    assert champions.replaced_by(champions.history(where, "m"), B) == A
    kill(A, B, champions.ROLLBACK)
    move(where, "m", A, B, "promote")
    assert champions.replaced_by(champions.history(where, "m"), A) == B


def test_the_history_is_bounded_and_skips_invalid_lines(tmp_path: Path) -> None:
    where = open_store(str(tmp_path))
    versions = [f"{number:012x}" for number in range(30)]
    add_versions(where, *versions)
    where.update(f"m/{champions.CHAMPIONS}", lambda _: b"not json\n\xff\n{}\n")
    for before, version in zip(["", *versions], versions, strict=False):
        move(where, "m", version, before, "x" * 1000)
    assert [version for version, _, _ in moves(where)] == versions[-20:]


def test_the_champion_is_not_deleted(where: Store) -> None:
    models = open_store(f"{where.uri}/m")
    assert not delete(models, A), "there is no champion"
    move(where, "m", A, "")
    assert not delete(models, A)
    for _ in range(70):
        add_versions(where, B)
        assert delete(models, B)
    assert where.exists(f"m/{A}/_SUCCESS")
    assert not where.exists(f"m/{B}/_SUCCESS")
    assert (read_pointer(where, "m"), move(where, "m", C, A)) == (A, C)


@pytest.mark.parametrize(("promoted", "deleted"), [((B,), [A]), ((A, B), [])])
def test_a_champion_of_late_and_the_one_before_it_are_not_deleted(
    where: Store, monkeypatch: pytest.MonkeyPatch, promoted: tuple[str, ...], deleted: list[str]
) -> None:
    models = open_store(f"{where.uri}/m")
    add_versions(where, "d" * 12)
    for number, version in enumerate((A, B, C, "d" * 12)):
        monkeypatch.setattr("time.time", lambda number=number: float(number))
        move(where, "m", version, read_pointer(where, "m"))
        attempts.note(models, version, version=version, champion="", reason="blessed")

    def promote_first(store: Store, version: str) -> bool:
        for one in promoted if read_pointer(where, "m") == "d" * 12 else ():
            move(where, "m", one, read_pointer(where, "m"))
        return delete(store, version)

    monkeypatch.setattr(champions, "delete", promote_first)
    assert attempts.prune(models, 1) == deleted
    assert read_pointer(where, "m") == B
    assert where.exists(f"m/{B}/_SUCCESS")


def test_a_bundle_is_restored_if_it_becomes_champion_while_it_is_deleted(bucket: Bucket) -> None:
    where = open_store("gs://bucket/exports")
    add_versions(where, A, B)
    move(where, "m", A, "")

    def promote() -> None:
        bucket.before_write = None
        bucket.put("exports/m/CHAMPION", f"{B}\n".encode())

    bucket.before_write = promote
    assert not delete(open_store("gs://bucket/exports/m"), B)
    assert where.read(f"m/{B}/_SUCCESS", 99) == B.encode()


def test_a_deleted_version_is_no_champion(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    where = open_store("gs://bucket/exports")
    add_versions(where, A, B)
    move(where, "m", A, "")
    exists = type(where).exists

    def delete_after(self: Store, name: str) -> bool:
        monkeypatch.undo()
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        answer = exists(self, name)
        assert delete(open_store("gs://bucket/exports/m"), B)
        return answer

    url = os.environ["STORAGE_EMULATOR_HOST"]
    monkeypatch.setattr(type(where), "exists", delete_after)
    with pytest.raises(InputError, match="cannot be the champion"):
        move(where, "m", B, A)
    assert read_pointer(where, "m") == A


class StoppedError(Exception):
    """The program ended here."""


class Stepped:
    """A store that does something before its n-th request, of those outside of a lock."""

    def __init__(self, where: Store, number: int, action: Callable[[], object]) -> None:
        self.where, self.left, self.action = where, number, action
        self.locked = False

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.where, name)
        if not callable(value):
            return value

        def request(*arguments: Any) -> Any:
            self._step()
            if name != "update":
                return value(*arguments)
            file, change = arguments
            return value(file, partial(self._change, change))

        return request

    def _change(self, change: Change, content: bytes | None) -> bytes | None:
        """Other writers wait for a folder's lock, a bucket has none."""
        self.locked = isinstance(self.where, Folder)
        changed = change(content)
        self._step()
        self.locked = False
        return changed

    def _step(self) -> None:
        if not self.locked:
            self.left -= 1
            if self.left == 0:
                self.action()


def champion_is_whole(where: Store) -> None:
    """Check that the version that CHAMPION names can be used."""
    opened = champions.open_bundle(f"{where.uri}/m")
    assert opened.version == read_pointer(where, "m")
    assert opened.verify() > 0


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.slow)])
def root(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """Where models are published."""
    if request.param == "folder":
        return str(tmp_path)
    request.getfixturevalue("bucket")
    return "gs://bucket"


@pytest.mark.parametrize("deletes_first", [True, False])
def test_a_version_is_published_again_while_it_is_deleted(
    root: str, deletes_first: bool, tmp_path: Path
) -> None:
    """At each request of one of them the other one does all of its own."""
    made = tmp_path / "made"
    ends: set[str] = set()
    for number in itertools.count(1):
        where = open_store(f"{root}/{number}")
        for wrong in (4, 3, 9):
            version = exported(where, "m", tmp_path / f"{number}-{wrong}", wrong, Lineage("r"))
            if wrong != 9:
                move(where, "m", version, read_pointer(where, "m"))
        shutil.copytree(tmp_path / f"{number}-9", made, dirs_exist_ok=True)

        def publish(store: Store = where, version: str = version) -> None:
            try:
                bundle.upload(made, "m", store)
                before = read_pointer(store, "m")
                ends.add("moved" if move(store, "m", version, before) == version else "other")
            except (InputError, StorageError):
                ends.add("refused")

        def remove(store: Store, version: str = version) -> None:
            ends.add("deleted" if delete(store, version) else "kept")

        models = open_store(f"{where.uri}/m")
        if deletes_first:
            stepped = Stepped(models, number, publish)
            remove(cast("Store", stepped))
        else:
            stepped = Stepped(where, number, partial(remove, models))
            publish(cast("Store", stepped))
        champion_is_whole(where)
        if stepped.left > 0:
            break
    assert ends >= {"moved", "refused", "deleted"}


@pytest.mark.parametrize("promoted", [False, True])
def test_an_interrupted_deletion_is_completed(root: str, promoted: bool, tmp_path: Path) -> None:
    """Until then nobody believes the version; if it is the champion by then, it remains."""
    where = open_store(f"{root}/x")
    models = open_store(f"{where.uri}/m")
    ends: set[bool] = set()
    for wrong in (4, 3):
        version = exported(where, "m", tmp_path / str(wrong), wrong, Lineage("r"))
        move(where, "m", version, read_pointer(where, "m"))
    champion = version

    def stop() -> None:
        raise StoppedError

    for number in itertools.count(1):
        version = exported(where, "m", tmp_path / "9", 9, Lineage("r"))
        stepped = cast("Store", Stepped(models, number, stop))
        try:
            delete(stepped, version)
        except StoppedError:
            pass
        else:
            break
        if where.exists(f"m/{version}/_DELETING"):
            assert version not in champions.list_versions(where)["m"]
            with pytest.raises(InputError):
                champions.open_bundle(f"{where.uri}/m/{version}")
            with pytest.raises(StorageError, match="is being deleted"):
                bundle.upload(tmp_path / "9", "m", where)
            with pytest.raises(InputError, match="cannot be the champion"):
                move(where, "m", version, champion)
            if promoted:
                where.write("m/CHAMPION", version.encode())
        deleted = delete(models, version)
        ends.add(deleted)
        assert deleted or read_pointer(where, "m") == version
        assert not where.exists(f"m/{version}/_DELETING")
        where.write("m/CHAMPION", champion.encode())
        delete(models, version)
        assert not where.has_files(f"m/{version}/")
    assert ends == ({True, False} if promoted else {True})


def start(script: str, *arguments: str) -> "subprocess.Popen[bytes]":
    """Start a script that prints `ready`, and then waits for the end of its input."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_a_bucket_with_other_writers_and_lost_answers(bucket: Bucket) -> None:
    where = open_store("gs://bucket/exports")
    add_versions(where, A, B)
    move(where, "m", A, "")
    name = "exports/m/CHAMPION"
    bucket.lose_answers = 1
    assert move(where, "m", B, A) == B
    assert bucket.objects[name].data == f"{B}\n".encode()
    bucket.before_write = lambda: bucket.put(name, f"{C}\n".encode())
    assert move(where, "m", A, B) == C
    bucket.before_write = lambda: bucket.put(name, f"{B}\n".encode())
    with pytest.raises(StorageError, match="changed by another writer"):
        where.update("m/CHAMPION", lambda _: f"{A}\n".encode())


def test_planted_links_are_not_followed(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside" / "file", "mine").parent
    exports = tmp_path / "exports"
    where = Folder(exports, str(exports))
    add_versions(where, A)
    for name in ("CHAMPIONS", ".CHAMPION.lock", "CHAMPION"):
        (exports / "m" / name).symlink_to(outside / "file")
        with pytest.raises(InputError):
            move(where, "m", A, "")
        (exports / "m" / name).unlink()
    (exports / "n").symlink_to(outside)
    with pytest.raises(InputError):
        move(where, "n", A, "")
    with pytest.raises(InputError):
        where.put(outside / "file", "n/copy")
    (exports / "m" / "file").symlink_to(outside / "file")
    assert where.write("m/file", b"new")
    assert (exports / "m" / "file").read_text() == "new"
    assert not (exports / "m" / "file").is_symlink()
    assert [p.name for p in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "mine"


HOLD = """
import pathlib, sys
from kfp_ddp.models import bundle
with bundle.replacing(pathlib.Path(sys.argv[1])) as folder:
    (folder / "model.onnx").write_text(sys.argv[2])
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_concurrent_exports_of_a_run_do_not_disturb_each_other(tmp_path: Path) -> None:
    running = [start(HOLD, str(tmp_path), content) for content in ("one", "two")]
    (tmp_path / ".bundle-planted").symlink_to(tmp_path)
    with bundle.replacing(tmp_path) as folder:
        (folder / "model.onnx").write_text("three")
    assert (tmp_path / "bundle" / "model.onnx").read_text() == "three"
    for process, content in zip(running, ("one", "two"), strict=True):
        process.communicate()
        assert process.returncode == 0
        assert (tmp_path / "bundle" / "model.onnx").read_text() == content
        assert bundle.intact(tmp_path / "bundle")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".bundle-planted", "bundle"]


KILL = """
import os, pathlib, sys
from kfp_ddp.models import bundle
rename, left = pathlib.Path.rename, int(sys.argv[2])
def killed(path, target):
    global left
    if not left:
        os.kill(os.getpid(), 9)
    left -= 1
    return rename(path, target)
pathlib.Path.rename = killed
with bundle.replacing(pathlib.Path(sys.argv[1])) as folder:
    (folder / "model.onnx").write_text("new")
"""


@pytest.mark.parametrize("renames", [0, 1])
def test_a_killed_replacement_leaves_the_earlier_bundle(tmp_path: Path, renames: int) -> None:
    with bundle.replacing(tmp_path) as folder:
        (folder / "model.onnx").write_text("earlier")
    arguments = [sys.executable, "-c", KILL, str(tmp_path), str(renames)]
    assert subprocess.run(arguments, check=False).returncode == -9
    assert (tmp_path / "bundle").exists() == (renames == 0)
    bundle.clean_up(tmp_path)
    assert bundle.intact(tmp_path / "bundle")
    assert (tmp_path / "bundle" / "model.onnx").read_text() == "earlier"
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_two_uploads_of_a_version_leave_it_complete(tmp_path: Path) -> None:
    folder = tmp_path / "run" / bundle.NAME
    write(folder / "weights", b"w" * 1000)
    bundle.seal(folder)
    where = open_store(str(tmp_path / "models"))

    class Reads(io.BytesIO):
        def read(self, *size: int | None) -> bytes:
            if self.tell() == 0 and any(Path(where.uri).rglob(".*.tmp")):
                bundle.upload(folder, "m", where)  # another one while this one has begun
            return super().read(*size)

    name = f"m/{bundle.version(folder)}/weights"
    assert not where._put(Reads((folder / "weights").read_bytes()), name)
    assert bundle.local_bundle(Path(where.uri, name).parent).verify() == 1000


def test_temporary_files_of_a_killed_upload_are_deleted(tmp_path: Path) -> None:
    where, folder = open_store(str(tmp_path / "exports")), tmp_path / "bundle"
    write(folder / "model.onnx", "x")
    bundle.seal(folder)
    target = tmp_path / "exports" / "m" / bundle.version(folder)
    write(target / f".{'0' * 16}.tmp", "half")
    assert bundle.upload(folder, "m", where) == str(target)
    assert bundle.intact(target)

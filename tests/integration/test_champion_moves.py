"""CHAMPION moves only where it still names what a model was compared with."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.export.publish import publish
from kfp_ddp.models import bundle
from kfp_ddp.models.champion import compared_with, find, move, read_pointer
from kfp_ddp.storage.folder import Folder
from kfp_ddp.storage.kinds import open_store
from tests.generations import Bucket, handler
from tests.serving import serving

A, B, C = "a" * 12, "b" * 12, "c" * 12


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A bucket that keeps to generation preconditions."""
    made = Bucket()
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), handler(made))) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        yield made


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URI of a destination of each kind."""
    if request.param == "bucket":
        request.getfixturevalue("bucket")
        return "gs://models/exports"
    return str(tmp_path / "exports")


def test_the_second_of_two_that_beat_one_champion_leaves_it(place: str) -> None:
    where = open_store(place)
    assert move(where, "m", A, "") == A
    expected = [compared_with(f"{place}/m", A, where, "m") for _ in range(2)]
    assert move(where, "m", B, expected[0]) == B
    assert move(where, "m", C, expected[1]) == B
    assert read_pointer(where, "m") == B


def test_a_step_that_moved_it_and_runs_again_finds_it_done(place: str) -> None:
    where = open_store(place)
    for _ in range(2):
        assert move(where, "m", A, compared_with(f"{place}/m", "", where, "m")) == A
        assert move(where, "m", B, A) == B
        assert move(where, "m", A, B) == A


def test_a_first_model_does_not_replace_one_that_came_meanwhile(place: str) -> None:
    where = open_store(place)
    expected = compared_with(f"{place}/m", "", where, "m")
    assert move(where, "m", A, "") == A
    assert move(where, "m", B, expected) == A


def test_one_whose_champion_is_gone_does_not_bring_it_back(place: str) -> None:
    assert move(open_store(place), "m", B, A) == ""
    assert read_pointer(open_store(place), "m") == ""


@pytest.mark.parametrize(
    ("champion", "own"),
    [
        ("{}/m", True),
        ("{}/m/", True),
        ("{}/m/" + B, True),
        (f"{{}}/m/{B}/metrics.json", True),
        ("", False),
        ("{}", False),
        ("{}/m2", False),
        ("{}/other/" + B, False),
    ],
)
def test_a_champion_of_this_model_is_what_the_gate_compared_with_another_is_not(
    place: str, champion: str, own: bool
) -> None:
    where = open_store(place)
    move(where, "m", A, "")
    assert compared_with(champion.format(place), B, where, "m") == (B if own else A)


def test_ways_to_write_a_folder_are_one_place(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "exports")
    where = open_store((tmp_path / "exports").as_uri())
    move(where, "m", A, "")
    for champion in (f"{tmp_path}/link/m", f"{tmp_path}//exports/m/", f"{tmp_path}/x/../exports/m"):
        assert compared_with(champion, B, where, "m") == B


@pytest.mark.parametrize(
    "content", [b"", b"../../x", b"A" * 12, b"a" * 11, b"a" * 13, b"\xff" * 12]
)
def test_a_pointer_that_names_no_version_is_told_and_stays(place: str, content: bytes) -> None:
    where = open_store(place)
    where.update("m/CHAMPION", lambda _: content)
    for ask in (lambda: find(f"{place}/m"), lambda: move(where, "m", A, "")):
        with pytest.raises(InputError, match="names no version") as caught:
            ask()
        assert "\n" not in str(caught.value)
    assert where.read("m/CHAMPION", 99) == content


def test_a_pointer_written_by_hand_is_read(place: str) -> None:
    where = open_store(place)
    where.update("m/CHAMPION", lambda _: f"  {A}\r\n".encode())
    assert move(where, "m", B, A) == B


ADD = """
import sys
from kfp_ddp.storage.kinds import open_store
where = open_store(sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
for _ in range(int(sys.argv[2])):
    where.update("m/counter", lambda found: b"%d" % (int(found or b"0") + 1))
"""


def test_no_update_of_many_processes_is_lost(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ADD, str(tmp_path), "25"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(12)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    codes = []
    for process in processes:
        codes.append(process.wait())
        assert process.stdout is not None
        process.stdout.close()
    assert codes == [0] * 12
    assert (tmp_path / "m" / "counter").read_bytes() == b"300"
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == [".counter.lock", "counter"]


@pytest.mark.slow
def test_of_many_that_beat_one_champion_exactly_one_takes_its_place(place: str) -> None:
    where = open_store(place)
    for turn in range(5):
        before = read_pointer(where, "m")
        versions = [f"{turn:02}{number:010x}" for number in range(8)]
        found: dict[str, str] = {}

        def beat(version: str, before: str = before, found: dict[str, str] = found) -> None:
            found[version] = move(open_store(place), "m", version, before)

        threads = [threading.Thread(target=beat, args=(version,)) for version in versions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        assert set(found.values()) == {read_pointer(where, "m")}
        assert read_pointer(where, "m") in versions


@pytest.mark.parametrize("fault", ["race", "lost answer"])
def test_a_bucket_that_another_changes_or_that_loses_an_answer(bucket: Bucket, fault: str) -> None:
    where = open_store("gs://models/exports")
    move(where, "m", A, "")
    name = "exports/m/CHAMPION"
    if fault == "race":
        bucket.before_write = lambda: bucket.put(name, f"{C}\n".encode())
        assert move(where, "m", B, A) == C
    else:
        bucket.lose_answers = 1
        assert move(where, "m", B, A) == B
    assert bucket.objects[name][0] == (f"{C}\n" if fault == "race" else f"{B}\n").encode()


def test_a_bucket_that_never_stands_still_is_one_line(bucket: Bucket) -> None:
    where = open_store("gs://models/exports")
    move(where, "m", A, "")
    bucket.before_write = lambda: bucket.put("exports/m/CHAMPION", f"{A}\n".encode())
    with pytest.raises(StorageError, match="changed by another writer") as caught:
        move(where, "m", B, A)
    assert "\n" not in str(caught.value)


def test_what_others_planted_in_a_folder_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    exports = tmp_path / "exports"
    (exports / "m").mkdir(parents=True)
    where = Folder(exports, str(exports))
    (exports / "m" / ".CHAMPION.lock").symlink_to(outside / "lock")
    with pytest.raises(InputError):
        move(where, "m", A, "")
    (exports / "m" / ".CHAMPION.lock").unlink()
    (exports / "m" / "CHAMPION").symlink_to(outside / "file")
    with pytest.raises(InputError):
        move(where, "m", A, "")
    (exports / "n").symlink_to(outside)
    with pytest.raises(InputError):
        move(where, "n", A, "")
    with pytest.raises(InputError):
        where.put(outside / "file", "n/copy")
    (exports / "m" / "file").symlink_to(outside / "file")
    (tmp_path / "new").write_text("new")
    assert where.put(tmp_path / "new", "m/file")
    assert (exports / "m" / "file").read_text() == "new"
    assert not (exports / "m" / "file").is_symlink()
    assert [p.name for p in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "mine"


def sealed(folder: Path, content: str) -> Path:
    folder.mkdir()
    (folder / "model.onnx").write_text(content)
    bundle.seal(folder)
    return folder


def test_a_bundle_that_comes_too_late_is_uploaded_and_says_so_in_one_line(
    place: str, tmp_path: Path
) -> None:
    where = open_store(place)
    first, better, late = (sealed(tmp_path / name, name) for name in ("first", "better", "late"))
    versions = [bundle.version(one) for one in (first, better, late)]
    assert publish(first, "m", where, "")[1] == ""
    assert publish(better, "m", where, versions[0])[1] == ""
    uri, said = publish(late, "m", where, versions[0])
    assert said == (
        f"{versions[2]} was uploaded, but {versions[0]}, which it was compared with, is not the "
        f"champion any more: CHAMPION names {versions[1]} and stays; run the gate again"
    )
    assert uri == f"{where.uri}/m/{versions[2]}"
    assert where.read(f"m/{versions[2]}/_SUCCESS", 99) is not None
    assert read_pointer(where, "m") == versions[1]
    assert publish(better, "m", where, versions[0])[1] == ""


HOLD = """
import pathlib, sys
from kfp_ddp.models import bundle
with bundle.replacing(pathlib.Path(sys.argv[1])) as aside:
    (aside / "model.onnx").write_text(sys.argv[2])
    print("ready", flush=True)
    sys.stdin.read()
"""


REPLACE = """
import pathlib, sys
from kfp_ddp.models import bundle
for _ in range(20):
    with bundle.replacing(pathlib.Path(sys.argv[1])) as aside:
        (aside / "model.onnx").write_text(sys.argv[2])
"""


def test_what_another_export_of_the_same_run_works_on_stays(tmp_path: Path) -> None:
    def begin(content: str) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path), content],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    running = [begin("one"), begin("two")]
    (tmp_path / ".bundle-planted").symlink_to(tmp_path)
    with bundle.replacing(tmp_path) as aside:
        (aside / "model.onnx").write_text("three")
    assert (tmp_path / "bundle" / "model.onnx").read_text() == "three"
    for process, content in zip(running, ("one", "two"), strict=True):
        process.communicate()
        assert process.returncode == 0
        assert (tmp_path / "bundle" / "model.onnx").read_text() == content
        assert bundle.intact(tmp_path / "bundle")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".bundle-planted", "bundle"]


def test_many_exports_of_one_run_at_once_leave_one_whole_bundle(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", REPLACE, str(tmp_path), str(n)]) for n in range(6)
    ]
    assert [process.wait() for process in processes] == [0] * 6
    assert bundle.intact(tmp_path / "bundle")
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_links_in_a_bundle_are_damage(tmp_path: Path) -> None:
    for number, spoil in enumerate(("file", "folder", "extra")):
        folder = sealed(tmp_path / f"b{number}", "x")
        copy = tmp_path / f"copy{number}"
        shutil.copytree(folder, copy)
        if spoil == "file":
            (folder / "model.onnx").unlink()
            (folder / "model.onnx").symlink_to(copy / "model.onnx")
        elif spoil == "folder":
            (folder / "more").symlink_to(copy)
        else:
            (folder / "more").write_text(json.dumps({}))
        assert not bundle.intact(folder)
        assert bundle.intact(copy)

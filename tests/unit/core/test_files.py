"""Files of a training that others may plant, and leases."""

import os
import random
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kfp_ddp.core import files
from kfp_ddp.core.files import atomic_write, durable, folder_below, open_below
from kfp_ddp.storage import leases as lease
from tests.waiting import until


def write(path: Path, data: bytes, root: Path | None = None) -> None:
    with atomic_write(path, root=root) as file:
        file.write(data)


def test_old_content_stays_until_the_new_file_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with atomic_write(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_failed_write_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail_halfway() -> None:
        with atomic_write(path) as file:
            file.write(b"half")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk"):
        fail_halfway()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_longest_name_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    write(path, b"new")
    assert path.read_bytes() == b"new"


def test_two_writers_of_one_file_do_not_interfere(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with atomic_write(path) as first:
        first.write(b"first")
        write(path, b"second")
    assert path.read_bytes() == b"first"


@pytest.mark.parametrize("name", ["file", "file.tmp", "aside"])
def test_planted_link_is_replaced_and_not_written_through(tmp_path: Path, name: str) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.write_bytes(b"mine")
    folder.mkdir()
    (folder / name).symlink_to(outside)
    with atomic_write(folder / "file", folder / "aside") as file:
        file.write(b"new")
    write(folder / "file", b"newer")
    with durable(folder / name) as file:
        file.write(b"newest")
    assert outside.read_bytes() == b"mine"
    assert not (folder / name).is_symlink()


@pytest.mark.parametrize("seed", range(5))
def test_no_link_in_a_path_is_followed(tmp_path: Path, seed: int) -> None:
    """Some folder on the way, or the file, is a link to one that has the same names."""
    choose = random.Random(seed)
    for case in range(100):
        depth = choose.randint(1, 5)
        parts = [choose.choice("abc") for _ in range(depth)]
        root, outside = tmp_path / f"root-{case}", tmp_path / f"outside-{case}"
        planted = choose.randrange(depth)
        (root / Path(*parts[:planted])).mkdir(parents=True)
        other = outside.joinpath(*parts[planted + 1 :])
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_bytes(b"mine")
        root.joinpath(*parts[: planted + 1]).symlink_to(outside)
        path = root.joinpath(*parts)
        with pytest.raises(OSError, match=r"links|directory"):
            open_below(root, Path(*parts))
        if planted < depth - 1:
            for attempt in attempts(root, path, choose):
                with pytest.raises(OSError, match=f"directory: '{root}"):
                    attempt()
        else:
            write(path, b"new", root)
            with open_below(root, Path(*parts)) as file:
                assert file.read() == b"new"
        assert [p for p in outside.rglob("*") if p.is_file()] in ([other], [])
        assert other.read_bytes() == b"mine"


def attempts(root: Path, path: Path, choose: random.Random) -> list[Callable[[], None]]:
    def make() -> None:
        with folder_below(root, path.parent.relative_to(root), make=True):
            pass

    found = [make, lambda: write(path, b"new", root)]
    choose.shuffle(found)
    return found


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(OSError, match="not a plain file"):
            open_below(tmp_path, name)


@pytest.mark.parametrize("name", ["../x", "/etc", "a/../../b"])
def test_name_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a folder below"), folder_below(tmp_path, name, True):
        pass


@pytest.mark.parametrize("remaining", [0, 2, 100])
def test_folders_stay_open(tmp_path: Path, remaining: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_KEPT_OPEN", remaining)
    for number in range(10):
        (tmp_path / f"below/a/{number}").mkdir(parents=True)
    folders = files.Folders(tmp_path, "below")

    def look(number: int) -> None:
        name = f"a/{number % 10}"
        with folders.at(name) as folder:
            assert os.path.samestat(os.fstat(folder), (tmp_path / "below" / name).stat())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(look, range(400)))
    folders.close()
    left = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    assert not [path for path in left if path.startswith(str(tmp_path))]
    (tmp_path / "below/b").symlink_to(tmp_path)
    with pytest.raises(NotADirectoryError, match="below/b'"), folders.at("b/c"):
        pass
    with pytest.raises(ValueError, match="not a folder below"), folders.at("a/../.."):
        pass
    folders.close()


def _age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2, follow_symlinks=False)


def test_lease_is_valid_inside_its_block_and_removed_after_it(tmp_path: Path) -> None:
    folder = tmp_path / "leases"
    assert lease.folder_holders(folder) == []
    with lease.folder_lease(folder, "run-a"), lease.folder_lease(folder, "run-b"):
        assert lease.folder_holders(folder) == ["run-a", "run-b"]
        with lease.folder_lease(folder, "run-a"):
            pass
        assert lease.folder_holders(folder) == ["run-a", "run-b"]
    assert lease.folder_holders(folder) == []
    assert list(folder.iterdir()) == []


def test_permanent_lease_is_valid_while_its_run_is_alive(tmp_path: Path) -> None:
    lease.write_permanent(tmp_path, "queued.run")
    (file,) = tmp_path.iterdir()
    _age(file, 1e7)
    assert lease.folder_holders(tmp_path, alive=lambda run: run == "queued.run") == ["queued.run"]
    assert lease.folder_holders(tmp_path, alive=lambda run: run == "other") == []


def test_clock_of_this_machine_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease.write_permanent(tmp_path, "run")
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert lease.folder_holders(tmp_path) == ["run"]


def test_step_runs_without_a_lease_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with lease.folder_lease(tmp_path / "file", "run"):
        pass
    with lease.folder_lease(tmp_path / "file" / "below", "run"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("planted", ["folder", "lease", "pipe"])
def test_planted_link_is_not_followed(tmp_path: Path, planted: str) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "leases"
    outside.mkdir()
    (outside / "run.left").write_text("mine")
    _age(outside / "run.left", 10 * lease.LASTING_SECONDS)
    before = (outside / "run.left").stat()
    if planted == "folder":
        folder.symlink_to(outside)
        with pytest.raises(NotADirectoryError):
            lease.write_permanent(folder, "run")
        with pytest.raises(NotADirectoryError):
            lease.folder_holders(folder)
    else:
        folder.mkdir()
        if planted == "pipe":
            os.mkfifo(folder / "run.left")
        else:
            (folder / "run.left").symlink_to(outside / "run.left")
        with pytest.raises(OSError, match=r"links|device"):
            lease.write_permanent(folder, "run")
        lease.folder_holders(folder)
    assert (outside / "run.left").stat() == before
    assert list(outside.iterdir()) == [outside / "run.left"]


def test_permanent_lease_creates_its_folder_and_is_readable_by_all(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        lease.write_permanent(tmp_path / "deep" / "leases", "run")
    finally:
        os.umask(before)
    (file,) = (tmp_path / "deep" / "leases").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_lease_expires_after_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_now", lambda folder: 10_000.0)
    for name, age in (("a", 899), ("b", 900), ("c", 901)):
        (tmp_path / f"{name}.left").touch()
        os.utime(tmp_path / f"{name}.left", (10_000 - age,) * 2)
    assert lease.folder_holders(tmp_path) == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.left"]


def test_link_expires_by_its_own_time(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    _age(tmp_path / "target", 1e7)
    leases = tmp_path / "leases"
    leases.mkdir()
    (leases / "new.1").symlink_to(tmp_path / "target")
    (leases / "dangling.1").symlink_to(tmp_path / "nothing")
    (leases / "old.1").symlink_to(leases)
    _age(leases / "old.1", 1e7)
    assert lease.folder_holders(leases) == ["dangling", "new"]
    assert not (leases / "old.1").is_symlink()


def test_expired_entry_that_cannot_be_removed_stays(tmp_path: Path) -> None:
    (tmp_path / "a.folder").mkdir()
    (tmp_path / "nodot").touch()
    for path in tmp_path.iterdir():
        _age(path, 1e7)
    assert lease.folder_holders(tmp_path, alive=lambda holder: False) == []
    assert (tmp_path / "a.folder").is_dir()


@pytest.mark.parametrize("last", [False, True])
def test_lease_that_disappears_during_the_scan_hides_no_other(tmp_path: Path, last: bool) -> None:
    for name in "abc":
        (tmp_path / f"{name}.1").touch()
        _age(tmp_path / f"{name}.1", 1e7)
    gone: list[str] = []

    def alive(holder: str) -> bool:
        if not gone:
            others = [entry.name for entry in os.scandir(tmp_path) if entry.name[0] in "abc"]
            others.remove(f"{holder}.1")
            gone.append(others[-1 if last else 0])
            (tmp_path / gone[0]).unlink()
        return True

    left = lease.folder_holders(tmp_path, alive)
    assert left == sorted(set("abc") - {gone[0][0]})


def test_lease_outlives_a_failed_renewal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[Path] = []
    touch = lease._touch

    def away(path: Path) -> None:
        touched.append(path)
        if 1 < len(touched) < 4:
            raise OSError("away")
        touch(path)

    monkeypatch.setattr(lease, "RENEWED_EVERY", 0.001)
    monkeypatch.setattr(lease, "_touch", away)
    with lease.folder_lease(tmp_path, "run"):
        (file,) = tmp_path.iterdir()
        until(lambda: len(touched) > 4)
        _age(file, 10 * lease.LASTING_SECONDS)
        until(lambda: time.time() - file.stat().st_mtime < lease.LASTING_SECONDS)
    assert len(set(touched)) == 1
    assert list(tmp_path.iterdir()) == []

"""A file gets its name when it is whole, and no link leads elsewhere."""

import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kfp_ddp.core import files
from kfp_ddp.core.files import atomic_write, durable, folder_below, open_below


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

    def last() -> None:
        with durable(path, root) as file:
            file.write(b"new")

    found = [make, last, lambda: write(path, b"new", root)]
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


@pytest.mark.parametrize("kept", [0, 2, 100])
def test_folders_open_each_folder_however_many_stay_open(
    tmp_path: Path, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_KEPT_OPEN", kept)
    before = len(os.listdir("/proc/self/fd"))
    folders = files.Folders(tmp_path, "below", make=True)

    def look(number: int) -> None:
        name = f"a/{number % 10}"
        with folders.at(name) as folder:
            assert os.path.samestat(os.fstat(folder), (tmp_path / "below" / name).stat())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(look, range(400)))
    folders.close()
    assert len(os.listdir("/proc/self/fd")) == before
    (tmp_path / "below/b").symlink_to(tmp_path)
    with pytest.raises(NotADirectoryError, match="below/b'"), folders.at("b/c"):
        pass
    with pytest.raises(ValueError, match="not a folder below"), folders.at("a/../.."):
        pass
    folders.close()

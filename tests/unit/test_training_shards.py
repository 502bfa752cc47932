"""Images in the archives of a packed version: where each is, and what is not believed."""

import json
import tarfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.datasets.options import Options
from kfp_ddp.datasets.sync import sync
from kfp_ddp.storage import manifest
from kfp_ddp.training import shards
from kfp_ddp.training.shards import Members, content, members

LONG = f"train/a/{'x' * 150}.png"
FILES = {
    LONG: b"long",
    "train/a/1.png": b"one",
    "train/a/äö ü.png": b"umlaut",
    "train/b/2.png": b"two" * 900,
    "val/b/3.png": b"",
}


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """What data_sync makes of `FILES` with pack=tar."""
    for name, data in FILES.items():
        path = tmp_path / "bucket" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    done = sync(str(tmp_path / "bucket"), tmp_path / "data", Options(pack="tar"))
    return done.path


def read(found: Members, name: str) -> bytes:
    at = found.names.index(name)
    return content(found.slices.where(at, f"{found.slices.root}/{name}"), 10_000)


def listed(root: Path) -> Members:
    found = members(root)
    assert found is not None
    return found


def rewritten(version: Path, number: int, change: Callable[[list[object]], None]) -> None:
    """Change the columns of a line of the manifest."""
    path = version / manifest.NAME
    lines = path.read_text().splitlines()
    row = json.loads(lines[number])
    change(row)
    lines[number] = json.dumps(row)
    path.write_text("\n".join(lines) + "\n")


def test_members_are_found_by_name(version: Path) -> None:
    found = listed(version)
    assert set(found.names) == set(FILES)
    assert {name: read(found, name) for name in FILES} == FILES
    assert shards.MANIFEST == manifest.NAME


def test_archives_without_a_manifest_are_listed(version: Path, tmp_path: Path) -> None:
    (version / manifest.NAME).unlink()
    (version / "_SUCCESS").unlink()
    found = listed(version)
    assert {name: read(found, name) for name in FILES} == FILES
    with tarfile.open(tmp_path / "data" / "gnu.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        archive.add(tmp_path / "bucket", ".")
    home = tmp_path / "others"
    home.mkdir()
    (tmp_path / "data" / "gnu.tar").rename(home / "gnu.tar")
    found = listed(home)
    assert {name: read(found, name) for name in FILES} == FILES


def test_plain_folders_are_not_packed(tmp_path: Path, version: Path) -> None:
    assert members(tmp_path / "bucket") is None
    assert members(tmp_path / "nothing") is None
    (tmp_path / "bucket" / "x.tar").write_bytes(b"beside the folders")
    assert members(tmp_path / "bucket") is None


def test_reader_is_independent_of_current(version: Path, tmp_path: Path) -> None:
    current = tmp_path / "data" / "current"
    found = listed(current)
    current.unlink()
    assert read(found, "train/a/1.png") == b"one"


def test_selected_members_keep_their_content(version: Path) -> None:
    found = listed(version)
    part = Members(found.names[2:4], found.slices.only([2, 3]))
    assert {name: read(part, name) for name in part.names} == {
        name: FILES[name] for name in found.names[2:4]
    }


def _cut(version: Path) -> None:
    with (version / "shard-00000.tar").open("r+b") as file:
        file.truncate(2048)


def _gone(version: Path) -> None:
    (version / "shard-00000.tar").unlink()


def _linked(version: Path) -> None:
    (version / "shard-00000.tar").rename(version / "elsewhere")
    (version / "shard-00000.tar").symlink_to(version / "elsewhere")


def _outside(version: Path) -> None:
    rewritten(version, 2, lambda row: row.__setitem__(7, 1 << 40))


def _negative(version: Path) -> None:
    rewritten(version, 2, lambda row: row.__setitem__(7, -1))


def _first_bytes(version: Path) -> None:
    rewritten(version, 2, lambda row: row.__setitem__(7, 0))


def _another_folder(version: Path) -> None:
    rewritten(version, 2, lambda row: row.__setitem__(6, "../../secret.tar"))


def _few_columns(version: Path) -> None:
    rewritten(version, 2, lambda row: row.__delitem__(slice(5, None)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut, r"should end at byte \d+ of .*shard-00000\.tar, which has 2048: .*verify=full"),
        (_gone, r"cannot read the archive .*shard-00000\.tar \(No such file"),
        (_linked, r"cannot read the archive .*shard-00000\.tar"),
        (_outside, r"^train/a/.*png should end at byte \d+ of .*shard-00000\.tar"),
        (_negative, r"line 3 of .*_MANIFEST\.jsonl is damaged"),
        (_first_bytes, r"^train/a/.*png should .*shard-00000\.tar"),
        (_another_folder, r"line 3 of .*_MANIFEST\.jsonl is damaged"),
        (_few_columns, r"line 3 of .*_MANIFEST\.jsonl is damaged"),
    ],
)
def test_damaged_version_is_one_line(
    version: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(version)
    with pytest.raises(InputError, match=message) as caught:
        members(version)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["no archive at all", "cut"])
def test_damaged_archive_without_a_manifest_is_refused(
    version: Path, tmp_path: Path, kind: str
) -> None:
    data = (version / "shard-00000.tar").read_bytes()
    home = tmp_path / "others"
    home.mkdir()
    (home / "a.tar").write_bytes(data[:5000] if kind == "cut" else b"no archive" * 100)
    with pytest.raises(InputError, match=r"a\.tar") as caught:
        members(home)
    assert "\n" not in str(caught.value)


def test_other_header_of_a_member_is_refused(version: Path) -> None:
    found = listed(version)
    path = version / "shard-00000.tar"
    whole = path.read_bytes()
    where = found.slices.where(found.names.index("train/b/2.png"), "train/b/2.png")
    for at, byte in ((where.offset - 512, b"z"), (where.offset - 512 + 130, b"7")):
        path.write_bytes(whole[:at] + byte + whole[at + 1 :])
        with pytest.raises(ValueError, match="its header in the archive differs"):
            read(found, "train/b/2.png")
    path.write_bytes(whole[: where.offset + 10])
    with pytest.raises(ValueError, match="truncated"):
        read(found, "train/b/2.png")
    with pytest.raises(ValueError, match="larger"):
        content(where, 2000)


def test_threads_open_an_archive_at_the_same_time(version: Path) -> None:
    shard = str(version / "shard-00000.tar")
    expected = Path(shard).read_bytes()[:100]
    for _ in range(20):
        shards._opened.cache_clear()
        together = threading.Barrier(6)

        def read_first(together: threading.Barrier = together) -> bytes:
            together.wait()
            return shards.pread(shard, 100, 0)

        with ThreadPoolExecutor(6) as pool:
            found = [pool.submit(read_first) for _ in range(6)]
        assert [one.result() for one in found] == [expected] * 6

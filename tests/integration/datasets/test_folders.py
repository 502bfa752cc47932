"""A folder as a source, on a volume of others: links, pipes, and what nobody may read."""

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.datasets import stage
from kfp_ddp.datasets.options import SyncOptions, expanded
from kfp_ddp.datasets.transfer import SMALL
from kfp_ddp.storage.folder import open_folder
from kfp_ddp.storage.folder_source import FolderSource
from kfp_ddp.storage.listing import Filter
from kfp_ddp.storage.source import SourceOptions
from tests.sync_runs import another_user, content, sync, write

QUICK = SyncOptions(concurrency=2)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with three files, and beside it a secret that is not part of it."""
    folder = tmp_path / "source"
    write(folder, dict.fromkeys(("a/b/1.jpg", "a/2.jpg", "3.jpg"), b"image"))
    write(tmp_path / "secret", dict.fromkeys(("1.jpg", "2.jpg", "3.jpg", "b"), b"token"))
    return folder


PLACES = [(what, made) for what in ("3.jpg", "a/2.jpg") for made in ("link", "pipe", "folder", "")]
PLACES += [("a/b", "link"), ("a/b", "pipe"), ("a/b", "")]


@pytest.mark.parametrize("when", ["checksum", "download"])
@pytest.mark.parametrize(("what", "made"), PLACES)
def test_what_another_writer_puts_in_place_is_never_read(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, made: str, when: str
) -> None:
    swapped, place, secret = threading.Event(), source / what, tmp_path / "secret"

    def once() -> None:
        if swapped.is_set():
            return
        swapped.set()
        os.rename(place, tmp_path / "taken")
        if made == "pipe":
            os.mkfifo(place)
        elif made == "folder":
            place.mkdir()
        elif made == "link":
            place.symlink_to(secret if what == "a/b" else secret / place.name)

    def watch(phase: str, *_: object) -> None:
        if phase == "downloading" and when == "download":
            once()

    walk = FolderSource._walk

    def walk_and_swap(self: FolderSource) -> object:
        found = walk(self)
        if when == "checksum":
            once()
        return found

    monkeypatch.setattr(FolderSource, "_walk", walk_and_swap)
    if made in ("link", "pipe"):
        with pytest.raises(InputError, match=r"is a symbolic link|is neither a file nor a folder"):
            sync(str(source), tmp_path / "target", QUICK, watch)
    else:
        result = sync(str(source), tmp_path / "target", QUICK, watch)
        assert set(content(result.path).values()) == {b"image"}
    assert swapped.is_set()
    written = [path for path in (tmp_path / "target").rglob("*.jpg") if path.is_file()]
    assert not [path for path in written if path.read_bytes() == b"token"]


@pytest.mark.parametrize("size", [5, SMALL + 1])
def test_followed_link_leads_where_it_was_listed(source: Path, tmp_path: Path, size: int) -> None:
    (tmp_path / "secret/1.jpg").write_bytes(b"x" * size)
    (tmp_path / "secret/2.jpg").write_bytes(b"x" * size)  # the same content in another file
    (source / "link.jpg").symlink_to(tmp_path / "secret/1.jpg")
    listings: list[str] = []

    def watch(phase: str, *_: object) -> None:
        listings.extend([phase] if phase == "listing" else [])
        if phase == "downloading" and len(listings) == 1:
            (source / "link.jpg").unlink()
            (source / "link.jpg").symlink_to(tmp_path / "secret/2.jpg")

    result = sync(str(source), tmp_path / "target", SyncOptions(symlinks="follow"), watch)
    assert content(result.path)["link.jpg"] == b"x" * size
    assert len(listings) == 2


def test_links_of_folders_are_followed_but_not_in_circles(source: Path, tmp_path: Path) -> None:
    for number in range(4):
        (source / f"to-{number}").symlink_to("a")
    follow = SyncOptions(symlinks="follow")
    result = sync(str(source), tmp_path / "target", follow)
    assert len(content(result.path)) == 3 + 4 * 2
    (source / "a/b/up").symlink_to(source)
    with pytest.raises(InputError, match=r"up is a link to a folder above it$"):
        sync(str(source), tmp_path / "target", follow)


def test_source_disk_that_fails_while_read_is_one_line(source: Path, tmp_path: Path) -> None:
    (source / "x").symlink_to("/proc/self/mem")  # whose first bytes cannot be read
    with pytest.raises(StorageError, match=r"^cannot read source .*/x: Input/output error[^\n]*$"):
        sync(str(source), tmp_path / "target", SyncOptions(symlinks="follow"))


def test_a_folder_is_read_in_batches(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = FolderSource(str(source), SourceOptions()).listing()
    monkeypatch.setattr("kfp_ddp.storage.folder_source._TOGETHER", 2)
    assert FolderSource(str(source), SourceOptions()).listing() == listing
    uri = f"file://{source}#1"  # no fragment: a folder may have this name
    assert FolderSource(uri, SourceOptions()).root == open_folder(uri).root == Path(f"{source}#1")


def test_root_of_a_volume_is_a_source(source: Path, tmp_path: Path) -> None:
    """As uid 1000 sees ext4's own folder."""
    write(source, {"lost+found/#12": b"of a broken disk", "a/lost+found/x": b"an image of ours"})
    (source / "lost+found").chmod(0o700)
    found = content(sync(str(source), tmp_path / "target", QUICK).path)
    assert sorted(found) == ["3.jpg", "a/2.jpg", "a/b/1.jpg", "a/lost+found/x"]


def test_excluded_files_and_folders_are_not_read(source: Path) -> None:
    (source / "other").mkdir(mode=0o700)
    (source / "a/private.key").touch(mode=0o600)
    (source / "a/link").symlink_to("nowhere")
    os.mkfifo(source / "pipe")
    unreadable = {"other/**": "other", "*.key": "a/private.key"}

    def names(*exclude: str) -> list[str]:
        select = Filter((), ("pipe", "/a/link", *exclude))
        return FolderSource(".", SourceOptions(select=select)).listing().names

    with another_user(source):
        assert sorted(names(*unreadable)) == ["3.jpg", "a/2.jpg", "a/b/1.jpg"]
        for glob, name in unreadable.items():
            others = [other for other in unreadable if other != glob]
            with pytest.raises(StorageError, match=f"^cannot read source {name}: Permission den"):
                names(*others)


SYSTEMS = (".Trashes/1.jpg", "$RECYCLE.BIN/S-1-5/2.jpg", "a/System Volume Information/x/y")


def test_what_no_step_reads_stops_no_sync(source: Path, tmp_path: Path) -> None:
    write(source, dict.fromkeys((*SYSTEMS, "a/.DS_Store", "_DSC1.JPG", "a/Icon\r"), b"x"))
    for closed in (".Trashes", "$RECYCLE.BIN/S-1-5", "a/System Volume Information", "a/.DS_Store"):
        (source / closed).chmod(0)
    (source / ".venv/bin").mkdir(parents=True)
    (source / ".venv/bin/python").symlink_to("/usr/bin/env")
    (source / "a/.gone").symlink_to("nowhere")
    os.mkfifo(source / "a/.socket")
    read = ["3.jpg", "_DSC1.JPG", "a/2.jpg", "a/b/1.jpg"]
    with another_user(source):
        found = FolderSource(".", SourceOptions()).listing().names
        assert sorted(set(found) - {"a/Icon\r"}) == read
        found = FolderSource(".", SourceOptions(symlinks="follow")).listing().names
        assert {*read, ".venv/bin/python"} < set(found)
    shutil.rmtree(source / ".venv")
    for closed in SYSTEMS:
        (source / closed).parent.chmod(0o700)
    result = sync(str(source), tmp_path / "target", QUICK)
    assert [name for name, _ in result.names.skipped] == ["a/Icon\r"]
    (source / "_DSC1.JPG").chmod(0)
    with another_user(source), pytest.raises(StorageError, match=r"cannot read source _DSC1\.JPG"):
        FolderSource(".", SourceOptions()).listing()


def test_absolute_paths_that_are_excluded_are_names_in_the_source(
    source: Path, tmp_path: Path
) -> None:
    table = tmp_path / "t.csv"
    table.write_text(f"path\n{source}/a/2.jpg\n{tmp_path}/3.jpg\n")
    globs = expanded([f"@{table}", f"{source}/a/b/**"])
    for address in (str(source), f"file://{source}/"):
        options = SyncOptions(exclude=globs, concurrency=2)
        result = sync(address, tmp_path / "target", options)
        assert sorted(content(result.path)) == ["3.jpg"]


@pytest.mark.parametrize(
    ("exclude", "over", "not_over"),
    [
        ("a/**", ["a"], ["b", "ab", "x/a", "a/b"]),
        ("/a/**", ["a"], ["b", "x/a"]),
        ("**/cache/**", ["cache", "a/cache", "a/b/cache"], ["caches", "cache/a"]),
        ("a/*/**", ["a/b", "a/c"], ["a", "a/b/c"]),
        ("a/*", [], ["a"]),
    ],
)
def test_folders_that_are_passed_over(exclude: str, over: list[str], not_over: list[str]) -> None:
    chosen = Filter((), (exclude,))
    assert [name for name in over + not_over if chosen.excludes_folder(name)] == over


GLOBS = st.builds(
    lambda parts, end: "/".join(parts) + end,
    st.lists(st.sampled_from(["a", "b", "*", "**", "?", "a*"]), min_size=1, max_size=3),
    st.sampled_from(["", "/**"]),
)
FILES = st.lists(st.sampled_from(["a", "b", "ab", "c"]), min_size=2, max_size=4)


@given(globs=st.lists(GLOBS, min_size=1, max_size=2), name=FILES)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_filters_enter_the_folders_of_what_they_take(globs: list[str], name: list[str]) -> None:
    chosen = Filter((), tuple(globs))
    if chosen.selects("/".join(name)):
        above = ["/".join(name[:end]) for end in range(1, len(name))]
        assert not any(chosen.excludes_folder(folder) for folder in above)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "a/" * 3000, "\ud800", "3.jpg/x"])
def test_paths_that_cannot_be_are_one_line(source: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises((InputError, StorageError), match=r"^[^\n]*source[^\n]*$"):
        sync(f"{source}/{name}", tmp_path / "target", QUICK)


@pytest.mark.parametrize("shared", [3, 1, 0])
def test_blocks_are_shared_where_the_file_system_can(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: int
) -> None:
    calls: list[int] = []

    def clone(target: int, number: int, opened: int) -> None:
        """The ioctl of Btrfs and XFS; then of a file system that fills up, or writes nonsense."""
        calls.append(number)
        if len(calls) > shared:
            if shared:
                raise OSError(errno.EOPNOTSUPP, "Operation not supported")
            os.write(target, b"wrong")
        else:
            os.sendfile(target, opened, 0, 100)

    monkeypatch.setattr("kfp_ddp.datasets.stage.fcntl.ioctl", clone)
    result = sync(str(source), tmp_path / "target", QUICK)
    assert calls == [stage.FICLONE] * min(shared + 1, 3)
    assert result.downloaded == 3
    assert content(result.path) == content(source)
    assert sync(str(source), tmp_path / "target", SyncOptions(verify="full")).unchanged


@pytest.mark.parametrize(
    ("source", "target", "refused"),
    [
        *(("t/incoming", "t", False), ("t", "tt", False), ("t/incoming", "link", False)),
        *(("t/versions", "t", True), ("t", "t/backup", True), ("t", "t", True)),
        *(("link", "t/backup", True), ("t/versions", "link", True)),
    ],
)
def test_overlapping(tmp_path: Path, source: str, target: str, refused: bool) -> None:
    write(tmp_path, dict.fromkeys(("t/incoming/1", "t/versions/2", "t/x/3"), b"x"))
    (tmp_path / "link").symlink_to(tmp_path / "t")
    before = content(tmp_path)
    options = SyncOptions(max_delete=1)
    for prefix in ("", "file://"):
        if not refused:
            sync(f"{prefix}{tmp_path}/{source}", tmp_path / target, options)
            continue
        with pytest.raises(InputError, match=r"contain one another; give a target beside"):
            sync(f"{prefix}{tmp_path}/{source}", tmp_path / target, options)
        assert content(tmp_path) == before
        assert not list(tmp_path.rglob(".kfsync"))


def test_a_folder_of_an_earlier_release_without_versions_is_refused(
    source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    write(target, {"3.jpg": b"image", ".kfsync/manifest.jsonl": b"{}"})
    with pytest.raises(InputError, match=r"has files without versions, .* rclone"):
        sync(str(source), target, QUICK)
    assert not (target / "versions").exists()
    (target / "versions").mkdir()  # it was used for versions, too
    assert content(sync(str(source), target, QUICK).path) == content(source)

"""The very names that hostile ones become, and how a file system that folds names is found out."""

import hashlib
from pathlib import Path

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.datasets import names
from kfp_ddp.storage import manifest
from kfp_ddp.storage.listing import Listing


def listing(*objects: str, tags: bool = False) -> Listing:
    made = Listing()
    for number, name in enumerate(objects):
        size = 0 if name.endswith("/") else number
        made.add(name, size, number, number, f"tag{number}" if tags else "")
    return made


def test_five_names_that_cannot_be_are_shown_and_the_others_counted() -> None:
    why = "control character, change of the writing direction or invalid text"
    shown = "; ".join(f"'{name}\\n' ({why})" for name in "abcde")
    for bad, more in (("abcde", ""), ("gfedcba", " and 2 more")):
        with pytest.raises(InputError) as refused:
            names.apply(listing(*(f"{name}\n" for name in bad)), "error")
        said = f"{len(bad)} object names cannot be files: {shown}{more}; rename them in the bucket"
        assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("name", "size", "why"),
    [
        ("", 0, "empty name"),
        ("/a", 0, "starts with /"),
        ("a/", 1, "folder marker with content"),
        ("a/", 0, ""),
        ("a/../b", 0, "segment that is empty, . or .."),
        ("a//b", 0, "segment that is empty, . or .."),
        ("é" * 127 + "x", 0, ""),
        ("é" * 128, 0, "segment longer than 255 bytes"),
        ("a/" * 1999 + "aa", 0, ""),
        ("a/" * 2000 + "a", 0, "path longer than 4000 bytes"),
    ],
)
def test_why_a_name_cannot_be_a_file(name: str, size: int, why: str) -> None:
    assert names.judge(name, size) == why


def digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


@pytest.mark.parametrize(
    ("objects", "becomes"),
    [
        (("",), "%"),
        (("a//b",), "a/%/b"),
        (("a/../b",), "a/%2E%2E/b"),
        (("./b",), "%2E/b"),
        (("a\nb",), "a%0Ab"),
        (("a\udcffb",), "a%FFb"),
        (("a\ud800b",), "a%ED%A0%80b"),
        (("a b/\t/c d",), "a b/%09/c d"),
        (("_SUCCESS",), "%_SUCCESS"),
        ((".kfsync/x",), "%.kfsync/x"),
        # The first choice is another object's name, file or folder.
        (("a\nb", "a%0Ab"), "a%0Ab%" + digest("a\nb")[:16]),
        (("a\nb", "a%0Ab/c"), "a%0Ab%" + digest("a\nb")[:16]),
        (("a\nb/c", "a%0Ab"), "%" + digest("a\nb/c")),
        # Nor does a shorter form of it fit there.
        (("x" * 300,), "x" * 200 + "%" + digest("x" * 300)[:16]),
        (("x" * 300 + "/y",), "x" * 200 + "%" + digest("x" * 300 + "/y")[:16]),
        (("d/" * 150 + "\n/", "d"), "%" + digest("d/" * 150 + "\n/")),
        # Beside a folder's marker, and where only its case makes it one of ours.
        (("b/\n", "b/"), "b/%0A"),
        (("_success/\n",), "_success/%0A"),
        (("a\n/",), "a%0A/%"),
        (("a\n/", "a%0A"), "%" + digest("a\n/")),
    ],
)
def test_what_a_hostile_name_becomes(objects: tuple[str, ...], becomes: str) -> None:
    found = names.apply(listing(*objects), "encode")
    assert found.encoded[objects[0]] == becomes
    assert found.listing.origins == {becomes: objects[0]}
    assert sorted(found.listing.names) == sorted((becomes, *objects[1:]))


def test_names_that_stay_taken_are_taken_again_from_their_digest() -> None:
    bad = "d/" * 150 + "\n"
    taken = ("d", "%" + digest(bad))
    assert names.apply(listing(bad, *taken), "encode").encoded == {bad: "%" + digest(digest(bad))}


def test_what_is_encoded_keeps_its_columns() -> None:
    found = names.apply(listing("c\n", "b", "a", tags=True), "encode")
    assert found.listing.names == ["a", "b", "c%0A"]
    assert list(found.listing.sizes) == [2, 1, 0]
    assert list(found.listing.generations) == [2, 1, 0]
    assert found.listing.tags == ["tag2", "tag1", "tag0"]
    assert found.skipped == []


@pytest.mark.parametrize(
    ("objects", "folds", "why"),
    [
        (("a/b", "a"), False, {"a": "also a folder of other objects"}),
        (("a", "a"), False, {"a": "duplicate"}),
        (("A", "a"), True, {"a": "same file as another name on this file system"}),
        (("A/x", "a/y"), True, {"a/y": "same folder as another name on this file system"}),
        (("_Success",), True, {"_Success": "reserved on this file system"}),
        (("B/x", "b/"), True, {"b/": "same folder as another name on this file system"}),
        # Where a folder is bad already, its other names are judged without it.
        (("A/x", "a/y", "a/\n"), True, {
            "a/y": "same folder as another name on this file system",
            "a/\n": "control character, change of the writing direction or invalid text",
        }),
    ],
)  # fmt: skip
def test_why_names_share_a_path(objects: tuple[str, ...], folds: bool, why: dict[str, str]) -> None:
    assert dict(names.apply(listing(*objects), "skip", folds).skipped) == why


def test_folders_of_two_spellings_are_encoded_apart() -> None:
    found = names.apply(listing("A/x", "a/y", "B/", "b/"), "encode", folds=True)
    assert found.encoded == {"a/y": "%" + digest("a/y"), "b/": "%" + digest("b/")}
    folded = {names.fold(name.partition("/")[0]) for name in found.listing.names}
    assert len(folded) == 4


def test_markers_of_the_writer_are_no_data() -> None:
    made = listing("_MANIFEST.jsonl", "_SUCCESS", "a", "b/_SUCCESS")
    kept, left = names.without_markers(made)
    assert kept.names == ["a", "b/_SUCCESS"]
    assert list(kept.crcs) == [2, 3]
    why = "marks its writer's work as done, and is not data"
    assert left == [(manifest.SUCCESS, why), (manifest.NAME, why)]
    plain = listing("a")
    assert names.without_markers(plain) == (plain, [])


@pytest.mark.parametrize(
    ("folds", "fits"),
    [
        (False, {"a/d", "A", "C", "_Success", "e", "E/f", "\u00e9", "e\u0301", "g/h", "G/i"}),
        # The first of two that are one there stays; the listing's own come before all.
        (True, {"a/d", "E/f", "e\u0301", "G/i"}),
    ],
)
def test_what_fits_beside_a_listing(folds: bool, fits: set[str]) -> None:
    beside = listing("a/b", "c")
    wanted = ["a/d", "c/d", "a", "e", "../f", "c", "c/", "C", "A", "_Success"]
    wanted += ["E/f", "\u00e9", "e\u0301", "g/h", "G/i"]
    assert names.fitting(wanted, beside, folds) == fits


PROBE = ".kfsync-probe-\u00e9a"


@pytest.mark.parametrize("alike", [".kfsync-probe-e\u0301a", ".kfsync-probe-\u00e9A"])
def test_a_file_system_that_folds_shows_a_probe_under_another_name(
    tmp_path: Path, alike: str
) -> None:
    """It would show the one file twice; here there are two."""
    work = tmp_path / ".kfsync"
    work.mkdir()
    assert not names.folds_names(tmp_path, probe=False)
    (work / alike).touch()
    assert not names.folds_names(tmp_path, probe=False), "nothing is known without the probe"
    names.leave_probe(tmp_path)
    assert (work / PROBE).is_file()
    assert (work / PROBE).stat().st_mode & 0o777 == 0o644
    assert names.folds_names(tmp_path, probe=False)
    names.leave_probe(tmp_path)
    (work / alike).unlink()
    assert not names.folds_names(tmp_path)


def test_a_link_to_nowhere_is_there_as_a_probe_is(tmp_path: Path) -> None:
    work = tmp_path / ".kfsync"
    work.mkdir()
    for name in (PROBE, ".kfsync-probe-\u00e9A"):
        (work / name).symlink_to("nowhere")
    assert names.folds_names(tmp_path, probe=False)


def test_a_probe_is_there_for_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.urandom", lambda count: b"\1" * count)
    alike = tmp_path / (".kfsync-probe-" + "01" * 8 + "\u00e9A")
    alike.touch()
    target = tmp_path / "not" / "yet"
    assert names.folds_names(target)
    assert not names.folds_names(target, probe=False)
    alike.unlink()
    assert not names.folds_names(target)
    assert list(tmp_path.iterdir()) == []
    taken = tmp_path / (".kfsync-probe-" + "01" * 8 + "\u00e9a")
    taken.write_text("somebody's")
    assert not names.folds_names(target)
    assert taken.read_text() == "somebody's"


def test_where_no_probe_can_be_left_it_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        names.leave_probe(tmp_path)
    (tmp_path / ".kfsync").symlink_to(tmp_path)
    with pytest.raises(OSError, match=r"Too many levels|Not a directory"):
        names.leave_probe(tmp_path)

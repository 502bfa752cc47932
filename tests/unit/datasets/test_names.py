"""Object names, globs, digests and dataset names: checked without files."""

import hashlib
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_ddp.core.errors import InputError
from kfp_ddp.datasets import names
from kfp_ddp.datasets.options import canonical, dataset_name, glob_of
from kfp_ddp.pictures.reading import is_needless
from kfp_ddp.storage.listing import Filter, Listing


def listing(*objects: str) -> Listing:
    """Return a listing; sizes and checksums are the numbers of the objects."""
    made = Listing()
    for number, name in enumerate(objects):
        size = 0 if name.endswith("/") else number
        made.add(name, size, number)
    return made


def digest(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("gs://bucket/Flower_Photos/v1.0", "v1-0"),
        ("gs://bucket", "bucket"),
        ("https://host/flowers/_MANIFEST.jsonl?token=x", "flowers"),
        ("/data/" + "f" * 60, "f" * 33),
        ("gs://bucket/日本", "data"),
    ],
)
def test_default_name_has_the_last_word_and_a_hash(source: str, word: str) -> None:
    name = dataset_name("", source)
    assert re.fullmatch(f"{word}-[0-9a-f]{{6}}", name)
    assert dataset_name(name, "gs://other") == name, "it is itself a valid name"
    assert dataset_name("", source.replace("/", "/x", 3)) != name


@pytest.mark.parametrize("dataset", ["", "Photos", "a" * 41, "-a", "a_b"])
def test_invalid_dataset_names_are_refused(dataset: str) -> None:
    with pytest.raises(InputError, match=r"^dataset is .*lower-case letters"):
        dataset_name(dataset, "")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("src", "src/"),
        ("src", "./src"),
        ("/data/src", "/data//src/"),
        ("/data/src", "file:///data/src"),
        ("/data/a b", "file://localhost/data/a%20b/"),
        ("https://host/ds/_MANIFEST.jsonl?sig=1", "https://host/ds/_MANIFEST.jsonl?sig=2"),
        ("https://host/ds/_MANIFEST.jsonl", "https://user:pw@host/ds/_MANIFEST.jsonl#x"),
    ],
)
def test_spellings_of_one_source_are_one_dataset(one: str, other: str) -> None:
    assert canonical(one) == canonical(other)
    assert dataset_name("", one) == dataset_name("", other)


@pytest.mark.parametrize(
    ("one", "other"), [("gs://b/a?x", "gs://b/a?y"), ("src", "/src"), ("gs://b/a", "s3://b/a")]
)
def test_different_sources_are_two_datasets(one: str, other: str) -> None:
    assert dataset_name("", one) != dataset_name("", other)


def test_digest_is_a_sha256_of_the_documented_lines() -> None:
    made = listing("b/2.png", "a/1.png").sorted()
    assert made.names == ["a/1.png", "b/2.png"]
    lines = f"a/1.png\0{1}\0{1:08x}\nb/2.png\0{0}\0{0:08x}\n"
    assert made.digest() == hashlib.sha256(lines.encode()).hexdigest()
    seen = {made.digest(), made.digest("tar"), listing("a/1.png", "c").digest()}
    for column in (made.sizes, made.crcs):
        before, column[0] = column[0], 99
        seen.add(made.digest())
        column[0] = before
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("glob", "matching"),
    [
        *(("*.png", {"a.png", "d/b.png", "d/e/c.png"}), ("/*.png", {"a.png"})),
        *(("d/*", {"d/b.png"}), ("d/**", {"d/b.png", "d/e/c.png"}), ("**/c.png", {"d/e/c.png"})),
        *(("?.png", {"a.png", "d/b.png", "d/e/c.png"}), ("[ab].png", set())),
        (r"/d/\*.png", set()),
    ],
)
def test_globs(glob: str, matching: set[str]) -> None:
    made = listing("a.png", "d/b.png", "d/e/c.png", "other")
    assert set(Filter([glob]).select(made).names) == matching
    assert set(Filter([], [glob]).select(made).names) == set(made.names) - matching


@given(st.text("a \\\n\u3000*?/", min_size=1), st.text("a \\\n\u3000*?/", min_size=1))
def test_glob_of_a_name_matches_it_alone(name: str, other: str) -> None:
    selection = Filter([f"  {glob_of(name)}"])
    assert selection.selects(name)
    assert selection.selects(other) == (name == other)


def test_error_lists_five_invalid_names_and_counts_the_others() -> None:
    for bad, more in (("abcde", ""), ("gfedcba", " and 2 more")):
        with pytest.raises(InputError) as refused:
            names.apply(listing("fine", *(f"{name}\n" for name in bad)), "error")
        text = str(refused.value)
        assert text.startswith(f"{len(bad)} object names cannot be files: 'a\\n' (")
        assert (
            f"'e\\n' (control character, change of the writing direction or invalid text){more};"
            in text
        )
        assert text.isprintable()


@pytest.mark.parametrize(
    ("name", "size", "why"),
    [
        *(("", 0, "empty name"), ("/a", 0, "starts with /")),
        *(("a/", 1, "folder marker with content"), ("a/", 0, "")),
        *(("a/../b", 0, "segment that is empty, . or .."), ("é" * 127 + "x", 0, "")),
        *(("é" * 128, 0, "segment longer than 255 bytes"), ("a/" * 1999 + "aa", 0, "")),
        ("a/" * 2000 + "a", 0, "path longer than 4000 bytes"),
    ],
)
def test_reason_of_an_invalid_name(name: str, size: int, why: str) -> None:
    assert names.reason_invalid(name, size) == why


DEEP = "d/" * 150 + "\n"


@pytest.mark.parametrize(
    ("objects", "becomes"),
    [
        (("",), "%"),
        (("a//b",), "a/%/b"),
        (("a/../b",), "a/%2E%2E/b"),
        (("a\nb",), "a%0Ab"),
        (("a\udcffb",), "a%FFb"),
        (("a\ud800b",), "a%ED%A0%80b"),
        (("_SUCCESS",), "%_SUCCESS"),
        ((".kfsync/x",), "%.kfsync/x"),
        # The first choice is another object's name, file or folder.
        (("a\nb", "a%0Ab"), "a%0Ab%" + digest("a\nb")[:16]),
        (("a\nb", "a%0Ab/c"), "a%0Ab%" + digest("a\nb")[:16]),
        (("a\nb/c", "a%0Ab"), "%" + digest("a\nb/c")),
        # The shortened form does not fit either.
        (("x" * 300,), "x" * 200 + "%" + digest("x" * 300)[:16]),
        ((f"{DEEP}/", "d"), "%" + digest(f"{DEEP}/")),
        ((DEEP, "d", "%" + digest(DEEP)), "%" + digest(digest(DEEP))),
        # Beside a folder's marker, and a reserved name in another case.
        (("b/\n", "b/"), "b/%0A"),
        (("_success/\n",), "_success/%0A"),
        (("a\n/",), "a%0A/%"),
        (("a\n/", "a%0A"), "%" + digest("a\n/")),
    ],
)
def test_encoded_names(objects: tuple[str, ...], becomes: str) -> None:
    encoded = names.apply(listing(*objects), "encode")
    assert encoded.encoded[objects[0]] == becomes
    assert encoded.listing.origins == {becomes: objects[0]}
    assert sorted(encoded.listing.names) == sorted((becomes, *objects[1:]))


@pytest.mark.parametrize(
    ("objects", "folds", "why"),
    [
        (("a/b", "a"), False, {"a": "also a folder of other objects"}),
        (("a", "a"), False, {"a": "duplicate"}),
        (("A", "a"), True, {"a": "same file as another name on this file system"}),
        (("\u00e9", "e\u0301"), True, {"\u00e9": "same file as another name on this file system"}),
        (("x", "X/y"), True, {"x": "same folder as another name on this file system"}),
        (("A", "a"), False, {}),
        (("A/x", "a/y"), True, {"a/y": "same folder as another name on this file system"}),
        (("_Success",), True, {"_Success": "reserved on this file system"}),
        (("B/x", "b/"), True, {"b/": "same folder as another name on this file system"}),
        # A folder of an invalid name does not count.
        (("A/x", "a/y", "a/\n"), True, {
            "a/y": "same folder as another name on this file system",
            "a/\n": "control character, change of the writing direction or invalid text",
        }),
    ],
)  # fmt: skip
def test_conflicts_of_names(objects: tuple[str, ...], folds: bool, why: dict[str, str]) -> None:
    assert dict(names.apply(listing(*objects), "skip", folds).skipped) == why


PIECES = (
    *("..", ".", "", "a", "b", "A", "\0", "\n", "%2E", "_SUCCESS", "_SUCCESS.tmp", ".kfsync"),
    *("_MANIFEST.jsonl", "_MANIFEST.jsonl.tmp", "n" * 300, "\udcff", "\ud800", "\udfff\ud800"),
    *("\x9b", "\x85", "\u202e", "\u2066x\u2069", "\u2028"),
    *("e\u0301", "\u00e9", "_success", "\u00df", "ss"),
)
NAMES = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("/".join)


@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("policy", ["error", "skip", "encode"])
@given(objects=st.dictionaries(NAMES, st.sampled_from([0, 7]), max_size=40))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_any_names_become_valid_files(policy: str, folds: bool, objects: dict[str, int]) -> None:
    made = Listing()
    for number, (name, size) in enumerate(objects.items()):
        made.add(name, size, number, number, f"tag{number}")
    skipped = names.apply(made, "skip", folds).skipped
    needed = any(name.isprintable() or not is_needless(name) for name, _ in skipped)
    if policy == "error" and needed:
        with pytest.raises(InputError, match="cannot be files") as caught:
            names.apply(made, policy, folds)
        assert str(caught.value).isprintable()
        return
    result = names.apply(made, policy, folds)
    chosen = result.listing
    assert all(map(str.isprintable, chosen.names))
    assert all(
        not names.reason_invalid(n, s) for n, s in zip(chosen.names, chosen.sizes, strict=True)
    )
    forms = {names.fold(name) if folds else name for name in chosen.names}
    assert len(forms) == len(chosen)
    assert names.apply(chosen, "error", folds).skipped == []
    origins = [chosen.origin(index) for index in range(len(chosen))]
    assert {*origins, *(name for name, _ in result.skipped)} == objects.keys()
    numbers = [list(objects).index(name) for name in origins]
    assert numbers == list(chosen.crcs) == list(chosen.generations)
    assert chosen.tags == [f"tag{number}" for number in numbers]
    shuffled = made.take(range(len(made) - 1, -1, -1))
    assert names.apply(shuffled, policy, folds).listing.names == chosen.names


PROBE = ".kfsync-probe-\u00e9a"


@pytest.mark.parametrize("alike", [".kfsync-probe-e\u0301a", ".kfsync-probe-\u00e9A"])
def test_folding_is_seen_by_the_probe_under_another_name(tmp_path: Path, alike: str) -> None:
    """A folding file system shows one file twice; here are two files."""
    work = tmp_path / ".kfsync"
    work.mkdir()
    assert not names.folds_names(tmp_path, probe=False)
    (work / alike).touch()
    assert not names.folds_names(tmp_path, probe=False)
    names.leave_probe(tmp_path)
    assert (work / PROBE).is_file()
    assert (work / PROBE).stat().st_mode & 0o777 == 0o644
    assert names.folds_names(tmp_path, probe=False)
    names.leave_probe(tmp_path)
    (work / alike).unlink()
    assert not names.folds_names(tmp_path)


def test_probe_that_is_a_dangling_link_counts(tmp_path: Path) -> None:
    work = tmp_path / ".kfsync"
    work.mkdir()
    for name in (PROBE, ".kfsync-probe-\u00e9A"):
        (work / name).symlink_to("nowhere")
    assert names.folds_names(tmp_path, probe=False)


def test_temporary_probe_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    taken.write_text("user's")
    assert not names.folds_names(target)
    assert taken.read_text() == "user's"


def test_probe_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        names.leave_probe(tmp_path)
    (tmp_path / ".kfsync").symlink_to(tmp_path)
    with pytest.raises(OSError, match=r"Too many levels|Not a directory"):
        names.leave_probe(tmp_path)

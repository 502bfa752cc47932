"""Names, globs and digests: no file is needed to judge them."""

import hashlib
import random
import re

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.datasets import names
from kfp_ddp.datasets.options import canonical, dataset_name
from kfp_ddp.storage.listing import Filter, Listing


def listing(*objects: str) -> Listing:
    made = Listing()
    for name in objects:
        made.add(name, 0 if name.endswith("/") else len(name), hash_of(name))
    return made


def hash_of(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:4])


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("gs://bucket/Flower_Photos/v1.0", "v1-0"),
        ("gs://bucket", "bucket"),
        ("s3://bucket/flowers/", "flowers"),
        ("https://host/flowers/_MANIFEST.jsonl?token=x", "flowers"),
        ("/data/" + "f" * 60, "f" * 33),
        ("gs://bucket/日本", "data"),
    ],
)
def test_dataset_has_a_name_of_its_own_by_default(source: str, word: str) -> None:
    name = dataset_name("", source)
    assert re.fullmatch(f"{word}-[0-9a-f]{{6}}", name)
    assert dataset_name(name, "gs://other") == name, "it is a name that may be given"
    assert dataset_name("", source.replace("/", "/x", 3)) != name


@pytest.mark.parametrize("dataset", ["", "Photos", "a" * 41, "-a", "a_b"])
def test_dataset_names_that_cannot_be_part_of_a_claim(dataset: str) -> None:
    with pytest.raises(InputError, match=r"^dataset is .*; give at most 40 lower-case letters"):
        dataset_name(dataset, "")


def test_digest_is_that_of_the_documented_lines() -> None:
    made = listing("b/2.png", "a/1.png").sorted()
    lines = "".join(f"{name}\0{len(name)}\0{hash_of(name):08x}\n" for name in made.names)
    assert made.names == ["a/1.png", "b/2.png"]
    assert made.digest() == hashlib.sha256(lines.encode()).hexdigest()


def test_digest_depends_on_names_sizes_contents_and_layout() -> None:
    base = listing("a", "b").sorted()
    seen = {base.digest(), base.digest("tar"), listing("a", "c").digest()}
    for column, value in ((base.sizes, 99), (base.crcs, 99)):
        before, column[0] = column[0], value
        seen.add(base.digest())
        column[0] = before
    assert len(seen) == 5
    assert listing("b", "a").sorted().digest() == base.digest()


def test_sorting_moves_all_columns_together() -> None:
    shuffled = [f"{i:03}" for i in range(50)]
    random.Random(1).shuffle(shuffled)
    made = listing(*shuffled).sorted()
    assert made.names == sorted(shuffled)
    assert list(made.crcs) == [hash_of(name) for name in made.names]


@pytest.mark.parametrize(
    ("objects", "bad"),
    [
        (("Case", "case"), {"case"}),
        (("A/x", "a/y"), {"a/y"}),
        (("\u00e9", "e\u0301"), {"\u00e9"}),
        (("x", "X/y"), {"x"}),
        (("a/b", "a/c"), set()),
    ],
)
def test_lookalikes_matter_only_where_the_file_system_folds(
    objects: tuple[str, ...], bad: set[str]
) -> None:
    made = listing(*objects).sorted()
    assert names.apply(made, "error").listing.names == sorted(objects)
    result = names.apply(made, "skip", folds=True)
    assert {name for name, _ in result.skipped} == bad
    encoded = names.apply(made, "encode", folds=True)
    folded = [names.fold(name) for name in encoded.listing.names]
    assert len(set(folded)) == len(folded) == len(objects)


def test_error_names_the_first_and_counts_the_rest() -> None:
    made = listing(*(f"x/../{i}" for i in range(8)), "fine")
    with pytest.raises(InputError, match=r"^8 object names .* and 3 more; rename them") as caught:
        names.apply(made, "error")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("seed", range(8))
def test_encoded_names_are_safe_and_distinct_for_random_hostile_ones(seed: int) -> None:
    pieces = [
        "..",
        ".",
        "",
        "a",
        "b",
        "\0",
        "\n",
        "%2E",
        "_SUCCESS",
        ".kfsync",
        "n" * 300,
        "\udcff",
    ]
    choose = random.Random(seed)
    objects = {"/".join(choose.choices(pieces, k=choose.randint(1, 5))) for _ in range(1500)}
    result = names.apply(listing(*sorted(objects)), "encode")
    shuffled = names.apply(listing(*objects), "encode")
    assert shuffled.listing.names == result.listing.names
    assert len(result.listing) == len(objects)
    assert len(set(result.listing.names)) == len(objects)
    again = names.apply(result.listing, "error")
    assert again.skipped == []
    origins = {result.listing.origin(index) for index in range(len(objects))}
    assert origins == objects
    for index in range(len(objects)):
        assert result.listing.crcs[index] == hash_of(result.listing.origin(index))


@pytest.mark.parametrize(
    ("glob", "matching"),
    [
        ("*.png", {"a.png", "d/b.png", "d/e/c.png"}),
        ("/*.png", {"a.png"}),
        ("d/*", {"d/b.png"}),
        ("d/**", {"d/b.png", "d/e/c.png"}),
        ("**/c.png", {"d/e/c.png"}),
        ("?.png", {"a.png", "d/b.png", "d/e/c.png"}),
        ("[ab].png", set()),
    ],
)
def test_globs(glob: str, matching: set[str]) -> None:
    made = listing("a.png", "d/b.png", "d/e/c.png", "other")
    assert set(Filter([glob]).select(made).names) == matching
    assert set(Filter([], [glob]).select(made).names) == set(made.names) - matching


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("src", "src/"),
        ("src", "./src"),
        ("/data/src", "/data//src/"),
        ("/data/src", "file:///data/src"),
        ("/data/a b", "file://localhost/data/a%20b/"),
        ("gs://bucket/ds", "gs://bucket/ds/"),
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
def test_sources_that_differ_are_two_datasets(one: str, other: str) -> None:
    assert dataset_name("", one) != dataset_name("", other)


@pytest.mark.parametrize(
    "name", ["a\u009b2J", "a\u0085b", "x/\u202egpj.exe", "\u2066x\u2069", "a\u2028b", "a\ud800b"]
)
def test_names_that_would_draw_on_a_terminal_cannot_be_files(name: str) -> None:
    assert names.judge(name).startswith("control character")
    with pytest.raises(InputError, match="cannot be files") as caught:
        names.apply(listing_of(name), "error")
    assert str(caught.value).isprintable()
    encoded = names.apply(listing_of(name), "encode")
    assert encoded.listing.names[0].isprintable()
    assert encoded.listing.origin(0) == name


def listing_of(name: str) -> Listing:
    made = Listing()
    made.add(name, 1, 1)
    return made


@pytest.mark.parametrize("name", ["_success", ".KFSYNC/lock", "_Manifest.JSONL"])
def test_our_own_names_are_reserved_in_any_case_where_the_file_system_folds(name: str) -> None:
    assert names.apply(listing_of(name), "error").listing.names == [name]
    assert [bad for bad, _ in names.apply(listing_of(name), "skip", folds=True).skipped] == [name]
    (encoded,) = names.apply(listing_of(name), "encode", folds=True).listing.names
    assert names.fold(encoded.partition("/")[0]) not in map(names.fold, names.RESERVED)


PIECES = (
    *("..", ".", "", "a", "b", "A", "\0", "\n", "%2E", "_SUCCESS", "_SUCCESS.tmp", ".kfsync"),
    *("_MANIFEST.jsonl", "_MANIFEST.jsonl.tmp", "n" * 300, "\udcff", "\ud800", "\udfff\ud800"),
    *("\x9b", "\u202e", "\u2028", "e\u0301", "\u00e9", "_success", "\u00df", "ss"),
)


@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("policy", ["error", "skip", "encode"])
@pytest.mark.parametrize("seed", range(4))
def test_any_names_under_any_policy_are_files_or_refused(
    seed: int, policy: str, folds: bool
) -> None:
    choose = random.Random(seed)
    for _ in range(150):
        objects = {"/".join(choose.choices(PIECES, k=choose.randint(1, 4))) for _ in range(12)}
        made = Listing()
        for name in sorted(objects):
            made.add(name, choose.choice([0, 7]), 1)
        if policy == "error" and names.apply(made, "skip", folds).skipped:
            with pytest.raises(InputError, match="cannot be files") as caught:
                names.apply(made, policy, folds)
            assert str(caught.value).isprintable()
            continue
        result = names.apply(made, policy, folds)
        found = result.listing.names
        assert all(not names.judge(n, s) for n, s in zip(found, result.listing.sizes, strict=True))
        alike = [names.fold(name) if folds else name for name in found]
        assert len(set(alike)) == len(alike)
        assert names.apply(result.listing, "error", folds).skipped == []
        told = {result.listing.origin(index) for index in range(len(found))}
        told |= {name for name, _ in result.skipped}
        assert told == objects
        for name in found:
            assert name.encode()


def test_encoded_name_that_somebody_took_before_is_not_given_twice() -> None:
    bad = "../evil"
    taken = {f"%{hashlib.sha256(bad.encode()).hexdigest()}"}
    taken |= {"%2E%2E/evil", f"%2E%2E/evil%{hashlib.sha256(bad.encode()).hexdigest()[:16]}"}
    result = names.apply(listing(bad, *taken), "encode")
    assert len(set(result.listing.names)) == 4

"""Names, globs and digests: no file is needed to judge them."""

import hashlib
import random
import re

import pytest

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.data_sync import names
from kfp_ddp.components.data_sync.dataset import dataset_name
from kfp_ddp.components.data_sync.listing import Filter, Listing


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

"""Pages of a bucket's listing and manifests of web servers, mangled: rows, or one line."""

import base64
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.storage.gcs import GcsSource
from kfp_ddp.storage.listing import Listing
from kfp_ddp.storage.source import SourceOptions, Transient
from kfp_ddp.storage.web import MAX_LINE, ManifestRows
from tests.sync_runs import mangled

MANGLED = 10_000
DEEP = "[" * 100_000
WEIRD: list[Any] = [
    *(None, True, -1, 0, 7, 2**32, 2**64, 1e400, float("nan"), 0.5, "", "x", "-1", "9" * 5000),
    *([], {}, [[]], {"a": 1}, "\ud800", "é\n", "0x10", "1_0", " 1", "../x", "a\0b", "AAAA", "٥"),
]


def weird(choose: random.Random, document: Any) -> Any:
    """The same with something else in one place."""
    if isinstance(document, list | dict) and document and choose.random() < 0.8:
        made = document.copy()
        key = choose.choice(list(made) if isinstance(made, dict) else range(len(made)))
        if choose.random() < 0.1:
            del made[key]
        else:
            made[key] = weird(choose, made[key])
        return made
    return choose.choice(WEIRD)


def judge(read: Callable[[], list[tuple[str, int, int]]], outcomes: list[str]) -> None:
    """Read, and hold that it gives good rows, or one line."""
    try:
        rows = read()
    except (InputError, Transient) as error:
        outcomes.append(str(error))
    else:
        outcomes.append("")
        for name, size, crc in rows:
            assert isinstance(name, str)
            assert 0 <= size < 2**63
            assert 0 <= crc < 2**32


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> GcsSource:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:9")
    return GcsSource("gs://bucket/ds", SourceOptions(timeout=1))


def page(choose: random.Random) -> dict[str, Any]:
    crc = base64.b64encode(choose.randbytes(4)).decode()
    items = [
        {"name": f"ds/{n}", "size": str(n), "generation": str(10**15 + n), "crc32c": crc}
        for n in range(choose.randint(1, 3))
    ]
    return {"items": items, "nextPageToken": "abc"}


def test_mangled_pages_are_rows_or_one_line(source: GcsSource) -> None:
    choose, outcomes = random.Random(4), list[str]()
    for _ in range(MANGLED):
        text = json.dumps(weird(choose, page(choose))).encode()
        body = bytearray(mangled(choose, text) if choose.random() < 0.5 else text)
        judge(lambda body=body: [r[:3] for r in source._parse(body)[0]], outcomes)  # type: ignore[misc]
    assert not [line for line in outcomes if "\n" in line]
    assert MANGLED // 8 < outcomes.count("") < MANGLED * 3 // 4


def read(choose: random.Random, text: bytes) -> Listing:
    """What is made of a manifest that arrives in pieces."""
    rows = ManifestRows("https://host/m.jsonl")
    while text:
        size = choose.choice([1, 10, len(text)])
        rows.take(text[:size])
        text = text[size:]
    return rows.end()


def rows_of(listing: Listing) -> list[tuple[str, int, int]]:
    return list(zip(listing.names, listing.sizes, listing.crcs, strict=True))


def manifest(choose: random.Random) -> list[Any]:
    count = choose.randint(1, 3)
    header = {"format": 1, "source": "gs://b", "digest": "ab", "files": count, "pack": "none"}
    crc = f"{choose.randrange(2**32):08x}"
    return [header, *([f"a/{n}", n, crc, crc, 17 + n] for n in range(count))]


def test_whole_manifests_are_read_however_they_arrive() -> None:
    choose = random.Random(5)
    for _ in range(1000):
        lines = manifest(choose)
        end = choose.choice(["", "\n"])
        listing = read(choose, ("\n".join(map(json.dumps, lines)) + end).encode())
        assert rows_of(listing) == [(row[0], row[1], int(row[3], 16)) for row in lines[1:]]


def test_mangled_manifests_are_rows_or_one_line() -> None:
    choose, outcomes = random.Random(6), list[str]()
    for _ in range(MANGLED):
        lines = manifest(choose)
        at = choose.randrange(len(lines))
        lines[at] = weird(choose, lines[at])
        text = "\n".join(map(json.dumps, lines)).encode()
        text = mangled(choose, text) if choose.random() < 0.5 else text
        judge(lambda text=text: rows_of(read(choose, text)), outcomes)  # type: ignore[misc]
    assert not [line for line in outcomes if "\n" in line]
    assert MANGLED // 8 < outcomes.count("") < MANGLED * 3 // 4


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('[7, 1, "x", "00000000"]', "is no"),
        ('[["a"], 1, "x", "00000000"]', "is no"),
        ('["\\ud800", 1, "x", "00000000"]', "is no"),
        ('["a", "1", "x", "00000000"]', "is no"),
        ('["a", true, "x", "00000000"]', "is no"),
        ('["a", -1, "x", "00000000"]', "is no"),
        ('["a", 1e99, "x", "00000000"]', "is no"),
        (f'["a", {2**64}, "x", "00000000"]', "is no"),
        ('["a", 1, "x", "-0000001"]', "is no"),
        ('["a", 1, "x", "0_000000"]', "is no"),
        ('["a", 1, "x", 7]', "is no"),
        ('["a", 1, "x"]', "is no"),
        ('{"a": 1}', "is no"),
        ("7", "is no"),
        ("", "is not JSON"),
        (DEEP[: MAX_LINE - 1], "is not JSON"),
        ("[" + "9" * 5000 + "]", "is not JSON"),
        ("\x1e", "is not JSON"),
        ("x" * (MAX_LINE + 1), "is too long"),
    ],
)
def test_lines_that_are_of_no_manifest(line: str, why: str) -> None:
    rows = ManifestRows("https://host/m.jsonl")
    rows.take(b'{"format": 1}\n["a", 1, 0, "00000000"]\n')
    with pytest.raises(InputError, match=rf"^https://host/m.jsonl is [^\n]*: line 3 {why}[^\n]*$"):
        rows.take(f"{line}\n".encode())


def test_line_without_end_is_given_up() -> None:
    rows = ManifestRows("https://host/m.jsonl")
    rows.take(b"x" * MAX_LINE)
    with pytest.raises(InputError, match="line 0 has no end"):
        rows.take(b"x")


def test_manifest_that_was_cut_is_asked_for_again() -> None:
    rows = ManifestRows("https://host/m.jsonl")
    rows.take(b'{"format": 1, "files": 2}\n["a", 1, 0, "00000000"]\n')
    with pytest.raises(Transient, match="1 lines of 2 files"):
        rows.end()

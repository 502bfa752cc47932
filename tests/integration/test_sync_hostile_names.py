"""Object names that cannot be files: refused, skipped or encoded; nothing outside the target."""

import random
from pathlib import Path

import pytest

from kfp_ddp.core.errors import InputError
from tests.gcs_server import Bucket
from tests.sync_runs import content, run

HOSTILE = (
    "../evil.txt", "x/../../../evil2.txt", "/abs.txt", "a//c", "x/./y", "x/../z", "nul\0x",
    "new\nline", "L" * 1000, "deep/" + "n" * 300, "..", ".", "_SUCCESS/x", ".kfsync/lock",
    "_MANIFEST.jsonl/x", "dir-with-content/", "both", "csi\x9b2J", "\u202egpj.exe",
)  # fmt: skip
HARMLESS = ("back\\slash", "..\\win", "con", "trail ", "-rf", "~root", "é.txt", "e\u0301.txt",
            "Case.txt", "case.txt", "both/b", "empty/", "%2E%2E/x", "a..b/...c",
            "_SUCCESS.tmp", "_MANIFEST.jsonl.tmp", "manifest.jsonl.tmp", "journal", "current",
            "shard-00000.tar", ".kfsync-probe-\u00e9a", ".kfsync-probe-e\u0301a", "versions/x",
)  # fmt: skip


def hostile(bucket: Bucket) -> None:
    for name in HOSTILE + HARMLESS:
        bucket.put(f"ds/{name}", b"" if name == "empty/" else f"content of {name}".encode())


def outside_of(target: Path) -> list[str]:
    return [path.name for path in target.parent.iterdir() if path != target]


@pytest.mark.parametrize("mirror", [False, True])
def test_hostile_names_are_an_error_by_default(
    bucket: Bucket, tmp_path: Path, mirror: bool
) -> None:
    hostile(bucket)
    target = tmp_path / "deep" / "target"
    target.mkdir(parents=True)
    with pytest.raises(InputError, match=f"^{len(HOSTILE)} object names cannot be files: "):
        run(target, mirror=mirror)
    assert bucket.gets == []
    assert outside_of(target) == []


@pytest.mark.parametrize("mirror", [False, True])
def test_hostile_names_can_be_skipped(bucket: Bucket, tmp_path: Path, mirror: bool) -> None:
    hostile(bucket)
    target = tmp_path / "deep" / "target"
    result = run(target, mirror=mirror, hostile_names="skip")
    assert {name for name, _ in result.names.skipped} == set(HOSTILE)
    files = {name: f"content of {name}".encode() for name in HARMLESS if name != "empty/"}
    assert content(result.path) == files
    assert (result.path / "empty").is_dir()
    assert outside_of(target) == []


@pytest.mark.parametrize("mirror", [False, True])
def test_hostile_names_can_be_encoded(bucket: Bucket, tmp_path: Path, mirror: bool) -> None:
    hostile(bucket)
    target = tmp_path / "deep" / "target"
    result = run(target, mirror=mirror, hostile_names="encode")
    found = content(result.path)
    assert set(result.names.encoded) == set(HOSTILE)
    assert len(found) == len(HOSTILE + HARMLESS) - 1
    for name, encoded in result.names.encoded.items():
        assert found[encoded] == f"content of {name}".encode()
    assert outside_of(target) == []
    assert run(target, mirror=mirror, hostile_names="encode").unchanged


PIECES = (
    *(
        "..",
        ".",
        "",
        "a",
        "b",
        "A",
        "\0",
        "\n",
        "%2E",
        "_SUCCESS",
        "_SUCCESS.tmp",
        ".kfsync",
        "tree",
    ),
    *("_MANIFEST.jsonl", "_MANIFEST.jsonl.tmp", "n" * 300, "\x9b", "\u202e", "e\u0301", "\u00e9"),
    *("versions", "current", "lock", "journal", "lost+found", "-rf", "~", "a b", "|", "`", "*"),
)


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("policy", ["error", "skip", "encode"])
@pytest.mark.parametrize("seed", range(4))
def test_any_names_lie_below_the_target_with_their_content_or_are_told(
    bucket: Bucket, tmp_path: Path, seed: int, policy: str, mirror: bool
) -> None:
    choose = random.Random(seed)
    for case in range(6):
        names = {"/".join(choose.choices(PIECES, k=choose.randint(1, 4))) for _ in range(12)}
        names = {name for name in names if name not in ("", "_SUCCESS", "_MANIFEST.jsonl")}
        bucket.objects = {}
        for name in names:
            bucket.put(f"ds/{name}", f"content of {name}".encode())
        bucket.put("ds/harmless", b"content of harmless")
        target = tmp_path / f"{case}" / "deep" / "target"
        target.mkdir(parents=True)
        try:
            result = run(target, mirror=mirror, hostile_names=policy, max_delete=1)
        except InputError:
            assert policy == "error"
            result = None
        assert [path.name for path in tmp_path.glob(f"{case}/deep/*")] == ["target"]
        assert [path.name for path in tmp_path.glob(f"{case}/*")] == ["deep"]
        if result is None:
            assert list(target.iterdir()) == []
            continue
        listing = result.names.listing
        for index, name in enumerate(listing.names):
            path = result.path / name
            assert path.read_bytes() == f"content of {listing.origin(index)}".encode()
            assert path.resolve().is_relative_to(target)
        told = {name for name, _ in result.names.skipped} | set(
            map(listing.origin, range(len(listing)))
        )
        assert told == names | {"harmless"}

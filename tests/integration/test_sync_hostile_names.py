"""Invalid object names are refused, skipped or encoded; no file is written outside the target."""

from collections.abc import Iterator
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


@pytest.fixture
def target(bucket: Bucket, tmp_path: Path) -> Iterator[Path]:
    """Yield a target for a bucket of hostile names; no file is left outside of it."""
    for name in HOSTILE + HARMLESS:
        bucket.put(f"ds/{name}", b"" if name == "empty/" else f"content of {name}".encode())
    target = tmp_path / "deep" / "target"
    target.mkdir(parents=True)
    yield target
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("mirror", [False, True])
def test_hostile_names_follow_their_policy(bucket: Bucket, target: Path, mirror: bool) -> None:
    with pytest.raises(InputError, match=f"^{len(HOSTILE)} object names cannot be files: "):
        run(target, mirror=mirror)
    assert bucket.gets == []
    result = run(target, mirror=mirror, hostile_names="skip")
    assert {name for name, _ in result.names.skipped} == set(HOSTILE)
    files = {name: f"content of {name}".encode() for name in HARMLESS if name != "empty/"}
    assert content(result.path) == files
    assert (result.path / "empty").is_dir()
    result = run(target, mirror=mirror, hostile_names="encode")
    assert set(result.names.encoded) == set(HOSTILE)
    files |= {new: f"content of {name}".encode() for name, new in result.names.encoded.items()}
    assert content(result.path) == files
    assert run(target, mirror=mirror, hostile_names="encode").unchanged
    without = run(target, mirror=mirror, hostile_names="encode", exclude=("/new%0Aline", "/nul\0x"))
    left_out = {result.names.encoded[name] for name in ("new\nline", "nul\0x")}
    assert {*result.names.listing.names} - {*without.names.listing.names} == left_out

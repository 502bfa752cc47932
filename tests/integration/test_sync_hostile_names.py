"""Object names that cannot be files: refused, skipped or encoded; nothing outside the target."""

from pathlib import Path

import pytest

from kfp_ddp.base.errors import InputError
from tests.gcs_server import Bucket
from tests.sync_runs import content, run

HOSTILE = (
    "../evil.txt", "x/../../../evil2.txt", "/abs.txt", "a//c", "x/./y", "x/../z", "nul\0x",
    "new\nline", "L" * 1000, "deep/" + "n" * 300, "..", ".", "_SUCCESS/x", ".kfsync/lock",
    "_MANIFEST.jsonl/x", "dir-with-content/", "both",
)  # fmt: skip
HARMLESS = ("back\\slash", "..\\win", "con", "trail ", "-rf", "~root", "é.txt", "e\u0301.txt",
            "Case.txt", "case.txt", "both/b", "empty/", "%2E%2E/x", "a..b/...c")  # fmt: skip


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

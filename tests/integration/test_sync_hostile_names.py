"""Invalid object names are refused, skipped or encoded; no file is written outside the target."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kfp_ddp.core.errors import InputError
from tests.gcs_server import Bucket
from tests.sync_runs import OWN, content, run

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
def test_hostile_names_are_refused_skipped_or_encoded(
    bucket: Bucket, target: Path, mirror: bool
) -> None:
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
NAMES = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("/".join)


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("policy", ["error", "skip", "encode"])
@given(names=st.sets(NAMES.filter(lambda name: name not in ("", *OWN)), max_size=12))
@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_names_stay_below_the_target_with_their_content(
    bucket: Bucket, tmp_path: Path, policy: str, mirror: bool, names: set[str]
) -> None:
    names.add("harmless")
    bucket.objects = {}
    for name in names:
        bucket.put(f"ds/{name}", f"content of {name}".encode())
    base = Path(tempfile.mkdtemp(dir=tmp_path))
    target = base / "deep" / "target"
    target.mkdir(parents=True)
    try:
        result = run(target, mirror=mirror, hostile_names=policy, max_delete=1)
    except InputError:
        assert policy == "error"
        assert list(target.iterdir()) == []
        return
    finally:
        assert [path.name for path in (*base.glob("*"), *base.glob("deep/*"))] == ["deep", "target"]
    listing = result.names.listing
    origins = [listing.origin(index) for index in range(len(listing))]
    for name, origin in zip(listing.names, origins, strict=True):
        path = result.path / name
        assert path.read_bytes() == f"content of {origin}".encode()
        assert path.resolve().is_relative_to(target)
    assert {*origins, *(name for name, _ in result.names.skipped)} == names

"""Damaged checkpoints are refused in one line, and the one before is chosen."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.files import sha256_of_json
from kfp_ddp.training.spec.manifest import (
    DIGEST,
    MANIFEST,
    STATE,
    read_manifest,
    step_dir,
    step_dirs,
    step_of,
)
from kfp_ddp.training.state.checkpoint import Checkpoint, newest_valid, verify
from tests.checkpoints import save

ACCIDENTS = st.lists(
    st.tuples(
        st.sampled_from(("flip", "cut", "zeros", "insert", "remove", "swap")),
        st.floats(0, 1),
        st.binary(min_size=1, max_size=64),
    ),
    min_size=1,
    max_size=3,
)
VALUES = st.recursive(
    st.sampled_from([None, True, -1, 2**70, 1.5, float("inf"), "", "../x", "step", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(("step", "files", STATE, "sha256", "size", "/dev/zero")),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
FIELDS = (
    *((), ("step",), ("files",), ("files", STATE), ("files", "more")),
    *(("files", STATE, "size"), ("files", STATE, "sha256")),
)
CASES = settings(
    max_examples=50,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Steps 10 and 20, of which tests damage the newer."""
    save(tmp_path, 10)
    return save(tmp_path, 20, bytes(range(256)) * 8)


def verified(path: Path) -> Checkpoint | None:
    """The checkpoint; None if it is refused in one line, and the one before is chosen."""
    refusal = ""
    try:
        return verify(path)
    except InputError as error:
        refusal = str(error)
    assert refusal.startswith(str(path))
    valid = newest_valid(path.parent)
    assert valid is not None
    assert valid.step == 10
    return None


def damage(content: bytes, accidents: list[tuple[str, float, bytes]]) -> bytes:
    data = bytearray(content)
    for accident, place, extra in accidents:
        at = min(int(place * len(data)), len(data) - 1)
        if accident == "flip" and data:
            data[at] ^= 1 << extra[0] % 8
        elif accident == "cut":
            del data[at:]
        elif accident == "zeros":
            data[at : at + 512] = bytes(len(data[at : at + 512]))
        elif accident == "insert":
            data[at:at] = extra
        elif accident == "remove":
            del data[at : at + len(extra)]
        else:
            data[at:] = data[at:][::-1]
    return bytes(data)


@pytest.mark.parametrize("name", [STATE, MANIFEST])
@CASES
@given(accidents=ACCIDENTS)
def test_damaged_file_is_refused(two: Path, name: str, accidents: Any) -> None:
    """A manifest with other white space has the same content: then it is valid."""
    content = (two / name).read_bytes()
    expected, damaged = verify(two), damage(content, accidents)
    try:
        (two / name).write_bytes(damaged)
        result = verified(two)
    finally:
        (two / name).write_bytes(content)
    if result is not None:
        assert damaged == content or name == MANIFEST
        assert repr(result) == repr(expected)


@CASES
@given(place=st.sampled_from(FIELDS), value=VALUES)
def test_manifest_with_other_fields_is_refused(two: Path, place: Any, value: Any) -> None:
    """As early versions wrote them: without a digest of itself."""
    content = (two / MANIFEST).read_bytes()
    fields = json.loads(content)
    del fields[DIGEST]
    digest, holder = fields["files"][STATE]["sha256"], fields
    for name in place[:-1]:
        holder = holder[name]
    if place:
        holder[place[-1]] = value
    try:
        (two / MANIFEST).write_text(json.dumps(fields if place else value))
        result = verified(two)
    finally:
        (two / MANIFEST).write_bytes(content)
    if result is not None:
        assert isinstance(result.step, int)
        assert result.digest == digest


@pytest.mark.parametrize("name", ["/dev/zero", "../../secret", "..", "", "a/b", "link"])
def test_manifest_lists_no_other_files(two: Path, name: str) -> None:
    """The digest of /dev/zero, whose size is 0, would take forever."""
    (two.parent.parent / "secret").touch()
    (two / "link").symlink_to("/dev/zero")
    fields = json.loads((two / MANIFEST).read_text())
    del fields[DIGEST]
    fields["files"][name] = {"size": 0, "sha256": hashlib.sha256().hexdigest()}
    (two / MANIFEST).write_text(json.dumps(fields))
    assert verified(two) is None


@pytest.mark.parametrize("opening", ["[", '{"a":', '{"step": 1, "files": ['])
def test_manifest_of_any_depth_is_refused(two: Path, opening: str) -> None:
    for depth in (10, 1_000, 100_000):
        (two / MANIFEST).write_text(opening * depth)
        assert verified(two) is None


@pytest.mark.parametrize("kind", ["missing", "folder", "endless", "empty", "file"])
def test_incomplete_folder_is_refused(two: Path, kind: str) -> None:
    if kind in ("empty", "file"):
        shutil.rmtree(two)
        two.mkdir() if kind == "empty" else two.write_text("a file")
    else:
        fields = json.loads((two / MANIFEST).read_text())
        (two / STATE).unlink()
        if kind == "folder":
            (two / STATE).mkdir()
        elif kind == "endless":
            del fields[DIGEST]
            fields["files"][STATE]["size"] = 0
            (two / MANIFEST).write_text(json.dumps(fields))
            (two / STATE).symlink_to("/dev/zero")
    assert verified(two) is None


def test_manifest_is_read_with_or_without_its_digest(tmp_path: Path) -> None:
    files = {STATE: {"sha256": "ab" * 32, "size": 7}}
    fields = {"step": 12, "files": files, "classes": ["\N{SNOWMAN}"], "loss": float("nan")}
    for more in ({}, {DIGEST: sha256_of_json(fields)}):
        for ascii_only in (True, False):
            text = json.dumps({**fields, **more}, ensure_ascii=ascii_only)
            (tmp_path / MANIFEST).write_text(text, encoding="utf-8")
            manifest = read_manifest(tmp_path)
            assert (manifest.step, manifest.digest) == (12, "ab" * 32)
            assert json.dumps(manifest.fields) == json.dumps(fields)
    assert sha256_of_json(dict(reversed(fields.items()))) == sha256_of_json(fields)
    text = json.dumps({"a": 1, "b": [2]})
    assert sha256_of_json({"b": [2], "a": 1}) == hashlib.sha256(text.encode()).hexdigest()
    wrong: tuple[Any, ...] = ("", "0" * 64, 0, False, [])
    for digest in wrong:
        (tmp_path / MANIFEST).write_text(json.dumps({**fields, DIGEST: digest}))
        with pytest.raises(ValueError, match=r"manifest\.json was altered"):
            read_manifest(tmp_path)


def test_names_of_steps_sort_by_number(tmp_path: Path) -> None:
    assert step_dir(tmp_path, 36).name == "step-00000036"
    for step in (5, 40, 123_456_789, 99_999_999):
        step_dir(tmp_path, step).mkdir()
    others = ("step-12", "step-0000001x", "xstep-00000012", "corrupt-step-00000007", ".step-1.tmp")
    for name in (*others, "step-00000001.old", "STEP-00000012"):
        (tmp_path / name).mkdir()
    assert [step_of(path) for path in step_dirs(tmp_path)] == [123_456_789, 99_999_999, 40, 5]
    assert step_dirs(tmp_path / "nothing") == []
    (tmp_path / "file").touch()
    assert step_dirs(tmp_path / "file") == []

"""A checkpoint's name and what it says of itself."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.training.manifest import (
    digest_of,
    read_manifest,
    step_dir,
    step_dirs,
    step_of,
)

FIELDS: dict[str, Any] = {
    "step": 12,
    "files": {"state.pt": {"sha256": "ab" * 32, "size": 7}},
    "classes": ["a", "\N{SNOWMAN}"],
    "metrics": {"loss": 0.1, "top5": float("nan")},
}


def written(folder: Path, fields: Any, **more: Any) -> Path:
    text = json.dumps({**fields, **more} if isinstance(fields, dict) else fields)
    (folder / "manifest.json").write_text(text, encoding="utf-8")
    return folder


def test_a_manifest_is_read_with_its_digest_or_without(tmp_path: Path) -> None:
    for more in ({}, {"sha256": digest_of(FIELDS)}):
        found = read_manifest(written(tmp_path, FIELDS, **more))
        assert (found.step, found.digest) == (12, "ab" * 32)
        assert json.dumps(found.fields) == json.dumps(FIELDS)


def test_a_digest_is_of_the_fields_in_any_order() -> None:
    backwards = dict(reversed(FIELDS.items()))
    assert digest_of(backwards) == digest_of(FIELDS)
    text = json.dumps({"a": 1, "b": [2]})
    assert digest_of({"b": [2], "a": 1}) == hashlib.sha256(text.encode()).hexdigest()
    assert digest_of({**FIELDS, "step": 13}) != digest_of(FIELDS)


@pytest.mark.parametrize("digest", ["", "0" * 64, 0, False, []])
def test_a_manifest_that_was_altered_is_told(tmp_path: Path, digest: Any) -> None:
    with pytest.raises(ValueError, match=r"manifest\.json was altered"):
        read_manifest(written(tmp_path, FIELDS, sha256=digest))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ([], "damaged: TypeError|damaged: AttributeError"),
        ({}, "damaged: KeyError"),
        ({**FIELDS, "step": None}, "damaged: TypeError"),
        ({**FIELDS, "step": float("inf")}, "damaged: OverflowError"),
        ({**FIELDS, "files": {}}, "other files"),
        ({**FIELDS, "files": {**FIELDS["files"], "x": {}}}, "other files"),
        ({**FIELDS, "files": {"state.pt": {}}}, "damaged: KeyError"),
        ({**FIELDS, "files": {"state.pt": 1}}, "damaged: TypeError"),
    ],
)
def test_a_manifest_of_another_shape_is_named(tmp_path: Path, fields: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        read_manifest(written(tmp_path, fields))
    assert str(tmp_path / "manifest.json") in str(caught.value)


def test_text_that_is_no_json_or_no_text_is_damage(tmp_path: Path) -> None:
    for content in (b"", b"{", b"\xff\xfe", b"[" * 100_000):
        (tmp_path / "manifest.json").write_bytes(content)
        with pytest.raises(ValueError):  # noqa: PT011  each has words of its own
            read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_bytes(json.dumps(FIELDS, ensure_ascii=False).encode())
    assert read_manifest(tmp_path).fields["classes"] == FIELDS["classes"]
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError):
        read_manifest(tmp_path)


def test_steps_have_names_that_sort_by_number(tmp_path: Path) -> None:
    assert step_dir(tmp_path, 36).name == "step-00000036"
    for step in (5, 40, 123_456_789, 99_999_999):
        step_dir(tmp_path, step).mkdir()
        assert step_of(step_dir(tmp_path, step)) == step
    others = ("step-12", "step-0000001x", "xstep-00000012", "corrupt-step-00000007", ".step-1.tmp")
    for name in (*others, "step-00000001.old", "STEP-00000012"):
        (tmp_path / name).mkdir()
    assert [step_of(path) for path in step_dirs(tmp_path)] == [123_456_789, 99_999_999, 40, 5]
    assert step_dirs(tmp_path / "nothing") == []
    (tmp_path / "file").touch()
    assert step_dirs(tmp_path / "file") == []
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        step_dirs(tmp_path / "loop")

"""A damaged, forged or endless champion: one line, or the same verdict."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.models import bundle, champion
from kfp_ddp.models.champion import find
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.storage import store
from tests.evaluations import written
from tests.gating import judged
from tests.gcs_server import Bucket

FILES = ("MANIFEST.sha256", "_SUCCESS", "metrics.json", "predictions.csv")
GENERATED = settings(max_examples=50, derandomize=True, deadline=None)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of exports whose champion has 90 of 100 correct, and a challenger with 92."""
    root = tmp_path_factory.mktemp("intact")
    folder = written(root / "exports" / "new", 10, "metrics.json").parent
    (folder / "model.safetensors").write_bytes(bytes(1000))
    version = bundle.seal(folder)[:12]
    folder.rename(folder.with_name(version))
    (root / "exports" / "CHAMPION").write_text(f"{version}\n")
    written(root / "run", 8)
    return root


def version_of(root: Path) -> str:
    return (root / "exports" / "CHAMPION").read_text().strip()


def verdict(root: Path, address: str) -> str:
    """Return the reason of the gate, or its error."""
    inputs = {"evaluation": str(root / "run" / "evaluation.json"), "champion": address}
    try:
        _, text = judged(root, 0.92, **inputs, min_accuracy=0, max_p_value=1 - 1e-9)
    except SystemExit as ended:
        text = str(ended)
    else:
        assert not text.startswith("error: ")
    assert "\n" not in text
    return text


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Other content of a file."""
    at = draw(st.integers(0, len(content) - 1))
    flipped = content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]
    other = (content[:at], content + b"x" * (at + 1), content * 2, content.replace(b"\n", b"\0"))
    swapped = content.replace(b"cat", b"dog", 1 + at % 90)
    return draw(st.one_of(st.sampled_from([flipped, *other, swapped]), st.binary(max_size=300)))


def damage(path: Path, kind: str, data: st.DataObject) -> None:
    content = path.read_bytes()
    path.unlink()
    match kind:
        case "link":
            path.with_name("elsewhere").write_bytes(content)
            path.symlink_to(path.with_name("elsewhere"))
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "content":
            path.write_bytes(data.draw(damaged(content)))


@GENERATED
@given(
    by_pointer=st.booleans(),
    name=st.sampled_from(["CHAMPION", *FILES]),
    kind=st.sampled_from(["content", "content", "gone", "link", "folder", "pipe"]),
    data=st.data(),
)
def test_a_damaged_champion_fails_or_gives_the_same_verdict(
    intact: Path, by_pointer: bool, name: str, kind: str, data: st.DataObject
) -> None:
    expected = verdict(intact, str(intact / "exports"))
    assert "McNemar" in expected
    with tempfile.TemporaryDirectory() as folder:
        root = Path(shutil.copytree(intact, Path(folder, "copy")))
        version = version_of(root)
        pointer = name == "CHAMPION"
        damage(root / "exports" / (name if pointer else f"{version}/{name}"), kind, data)
        address = root / "exports" / ("" if by_pointer or pointer else version)
        result = verdict(root, str(address))
    # Without CHAMPION there is no champion yet.
    missing = pointer and kind == "gone" and "there is no champion" in result
    assert result == expected or result.startswith("error: ") or missing


@pytest.mark.parametrize("sealed", ["no", "manifest", "all", "manifest gone", "both gone"])
@pytest.mark.parametrize(
    "forged",
    [{"correct": 1, "accuracy": 0.01}, {"samples_digest": "0" * 64}, {"predictions": "_SUCCESS"}],
    ids=["worse", "samples", "file"],
)
def test_forgeries(intact: Path, tmp_path: Path, forged: dict[str, Any], sealed: str) -> None:
    shutil.copytree(intact, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "exports" / version_of(tmp_path)
    record = json.loads((folder / "metrics.json").read_text()) | forged
    (folder / "metrics.json").write_text(json.dumps(record))
    success = (folder / "_SUCCESS").read_bytes()
    for own in ("MANIFEST.sha256", "_SUCCESS"):
        (folder / own).unlink()
    if sealed in ("manifest", "all"):
        bundle.seal(folder)
    if sealed not in ("all", "both gone"):
        (folder / "_SUCCESS").write_bytes(success)
    result = verdict(tmp_path, str(tmp_path / "exports"))
    assert result.startswith("error: ")
    assert "is damaged" in result or "does not exist" in result


JUNK: list[Any] = [
    *(None, True, -1, 0, 10**400, 1e308, -0.0, "", "\ud800", "x" * 10_000, [], {}, [[]]),
    *("../../etc/passwd", "/etc/passwd", "CHAMPION", "\x1b[2J", {"name": 1}, [None] * 100),
]


@GENERATED
@given(data=st.data(), large=st.sampled_from(["1e999", "NaN", "5"]))
def test_an_evaluation_may_have_any_content(intact: Path, data: st.DataObject, large: str) -> None:
    record = json.loads((intact / "run" / "evaluation.json").read_text())
    for _ in range(data.draw(st.integers(1, 2))):
        record[data.draw(st.sampled_from(sorted(record)))] = data.draw(st.sampled_from(JUNK))
    content = json.dumps(record).replace("1e+308", large).encode()
    if data.draw(st.booleans()):
        content = data.draw(damaged(content))
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "evaluation.json")
        target.write_bytes(content)
        verdict(intact, str(target))


def test_too_large_or_deep(intact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "TRIES", 1)
    monkeypatch.setattr(champion, "LARGEST", 1 << 20)
    monkeypatch.setattr(champion, "LARGEST_PREDICTIONS", 1 << 20)
    for name in FILES:
        root = tmp_path / name
        shutil.copytree(intact, root)
        os.truncate(root / "exports" / version_of(root) / name, 1 << 40)
        assert "bytes, more than such a file may have" in verdict(root, str(root / "exports"))
    large = tmp_path / "evaluation.json"
    large.write_text("[" * 100_000)
    assert verdict(intact, str(large)).startswith("error: ")
    os.truncate(large, 1 << 40)
    with pytest.raises(InputError, match="more than"):
        Evaluation.read(large)


@pytest.fixture
def served(intact: Path, bucket: Bucket) -> Bucket:
    """The exports in a bucket."""
    for path in (intact / "exports").rglob("*"):
        if path.is_file():
            bucket.put(path.relative_to(intact).as_posix(), path.read_bytes())
    return bucket


def spoil(bucket: Bucket, name: str, fault: str) -> None:
    """Let every download of this file be faulty."""
    (stored,) = (one for one in bucket.objects if one.endswith(f"/{name}"))
    bucket.fault(stored, *[fault] * 20)


@pytest.mark.parametrize("fault", ["", "endless", "endless-large", "endless-small"])
@pytest.mark.parametrize("name", ["CHAMPION", *FILES])
def test_an_endless_download_is_cut_off(
    intact: Path, served: Bucket, monkeypatch: pytest.MonkeyPatch, name: str, fault: str
) -> None:
    monkeypatch.setattr(store, "TRIES", 1)
    monkeypatch.setattr(champion, "LARGEST", 1 << 20)
    monkeypatch.setattr(champion, "LARGEST_PREDICTIONS", 1 << 20)
    spoil(served, name, fault)
    result = verdict(intact, "gs://bucket/exports")
    if fault in ("", "endless-small"):  # the client reads no more than that
        assert result == verdict(intact, str(intact / "exports"))
    else:
        assert "more than" in result
    assert served.sent < 1 << 24


def test_a_damaged_transfer_is_refused(served: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "TRIES", 1)
    spoil(served, "CHAMPION", "corrupt")
    with pytest.raises(StorageError, match="damaged"):
        find("gs://bucket/exports")

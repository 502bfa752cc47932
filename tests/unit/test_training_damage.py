"""Of many damaged checkpoints none is taken for a whole one, and each is one line."""

import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kfp_ddp.core.errors import InputError
from kfp_ddp.training import checkpoint
from kfp_ddp.training.checkpoint import Checkpoint, newest_valid, verify
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.manifest import DIGEST, MANIFEST, STATE


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """Steps 10 and 20, of which tests damage the newer."""
    config = TrainConfig.create(data="/d", output_dir=str(tmp_path), model="cifar_resnet8")
    more = {"epoch": 1.5, "samples": 4, "metrics": {"loss": 0.25, "top5": float("nan")}}
    about = {**more, **checkpoint.manifest_of(config, ("a", "\N{SNOWMAN}"))}
    for step in (10, 20):
        state = {"model": {"w": torch.arange(300.0) + step}, "ema": None, "optimizer": {}}
        path = checkpoint.write(tmp_path / "checkpoints", step, state, about)
    return path


def garble(draw: random.Random, content: bytes) -> bytes:
    """`content` after one to three accidents."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(data) + 1)
        accident = draw.choice(("flip", "cut", "zeros", "insert", "remove", "swap"))
        if accident == "flip" and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif accident == "cut":
            del data[at:]
        elif accident == "zeros":
            data[at : at + 512] = bytes(len(data[at : at + 512]))
        elif accident == "insert":
            data[at:at] = draw.randbytes(draw.randint(1, 64))
        elif accident == "remove":
            del data[at : at + draw.randint(1, 64)]
        else:
            data[at:] = data[at:][::-1]
    return bytes(data)


def taken(path: Path) -> Checkpoint | str:
    """The checkpoint, or the line that refuses it."""
    try:
        return verify(path)
    except InputError as error:
        return str(error)


def falls_back(path: Path) -> bool:
    newest = newest_valid(path.parent)
    return newest is not None and newest.step == 10


@pytest.mark.parametrize("name", [STATE, MANIFEST])
def test_no_accident_passes(whole: Path, name: str) -> None:
    """A manifest of other bytes may say the same, in other white space: then it is whole."""
    draw, content = random.Random(name), (whole / name).read_bytes()
    expected = verify(whole)
    same = 0
    for case in range(600):
        damaged = garble(draw, content)
        (whole / name).write_bytes(damaged)
        found = taken(whole)
        if isinstance(found, str):
            assert "\n" not in found, (case, damaged)
            assert found.startswith(str(whole)), found
            continue
        same += 1
        assert damaged == content or name == MANIFEST, case
        assert repr(found) == repr(expected), (case, damaged)
    assert same < 60
    (whole / name).write_bytes(content[:-1])
    assert falls_back(whole)


def _value(draw: random.Random, depth: int = 0) -> Any:
    """Something that JSON has."""
    plain = [None, True, -1, 2**70, 1.5, float("inf"), float("nan"), "", "../x", "step", "\ud800"]
    kind = draw.randrange(8)
    if depth < 3 and kind == 0:
        return [_value(draw, depth + 1) for _ in range(draw.randrange(3))]
    if depth < 3 and kind == 1:
        names = ("step", "files", STATE, "sha256", "size", "config", "/dev/zero", "..")
        return {draw.choice(names): _value(draw, depth + 1) for _ in range(draw.randrange(4))}
    return draw.choice(plain)


def test_no_manifest_of_another_shape_is_more_than_a_damaged_one(whole: Path) -> None:
    """As earlier versions wrote them: without a digest of itself, which would tell at once."""
    draw, about = random.Random(7), json.loads((whole / MANIFEST).read_text())
    del about[DIGEST]
    places: list[tuple[str, ...]] = [
        *((), ("step",), ("files",), ("files", STATE), ("files", "more")),
        *(("files", STATE, "size"), ("files", STATE, "sha256")),
    ]
    for _ in range(1000):
        changed: Any = json.loads(json.dumps(about))
        place = draw.choice(places)
        if place:
            holder = changed
            for name in place[:-1]:
                holder = holder[name]
            holder[place[-1]] = _value(draw)
        else:
            changed = _value(draw)
        (whole / MANIFEST).write_text(json.dumps(changed))
        found = taken(whole)
        if isinstance(found, str):
            assert "\n" not in found, changed
            continue
        assert isinstance(found.step, int)
        assert found.digest == about["files"][STATE]["sha256"], changed


@pytest.mark.parametrize("name", ["/dev/zero", "../../secret", "..", "", "a/b", "link"])
def test_a_manifest_speaks_of_files_beside_it_only(whole: Path, name: str) -> None:
    """Of /dev/zero, whose size is 0, no digest would ever be known."""
    (whole.parent.parent / "secret").touch()
    (whole / "link").symlink_to("/dev/zero")
    about = json.loads((whole / MANIFEST).read_text())
    del about[DIGEST]
    about["files"][name] = {"size": 0, "sha256": hashlib.sha256().hexdigest()}
    (whole / MANIFEST).write_text(json.dumps(about))
    assert "is not a complete checkpoint" in str(taken(whole))
    assert falls_back(whole)


@pytest.mark.parametrize("opening", ["[", '{"a":', '{"step": 1, "files": ['])
def test_a_manifest_of_any_depth_is_a_damaged_one(whole: Path, opening: str) -> None:
    for depth in (10, 1_000, 100_000):
        (whole / MANIFEST).write_text(opening * depth)
        found = str(taken(whole))
        assert "is not a complete checkpoint" in found
        assert "\n" not in found
        assert falls_back(whole)


def _missing(path: Path) -> None:
    (path / STATE).unlink()


def _endless(path: Path) -> None:
    about = json.loads((path / MANIFEST).read_text())
    del about[DIGEST]
    about["files"][STATE]["size"] = 0
    (path / MANIFEST).write_text(json.dumps(about))
    (path / STATE).unlink()
    (path / STATE).symlink_to("/dev/zero")


def _folder(path: Path) -> None:
    (path / STATE).unlink()
    (path / STATE).mkdir()


def _empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def _file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("a file")


@pytest.mark.parametrize("damage", [_missing, _folder, _endless, _empty, _file])
def test_what_is_not_there_is_no_checkpoint(whole: Path, damage: Any) -> None:
    damage(whole)
    assert isinstance(taken(whole), str)
    assert falls_back(whole)

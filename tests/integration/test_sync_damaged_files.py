"""What a sync keeps in a target for itself, damaged or forged: a right result or one line."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.errors import KfpDdpError
from kfp_ddp.datasets.options import Options
from kfp_ddp.datasets.sync import sync
from tests.sync_runs import content, unpacked

OBJECTS = {name: name.encode() * 50 for name in ("a/x", "a/y", "b/z", "top")}
ODD: tuple[object, ...] = (
    *(None, True, -1, 1 << 70, 1.5, "", "x", [], {}, [[]], "../../other/mine", "/etc/passwd"),
    *("a/x", "\x00", "zz", "-1", "f" * 40, "\ud800", 0, "shard-00000.tar", "../outside"),
)


def broken(data: bytes, choose: random.Random) -> bytes:
    """The file with something else in it."""
    kind = choose.randrange(8)
    at = choose.randrange(len(data) + 1)
    if kind == 0:
        return b""
    if kind == 1:
        return data[:at]
    if kind == 2 and data:
        flipped = bytearray(data)
        flipped[at - 1] ^= 1 << choose.randrange(8)
        return bytes(flipped)
    if kind == 3:
        return data[:at] + choose.randbytes(20) + data[at:]
    if kind == 4:
        return b"[" * 100_000 + b"\n" + data
    lines = data.split(b"\n")
    at = choose.randrange(len(lines))
    lines[at] = forged(lines[at], choose)
    if kind == 5:
        choose.shuffle(lines)
    return b"\n".join(lines)


def forged(line: bytes, choose: random.Random) -> bytes:
    try:
        found: Any = json.loads(line)
    except ValueError:
        return json.dumps(choose.choice(ODD)).encode()
    if isinstance(found, dict) and found:
        found[choose.choice(list(found))] = choose.choice(ODD)
    elif isinstance(found, list) and found:
        found[choose.randrange(len(found))] = choose.choice(ODD)
        if choose.random() < 0.2:
            found.append(choose.choice(ODD))
    return json.dumps(found).encode()


@pytest.mark.parametrize("kind", ["versions", "tar", "mirror"])
@pytest.mark.parametrize("seed", range(3))
def test_damaged_files_of_ours_give_a_right_result_or_one_line(
    tmp_path: Path, kind: str, seed: int
) -> None:
    choose = random.Random(seed)
    source, first, other = tmp_path / "source", tmp_path / "first", tmp_path / "other"
    for name, data in OBJECTS.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    other.mkdir()
    (other / "mine").write_bytes(b"mine")
    base: dict[str, Any] = {"mirror": kind == "mirror", "pack": "tar" if kind == "tar" else "none"}
    base |= {"max_delete": 1, "keep_versions": 1, "keep_hours": 0}
    sync(str(source), first, Options(**base), run_id="run")
    refused: list[str] = []
    for case in range(30):
        target = tmp_path / f"target-{case}"
        shutil.copytree(first, target, symlinks=True)
        ours = [*target.glob("versions/*/_*"), *target.glob(".kfsync/manifest.jsonl")]
        ours += [*target.glob(".kfsync/lock"), *target.glob(".kfsync/leases/*/*")]
        for path in choose.sample(ours, choose.randint(1, 2)):
            path.write_bytes(broken(path.read_bytes(), choose))
        (source / "a/y").write_bytes(OBJECTS["a/y"] if case % 2 else b"new")
        verify = choose.choice(["list", "quick", "full"])
        settings: dict[str, Any] = {"verify": verify, "delete": choose.random() < 0.8}
        try:
            result = sync(str(source), target, Options(**base | settings), run_id="run")
        except KfpDdpError as error:
            refused.append(str(error))
        else:
            held = unpacked(result.path, base["pack"])
            wanted = {name: (source / name).read_bytes() for name in OBJECTS}
            assert {name: held.get(name) for name in wanted} == wanted, (case, settings)
            if settings["delete"]:
                assert held.keys() == wanted.keys()
        assert content(other) == {"mine": b"mine"}
        shutil.rmtree(target)
    assert all(line.isprintable() for line in refused)

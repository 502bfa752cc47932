"""A manifest on the disk that is damaged or forged is read up to there, and no further."""

import json
import random
from pathlib import Path

import pytest

from kfp_ddp.storage import manifest
from kfp_ddp.storage.listing import Listing

NAMES = ("a/x", "a/y", "b/z", "top")
ODD: tuple[object, ...] = (
    *(None, True, -1, 1 << 70, 1.5, "", [], {}, [[]], "../../other", "/etc/passwd", "a/x", "zz"),
    *("-1", "f" * 40, "\ud800", 0, 1 << 63, 1 << 32, -(1 << 63)),
)


def listed() -> Listing:
    made = Listing()
    for name in NAMES:
        made.add(name, 5, 7)
    return made


def lines(packed: bool) -> list[list[object]]:
    more: list[object] = ["origin", "shard-00000.tar", 512] if packed else []
    return [[name, 5, "00000007", "00000007", 10**18, *more] for name in NAMES]


def read(path: Path) -> manifest.Changes:
    manifest.header(path)
    return manifest.compare(listed(), manifest.rows(path))


def folder(tmp_path: Path) -> Path:
    (tmp_path / "version").mkdir()
    return tmp_path / "version" / manifest.NAME


@pytest.mark.parametrize("packed", [False, True])
def test_no_value_in_any_place_breaks_the_reading(tmp_path: Path, packed: bool) -> None:
    path, count = folder(tmp_path), 0
    for at in range(len(NAMES)):
        for place in range(9):
            for odd in ODD:
                rows = lines(packed)
                rows[at][place : place + 1] = [odd]
                path.write_text("{}\n" + "".join(f"{json.dumps(row)}\n" for row in rows))
                found = read(path)
                assert len(found.same) + len(found.changed) + len(found.added) == len(NAMES)
                count += 1
    assert count == 720
    path.write_text("{}\n" + "".join(f"{json.dumps(row)}\n" for row in lines(packed)))
    assert read(path).same == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(4))
def test_no_damage_breaks_the_reading(tmp_path: Path, seed: int) -> None:
    path, choose = folder(tmp_path), random.Random(seed)
    whole = b"{}\n" + b"".join(b"%b\n" % json.dumps(row).encode() for row in lines(seed % 2 == 0))
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(choose.randint(1, 4)):
            at = choose.randrange(len(data))
            data[at : at + choose.choice([0, 1, 9])] = choose.randbytes(choose.choice([0, 1, 3]))
        path.write_bytes(data)
        read(path)
    path.write_bytes(b"[" * 100_000 + b"\n" + b"[" * 100_000)
    assert manifest.header(path) == {}
    assert read(path).same == []

"""Links that somebody else planted in a target: nothing outside of it changes, whatever runs."""

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.errors import KfpDdpError
from kfp_ddp.datasets.options import Options
from kfp_ddp.datasets.sync import sync
from tests.sync_runs import content

NAMES = ("a/x", "a/y", "a/deep/z", "b/x", "b/large", "top")
FIXED = (
    *(".kfsync", "versions", "current", ".kfsync/lock", ".kfsync/handing-out", ".kfsync/leases"),
    *(".kfsync/building", ".kfsync/trash", ".kfsync/manifest.jsonl", ".kfsync/manifest.jsonl.tmp"),
    *(".kfsync/building/{d}", ".kfsync/building/{d}/tree", ".kfsync/building/{d}/parts"),
    *(".kfsync/building/{d}/journal", ".kfsync/building/{d}/tree/a", ".kfsync/leases/{d}"),
    *(".kfsync/building/{d}/_MANIFEST.jsonl", ".kfsync/building/{d}/_SUCCESS"),
    *("versions/{d}", "versions/{d}/_SUCCESS", "versions/{d}/_MANIFEST.jsonl"),
    *("versions/{d}/_MANIFEST.jsonl.tmp", "versions/{d}/_SUCCESS.tmp"),
    *(".kfsync/leases/{d}/run.left", ".kfsync/.kfsync-probe-\u00e9a"),
    *("versions/{d}/shard-00000.tar", ".kfsync/building/{d}/tree/shard-00000.tar"),
)


def outside(folder: Path, like: Path) -> None:
    """Files and folders of somebody else, under the names that the target has."""
    shutil.copytree(like, folder, symlinks=True)
    for path in list(folder.rglob("*")):
        if path.is_symlink():
            path.unlink()
        elif path.is_file():
            path.write_bytes(b"mine")
            os.utime(path, ns=(10**18, 10**18))
    for number in range(3):
        (folder / f"run-{number}.left").write_bytes(b"mine")
        os.utime(folder / f"run-{number}.left", ns=(10**18, 10**18))


def state(folder: Path) -> dict[str, tuple[object, ...]]:
    """All of a folder that a write or a link could change."""
    found: dict[str, tuple[object, ...]] = {}
    for path in [folder, *folder.rglob("*")]:
        seen = path.lstat()
        data = path.read_bytes() if path.is_file() else b""
        times = (seen.st_mtime_ns, seen.st_ctime_ns, seen.st_mode, seen.st_nlink)
        found[str(path.relative_to(folder))] = (*times, seen.st_ino, data)
    return found


def plant(target: Path, other: Path, choose: random.Random, digests: list[str]) -> str:
    """Put a link, or a pipe, in the place of something in the target; its name."""
    there = [str(path.relative_to(target)) for path in target.rglob("*")]
    planned = [name.replace("{d}", digest) for name in FIXED for digest in digests]
    name = choose.choice([*there, *planned, *planned])
    path = target / name
    if any(parent.is_symlink() for parent in path.parents if parent != target):
        return ""
    if path.is_symlink() or path.is_file() or path.is_fifo():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
    elif not path.parent.is_dir():
        if any(parent.exists() and not parent.is_dir() for parent in path.parents):
            return ""
        path.parent.mkdir(parents=True)
    same = other / name
    kinds = [other, other / "top", other / "run-0.left", other / "none", same, same]
    if choose.random() < 0.2:
        os.mkfifo(path)
    else:
        path.symlink_to(choose.choice(kinds))
    return name


@pytest.mark.parametrize("seed", range(8))
def test_nothing_outside_changes_whatever_is_planted_where(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    refused = whole = 0
    for case in range(20):
        base = tmp_path / str(case)
        source, target, other = base / "source", base / "target", base / "other"
        objects = {name: choose.randbytes(choose.choice([0, 5, 300])) for name in NAMES}
        objects["b/large"] = choose.randbytes((1 << 20) + 1)
        write(source, objects)
        mirror = choose.random() < 0.5
        settings: dict[str, Any] = {"mirror": mirror}
        settings["pack"] = "tar" if not mirror and choose.random() < 0.3 else "none"
        first = sync(str(source), target, Options(**settings), run_id="run")
        after = objects | {"a/y": b"changed", "new/w": b"new"}
        write(source, after)
        settings |= {"verify": choose.choice(["list", "quick", "full"]), "keep_versions": 1}
        settings |= {"delete": choose.random() < 0.7, "max_delete": 1, "keep_hours": 0}
        second = sync(str(source), target, Options(**settings | {"dry_run": True}))
        if choose.random() < 0.5:
            write(source, objects)
            (source / "new/w").unlink()
            (source / "new").rmdir()
        outside(other, target)
        planted = [
            plant(target, other, choose, [first.digest[:12], second.digest[:12]])
            for _ in range(choose.randint(1, 3))
        ]
        before = state(other)
        try:
            found = sync(str(source), target, Options(**settings), run_id="run")
        except KfpDdpError:
            refused += 1
        else:
            whole += 1
            if settings["verify"] == "full" and settings["pack"] == "none":
                wanted = {p.relative_to(source).as_posix(): p for p in source.rglob("*")}
                held = content(found.path)
                for name, path in wanted.items():
                    if path.is_file():
                        assert held[name] == path.read_bytes(), (case, planted, settings)
                        assert not (found.path / name).is_symlink()
        assert state(other) == before, (case, planted, settings)
        shutil.rmtree(base)
    assert refused >= 1
    assert whole >= 5


def write(source: Path, objects: dict[str, bytes]) -> None:
    for name, data in objects.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)

"""How the tests of data_sync fill a bucket, run a sync and look at what it left."""

import contextlib
import json
import os
import random
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import google_crc32c
import pytest

from kfp_ddp.datasets import engine, names
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.datasets.report import Result
from kfp_ddp.datasets.sync import sync as sync_patiently
from kfp_ddp.storage.source import Retry
from tests.gcs_server import Bucket

RETRY = Retry(attempts=3, pause=0.01, longest=0.05)
sync = partial(sync_patiently, retry=RETRY)
OWN = {"_SUCCESS", "_MANIFEST.jsonl"}


def run(target: Path, **options: Any) -> Result:
    """Sync the bucket's prefix `ds`."""
    checked = SyncOptions(**{"concurrency": 4} | options)
    return sync("gs://bucket/ds", target, checked)


def start(target: Path, *flags: str) -> "subprocess.Popen[bytes]":
    """Start the command line on the bucket's prefix `ds`."""
    program = "from kfp_ddp.cli import main; main()"
    command = [sys.executable, "-c", program, "sync", "gs://bucket/ds", str(target)]
    return subprocess.Popen([*command, *flags], stderr=subprocess.DEVNULL)


def manifest(files: dict[str, bytes]) -> bytes:
    """Return the manifest of files as a version has it, without times."""
    rows = [[n, len(b), 0, f"{google_crc32c.value(b):08x}"] for n, b in files.items()]
    return "\n".join(json.dumps(row) for row in ({"format": 1, "pack": "none"}, *rows)).encode()


def fill(bucket: Bucket, count: int = 40, size: int = 3000) -> dict[str, bytes]:
    """Put that many objects in four classes; returns them by name."""
    random.seed(count)
    objects = {f"train/c{i % 4}/{i:04}.png": random.randbytes(size) for i in range(count)}
    bucket.put_all(objects)
    return objects


def step(tmp_path: Path, source: str, **inputs: Any) -> tuple[dict[str, Any], str]:
    """Run the component's step as KFP does; return the metadata of the version, and the report."""
    version, report = (
        SimpleNamespace(path=str(tmp_path / name), metadata={}) for name in ("version", "report")
    )
    given = {"data_dir": str(tmp_path / "data"), "dataset": "", "run_id": "", "options": {}}
    engine.run(dataset_version=version, sync_report=report, source=source, **(given | inputs))
    return version.metadata, Path(report.path).read_text()


def write(folder: Path, objects: dict[str, bytes]) -> None:
    """Write files by their relative names."""
    for name, data in objects.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder by its relative name, but for our own."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in OWN and ".kfsync" not in path.parts
    }


def unpacked(version: Path, pack: str) -> dict[str, bytes]:
    """The files of a version, out of its archives if it is packed."""
    if pack == "none":
        return content(version)
    found = {}
    for path in sorted(version.glob("*.tar")):
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile():
                    file = archive.extractfile(member)
                    assert file is not None
                    found[member.name] = file.read()
    return found


def mangled(choose: random.Random, data: bytes, inserted: Sequence[bytes] = (b"",)) -> bytes:
    """Return the same with some bytes changed, lost, doubled, cut off or inserted."""
    made = bytearray(data)
    for _ in range(choose.randint(0, 2)):
        at = choose.randrange(len(made) + 1)
        match choose.randrange(5):
            case 0:
                made[at : at + 1] = choose.randbytes(1)
            case 1:
                del made[at : at + choose.randint(1, 9)]
            case 2:
                made[at:at] = made[at : at + choose.randint(1, 30)]
            case 3:
                del made[at:]
            case 4:
                made[at:at] = choose.choice(inserted)
    return bytes(made)


def damage(path: Path) -> None:
    """Flip a bit, and leave size and mtime as they are."""
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def pretend_folding(target: Path) -> None:
    """Let a folder look as if its file system held é in two forms as one; it keeps them apart."""
    (target / ".kfsync").mkdir(parents=True, exist_ok=True)
    (target / ".kfsync/.kfsync-probe-e\u0301a").touch()
    names.leave_probe(target)


@contextlib.contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """A real file system that is too small."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"mounting a small disk needs root: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def another_user(folder: Path) -> Iterator[None]:
    """Be nobody in a folder, where paths are relative: its parents need not let anybody in."""
    if os.getuid():
        pytest.skip("needs root, to become another user")
    folder.chmod(0o755)
    with contextlib.chdir(folder):
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)

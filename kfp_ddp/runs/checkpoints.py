"""Checkpoints in a bucket: complete if they have a manifest, written last and deleted first."""

import re
import shutil
from collections import defaultdict
from pathlib import Path

from kfp_ddp.core.errors import StorageError
from kfp_ddp.core.files import sha256
from kfp_ddp.core.log import log
from kfp_ddp.datasets.names import reason_unsafe
from kfp_ddp.storage.store import Store
from kfp_ddp.training.spec.manifest import MANIFEST, read_manifest, step_dir, step_of

_NAME = re.compile(r"(.+)/(step-\d{8,})")
_LARGEST = 1 << 40
_LARGEST_MANIFEST = 64 << 20


def contains(name: str) -> bool:
    """Return whether a file, by its name in the run's folder, is part of a checkpoint."""
    return _NAME.fullmatch(name.rpartition("/")[0]) is not None


def complete(where: Store, folder: str) -> list[str]:
    """Return the names of a folder's complete checkpoints, newest first; raise KfpDdpError."""
    end = f"/{MANIFEST}"
    paths = []
    for name, _ in where.list(f"{folder}/"):
        if name.endswith(end):
            paths.append(name.removesuffix(end))
    return sorted(filter(_NAME.fullmatch, paths), key=step_of, reverse=True)


def upload(where: Store, name: str, checkpoint: Path) -> bool:
    """Upload a local checkpoint, which must not change; False if the bucket already has it."""
    manifest = f"{name}/{MANIFEST}"
    if where.read(manifest, _LARGEST_MANIFEST) == (checkpoint / MANIFEST).read_bytes():
        return False
    where.delete(manifest)
    others = set(checkpoint.iterdir()) - {checkpoint / MANIFEST}
    for file in sorted(others):
        where.put(file, f"{name}/{file.name}")
    where.put(checkpoint / MANIFEST, manifest)
    return True


def best_of(checkpoint: Path) -> str:
    """Return the best checkpoint's name by a newer manifest, '' for none; OSError, ValueError."""
    best = read_manifest(checkpoint).fields.get("best")
    if not best:
        return ""
    folder = Path(checkpoint.parent.name)
    return step_dir(folder, int(best["step"])).as_posix()


def prune(where: Store, folder: str, keep: int, keep_also: str = "") -> None:
    """Remove incomplete checkpoints, and complete ones but the newest `keep` and `keep_also`."""
    parts = defaultdict(list)
    for name, _ in where.list(f"{folder}/"):
        if contains(name):
            parts[name.rpartition("/")[0]].append(name)
    finished = [path for path, names in parts.items() if f"{path}/{MANIFEST}" in names]
    retained = sorted(finished, key=step_of, reverse=True)[:keep]
    for path in parts.keys() - {*retained, keep_also}:
        # Without its manifest a checkpoint is incomplete, so that comes first.
        for name in sorted(parts[path], key=lambda name: not name.endswith(f"/{MANIFEST}")):
            where.delete(name)


def move(where: Store, folder: str, target: str, room: Path) -> None:
    """Move a folder's checkpoints by way of `room`; after an error another call resumes."""
    for name in reversed(complete(where, folder)):
        if fetch(where, name, room):
            upload(where, f"{target}/{name.rpartition('/')[2]}", room / name)
            shutil.rmtree(room / name)
            where.delete(f"{name}/{MANIFEST}")
    prune(where, folder, keep=0)


def fetch(where: Store, name: str, run_dir: Path) -> bool:
    """Download a checkpoint to the run folder; False if it is invalid; KfpDdpError, OSError."""
    aside = run_dir / ".incoming" / name
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for file in [MANIFEST, *_other_files(where, name)]:
        with (aside / file).open("w+b") as into:
            if not where.fetch(f"{name}/{file}", into, _LARGEST):
                return False
    if not _is_valid(aside):
        return False
    # Only now a complete checkpoint replaces what is there.
    (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(run_dir / name, ignore_errors=True)
    aside.rename(run_dir / name)
    return True


def _other_files(where: Store, name: str) -> list[str]:
    """Return the names of a checkpoint's files without its manifest, and without unsafe ones."""
    files = []
    for path, _ in where.list(f"{name}/"):
        file = path.removeprefix(f"{name}/")
        if file == MANIFEST or "/" in file:
            continue
        if not reason_unsafe(file):
            files.append(file)
    return files


def _is_valid(checkpoint: Path) -> bool:
    """Return whether all files that the manifest names are there and have its digests."""
    try:
        files = read_manifest(checkpoint).fields["files"]
        return all(sha256(checkpoint / name) == about["sha256"] for name, about in files.items())
    except (OSError, ValueError):
        return False


def fetch_newest(where: Store, folder: str, run_dir: Path) -> str:
    """Download the newest valid checkpoint, and return its name, '' for none; StorageError.

    The manifests of newer, invalid checkpoints are deleted, so that they can be written again.
    """
    names = complete(where, folder)
    for index, name in enumerate(names):
        if fetch(where, name, run_dir):
            for damaged in names[:index]:
                where.delete(f"{damaged}/{MANIFEST}")
                log.warning(f"{where.uri}/{damaged} is damaged and is ignored")
            return name
    if names:
        raise StorageError(
            f"none of the {len(names)} checkpoints in {where.uri}/{folder} is valid: copy a "
            "complete one there, or start a new run"
        )
    return ""

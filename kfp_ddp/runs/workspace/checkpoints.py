"""Checkpoints in a bucket: whole or not there, verified by digest, the newest few kept.

A checkpoint counts from the moment its manifest is there, which comes last and is removed first.
"""

import re
import shutil
from collections import defaultdict
from pathlib import Path

from kfp_ddp.core.errors import StorageError
from kfp_ddp.storage.destination import Destination, sha256
from kfp_ddp.training.manifest import MANIFEST, read_manifest, step_dir, step_of

_PLACE = re.compile(r"(.+)/(step-\d{8,})")
_LARGEST = 1 << 40
_LARGEST_MANIFEST = 64 << 20


def is_of_one(name: str) -> bool:
    """Whether a file, by its name in the run's folder, is part of a checkpoint."""
    return _PLACE.fullmatch(name.rpartition("/")[0]) is not None


def complete(where: Destination, folder: str) -> list[str]:
    """The checkpoints of a folder, newest first, by name in the run's folder; raises InputError."""
    names = (name for name, _ in where.list(f"{folder}/"))
    found = [name.removesuffix(f"/{MANIFEST}") for name in names if name.endswith(f"/{MANIFEST}")]
    return sorted((each for each in found if _PLACE.fullmatch(each)), key=step_of, reverse=True)


def upload(where: Destination, name: str, checkpoint: Path) -> bool:
    """Store a checkpoint of this machine; False if it is there already.

    Args:
        where: The run's folder.
        name: Of the checkpoint in it.
        checkpoint: A complete one, which nobody changes meanwhile.

    Raises:
        KfpDdpError: it cannot be written; what is there then does not count.
    """
    manifest = f"{name}/{MANIFEST}"
    if where.read(manifest, _LARGEST_MANIFEST) == (checkpoint / MANIFEST).read_bytes():
        return False
    where.delete(manifest)
    for file in sorted(checkpoint.iterdir()):
        if file.name != MANIFEST:
            where.put(file, f"{name}/{file.name}")
    where.put(checkpoint / MANIFEST, manifest)
    return True


def best_of(checkpoint: Path) -> str:
    """The best checkpoint of a run so far, by the manifest of its newest one; '' for none.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    best = read_manifest(checkpoint).fields.get("best")
    return step_dir(Path(checkpoint.parent.name), int(best["step"])).as_posix() if best else ""


def prune(where: Destination, folder: str, keep: int, spared: str = "") -> None:
    """Remove all but the newest `keep` complete checkpoints of a folder, and what is torn.

    `spared` is one that stays, by its name in the run's folder.

    Raises:
        KfpDdpError: they cannot be listed or removed.
    """
    parts = defaultdict(list)
    for name, _ in where.list(f"{folder}/"):
        if is_of_one(name):
            parts[name.rpartition("/")[0]].append(name)
    whole = [each for each, names in parts.items() if f"{each}/{MANIFEST}" in names]
    kept = sorted(whole, key=step_of, reverse=True)[:keep]
    for each in parts.keys() - {*kept, spared}:
        for name in sorted(parts[each], key=lambda name: not name.endswith(f"/{MANIFEST}")):
            where.delete(name)


def move(where: Destination, folder: str, target: str, room: Path) -> None:
    """Move the checkpoints of a folder to another one; a store has no rename.

    Args:
        where: The run's folder.
        folder: In it, where nothing is left.
        target: In it; those that are there already stay.
        room: A folder here for one of them at a time.

    Raises:
        KfpDdpError: they cannot be read or written; called again it goes on.
        OSError: this machine has no room for them.
    """
    for name in reversed(complete(where, folder)):
        if fetch(where, name, room):
            upload(where, f"{target}/{name.rpartition('/')[2]}", room / name)
            shutil.rmtree(room / name)
            where.delete(f"{name}/{MANIFEST}")
    prune(where, folder, keep=0)


def fetch(where: Destination, name: str, run_dir: Path) -> bool:
    """Bring a checkpoint to its place in a folder of this machine; False if it does not verify.

    Raises:
        KfpDdpError: it cannot be read, which tells nothing of what it is.
        OSError: this machine has no room for it.
    """
    aside = run_dir / ".incoming" / name
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for file in (MANIFEST, *_listed(where, name)):
        with (aside / file).open("w+b") as into:
            if not where.fetch(f"{name}/{file}", into, _LARGEST):
                return False
    try:
        manifest = read_manifest(aside)
        files = manifest.fields["files"]
        whole = all(sha256(aside / file) == about["sha256"] for file, about in files.items())
    except (OSError, ValueError):
        return False
    if whole:
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(run_dir / name, ignore_errors=True)
        aside.rename(run_dir / name)
    return whole


def _listed(where: Destination, name: str) -> list[str]:
    names = (each.removeprefix(f"{name}/") for each, _ in where.list(f"{name}/"))
    return [each for each in names if each != MANIFEST and "/" not in each]


def fetch_newest(where: Destination, folder: str, run_dir: Path) -> str:
    """Bring the newest checkpoint of a folder that verifies; its name, '' where there is none.

    Newer ones that do not verify lose their manifest, as they are to be made again.

    Raises:
        StorageError: there are some, and none verifies.
        KfpDdpError: the bucket cannot be read.
    """
    found = complete(where, folder)
    for at, name in enumerate(found):
        if fetch(where, name, run_dir):
            for damaged in found[:at]:
                where.delete(f"{damaged}/{MANIFEST}")
                print(f"warning: {where.uri}/{damaged} does not verify, so it does not count")
            return name
    if found:
        raise StorageError(
            f"none of the {len(found)} checkpoints in {where.uri}/{folder} verifies: copy a whole "
            "one there, or start a new run"
        )
    return ""

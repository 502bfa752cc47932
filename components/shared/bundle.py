"""A bundle on disk: built aside, listed in a manifest, complete only when `_SUCCESS` is there."""

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kfp_ddp.base.errors import InputError
from kfp_ddp.base.files import fsync
from kfp_ddp.base.run_folder import RunFolder
from kfp_ddp.components.shared.destination import Destination, sha256

NAME = RunFolder("").bundle.name
WEIGHTS = "model.safetensors"
MANIFEST, SUCCESS = "MANIFEST.sha256", "_SUCCESS"
CHAMPION = "CHAMPION"
"""Beside the versions of a model: the one that was exported last, which a next one has to beat."""
_ASIDE = f".{NAME}-"


def check_model_name(model_name: str) -> None:
    """Refuse a name that cannot be a folder of a model server.

    Raises:
        InputError: saying what a name is made of.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", model_name):
        raise InputError(
            f"model_name is {model_name!r}: it becomes a folder, so use 1 to 63 letters, digits, "
            "dots, dashes and underscores, a letter or digit first"
        )


def digest(folder: Path) -> str:
    """The digest in `_SUCCESS`: sha256 of the manifest, and so of all files. '' if incomplete."""
    try:
        text = (folder / SUCCESS).read_text().strip()
        return text if text == sha256(folder / MANIFEST) else ""
    except OSError:
        return ""


def files(folder: Path) -> list[str]:
    """Names of all files below `folder`, sorted, with forward slashes."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def intact(folder: Path) -> bool:
    """Is the bundle complete, and does every file have the digest in the manifest?"""
    if not digest(folder):
        return False
    listed = listed_in((folder / MANIFEST).read_text(encoding="utf-8"))
    there = [name for name in files(folder) if name not in (MANIFEST, SUCCESS)]
    return there == sorted(listed) and all(
        sha256(folder / n) == wanted for n, wanted in listed.items()
    )


def listed_in(manifest: str) -> dict[str, str]:
    """SHA-256 of each file that the text of a manifest lists, by its name."""
    parts = (line.partition("  ") for line in manifest.splitlines())
    return {name: wanted for wanted, _, name in parts}


@contextmanager
def replacing(run_dir: Path) -> Iterator[Path]:
    """A new folder that becomes `<run_dir>/bundle` when the block ends well, and else goes.

    Only then are the manifest and `_SUCCESS` written, after all files are on the disk.

    Raises:
        InputError: if the folder cannot be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        for left in run_dir.glob(f"{_ASIDE}*"):  # of a step that was killed
            shutil.rmtree(left)
        aside = Path(tempfile.mkdtemp(prefix=_ASIDE, dir=run_dir))
    except OSError as error:
        raise _unwritable(run_dir, error) from None
    try:
        yield aside
        seal(aside)
        aside.chmod(0o755)
        target = run_dir / NAME
        if target.exists():
            target.rename(run_dir / f"{_ASIDE}old")
        aside.rename(target)
        fsync(run_dir)
        shutil.rmtree(run_dir / f"{_ASIDE}old", ignore_errors=True)
    except OSError as error:
        raise _unwritable(run_dir, error) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def seal(folder: Path) -> str:
    """Sync all files, write the manifest, then `_SUCCESS`; returns the digest."""
    names = files(folder)
    for name in names:
        (folder / name).chmod(0o644)  # safetensors writes for its owner alone
        fsync(folder / name)
    lines = [f"{sha256(folder / name)}  {name}\n" for name in names]
    (folder / MANIFEST).write_text("".join(lines), encoding="utf-8")
    fsync(folder / MANIFEST)
    found = sha256(folder / MANIFEST)
    (folder / SUCCESS).write_text(found + "\n")
    fsync(folder / SUCCESS)
    for inner in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
        fsync(inner)
    return found


def upload(folder: Path, name: str, where: Destination) -> str:
    """Copy a bundle to `<where>/<name>/<digest12>/`, `_SUCCESS` last; returns that URI.

    The folder is named by content, so a complete one is never changed, and a second upload
    only finds that all is there. Last of all `<where>/<name>/CHAMPION` is made to name it.

    Raises:
        InputError: if a file cannot be written or arrives different.
    """
    version = f"{name}/{digest(folder)[:12]}"
    names = [n for n in files(folder) if n not in (MANIFEST, SUCCESS)]
    for file in (*names, MANIFEST, SUCCESS):
        where.put(folder / file, f"{version}/{file}")
    with tempfile.NamedTemporaryFile("w", encoding="ascii") as pointer:
        pointer.write(digest(folder)[:12] + "\n")
        pointer.flush()
        where.put(Path(pointer.name), f"{name}/{CHAMPION}")
    return f"{where.uri}/{version}"


def write_json(path: Path, content: Mapping[str, Any] | list[str]) -> None:
    """Write indented JSON; numbers that are not finite are refused."""
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def key(content: Mapping[str, Any]) -> str:
    """A digest of what a bundle is made from, to tell whether it needs to be made again."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _unwritable(run_dir: Path, error: OSError) -> InputError:
    return InputError(
        f"the bundle cannot be written to {run_dir}: {error.strerror or error}; "
        "make run_dir writable and give it room for three times the weights"
    )

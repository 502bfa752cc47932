"""A bundle on disk: built aside, listed in a manifest, complete only when `_SUCCESS` is there."""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.files import fsync, open_below, read_below
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.storage.destination import Destination, sha256, sha256_of

NAME = RunFolder.BUNDLE
WEIGHTS = "model.safetensors"
METRICS = "metrics.json"
"""The evaluation."""
REQUEST, RESPONSE = "sample/request.json", "sample/response.json"
"""A request of the v2 protocol, and what a server of the bundle answers."""
MANIFEST, SUCCESS = "MANIFEST.sha256", "_SUCCESS"
SIGNATURE = "model.sig"
"""Of all files and the two above, so no manifest can list it."""
LARGEST_SIGNATURE = 4 << 20
"""Bytes of a signature that is read; it names each file."""
_UNLISTED = (MANIFEST, SUCCESS, SIGNATURE)
LARGEST_MANIFEST, LARGEST_SUCCESS = 1 << 20, 100
"""Bytes that are read of the two: a manifest has a line for each of some twenty files."""
LARGEST_CONFIG = 16 << 20
"""Bytes that are read of its config, and of what else it tells of itself."""
_ASIDE = f".{NAME}-"
_LOCK = "lock"


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
        text = read_below(folder, SUCCESS, LARGEST_SUCCESS).decode(errors="replace").strip()
        manifest = read_below(folder, MANIFEST, LARGEST_MANIFEST)
        return text if text == hashlib.sha256(manifest).hexdigest() else ""
    except (OSError, InputError):
        return ""


def version(folder: Path) -> str:
    """What a complete bundle is called where it is uploaded to."""
    return digest(folder)[:12]


def files(folder: Path) -> list[str]:
    """Names of all files and links below `folder`, sorted, with forward slashes."""
    return sorted(
        Path(at, name).relative_to(folder).as_posix()
        for at, folders, names in os.walk(folder)
        for name in (*names, *(one for one in folders if os.path.islink(os.path.join(at, one))))
    )


def intact(folder: Path, but: Collection[str] = ()) -> bool:
    """Is the bundle complete, and does every file have the digest in the manifest?

    `but` are files that are just being replaced: they are not looked at, and neither is `_SUCCESS`.
    """
    if not but and not digest(folder):
        return False
    try:
        manifest = listed_in(read_below(folder, MANIFEST, LARGEST_MANIFEST).decode())
        listed = {name: wanted for name, wanted in manifest.items() if name not in but}
        there = [name for name in files(folder) if name not in (*_UNLISTED, *but)]
        return there == sorted(listed) and all(
            _sha256_below(folder, name) == wanted for name, wanted in listed.items()
        )
    except (OSError, ValueError):
        return False


def _sha256_below(folder: Path, name: str) -> str:
    with open_below(folder, name) as file:
        return sha256_of(file)


def listed_in(manifest: str) -> dict[str, str]:
    """SHA-256 of each file that the text of a manifest lists, by its name."""
    parts = (line.partition("  ") for line in manifest.splitlines())
    return {name: wanted for wanted, _, name in parts}


@contextmanager
def replacing(run_dir: Path) -> Iterator[Path]:
    """A new folder that becomes `<run_dir>/bundle` when the block ends well, and else goes.

    Only then are the manifest and `_SUCCESS` written, after all files are on the disk. What a step
    that was killed left is removed; what another one works on is locked, and stays.

    Raises:
        InputError: if the folder cannot be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        for left in run_dir.glob(f"{_ASIDE}*"):
            _remove_unused(left)
        aside, lock = _locked_folder(run_dir)
    except OSError as error:
        raise _unwritable(run_dir, error) from None
    try:
        made = aside / NAME
        made.mkdir()
        yield made
        seal(made)
        made.chmod(0o755)
        _put_in_place(made, run_dir / NAME)
        fsync(run_dir)
    except OSError as error:
        raise _unwritable(run_dir, error) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        os.close(lock)


def _locked_folder(run_dir: Path) -> tuple[Path, int]:
    """A new folder beside the bundle, and the descriptor whose closing gives up its lock."""
    while True:
        aside = Path(tempfile.mkdtemp(prefix=_ASIDE, dir=run_dir))
        try:
            lock = _lock(aside)
        except (FileNotFoundError, BlockingIOError):
            continue  # another step took it for one that was left
        except OSError:  # no locks here, so nobody removes it either
            return aside, os.open(aside, os.O_RDONLY)
        if (aside / _LOCK).exists():
            return aside, lock
        os.close(lock)


def _remove_unused(left: Path) -> None:
    """Remove a folder that nobody holds locked; one that cannot be looked at stays."""
    with suppress(OSError):
        if not stat.S_ISDIR(left.lstat().st_mode):
            return
        lock = _lock(left)
        try:
            shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(lock)


def _lock(aside: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    lock = os.open(aside / _LOCK, flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _put_in_place(made: Path, target: Path) -> None:
    """Rename a folder to `target`; what has that name goes aside, and with its folder."""
    for number in range(100):  # another step may put its own there in between
        with suppress(FileNotFoundError):
            target.rename(made.with_name(f"old-{number}"))
        try:
            made.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        else:
            return
    raise OSError(errno.EBUSY, "others keep writing it", str(target))


def seal(folder: Path) -> str:
    """Sync all files, write the manifest, then `_SUCCESS`; returns the digest."""
    (folder / SIGNATURE).unlink(missing_ok=True)  # of what was there before
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
    only finds that all is there.

    Raises:
        InputError: if a file cannot be written or arrives different.
    """
    target = f"{name}/{version(folder)}"
    names = [n for n in files(folder) if n not in (MANIFEST, SUCCESS)]
    for file in (*names, MANIFEST, SUCCESS):
        where.put(folder / file, f"{target}/{file}")
    return f"{where.uri}/{target}"


def link(source: Path, target: Path) -> None:
    """The same file once more; a copy where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


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

"""A bundle: a model's files under one manifest, complete only when `_SUCCESS` exists.

`Bundle` reads one in a folder or in any bucket, checked against its manifest. `replacing` writes
one in the folder of a run.
"""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.files import fsync, open_below, read_below
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.core.settings import mapping_in
from kfp_ddp.storage.store import Store, sha256, sha256_of

NAME = RunFolder.BUNDLE
WEIGHTS = "model.safetensors"
METRICS = "metrics.json"
"""The evaluation."""
CONFIG = "config.json"
LINEAGE = "lineage.json"
"""Where a published bundle comes from; older bundles have it in `CONFIG`, as `lineage`."""
REQUEST, RESPONSE = "sample/request.json", "sample/response.json"
"""A request of the v2 protocol, and the expected answer."""
MANIFEST, SUCCESS = "MANIFEST.sha256", "_SUCCESS"
SIGNATURE = "model.sig"
"""Signs all files and the two above, so no manifest lists it."""
LARGEST_SIGNATURE = 4 << 20
"""Limit in bytes; a signature names each file."""
_UNLISTED = (MANIFEST, SUCCESS, SIGNATURE)
LARGEST_MANIFEST, LARGEST_SUCCESS = 1 << 20, 100
"""Limits in bytes; a manifest has a line for each of about twenty files."""
LARGEST_CONFIG = 16 << 20
"""Limit in bytes for the config and other JSON files."""
_LARGEST_FILE = 1 << 40
_ASIDE = f".{NAME}-"
_LOCK = "lock"


@dataclass(frozen=True)
class Bundle:
    """A bundle in a folder or a bucket; each file that is read is checked against the manifest."""

    where: Store
    folder: str
    """Below `where`: empty, or with a slash at its end."""
    title: str
    """What error messages call it, such as "the champion"."""
    advice: str
    """What to do if it is damaged, for error messages."""
    listed: Mapping[str, str] | None
    """SHA-256 of each file by name; None without a manifest: there is no bundle."""
    digest: str
    """SHA-256 of the manifest; '' without one."""

    @classmethod
    def at(
        cls,
        where: Store,
        folder: str = "",
        title: str = "the bundle",
        advice: str = "export it again",
    ) -> "Bundle":
        """Return the bundle at a location, or one without `listed` if there is none.

        Raises:
            InputError: it cannot be read, or manifest and `_SUCCESS` do not match.
        """
        empty = cls(where, folder, title, advice, None, "")
        manifest = where.read(folder + MANIFEST, LARGEST_MANIFEST)
        success = where.read(folder + SUCCESS, LARGEST_SUCCESS)
        if manifest is None:
            if success is not None:
                raise empty.damaged(f"{MANIFEST} is missing")
            return empty
        digest = hashlib.sha256(manifest).hexdigest()
        if (success or b"").decode(errors="replace").strip() != digest:
            raise empty.damaged(f"{SUCCESS} is not the digest of {MANIFEST}")
        listed = listed_in(manifest.decode(errors="replace"))
        return cls(where, folder, title, advice, listed, digest)

    @property
    def version(self) -> str:
        """The version under which it is uploaded; '' without a manifest."""
        return self.digest[:12]

    @property
    def uri(self) -> str:
        """The URI of the bundle."""
        return f"{self.where.uri}/{self.folder}".rstrip("/")

    @property
    def model_name(self) -> str:
        """The model's name, as in `serving/<name>/1/model.onnx`."""
        parts = (name.split("/") for name in self.listed or ())
        return next((part[1] for part in parts if part[0] == "serving" and len(part) > 2), "model")

    def read(self, name: str, limit: int) -> bytes | None:
        """Return the content of a file; None if it does not exist and is not listed.

        Args:
            name: File name in the bundle.
            limit: Largest size in bytes.

        Raises:
            InputError: it cannot be read, is larger, or differs from the manifest.
        """
        content = self.where.read(self.folder + name, limit)
        if content is not None:
            self.check(name, hashlib.sha256(content).hexdigest())
        elif name in (self.listed or {}):
            raise self.damaged(f"{name} is missing")
        return content

    def signature(self) -> bytes | None:
        """Return the content of `SIGNATURE`; None if the bundle is not signed."""
        return self.where.read(self.folder + SIGNATURE, LARGEST_SIGNATURE)

    def lineage(self) -> Mapping[str, Any]:
        """Return where it comes from, empty if it was not published.

        Raises:
            InputError: as for `read`.
        """
        lineage = mapping_in(self.read(LINEAGE, LARGEST_CONFIG))
        return lineage or mapping_in(self.read(CONFIG, LARGEST_CONFIG)).get("lineage") or {}

    def check(self, name: str, digest: str) -> None:
        """Refuse a file whose SHA-256 is not the listed one; without a manifest, accept any.

        Raises:
            InputError: the digest differs.
        """
        if self.listed is not None and self.listed.get(name) != digest:
            raise self.damaged(f"{name} is not what {MANIFEST} lists")

    def verify(self) -> int:
        """Read all files and check each; return their size in bytes.

        Raises:
            InputError: a file is missing, differs, or is not listed.
        """
        start = len(self.folder)
        listed = self.listed or {}
        existing = {name[start:] for name, _ in self.where.list(self.folder)}
        if unlisted := existing - listed.keys() - set(_UNLISTED):
            raise self.damaged(f"{min(unlisted)} is not in {MANIFEST}")
        size = 0
        for name in listed:
            file: Any = _Digest()
            if name not in existing or not self.where.fetch(
                self.folder + name, file, _LARGEST_FILE
            ):
                raise self.damaged(f"{name} is missing")
            self.check(name, file.digest.hexdigest())
            size += file.size
        return size

    def damaged(self, what: str) -> InputError:
        """Return the error for a bundle with a missing or changed file."""
        return InputError(f"{self.title} {self.uri} is damaged: {what}; {self.advice}")


class _Digest:
    """The methods of a binary file that `fetch` uses: hashes the content and keeps none of it."""

    def __init__(self) -> None:
        self._reset()

    def write(self, block: bytes) -> int:
        self.digest.update(block)
        self.size += len(block)
        return len(block)

    def seek(self, start: int) -> int:
        self._reset()  # a new attempt starts at 0
        return start

    def truncate(self) -> int:
        return 0

    def _reset(self) -> None:
        self.digest = hashlib.sha256()
        self.size = 0


def check_model_name(model_name: str) -> None:
    """Refuse a name that cannot be a folder of a model server.

    Raises:
        InputError: the name is invalid.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", model_name):
        raise InputError(
            f"model_name is {model_name!r}: it becomes a folder, so use 1 to 63 letters, digits, "
            "dots, dashes and underscores, a letter or digit first"
        )


def digest(folder: Path) -> str:
    """Return the digest in `_SUCCESS`: SHA-256 of the manifest; '' if incomplete."""
    try:
        text = read_below(folder, SUCCESS, LARGEST_SUCCESS).decode(errors="replace").strip()
        manifest = read_below(folder, MANIFEST, LARGEST_MANIFEST)
        return text if text == hashlib.sha256(manifest).hexdigest() else ""
    except (OSError, InputError):
        return ""


def version(folder: Path) -> str:
    """Return the version under which a complete bundle is uploaded."""
    return digest(folder)[:12]


def files(folder: Path) -> list[str]:
    """Return the names of all files and links below `folder`, sorted, with forward slashes."""
    return sorted(
        Path(root, name).relative_to(folder).as_posix()
        for root, folders, names in os.walk(folder)
        for name in (*names, *(one for one in folders if os.path.islink(os.path.join(root, one))))
    )


def intact(folder: Path, but: Collection[str] = ()) -> bool:
    """Return whether the bundle is complete and every file has the digest in the manifest.

    `but` are files that are being replaced: they and `_SUCCESS` are not checked.
    """
    if not but and not digest(folder):
        return False
    try:
        manifest = listed_in(read_below(folder, MANIFEST, LARGEST_MANIFEST).decode())
        listed = {name: sha for name, sha in manifest.items() if name not in but}
        existing = [name for name in files(folder) if name not in (*_UNLISTED, *but)]
        return existing == sorted(listed) and all(
            _sha256_below(folder, name) == sha for name, sha in listed.items()
        )
    except (OSError, ValueError):
        return False


def _sha256_below(folder: Path, name: str) -> str:
    with open_below(folder, name) as file:
        return sha256_of(file)


def listed_in(manifest: str) -> dict[str, str]:
    """Return the SHA-256 of each file in the text of a manifest, by name."""
    parts = (line.partition("  ") for line in manifest.splitlines())
    return {name: sha for sha, _, name in parts}


@contextmanager
def replacing(run_dir: Path) -> Iterator[Path]:
    """Yield a new folder that becomes `<run_dir>/bundle` when the block succeeds.

    Manifest and `_SUCCESS` are written last, after all files are synced to disk. Folders that a
    killed step left behind are removed; those that another step works on are locked and remain.

    Raises:
        InputError: the folder cannot be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        for left in run_dir.glob(f"{_ASIDE}*"):
            _remove_unused(left)
        aside, lock = _locked_folder(run_dir)
    except OSError as error:
        raise _unwritable(run_dir, error) from None
    try:
        folder = aside / NAME
        folder.mkdir()
        yield folder
        seal(folder)
        folder.chmod(0o755)
        _put_in_place(folder, run_dir / NAME)
        fsync(run_dir)
    except OSError as error:
        raise _unwritable(run_dir, error) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        os.close(lock)


def _locked_folder(run_dir: Path) -> tuple[Path, int]:
    """Return a new folder beside the bundle, and a descriptor; closing it releases the lock."""
    while True:
        aside = Path(tempfile.mkdtemp(prefix=_ASIDE, dir=run_dir))
        try:
            lock = _lock(aside)
        except (FileNotFoundError, BlockingIOError):
            continue  # another step is removing it
        except OSError:  # no locks on this file system, so no step removes it either
            return aside, os.open(aside, os.O_RDONLY)
        if (aside / _LOCK).exists():
            return aside, lock
        os.close(lock)


def _remove_unused(left: Path) -> None:
    """Remove a folder that is not locked; one that cannot be read remains."""
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


def _put_in_place(folder: Path, target: Path) -> None:
    """Rename a folder to `target`; an existing one moves aside, to be deleted."""
    for number in range(100):  # another step may rename its own in between
        with suppress(FileNotFoundError):
            target.rename(folder.with_name(f"old-{number}"))
        try:
            folder.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        else:
            return
    raise OSError(errno.EBUSY, "others write it at the same time", str(target))


def seal(folder: Path) -> str:
    """Sync all files, write the manifest, then `_SUCCESS`; return the digest."""
    (folder / SIGNATURE).unlink(missing_ok=True)  # of the earlier content
    names = files(folder)
    for name in names:
        (folder / name).chmod(0o644)  # safetensors writes for its owner alone
        fsync(folder / name)
    lines = [f"{sha256(folder / name)}  {name}\n" for name in names]
    (folder / MANIFEST).write_text("".join(lines), encoding="utf-8")
    fsync(folder / MANIFEST)
    manifest_digest = sha256(folder / MANIFEST)
    (folder / SUCCESS).write_text(manifest_digest + "\n")
    fsync(folder / SUCCESS)
    for inner in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
        fsync(inner)
    return manifest_digest


def upload(folder: Path, name: str, where: Store) -> str:
    """Copy a bundle to `<where>/<name>/<version>/`, `_SUCCESS` last; return that URI.

    The version is a digest of the content, so a second upload changes nothing.

    Raises:
        InputError: a file cannot be written or arrives different.
    """
    target = f"{name}/{version(folder)}"
    names = [n for n in files(folder) if n not in (MANIFEST, SUCCESS)]
    for file in (*names, MANIFEST, SUCCESS):
        where.put(folder / file, f"{target}/{file}")
    return f"{where.uri}/{target}"


def write_json(path: Path, content: Mapping[str, Any] | list[str]) -> None:
    """Write indented JSON; refuse numbers that are not finite."""
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def key(content: Mapping[str, Any]) -> str:
    """Return a digest of a bundle's inputs; if it is unchanged, the bundle is reused."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _unwritable(run_dir: Path, error: OSError) -> InputError:
    return InputError(
        f"the bundle cannot be written to {run_dir}: {error.strerror or error}; "
        "make run_dir writable and give it room for three times the weights"
    )

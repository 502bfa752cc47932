"""A bundle: a model's files under one manifest, complete only when `_SUCCESS` exists."""

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kfp_ddp.core.errors import InputError, KfpDdpError, StorageError, writing
from kfp_ddp.core.files import closing_descriptor, fsync, lock, open_lock, sha256
from kfp_ddp.core.run_folder import REPORT, VERDICT, RunFolder
from kfp_ddp.core.settings import first_fault, mapping_in
from kfp_ddp.storage.folder import Folder
from kfp_ddp.storage.store import Store

NAME = RunFolder.BUNDLE
WEIGHTS = "model.safetensors"
ONNX = "model.onnx"
PROGRAM = "model.pt2"
CODE = "network.py"
"""The source file of a custom network, for information."""
CLASSES = "classes.json"
INTERFACE = "signature.json"
METRICS = "metrics.json"
CONFIG = "config.json"
PROVENANCE = "provenance.json"
REFERENCE = "reference.csv"
"""What the network computes for a sample of the evaluated images."""
PARITY = "parity.json"
LATENCY = "latency.json"
INFRA = "infra.json"
VARIANTS = "variants.json"
"""The further forms; a bundle for which none was requested lacks it."""
LINEAGE = "lineage.json"
"""The run of a published bundle."""
PUBLISHED = frozenset({LINEAGE, VERDICT, REPORT})
"""The files that publishing adds to an exported bundle."""
REQUEST = "sample/request.json"
RESPONSE = "sample/response.json"
"""A request of the v2 protocol, and the expected answer."""
MANIFEST = "MANIFEST.sha256"
SUCCESS = "_SUCCESS"
DELETING = "_DELETING"
"""A version with this file is being deleted, unless CHAMPION names it; it names who deletes."""
SIGNATURE = "model.sig"
"""Signs all files and the two above, so no manifest lists it."""
_UNLISTED = (MANIFEST, SUCCESS, SIGNATURE)
# Limits in bytes.
LARGEST_MANIFEST = 1 << 20
LARGEST_SUCCESS = 100
LARGEST_SIGNATURE = 4 << 20
LARGEST_CONFIG = 16 << 20
"""Also of other JSON files."""
LARGEST_MODEL = 16 << 30
_LARGEST_FILE = 1 << 40
_ASIDE = f".{NAME}-"
_LOCK = "lock"
_UPLOADS = 3
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")  # of `atomic_write`
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Bundle:
    """A bundle whose manifest is read once, and each file checked; InputError if it is damaged."""

    where: Store
    folder: str
    """Below `where`: empty, or with a slash at its end."""
    title: str
    """What error messages call it, such as "the champion"."""
    advice: str
    """What to do if it is damaged, for error messages."""
    manifest: bytes | None
    """Content of the manifest; None for no bundle."""
    success: bytes | None
    model: str = ""
    """Name of the model's folder in which it is the champion; '' at another address."""

    @classmethod
    def at(
        cls,
        where: Store,
        folder: str = "",
        title: str = "the bundle",
        advice: str = "export it again",
        *,
        sealed: bool = True,
    ) -> "Bundle":
        """Return the bundle at a location, complete if `sealed`; without a manifest for none."""
        manifest = where.read(folder + MANIFEST, LARGEST_MANIFEST)
        success = where.read(folder + SUCCESS, LARGEST_SUCCESS)
        bundle = cls(where, folder, title, advice, manifest, success)
        if not sealed:
            return bundle
        if manifest is None and success is not None:
            raise bundle.damaged(f"{MANIFEST} is missing")
        digest = (success or b"").decode(errors="replace").strip()
        if digest != bundle.digest:
            raise bundle.damaged(f"{SUCCESS} is not the digest of {MANIFEST}")
        return bundle

    @cached_property
    def listed(self) -> Mapping[str, str]:
        """SHA-256 of each file by name; empty without a manifest."""
        lines = (self.manifest or b"").decode(errors="replace").splitlines()
        parts = (line.partition("  ") for line in lines)
        return {name: sha for sha, _, name in parts}

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the manifest; '' without one."""
        return "" if self.manifest is None else hashlib.sha256(self.manifest).hexdigest()

    @cached_property
    def signature(self) -> bytes | None:
        """Content of `SIGNATURE`; None if the bundle is not signed."""
        return self.where.read(self.folder + SIGNATURE, LARGEST_SIGNATURE)

    @property
    def signed_files(self) -> dict[str, str]:
        """SHA-256 of each file that a signature covers."""
        own = {MANIFEST: self.manifest or b"", SUCCESS: self.success or b""}
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in own.items()}
        return {**self.listed, **digests}

    @property
    def version(self) -> str:
        """The version under which it is uploaded; '' without a manifest."""
        return self.digest[:12]

    @property
    def exported_version(self) -> str:
        """The version before publishing added its files."""
        lines = (f"{sha}  {name}\n" for name, sha in self.listed.items() if name not in PUBLISHED)
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:12]

    @property
    def uri(self) -> str:
        """The URI of the bundle."""
        return f"{self.where.uri}/{self.folder}".rstrip("/")

    @cached_property
    def model_name(self) -> str:
        """The model's name, as in `serving/<name>/1/model.onnx`; without ONNX it is in `CONFIG`."""
        for name in self.listed:
            parts = name.split("/")
            if len(parts) > 2 and parts[0] == "serving":
                return parts[1]
        value: Any = mapping_in(self.read(CONFIG, LARGEST_CONFIG))
        for key in ("export", "made_of", "model_name"):
            value = value.get(key) if isinstance(value, dict) else None
        return "model" if value is None else str(value)

    def read(self, name: str, limit: int) -> bytes | None:
        """Return a file of at most `limit` bytes; None if it does not exist and is not listed."""
        content = self.where.read(self.folder + name, limit)
        if content is not None:
            self.check(name, hashlib.sha256(content).hexdigest())
        elif name in self.listed:
            raise self.damaged(f"{name} is missing")
        return content

    def record(self, name: str, model: type[M], limit: int = LARGEST_CONFIG) -> M | None:
        """Return a JSON file as a record; None if it does not exist."""
        content = self.read(name, limit)
        try:
            return None if content is None else model.model_validate_json(content)
        except ValidationError as error:
            raise self.damaged(f"{name} is invalid: {first_fault(error)}") from None

    def lineage(self) -> Mapping[str, Any]:
        """Return its lineage, empty if it was not published."""
        return mapping_in(self.read(LINEAGE, LARGEST_CONFIG))

    def check(self, name: str, digest: str) -> None:
        """Refuse a file whose SHA-256 is not the listed one; without a manifest, accept any."""
        if self.manifest is not None and self.listed.get(name) != digest:
            raise self.damaged(f"{name} is not what {MANIFEST} lists")

    def verify(self, but: Collection[str] = ()) -> int:
        """Read all files but some, refuse entries such as a link; return the size in bytes."""
        if self.manifest is None:
            raise self.damaged(f"{MANIFEST} is missing")
        start = len(self.folder)
        existing = {name[start:] for name in self.where.entries(self.folder)}
        unlisted = existing - self.listed.keys() - {*_UNLISTED, *but}
        if unlisted:
            raise self.damaged(f"{min(unlisted)} is not in {MANIFEST}")
        size = 0
        for name in self.listed.keys() - set(but):
            file: Any = _Digest()
            path = self.folder + name
            if name not in existing or not self.where.fetch(path, file, _LARGEST_FILE):
                raise self.damaged(f"{name} is missing")
            self.check(name, file.digest.hexdigest())
            size += file.size
        return size

    def damaged(self, what: str) -> InputError:
        """Return the error for a bundle with a missing or changed file."""
        return InputError(f"{self.title} {self.uri} is damaged: {what}; {self.advice}")


class _Digest:
    """A file for `fetch`, which hashes the content and keeps none of it."""

    def __init__(self) -> None:
        self.seek(0)

    def write(self, block: bytes) -> int:
        self.digest.update(block)
        self.size += len(block)
        return len(block)

    def seek(self, start: int) -> int:
        # Each attempt to fetch starts at 0.
        self.digest = hashlib.sha256()
        self.size = 0
        return start

    def truncate(self) -> int:
        return 0

    def tell(self) -> int:
        return self.size


def local_bundle(folder: Path, *, sealed: bool = True) -> Bundle:
    """Return the bundle in a local folder; arguments and errors as of `Bundle.at`."""
    return Bundle.at(Folder(folder, str(folder)), sealed=sealed)


def version(folder: Path) -> str:
    """Return the version of a complete bundle."""
    return local_bundle(folder).version


def files(folder: Path) -> list[str]:
    """Return the names of all files and links below `folder`, sorted, with forward slashes."""
    return sorted(name for name in Folder(folder, str(folder)).entries("") if name[-1] != "/")


def intact(folder: Path, but: Collection[str] = ()) -> bool:
    """Return whether the bundle is complete and intact; `but` are files that are being replaced."""
    with suppress(KfpDdpError):
        local_bundle(folder, sealed=not but).verify(but)
        return True
    return False


@contextmanager
def replacing(run_dir: Path) -> Iterator[Path]:
    """Yield a new, locked folder that becomes `<run_dir>/bundle` if the block succeeds."""
    with writing(run_dir, "make it writable and give it room for three times the weights"):
        run_dir.mkdir(parents=True, exist_ok=True)
        clean_up(run_dir)
        aside, descriptor = _locked_folder(run_dir)
        try:
            folder = aside / NAME
            folder.mkdir()
            yield folder
            seal(folder)
            folder.chmod(0o755)
            _put_in_place(folder, run_dir / NAME)
            fsync(run_dir)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            os.close(descriptor)


def _locked_folder(run_dir: Path) -> tuple[Path, int]:
    """Return a new folder beside the bundle, and a descriptor; closing it releases the lock."""
    while True:
        aside = Path(tempfile.mkdtemp(prefix=_ASIDE, dir=run_dir))
        try:
            descriptor = _lock(aside)
        except OSError:
            continue  # another step is removing it
        except StorageError:  # no locks on this file system, so no step removes it either
            return aside, os.open(aside, os.O_RDONLY)
        if (aside / _LOCK).exists():
            return aside, descriptor
        os.close(descriptor)


def clean_up(run_dir: Path) -> None:
    """Remove the folders of killed steps; a bundle that one of them had moved aside returns."""
    for aside in run_dir.glob(f"{_ASIDE}*"):
        with suppress(OSError, StorageError):  # another step works on it, or removed it
            if not stat.S_ISDIR(aside.lstat().st_mode):
                continue
            with closing_descriptor(_lock(aside)):
                earlier = max(aside.glob("old-*"), default=None)
                if earlier is not None and not os.path.lexists(run_dir / NAME):
                    earlier.rename(run_dir / NAME)
                shutil.rmtree(aside, ignore_errors=True)


def _lock(aside: Path) -> int:
    descriptor = open_lock(aside / _LOCK, 0o600)
    with ExitStack() as closing:
        closing.callback(os.close, descriptor)
        if not lock(descriptor, aside):
            raise BlockingIOError
        closing.pop_all()
    return descriptor


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
    folders = [path for path in folder.rglob("*") if path.is_dir()]
    for changed in (folder, *folders):
        fsync(changed)
    return manifest_digest


def upload(folder: Path, model: str, where: Store) -> str:
    """Copy a bundle to `<where>/<model>/<version>/`, `_SUCCESS` last; return that URI.

    Raise StorageError if the version is being deleted.
    """
    target = f"{model}/{version(folder)}"
    mark = f"{target}/{DELETING}"
    names = sorted(files(folder), key=lambda name: (name == SUCCESS, name == MANIFEST))
    copies = {f"{target}/{name}" for name in names}
    for entry in where.entries(f"{target}/"):
        if _TEMPORARY.fullmatch(entry.rpartition("/")[2]):
            where.delete(entry)
    for _ in range(_UPLOADS):
        if where.exists(mark):
            break
        for name in names:
            where.put(folder / name, f"{target}/{name}")
        # A deletion may have begun, or ended, since the first file was copied.
        entries = set(where.entries(f"{target}/"))
        if copies <= entries and mark not in entries:
            return f"{where.uri}/{target}"
    raise StorageError(
        f"{where.uri}/{target} is being deleted, so it cannot be published: wait for that and run "
        "the step again; kfp-ddp gc completes a deletion that was interrupted"
    )


def write_json(path: Path, content: Mapping[str, Any] | list[str]) -> None:
    """Write indented JSON; refuse numbers that are not finite."""
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")

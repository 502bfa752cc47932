"""A place that results go to and come from: a folder, `file://` or `gs://bucket/prefix`.

Writing is verified end to end, and a name that is there with the same content stays as it is.
"""

import base64
import hashlib
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from kfp_ddp.base.errors import InputError
from kfp_ddp.base.files import atomic_write

R = TypeVar("R")
_SECONDS = (10.0, 300.0)  # to connect, and between two answers
_PATIENCE = 60.0  # over all tries of one request
_BLOCK = 1 << 20


class Destination(Protocol):
    """Files under relative names with forward slashes."""

    uri: str

    def prepare(self) -> None:
        """Raise InputError if nothing can be written here, before there is anything to write."""

    def read(self, name: str) -> bytes | None:
        """The content of a file, None if there is none. Raises InputError if it cannot be had."""

    def put(self, file: Path, name: str) -> bool:
        """Store a copy of `file`, verified; False if it was there already. Raises InputError."""


def open_destination(uri: str) -> Destination:
    """The place that `uri` names.

    Raises:
        InputError: for a scheme that is not one of ours, or a URI without bucket.
    """
    scheme, rest = uri.split("://", 1) if "://" in uri else ("", uri)
    if scheme == "gs":
        return Bucket(uri)
    if scheme == "file":
        parts = urlsplit(uri)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise InputError(f"{uri} is not a file URI; write file:///folder with three slashes")
        return Folder(Path(unquote(parts.path)), uri)
    if scheme:
        raise InputError(f"{uri} cannot be used: give gs://bucket/prefix, file:///folder or a path")
    if not rest.strip():
        raise InputError("an empty path names no place: give gs://bucket/prefix or a folder")
    return Folder(Path(uri), uri)


class Folder:
    """A folder of a file system."""

    def __init__(self, root: Path, uri: str) -> None:
        self.root = root
        self.uri = uri.rstrip("/") or "/"

    def prepare(self) -> None:
        """Make the folder and try a file in it."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.root, prefix=".probe-"):
                pass
        except OSError as error:
            raise self._unwritable(error) from None

    def read(self, name: str) -> bytes | None:
        """The content of a file, None if it or its folder is not there."""
        try:
            return (self.root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise InputError(
                f"{self.root / name} cannot be read: {error.strerror}; check its path and rights"
            ) from None

    def put(self, file: Path, name: str) -> bool:
        """Copy through a temporary name, so that a file with its own name is whole."""
        target = self.root / name
        wanted = sha256(file)
        try:
            if target.is_file() and sha256(target) == wanted:
                return False
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
            with atomic_write(target, part) as out, file.open("rb") as source:
                shutil.copyfileobj(source, out, _BLOCK)
                out.flush()
                if sha256(part) != wanted:
                    raise InputError(f"{target} came out different from {file}: check the disk")
                part.chmod(0o644)
        except OSError as error:
            raise self._unwritable(error) from None
        return True

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(
            f"{self.root} cannot be written: {error.strerror}; "
            "give a folder with rights and room for this user"
        )


class Bucket:
    """A prefix of a Google Cloud Storage bucket; STORAGE_EMULATOR_HOST is respected."""

    def __init__(self, uri: str) -> None:
        bucket, _, prefix = uri.removeprefix("gs://").partition("/")
        if not bucket:
            raise InputError(f"{uri} names no bucket: write gs://bucket/prefix")
        self.name = bucket
        self.prefix = prefix.strip("/")
        self.uri = f"gs://{bucket}/{self.prefix}".rstrip("/")
        self._handle: Any = None

    def prepare(self) -> None:
        """Ask for one name under the prefix, which tells a missing bucket from an empty one."""
        self._call(self._probe, "listed")

    def read(self, name: str) -> bytes | None:
        """The content of an object; None if there is none, an error if there is no bucket."""
        from google.api_core.exceptions import NotFound

        def ask() -> bytes | None:
            blob = self._bucket().blob(self._key(name))
            try:
                # A single shot: resumed reads are not checked against the object's crc32c.
                data: bytes = blob.download_as_bytes(single_shot_download=True, **_options())
            except NotFound:
                self._probe()
                return None
            return data

        return self._call(ask, "read")

    def put(self, file: Path, name: str) -> bool:
        """Upload against the generation that was seen, and compare crc32c with what arrived."""
        wanted = crc32c(file)

        def ask() -> bool:
            bucket = self._bucket()
            there = bucket.get_blob(self._key(name), **_options())
            if there is not None and there.crc32c == wanted and there.size == file.stat().st_size:
                return False
            blob = bucket.blob(self._key(name))
            generation = there.generation if there is not None else 0
            blob.upload_from_filename(
                str(file), checksum="crc32c", if_generation_match=generation, **_options()
            )
            if blob.crc32c != wanted:
                raise InputError(
                    f"{self.uri}/{name} arrived with crc32c {blob.crc32c}, sent was {wanted}: "
                    "the transfer is damaged; run the step again"
                )
            return True

        return self._call(ask, "written")

    def _probe(self) -> None:
        from google.api_core.exceptions import Forbidden

        try:
            list(self._bucket().list_blobs(max_results=1, prefix=self.prefix, **_options()))
        except Forbidden:
            return  # rights to list are not needed, and a write will tell

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def _bucket(self) -> Any:
        if self._handle is None:
            from google.cloud import storage

            self._handle = storage.Client().bucket(self.name)
        return self._handle

    def _call(self, ask: Callable[[], R], what: str) -> R:
        from google.api_core import exceptions
        from google.auth.exceptions import GoogleAuthError
        from google.cloud.storage.exceptions import DataCorruption

        try:
            return ask()
        except exceptions.NotFound:
            problem = f"the bucket gs://{self.name} is not there: make it or correct its name"
        except (exceptions.Forbidden, exceptions.Unauthorized) as error:
            problem = (
                f"{self.uri} may not be {what}: {_line(error)}; give the step's service account "
                "the role storage.objectUser on the bucket"
            )
        except exceptions.PreconditionFailed:
            problem = f"{self.uri} was changed by another writer meanwhile: run the step again"
        except DataCorruption as error:
            problem = f"a transfer of {self.uri} is damaged: {_line(error)}; run the step again"
        except GoogleAuthError as error:
            problem = (
                f"there are no credentials for {self.uri}: {_line(error)}; use Workload Identity "
                "or set GOOGLE_APPLICATION_CREDENTIALS"
            )
        except (exceptions.GoogleAPIError, OSError) as error:
            problem = (
                f"{self.uri} cannot be {what}: {_line(error)}; check the network, then run again"
            )
        raise InputError(problem)


def sha256(file: Path) -> str:
    """SHA-256 of a file, in hex."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def crc32c(file: Path) -> str:
    """CRC-32C of a file as Google Cloud Storage writes it: big-endian, base64."""
    import google_crc32c

    checksum = 0
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK):
            checksum = google_crc32c.extend(checksum, block)
    return base64.b64encode(checksum.to_bytes(4, "big")).decode()


def _options() -> dict[str, Any]:
    """Time limits, and repeats that are safe: writes carry a generation to match."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    return {"timeout": _SECONDS, "retry": DEFAULT_RETRY.with_timeout(_PATIENCE)}


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]

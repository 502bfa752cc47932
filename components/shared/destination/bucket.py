"""Results in a bucket of Google Cloud Storage."""

import base64
import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from kfp_ddp.base.errors import InputError, StorageError
from kfp_ddp.components.shared.destination import place
from kfp_ddp.components.shared.destination.place import (
    BLOCK,
    CHANGED,
    SMALL,
    Bounded,
    Change,
    Destination,
)

R = TypeVar("R")
_SECONDS = (10.0, 300.0)  # to connect, and between two answers
_TRIES = 20  # to change an object before another writer does


class Bucket(Destination):
    """A prefix of a Google Cloud Storage bucket; STORAGE_EMULATOR_HOST is respected."""

    def __init__(self, uri: str) -> None:
        bucket, _, prefix = uri.removeprefix("gs://").partition("/")
        if not bucket:
            raise InputError(f"{uri} names no bucket: write gs://bucket/prefix")
        self.name = bucket
        self.prefix = prefix.strip("/")
        self.uri = f"gs://{bucket}/{self.prefix}".rstrip("/")
        self.place = self.uri
        self._handle: Any = None

    def prepare(self) -> None:
        """Ask for one name under the prefix, which tells a missing bucket from an empty one."""
        self._call(self._probe, "listed")

    def fetch(self, name: str, into: BinaryIO, limit: int) -> bool:
        """Copy an object's content; False if there is none, an error if there is no bucket."""
        from google.api_core.exceptions import NotFound

        def ask() -> bool:
            try:
                self._download(self._bucket().blob(self._key(name)), into, limit)
            except NotFound:
                self._probe()
                return False
            return True

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

    def update(self, name: str, change: Change) -> None:
        """Write against the generation that was read."""
        from google.api_core.exceptions import NotFound, PreconditionFailed

        def attempt() -> bool:
            """Whether no other writer came first."""
            bucket, found = self._bucket(), io.BytesIO()
            there = bucket.get_blob(self._key(name), **_options())
            generation = 0 if there is None else there.generation
            try:
                if there is not None:
                    self._download(there, found, SMALL, if_generation_match=generation)
                content = change(None if there is None else found.getvalue())
                if content is not None:
                    bucket.blob(self._key(name)).upload_from_string(
                        content, checksum="crc32c", if_generation_match=generation, **_options()
                    )
            except PreconditionFailed:
                return False
            except NotFound:
                if there is None:
                    raise
                return False
            return True

        if not any(self._call(attempt, "written") for _ in range(_TRIES)):
            raise StorageError(f"{self.uri}/{name} {CHANGED}")

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Page by page, which one call reads whole."""
        start = len(self._key(""))

        def ask() -> list[tuple[str, int]]:
            found = self._bucket().list_blobs(
                prefix=self._key(prefix), fields="items(name,size),nextPageToken", **_options()
            )
            return [(blob.name[start:], blob.size) for blob in found]

        yield from self._call(ask, "listed")

    def delete(self, name: str) -> None:
        """Delete the live object; one that is not there is what was asked for."""
        from google.api_core.exceptions import NotFound

        def ask() -> None:
            with contextlib.suppress(NotFound):
                self._bucket().blob(self._key(name)).delete(**_options())

        self._call(ask, "deleted")

    def _download(self, blob: Any, into: BinaryIO, limit: int, **conditions: Any) -> None:
        """Copy an object as it is stored, and compare crc32c, also where it took several tries."""
        from google.cloud.storage.exceptions import DataCorruption

        bounded = Bounded(into, limit, f"gs://{self.name}/{blob.name}")
        blob.download_to_file(bounded, raw_download=True, **conditions, **_options())
        if blob.crc32c and blob.crc32c != _base64(bounded.crc):
            raise DataCorruption(None, f"crc32c of {blob.name} is not {blob.crc32c}")

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
            problem = f"{self.uri} {CHANGED}"
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


def crc32c(file: Path) -> str:
    """CRC-32C of a file as Google Cloud Storage writes it: big-endian, base64."""
    import google_crc32c

    checksum = 0
    with file.open("rb") as opened:
        while block := opened.read(BLOCK):
            checksum = google_crc32c.extend(checksum, block)
    return _base64(checksum)


def _base64(checksum: int) -> str:
    return base64.b64encode(checksum.to_bytes(4, "big")).decode()


def _options() -> dict[str, Any]:
    """Time limits, and repeats that are safe: writes carry a generation to match."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    return {"timeout": _SECONDS, "retry": DEFAULT_RETRY.with_timeout(place.PATIENCE)}


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]

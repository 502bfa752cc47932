"""Results in a bucket of Google Cloud Storage."""

import base64
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeVar

from kfp_ddp.core.errors import InputError, StorageError, UnavailableError
from kfp_ddp.storage.destination import place
from kfp_ddp.storage.destination.bucket import Bucket, Found, Lost
from kfp_ddp.storage.destination.place import BLOCK, CHANGED, Bounded
from kfp_ddp.storage.retry import is_temporary

R = TypeVar("R")
_SECONDS = (10.0, 300.0)  # to connect, and between two answers


class GcsBucket(Bucket):
    """A prefix of a Google Cloud Storage bucket; STORAGE_EMULATOR_HOST is respected."""

    scheme = "gs"

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self._handle: Any = None

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Page by page, which one call reads whole."""
        start = len(self._key(""))

        def ask() -> list[tuple[str, int]]:
            found = self._bucket().list_blobs(
                prefix=self._key(prefix), fields="items(name,size),nextPageToken", **_options()
            )
            return [(blob.name[start:], blob.size) for blob in found]

        yield from self._call("listed", ask)

    def delete(self, name: str) -> None:
        """Delete the live object; one that is not there is what was asked for."""
        from google.api_core.exceptions import NotFound

        def ask() -> None:
            with contextlib.suppress(NotFound):
                self._bucket().blob(self._key(name)).delete(**_options())

        self._call("deleted", ask)

    def _digest(self, content: BinaryIO) -> str:
        """CRC-32C as Google Cloud Storage writes it."""
        return crc32c(content)

    def _look(self, name: str) -> Found | None:
        blob = self._bucket().get_blob(self._key(name), **_options())
        return blob and Found(blob.size, blob.crc32c, str(blob.generation))

    def _load(self, name: str, into: BinaryIO, limit: int, tag: str) -> bool:
        """Compare crc32c with what arrived, also where it took several tries."""
        from google.api_core.exceptions import NotFound, PreconditionFailed
        from google.cloud.storage.exceptions import DataCorruption

        bounded = Bounded(into, limit, f"{self.uri}/{name}")
        blob = self._bucket().blob(self._key(name))
        condition = {"if_generation_match": int(tag)} if tag else {}
        try:
            blob.download_to_file(bounded, raw_download=True, **condition, **_options())
        except PreconditionFailed:
            raise Lost from None
        except NotFound:
            if not tag:
                self._probe()
            return False
        if blob.crc32c and blob.crc32c != _base64(bounded.crc):
            raise DataCorruption(None, f"crc32c of {blob.name} is not {blob.crc32c}")
        return True

    def _store(self, name: str, content: BinaryIO, size: int, digest: str, tag: str) -> None:
        """Upload against the generation, and compare crc32c with what arrived."""
        from google.api_core.exceptions import NotFound, PreconditionFailed

        blob = self._bucket().blob(self._key(name))
        try:
            blob.upload_from_file(
                content,
                size=size,
                checksum="crc32c",
                if_generation_match=int(tag or 0),
                **_options(),
            )
        except PreconditionFailed:
            raise Lost from None
        except NotFound:
            if tag:
                raise Lost from None
            raise
        if blob.crc32c != digest:
            raise StorageError(
                f"{self.uri}/{name} arrived with crc32c {blob.crc32c}, sent was {digest}: "
                "the transfer is damaged; run the step again"
            )

    def _probe(self) -> None:
        """Tell a missing bucket from an empty one."""
        from google.api_core.exceptions import Forbidden

        with contextlib.suppress(Forbidden):  # rights to list are not needed
            list(self._bucket().list_blobs(max_results=1, prefix=self.prefix, **_options()))

    def _bucket(self) -> Any:
        if self._handle is None:
            from google.cloud import storage

            self._handle = storage.Client().bucket(self.name)
        return self._handle

    def _call(self, what: str, ask: Callable[[], R]) -> R:
        from google.api_core import exceptions
        from google.auth.exceptions import GoogleAuthError
        from google.cloud.storage.exceptions import DataCorruption

        try:
            return ask()
        except exceptions.NotFound:
            raise InputError(
                f"the bucket gs://{self.name} is not there: make it or correct its name"
            ) from None
        except (exceptions.Forbidden, exceptions.Unauthorized) as error:
            raise InputError(
                f"{self.uri} may not be {what}: {_line(error)}; give the step's service account "
                "the role storage.objectUser on the bucket"
            ) from None
        except Lost:
            raise StorageError(f"{self.uri} {CHANGED}") from None
        except DataCorruption as error:
            raise StorageError(
                f"a transfer of {self.uri} is damaged: {_line(error)}; run the step again"
            ) from None
        except GoogleAuthError as error:
            if error.retryable:
                raise self._unavailable(what, error) from None
            raise InputError(
                f"there are no credentials for {self.uri}: {_line(error)}; use Workload Identity "
                "or set GOOGLE_APPLICATION_CREDENTIALS"
            ) from None
        except exceptions.GoogleAPICallError as error:
            if is_temporary(error.code):
                raise self._unavailable(what, error) from None
            raise InputError(
                f"{self.uri} cannot be {what}: {_line(error)}; check the name of the bucket"
            ) from None
        except (exceptions.GoogleAPIError, OSError) as error:
            raise self._unavailable(what, error) from None

    def _unavailable(self, what: str, error: Exception) -> UnavailableError:
        return UnavailableError(
            f"{self.uri} cannot be {what}: {_line(error)}; check the network, then run again"
        )


def crc32c(content: BinaryIO) -> str:
    """CRC-32C of an open file's rest as Google Cloud Storage writes it: big-endian, base64."""
    import google_crc32c

    checksum = 0
    while block := content.read(BLOCK):
        checksum = google_crc32c.extend(checksum, block)
    return _base64(checksum)


def _base64(checksum: int) -> str:
    return base64.b64encode(checksum.to_bytes(4, "big")).decode()


def _options() -> dict[str, Any]:
    """Time limits, and repeats that are safe: writes carry a generation to match."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    return {"timeout": _SECONDS, "retry": DEFAULT_RETRY.with_timeout(place.PATIENCE)}


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200].rstrip(".")

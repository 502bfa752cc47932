"""S3 and what speaks like it, through boto3.

The listing gives no crc32c, so the ETag stands for the content: downloads are pinned to it
(If-Match), and checked with the checksum that the store sends (boto3 does that), with the SHA-256
that a destination of ours left beside the object or the ETag as MD5 where it is one, and with the
size in any case. Multipart and SSE-KMS objects without any of these have size and ETag only. The
crc32c that is computed on the way goes into the
manifest, so later checks of the files are as strict as for any source.
"""

import hashlib
from concurrent.futures import Executor
from typing import Any

from kfp_ddp.core.errors import InputError, KfpDdpError
from kfp_ddp.storage.destination.s3 import (
    as_nobody,
    code_of,
    expected,
    failed,
    forbidden,
    s3_client,
)
from kfp_ddp.storage.http.origin import Origin
from kfp_ddp.storage.listing import Listing
from kfp_ddp.storage.sources import Changed, Entry, Transient, check_end
from kfp_ddp.storage.sources.blocking import BlockingReader, Stream

_GONE = frozenset({"404", "NoSuchKey", "412", "PreconditionFailed"})
_ATTEMPTS = 8


class S3Source:
    """A prefix of a bucket; AWS_ENDPOINT_URL_S3 and the usual configuration apply."""

    resumes = False
    """A part cannot be checked, so a broken body starts again."""

    def __init__(self, url: str, bucket: str, prefix: str, timeout: float) -> None:
        self.url = url
        self.max_workers = 256
        self._bucket, self._prefix = bucket, prefix
        self._settings: dict[str, Any] = {
            "max_pool_connections": self.max_workers,
            "connect_timeout": timeout,
            "read_timeout": timeout,
            "response_checksum_validation": "when_supported",
            "retries": {"max_attempts": _ATTEMPTS, "mode": "standard"},
        }
        self._client = s3_client(f"source {url}", **self._settings)

    @property
    def exposed(self) -> bool:
        """See `Source.exposed`."""
        return Origin.of(self._client.meta.endpoint_url).exposed

    def listing(self) -> Listing:
        """List the prefix, 1,000 objects a page; see `Source.listing`."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            found = self._list_as_anybody()
        except ClientError as error:
            raise self._refused(error) from error
        except BotoCoreError as error:
            raise failed(f"cannot list {self.url}", error) from error
        if not found:
            raise InputError(
                f"{self.url} holds no objects below {self._prefix or '/'!r}; "
                "check the prefix and that the upload is done"
            )
        return found

    def _list_as_anybody(self) -> Listing:
        """An account may be refused what everybody may read: then without it."""
        from botocore.exceptions import ClientError

        signed = self._client
        try:
            return self._list()
        except ClientError as error:
            if not forbidden(error) or as_nobody(signed):
                raise
            self._client = s3_client(self.url, anonymous=True, **self._settings)
            try:
                return self._list()
            except ClientError:
                self._client = signed
                raise error from None

    def _list(self) -> Listing:
        found, start = Listing(), len(self._prefix)
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix
        )
        for number, page in enumerate(pages):
            for item in page.get("Contents", []):
                name, size = item["Key"][start:], int(item["Size"])
                if not (name or size):
                    continue
                tag = item.get("ETag", "").strip('"')
                if not tag:
                    raise InputError(
                        f"{self.url} lists {name!r} without an ETag, by which its content is known:"
                        " upload it again through the store's own API"
                    )
                found.add(name, size, 0, tag=tag)
            check_end(self.url, number, found)
        return found

    def reader(self, threads: Executor) -> BlockingReader:
        """A reader; all share the client's pool of connections."""
        return BlockingReader(self._open, threads)

    def _refused(self, error: Any) -> KfpDdpError:
        code = code_of(error)
        if code == "NoSuchBucket":
            return InputError(
                f"bucket {self._bucket!r} of {self.url} does not exist; check its name"
            )
        if forbidden(error):
            return InputError(
                f"no right to list {self.url}{as_nobody(self._client)} ({code}); correct the "
                "credentials or grant s3:ListBucket"
            )
        return failed(f"cannot list {self.url}", error)

    def _open(self, entry: Entry, offset: int) -> Stream:
        """Start a download of the listed content."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            answer = self._client.get_object(
                Bucket=self._bucket,
                Key=f"{self._prefix}{entry.name}",
                IfMatch=f'"{entry.tag}"',
                ChecksumMode="ENABLED",
            )
        except ClientError as error:
            code = code_of(error)
            if code in _GONE:
                raise Changed(entry.name) from error
            if code == "InvalidObjectState":
                raise InputError(
                    f"{entry.name!r} of {self.url} lies in an archive (Glacier): restore it first, "
                    "or exclude it"
                ) from error
            if forbidden(error):
                raise InputError(
                    f"cannot read {entry.name!r} of {self.url} ({code}); grant s3:GetObject"
                ) from error
            raise Transient(code) from error
        except BotoCoreError as error:
            raise Transient(str(error)) from error
        if answer["ContentLength"] != entry.size:
            answer["Body"].close()
            raise Transient(f"length {answer['ContentLength']} instead of {entry.size}")
        return _S3Stream(answer["Body"], *expected(answer), entry.size)


class _S3Stream:
    """A stream that ends with the check of its digest, where the object has one."""

    def __init__(self, stream: Any, state: "hashlib._Hash", wanted: str, size: int) -> None:
        self._stream, self._state, self._wanted, self._left = stream, state, wanted, size

    def read(self, size: int = -1, /) -> bytes:
        from botocore.exceptions import BotoCoreError
        from botocore.httpchecksum import FlexibleChecksumError
        from urllib3.exceptions import HTTPError

        try:
            data: bytes = self._stream.read(None if size < 0 else size)
            if self._left and len(data) >= self._left:
                data += self._stream.read(1)  # finds the end, where the store's checksum is judged
        except (BotoCoreError, FlexibleChecksumError, HTTPError, OSError) as error:
            raise Transient(f"{type(error).__name__}: {error}") from error
        self._left -= len(data)
        self._state.update(data)
        if self._left <= 0 and self._wanted not in ("", self._state.hexdigest()):
            found = f"{self._state.name.upper()} {self._state.hexdigest()}"
            raise Transient(f"{found} instead of {self._wanted}")
        return data

    def close(self) -> None:
        self._stream.close()

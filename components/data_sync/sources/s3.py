"""S3 and what speaks like it, through boto3.

The listing gives no crc32c, so the ETag stands for the content: downloads are pinned to it
(If-Match), and checked with the checksum that the store sends (boto3 does that), with the ETag
as MD5 where it is one, and with the size in any case. Multipart and SSE-KMS objects without a
stored checksum have size and ETag only. The crc32c that is computed on the way goes into the
manifest, so later checks of the files are as strict as for any source.

What boto3 reads of the endpoint at once, heads and pages, it reads without a limit of ours: the
endpoint is one that who runs the cluster has chosen.
"""

import hashlib
import re
from concurrent.futures import Executor
from typing import Any

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.data_sync.http.origin import Origin
from kfp_ddp.components.data_sync.listing import Listing
from kfp_ddp.components.data_sync.sources import Changed, Entry, Transient, check_end
from kfp_ddp.components.data_sync.sources.blocking import BlockingReader, Stream

_MD5 = re.compile("[0-9a-f]{32}")
_FORBIDDEN = frozenset({"AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch"})
_GONE = frozenset({"404", "NoSuchKey", "412", "PreconditionFailed"})
_ATTEMPTS = 8


class S3Source:
    """A prefix of a bucket; AWS_ENDPOINT_URL_S3 and the usual configuration apply."""

    resumes = False
    """A part cannot be checked, so a broken body starts again."""

    def __init__(self, url: str, bucket: str, prefix: str, timeout: float) -> None:
        try:
            import boto3
            from botocore.config import Config
        except ImportError as error:
            raise InputError(f"source {url} needs boto3; pip install 'kfp-ddp[s3]'") from error
        self.url = url
        self.max_workers = 256
        self._bucket, self._prefix = bucket, prefix
        self._client: Any = boto3.client(
            "s3",
            config=Config(
                max_pool_connections=self.max_workers,
                connect_timeout=timeout,
                read_timeout=timeout,
                response_checksum_validation="when_supported",
                retries={"max_attempts": _ATTEMPTS, "mode": "standard"},
            ),
        )

    @property
    def exposed(self) -> bool:
        """See `Source.exposed`."""
        return Origin.of(self._client.meta.endpoint_url).exposed

    def listing(self) -> Listing:
        """List the prefix, 1,000 objects a page; see `Source.listing`."""
        from botocore.exceptions import BotoCoreError, ClientError

        found = Listing()
        start = len(self._prefix)
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix
        )
        try:
            for number, page in enumerate(pages):
                for item in page.get("Contents", []):
                    name, size = item["Key"][start:], int(item["Size"])
                    if name or size:
                        found.add(name, size, 0, tag=item["ETag"].strip('"'))
                check_end(self.url, number, found)
        except ClientError as error:
            raise self._refused(str(error.response["Error"]["Code"])) from error
        except BotoCoreError as error:
            raise InputError(
                f"cannot list {self.url}: {error}; check the credentials and the endpoint"
            ) from error
        if not found:
            raise InputError(
                f"{self.url} holds no objects below {self._prefix or '/'!r}; "
                "check the prefix and that the upload is done"
            )
        return found

    def reader(self, threads: Executor) -> BlockingReader:
        """A reader; all share the client's pool of connections."""
        return BlockingReader(self._open, threads)

    def _refused(self, code: str) -> InputError:
        if code == "NoSuchBucket":
            return InputError(
                f"bucket {self._bucket!r} of {self.url} does not exist; check its name"
            )
        if code in _FORBIDDEN:
            return InputError(f"no right to list {self.url} ({code}); grant s3:ListBucket")
        return InputError(f"cannot list {self.url}: {code}")

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
            code = str(error.response["Error"]["Code"])
            if code in _GONE:
                raise Changed(entry.name) from error
            if code in _FORBIDDEN:
                raise InputError(
                    f"cannot read {entry.name!r} of {self.url} ({code}); grant s3:GetObject"
                ) from error
            raise Transient(code) from error
        except BotoCoreError as error:
            raise Transient(str(error)) from error
        if answer["ContentLength"] != entry.size:
            answer["Body"].close()
            raise Transient(f"length {answer['ContentLength']} instead of {entry.size}")
        kms = "kms" in str(answer.get("ServerSideEncryption", ""))
        md5 = entry.tag if _MD5.fullmatch(entry.tag) and not kms else ""
        return _S3Stream(answer["Body"], md5, entry.size)


class _S3Stream:
    """A stream that ends with the check of its MD5, where the ETag is one."""

    def __init__(self, stream: Any, md5: str, size: int) -> None:
        self._stream, self._md5, self._left = stream, md5, size
        self._state = hashlib.md5(usedforsecurity=False)

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
        if self._left <= 0 and self._md5 and self._state.hexdigest() != self._md5:
            raise Transient(f"MD5 {self._state.hexdigest()} instead of {self._md5}")
        return data

    def close(self) -> None:
        self._stream.close()

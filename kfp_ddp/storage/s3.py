"""S3 and servers with its protocol, through boto3: a store and a source.

A listing gives no crc32c, so the ETag stands for the content. A download is pinned to it
(If-Match), and checked with the checksum that the server sends (by boto3), with the SHA-256 that
`S3Store` leaves beside an object, else with the ETag where it is an MD5, and with the size.
Multipart and SSE-KMS objects without any of these have ETag and size only. The crc32c computed
during the download goes into the manifest, for later checks of the files.
"""

import base64
import contextlib
import hashlib
import re
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any, BinaryIO, ClassVar

from kfp_ddp.core.errors import InputError, KfpDdpError, StorageError
from kfp_ddp.core.text import one_line
from kfp_ddp.storage import store
from kfp_ddp.storage.http.origin import Origin
from kfp_ddp.storage.listing import Listing
from kfp_ddp.storage.s3_client import as_anonymous, code_of, is_forbidden, problem, s3_client
from kfp_ddp.storage.source import (
    BlockingReader,
    Changed,
    Entry,
    SourceOptions,
    Stream,
    Transient,
    bucket_and_prefix,
    check_end,
    check_not_empty,
)
from kfp_ddp.storage.store import (
    BLOCK,
    BoundedWriter,
    Bucket,
    ConflictError,
    Page,
    Seen,
)

_Fields = dict[str, Any]
PART = 64 << 20
"""Bytes of a part of a multipart upload; 10,000 parts at most."""
_CONNECT, _READ = 10.0, 300.0  # seconds to connect, and between two responses
_ATTEMPTS = 8
_CONNECTIONS = 256
_MD5 = re.compile("[0-9a-f]{32}")
_MISSING = frozenset({"404", "NoSuchKey", "NotFound"})
_CONFLICT = frozenset(
    {"412", "PreconditionFailed", "409", "ConditionalRequestConflict", "NoSuchUpload"}
)
_CHANGED = frozenset({"404", "NoSuchKey", "412", "PreconditionFailed"})


class S3Store(Bucket):
    """A prefix of a bucket; AWS_ENDPOINT_URL_S3 and the usual configuration apply.

    The server checks Content-MD5 of each request. SHA-256 of the complete content is stored as
    metadata of each object, and compared with what is read.
    """

    scheme = "s3"
    many_makes: ClassVar[bool] = True

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self._handle: Any = None

    def delete(self, name: str) -> None:
        """Delete the object; see `Store.delete`."""
        self._call("delete", lambda: self._client().delete_object(**self._object(name)))

    def _pages(self, prefix: str, size: int) -> Iterator[Page]:
        start = len(self._key(""))
        pages = self._client().get_paginator("list_objects_v2")
        limit = {"PaginationConfig": {"PageSize": size}} if size else {}
        for page in pages.paginate(Bucket=self.name, Prefix=self._key(prefix), **limit):
            yield [(item["Key"][start:], int(item["Size"])) for item in page.get("Contents", [])]

    def _look(self, name: str) -> Seen | None:
        from botocore.exceptions import ClientError

        try:
            answer = self._client().head_object(**self._object(name))
        except ClientError as error:
            if code_of(error) in _MISSING:
                return None
            raise
        digest = answer["Metadata"].get("sha256", "")
        return Seen(int(answer["ContentLength"]), digest, answer["ETag"])

    def _load(self, name: str, into: BinaryIO, limit: int, tag: str) -> bool:
        """Retry a body that was cut, as boto3 does not resume it."""
        from botocore.exceptions import ClientError

        bounded = BoundedWriter(into, limit, f"{self.uri}/{name}")
        condition = {"IfMatch": tag} if tag else {}
        for tries_left in reversed(range(store.TRIES)):
            try:
                answer = self._client().get_object(
                    **self._object(name), ChecksumMode="ENABLED", **condition
                )
                _copy(answer, bounded)
                break
            except ClientError as error:
                if code_of(error) in _CONFLICT:
                    raise ConflictError from None
                if code_of(error) in _MISSING:
                    return False
                raise
            except _DamagedError as error:
                if not tries_left:
                    raise StorageError(
                        f"a transfer of {self.uri}/{name} is damaged: {error}; run the step again"
                    ) from None
                bounded.seek(0)
        return True

    def _store(self, name: str, content: BinaryIO, size: int, digest: str, tag: str) -> None:
        """Send each part with its MD5, for the server to check, and the last with the condition."""
        from botocore.exceptions import ClientError

        condition = {"IfMatch": tag} if tag else {"IfNoneMatch": "*"}
        about = {"Metadata": {"sha256": digest}}
        try:
            if size > PART:
                self._put_parts(self._object(name), about, content, condition)
            else:
                body = content.read()
                self._client().put_object(
                    **self._object(name), **about, **condition, Body=body, ContentMD5=_md5(body)
                )
        except ClientError as error:
            if code_of(error) in _CONFLICT or (tag and code_of(error) in _MISSING):
                raise ConflictError from None
            raise

    def _put_parts(
        self, target: _Fields, about: _Fields, content: BinaryIO, condition: _Fields
    ) -> None:
        client, parts = self._client(), list[_Fields]()
        upload = client.create_multipart_upload(**target, **about)["UploadId"]
        target = target | {"UploadId": upload}
        try:
            while body := content.read(PART):
                number = {"PartNumber": len(parts) + 1}
                done = client.upload_part(**target, **number, Body=body, ContentMD5=_md5(body))
                parts.append({**number, "ETag": done["ETag"]})
            client.complete_multipart_upload(
                **target, **condition, MultipartUpload={"Parts": parts}
            )
        except BaseException:
            with contextlib.suppress(Exception):
                client.abort_multipart_upload(**target)
            raise

    def _object(self, name: str) -> _Fields:
        return {"Bucket": self.name, "Key": self._key(name)}

    def _client(self) -> Any:
        if self._handle is None:
            self._handle = s3_client(
                self.uri,
                connect_timeout=_CONNECT,
                read_timeout=_READ,
                response_checksum_validation="when_supported",
                retries={"total_max_attempts": store.TRIES, "mode": "standard"},
            )
        return self._handle

    def _problem(self, verb: str, error: Exception) -> KfpDdpError | None:
        return problem(self._client(), verb, self.uri, self.root, error)


class S3Source:
    """A prefix of a bucket; AWS_ENDPOINT_URL_S3 and the usual configuration apply."""

    resumes = False
    """A part cannot be checked, so a download that was cut starts again."""

    def __init__(self, url: str, options: SourceOptions) -> None:
        self.url = url
        self.max_workers = _CONNECTIONS
        self._bucket, self._prefix = bucket_and_prefix(url)
        self._settings: dict[str, Any] = {
            "max_pool_connections": _CONNECTIONS,
            "connect_timeout": options.timeout,
            "read_timeout": options.timeout,
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
            listing = self._list_or_anonymously()
        except (BotoCoreError, ClientError) as error:
            translated = problem(self._client, "list", self.url, f"s3://{self._bucket}", error)
            raise translated or error from error
        check_not_empty(self.url, self._prefix, listing)
        return listing

    def _list_or_anonymously(self) -> Listing:
        """List without credentials what is public, but forbidden to an account of elsewhere."""
        from botocore.exceptions import ClientError

        signed = self._client
        try:
            return self._list()
        except ClientError as error:
            if not is_forbidden(error) or as_anonymous(signed):
                raise
            self._client = s3_client(self.url, anonymous=True, **self._settings)
            try:
                return self._list()
            except ClientError:
                self._client = signed
                raise error from None

    def _list(self) -> Listing:
        listing, start = Listing(), len(self._prefix)
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
                        f"{self.url} lists {name!r} without an ETag, which identifies its content:"
                        " upload it again through the store's own API"
                    )
                listing.add(name, size, 0, tag=tag)
            check_end(self.url, number, listing)
        return listing

    def reader(self, threads: Executor) -> BlockingReader:
        """Return a reader; all share the client's pool of connections."""
        return BlockingReader(self._open, threads)

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
            if code in _CHANGED:
                raise Changed(entry.name) from error
            if code == "InvalidObjectState":
                raise InputError(
                    f"{entry.name!r} of {self.url} is in an archive (Glacier): restore it first, "
                    "or exclude it"
                ) from error
            if is_forbidden(error):
                name = f"{entry.name!r} of {self.url}"
                raise store.no_permission("read", name, code, "grant s3:GetObject") from error
            raise Transient(code) from error
        except BotoCoreError as error:
            raise Transient(str(error)) from error
        if answer["ContentLength"] != entry.size:
            answer["Body"].close()
            raise Transient(f"length {answer['ContentLength']} instead of {entry.size}")
        return _S3Stream(answer["Body"], *_expected(answer), entry.size)


class _S3Stream:
    """A stream that checks the digest at its end, where the object has one."""

    def __init__(self, stream: Any, state: "hashlib._Hash", digest: str, size: int) -> None:
        self._stream, self._state, self._digest, self._left = stream, state, digest, size
        self.close = stream.close

    def read(self, size: int = -1, /) -> bytes:
        from botocore.exceptions import BotoCoreError
        from botocore.httpchecksum import FlexibleChecksumError
        from urllib3.exceptions import HTTPError

        try:
            data: bytes = self._stream.read(None if size < 0 else size)
            if self._left and len(data) >= self._left:
                data += self._stream.read(1)  # reaches the end, where boto3 checks the checksum
        except (BotoCoreError, FlexibleChecksumError, HTTPError, OSError) as error:
            raise Transient(f"{type(error).__name__}: {error}") from error
        self._left -= len(data)
        self._state.update(data)
        if self._left <= 0 and self._digest not in ("", self._state.hexdigest()):
            actual = f"{self._state.name.upper()} {self._state.hexdigest()}"
            raise Transient(f"{actual} instead of {self._digest}")
        return data


class _DamagedError(Exception):
    """A body was cut, or does not match its checksum."""


def _copy(answer: dict[str, Any], into: BoundedWriter) -> None:
    """Copy the body of a response, and check its digest; boto3 checks the server's checksum.

    Raises:
        _DamagedError: a retry may succeed.
    """
    from botocore.exceptions import BotoCoreError
    from urllib3.exceptions import HTTPError

    state, digest = _expected(answer)
    body = answer["Body"]
    try:
        while block := body.read(BLOCK):
            into.write(block)
            state.update(block)
    except (BotoCoreError, HTTPError, OSError) as error:
        raise _DamagedError(f"{type(error).__name__}: {one_line(error)}") from error
    finally:
        body.close()
    if digest not in ("", state.hexdigest()):
        raise _DamagedError(f"{state.name} {state.hexdigest()} instead of {digest}")


def _expected(answer: dict[str, Any]) -> tuple["hashlib._Hash", str]:
    """Return a hash to update with the body of a response, and its expected value in hex.

    That is the SHA-256 in the object's metadata, else the MD5 that the ETag is; '' where it is
    none, as for multipart objects and keys of KMS.
    """
    if digest := answer["Metadata"].get("sha256", ""):
        return hashlib.sha256(), digest
    tag = str(answer.get("ETag", "")).strip('"')
    encrypted = "kms" in str(answer.get("ServerSideEncryption", "")) or any(
        name.startswith("SSECustomer") for name in answer
    )
    md5 = tag if _MD5.fullmatch(tag) and not encrypted else ""
    return hashlib.md5(usedforsecurity=False), md5


def _md5(body: bytes) -> str:
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()

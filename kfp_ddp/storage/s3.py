"""S3 and servers with its protocol, through boto3: a store and a source.

The ETag stands for the content. A body is checked with the SHA-256 that `S3Store` leaves, else with
the server's checksum, else with an ETag that is an MD5; some objects have none of these.
"""

import base64
import contextlib
import functools
import hashlib
from collections.abc import Iterator
from typing import Any, BinaryIO, ClassVar
from urllib.parse import unquote_plus

from botocore.exceptions import ClientError

from kfp_ddp.core.errors import KfpDdpError
from kfp_ddp.storage import store
from kfp_ddp.storage.listing import Listing
from kfp_ddp.storage.s3_objects import S3Objects, code_of, is_forbidden, problem, s3_client
from kfp_ddp.storage.source import Pages, SourceOptions, listing_by_etag
from kfp_ddp.storage.store import Bucket, ConflictError, ObjectState, Page

_Fields = dict[str, Any]
PART = 64 << 20
"""Bytes of a part of a multipart upload; 10,000 parts at most."""
_CONNECT = 10.0  # seconds
_UNEXPLAINED = frozenset({"400", "401", "403"})  # a HEAD has no code but its status
_MISSING = frozenset({"404", "NoSuchKey", "NotFound"})
_CONFLICT = frozenset(
    {"412", "PreconditionFailed", "409", "ConditionalRequestConflict", "NoSuchUpload"}
)


class S3Source(S3Objects):
    """A prefix of a bucket; AWS_ENDPOINT_URL_S3 and the usual configuration apply."""

    max_workers = 256

    def __init__(self, url: str, options: SourceOptions) -> None:
        self._settings: dict[str, Any] = {
            "payer": options.requester_pays,
            "connect_timeout": min(_CONNECT, options.timeout),
            "read_timeout": options.timeout,
            "retries": {"total_max_attempts": store.TRIES, "mode": "standard"},
        }
        super().__init__(s3_client(url, **self._settings), url, options.timeout)

    def listing(self) -> Listing:
        """List the prefix, 1,000 objects a page; see `Source.listing`."""
        try:
            return self._list_or_anonymously()
        except KfpDdpError:
            raise
        except Exception as error:
            translated = problem(self.client.sdk, "list", self.url, f"s3://{self._bucket}", error)
            raise translated or error from error

    def _list_or_anonymously(self) -> Listing:
        """List without credentials what is public, but forbidden to an account of elsewhere."""
        signed = self.client
        try:
            return self._list()
        except ClientError as error:
            if not is_forbidden(error) or signed.credentials is None:
                raise
            self.use(s3_client(self.url, anonymous=True, **self._settings))
            try:
                return self._list()
            except ClientError:
                self.use(signed)
                raise error from None

    def _list(self) -> Listing:
        return listing_by_etag(self.url, self._prefix, self.pages())

    def pages(self, below: str = "", size: int = 0) -> Iterator[list[tuple[str, int, str]]]:
        """Yield name, bytes and ETag of objects, in pages of `size`, 0 for 1,000."""
        pages = Pages(self.url, self._prefix, below)
        client = self.client
        query: _Fields = {"Bucket": self._bucket, "Prefix": f"{self._prefix}{below}"}
        query |= {"MaxKeys": size} if size else {}
        token: str | None = None
        while token != "":
            page = client.sdk.list_objects_v2(**query)
            decode = unquote_plus if page.get("EncodingType") == "url" else str  # as botocore
            rows = client.listed.rows
            yield [(*pages.row(decode(key), int(size)), tag) for key, size, tag in rows]
            token = pages.following(page.get("NextContinuationToken"), page["IsTruncated"])
            query["ContinuationToken"] = token


class S3Store(Bucket):
    """A prefix of a bucket; AWS_ENDPOINT_URL_S3 and the usual configuration apply."""

    scheme = "s3"
    may_ignore_conditions: ClassVar[bool] = True

    @functools.cached_property
    def _source(self) -> S3Source:
        return S3Source(self.uri, SourceOptions(store.READ_TIMEOUT))

    @property
    def _client(self) -> Any:
        return self._source.client.sdk

    def delete(self, name: str) -> None:
        """Delete the object; see `Store.delete`."""
        self._call("delete", lambda: self._client.delete_object(**self._object(name)))

    def _pages(self, prefix: str, size: int) -> Iterator[Page]:
        for page in self._source.pages(prefix, size):
            yield [(name, size) for name, size, _ in page]

    def _stat(self, name: str) -> ObjectState | None:
        try:
            answer = self._client.head_object(**self._object(name))
        except ClientError as error:
            if code_of(error) in _MISSING:
                return None
            if code_of(error) in _UNEXPLAINED:  # but the response of a GET says why
                self._client.get_object(**self._object(name))["Body"].close()
            raise
        digest = answer["Metadata"].get("sha256", "")
        return ObjectState(int(answer["ContentLength"]), digest, answer["ETag"])

    def _store(self, name: str, content: BinaryIO, size: int, digest: str, tag: str) -> None:
        """Send each part with its MD5, for the server to check, and the last with the condition."""
        condition = {"IfMatch": tag} if tag else {"IfNoneMatch": "*"}
        about = {"Metadata": {"sha256": digest}}
        try:
            if size > PART:
                self._put_parts(self._object(name), about, content, condition)
            else:
                body = content.read()
                self._client.put_object(
                    **self._object(name), **about, **condition, Body=body, ContentMD5=_md5(body)
                )
        except ClientError as error:
            # The object that is replaced may have been deleted meanwhile.
            conflicts = _CONFLICT | _MISSING if tag else _CONFLICT
            if code_of(error) in conflicts:
                raise ConflictError from None
            raise

    def _put_parts(
        self, target: _Fields, about: _Fields, content: BinaryIO, condition: _Fields
    ) -> None:
        client = self._client
        parts: list[_Fields] = []
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

    def _problem(self, verb: str, error: Exception) -> KfpDdpError | None:
        return problem(self._client, verb, self.uri, self.root, error)


def _md5(body: bytes) -> str:
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()

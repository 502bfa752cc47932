"""Requests for the objects of S3: botocore prepares one, and the others are signed like it."""

import hashlib
import hmac
import re
import threading
import zlib
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import google_crc32c

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import one_line
from kfp_ddp.storage import store
from kfp_ddp.storage.http.answer import Answer
from kfp_ddp.storage.http.origin import Origin, Request, quoted, target_of
from kfp_ddp.storage.http.reader import Checksum, SdkObjects, base64_digest, sha256_checksum
from kfp_ddp.storage.s3_client import S3Client, code_of, is_forbidden
from kfp_ddp.storage.source import Changed, Entry, Transient

_AUTHORIZATION = re.compile(
    r"(?P<start>AWS4-HMAC-SHA256 Credential=.+/(?P<scope>\d{8}/[^/]+/[^/]+/aws4_request), "
    r"SignedHeaders=(?P<signed>[^,]+), Signature=)(?P<signature>[0-9a-f]{64})"
)
_PROBE = Entry("probe", 0, "0" * 32, 0)
_MD5 = re.compile(rb"[0-9a-f]{32}")
_CHANGED = frozenset({"404", "NoSuchKey", "412", "PreconditionFailed"})


class S3Objects(SdkObjects):
    """The objects of one prefix, pinned to their ETags; see `HttpObjects`.

    botocore takes 380 us of processor to prepare a request, and its signer alone 64. So it prepares
    one every `TRUSTED_SECONDS`, with its address, region, headers and valid credentials, and
    `_Template` signs the others. Where that has not the signature of botocore, as with S3 Express,
    botocore prepares each of them.
    """

    def __init__(self, client: S3Client, url: str, bucket: str, prefix: str) -> None:
        super().__init__()
        self._client, self._url, self._bucket, self._prefix = client, url, bucket, prefix
        self._template: _Template | None = None

    def request(self, entry: Entry, offset: int) -> Request:
        """Pin the request to the ETag; see `HttpObjects.request`. An offset is not supported."""
        return (self._template or self._prepare(entry)).request(entry)

    def _renew(self, refused: bool) -> None:
        template = self._prepare(_PROBE)
        self._template = template if template.exact else None

    def _prepare(self, entry: Entry) -> "_Template":
        """Return the request that botocore would send; raises Transient without credentials."""
        from botocore.exceptions import BotoCoreError

        events, sends = self._client.sdk.meta.events, "before-send.s3.GetObject"
        thread = threading.get_ident()

        def capture(request: Any, **_: Any) -> None:
            if threading.get_ident() == thread:
                raise _PreparedError(request)

        events.register_first(sends, capture)
        try:
            self._get(entry)
        except _PreparedError as prepared:
            secret = self._client.secret_key
            return _Template(prepared.args[0], entry, secret, self._client.origin.authorities)
        except BotoCoreError as error:
            raise Transient(one_line(error)) from error
        finally:
            events.unregister(sends, capture)
        raise AssertionError("botocore sent a request that was to be prepared only")

    def _get(self, entry: Entry) -> Any:
        return self._client.sdk.get_object(
            Bucket=self._bucket,
            Key=f"{self._prefix}{entry.name}",
            IfMatch=f'"{entry.tag}"',
            ChecksumMode="ENABLED",
        )

    def _ask_sdk(self, entry: Entry) -> Exception | None:
        from botocore.exceptions import BotoCoreError, ClientError

        with self._lock:
            self._trusted_until = 0.0
            try:
                self._get(entry)["Body"].close()
            except ClientError as error:
                return self._object_error(entry, error)
            except BotoCoreError as error:
                return Transient(one_line(error))
        return None

    def _object_error(self, entry: Entry, error: Exception) -> Exception:
        code, name = code_of(error), f"{entry.name!r} of {self._url}"
        if code in _CHANGED:
            return Changed(entry.name)
        if code == "InvalidObjectState":
            return InputError(f"{name} is in an archive (Glacier): restore it first, or exclude it")
        if is_forbidden(error):
            return store.no_permission("read", name, code, "grant s3:GetObject")
        return Transient(code)

    def checksum(self, entry: Entry, answer: Answer) -> Checksum | None:
        """See `HttpObjects.checksum` and `checksum_of`."""
        return checksum_of(answer.field)


def checksum_of(field: Callable[[bytes], bytes]) -> Checksum | None:
    """Return our SHA-256, else the server's checksum, else the ETag where it is an MD5.

    `field` returns the header of a name in lower case, b'' without it.
    """
    if ours := sha256_checksum(field(b"x-amz-meta-sha256")):
        return ours
    for name, new_state in _CHECKSUMS:
        value = field(b"x-amz-checksum-" + name)
        if value and b"-" not in value and (state := new_state()):
            return Checksum(name.decode().upper(), state, base64_digest(value))
    tag = field(b"etag").strip(b'"')
    kms = b"kms" in field(b"x-amz-server-side-encryption")
    if kms or not _MD5.fullmatch(tag):
        return None
    return Checksum("MD5", hashlib.md5(usedforsecurity=False), bytes.fromhex(tag.decode()))


class _PreparedError(Exception):
    """Carries a request out of botocore before it is sent."""


class _Template:
    """Requests for other objects with the headers of a prepared one, and their own signature.

    https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
    """

    def __init__(self, prepared: Any, entry: Entry, secret_key: str, authorities: str) -> None:
        self._origin = Origin.of(prepared.url, authorities)
        path, tag = target_of(urlsplit(prepared.url)), f'"{entry.tag}"'
        self._base = path.removesuffix(quoted(entry.name))
        headers = {name.lower(): _text(value) for name, value in prepared.headers.items()}
        authorization = headers.pop("authorization", "")
        ours = ("host", "if-match")
        self._lines = "".join(f"{k}: {v}\r\n" for k, v in headers.items() if k not in ours)
        self._authorization = f"Authorization: {authorization}\r\n" if authorization else ""
        self._key = b""
        self.exact = not authorization
        if match := _AUTHORIZATION.fullmatch(authorization):
            headers["host"] = self._origin.authority.decode()
            signed = match["signed"].split(";")
            lines = "".join(f"{name}:{headers.get(name, '')}\n" for name in signed)
            self._before, _, after = lines.partition(tag)
            content = headers.get("x-amz-content-sha256", "")
            self._after = f"{after}\n{match['signed']}\n{content}"
            date = headers.get("x-amz-date", "")
            self._start = f"AWS4-HMAC-SHA256\n{date}\n{match['scope']}\n"
            self._key = f"AWS4{secret_key}".encode()
            for word in match["scope"].split("/"):
                self._key = hmac.digest(self._key, word.encode(), "sha256")
            self.exact = self._sign(path, tag) == match["signature"]
            if self.exact:
                self._authorization = f"Authorization: {match['start']}"

    def request(self, entry: Entry) -> Request:
        """Return the request for an object; if not `exact`, for that which was prepared."""
        path, tag = self._base + quoted(entry.name), f'"{entry.tag}"'
        secret = f"{self._lines}{self._authorization}"
        if self._key and self.exact:
            secret += f"{self._sign(path, tag)}\r\n"
        headers = f"If-Match: {tag}\r\n"
        return Request(self._origin, path, entry.size, headers.encode(), secret.encode())

    def _sign(self, path: str, tag: str) -> str:
        canonical = f"GET\n{path}\n\n{self._before}{tag}{self._after}"
        text = self._start + hashlib.sha256(canonical.encode()).hexdigest()
        return hmac.digest(self._key, text.encode(), "sha256").hex()


class _Crc32:
    """CRC-32 with the methods of a hash."""

    def __init__(self) -> None:
        self._crc = 0

    def update(self, data: bytes, /) -> None:
        self._crc = zlib.crc32(data, self._crc)

    def digest(self) -> bytes:
        return self._crc.to_bytes(4, "big")


def _crc64nvme() -> Any:
    """Return a state of CRC-64/NVME, None without botocore's extra crt."""
    from botocore import httpchecksum

    return httpchecksum.CrtCrc64NvmeChecksum() if httpchecksum.HAS_CRT else None


# A value with "-" is a checksum of the checksums of parts.
_CHECKSUMS: tuple[tuple[bytes, Any], ...] = (
    (b"crc32c", google_crc32c.Checksum),
    (b"crc32", _Crc32),
    (b"sha256", hashlib.sha256),
    (b"sha1", hashlib.sha1),
    (b"crc64nvme", _crc64nvme),
)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()

"""S3's client of boto3, and requests: botocore prepares one, and others are signed like it."""

import hashlib
import hmac
import os
import re
import threading
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from xml.etree import ElementTree

import botocore.session
import google_crc32c
from botocore import UNSIGNED, httpchecksum
from botocore.awsrequest import AWSResponse
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from botocore.exceptions import ConnectionError as NoConnectionError
from botocore.httpsession import get_cert_path
from urllib3.exceptions import HTTPError

from kfp_ddp.core.errors import InputError, KfpDdpError
from kfp_ddp.core.text import one_line
from kfp_ddp.storage import store
from kfp_ddp.storage.http.answer import Response
from kfp_ddp.storage.http.client import Checksum, SdkSource, base64_digest, sha256_checksum
from kfp_ddp.storage.http.origin import Origin, Request, quoted, target_of
from kfp_ddp.storage.source import Changed, Entry, Transient, bucket_and_prefix, is_temporary
from kfp_ddp.storage.store import read_bounded

_AUTHORIZATION = re.compile(
    r"(?P<start>AWS4-HMAC-SHA256 Credential=.+/(?P<scope>\d{8}/[^/]+/[^/]+/aws4_request), "
    r"SignedHeaders=(?P<signed>[^,]+), Signature=)(?P<signature>[0-9a-f]{64})"
)
_PROBE = Entry("probe", 0, "0" * 32, 0)
_MD5 = re.compile(rb"[0-9a-f]{32}")
_CHECKSUMS: dict[bytes, Any] = {
    b"crc32c": google_crc32c.Checksum,
    b"crc32": httpchecksum.Crc32Checksum,
    b"sha256": hashlib.sha256,
    b"sha1": hashlib.sha1,
}
if httpchecksum.HAS_CRT:  # needs awscrt; S3's own default
    _CHECKSUMS[b"crc64nvme"] = httpchecksum.CrtCrc64NvmeChecksum
_CHANGED = frozenset({"404", "NoSuchKey", "412", "PreconditionFailed"})

MAX_PAGE = 1 << 23
"""Bytes of a page: 1,000 names of 1,024 bytes, each six times as long when XML escapes it."""
_WRONG_CREDENTIALS = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}
)


class S3Client:
    """A client of boto3 with bounded responses, its server, and its credentials, if any."""

    def __init__(self, sdk: Any, origin: Origin, credentials: Any) -> None:
        self.sdk = sdk
        self.origin = origin
        self.credentials = credentials
        self.listed = threading.local()
        """Its `rows` are key, size and ETag of the objects of the thread's last page."""
        self._session = sdk._endpoint.http_session
        sdk.meta.events.register("before-send.s3", self._send)

    @property
    def secret_key(self) -> str:
        """The secret access key, which is valid now; '' without credentials."""
        return self.credentials.get_frozen_credentials().secret_key if self.credentials else ""

    def _send(self, request: Any, event_name: str, **_: Any) -> Any:
        streams = request.stream_output
        request.stream_output = True
        answer = self._session.send(request)
        if streams and answer.status_code < 300:
            return answer
        try:
            body = read_bounded(answer.raw.stream(), MAX_PAGE, self.sdk.meta.endpoint_url)
        except HTTPError as error:
            raise HTTPClientError(error=error) from error
        except InputError:
            answer.raw.close()
            raise
        answer.raw.release_conn()  # urllib3 does not after an empty body
        if event_name.endswith(".ListObjectsV2"):
            self.listed.rows, body = _split_page(body)
        return AWSResponse(answer.url, answer.status_code, answer.headers, _Body(body))


class _Body(NamedTuple):
    """A body that has been read, as botocore reads one."""

    content: bytes

    def stream(self) -> list[bytes]:
        return [self.content]


def s3_client(url: str, anonymous: bool = False, payer: str = "", **settings: Any) -> S3Client:
    """Return a client with boto3's configuration and these `settings`; raise InputError.

    With a `payer` the account of the credentials pays for requests.
    """
    try:
        session = botocore.session.get_session()
        credentials = None if anonymous else session.get_credentials()
        if credentials is None:
            settings["signature_version"] = UNSIGNED
        client = session.create_client("s3", config=Config(**settings))
        if payer:
            client.meta.events.register("before-call.s3", _pay)
        bundle = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
        origin = Origin.of(client.meta.endpoint_url, get_cert_path(bundle or True))
        return S3Client(client, origin, credentials)
    except (BotoCoreError, ValueError) as error:
        raise InputError(
            f"{url} cannot be opened: {one_line(error)}; check AWS_ENDPOINT_URL_S3 and the AWS "
            "settings"
        ) from error


def _pay(params: dict[str, Any], **_: Any) -> None:
    params["headers"]["x-amz-request-payer"] = "requester"


def problem(client: Any, verb: str, uri: str, root: str, error: Exception) -> KfpDdpError | None:
    """Return the error to raise for one of botocore, None for any other; `root` is the bucket."""
    advice = "check AWS_ENDPOINT_URL_S3, the AWS settings and the network, then run again"
    if isinstance(error, BotoCoreError):
        network = isinstance(error, (NoConnectionError, HTTPClientError))
        return store.failed(verb, uri, one_line(error), advice, temporary=network)
    if isinstance(error, ValueError | OverflowError):
        return InputError(f"cannot {verb} {uri}: its response is invalid ({one_line(error)})")
    if not isinstance(error, ClientError):
        return None
    code = code_of(error)
    if code == "NoSuchBucket":
        return store.NoBucketError(root)
    if code in _WRONG_CREDENTIALS:
        return InputError(
            f"the credentials for {uri} are invalid: {code}; correct AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY, and AWS_SESSION_TOKEN where they need one"
        )
    if code == "RequestTimeTooSkewed":
        return InputError(f"{uri} refuses the time of this machine ({code}): correct its clock")
    if is_forbidden(error):
        advice = (
            "grant the step's account s3:ListBucket on the bucket, and s3:GetObject, s3:PutObject "
            "and s3:DeleteObject below; if the requester of the bucket pays, set "
            "requester_pays=requester"
        )
        return store.no_permission(verb, f"{uri}{as_anonymous(client)}", code, advice)
    if code == "NotImplemented":
        return InputError(
            f"{root} does not support conditional writes (If-None-Match), without which two "
            "runs could lose each other's champion: use a newer store"
        )
    temporary = is_temporary(_status_of(error))
    return store.failed(verb, uri, one_line(error), advice, temporary=temporary)


def as_anonymous(client: Any) -> str:
    """Return words for a message where requests are not signed, else ''."""
    unsigned = client.meta.config.signature_version is UNSIGNED
    return " as anonymous (no credentials were found)" if unsigned else ""


def _status_of(error: Any) -> int | None:
    status: int | None = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status


def is_forbidden(error: Any) -> bool:
    """Return whether an account has no permission, or is not known."""
    return _status_of(error) in (401, 403)


def code_of(error: Any) -> str:
    """Return the error code of a response, or its status."""
    return str(error.response["Error"]["Code"])


class S3Objects(SdkSource):
    """Requests for the objects of one prefix, pinned to their ETags.

    botocore takes 380 us for a request, so it prepares one every `TRUSTED_SECONDS`, and `_Template`
    signs the others; where the two signatures differ, as with S3 Express, botocore prepares each.
    """

    def __init__(self, client: S3Client, url: str, timeout: float) -> None:
        super().__init__(url, client.origin, timeout)
        self._bucket, self._prefix = bucket_and_prefix(url)
        self.use(client)

    def use(self, client: S3Client) -> None:
        """Send requests as this client."""
        self.client = client
        self._trusted_until = 0.0
        self._template: _Template | None = None

    def request(self, entry: Entry, offset: int) -> Request:
        """Pin the request to the ETag; see `HttpSource.request`. An offset is not supported."""
        return (self._template or self._prepare(entry)).request(entry)

    def _renew(self, refused: bool) -> None:
        template = self._prepare(_PROBE)
        self._template = template if template.exact else None

    def _prepare(self, entry: Entry) -> "_Template":
        """Return the request that botocore would send; raise Transient without credentials."""
        events = self.client.sdk.meta.events
        sends = "before-send.s3.GetObject"
        thread = threading.get_ident()

        def capture(request: Any, **_: Any) -> None:
            if threading.get_ident() == thread:
                raise _PreparedError(request)

        events.register_first(sends, capture)
        try:
            self._get(entry)
        except _PreparedError as prepared:
            secret = self.client.secret_key
            return _Template(prepared.args[0], entry, secret, self.client.origin.authorities)
        except BotoCoreError as error:
            raise Transient(one_line(error)) from error
        finally:
            events.unregister(sends, capture)
        raise AssertionError("botocore sent a request that was to be prepared only")

    def _get(self, entry: Entry) -> Any:
        return self.client.sdk.get_object(
            Bucket=self._bucket,
            Key=f"{self._prefix}{entry.name}",
            IfMatch=f'"{entry.tag}"',
            ChecksumMode="ENABLED",
        )

    def _ask_sdk(self, entry: Entry) -> Exception | None:
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
        code = code_of(error)
        name = f"{entry.name!r} of {self.url}"
        if code in _CHANGED:
            return Changed(entry.name)
        if code == "InvalidObjectState":
            return InputError(f"{name} is in an archive (Glacier): restore it first, or exclude it")
        translated = problem(self.client.sdk, "read", name, f"s3://{self._bucket}", error)
        return Transient(code) if translated is None or translated.retryable else translated

    def checksum(self, entry: Entry, answer: Response) -> Checksum | None:
        """Return our SHA-256, else the server's checksum, else the ETag where it is an MD5."""
        if ours := sha256_checksum(answer.field(b"x-amz-meta-sha256")):
            return ours
        for name in answer.suffixes(b"x-amz-checksum-"):
            if (new_state := _CHECKSUMS.get(name)) is None:
                continue  # such as the header with the type
            value = answer.field(b"x-amz-checksum-" + name)
            if value and b"-" not in value:  # not one of the checksums of parts
                return Checksum(name.decode().upper(), new_state(), base64_digest(value))
        tag = answer.field(b"etag").strip(b'"')
        kms = b"kms" in answer.field(b"x-amz-server-side-encryption")
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
        path = target_of(urlsplit(prepared.url))
        tag = f'"{entry.tag}"'
        self._base = path.removesuffix(quoted(entry.name))
        headers = {name.lower(): _text(value) for name, value in prepared.headers.items()}
        authorization = headers.pop("authorization", "")
        ours = ("host", "if-match")
        lines = "".join(
            f"{name}: {value}\r\n" for name, value in headers.items() if name not in ours
        )
        self._secret = f"{lines}Authorization: {authorization}\r\n" if authorization else lines
        self._key = b""
        self.exact = not authorization
        if match := _AUTHORIZATION.fullmatch(authorization):
            headers["host"] = self._origin.authority.decode()
            signed = match["signed"].split(";")
            canonical = "".join(f"{name}:{headers.get(name, '')}\n" for name in signed)
            self._before, _, after = canonical.partition(tag)
            content = headers.get("x-amz-content-sha256", "")
            self._after = f"{after}\n{match['signed']}\n{content}"
            date = headers.get("x-amz-date", "")
            self._start = f"AWS4-HMAC-SHA256\n{date}\n{match['scope']}\n"
            self._key = f"AWS4{secret_key}".encode()
            for word in match["scope"].split("/"):
                self._key = hmac.digest(self._key, word.encode(), "sha256")
            self.exact = self._sign(path, tag) == match["signature"]
            if self.exact:
                self._secret = f"{lines}Authorization: {match['start']}"

    def request(self, entry: Entry) -> Request:
        """Return the request for an object; if not `exact`, for that which was prepared."""
        path = self._base + quoted(entry.name)
        tag = f'"{entry.tag}"'
        secret = self._secret
        if self._key and self.exact:
            secret = f"{secret}{self._sign(path, tag)}\r\n"
        headers = f"If-Match: {tag}\r\n"
        return Request(self._origin, path, entry.size, headers.encode(), secret.encode())

    def _sign(self, path: str, tag: str) -> str:
        canonical = f"GET\n{path}\n\n{self._before}{tag}{self._after}"
        text = self._start + hashlib.sha256(canonical.encode()).hexdigest()
        return hmac.digest(self._key, text.encode(), "sha256").hex()


def _split_page(page: bytes) -> tuple[list[tuple[str, str, str]], bytes]:
    """Take key, size and ETag of objects out of a page: botocore takes 80 us for one, this 4."""
    try:
        root = ElementTree.fromstring(page)  # noqa: S314 (botocore parses the same)
    except ElementTree.ParseError:
        return [], page  # botocore reports it
    space = root.tag[: root.tag.find("}") + 1]
    key = f"{space}Key"
    size = f"{space}Size"
    tag = f"{space}ETag"
    rows = []
    for item in root.findall(f"{space}Contents"):
        root.remove(item)
        rows.append((item.findtext(key, ""), item.findtext(size, ""), item.findtext(tag, "")))
    return rows, ElementTree.tostring(root)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()

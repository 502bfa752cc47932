"""S3's client of boto3, and requests: botocore prepares one, and signs others like it."""

import hashlib
import os
import re
import threading
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from xml.etree import ElementTree

import botocore.session
import google_crc32c
from botocore import UNSIGNED, httpchecksum
from botocore.awsrequest import AWSRequest, AWSResponse
from botocore.config import Config
from botocore.credentials import Credentials
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
        self.sdk, self.origin, self.credentials = sdk, origin, credentials
        self.listed = threading.local()
        """Its `rows` are key, size and ETag of the objects of the thread's last page."""
        self._session = sdk._endpoint.http_session
        sdk.meta.events.register("before-send.s3", self._send)

    def _send(self, request: Any, event_name: str, **_: Any) -> Any:
        streams, request.stream_output = request.stream_output, True
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


def s3_client(url: str, anonymous: bool = False, **settings: Any) -> S3Client:
    """Return a client with boto3's configuration and these `settings`; raises InputError."""
    try:
        session = botocore.session.get_session()
        credentials = None if anonymous else session.get_credentials()
        if credentials is None:
            settings["signature_version"] = UNSIGNED
        client = session.create_client("s3", config=Config(**settings))
        bundle = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
        origin = Origin.of(client.meta.endpoint_url, get_cert_path(bundle or True))
        return S3Client(client, origin, credentials)
    except (BotoCoreError, ValueError) as error:
        raise InputError(
            f"{url} cannot be opened: {one_line(error)}; check AWS_ENDPOINT_URL_S3 and the AWS "
            "settings"
        ) from error


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
            "and s3:DeleteObject below"
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

    botocore takes 380 us for a request, and an eighth of that to sign one. So it prepares one every
    `TRUSTED_SECONDS`, with the credentials of that time, and signs the others like it.
    """

    def __init__(self, client: S3Client, url: str, timeout: float) -> None:
        super().__init__(url, client.origin, timeout)
        self._bucket, self._prefix = bucket_and_prefix(url)
        self.use(client)

    def use(self, client: S3Client) -> None:
        """Send requests as this client."""
        self.client, self._trusted_until = client, 0.0
        self._prepared: Any = None

    def request(self, entry: Entry, offset: int) -> Request:
        """Pin the request to the ETag; see `HttpSource.request`. An offset is not supported.

        Raises Transient where the signature needs a server that does not respond.
        """
        prepared, tag = self._prepared, f'"{entry.tag}"'
        name, headers = quoted(entry.name), {**prepared.headers, "If-Match": tag}
        url, signed = (
            path and f"{path.removesuffix(_PROBE.name)}{name}"
            for path in (prepared.url, prepared.auth_path)
        )
        request = AWSRequest("GET", url, headers, auth_path=signed)
        request.context = prepared.context.copy()
        try:
            self.client.sdk._request_signer.sign("GetObject", request)
        except BotoCoreError as error:  # S3 Express opens sessions
            raise Transient(one_line(error)) from error
        secret = "".join(
            f"{name}: {value}\r\n"
            for name, value in request.headers.items()
            if name.lower() not in ("host", "if-match")
        )
        target, pin = target_of(urlsplit(url)), f"If-Match: {tag}\r\n".encode()
        return Request(self._server, target, entry.size, pin, secret.encode())

    def _renew(self, refused: bool) -> None:
        """Let botocore prepare a request; raises Transient without credentials."""
        events, signs = self.client.sdk.meta.events, "before-sign.s3.GetObject"
        thread = threading.get_ident()

        def capture(request: Any, **_: Any) -> None:
            if threading.get_ident() == thread:
                raise _PreparedError(request)

        events.register_first(signs, capture)
        signing = {}
        try:
            if credentials := self.client.credentials:
                now = credentials.get_frozen_credentials()
                signing["request_credentials"] = Credentials(*now[:3])
            self._get(_PROBE)
        except _PreparedError as prepared:
            request = prepared.args[0]
            request.context["signing"] = {**request.context.get("signing", {}), **signing}
            self._server = Origin.of(request.url, self.client.origin.authorities)
            self._prepared = request
        except BotoCoreError as error:
            raise Transient(one_line(error)) from error
        finally:
            events.unregister(signs, capture)

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
        code, name = code_of(error), f"{entry.name!r} of {self.url}"
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


def _split_page(page: bytes) -> tuple[list[tuple[str, str, str]], bytes]:
    """Take key, size and ETag of objects out of a page: botocore takes 80 us for one, this 4."""
    try:
        root = ElementTree.fromstring(page)  # noqa: S314 (botocore parses the same)
    except ElementTree.ParseError:
        return [], page  # botocore reports it
    space = root.tag[: root.tag.find("}") + 1]
    key, size, tag = f"{space}Key", f"{space}Size", f"{space}ETag"
    rows = []
    for item in root.findall(f"{space}Contents"):
        root.remove(item)
        rows.append((item.findtext(key, ""), item.findtext(size, ""), item.findtext(tag, "")))
    return rows, ElementTree.tostring(root)

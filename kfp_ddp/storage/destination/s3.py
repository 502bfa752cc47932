"""Results in a bucket of S3, or of what speaks like it."""

import base64
import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, ClassVar, TypeVar

from kfp_ddp.core.errors import InputError, KfpDdpError, StorageError, UnavailableError
from kfp_ddp.storage.destination import place
from kfp_ddp.storage.destination.bucket import Bucket, Found, Lost
from kfp_ddp.storage.destination.place import BLOCK, CHANGED, Bounded, held
from kfp_ddp.storage.retry import is_temporary

R = TypeVar("R")
_Given = dict[str, Any]
PART = 64 << 20
"""Bytes of a part; what is longer is sent in several. 10,000 of them are the most."""
MAX_PAGE = 1 << 23
"""Bytes of a page: 1,000 names of 1,024 bytes, each six times as long as XML may write it."""
_CONNECT, _READ = 10.0, 300.0  # seconds to connect, and between two answers
_WRONG_CREDENTIALS = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}
)
_MD5 = re.compile("[0-9a-f]{32}")
_ABSENT = frozenset({"404", "NoSuchKey", "NotFound"})
_LOST = frozenset(
    {"412", "PreconditionFailed", "409", "ConditionalRequestConflict", "NoSuchUpload"}
)


def s3_client(url: str, anonymous: bool = False, **settings: Any) -> Any:
    """A client of boto3's usual configuration; without credentials it signs nothing.

    Args:
        url: What is to be opened, for the message where boto3 is not installed.
        anonymous: Sign nothing, whatever credentials there are.
        settings: Of botocore's Config.

    Raises:
        InputError: boto3 is not installed, or its configuration cannot be used.
    """
    try:
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise InputError(f"{url} needs boto3; pip install 'kfp-ddp[s3]'") from error
    try:
        session = boto3.Session()
        if anonymous or session.get_credentials() is None:
            settings["signature_version"] = UNSIGNED
        return _bounded(session.client("s3", config=Config(**settings)))
    except (BotoCoreError, ValueError) as error:
        raise InputError(
            f"{url} cannot be opened: {line(error)}; check AWS_ENDPOINT_URL_S3 and the AWS settings"
        ) from error


def _bounded(client: Any) -> Any:
    """Let a client hold at most a page of what is no object's body: boto3 has no setting for it."""
    from botocore.exceptions import HTTPClientError
    from urllib3.exceptions import HTTPError

    session = client._endpoint.http_session

    def send(request: Any, **_: Any) -> Any:
        streams, request.stream_output = request.stream_output, True
        answer = session.send(request)
        if not streams or answer.status_code >= 300:
            try:
                answer._content = held(answer.raw.stream(), MAX_PAGE, client.meta.endpoint_url)
                answer.raw.release_conn()  # urllib3 does not after an empty body
            except HTTPError as error:
                raise HTTPClientError(error=error) from error
            except InputError:
                answer.raw.close()
                raise
        return answer

    client.meta.events.register("before-send.s3", send)
    return client


class S3Bucket(Bucket):
    """A prefix of a bucket; AWS_ENDPOINT_URL_S3 and the usual configuration apply.

    The store checks Content-MD5 of what it is sent. SHA-256 of the whole content is kept beside
    each object, and compared with what is read.
    """

    scheme = "s3"
    many_makes: ClassVar[bool] = True

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self._handle: Any = None

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """1,000 objects a page, all of which one call reads."""
        start = len(self._key(""))

        def ask() -> list[tuple[str, int]]:
            pages = self._client().get_paginator("list_objects_v2")
            return [
                (item["Key"][start:], int(item["Size"]))
                for page in pages.paginate(Bucket=self.name, Prefix=self._key(prefix))
                for item in page.get("Contents", [])
            ]

        yield from self._call("listed", ask)

    def delete(self, name: str) -> None:
        """Delete the object; one that is not there is what was asked for."""
        self._call("deleted", lambda: self._client().delete_object(**self._at(name)))

    def _look(self, name: str) -> Found | None:
        from botocore.exceptions import ClientError

        try:
            seen = self._client().head_object(**self._at(name))
        except ClientError as error:
            if code_of(error) in _ABSENT:
                return None
            raise
        return Found(int(seen["ContentLength"]), seen["Metadata"].get("sha256", ""), seen["ETag"])

    def _load(self, name: str, into: BinaryIO, limit: int, tag: str) -> bool:
        """Several tries, as boto3 does not go on with a body that broke."""
        from botocore.exceptions import ClientError

        bounded = Bounded(into, limit, f"{self.uri}/{name}")
        condition = {"IfMatch": tag} if tag else {}
        for tries_left in reversed(range(place.TRIES)):
            try:
                answer = self._client().get_object(
                    **self._at(name), ChecksumMode="ENABLED", **condition
                )
                _copy(answer, bounded)
                break
            except ClientError as error:
                if code_of(error) in _LOST:
                    raise Lost from None
                if code_of(error) in _ABSENT:
                    return False
                raise
            except Broken as error:
                if not tries_left:
                    raise StorageError(
                        f"a transfer of {self.uri}/{name} is damaged: {error}; run the step again"
                    ) from None
                bounded.seek(0)
        return True

    def _store(self, name: str, content: BinaryIO, size: int, digest: str, tag: str) -> None:
        """Give each part's MD5, which the store compares; the last request has the condition."""
        from botocore.exceptions import ClientError

        condition = {"IfMatch": tag} if tag else {"IfNoneMatch": "*"}
        about = {"Metadata": {"sha256": digest}}
        try:
            if size > PART:
                self._put_parts(self._at(name), about, content, condition)
            else:
                body = content.read()
                self._client().put_object(
                    **self._at(name), **about, **condition, Body=body, ContentMD5=_md5(body)
                )
        except ClientError as error:
            if code_of(error) in _LOST or (tag and code_of(error) in _ABSENT):
                raise Lost from None
            raise

    def _put_parts(self, at: _Given, about: _Given, content: BinaryIO, condition: _Given) -> None:
        client, parts = self._client(), list[_Given]()
        at = at | {"UploadId": client.create_multipart_upload(**at, **about)["UploadId"]}
        try:
            while body := content.read(PART):
                number = {"PartNumber": len(parts) + 1}
                done = client.upload_part(**at, **number, Body=body, ContentMD5=_md5(body))
                parts.append({**number, "ETag": done["ETag"]})
            client.complete_multipart_upload(**at, **condition, MultipartUpload={"Parts": parts})
        except BaseException:
            with contextlib.suppress(Exception):
                client.abort_multipart_upload(**at)
            raise

    def _at(self, name: str) -> _Given:
        return {"Bucket": self.name, "Key": self._key(name)}

    def _client(self) -> Any:
        if self._handle is None:
            self._handle = s3_client(
                self.uri,
                connect_timeout=_CONNECT,
                read_timeout=_READ,
                response_checksum_validation="when_supported",
                retries={"total_max_attempts": place.TRIES, "mode": "standard"},
            )
        return self._handle

    def _call(self, what: str, ask: Callable[[], R]) -> R:
        client = self._client()
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return ask()
        except Lost:
            raise StorageError(f"{self.uri} {CHANGED}") from None
        except ClientError as error:
            raise self._refusal(client, what, error) from None
        except BotoCoreError as error:
            raise failed(f"{self.uri} cannot be {what}", error) from None

    def _refusal(self, client: Any, what: str, error: Any) -> KfpDdpError:
        code = code_of(error)
        if code == "NoSuchBucket":
            return InputError(f"the bucket {self.root} is not there: make it or correct its name")
        if code in _WRONG_CREDENTIALS:
            return InputError(
                f"the credentials for {self.uri} are refused: {code}; correct AWS_ACCESS_KEY_ID "
                "and AWS_SECRET_ACCESS_KEY, and AWS_SESSION_TOKEN where they need one"
            )
        if forbidden(error):
            return InputError(
                f"{self.uri} may not be {what}{as_nobody(client)}: {code}; give the step's account "
                "s3:ListBucket on the bucket, s3:GetObject, s3:PutObject and s3:DeleteObject below"
            )
        if code == "NotImplemented":
            return InputError(
                f"{self.root} does not know conditional writes (If-None-Match), without which two "
                "runs could lose each other's champion: use a newer store"
            )
        return failed(f"{self.uri} cannot be {what}", error)


def failed(problem: str, error: Any) -> KfpDdpError:
    """Return the error for a request that failed, other than for its rights or names.

    Args:
        problem: What failed.
        error: Of botocore.
    """
    from botocore.exceptions import ClientError, HTTPClientError
    from botocore.exceptions import ConnectionError as NoConnection

    network = isinstance(error, (NoConnection, HTTPClientError))
    if network or (isinstance(error, ClientError) and is_temporary(status_of(error))):
        return UnavailableError(
            f"{problem}: {line(error)}; check AWS_ENDPOINT_URL_S3 and the network, then run again"
        )
    return InputError(f"{problem}: {line(error)}; check AWS_ENDPOINT_URL_S3 and the AWS settings")


class Broken(Exception):  # noqa: N818 (it is a state, and is always handled)
    """A body ended early, or is not what its checksum says."""


def blocks(body: Any) -> Iterator[bytes]:
    """The body of an answer, of which boto3 compares the store's checksum at its end.

    Raises:
        Broken: another attempt can mend it.
    """
    from botocore.exceptions import BotoCoreError
    from urllib3.exceptions import HTTPError

    try:
        while block := body.read(BLOCK):
            yield block
    except (BotoCoreError, HTTPError, OSError) as error:
        raise Broken(f"{type(error).__name__}: {line(error)}") from error
    finally:
        body.close()


def expected(answer: dict[str, Any]) -> tuple["hashlib._Hash", str]:
    """What to update with the body of an answer, and what it shall come to, in hex.

    That is the SHA-256 which `put` left beside the object, else the MD5 that the ETag is; '' where
    it is none, as for parts and with keys of KMS.
    """
    if wanted := answer["Metadata"].get("sha256", ""):
        return hashlib.sha256(), wanted
    tag = str(answer.get("ETag", "")).strip('"')
    encrypted = "kms" in str(answer.get("ServerSideEncryption", "")) or any(
        name.startswith("SSECustomer") for name in answer
    )
    md5 = tag if _MD5.fullmatch(tag) and not encrypted else ""
    return hashlib.md5(usedforsecurity=False), md5


def as_nobody(client: Any) -> str:
    """Words for a message, where nothing is signed."""
    from botocore import UNSIGNED

    unsigned = client.meta.config.signature_version is UNSIGNED
    return " as anonymous (no credentials were found)" if unsigned else ""


def line(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(str(error).split())[:200]


def _copy(answer: dict[str, Any], into: Bounded) -> None:
    """Copy the body of an answer; raises Broken."""
    state, wanted = expected(answer)
    for block in blocks(answer["Body"]):
        into.write(block)
        state.update(block)
    if wanted not in ("", state.hexdigest()):
        raise Broken(f"{state.name} {state.hexdigest()} instead of {wanted}")


def _md5(body: bytes) -> str:
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()


def forbidden(error: Any) -> bool:
    """Whether who asked may not, or is not known."""
    return status_of(error) in (401, 403)


def status_of(error: Any) -> int | None:
    """The HTTP status of what S3 refuses."""
    status: int | None = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status


def code_of(error: Any) -> str:
    """The code of what S3 refuses, or of its status."""
    return str(error.response["Error"]["Code"])

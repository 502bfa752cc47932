"""The client of boto3 for `s3`: anonymous access, bounded responses, and errors in one line."""

import os
from typing import Any, NamedTuple

from kfp_ddp.core.errors import InputError, KfpDdpError
from kfp_ddp.core.text import one_line
from kfp_ddp.storage import store
from kfp_ddp.storage.http.origin import Origin
from kfp_ddp.storage.retry import is_temporary
from kfp_ddp.storage.store import read_bounded

MAX_PAGE = 1 << 23
"""Bytes of a page: 1,000 names of 1,024 bytes, each six times as long when XML escapes it."""
_WRONG_CREDENTIALS = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}
)


class S3Client(NamedTuple):
    """A client of boto3, its server with the authorities to trust, and its credentials, if any."""

    sdk: Any
    origin: Origin
    credentials: Any

    @property
    def secret_key(self) -> str:
        """The secret access key, which is valid now; '' without credentials."""
        return self.credentials.get_frozen_credentials().secret_key if self.credentials else ""


def s3_client(url: str, anonymous: bool = False, **settings: Any) -> S3Client:
    """Return a client with boto3's usual configuration; without credentials it signs nothing.

    `url` is named where boto3 is not installed; `settings` are of botocore's Config. Raises
    InputError.
    """
    try:
        import botocore.session
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
        from botocore.httpsession import get_cert_path
    except ImportError as error:
        raise InputError(f"{url} needs boto3; pip install 'kfp-ddp[s3]'") from error
    try:
        session = botocore.session.get_session()
        credentials = None if anonymous else session.get_credentials()
        if credentials is None:
            settings["signature_version"] = UNSIGNED
        client = session.create_client("s3", config=Config(**settings))
        bundle = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
        origin = Origin.of(client.meta.endpoint_url, get_cert_path(bundle or True))
        return S3Client(_bound_pages(client), origin, credentials)
    except (BotoCoreError, ValueError) as error:
        raise InputError(
            f"{url} cannot be opened: {one_line(error)}; check AWS_ENDPOINT_URL_S3 and the AWS "
            "settings"
        ) from error


def _bound_pages(client: Any) -> Any:
    """Bound the responses that are not an object's body: boto3 has no setting for it."""
    from botocore.exceptions import HTTPClientError
    from urllib3.exceptions import HTTPError

    session = client._endpoint.http_session

    def send(request: Any, **_: Any) -> Any:
        streams, request.stream_output = request.stream_output, True
        answer = session.send(request)
        if not streams or answer.status_code >= 300:
            try:
                body = read_bounded(answer.raw.stream(), MAX_PAGE, client.meta.endpoint_url)
                answer._content = body
                answer.raw.release_conn()  # urllib3 does not after an empty body
            except HTTPError as error:
                raise HTTPClientError(error=error) from error
            except InputError:
                answer.raw.close()
                raise
        return answer

    client.meta.events.register("before-send.s3", send)
    return client


def problem(client: Any, verb: str, uri: str, root: str, error: Exception) -> KfpDdpError | None:
    """Return the error to raise for one of botocore, None for any other; `root` is the bucket."""
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
    from botocore.exceptions import ConnectionError as NoConnectionError

    advice = "check AWS_ENDPOINT_URL_S3, the AWS settings and the network, then run again"
    if isinstance(error, BotoCoreError):
        network = isinstance(error, (NoConnectionError, HTTPClientError))
        return store.failed(verb, uri, one_line(error), advice, temporary=network)
    if not isinstance(error, ClientError):
        return None
    code = code_of(error)
    if code == "NoSuchBucket":
        return store.no_bucket(root)
    if code in _WRONG_CREDENTIALS:
        return InputError(
            f"the credentials for {uri} are invalid: {code}; correct AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY, and AWS_SESSION_TOKEN where they need one"
        )
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
    from botocore import UNSIGNED

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

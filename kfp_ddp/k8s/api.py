"""The Kubernetes API as JSON over one client: requests, streams and how to bear a bad minute."""

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

from kfp_ddp.core.errors import InputError, KfpDdpError

Object = dict[str, Any]
T = TypeVar("T")
log = logging.getLogger(__name__)

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
CONNECT_SECONDS, READ_SECONDS = 5.0, 20.0
# A starting API server answers these before it knows its own rights and the custom resources.
STARTING = (401, 403, 404)
UNSURE_SECONDS = 10.0
LONG_PAUSE = 2.0
PASSING = (0, 408, 429, 500, 502, 503, 504)
DELETE = {"propagationPolicy": "Background"}
"""The body of a request that deletes an object and, soon after, what it owns."""
MANAGER = {"fieldManager": "kfp-ddp", "force": "true", "fieldValidation": "Strict"}
UNTYPED = "failed to create typed patch object"
"""What is said of a field that its definition does not know, or of another type."""
PAGE = 250
"""Objects of a list that are asked for at once: 1,000 pods are 10 MB, and more when read."""
CONTENT = {"PATCH": "application/merge-patch+json", "APPLY": "application/apply-patch+yaml"}


class ApiError(KfpDdpError):
    """An answer other than 2xx; status 0 where there was none at all."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}" if status else message)
        self.status, self.reason, self.message = status, reason, message

    @property
    def passing(self) -> bool:
        """Whether the same request may well succeed in a moment."""
        return self.status in PASSING


def config_faults() -> tuple[type[Exception], ...]:
    """What Kubernetes' client raises of a kubeconfig that is none: its own, and its parser's."""
    import yaml
    from kubernetes import config

    return config.ConfigException, yaml.YAMLError, OSError, TypeError, ValueError


class Api:
    """Requests in one namespace."""

    def __init__(self, client: Any, namespace: str) -> None:
        self.client, self.namespace = client, namespace
        self._told: tuple[float, float] | None = None
        """What time it was by the server, and by the monotonic clock then."""

    @classmethod
    def connect(cls, namespace: str = "", context: str = "") -> "Api":
        """Use the pod's service account, or a context of the kubeconfig, '' for the current one.

        Raises:
            InputError: when there is neither.
        """
        from kubernetes import client, config

        configuration = client.Configuration()
        try:
            config.load_incluster_config(configuration)
            found = NAMESPACE_FILE.read_text().strip()
        except config.ConfigException:
            try:
                config.load_kube_config(client_configuration=configuration, context=context or None)
                contexts, current = config.list_kube_config_contexts()
                chosen = next((each for each in contexts if each["name"] == context), current)
            except config_faults() as error:
                said = " ".join(str(error).split())
                raise InputError(
                    f"no Kubernetes cluster is configured ({said}): let KUBECONFIG name one, run "
                    "in a pod of one, or train without by backend=local"
                ) from error
            found = chosen["context"].get("namespace", "default")
        configuration.retries = False
        return cls(client.ApiClient(configuration), namespace or found)

    def another(self) -> "Api":
        """The same rights over connections of its own."""
        return Api(type(self.client)(self.client.configuration), self.namespace)

    def close(self) -> None:
        """Close the connections that were kept for a next request; there may be none."""
        pools = self.client.rest_client.pool_manager.pools
        for pool in [pools[key] for key in set(pools.keys())]:
            pool.close()

    def now(self) -> float:
        """Seconds since 1970 by the clock of the server, which dates what it holds.

        The clock of this node may be minutes off. Before the first answer it is all there is.
        """
        if self._told is None:
            return time.time()
        told, then = self._told
        return told + time.monotonic() - then

    def call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        query: dict[str, str] | None = None,
        seconds: float = READ_SECONDS,
        raw: bool = False,
    ) -> Object:
        """One request; raises ApiError for every answer but 2xx, and for none.

        Args:
            method: GET, POST, PATCH, DELETE, or APPLY for server-side apply.
            path: Of the resource.
            body: What is sent.
            query: Parameters.
            seconds: The longest wait for an answer.
            raw: The answer is no JSON; it comes as {"value": text}.
        """
        response = self._send(method, path, body, query, (CONNECT_SECONDS, seconds))
        with contextlib.suppress(KeyError, TypeError, ValueError):
            told = parsedate_to_datetime(response.headers["Date"]).timestamp()
            self._told = told, time.monotonic()
        try:
            data = response.data
        except Exception as error:
            raise ApiError(0, "", f"the answer was cut off: {error}") from error
        finally:
            response.release_conn()
        if raw:
            return {"value": data.decode("utf-8", "replace")}
        try:
            found = json.loads(data) if data else {}
        except (ValueError, RecursionError):
            raise ApiError(
                0,
                "",
                "what answers is no API server of Kubernetes, which speaks JSON: see where "
                "the kubeconfig leads, and whether a login stands before it",
            ) from None
        return found if isinstance(found, dict) else {"value": found}

    def pages(self, path: str, query: dict[str, str] | None = None) -> Iterator[Object]:
        """A list in parts of at most PAGE objects, as it was when the first one was asked for.

        Raises:
            ApiError: as for `call`; 410 where that is too long ago, and it is to be listed anew.
        """
        more = ""
        while True:
            asked = {**(query or {}), "limit": str(PAGE), **({"continue": more} if more else {})}
            found = self.call("GET", path, query=asked)
            yield found
            more = found["metadata"].get("continue", "")
            if not more:
                return

    def lines(
        self, path: str, query: dict[str, str], seconds: float | None, longest: int = 0
    ) -> Iterator[bytes]:
        """The lines of a streamed answer; the last one has no line feed if it was cut off.

        One of more than `longest` bytes, 0 for any number, comes as several lines.
        """
        response = self._send("GET", path, None, query, (CONNECT_SECONDS, seconds))
        try:
            yield from whole_lines(response.stream(65536, decode_content=True), longest)
        except Exception as error:
            raise ApiError(0, "", f"the stream was cut off: {error}") from error
        finally:
            response.close()

    def _send(
        self,
        method: str,
        path: str,
        body: Object | None,
        query: dict[str, str] | None,
        timeout: tuple[float, float | None],
    ) -> Any:
        import urllib3
        from kubernetes.client import ApiException

        kind = CONTENT.get(method, "application/json")
        try:
            return self.client.call_api(
                path,
                "PATCH" if method == "APPLY" else method,
                query_params=list((query or {}).items()),
                header_params={"Accept": "application/json, */*", "Content-Type": kind},
                body=body,
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                _preload_content=False,
                _request_timeout=timeout,
            )
        except ApiException as error:
            said = error.body or error.reason or ""
            message = said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
            with contextlib.suppress(ValueError, KeyError, TypeError):
                message = json.loads(message)["message"]
            raise ApiError(error.status or 0, error.reason or "", message.strip()) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ApiError(0, "", f"no answer from the API server: {error}") from error

    def apply(self, path: str, body: Object) -> Object:
        """Make an object, or change it to what `body` says of it; the object after that."""
        try:
            return self.call("APPLY", path, body, MANAGER)
        except ApiError as error:
            if UNTYPED not in error.message:
                raise
            # The server calls it a fault of its own, which would be asked for again.
            raise ApiError(422, "Unprocessable Entity", error.message) from None

    def delete(self, path: str) -> None:
        """Delete an object and what it owns, patiently; one that is gone is fine."""
        try:
            self.patient(lambda: self.call("DELETE", path, DELETE))
        except ApiError as error:
            if error.status != 404:
                raise

    def ready(self) -> bool | None:
        """Whether the server has started wholly; None where it does not say."""
        try:
            self.call("GET", "/readyz", raw=True)
        except ApiError as error:
            return None if error.status in STARTING else False
        return True

    def patient(
        self, request: Callable[[], T], seconds: float = 300, also: tuple[int, ...] = ()
    ) -> T:
        """The result of `request`, asked again for up to `seconds` while the server has a bad time.

        The request must be safe to repeat; `also` are statuses that count as a bad time too.
        """
        began, pause, told, sure = time.monotonic(), 0.1, False, False
        while True:
            try:
                return request()
            except ApiError as error:
                waits = error.passing or error.status in also
                if error.status in STARTING and not waits and not sure:
                    ready, waits = self.ready(), True  # a refusal that counts comes again
                    sure = time.monotonic() - began > UNSURE_SECONDS if ready is None else ready
                if not waits or time.monotonic() + pause > began + seconds:
                    raise
                if pause == LONG_PAUSE and not told:
                    log.warning("the cluster does not answer well, trying on: %s", error)
                    told = True
            time.sleep(pause)
            pause = min(pause * 2, LONG_PAUSE)


def whole_lines(chunks: Iterable[bytes], longest: int = 0) -> Iterator[bytes]:
    """The lines of a stream, the same however it is cut into chunks.

    Args:
        chunks: Its bytes.
        longest: Bytes after which a line is ended, for one may never end; 0 for any number.
    """
    parts: list[bytes] = []
    size = 0
    for chunk in chunks:
        *ended, rest = chunk.split(b"\n")
        for each in ended:
            yield from _pieces(b"".join([*parts, each]), longest)
            parts, size = [], 0
        parts.append(rest)
        size += len(rest)
        if longest and size > longest:
            line = b"".join(parts)
            at = (size - 1) // longest * longest
            yield from _pieces(line[:at], longest)
            parts, size = [line[at:]], size - at
    if size:
        yield b"".join(parts)


def _pieces(line: bytes, longest: int) -> Iterator[bytes]:
    step = longest or len(line) or 1
    for at in range(0, len(line) or 1, step):
        yield line[at : at + step] + b"\n"


def own_pod(api: Api) -> Object | None:
    """The pod that this step runs in; None outside of a pod of KFP, or where it may not be read."""
    name = os.environ.get("KFP_POD_NAME", "")
    if not name:
        return None
    try:
        return api.patient(lambda: api.call("GET", core(api.namespace, "pods", name)))
    except ApiError:
        return None


def core(namespace: str, plural: str, name: str = "") -> str:
    """Path of a resource of the core group."""
    return f"/api/v1/namespaces/{namespace}/{plural}" + (f"/{name}" if name else "")


def short(text: str) -> str:
    """What the cluster says, in one line of at most 240 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 240 else line[:237] + "..."


def custom(group_version: str, namespace: str, plural: str, name: str = "") -> str:
    """Path of a resource of a named group, `group/version`."""
    path = f"/apis/{group_version}/namespaces/{namespace}/{plural}"
    return path + (f"/{name}" if name else "")


def allowed(api: Api, verb: str, group: str, resource: str) -> bool:
    """Whether this account may do so; true where it cannot be told."""
    try:
        return api.patient(lambda: review(api, verb, group, resource))
    except ApiError:
        return True


def review(
    api: Api, verb: str, group: str, resource: str, subresource: str = "", user: str = ""
) -> bool:
    """Ask the server by SelfSubjectAccessReview, or SubjectAccessReview for another `user`."""
    attributes = {
        "namespace": api.namespace,
        "verb": verb,
        "group": group,
        "resource": resource,
        "subresource": subresource,
    }
    kind = "SubjectAccessReview" if user else "SelfSubjectAccessReview"
    spec: Object = {"resourceAttributes": attributes}
    if user:
        spec["user"] = user
    body: Object = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec}
    answer = api.call("POST", f"/apis/authorization.k8s.io/v1/{kind.lower()}s", body)
    return bool(answer["status"]["allowed"])

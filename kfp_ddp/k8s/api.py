"""JSON requests, streams and retries over one Kubernetes client, and what a refusal means."""

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

from kfp_ddp.core.errors import InputError, KfpDdpError, NoClusterError
from kfp_ddp.core.text import from_json, one_line
from kfp_ddp.k8s.resource import NODES, PODS, Resource

Object = dict[str, Any]
T = TypeVar("T")

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
NOTHING_CONFIGURED = "No configuration found"
"""Words of Kubernetes' client where there is no kubeconfig."""
COMPUTE_HERE = ", or compute without a cluster with backend=local"
"""What a step may do without a cluster."""
LAUNCHER = "kfp-ddp-launcher"
"""Account that launches and deletes (deploy/rbac/divided), and the Secret with its token."""
LAUNCHER_DIR = "/run/kfp-ddp"
"""Where the steps that launch or delete mount that Secret, if it exists."""
STEPS = "kfp-ddp-steps"
"""Account of a run whose other steps have no right to launch or delete."""
CONNECT_SECONDS = 5.0
READ_SECONDS = 20.0
# A starting API server returns these until it has loaded its RBAC rules and custom resources.
UNSURE = (401, 403, 404)
UNSURE_SECONDS = 10.0
LONG_PAUSE = 2.0
RETRY_SECONDS = 300.0
TRANSIENT = (0, 408, 429, 500, 502, 503, 504)
IN_BACKGROUND = {"propagationPolicy": "Background"}
"""The body of a DELETE that also removes the objects owned by this one."""
APPLY_QUERY = {"fieldManager": "kfp-ddp", "force": "true", "fieldValidation": "Strict"}
UNTYPED = "failed to create typed patch object"
"""The server's message for an unknown field, or a field of the wrong type."""
PAGE = 250
"""Objects in a page of a list: 1,000 pods are 10 MB of JSON."""
CONTENT = {"PATCH": "application/merge-patch+json", "APPLY": "application/apply-patch+yaml"}


class ApiError(KfpDdpError):
    """A response other than 2xx, or none: then `status` is 0; `message` is the server's."""

    def __init__(self, status: int, reason: str, message: str, text: str = "") -> None:
        super().__init__(text or (f"{status} {reason}: {message}" if status else message))
        self.status = status
        self.reason = reason
        self.message = message

    @property
    def transient(self) -> bool:
        """Return whether the same request may succeed later."""
        return self.status in TRANSIENT


class Refused(ApiError):  # noqa: N818
    """The account has no right to this, or the cluster has no such resource."""


@contextlib.contextmanager
def unless(status: int) -> Iterator[None]:
    """End the block where the server responds with a status."""
    try:
        yield
    except ApiError as error:
        if error.status != status:
            raise


def explanation(
    error: ApiError, verb: str, resource: Resource, namespace: str, name: str = ""
) -> str:
    """Return in one line which request failed, why, and what to do."""
    message = one_line(error.message)
    if error.status == 404 and message.startswith(f'namespaces "{namespace}"'):
        return f"namespace {namespace} does not exist; create it, or name another"
    if error.status == 404 and not name:
        return f"this cluster has no {resource.plural} ({resource.group_version})"
    user = re.search('User "([^"]+)" cannot ', message)
    if error.status == 403 and user:
        return no_right(verb, resource, namespace, user[1])
    if error.transient and error.status:  # without a status the message says so
        message = f"the API server failed ({error.status}: {message}); try later"
    request = f"{verb} {resource.plural} {name}".rstrip()
    return f"cannot {request} {resource.place(namespace)}: {message}"


def no_right(verb: str, resource: Resource, namespace: str, user: str = "") -> str:
    """Return the message for an account that lacks a right."""
    is_person = user and not user.startswith("system:serviceaccount:")
    role = "" if is_person else resource.role
    remedy = f"apply {role} there" if role else "ask an administrator for it"
    if user.endswith(f":{STEPS}"):
        remedy = f"mount the secret {LAUNCHER} at {LAUNCHER_DIR}, or run it as {LAUNCHER}"
    whose = f" as {user}" if user else ""
    return f"no right to {verb} {resource.plural} {resource.place(namespace)}{whose}; {remedy}"


def config_faults() -> tuple[type[Exception], ...]:
    """Return the errors that the Kubernetes client raises for an invalid kubeconfig."""
    import yaml
    from kubernetes import config

    return config.ConfigException, yaml.YAMLError, OSError, TypeError, ValueError


def _load_account(configuration: Any) -> None:
    """Configure a client as the launcher's account or that of the pod; raise ConfigException."""
    from kubernetes import config
    from kubernetes.config import incluster_config

    token = Path(LAUNCHER_DIR, "token")
    if not token.exists():
        config.load_incluster_config(configuration)
        return
    incluster_config.InClusterConfigLoader(
        token_filename=str(token), cert_filename=incluster_config.SERVICE_CERT_FILENAME
    ).load_and_set(configuration)


class Api:
    """A client of the API server for one namespace."""

    def __init__(self, client: Any, namespace: str) -> None:
        self.client = client
        self.namespace = namespace
        self._server_time: tuple[float, float] | None = None
        """The server's clock, and the monotonic clock at that moment."""

    @classmethod
    def connect(cls, namespace: str = "", context: str = "", otherwise: str = "") -> "Api":
        """Connect as a service account or by the kubeconfig; NoClusterError for neither.

        InputError: the kubeconfig cannot be used.

        The account is the launcher's where its token is mounted, else that of the pod. `otherwise`
        is what can be done without a cluster, for the end of the error.
        """
        from kubernetes import client, config

        configuration = client.Configuration()
        configuration.retries = False
        if not context:  # which is one of the kubeconfig, also in a pod
            with contextlib.suppress(config.ConfigException):
                _load_account(configuration)
                namespace = namespace or NAMESPACE_FILE.read_text().strip()
                return cls(client.ApiClient(configuration), namespace)
        try:
            config.load_kube_config(client_configuration=configuration, context=context or None)
            contexts, current = config.list_kube_config_contexts()
            chosen = next((item for item in contexts if item["name"] == context), current)
        except config_faults() as error:
            reason = one_line(error)
            # What is configured, but wrong, is not hidden by what needs no cluster.
            kind = NoClusterError if NOTHING_CONFIGURED in reason else InputError
            raise kind(
                f"no Kubernetes cluster is configured ({reason}): set KUBECONFIG, or run in a pod "
                f"of a cluster{otherwise}"
            ) from error
        namespace = namespace or chosen["context"].get("namespace") or "default"
        return cls(client.ApiClient(configuration), namespace)

    def another(self) -> "Api":
        """Return a client with the same credentials and its own connections."""
        return Api(type(self.client)(self.client.configuration), self.namespace)

    def close(self) -> None:
        """Close the idle connections."""
        pools = self.client.rest_client.pool_manager.pools
        for pool in [pools[key] for key in set(pools.keys())]:
            pool.close()

    def now(self) -> float:
        """Return the server's time in seconds since 1970, by the local clock until it responds."""
        if self._server_time is None:
            return time.time()
        server, then = self._server_time
        return server + time.monotonic() - then

    def call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        query: dict[str, str] | None = None,
        seconds: float = READ_SECONDS,
        raw: bool = False,
        retry: bool = False,
        retry_seconds: float = RETRY_SECONDS,
    ) -> Object:
        """Send one request and return the response; raise ApiError for any but 2xx, or none.

        `method` may be APPLY for server-side apply. With `raw` the result is {"value": text}. With
        `retry` a request that is safe to repeat is repeated while the server is unavailable.
        """
        if retry:
            return self.retry(
                lambda: self.call(method, path, body, query, seconds, raw), retry_seconds
            )
        response = self._send(method, path, body, query, (CONNECT_SECONDS, seconds))
        with contextlib.suppress(KeyError, TypeError, ValueError):
            server = parsedate_to_datetime(response.headers["Date"]).timestamp()
            self._server_time = server, time.monotonic()
        try:
            data = response.data
        except Exception as error:
            raise ApiError(0, "", f"the response was cut off: {error}") from error
        finally:
            response.release_conn()
        if raw:
            return {"value": data.decode("utf-8", "replace")}
        try:
            parsed = from_json(data) if data else {}
        except ValueError:
            message = (
                "the response is not JSON, so the address is not a Kubernetes API server: check "
                "the server in the kubeconfig, and whether a login page is in front of it"
            )
            raise ApiError(0, "", message) from None
        return parsed if isinstance(parsed, dict) else {"value": parsed}

    def get(self, resource: Resource, name: str, **options: Any) -> Object | None:
        """Return an object, None if it is missing; `options` are those of `call`."""
        with unless(404):
            return self._request("get", "GET", resource, name, **options)
        return None

    def list_objects(
        self, resource: Resource, query: dict[str, str] | None = None, **options: Any
    ) -> list[Object]:
        """Return the objects of a resource that `query` selects."""
        answer = self._request("list", "GET", resource, query=query, **options)
        return answer.get("items") or []

    def create(self, resource: Resource, body: Object, **options: Any) -> Object:
        """Create an object, with a status of 409 if one of this name exists; return it."""
        return self._request("create", "POST", resource, body=body, **options)

    def patch(self, resource: Resource, name: str, body: Object, **options: Any) -> Object:
        """Merge fields into an object; return it."""
        return self._request("patch", "PATCH", resource, name, body=body, **options)

    def apply(self, resource: Resource, body: Object, **query: str) -> Object:
        """Create or change an object by server-side apply; return it."""
        name = body["metadata"]["name"]
        return self._request("patch", "APPLY", resource, name, body=body, query=APPLY_QUERY | query)

    def delete(
        self,
        resource: Resource,
        name: str,
        body: Object = IN_BACKGROUND,
        *,
        dry_run: bool = False,
        **options: Any,
    ) -> None:
        """Delete an object and the objects that it owns; a missing one is not an error."""
        if dry_run:
            # With a body, the API server ignores dryRun in the query, and deletes.
            body = {**body, "dryRun": ["All"]}
        with unless(404):
            options = {"retry": True, **options}
            self._request("delete", "DELETE", resource, name, body=body, **options)

    def _request(
        self, verb: str, method: str, resource: Resource, name: str = "", **options: Any
    ) -> Object:
        """Send one request, of which an error is in words; it is Refused for 403 and 404."""
        try:
            return self.call(method, resource.path(self.namespace, name), **options)
        except ApiError as error:
            if UNTYPED in error.message:
                error.status = 422  # the server reports it as 500, which would be retried
            kind = Refused if error.status in (403, 404) else ApiError
            text = explanation(error, verb, resource, self.namespace, name)
            raise kind(error.status, error.reason, error.message, text) from error

    def pages(self, resource: Resource, query: dict[str, str] | None = None) -> Iterator[Object]:
        """Yield a list in pages of one version, which has expired after status 410: list again."""
        path = resource.path(self.namespace)
        token = ""
        while True:
            part = {"limit": str(PAGE), **({"continue": token} if token else {})}
            page = self.call("GET", path, query={**(query or {}), **part})
            yield page
            token = page["metadata"].get("continue", "")
            if not token:
                return

    def lines(
        self, path: str, query: dict[str, str], seconds: float | None, longest: int = 0
    ) -> Iterator[bytes]:
        """Yield the `split_lines` of a response; an incomplete last line has no line feed."""
        response = self._send("GET", path, None, query, (CONNECT_SECONDS, seconds))
        try:
            yield from split_lines(response.stream(65536, decode_content=True), longest)
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
            text = error.body or error.reason or ""
            message = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
            with contextlib.suppress(ValueError, KeyError, TypeError):
                message = from_json(message)["message"]
            raise ApiError(error.status or 0, error.reason or "", message.strip()) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ApiError(0, "", f"no response from the API server: {error}") from error

    def ready(self) -> bool | None:
        """Return whether the server has started; None if this account may not see that."""
        try:
            self.call("GET", "/readyz", raw=True)
        except ApiError as error:
            return None if error.status in UNSURE else False
        return True

    def _has_started(self, began: float) -> bool:
        """Return whether the server is ready; where it does not say, some seconds after `began`."""
        ready = self.ready()
        return time.monotonic() - began > UNSURE_SECONDS if ready is None else ready

    def retry(
        self, request: Callable[[], T], seconds: float = RETRY_SECONDS, also: tuple[int, ...] = ()
    ) -> T:
        """Return the result of `request`, repeated while the server is unavailable."""
        began = time.monotonic()
        pause = 0.1
        warned = False
        refused = False
        while True:
            try:
                return request()
            except ApiError as error:
                again = error.transient or error.status in also
                unsure = error.status in UNSURE and not again
                if unsure and not refused:
                    # A started server repeats a real refusal.
                    refused = self._has_started(began)
                    again = True
                if not again or time.monotonic() + pause > began + seconds:
                    raise
                if pause == LONG_PAUSE and not warned:
                    # stdout may be the JSON of a command
                    text = f"warning: the API server is unavailable, still retrying: {error}"
                    print(text, file=sys.stderr, flush=True)
                    warned = True
            time.sleep(pause)
            pause = min(pause * 2, LONG_PAUSE)


def split_lines(chunks: Iterable[bytes], longest: int = 0) -> Iterator[bytes]:
    """Yield the lines of a stream; one of more than `longest` bytes is split, 0 for no limit."""
    rest = b""
    for chunk in chunks:
        lines = (rest + chunk).split(b"\n")
        *complete, rest = [piece for line in lines for piece in _pieces(line, longest)]
        yield from (line + b"\n" for line in complete)
    if rest:
        yield rest


def _pieces(line: bytes, longest: int) -> list[bytes]:
    step = longest or len(line) or 1
    starts = range(0, len(line) or 1, step)
    return [line[start : start + step] for start in starts]


def poll(seconds: float, pause: float) -> Iterator[bool]:
    """Yield whether `seconds` have passed, at once and after each pause, without end.

    It is for a state that nothing reports.
    """
    deadline = time.monotonic() + seconds
    while True:
        yield time.monotonic() >= deadline
        time.sleep(pause)


def own_pod(api: Api) -> Object | None:
    """Return the pod of this step; None outside of a KFP pod, or without the right to read it."""
    name = os.environ.get("KFP_POD_NAME", "")
    if not name:
        return None
    try:
        return api.get(PODS, name, retry=True)
    except ApiError as error:
        if error.transient:  # without its owner, a job would outlive the run
            raise
        return None


def schedulable_nodes(api: Api) -> list[Object]:
    """Return the nodes that accept pods; raise ApiError without the right to list them."""
    # An expired list is read again.
    pages = api.retry(lambda: list(api.pages(NODES)), also=(410,))
    nodes: list[Object] = []
    for page in pages:
        nodes += page["items"] or ()
    return [node for node in nodes if not node["spec"].get("unschedulable")]


def serves(api: Api, resource: Resource) -> bool:
    """Return whether the cluster has a resource; true without the right to look."""
    try:
        answer = api.call("GET", f"/apis/{resource.group_version}", retry=True)
    except ApiError as error:
        return error.status != 404
    return any(item["name"] == resource.plural for item in answer["resources"])


def allowed(api: Api, verb: str, resource: Resource) -> bool:
    """Return whether this account has a right; true when the server does not answer."""
    try:
        return api.retry(lambda: review(api, verb, resource.group, resource.plural))
    except ApiError:
        return True


def require(api: Api, resource: Resource, *verbs: str) -> None:
    """Raise InputError, with the name of this account, if it lacks one of these rights."""
    missing = [verb for verb in verbs if not allowed(api, verb, resource)]
    if missing:
        raise InputError(no_right(", ".join(missing), resource, api.namespace, own_user(api)))


def own_user(api: Api) -> str:
    """Return the user that the server takes this client for; '' where it does not say."""
    body: Object = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    with contextlib.suppress(ApiError):
        answer = api.call("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", body)
        return str(answer["status"]["userInfo"]["username"])
    return ""


def review(
    api: Api, verb: str, group: str, resource: str, subresource: str = "", user: str = ""
) -> bool:
    """Return whether this account, or `user`, has a right, by (Self)SubjectAccessReview."""
    attributes = {"namespace": api.namespace, "verb": verb, "group": group}
    attributes |= {"resource": resource, "subresource": subresource}
    kind = "SubjectAccessReview" if user else "SelfSubjectAccessReview"
    spec = {"resourceAttributes": attributes} | ({"user": user} if user else {})
    body: Object = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec}
    answer = api.call("POST", f"/apis/authorization.k8s.io/v1/{kind.lower()}s", body)
    return bool(answer["status"]["allowed"])

"""A cluster without machines: pods in any state, and an API server in memory."""

from collections.abc import Mapping
from typing import Any

from kubernetes import client

from kfp_ddp.jobs.follow.follower import Follower
from kfp_ddp.jobs.kinds.training_operator import INDEX, TYPE
from kfp_ddp.k8s.api import Api, ApiError, Object

MADE = "2026-01-01T00:00:00Z"
RUNS: Object = {"running": {"startedAt": MADE}}
PHASES = {"running": "Running", "terminated": "Failed", "waiting": "Pending"}


def ended(code: int, message: str = "", second: int = 0, reason: str = "Error") -> Object:
    """Return the state of a container that ended, so many seconds after `MADE`."""
    at = f"2026-01-01T00:{second // 60:02}:{second % 60:02}Z"
    stamp = {"exitCode": code, "message": message, "reason": reason, "finishedAt": at}
    return {"terminated": stamp}


def waiting(reason: str = "", message: str = "") -> Object:
    """Return the state of a container that waits."""
    return {"waiting": {"reason": reason, "message": message}}


def pod(
    name: str,
    state: Object = RUNS,
    *,
    uid: str = "",
    labels: Mapping[str, str] | None = None,
    spec: Mapping[str, Any] | None = None,
    where: str = "containerStatuses",
    **status: Any,
) -> Object:
    """Return a pod with one container in a state, from which its phase follows."""
    container = {"name": "pytorch", "image": "a:1", "state": state}
    return {
        "metadata": {"name": name, "uid": uid or name, "labels": dict(labels or {})},
        "spec": {"containers": [], **(spec or {})},
        "status": {"phase": PHASES[next(iter(state))], where: [container], **status},
    }


def worker(number: int, state: Object = RUNS, role: str = "worker", **more: Any) -> Object:
    """Return a pod of the job x as the Training Operator labels it."""
    labels = {TYPE: role, INDEX: str(number)}
    return pod(f"x-{role}-{number}", state, uid=f"{role}-{number}", labels=labels, **more)


def job(kind: str = "Created", **more: str) -> Object:
    """Return the job x with a condition."""
    meta = {"name": "x", "uid": "job", "creationTimestamp": MADE}
    return {"metadata": meta, "status": {"conditions": [{"type": kind, "status": "True", **more}]}}


def nowhere() -> Api:
    """Return an API server that cannot be reached."""
    return Api(client.ApiClient(client.Configuration(host="http://127.0.0.1:1")), "space")


def hold(follower: Follower, pods: Mapping[str, Object], *jobs: Object) -> Follower:
    """Return a follower whose watches hold these objects, and are not started."""
    watches = follower.watches
    watches.pods.objects = dict(pods)
    watches.jobs.objects = {item["metadata"]["uid"]: item for item in jobs}
    for watch in watches.all:
        watch.synced.set()
    watches.all = ()
    return follower


class FakeApi(Api):
    """Has objects by path, and creates, lists and deletes them; any other path is missing.

    In place of an object stands the status or the error with which requests for it are refused.
    """

    def __init__(self, objects: Mapping[str, Any] | None = None, namespace: str = "space") -> None:
        super().__init__(None, namespace)
        self.objects = dict(objects or {})
        self.requests: list[str] = []
        """Method and path of each."""
        self.queries: list[Any] = []

    def another(self) -> Api:
        return self

    def retry(self, request: Any, seconds: float = 0, also: tuple[int, ...] = ()) -> Any:
        return request()

    def deleted(self) -> list[str]:
        """Return the paths of which the deletion was requested."""
        return [one.removeprefix("DELETE ") for one in self.requests if one.startswith("DELETE")]

    def call(
        self, method: str, path: str, body: Any = None, query: Any = None, *_: Any, **__: Any
    ) -> Object:
        self.requests.append(f"{method} {path}")
        self.queries.append(query)
        if method == "DELETE":
            self.objects.pop(path, None)
            return {}
        if method == "POST" and path not in self.objects and "metadata" in body:
            return self._create(f"{path}/{body['metadata']['name']}", body, query or {})
        if path not in self.objects and "labelSelector" in (query or {}):
            return {"items": self._chosen(path, query["labelSelector"]), "metadata": {}}
        answer = self.objects.get(path, 404)
        if isinstance(answer, int):
            answer = ApiError(answer, "", "no")
        if isinstance(answer, ApiError):
            raise answer
        result: Object = answer
        return result

    def _create(self, path: str, body: Object, query: Mapping[str, str]) -> Object:
        if path in self.objects:
            raise ApiError(409, "AlreadyExists", f"{path} exists")
        if "dryRun" not in query:
            self.objects[path] = body
        return body

    def _chosen(self, path: str, selector: str) -> list[Object]:
        expected = set(selector.split(","))
        result = []
        for name, item in self.objects.items():
            if name.startswith(f"{path}/"):
                labels = {f"{key}={value}" for key, value in item["metadata"]["labels"].items()}
                result += [item] if expected <= labels else []
        return result

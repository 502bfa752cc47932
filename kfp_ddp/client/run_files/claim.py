"""A run's files on a claim, read through a pod that mounts it and lives no longer than that."""

import contextlib
import functools
import json
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from kfp_ddp.client.run_files import in_the_pod
from kfp_ddp.client.run_files.archive import unpack
from kfp_ddp.client.run_files.execute import execute
from kfp_ddp.client.run_files.files import RunFiles
from kfp_ddp.core.errors import JobError, StorageError, full
from kfp_ddp.core.run_folder import check_run_id
from kfp_ddp.core.text import one_line
from kfp_ddp.k8s.api import Api, ApiError, Object, core
from kfp_ddp.k8s.objects import conditions, has_ended, label, phase
from kfp_ddp.k8s.pods import TRANSIENT, container_reason
from kfp_ddp.runs.workspace.files import plain

MOUNT = "/work"
LABEL = "kfp-ddp/reads"
LONGEST_SECONDS = 3600
"""After so long the pod ends by itself, whoever forgot it."""
START_SECONDS = 120.0
USER = 1000
"""The user of our images, who owns what runs write."""


class ClaimFiles(RunFiles):
    """The files of a run in its folder on a claim, by way of a pod that mounts it."""

    def __init__(self, api: Api, pod: str, claim: str, run_id: str) -> None:
        check_run_id(run_id)
        self.where = f"{run_id} on the claim {claim}"
        self._api, self._pod, self._root = api, pod, f"{MOUNT}/{run_id}"

    def sizes(self) -> dict[str, int]:
        """Bytes of each file by its name."""
        answer = b"".join(self._asked(None))
        found: dict[str, int] = json.loads(answer)
        return {name: size for name, size in found.items() if plain(name)}

    def bring(self, names: Iterable[str], folder: Path) -> None:
        """Copy files to a folder."""
        wanted = list(names)
        if not wanted:
            return
        try:
            unpack(self._asked(wanted), frozenset(wanted), folder)
        except OSError as error:
            raise StorageError(full(error, folder)) from None

    def _asked(self, names: list[str] | None) -> Iterator[bytes]:
        program = Path(in_the_pod.__file__).read_text()
        asked = json.dumps({"root": self._root, "names": names})
        return execute(self._api, self._pod, ["python3", "-c", program], asked)


@contextlib.contextmanager
def on_a_claim(
    api: Api, claim: str, image: str, account: str = "", user: int = USER
) -> Iterator[Callable[[str], RunFiles]]:
    """The files of runs on a claim, by their ids; the pod that reads it goes with the block.

    Args:
        api: The namespace of the claim.
        claim: Its name.
        image: An image with a Python that the namespace can pull.
        account: Service account, for the secrets that it pulls images with.
        user: Id of the user that reads.

    Raises:
        KfpDdpError: there is no such claim, or the pod does not start.
    """
    name = f"kfp-ddp-reads-{uuid.uuid4().hex[:8]}"
    path = core(api.namespace, "pods", name)
    before = _stoppable()
    try:
        _sweep(api)
        node = _node_of(api, claim)
        body = _pod(name, claim, image, account, user, node)
        _asked(api, "POST", core(api.namespace, "pods"), body)
        _wait(api, path)
        yield functools.partial(ClaimFiles, api, name, claim)
    finally:
        with contextlib.suppress(ApiError):
            api.call("DELETE", path, {"gracePeriodSeconds": 0}, retry=True)
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _stoppable() -> Any:
    """Let SIGTERM leave blocks as an exit does; the handler before, None in another thread."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(143)

    main = threading.current_thread() is threading.main_thread()
    return signal.signal(signal.SIGTERM, leave) if main else None


def _asked(api: Api, method: str, path: str, body: Object | None = None) -> Object:
    try:
        return api.call(method, path, body, retry=True, retry_seconds=30)
    except ApiError as error:
        raise StorageError(
            f"the run's files cannot be read in namespace {api.namespace}: {error.message}"
        ) from None


def _sweep(api: Api) -> None:
    """Delete readers that ended and were forgotten."""
    for pod in _asked(api, "GET", core(api.namespace, "pods"))["items"]:
        if has_ended(pod) and label(pod, LABEL):
            api.delete(core(api.namespace, "pods", pod["metadata"]["name"]))


def _node_of(api: Api, claim: str) -> str:
    """Where a claim that only one node can mount is mounted now; '' where any node will do.

    Raises:
        StorageError: it is not there.
    """
    modes = _asked(api, "GET", core(api.namespace, "persistentvolumeclaims", claim))["spec"]
    if {"ReadWriteMany", "ReadOnlyMany"} & set(modes["accessModes"]):
        return ""
    for pod in _asked(api, "GET", core(api.namespace, "pods"))["items"]:
        claims = [v.get("persistentVolumeClaim") for v in pod["spec"].get("volumes") or []]
        if phase(pod) == "Running" and any(each and each["claimName"] == claim for each in claims):
            return str(pod["spec"]["nodeName"])
    return ""


def _pod(name: str, claim: str, image: str, account: str, user: int, node: str) -> Object:
    container = {
        "name": "reader",
        "image": image,
        "command": ["python3", "-c", f"import time; time.sleep({LONGEST_SECONDS})"],
        "volumeMounts": [{"name": "work", "mountPath": MOUNT, "readOnly": True}],
        "resources": {
            "requests": {"cpu": "50m", "memory": "64Mi"},
            "limits": {"cpu": "1", "memory": "256Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    spec: Object = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": LONGEST_SECONDS,
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsUser": user,
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        # The mount alone is read-only: a volume that is attached so would hold up its writers.
        "volumes": [{"name": "work", "persistentVolumeClaim": {"claimName": claim}}],
    }
    if account:
        spec["serviceAccountName"] = account
    if node:
        spec["nodeName"] = node
    labels = {LABEL: "run", "app.kubernetes.io/managed-by": "kfp-ddp"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": labels,
            "annotations": {"sidecar.istio.io/inject": "false"},
        },
        "spec": spec,
    }


def _wait(api: Api, path: str) -> None:
    """Wait until the pod runs.

    Raises:
        JobError: it does not, with what keeps it.
    """
    until, pod = time.monotonic() + START_SECONDS, None
    while time.monotonic() < until:
        pod = _asked(api, "GET", path)
        if phase(pod) == "Running":
            return
        reason = container_reason(pod)
        if phase(pod) == "Failed" or (reason and reason.kind not in TRANSIENT):
            break
        time.sleep(0.3)
    raise JobError(f"the pod that reads the run's files does not start: {_why(pod or {})}")


def _why(pod: Object) -> str:
    reason, status = container_reason(pod), pod.get("status") or {}
    lacking = [each.get("message") for each in conditions(pod) if each["status"] != "True"]
    told = reason.text if reason else status.get("message") or next(filter(None, lacking), "")
    return one_line(str(told)) or "no node has taken it"

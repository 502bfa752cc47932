"""A run's files on a PVC, read through a temporary pod that mounts it."""

import contextlib
import functools
import json
import os
import shutil
import signal
import tarfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from kfp_ddp.client import pod_program
from kfp_ddp.client.run_files import RunFiles
from kfp_ddp.core.errors import JobError, StorageError, full
from kfp_ddp.core.run_folder import check_run_id
from kfp_ddp.core.text import one_line
from kfp_ddp.k8s.api import Api, ApiError, Object, core
from kfp_ddp.k8s.objects import conditions, has_ended, label, phase
from kfp_ddp.k8s.pods import TRANSIENT, container_reason
from kfp_ddp.runs.workspace import is_plain

MOUNT = "/work"
LABEL = "kfp-ddp/reads"
LONGEST_SECONDS = 3600
"""Deadline of the pod, in case it is never deleted."""
START_SECONDS = 120.0
IDLE_SECONDS = 120.0
USER = 1000
"""The user of our images, who owns the files of runs."""
STDIN, STDOUT, STDERR, STATUS = 0, 1, 2, 3


class ClaimFiles(RunFiles):
    """The files of a run in its folder on a PVC, through a pod that mounts it."""

    def __init__(self, api: Api, pod: str, claim: str, run_id: str) -> None:
        check_run_id(run_id)
        self.where = f"{run_id} on the claim {claim}"
        self._api, self._pod, self._root = api, pod, f"{MOUNT}/{run_id}"

    def sizes(self) -> dict[str, int]:
        """Return the size of each file in bytes, by its name."""
        sizes: dict[str, int] = json.loads(b"".join(self._run(None)))
        return {name: size for name, size in sizes.items() if is_plain(name)}

    def fetch(self, names: Iterable[str], folder: Path) -> None:
        """Copy files to a folder."""
        requested = list(names)
        if not requested:
            return
        try:
            unpack(self._run(requested), frozenset(requested), folder)
        except OSError as error:
            raise StorageError(full(error, folder)) from None

    def _run(self, names: list[str] | None) -> Iterator[bytes]:
        program = Path(pod_program.__file__).read_text()
        request = json.dumps({"root": self._root, "names": names})
        return execute(self._api, self._pod, ["python3", "-c", program], request)


@contextlib.contextmanager
def open_claim(
    api: Api, claim: str, image: str, account: str = "", user: int = USER
) -> Iterator[Callable[[str], RunFiles]]:
    """Yield a function from a run's id to its files on a PVC; delete the pod on exit.

    Args:
        image: An image with Python that the namespace can pull.
        account: Service account, for its image pull secrets.
    """
    name = f"kfp-ddp-reads-{uuid.uuid4().hex[:8]}"
    path = core(api.namespace, "pods", name)
    before = _exit_on_sigterm()
    try:
        _delete_old_pods(api)
        node = _node_of(api, claim)
        body = _manifest(name, claim, image, account, user, node)
        _call(api, "POST", core(api.namespace, "pods"), body)
        _wait_until_running(api, path)
        yield functools.partial(ClaimFiles, api, name, claim)
    finally:
        with contextlib.suppress(ApiError):
            api.call("DELETE", path, {"gracePeriodSeconds": 0}, retry=True)
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def execute(api: Api, pod: str, command: list[str], line: str) -> Iterator[bytes]:
    """Run a program in a pod, and yield the blocks that it writes to stdout.

    Raises:
        StorageError: the connection was refused or cut, or the program failed.
    """
    from kubernetes.stream.ws_client import create_websocket, get_websocket_url
    from websocket import WebSocketException

    query = [("command", argument) for argument in command]
    query += [(name, "true") for name in ("stdin", "stdout", "stderr")]
    headers: dict[str, str] = {}
    api.client.update_params_for_auth(headers, query, ["BearerToken"])
    configuration = api.client.configuration
    url = f"{configuration.host}{core(api.namespace, 'pods', pod)}/exec"
    try:
        socket = create_websocket(configuration, get_websocket_url(url, query), headers)
    except (WebSocketException, OSError) as error:
        raise StorageError(
            f"no program can be run in pod {pod}: {one_line(error)}; the permission for "
            "pods/exec is required"
        ) from None
    errors = b""
    try:
        socket.settimeout(IDLE_SECONDS)
        socket.send_binary(bytes([STDIN]) + line.encode() + b"\n")
        while frame := socket.recv():
            channel, block = frame[0], frame[1:]
            if channel == STDOUT and block:
                yield block
            elif channel == STDERR:
                errors = (errors + block)[-4096:]
            elif channel == STATUS:
                _check_status(json.loads(block), errors.decode(errors="replace"))
                return
    except (WebSocketException, OSError) as error:
        raise StorageError(
            f"the connection to pod {pod} was cut: {one_line(error)}; try again"
        ) from None
    finally:
        socket.close(timeout=1)
    raise StorageError(f"the connection to pod {pod} was closed early; try again")


def unpack(blocks: Iterator[bytes], names: Collection[str], folder: Path) -> None:
    """Write the named files of a tar stream below a folder, each atomically; ignore all others.

    Raises:
        StorageError: the stream ended early, or is not a tar archive.
        OSError: the disk is full.
    """
    try:
        stream: Any = _Blocks(blocks)  # tarfile's type also has seek
        with tarfile.open(fileobj=stream, mode="r|", bufsize=1 << 20) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isreg() else None
                if content is None or member.name not in names:
                    continue
                path = folder / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary = path.with_name(f".{path.name}.incoming")
                with temporary.open("wb") as into:
                    shutil.copyfileobj(content, into, 1 << 20)
                os.replace(temporary, path)
        with contextlib.suppress(StopIteration):
            while True:
                next(blocks)  # the exit status comes last
    except tarfile.TarError as error:
        raise StorageError(f"the files were cut short ({error}); try again") from None


class _Blocks:
    """Blocks of bytes as a file for tarfile."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest = blocks, bytearray()

    def read(self, size: int) -> bytes:
        while len(self._rest) < size and (block := next(self._blocks, b"")):
            self._rest += block
        content = bytes(self._rest[:size])
        del self._rest[:size]
        return content


def _check_status(status: dict[str, str], errors: str) -> None:
    if status.get("status") != "Success":
        last = errors.strip().splitlines()[-1:] or [status.get("message", "unknown error")]
        raise StorageError(f"the run's files cannot be read: {one_line(last[0])}")


def _exit_on_sigterm() -> Any:
    """Exit on SIGTERM through `finally` blocks; return the old handler, None in a thread."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(143)

    main = threading.current_thread() is threading.main_thread()
    return signal.signal(signal.SIGTERM, leave) if main else None


def _call(api: Api, method: str, path: str, body: Object | None = None) -> Object:
    try:
        return api.call(method, path, body, retry=True, retry_seconds=30)
    except ApiError as error:
        raise StorageError(
            f"the run's files cannot be read in namespace {api.namespace}: {error.message}"
        ) from None


def _delete_old_pods(api: Api) -> None:
    """Delete pods of earlier calls that were left and have ended."""
    for pod in _call(api, "GET", core(api.namespace, "pods"))["items"]:
        if has_ended(pod) and label(pod, LABEL):
            api.delete(core(api.namespace, "pods", pod["metadata"]["name"]))


def _node_of(api: Api, claim: str) -> str:
    """Return the node that mounts a ReadWriteOnce PVC now; '' if any node will do."""
    spec = _call(api, "GET", core(api.namespace, "persistentvolumeclaims", claim))["spec"]
    if {"ReadWriteMany", "ReadOnlyMany"} & set(spec["accessModes"]):
        return ""
    for pod in _call(api, "GET", core(api.namespace, "pods"))["items"]:
        claims = [v.get("persistentVolumeClaim") for v in pod["spec"].get("volumes") or []]
        if phase(pod) == "Running" and any(one and one["claimName"] == claim for one in claims):
            return str(pod["spec"]["nodeName"])
    return ""


def _manifest(name: str, claim: str, image: str, account: str, user: int, node: str) -> Object:
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
        # Only the mount is read-only: a volume attached as read-only would block its writers.
        "volumes": [{"name": "work", "persistentVolumeClaim": {"claimName": claim}}],
    }
    if account:
        spec["serviceAccountName"] = account
    if node:
        spec["nodeName"] = node
    metadata = {
        "name": name,
        "labels": {LABEL: "run", "app.kubernetes.io/managed-by": "kfp-ddp"},
        "annotations": {"sidecar.istio.io/inject": "false"},
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _wait_until_running(api: Api, path: str) -> None:
    """Wait until the pod runs."""
    deadline, pod = time.monotonic() + START_SECONDS, None
    while time.monotonic() < deadline:
        pod = _call(api, "GET", path)
        if phase(pod) == "Running":
            return
        reason = container_reason(pod)
        if phase(pod) == "Failed" or (reason and reason.kind not in TRANSIENT):
            break
        time.sleep(0.3)
    raise JobError(f"the pod that reads the run's files does not start: {_reason(pod or {})}")


def _reason(pod: Object) -> str:
    reason, status = container_reason(pod), pod.get("status") or {}
    unmet = [one.get("message") for one in conditions(pod) if one["status"] != "True"]
    text = reason.text if reason else status.get("message") or next(filter(None, unmet), "")
    return one_line(str(text)) or "no node has accepted it"

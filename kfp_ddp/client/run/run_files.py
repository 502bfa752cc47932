"""The files that a run wrote: in a folder, below a URI, or on a PVC, read through a pod."""

import contextlib
import functools
import json
import os
import shutil
import signal
import sys
import tarfile
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from kfp_ddp.client import pod_program
from kfp_ddp.core.errors import JobError, StorageError, writing
from kfp_ddp.core.run_folder import check_run_id
from kfp_ddp.core.step import handling_signals
from kfp_ddp.core.text import one_line
from kfp_ddp.k8s.api import Api, ApiError, Object, poll
from kfp_ddp.k8s.objects import has_ended, label, phase
from kfp_ddp.k8s.pods import TRANSIENT, container_reason, failure_reason, waiting_reason
from kfp_ddp.k8s.resource import CLAIMS, PODS
from kfp_ddp.runs.workspace import fetch, is_plain
from kfp_ddp.storage.kinds import open_store


class RunFiles(Protocol):
    """Files of one run, named `<task>/<file>`; hidden ones and links are left out."""

    where: str
    note: str
    """What this place lacks, and why it is read; '' for the run's own folder."""

    def sizes(self) -> dict[str, int]:
        """Return the size of each file in bytes, by its name; empty if there are none."""

    def fetch(self, names: Iterable[str], folder: Path) -> None:
        """Copy files to a folder, each atomically; skip those that were deleted."""


class StoredFiles:
    """The files of a run below a local folder or a URI such as gs://."""

    note = ""

    def __init__(self, uri: str, prefix: str = "") -> None:
        """Open the folder; its files are named `<prefix><file>`."""
        self.where = uri.rstrip("/")
        self._prefix = prefix
        self._store = open_store(self.where)

    def sizes(self) -> dict[str, int]:
        """Return the size of each file; see `RunFiles`."""
        listed = self._store.list("")
        return {f"{self._prefix}{name}": size for name, size in listed if is_plain(name)}

    def fetch(self, names: Iterable[str], folder: Path) -> None:
        """Copy files to a folder; see `RunFiles`."""
        stored = [name.removeprefix(self._prefix) for name in names]
        with writing(folder):
            fetch(self._store, stored, folder / self._prefix)


MOUNT = "/work"
LABEL = "kfp-ddp/reads"
LONGEST_SECONDS = 3600
"""Deadline of the pod, in case it is never deleted."""
START_SECONDS = 120.0
IDLE_SECONDS = 120.0
RETRY: dict[str, Any] = {"retry": True, "retry_seconds": 30.0}
USER = 1000
"""The user of our images, who owns the files of runs."""
STDIN = 0
STDOUT = 1
STDERR = 2
STATUS = 3
"""Channel of the exit status; the protocol of Kubernetes numbers these four."""
POD = f"""
apiVersion: v1
kind: Pod
metadata:
  labels: {{{LABEL}: run, app.kubernetes.io/managed-by: kfp-ddp}}
  annotations: {{sidecar.istio.io/inject: "false"}}
spec:
  restartPolicy: Never
  activeDeadlineSeconds: {LONGEST_SECONDS}
  terminationGracePeriodSeconds: 0
  automountServiceAccountToken: false
  securityContext: {{runAsNonRoot: true, seccompProfile: {{type: RuntimeDefault}}}}
  containers:
  - name: reader
    command: [python3, -c, "import time; time.sleep({LONGEST_SECONDS})"]
    volumeMounts: [{{name: work, mountPath: {MOUNT}, readOnly: true}}]
    resources:
      requests: {{cpu: 50m, memory: 64Mi}}
      limits: {{cpu: "1", memory: 256Mi}}
    securityContext: {{allowPrivilegeEscalation: false, capabilities: {{drop: [ALL]}}}}
  volumes:  # only the mount is read-only: a volume attached as read-only would block its writers
  - {{name: work, persistentVolumeClaim: {{}}}}
"""


class ClaimFiles:
    """The files of a run in its folder on a PVC, through a pod that mounts it."""

    note = ""

    def __init__(self, api: Api, pod: str, claim: str, run_id: str) -> None:
        check_run_id(run_id)
        self.where = f"{run_id} on the claim {claim}"
        self._api = api
        self._pod = pod
        self._root = f"{MOUNT}/{run_id}"

    def sizes(self) -> dict[str, int]:
        """Return the size of each file; see `RunFiles`."""
        sizes: dict[str, int] = json.loads(b"".join(self._run(None)))
        return {name: size for name, size in sizes.items() if is_plain(name)}

    def fetch(self, names: Iterable[str], folder: Path) -> None:
        """Copy files to a folder; see `RunFiles`."""
        requested = list(names)
        if not requested:
            return
        with writing(folder):
            unpack(self._run(requested), frozenset(requested), folder)

    def _run(self, names: list[str] | None) -> Iterator[bytes]:
        program = Path(pod_program.__file__).read_text()
        request = json.dumps({"root": self._root, "names": names})
        return execute(self._api, self._pod, ["python3", "-c", program], request)


@contextlib.contextmanager
def open_claim(
    api: Api, claim: str, image: str, account: str = "", user: int = USER
) -> Iterator[Callable[[str], RunFiles]]:
    """Yield a function from a run's id to its files on a PVC; delete the pod on exit.

    The image has Python and can be pulled, by the pull secrets of the service account `account`.
    """
    name = f"kfp-ddp-reads-{uuid.uuid4().hex[:8]}"
    main = threading.current_thread() is threading.main_thread()
    exiting = handling_signals(lambda number, _: sys.exit(128 + number), signal.SIGTERM)
    with exiting if main else contextlib.nullcontext():
        try:
            try:
                pods = api.list_objects(PODS, **RETRY)
                for pod in pods:  # those of earlier calls that were left
                    if has_ended(pod) and label(pod, LABEL):
                        api.delete(PODS, pod["metadata"]["name"])
                body = _manifest(name, claim, image, account, user, _node_of(api, claim, pods))
                # No role of deploy/ grants the right to create pods.
                api.create(PODS._replace(role=""), body, **RETRY)
                _wait_until_running(api, name)
            except ApiError as error:
                raise StorageError(f"the run's files cannot be read: {error}") from None
            yield functools.partial(ClaimFiles, api, name, claim)
        finally:
            with contextlib.suppress(ApiError):
                api.delete(PODS, name, {"gracePeriodSeconds": 0})


def execute(api: Api, pod: str, command: list[str], line: str) -> Iterator[bytes]:
    """Run a program in a pod, and yield blocks of its stdout; raise StorageError if it fails."""
    from kubernetes.stream.ws_client import create_websocket, get_websocket_url
    from websocket import WebSocketException

    query = [("command", argument) for argument in command]
    query += [(name, "true") for name in ("stdin", "stdout", "stderr")]
    headers: dict[str, str] = {}
    api.client.update_params_for_auth(headers, query, ["BearerToken"])
    configuration = api.client.configuration
    url = f"{configuration.host}{PODS.path(api.namespace, pod)}/exec"
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
            channel = frame[0]
            block = frame[1:]
            if channel == STDOUT and block:
                yield block
            elif channel == STDERR:
                errors = (errors + block)[-4096:]
            elif channel == STATUS:
                status: dict[str, str] = json.loads(block)
                if status.get("status") == "Success":
                    return
                last = errors.decode(errors="replace").strip().rpartition("\n")[2]
                reason = one_line(last or status.get("message", "unknown error"))
                raise StorageError(f"the run's files cannot be read: {reason}")
    except (WebSocketException, OSError) as error:
        raise StorageError(
            f"the connection to pod {pod} was cut: {one_line(error)}; try again"
        ) from None
    finally:
        socket.close(timeout=1)
    raise StorageError(f"the connection to pod {pod} was closed early; try again")


def unpack(blocks: Iterator[bytes], names: Collection[str], folder: Path) -> None:
    """Write the named files of a tar stream below a folder, each atomically; ignore all others.

    StorageError: the stream ended early, or is not a tar archive. OSError: the disk is full.
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
        for _ in blocks:  # the exit status comes last
            pass
    except tarfile.TarError as error:
        raise StorageError(f"the files were cut short ({error}); try again") from None


class _Blocks:
    """Blocks of bytes as a file for tarfile."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = bytearray()

    def read(self, size: int) -> bytes:
        while len(self._rest) < size and (block := next(self._blocks, b"")):
            self._rest += block
        content = bytes(self._rest[:size])
        del self._rest[:size]
        return content


def _node_of(api: Api, claim: str, pods: list[Object]) -> str:
    """Return the node that mounts a ReadWriteOnce PVC now; '' if any node will do."""
    volume = api.get(CLAIMS, claim, **RETRY)
    if volume is None:
        raise StorageError(f"claim {claim} does not exist in namespace {api.namespace}")
    if {"ReadWriteMany", "ReadOnlyMany"} & set(volume["spec"]["accessModes"]):
        return ""
    for pod in pods:
        if phase(pod) == "Running" and claim in _claims_of(pod):
            return str(pod["spec"]["nodeName"])
    return ""


def _claims_of(pod: Object) -> Iterator[str]:
    """Yield the names of the PVCs that a pod mounts."""
    for volume in pod["spec"].get("volumes") or []:
        if mounted := volume.get("persistentVolumeClaim"):
            yield mounted["claimName"]


def _manifest(name: str, claim: str, image: str, account: str, user: int, node: str) -> Object:
    import yaml

    pod: Object = yaml.safe_load(POD)
    spec = pod["spec"]
    pod["metadata"]["name"] = name
    spec["containers"][0]["image"] = image
    spec["securityContext"]["runAsUser"] = user
    spec["volumes"][0]["persistentVolumeClaim"]["claimName"] = claim
    if account:
        spec["serviceAccountName"] = account
    if node:
        spec["nodeName"] = node
    return pod


def _wait_until_running(api: Api, name: str) -> None:
    for late in poll(START_SECONDS, 0.3):
        pod = api.get(PODS, name, **RETRY) or {}
        if not pod:
            raise JobError("the pod that reads the run's files was deleted; try again")
        if phase(pod) == "Running":
            return
        reason = container_reason(pod)
        stays = reason is not None and reason.kind not in TRANSIENT
        failed = stays or phase(pod) == "Failed"
        if late or failed:
            break
    reason = failure_reason(pod) or waiting_reason(pod)
    why = reason.text if reason else "no node has accepted it"
    raise JobError(f"the pod that reads the run's files does not start: {why}")

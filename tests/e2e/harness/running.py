"""One pod of a step: made, followed, and told apart as succeeded, failed or lost."""

import contextlib
import threading
import time
from typing import Any, Literal

import urllib3
from kubernetes import client
from kubernetes.stream import stream

from tests.e2e.harness.grounds import Grounds, until, with_retries

Ending = Literal["Succeeded", "Failed", "Lost"]
SEEN = "kfp-ddp.test/seen"
GONE = "unable to retrieve container logs"
"""What a kubelet writes for the log of a container that it has removed, as of a deleted pod."""


class Attempt:
    """A pod that runs a step once.

    A pod that is deleted before it ended is lost, and its step is run again; unless Argo's
    controller sees it fail before it is gone, which fails the step. See `evict`.
    """

    def __init__(self, grounds: Grounds, manifest: dict[str, Any]) -> None:
        self._grounds, self._manifest = grounds, manifest
        self._lines: list[str] = []
        self._follower: threading.Thread | None = None
        self.started = time.time()
        self.uid = ""
        self.ended: Ending | None = None
        self.error = ""
        """What Argo makes of how a container failed, which the UI shows as the step's error."""

    @property
    def name(self) -> str:
        return str(self._manifest["metadata"]["name"])

    def log(self) -> str:
        """What the step has written so far."""
        return "\n".join(self._lines)

    def wait(self, seconds: float = 600.0) -> Ending:
        """Make the pod and follow it to its end.

        Raises:
            TimeoutError: when it is still there after `seconds`.
        """
        self._create()
        deadline = time.monotonic() + seconds
        while self.ended is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} goes on after {seconds:.0f} s:\n{self.log()}")
            self._look()
            time.sleep(0.2)
        return self.ended

    def _create(self) -> None:
        def make() -> Any:
            try:
                return self._grounds.core.create_namespaced_pod(
                    self._grounds.namespace, self._manifest
                )
            except client.ApiException as error:
                if error.status == 409:  # made by a call whose answer was lost
                    return self._read()
                raise

        self.uid = with_retries(make).metadata.uid

    def _read(self) -> Any:
        try:
            return with_retries(
                lambda: self._grounds.core.read_namespaced_pod(self.name, self._grounds.namespace)
            )
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise

    def _look(self) -> None:
        pod = self._read()
        if pod is None or pod.metadata.uid != self.uid:
            self.ended = "Lost"
            return
        if pod.status.phase != "Pending" and self._follower is None:
            self._follower = threading.Thread(target=self._follow, daemon=True)
            self._follower.start()
        leaves, seen = pod.metadata.deletion_timestamp, SEEN in (pod.metadata.finalizers or [])
        if pod.status.phase in ("Succeeded", "Failed") and (leaves is None or seen):
            whole = self._whole_log()
            if whole[:1] and whole[0].startswith(GONE) and self._follower is not None:
                self._follower.join(10)  # what it kept is all there is
            else:
                self._lines = whole
            self.error = _error(pod)
            if seen:
                free = {"metadata": {"finalizers": None}}
                self._grounds.core.patch_namespaced_pod(self.name, self._grounds.namespace, free)
            self.ended = "Succeeded" if pod.status.phase == "Succeeded" else "Failed"

    def _whole_log(self) -> list[str]:
        text: str = with_retries(
            lambda: self._grounds.core.read_namespaced_pod_log(
                self.name, self._grounds.namespace, container="main"
            )
        )
        return text.splitlines()

    def _follow(self) -> None:
        """Keep the lines as they come: of a pod that is deleted, they are all there is."""
        with contextlib.suppress(client.ApiException, urllib3.exceptions.HTTPError):
            answer = self._grounds.core.read_namespaced_pod_log(
                self.name,
                self._grounds.namespace,
                container="main",
                follow=True,
                _preload_content=False,
            )
            pending = b""
            with contextlib.closing(answer):
                for block in answer.stream(4096):
                    *lines, pending = (pending + block).split(b"\n")
                    if self.ended is not None:
                        return
                    self._lines += [line.decode(errors="replace") for line in lines]


def _error(pod: Any) -> str:
    """As Argo says it: "main: Error (exit code 143): " and the termination message, if any."""
    for status in pod.status.container_statuses or []:
        ended = status.state.terminated
        if ended is not None and ended.exit_code:
            message = f": {ended.message}" if ended.message else ""
            return f"{status.name}: {ended.reason} (exit code {ended.exit_code}){message}"
    return ""


def evict(grounds: Grounds, pod: str, *, seen: bool) -> None:
    """Delete a step's pod with its time of grace, as a drain does.

    Which comes first is a race in Argo, as measured: of 9 such pods 4 were `seen` as failed by the
    controller before they were gone, which failed the run, and 5 were run again.
    """
    if seen:
        hold: Any = {"metadata": {"finalizers": [SEEN]}}
        with_retries(lambda: grounds.core.patch_namespaced_pod(pod, grounds.namespace, hold))
    with_retries(lambda: grounds.core.delete_namespaced_pod(pod, grounds.namespace))


def forget(grounds: Grounds, pod: str) -> None:
    """Remove the pod of a step that is to be run again, and wait until it is gone."""

    def gone() -> bool:
        try:
            grounds.core.delete_namespaced_pod(pod, grounds.namespace, grace_period_seconds=0)
        except client.ApiException as error:
            return bool(error.status == 404)
        return False

    until(gone, f"the end of {pod}")


def signal_step(grounds: Grounds, pod: str) -> None:
    """Send SIGTERM to PID 1 of a step's pod as Argo does; a pod that is pending is deleted."""
    try:
        result = with_retries(lambda: grounds.core.read_namespaced_pod(pod, grounds.namespace))
        if result.status.phase == "Pending":
            grounds.core.delete_namespaced_pod(pod, grounds.namespace)
        elif result.status.phase == "Running":
            run_in(grounds, pod, ["kill", "-TERM", "1"])
    except client.ApiException as error:
        if error.status != 404:
            raise


def run_in(grounds: Grounds, pod: str, command: list[str], container: str | None = None) -> str:
    """Run a command in a pod's container; what it wrote."""
    # stream() changes the client that it is given, so it gets one of its own.
    with client.ApiClient(grounds.api.configuration) as own:
        session = stream(
            client.CoreV1Api(own).connect_get_namespaced_pod_exec,
            pod,
            grounds.namespace,
            command=command,
            stdout=True,
            stderr=True,
            _preload_content=False,
            **({"container": container} if container else {}),
        )
        with contextlib.closing(session):
            session.run_forever(timeout=30)
            written: str = session.read_all()
    return written

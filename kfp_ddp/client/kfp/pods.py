"""The pods of a run on the cluster, of its steps and jobs, and their logs, also from KFP."""

import base64
import gzip
import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from kfp_ddp.client.kfp.steps import DRIVER, OVER, Leaf, Step
from kfp_ddp.core.errors import ServerError, StorageError
from kfp_ddp.core.settings import mapping_in
from kfp_ddp.core.text import one_line
from kfp_ddp.jobs.identity import KFP_RUN
from kfp_ddp.k8s.api import Api, ApiError, Object, Refused, split_lines
from kfp_ddp.k8s.objects import annotation
from kfp_ddp.k8s.pods import OUT_OF_MEMORY, failure_reason, has_started, node_of
from kfp_ddp.k8s.resource import EVENTS, PODS, WORKFLOWS, Resource

if TYPE_CHECKING:
    from kfp_ddp.client.kfp.compat import Client

LOG = "/apis/v1alpha1/runs/{run_id}/nodes/{node_id}/log"
NO_LOG = "Failed to read logs"
"""In KFP's error for a node without a log."""
LONGEST = 1 << 20
MAIN = "main"
"""The container of a step's pod that runs the program."""
LOG_SECONDS = 60.0
NODE_ID = "workflows.argoproj.io/node-id"
LAUNCHER = re.compile(r"[IWEF]\d{4} [\d:.]+ +\d+ [\w.]+\.go:\d+\] ")
"""The start of a line that KFP's launcher logs, in the log of the step itself."""


class PodEvent(NamedTuple):
    """A warning about an object of the cluster."""

    object: str
    reason: str
    message: str
    times: int
    last: datetime | None


def list_nodes(api: Api, run_id: str) -> list[Object]:
    """Return the nodes of a run's Workflow; empty if it was deleted, or may not be read."""
    selector = f"{KFP_RUN}={run_id}"
    try:
        items = api.list_objects(WORKFLOWS, {"labelSelector": selector})
    except Refused:
        return []
    if not items:
        return []
    status = items[0].get("status") or {}
    packed = status.get("compressedNodes")
    if packed:  # the nodes take about 1 MB or more
        text = gzip.decompress(base64.b64decode(packed))
        nodes = json.loads(text)
    else:
        nodes = status.get("nodes") or {}
    return list(nodes.values())


def list_pods(api: Api, run_id: str, label: str = KFP_RUN) -> list[Object]:
    """Return the pods of a run's steps and drivers, oldest first; raise StorageError if unread.

    With the label RUN they are those of its jobs.
    """
    selector = f"{label}={run_id}"
    pods = _objects(api, PODS, {"labelSelector": selector})
    return sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))


def find_pod(pods: Sequence[Object], step: Step, driver: bool = False) -> Object | None:
    """Return the newest pod of a step, or of its driver; None if it does not exist."""
    if driver:
        nodes: tuple[str, ...] = (step.driver,) if step.driver else ()
        end = f".{step.name}{DRIVER}"
    else:
        nodes = step.pods
        end = f".{step.name}.executor"
    if nodes:
        return _pod_of_nodes(pods, nodes)
    # Without the Workflow only the ends of the nodes' names are known.
    for pod in reversed(pods):
        if node_of(pod).endswith(end):
            return pod
    return None


def _pod_of_nodes(pods: Sequence[Object], nodes: Sequence[str]) -> Object | None:
    """Return the pod of the last of these nodes that has one."""
    by_node = {annotation(pod, NODE_ID): pod for pod in pods}
    for node in reversed(nodes):
        if node in by_node:
            return by_node[node]
    return None


def warnings(api: Api, pods: Sequence[Object]) -> list[PodEvent]:
    """Return the warnings of these pods, oldest first, each kind once; raise as above."""
    names = {pod["metadata"]["name"] for pod in pods}
    events: dict[tuple[str, str, str], PodEvent] = {}
    for item in _objects(api, EVENTS, {"fieldSelector": "type=Warning"}):
        name = item["involvedObject"].get("name", "")
        if name not in names:
            continue
        reason = str(item.get("reason", ""))
        message = one_line(str(item.get("message", "")))
        key = (name, reason, message)
        times = int(item.get("count") or 1)
        if key in events:
            times += events[key].times
        last = item.get("lastTimestamp") or item.get("eventTime")
        time = datetime.fromisoformat(last) if last else None
        events[key] = PodEvent(name, reason, message, times, time)
    return sorted(events.values(), key=_last)


def _last(event: PodEvent) -> float:
    """Return when an event happened last, as a key to sort by; those without a time come first."""
    return event.last.timestamp() if event.last else 0


def log(api: Api, pod: Object, tail: int = 0) -> Iterator[str]:
    """Yield the lines of a step's log, none before its start; StorageError if unreadable."""
    if not has_started(pod, MAIN):
        return
    name = pod["metadata"]["name"]
    path = f"{PODS.path(api.namespace, name)}/log"
    query = {"container": MAIN}
    if tail:
        query["tailLines"] = str(tail)
    try:
        for line in api.lines(path, query, LOG_SECONDS):
            yield _text(line)
    except ApiError as error:
        raise StorageError(f"the log of pod {name} cannot be read: {error.message}") from None


class KfpLogs:
    """The logs of a run's nodes from KFP, which also has those of deleted pods."""

    def __init__(self, client: "Client", run_id: str) -> None:
        self._client = client
        self._run_id = run_id

    def lines(self, leaf: Leaf) -> Iterator[str]:
        """Yield a step's log, of all its iterations; raise StorageError if it is over without."""
        iterations = leaf.step.nodes or ((),)  # without nodes `log` says that there is no pod
        for nodes in iterations:
            try:
                yield from self.log(nodes)
            except StorageError as error:
                if leaf.step.state in OVER:
                    raise StorageError(f"KFP has no log of {leaf.label}: {error}") from None

    def log(self, nodes: Sequence[str], follow: bool = False) -> Iterator[str]:
        """Yield the log of the last of these nodes that has one; StorageError if none has."""
        problem = "it lists no pod of it"
        for node in reversed(nodes):
            lines = self._lines(node, follow)
            try:
                first = next(lines, None)
            except (StorageError, ServerError) as error:
                if isinstance(error, ServerError) and NO_LOG not in str(error):
                    raise
                problem = str(error)
                continue
            if first is not None:
                yield first
                yield from lines
            return
        raise StorageError(problem)

    def _lines(self, node: str, follow: bool) -> Iterator[str]:
        query = {"follow": "true"} if follow else {}
        blocks = self._client.blocks(LOG, query, run_id=self._run_id, node_id=node)
        for line in split_lines(blocks, LONGEST):
            # KFP 2.17 answers 200 also where there is no log, or where it breaks off.
            complete = line.endswith(b"\n")
            if line.startswith(b'{"error_message"') and not complete:
                message = str(mapping_in(line).get("error_message"))
                _, _, reason = message.rpartition("due to ")
                raise StorageError(one_line(reason))
            yield _text(line)


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\n")


def kill_reason(pod: Object) -> str:
    """Return why Kubernetes ended a step's pod; '' if its program ended."""
    reason = failure_reason(pod)
    if reason is None:
        return ""
    if reason.kind == OUT_OF_MEMORY:
        return f"{reason.text}: give the step more memory"
    return reason.text


def _objects(api: Api, resource: Resource, query: dict[str, str]) -> list[Object]:
    try:
        return api.list_objects(resource, query, retry=True, retry_seconds=30)
    except ApiError as error:
        raise StorageError(str(error)) from None

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
from kfp_ddp.k8s.pods import OUT_OF_MEMORY, failure_reason, has_started
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
NODE_ID, NODE_NAME = "workflows.argoproj.io/node-id", "workflows.argoproj.io/node-name"
LAUNCHER = re.compile(r"[IWEF]\d{4} [\d:.]+ +\d+ [\w.]+\.go:\d+\] ")
"""The start of a line that KFP's launcher logs, in the log of the step itself."""
ATTEMPTS = re.compile(r"\(\d+\)")


class PodEvent(NamedTuple):
    """A warning about an object of the cluster."""

    object: str
    reason: str
    message: str
    times: int
    last: datetime | None


def list_nodes(api: Api, run_id: str) -> list[Object]:
    """Return the nodes of a run's Workflow; empty if it was deleted, or may not be read."""
    try:
        items = api.list_objects(WORKFLOWS, {"labelSelector": f"{KFP_RUN}={run_id}"})
    except Refused:
        return []
    status = (items[0].get("status") or {}) if items else {}
    nodes = status.get("nodes") or {}
    if packed := status.get("compressedNodes"):  # of about 1 MB or more
        nodes = json.loads(gzip.decompress(base64.b64decode(packed)))
    return list(nodes.values())


def list_pods(api: Api, run_id: str, label: str = KFP_RUN) -> list[Object]:
    """Return the pods of a run's steps and drivers, oldest first; raise StorageError if unread.

    With the label RUN they are those of its jobs.
    """
    pods = _objects(api, PODS, {"labelSelector": f"{label}={run_id}"})
    return sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))


def find_pod(pods: Sequence[Object], step: Step, driver: bool = False) -> Object | None:
    """Return the newest pod of a step, or of its driver; None if it does not exist."""
    if nodes := [step.driver] * bool(step.driver) if driver else step.pods:
        by_node = {annotation(pod, NODE_ID): pod for pod in pods}
        return next((by_node[node] for node in reversed(nodes) if node in by_node), None)
    end = f".{step.name}{DRIVER}" if driver else f".{step.name}.executor"
    names = ((pod, ATTEMPTS.sub("", annotation(pod, NODE_NAME))) for pod in reversed(pods))
    return next((pod for pod, name in names if name.endswith(end)), None)


def warnings(api: Api, pods: Sequence[Object]) -> list[PodEvent]:
    """Return the warnings of these pods, oldest first, each kind once; raise as above."""
    names = {pod["metadata"]["name"] for pod in pods}
    events: dict[tuple[str, str, str], PodEvent] = {}
    for item in _objects(api, EVENTS, {"fieldSelector": "type=Warning"}):
        name = item["involvedObject"].get("name", "")
        if name not in names:
            continue
        key = name, str(item.get("reason", "")), one_line(str(item.get("message", "")))
        times = int(item.get("count") or 1) + (events[key].times if key in events else 0)
        last = item.get("lastTimestamp") or item.get("eventTime")
        events[key] = PodEvent(*key, times, datetime.fromisoformat(last) if last else None)
    return sorted(events.values(), key=lambda one: one.last.timestamp() if one.last else 0)


def log(api: Api, pod: Object, tail: int = 0) -> Iterator[str]:
    """Yield the lines of a step's log, none before its start; StorageError if unreadable."""
    if not has_started(pod, MAIN):
        return
    query = {"container": MAIN} | ({"tailLines": str(tail)} if tail else {})
    path = f"{PODS.path(api.namespace, pod['metadata']['name'])}/log"
    try:
        for line in api.lines(path, query, LOG_SECONDS):
            yield line.decode("utf-8", "replace").rstrip("\n")
    except ApiError as error:
        raise StorageError(
            f"the log of pod {pod['metadata']['name']} cannot be read: {error.message}"
        ) from None


class KfpLogs:
    """The logs of a run's nodes from KFP, which also has those of deleted pods."""

    def __init__(self, client: "Client", run_id: str) -> None:
        self._client, self._run_id = client, run_id

    def lines(self, leaf: Leaf) -> Iterator[str]:
        """Yield a step's log, of all its iterations; raise StorageError if it is over without."""
        for nodes in leaf.step.nodes or ((),):
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
            if line.startswith(b'{"error_message"') and not line.endswith(b"\n"):
                message = str(mapping_in(line).get("error_message"))
                raise StorageError(one_line(message.rpartition("due to ")[2]))
            yield line.decode("utf-8", "replace").rstrip("\n")


def kill_reason(pod: Object) -> str:
    """Return why Kubernetes ended a step's pod; '' if its program ended."""
    reason = failure_reason(pod)
    hint = ": give the step more memory" if reason and reason.kind == OUT_OF_MEMORY else ""
    return f"{reason.text}{hint}" if reason else ""


def _objects(api: Api, resource: Resource, query: dict[str, str]) -> list[Object]:
    try:
        return api.list_objects(resource, query, retry=True, retry_seconds=30)
    except ApiError as error:
        raise StorageError(str(error)) from None

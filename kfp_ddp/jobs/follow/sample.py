"""Which logs of a large job are followed: a connection for each pod would be too many."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kfp_ddp.jobs.kinds import pod_role
from kfp_ddp.k8s.api import Object
from kfp_ddp.k8s.objects import part
from kfp_ddp.k8s.pods import ended_at, has_failed, has_started

ALL = 16
"""Pods up to which every log is followed: each is a connection to the API server for days."""
STREAMS = 16
"""Logs open at once."""
FOR_FAILED = 4
"""How many of them are reserved for pods that fail."""
FAILED = 16
"""How many failed pods have their logs read, from the first."""


class LogRequest(NamedTuple):
    """A log to follow; with `end_only` the last lines of the existing one are enough."""

    uid: str
    container: str
    end_only: bool


def sample(
    pods: Mapping[str, Object], containers: Sequence[str], begun: Mapping[str, bool]
) -> list[LogRequest]:
    """Return a large job's logs to open now; `begun`: whether opened ones, by uid, are open."""
    room = STREAMS - sum(begun.values())
    logs = _logs_of_failed(pods, containers, begun, room)
    if len(logs) >= room:
        return logs
    nodes = {_node(pods[uid]) for uid in begun if uid in pods}
    for uid in sorted(set(pods) - set(begun), key=lambda uid: pod_role(pods[uid]).order):
        pod = pods[uid]
        leads = pod_role(pod).number == 0
        reserved = 0 if leads else FOR_FAILED
        if room - len(logs) <= reserved:
            break
        # Rank 0's log is followed in any case, of the others one on each node.
        is_covered = _node(pod) in nodes and not leads
        if is_covered or has_failed(pod):
            continue
        requests = requests_of(uid, pod, containers, end_only=not leads)
        if requests:
            nodes.add(_node(pod))
            logs += requests
    return logs


def _logs_of_failed(
    pods: Mapping[str, Object], containers: Sequence[str], begun: Mapping[str, bool], room: int
) -> list[LogRequest]:
    """Return the logs of the first pods that failed, as long as there is room."""
    failed = [uid for uid, pod in pods.items() if has_failed(pod)]
    failed.sort(key=lambda uid: ended_at(pods[uid]))
    logs: list[LogRequest] = []
    for uid in failed[:FAILED]:
        if uid not in begun and len(logs) < room:
            logs += requests_of(uid, pods[uid], containers, end_only=True)
    return logs


def sample_note(pods: int, namespace: str) -> str:
    """Return a note on which logs of a large job are followed."""
    return (
        f"following at most {STREAMS - FOR_FAILED} of {pods:,} logs: of rank 0's pod and of one on "
        f"each node; of the first {FAILED} pods that fail the end is shown; "
        f"`kubectl logs -n {namespace} POD` shows any other"
    )


def requests_of(
    uid: str, pod: Object, containers: Sequence[str], end_only: bool
) -> list[LogRequest]:
    """Return the logs of the pod's containers that have started."""
    return [LogRequest(uid, name, end_only) for name in containers if has_started(pod, name)]


def _node(pod: Object) -> str:
    return str(part(pod, "spec").get("nodeName") or "")

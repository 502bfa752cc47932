"""Kueue: whether a queue can be used, and what a job in it waits for."""

from functools import lru_cache

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import one_line
from kfp_ddp.k8s.api import Api, ApiError, Object, unless
from kfp_ddp.k8s.objects import condition, conditions, label
from kfp_ddp.k8s.resource import Resource

GROUP = "kueue.x-k8s.io"
QUEUE_LABEL = f"{GROUP}/queue-name"
NAMED_AT_MOST = 3


@lru_cache(maxsize=8)
def group_version(api: Api) -> str:
    """Return the preferred version of Kueue's API; '' for a cluster without Kueue."""
    with unless(404):
        return str(api.call("GET", f"/apis/{GROUP}")["preferredVersion"]["groupVersion"])
    return ""


def resource(api: Api, plural: str) -> Resource | None:
    """Return a resource of Kueue; None without Kueue."""
    version = group_version(api)
    return Resource(version, plural) if version else None


def check_queue(api: Api, queue: str) -> list[str]:
    """Return warnings about a LocalQueue that admits no jobs now; InputError if it is missing.

    Without the right to read queues, queue and Kueue count as existing.
    """
    try:
        queues = api.retry(lambda: resource(api, "localqueues"))
        if queues is None:
            raise InputError(
                f"queue={queue!r}: this cluster has no Kueue; install it, or leave queue empty"
            )
        local_queue = api.get(queues, queue, retry=True)
    except ApiError:
        return []
    if local_queue is None:
        raise InputError(
            f"queue {queue!r} is not a LocalQueue of namespace {api.namespace}; "
            "use one of `kubectl get localqueues`"
        )
    trouble = inactive(local_queue)
    if not trouble:
        return []
    return [f"queue {queue} admits no jobs now: {trouble}"]


def inactive(queue: Object) -> str:
    """Return why a LocalQueue admits no jobs; '' if it is active."""
    stopped = condition(queue, "Active", "False")
    if stopped is None:
        return ""
    return one_line(stopped.get("message") or stopped.get("reason", ""))


def waiting(job: Object, api: Api) -> str:
    """Return which queue a suspended job waits in, why, and behind which jobs."""
    queue = label(job, QUEUE_LABEL)
    if not queue:
        return "suspended; it must be resumed by hand"
    try:
        workload_resource = resource(api, "workloads")
        workloads = api.list_objects(workload_resource) if workload_resource else []
    except ApiError:
        return f"waiting in queue {queue}"
    ours = _workload_of(job, workloads)
    if ours is None or not conditions(ours):
        return f"waiting for Kueue to add it to queue {queue}"
    line = f"waiting in queue {queue}{_place(ours, _unfinished_others(queue, ours, workloads))}"
    evicted = condition(ours, "Evicted") or {}
    if evicted:
        line = f"{_evicted(evicted, workloads)}; {line}"
    pending = condition(ours, "QuotaReserved", "False") or {}
    message = pending.get("message", "")
    if message and message != evicted.get("message"):
        line += f" ({one_line(message)})"
    return line


def _workload_of(job: Object, workloads: list[Object]) -> Object | None:
    """Return the Workload that Kueue created for a job; None if it has not yet."""
    for workload in workloads:
        if _owner(workload).get("uid") == job["metadata"]["uid"]:
            return workload
    return None


def _unfinished_others(queue: str, ours: Object, workloads: list[Object]) -> list[Object]:
    """Return the other Workloads of a queue that wait or run."""
    others = []
    for workload in workloads:
        if workload is ours or condition(workload, "Finished"):
            continue
        if workload["spec"].get("queueName") == queue:
            others.append(workload)
    return others


def _place(ours: Object, others: list[Object]) -> str:
    """Return behind which jobs a Workload waits, and which ones have the quota."""
    ahead: list[Object] = []
    holders: list[Object] = []
    for workload in others:
        if condition(workload, "QuotaReserved"):
            holders.append(workload)
        elif _rank(workload) < _rank(ours):
            ahead.append(workload)
    place = f", behind {_names(ahead)}" if ahead else ", first in line"
    if holders:
        have = "have" if len(holders) > 1 else "has"
        place += f", while {_names(holders)} {have} the quota"
    return place


def _evicted(evicted: Object, workloads: list[Object]) -> str:
    """Return why a job was evicted into its queue, with the name of the preempting job."""
    how = "preempted" if evicted.get("reason") == "Preempted" else "evicted"
    message = one_line(evicted.get("message", ""))
    for workload in workloads:
        known = f"a workload (UID: {workload['metadata'].get('uid')}, "
        head, match, tail = message.partition(known)
        if match:
            message = f"{head}{_names([workload])}{tail.partition(')')[2]}"
    return f"{how} ({message})"


def _owner(workload: Object) -> Object:
    owners: list[Object] = workload["metadata"].get("ownerReferences") or [{}]
    return owners[0]


def _rank(workload: Object) -> tuple[int, str]:
    """Return Kueue's sort key: priority, then age."""
    return -int(workload["spec"].get("priority") or 0), workload["metadata"]["creationTimestamp"]


def _names(workloads: list[Object]) -> str:
    """Return the names of the first jobs of some workloads."""
    names = []
    for workload in sorted(workloads, key=_rank)[:NAMED_AT_MOST]:
        owner = _owner(workload)
        names.append(f"{owner.get('kind', 'Workload')} {owner.get('name', '')}".strip())
    more = len(workloads) - len(names)
    if more:
        names[-1] += f" and {more} more"
    return ", ".join(names)

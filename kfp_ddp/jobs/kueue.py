"""Kueue: whether a queue can be used, and what a job in it waits for, in words."""

from functools import lru_cache

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import one_line
from kfp_ddp.k8s.api import Api, ApiError, Object, custom
from kfp_ddp.k8s.objects import condition, conditions, label

GROUP = "kueue.x-k8s.io"
QUEUE_LABEL = f"{GROUP}/queue-name"
NAMED_AT_MOST = 3


@lru_cache(maxsize=8)
def group_version(api: Api) -> str:
    """The version of its API that the server prefers; '' where there is no Kueue.

    Raises:
        ApiError: when it cannot be told now.
    """
    try:
        return str(api.call("GET", f"/apis/{GROUP}")["preferredVersion"]["groupVersion"])
    except ApiError as error:
        if error.status == 404:
            return ""
        raise


def path(api: Api, plural: str, name: str = "") -> str:
    """Path of a collection of Kueue in our namespace, or of one object; '' without Kueue."""
    version = group_version(api)
    return custom(version, api.namespace, plural, name) if version else ""


def check_queue(api: Api, queue: str) -> list[str]:
    """Warnings about a LocalQueue that admits nothing now.

    Raises:
        InputError: when there is no such queue, or no Kueue. Without the right to look at
            queues both count as there.
    """
    try:
        where = api.retry(lambda: path(api, "localqueues", queue))
        if not where:
            raise InputError(
                f"queue={queue!r}: this cluster has no Kueue; install it, or leave queue empty"
            )
        found = api.call("GET", where, retry=True)
    except ApiError as error:
        if error.status == 404:
            raise InputError(
                f"queue {queue!r} is not a LocalQueue of namespace {api.namespace}; "
                "use one of `kubectl get localqueues`"
            ) from error
        return []
    trouble = inactive(found)
    return [f"queue {queue} admits nothing now: {trouble}"] if trouble else []


def inactive(queue: Object) -> str:
    """Why a LocalQueue admits nothing; '' when it is active."""
    stopped = condition(queue, "Active", "False")
    return one_line(stopped.get("message") or stopped.get("reason", "")) if stopped else ""


def waiting(job: Object, api: Api) -> str:
    """Which queue holds a suspended job, why, and what stands before it."""
    queue = label(job, QUEUE_LABEL)
    if not queue:
        return "suspended; somebody else must resume it"
    try:
        where = path(api, "workloads")
        workloads = api.call("GET", where).get("items", []) if where else []
    except ApiError:
        return f"waiting in queue {queue}"
    uid = job["metadata"]["uid"]
    ours = next((each for each in workloads if _owner(each).get("uid") == uid), None)
    if ours is None or not conditions(ours):
        return f"waiting for Kueue to take it into queue {queue}"
    others = [each for each in workloads if each is not ours and not condition(each, "Finished")]
    others = [each for each in others if each["spec"].get("queueName") == queue]
    ahead = [each for each in others if _rank(each) < _rank(ours) and not _holds(each)]
    holders = [each for each in others if _holds(each)]
    words = f"waiting in queue {queue}"
    evicted = condition(ours, "Evicted")
    if evicted is not None:
        words = f"{_evicted(evicted, workloads)}; {words}"
    words += f", behind {_names(ahead)}" if ahead else ", first in line"
    if holders:
        words += f", while {_names(holders)} hold{'' if len(holders) > 1 else 's'} quota"
    pending = (condition(ours, "QuotaReserved", "False") or {}).get("message", "")
    if pending and pending != (evicted or {}).get("message"):
        words += f" ({one_line(pending)})"
    return words


def _evicted(evicted: Object, workloads: list[Object]) -> str:
    """Why a job was put back into its queue, with the name of what came before it."""
    how = "preempted" if evicted.get("reason") == "Preempted" else "put back"
    message = one_line(evicted.get("message", ""))
    for workload in workloads:
        known = f"a workload (UID: {workload['metadata'].get('uid')}, "
        head, found, tail = message.partition(known)
        if found:
            message = f"{head}{_names([workload])}{tail.partition(')')[2]}"
    return f"{how} ({message})"


def _owner(workload: Object) -> Object:
    owners: list[Object] = workload["metadata"].get("ownerReferences") or [{}]
    return owners[0]


def _holds(workload: Object) -> bool:
    return condition(workload, "QuotaReserved") is not None


def _rank(workload: Object) -> tuple[int, str]:
    """Kueue's order: by priority, then by age."""
    return -int(workload["spec"].get("priority") or 0), workload["metadata"]["creationTimestamp"]


def _names(workloads: list[Object]) -> str:
    """The jobs of some workloads, the first few by name."""
    named = []
    for workload in sorted(workloads, key=_rank)[:NAMED_AT_MOST]:
        owner = _owner(workload)
        named.append(f"{owner.get('kind', 'Workload')} {owner.get('name', '')}".strip())
    more = len(workloads) - len(named)
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")

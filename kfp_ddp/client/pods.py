"""The pods of a run as the cluster has them: those of its steps and those of its jobs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from kfp_ddp.client.steps import Step
from kfp_ddp.core.errors import StorageError
from kfp_ddp.core.text import one_line
from kfp_ddp.jobs.identity import RUN
from kfp_ddp.jobs.live_runs import KFP_RUN
from kfp_ddp.k8s.api import Api, ApiError, Object, core
from kfp_ddp.k8s.objects import annotation
from kfp_ddp.k8s.pods import OUT_OF_MEMORY, failure_reason, has_started, waiting_reason

MAIN = "main"
"""The container of a step's pod that runs its program."""
LOG_SECONDS = 60.0
NODE = "workflows.argoproj.io/node-id"


@dataclass(frozen=True)
class Event:
    """What the cluster says of an object, and how often."""

    object: str
    reason: str
    message: str
    times: int
    last: datetime | None


def of_steps(api: Api, run_id: str) -> list[Object]:
    """The pods of a run's steps and of their drivers, oldest first.

    Raises:
        StorageError: they cannot be listed.
    """
    return _listed(api, f"{KFP_RUN}={run_id}")


def of_jobs(api: Api, run_id: str) -> list[Object]:
    """The pods of the jobs that a run's steps launched; raises as `of_steps` does."""
    return _listed(api, f"{RUN}={run_id}")


def of_step(pods: Sequence[Object], step: Step, driver: bool = False) -> Object | None:
    """The newest pod that ran a step, or its driver; None where it is gone, or not there yet."""
    wanted = [step.driver] if driver else list(reversed(step.pods))
    for node in wanted:
        for pod in pods:
            told = annotation(pod, NODE)
            if node and (told == node if told else _number(pod["metadata"]["name"], node)):
                return pod
    return None


def events(api: Api, pods: Sequence[Object]) -> list[Event]:
    """Warnings of these pods, oldest first, each kind once; raises as `of_steps` does."""
    names = {pod["metadata"]["name"] for pod in pods}
    path, query = core(api.namespace, "events"), {"fieldSelector": "type=Warning"}
    found: dict[tuple[str, str, str], Event] = {}
    for item in _asked(api, path, query)["items"]:
        name = item["involvedObject"].get("name", "")
        if name in names:
            event = _event(name, item)
            before = found.get((name, event.reason, event.message))
            times = event.times + (before.times if before else 0)
            key = (name, event.reason, event.message)
            found[key] = Event(name, event.reason, event.message, times, event.last)
    return sorted(found.values(), key=lambda each: each.last.timestamp() if each.last else 0)


def log(api: Api, pod: Object, container: str = MAIN, tail: int = 0) -> Iterator[str]:
    """Lines of a container's log; none where it has not begun.

    Args:
        api: The pod's namespace.
        pod: The pod.
        container: Of it.
        tail: The last so many; 0 for all.

    Raises:
        StorageError: it cannot be read.
    """
    if not has_started(pod, container):
        return
    query = {"container": container} | ({"tailLines": str(tail)} if tail else {})
    path = f"{core(api.namespace, 'pods', pod['metadata']['name'])}/log"
    try:
        for line in api.lines(path, query, LOG_SECONDS):
            yield line.decode("utf-8", "replace").rstrip("\n")
    except ApiError as error:
        raise StorageError(
            f"the log of pod {pod['metadata']['name']} cannot be read: {error.message}"
        ) from None


def waits_for(pod: Object) -> str:
    """Return why a pod does not run yet, in one line; '' for a pod that has started."""
    reason = waiting_reason(pod)
    return reason.text if reason else ""


def ended_by(pod: Object) -> str:
    """Return why Kubernetes ended a step's pod; '' if its program ended without its doing."""
    reason = failure_reason(pod)
    if reason is None:
        return ""
    hint = ": give the step more memory" if reason.kind == OUT_OF_MEMORY else ""
    return f"{reason.text}{hint}"


def _listed(api: Api, selector: str) -> list[Object]:
    found = _asked(api, core(api.namespace, "pods"), {"labelSelector": selector})["items"]
    return sorted(found, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))


def _asked(api: Api, path: str, query: dict[str, str]) -> Object:
    try:
        return api.call("GET", path, query=query, retry=True, retry_seconds=30)
    except ApiError as error:
        raise StorageError(
            f"{path.rpartition('/')[2]} of namespace {api.namespace} cannot be listed: "
            f"{one_line(error.message)}"
        ) from None


def _number(pod: str, node: str) -> bool:
    """Whether a pod is named after a node: workflow, template, and the number that ends both."""
    workflow, _, number = node.rpartition("-")
    return pod.startswith(f"{workflow}-") and pod.rpartition("-")[2] == number


def _event(name: str, item: Object) -> Event:
    last = item.get("lastTimestamp") or item.get("eventTime")
    return Event(
        name,
        str(item.get("reason", "")),
        one_line(str(item.get("message", ""))),
        int(item.get("count") or 1),
        datetime.fromisoformat(last) if last else None,
    )

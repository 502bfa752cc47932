"""Why a job failed: the pod and rank that failed first, in one line, and whether to try again."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from kfp_ddp.core.failure import Failure, first_cause, lost_peer
from kfp_ddp.jobs.follow.last_words import ROOT, last_words
from kfp_ddp.jobs.specification.kinds import pod_title
from kfp_ddp.k8s.api import Object
from kfp_ddp.k8s.objects import condition, every_container

TOLD_TO_STOP = (137, 143)
"""Exit codes of a program that was told to stop and ends, or does not until it is killed."""
LOST_NODE = ("Evicted", "NodeLost", "Shutdown", "NodeShutdown", "Terminated", "Preempting")


def root_cause(
    pods: Sequence[Object],
    job_message: str,
    last_lines: Mapping[str, Sequence[str]] | None = None,
    lost: Sequence[Object] = (),
    never_started: str = "",
) -> Failure:
    """The first failure that is no consequence of another one; a pod that never started is one.

    Args:
        pods: The job's pods as they are now.
        job_message: What the job's own condition says, for when no pod says anything.
        last_lines: The end of each pod's log, by uid, for a pod that left no message of ours.
        lost: Pods that were removed while they ran, and so tell nothing themselves.
        never_started: The pod that waited to start for longest, and for what; '' for none.
    """
    lines = last_lines or {}
    # Of those that failed in one second a pod whose log was read comes before those that say less.
    by_words = sorted(pods, key=lambda pod: pod["metadata"].get("uid") not in lines)
    found = [failure for pod in by_words if (failure := _of_pod(pod, lines)) is not None]
    found += [_of_lost(pod) for pod in lost]
    first = first_cause(found)
    if never_started and (first is None or first.consequence):
        retryable = first is not None and first.retryable
        return Failure(1, -1, f"{never_started} (it never started)", retryable)
    if never_started and first is not None:
        return replace(first, error=f"{first.error}; besides, {never_started}")
    silent = job_message or "the job failed and left no pod that says why"
    return first or Failure(1, -1, silent, retryable=False)


def _of_pod(pod: Object, last_lines: Mapping[str, Sequence[str]]) -> Failure | None:
    status, name, who = pod.get("status", {}), pod["metadata"]["name"], pod_title(pod)
    if disruption := condition(pod, "DisruptionTarget"):
        line = f"{who}: {disruption.get('message') or disruption.get('reason')}"
        at = _seconds(disruption.get("lastTransitionTime"))
        return Failure(1, -1, line, retryable=True, time=at, pod=name)
    if status.get("reason") in LOST_NODE:
        line = f"{who}: {status['reason']}: {status.get('message', '')}".rstrip(": ")
        return Failure(1, -1, line, retryable=True, time=0, pod=name)
    for container in every_container(pod):
        for state in (container.get("state") or {}, container.get("lastState") or {}):
            ended = state.get("terminated")
            if ended and ended.get("exitCode"):
                lines = last_lines.get(pod["metadata"]["uid"], ())
                found = _of_container(who, name, ended, lines)
                stops = "deletionTimestamp" in pod["metadata"]
                stopped = stops and found.exit_code in TOLD_TO_STOP
                return replace(found, consequence=found.consequence or stopped)
    return None


def _of_lost(pod: Object) -> Failure:
    """A lost pod explains what its peers say of it, and nothing that a pod says of itself."""
    line = f"{pod_title(pod)}: its pod was removed while it ran"
    return Failure(1, -1, line, retryable=True, time=math.inf)


def _of_container(who: str, pod: str, ended: Object, log: Sequence[str]) -> Failure:
    code, finished = int(ended["exitCode"]), _seconds(ended.get("finishedAt"))
    if ended.get("reason") == "OOMKilled":
        line = f"{who}: out of memory (OOMKilled); raise memory, or lower batch_size or workers"
        return Failure(code, -1, line, retryable=False, time=finished, pod=pod)
    message = str(ended.get("message") or "").strip()
    told = Failure.parse(message) or _of_log(code, message, log)
    lost = lost_peer(told.words)
    return Failure(
        exit_code=code,
        rank=told.rank,
        error=f"{who}: {told.words}"[:600],
        retryable=told.retryable or code >= 128 or lost,
        time=told.time or finished,
        consequence=told.consequence or lost,
        pod=pod,
    )


def _of_log(code: int, message: str, log: Sequence[str]) -> Failure:
    """What the end of the log says; Kubernetes may give it as the message of another program."""
    # A message that is the log's end may lack what torchrun's report comes after.
    words = last_words(log if log and (not message or ROOT in message) else message.splitlines())
    text = words.text
    if words.rank < 0:
        text = f"exit code {code}" + (f": {text}" if text else "")
    return Failure(code, words.rank, text, retryable=False, time=0)


def _seconds(stamp: str | None) -> float:
    return datetime.fromisoformat(stamp).timestamp() if stamp else 0

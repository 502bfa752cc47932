"""Why a job failed: the pod and rank that failed first, in one line, and whether to try again."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from kfp_ddp.components.shared.cluster.api import Object
from kfp_ddp.components.shared.launch.follow.last_words import ROOT, Words, last_words
from kfp_ddp.components.shared.launch.manifests.kinds import pod_title

# What a rank says when another one went away: a consequence, never the cause.
LOST_PEER = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "socket timeout",
    "rendezvous",
    "remote process exited",
    "connection was likely closed",
    "lost communication with a remote daemon",
    "got signal: 15",
)
# What NCCL says when a node or a link is gone.
LOST_LINK = ("watchdog caught collective operation timeout", "nccl timeout", "ncclsystemerror")
LOST_NODE = ("Evicted", "NodeLost", "Shutdown", "NodeShutdown", "Terminated", "Preempting")


@dataclass(frozen=True)
class Failure:
    """A failure in one line; `pod` is '' where no pod tells of one."""

    line: str
    retryable: bool
    pod: str = ""
    at: float = 0
    """Seconds since 1970."""
    follows: bool = False
    """Whether the pod itself calls this a consequence of another failure."""


def root_cause(
    pods: list[Object],
    job_message: str,
    last_lines: Mapping[str, Sequence[str]] | None = None,
    lost: list[Object] | None = None,
) -> Failure:
    """The first failure that is no consequence of another one.

    Args:
        pods: The job's pods as they are now.
        job_message: What the job's own condition says, for when no pod says anything.
        last_lines: The end of each pod's log, by uid, for a pod that left no message of ours.
        lost: Pods that were removed while they ran, and so tell nothing themselves.
    """
    found = [failure for pod in pods if (failure := _of_pod(pod, last_lines or {})) is not None]
    found += [_of_lost(pod) for pod in lost or []]
    if not found:
        return Failure(job_message or "the job failed and left no pod that says why", False)
    return min(found, key=lambda failure: (_consequence(failure), failure.at))


def _consequence(failure: Failure) -> bool:
    low = failure.line.lower()
    told = any(words in low for words in LOST_PEER) or "stopped by sig" in low
    return told or failure.follows


def _of_pod(pod: Object, last_lines: Mapping[str, Sequence[str]]) -> Failure | None:
    status, name = pod.get("status", {}), pod["metadata"]["name"]
    who = pod_title(pod)
    disruption = next(
        (c for c in status.get("conditions") or [] if c["type"] == "DisruptionTarget"), None
    )
    if disruption is not None and disruption["status"] == "True":
        line = f"{who}: {disruption.get('message') or disruption.get('reason')}"
        return Failure(line, True, name, _seconds(disruption.get("lastTransitionTime")))
    if status.get("reason") in LOST_NODE:
        line = f"{who}: {status['reason']}: {status.get('message', '')}".rstrip(": ")
        return Failure(line, True, name)
    for container in status.get("containerStatuses") or []:
        for state in (container.get("state") or {}, container.get("lastState") or {}):
            ended = state.get("terminated")
            if ended and ended.get("exitCode"):
                return _of_container(who, name, ended, last_lines.get(pod["metadata"]["uid"], ()))
    return None


def _of_lost(pod: Object) -> Failure:
    """A lost pod explains what its peers say of it, and nothing that a pod says of itself."""
    return Failure(f"{pod_title(pod)}: its pod was removed while it ran", True, at=math.inf)


def _of_container(who: str, pod: str, ended: Object, log: Sequence[str]) -> Failure:
    code, reason = int(ended["exitCode"]), ended.get("reason", "")
    finished = _seconds(ended.get("finishedAt"))
    message = str(ended.get("message") or "").strip()
    if reason == "OOMKilled":
        line = f"{who}: out of memory (OOMKilled); raise memory, or lower batch_size or workers"
        return Failure(line, False, pod, finished)
    retryable, follows = code >= 128, False
    try:
        told = json.loads(message.splitlines()[-1]) if message else {}
        words = Words(str(told["error"]), int(told["rank"]))
        retryable = bool(told.get("retryable")) or retryable
        follows = bool(told.get("consequence"))
        finished = float(told.get("time") or finished)
    except (ValueError, KeyError, TypeError, IndexError):
        # A message that is the log's end may lack what torchrun's report comes after.
        words = last_words(
            log if log and (not message or ROOT in message) else message.splitlines()
        )
        if words.rank < 0:
            words = Words(f"exit code {code}" + (f": {words.text}" if words.text else ""))
    text = f"rank {words.rank}: {words.text}" if words.rank >= 0 else words.text
    low = text.lower()
    lost = any(each in low for each in (*LOST_LINK, *LOST_PEER))
    return Failure(f"{who}: {text}"[:600], retryable or lost, pod, finished, follows)


def _seconds(stamp: str | None) -> float:
    return datetime.fromisoformat(stamp).timestamp() if stamp else 0

"""Why a job failed: the first failing pod and rank, and whether a retry may help."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import NamedTuple

from kfp_ddp.core.failure import Failure, first_cause, lost_peer
from kfp_ddp.jobs.kinds import pod_title
from kfp_ddp.k8s.api import Object
from kfp_ddp.k8s.objects import condition, every_container
from kfp_ddp.k8s.pods import DISRUPTED, failure_reason

STOPPED = (137, 143)
"""Exit codes of a program that was told to stop and ends, or does not until it is killed."""


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
    """Return the failure of a pod; None if it has not failed."""
    name, who, reason = pod["metadata"]["name"], pod_title(pod), failure_reason(pod)
    if reason and reason.kind == DISRUPTED:
        disruption = condition(pod, "DisruptionTarget") or {}
        at = _seconds(disruption.get("lastTransitionTime"))
        return Failure(1, -1, f"{who}: {reason.text}", retryable=True, time=at, pod=name)
    for container in every_container(pod):
        for state in (container.get("state") or {}, container.get("lastState") or {}):
            ended = state.get("terminated")
            if ended and ended.get("exitCode"):
                lines = last_lines.get(pod["metadata"]["uid"], ())
                failure = _of_container(who, name, ended, lines)
                stopping = "deletionTimestamp" in pod["metadata"]
                stopped = stopping and failure.exit_code in STOPPED
                return replace(failure, consequence=failure.consequence or stopped)
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


# torchrun's report, by _format_failure of torch.distributed.elastic.multiprocessing.errors.
ROOT = "Root Cause (first observed failure):"
OWN_REPORT = re.compile(r"failed \(exitcode: -?\d+\) local_rank:|elastic\.multiprocessing\.errors")
BLOCK = 7  # lines of it: index, time, host, rank, exitcode, error_file, traceback
FIELD = re.compile(r"\s+(rank|exitcode|traceback)\s*: (.*)")
# Open MPI's reports: a rank that exited or was killed, and a node that went away.
MPI_EXIT = ("mpirun detected that", "mpirun noticed that")
MPI_JOB = "Primary job"
MPI_RANK = re.compile(r"Process name: \[\[\d+,\d+\],(\d+)\]")
MPI_SIGNAL = re.compile(r"process rank (\d+) .* exited on (signal [^.]*)\.")
MPI_LOST = "ORTE has lost communication with a remote daemon."
PREFIX = re.compile(r"^\[rank(\d+)\]:\s?")
TRACEBACK = "Traceback (most recent call last):"
RULE = re.compile(r"[\s=-]*")


class Words(NamedTuple):
    """The failure in one line; `rank` is -1 where the log does not name one."""

    text: str
    rank: int = -1


def last_words(lines: Sequence[str]) -> Words:
    """What the rank raised that torchrun or mpirun saw fail first; another program's last line."""
    said = [line for line in lines if line.strip()]
    at = max((i for i, line in enumerate(said) if line.strip() == ROOT), default=-1)
    if at < 0:
        spoken = [line.strip() for line in said if not RULE.fullmatch(line)]
        return _of_mpirun(said) or Words(spoken[-1] if spoken else "")
    block = said[at + 1 : at + 1 + BLOCK]
    found = [match for line in block if (match := FIELD.fullmatch(line))]
    fields: dict[str, str] = {match[1]: match[2] for match in found}
    rank = int(fields.get("rank", "-1").split()[0])
    told = fields.get("traceback", "")
    if told == TRACEBACK:  # of a program that torch's `record` decorates, indented
        recorded = [TRACEBACK, *(line[2:] for line in said[at + 1 + BLOCK :])]
        return Words(_exceptions(recorded)[0][1], rank)
    if told.startswith("Signal"):
        return Words(told, rank)
    before = next((i for i, line in enumerate(said) if OWN_REPORT.search(line)), at)
    raised = _exceptions(said[:before])
    of_rank = [text for whose, text in raised if whose == rank] or [text for _, text in raised]
    return Words(of_rank[-1] or f"exit code {fields.get('exitcode', '?').split()[0]}", rank)


def _of_mpirun(said: Sequence[str]) -> Words | None:
    """The rank that mpirun's report names, with its signal or with the first exception before."""
    if MPI_LOST in map(str.strip, said):
        return Words(MPI_LOST)
    at = next((i for i, line in enumerate(said) if line.startswith(MPI_EXIT)), -1)
    if at < 0:
        return None
    report = " ".join(said[at:])
    if killed := MPI_SIGNAL.search(report):
        return Words(killed[2], int(killed[1]))
    named = MPI_RANK.search(report)
    end = next((i for i, line in enumerate(said) if line.startswith(MPI_JOB)), at)
    raised = _exceptions([line for line in said[:end] if not RULE.fullmatch(line)])
    return Words(raised[0][1], int(named[1]) if named else -1)


def _exceptions(lines: Sequence[str]) -> list[tuple[int, str]]:
    """Rank (-1 for unknown) and first line of each exception that a traceback ends with."""
    found: list[tuple[int, str]] = []
    inside: dict[int, bool] = {}
    for line in lines:
        prefix = PREFIX.match(line)
        rank = int(prefix[1]) if prefix else -1
        text = line[prefix.end() :] if prefix else line
        if text.endswith(TRACEBACK):
            inside[rank] = True
        elif inside.get(rank) and not text.startswith("  "):
            found.append((rank, text.strip()))
            inside[rank] = False
    return found or [(-1, lines[-1].strip() if lines else "")]

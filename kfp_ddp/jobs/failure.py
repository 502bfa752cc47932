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
from kfp_ddp.k8s.objects import all_container_statuses, condition
from kfp_ddp.k8s.pods import DISRUPTED, REFUSED, failure_reason

STOPPED = (137, 143)
"""Exit codes of a program that ends on SIGTERM, or is killed because it does not."""


def cause_in_pods(
    pods: Sequence[Object],
    job_message: str,
    last_lines: Mapping[str, Sequence[str]] | None = None,
    lost: Sequence[Object] = (),
    never_started: str = "",
) -> Failure:
    """Return the first failure that is not a consequence of another one.

    `last_lines` are the ends of the logs by the uid of the pod, `lost` the pods that were removed
    while they ran, and `never_started` the pod that waited longest to start, with its reason.
    """
    lines = last_lines or {}
    # Of pods that failed in the same second, those whose log was read come first.
    by_log = sorted(pods, key=lambda pod: pod["metadata"].get("uid") not in lines)
    failures = [failure for pod in by_log if (failure := _pod_failure(pod, lines)) is not None]
    for pod in lost:  # which explains only errors about a lost peer
        line = f"{pod_title(pod)}: its pod was removed while it ran"
        failures.append(Failure(1, -1, line, retryable=True, time=math.inf))
    first = first_cause(failures)
    if never_started and (first is None or first.consequence):
        retryable = first is not None and first.retryable
        return Failure(1, -1, f"{never_started} (it never started)", retryable)
    if never_started and first is not None:
        return replace(first, error=f"{first.error}; besides, {never_started}")
    unknown = job_message or "the job failed, and no pod shows why"
    return first or Failure(1, -1, unknown, retryable=False)


def _pod_failure(pod: Object, last_lines: Mapping[str, Sequence[str]]) -> Failure | None:
    """Return the failure of a pod; None if it has not failed."""
    name, who, reason = pod["metadata"]["name"], pod_title(pod), failure_reason(pod)
    if reason and reason.kind in (DISRUPTED, REFUSED):
        disruption = condition(pod, "DisruptionTarget") or {}
        at, retryable = _seconds(disruption.get("lastTransitionTime")), reason.kind == DISRUPTED
        return Failure(1, -1, f"{who}: {reason.text}", retryable, time=at, pod=name)
    for container in all_container_statuses(pod):
        for state in (container.get("state") or {}, container.get("lastState") or {}):
            ended = state.get("terminated")
            if ended and ended.get("exitCode"):
                lines = last_lines.get(pod["metadata"]["uid"], ())
                failure = _container_failure(who, name, ended, lines)
                stopping = "deletionTimestamp" in pod["metadata"]
                stopped = stopping and failure.exit_code in STOPPED
                return replace(failure, consequence=failure.consequence or stopped)
    return None


def _container_failure(who: str, pod: str, ended: Object, log: Sequence[str]) -> Failure:
    code, finished = int(ended["exitCode"]), _seconds(ended.get("finishedAt"))
    if ended.get("reason") == "OOMKilled":
        line = f"{who}: out of memory (OOMKilled); raise memory, or lower batch_size or workers"
        return Failure(code, -1, line, retryable=False, time=finished, pod=pod)
    message = str(ended.get("message") or "").strip()
    failure = Failure.parse(message)
    if failure is None:
        # The message may be the end of the log, without the lines before torchrun's report.
        lines = log if log and (not message or ROOT in message) else message.splitlines()
        text, rank = error_in_log(lines)
        if rank < 0:
            text = f"exit code {code}" + (f": {text}" if text else "")
        failure = Failure(code, rank, text, retryable=False, time=0)
    lost = lost_peer(failure.summary)
    return replace(
        failure,
        exit_code=code,
        error=f"{who}: {failure.summary}"[:600],
        retryable=failure.retryable or code >= 128 or lost,
        time=failure.time or finished,
        consequence=failure.consequence or lost,
        pod=pod,
    )


def _seconds(stamp: str | None) -> float:
    return datetime.fromisoformat(stamp).timestamp() if stamp else 0


# torchrun's report, by _format_failure of torch.distributed.elastic.multiprocessing.errors.
ROOT = "Root Cause (first observed failure):"
LAUNCHER_REPORT = re.compile(
    r"failed \(exitcode: -?\d+\) local_rank:|elastic\.multiprocessing\.errors"
)
BLOCK = 7  # its lines: index, time, host, rank, exitcode, error_file, traceback
FIELD = re.compile(r"\s+(rank|exitcode|traceback)\s*: (\S.*)")
# Open MPI's reports: a rank that exited or was killed, and a node that went away.
MPI_EXIT = ("mpirun detected that", "mpirun noticed that")
MPI_JOB = "Primary job"
MPI_RANK = re.compile(r"Process name: \[\[\d+,\d+\],(\d+)\]")
MPI_SIGNAL = re.compile(r"process rank (\d+) .* exited on (signal [^.]*)\.")
MPI_LOST = "ORTE has lost communication with a remote daemon."
PREFIX = re.compile(r"^\[rank(\d+)\]:\s?")
TRACEBACK = "Traceback (most recent call last):"
RULE = re.compile(r"[\s=-]*")


class LogError(NamedTuple):
    """An error in one line; `rank` is -1 if the log does not name one."""

    text: str
    rank: int = -1


def error_in_log(lines: Sequence[str]) -> LogError:
    """Return the error of the rank that torchrun or mpirun reports as the first to fail.

    For another program this is its last line.
    """
    log = [line for line in lines if line.strip()]
    at = max((i for i, line in enumerate(log) if line.strip() == ROOT), default=-1)
    if at < 0:
        texts = [line.strip() for line in log if not RULE.fullmatch(line)]
        return _parse_mpirun(log) or LogError(texts[-1] if texts else "")
    block = log[at + 1 : at + 1 + BLOCK]
    matches = [match for line in block if (match := FIELD.fullmatch(line))]
    fields: dict[str, str] = {match[1]: match[2] for match in matches}
    number = fields.get("rank", "").partition(" ")[0]
    rank = int(number) if number.isdecimal() else -1
    traceback = fields.get("traceback", "")
    if traceback == TRACEBACK:  # of a program decorated with torch's `record`, indented
        recorded = [TRACEBACK, *(line[2:] for line in log[at + 1 + BLOCK :])]
        return LogError(_exceptions(recorded)[0][1], rank)
    if traceback.startswith("Signal"):
        return LogError(traceback, rank)
    before = next((i for i, line in enumerate(log) if LAUNCHER_REPORT.search(line)), at)
    raised = _exceptions(log[:before])
    of_rank = [text for owner, text in raised if owner == rank] or [text for _, text in raised]
    return LogError(of_rank[-1] or f"exit code {fields.get('exitcode', '?').split()[0]}", rank)


def _parse_mpirun(log: Sequence[str]) -> LogError | None:
    """Return the error by mpirun's report: a signal, or the first exception before it."""
    if MPI_LOST in map(str.strip, log):
        return LogError(MPI_LOST)
    at = next((i for i, line in enumerate(log) if line.startswith(MPI_EXIT)), -1)
    if at < 0:
        return None
    report = " ".join(log[at:])
    if killed := MPI_SIGNAL.search(report):
        return LogError(killed[2], int(killed[1]))
    named = MPI_RANK.search(report)
    end = next((i for i, line in enumerate(log) if line.startswith(MPI_JOB)), at)
    raised = _exceptions([line for line in log[:end] if not RULE.fullmatch(line)])
    return LogError(raised[0][1], int(named[1]) if named else -1)


def _exceptions(lines: Sequence[str]) -> list[tuple[int, str]]:
    """Return the rank (-1 for unknown) and the first line of each exception with a traceback."""
    exceptions: list[tuple[int, str]] = []
    inside: dict[int, bool] = {}
    for line in lines:
        prefix = PREFIX.match(line)
        rank = int(prefix[1]) if prefix else -1
        text = line[prefix.end() :] if prefix else line
        if text.endswith(TRACEBACK):
            inside[rank] = True
        elif inside.get(rank) and not text.startswith("  "):
            exceptions.append((rank, text.strip()))
            inside[rank] = False
    return exceptions or [(-1, lines[-1].strip() if lines else "")]

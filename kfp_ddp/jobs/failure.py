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
    failures: list[Failure] = []
    for pod in by_log:
        failure = _pod_failure(pod, lines)
        if failure is not None:
            failures.append(failure)
    for pod in lost:  # which explains only errors about a lost peer
        line = f"{pod_title(pod)}: its pod was removed while it ran"
        failures.append(Failure(1, -1, line, retryable=True, time=math.inf))
    first = first_cause(failures)
    if not never_started:
        unknown = job_message or "the job failed, and no pod shows why"
        return first or Failure(1, -1, unknown, retryable=False)
    if first is None or first.consequence:
        retryable = first is not None and first.retryable
        return Failure(1, -1, f"{never_started} (it never started)", retryable)
    return replace(first, error=f"{first.error}; besides, {never_started}")


def _pod_failure(pod: Object, last_lines: Mapping[str, Sequence[str]]) -> Failure | None:
    """Return the failure of a pod; None if it has not failed."""
    meta = pod["metadata"]
    title = pod_title(pod)
    reason = failure_reason(pod)
    if reason and reason.kind in (DISRUPTED, REFUSED):
        disruption = condition(pod, "DisruptionTarget") or {}
        return Failure(
            exit_code=1,
            rank=-1,
            error=f"{title}: {reason.text}",
            retryable=reason.kind == DISRUPTED,
            time=_seconds(disruption.get("lastTransitionTime")),
            pod=meta["name"],
        )
    ended = _failed_end(pod)
    if ended is None:
        return None
    failure = _container_failure(title, meta["name"], ended, last_lines.get(meta["uid"], ()))
    # A pod that is deleted ends by our signal: that is not why the job failed.
    stopped = "deletionTimestamp" in meta and failure.exit_code in STOPPED
    return replace(failure, consequence=failure.consequence or stopped)


def _failed_end(pod: Object) -> Object | None:
    """Return the first end of a container with an exit code other than 0, None for no such end."""
    for container in all_container_statuses(pod):
        for name in ("state", "lastState"):
            state: Object = container.get(name) or {}
            ended: Object = state.get("terminated") or {}
            if ended.get("exitCode"):
                return ended
    return None


def _container_failure(who: str, pod: str, ended: Object, log: Sequence[str]) -> Failure:
    code = int(ended["exitCode"])
    finished = _seconds(ended.get("finishedAt"))
    if ended.get("reason") == "OOMKilled":
        line = f"{who}: out of memory (OOMKilled); raise memory, or lower batch_size or workers"
        return Failure(code, -1, line, retryable=False, time=finished, pod=pod)
    message = str(ended.get("message") or "").strip()
    failure = Failure.parse(message)
    if failure is None:
        text, rank = error_in_log(_last_words(message, log))
        if rank < 0:
            ending = f"exit code {code}"
            text = f"{ending}: {text}" if text else ending
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


def _last_words(message: str, log: Sequence[str]) -> Sequence[str]:
    """Return the lines that show an error best: those of the log, or of the termination message."""
    # The message may be the end of the log, without the lines before torchrun's report.
    message_lacks_error = not message or ROOT in message
    if log and message_lacks_error:
        return log
    return message.splitlines()


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
MPI_EXIT = re.compile("^mpirun (detected|noticed) that")
MPI_JOB = re.compile("^Primary job")
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
    return _parse_torchrun(log) or _parse_mpirun(log) or LogError(_last_text(log))


def _last_text(log: Sequence[str]) -> str:
    """Return the last line that is no rule; '' for none."""
    texts = _texts(log)
    return texts[-1].strip() if texts else ""


def _texts(log: Sequence[str]) -> list[str]:
    """Return the lines that are no rules, as of `-----`."""
    return [line for line in log if not RULE.fullmatch(line)]


def _parse_torchrun(log: Sequence[str]) -> LogError | None:
    """Return the error by the last report of torchrun; None without one."""
    roots = [index for index, line in enumerate(log) if line.strip() == ROOT]
    if not roots:
        return None
    begin = roots[-1] + 1
    end = begin + BLOCK
    fields = _report_fields(log[begin:end])
    number = fields.get("rank", "").partition(" ")[0]
    rank = int(number) if number.isdecimal() else -1
    traceback = fields.get("traceback", "")
    if traceback == TRACEBACK:  # of a program decorated with torch's `record`, indented
        recorded = [TRACEBACK, *(line[2:] for line in log[end:])]
        return LogError(_exceptions(recorded)[0][1], rank)
    if traceback.startswith("Signal"):
        return LogError(traceback, rank)
    # The report has no error: it is in the rank's own output before the launcher's.
    output = log[: _first_index(log, LAUNCHER_REPORT, roots[-1])]
    exception = _last_exception(output, rank)
    exit_code = fields.get("exitcode", "?").split()[0]
    return LogError(exception or f"exit code {exit_code}", rank)


def _report_fields(block: Sequence[str]) -> dict[str, str]:
    """Return the fields of torchrun's report by name."""
    fields: dict[str, str] = {}
    for line in block:
        match = FIELD.fullmatch(line)
        if match:
            fields[match[1]] = match[2]
    return fields


def _first_index(log: Sequence[str], pattern: re.Pattern[str], default: int) -> int:
    """Return the index of the first line with a pattern."""
    for index, line in enumerate(log):
        if pattern.search(line):
            return index
    return default


def _last_exception(output: Sequence[str], rank: int) -> str:
    """Return the last exception of a rank, or of any rank if its lines name none."""
    exceptions = _exceptions(output)
    own = [exception for exception in exceptions if exception[0] == rank]
    return (own or exceptions)[-1][1]


def _parse_mpirun(log: Sequence[str]) -> LogError | None:
    """Return the error by mpirun's report: a signal, or the first exception before it."""
    if MPI_LOST in map(str.strip, log):
        return LogError(MPI_LOST)
    begin = _first_index(log, MPI_EXIT, -1)
    if begin < 0:
        return None
    report = " ".join(log[begin:])
    killed = MPI_SIGNAL.search(report)
    if killed:
        return LogError(killed[2], int(killed[1]))
    process = MPI_RANK.search(report)
    rank = int(process[1]) if process else -1
    output = log[: _first_index(log, MPI_JOB, begin)]
    return LogError(_exceptions(_texts(output))[0][1], rank)


def _exceptions(lines: Sequence[str]) -> list[tuple[int, str]]:
    """Return the rank (-1 for unknown) and the first line of each exception with a traceback."""
    exceptions: list[tuple[int, str]] = []
    # Lines of ranks alternate: each rank may be within a traceback.
    inside: set[int] = set()
    for line in lines:
        rank, text = _split_prefix(line)
        if text.endswith(TRACEBACK):
            inside.add(rank)
        elif rank in inside and not text.startswith("  "):
            exceptions.append((rank, text.strip()))
            inside.remove(rank)
    if exceptions:
        return exceptions
    last = lines[-1].strip() if lines else ""
    return [(-1, last)]


def _split_prefix(line: str) -> tuple[int, str]:
    """Return the rank that torchrun puts before a line, -1 for none, and the text after it."""
    prefix = PREFIX.match(line)
    if prefix is None:
        return -1, line
    return int(prefix[1]), line[prefix.end() :]

"""What the end of a pod's log says went wrong, for a program that leaves no message of ours."""

import re
from collections.abc import Sequence
from typing import NamedTuple

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

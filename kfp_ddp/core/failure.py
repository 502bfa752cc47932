"""The cause of a failed run, as one line for its user and for Kubernetes.

A rank writes it for its launcher, which reports the first to the step, which takes the first of
all pods. Causes come before consequences, then the earliest first.
"""

import contextlib
import dataclasses
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from kfp_ddp.core.errors import PREEMPTED, JobError
from kfp_ddp.core.text import from_json

TERMINATION_LOG = "/dev/termination-log"
"""File of a container's termination message; at most 4,096 bytes."""
LONGEST = 700
"""Characters of an error that are recorded; each takes up to four bytes."""
RECORD = "TORCHELASTIC_ERROR_FILE"
"""Environment variable of torch elastic: the file for a rank's record."""
LOST_PEER = re.compile(
    "|".join(
        (
            # sockets, c10d's store and gloo
            "connection (was likely )?closed|connection reset|connection refused|broken pipe",
            "socket timeout|connect timeout|timed out (waiting [0-9]+ ?ms|connecting)",
            "rendezvous|got signal: 15|stopped by sig",
            # NCCL; only those of a lost peer
            "watchdog caught collective operation timeout|nccl timeout|ncclsystemerror",
            "ncclremoteerror|nccl communicator was aborted|remote process exit",
            # Open MPI
            "lost communication with a remote daemon",
            "node it was running on is dead|its node has died",  # Ray
        )
    ),
    re.IGNORECASE,
)
"""Messages of a program that lost another rank, its node or the network."""


FULL_MEMORY = re.compile("out of memory|ALLOC(ATION)?_FAILED|can't allocate memory")
"""Messages of CUDA, HIP, cuBLAS, cuDNN, NCCL, MPS and the CPU."""


def lost_peer(text: str) -> bool:
    """Return whether an error is only a consequence of the loss of another rank."""
    return LOST_PEER.search(text) is not None


def full_memory(error: Exception) -> str:
    """Return the line of an error of torch that a device's memory is full; '' for others."""
    lines = str(error).splitlines() if isinstance(error, RuntimeError) else []
    # NCCL, and the thread of a loader, have the cause in a later line.
    full = [line for line in lines if FULL_MEMORY.search(line)]
    full += lines if type(error).__name__ == "OutOfMemoryError" else []
    return "".join(full[:1]).strip().partition(" Process ")[0].rstrip(".")


@contextlib.contextmanager
def in_memory(advice: str) -> Iterator[None]:
    """Raise a JobError with `advice` if the memory of a device is full."""
    try:
        yield
    except Exception as error:
        if line := full_memory(error):
            raise JobError(f"{line}: {advice}") from error
        raise


@dataclasses.dataclass(frozen=True)
class Failure:
    """The failure of a rank, a node's launcher or a pod."""

    exit_code: int
    rank: int
    """-1 if it is not of a rank."""
    error: str
    retryable: bool
    time: float = dataclasses.field(default_factory=time.time)
    """Seconds since 1970."""
    consequence: bool = False
    """Whether it is only a consequence of the loss of another rank."""
    pod: str = ""
    """The pod with the full log; only the step knows it, so it is not written."""

    @property
    def summary(self) -> str:
        """Return the error, with its rank if it has one."""
        return f"rank {self.rank}: {self.error}" if self.rank >= 0 else self.error

    def to_json(self) -> str:
        """Return one line, short enough for Kubernetes; see `parse`."""
        error = self.error
        if len(error) > LONGEST:
            error = f"{error[: LONGEST * 2 // 3]} ... {error[-LONGEST // 3 :]}"
        fields = {**dataclasses.asdict(self), "error": error}
        del fields["pod"]
        return json.dumps(fields, ensure_ascii=False)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the failure in the last line of `text`; None without a rank and an error."""
        try:
            fields = from_json(text.strip().splitlines()[-1])
            return cls(
                exit_code=int(fields.get("exit_code") or 1),
                rank=int(fields["rank"]),
                error=str(fields["error"]),
                retryable=bool(fields.get("retryable")),
                time=float(fields.get("time") or 0),
                consequence=bool(fields.get("consequence")),
            )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return None


def first_cause(failures: Iterable[Failure]) -> Failure | None:
    """Return the first failure that is not a consequence; None if there are none."""
    return min(failures, key=lambda failure: (failure.consequence, failure.time), default=None)


def report(failure: Failure, file: Path | None) -> int:
    """Write the failure for the caller and for Kubernetes, and return its exit code."""
    line = failure.to_json()
    targets = [file] if file else []
    if "KUBERNETES_SERVICE_HOST" in os.environ or "KFP_DDP_TERMINATION_LOG" in os.environ:
        targets.append(Path(os.environ.get("KFP_DDP_TERMINATION_LOG", TERMINATION_LOG)))
    for path in targets:
        try:
            path.write_text(line + "\n", encoding="utf-8", errors="replace")
        except OSError as error:
            print(f"warning: cannot write {path}: {error.strerror}", file=sys.stderr)
    who = f"rank {failure.rank}" if failure.rank >= 0 else "launcher"
    print(f"{who}: {failure.error}", file=sys.stderr, flush=True)
    return failure.exit_code


def read(folder: Path) -> Failure | None:
    """Return the failure that a launcher wrote to its folder of logs; None if missing."""
    try:
        return Failure.parse((folder / "failure.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_record(failure: Failure, final: bool) -> None:
    """Write this rank's failure for torch elastic, `final` if the cause is sure; raise OSError."""
    path = os.environ.get(RECORD)
    if not path:
        return
    details = {"py_callstack": traceback.format_exc(), "timestamp": str(int(failure.time))}
    record = {
        **dataclasses.asdict(failure),
        "message": {"message": failure.error, "extraInfo": details},
        "final": final,
    }
    Path(path).write_text(json.dumps(record))


def cause_in_error_files(error: Any, checkpoint: str) -> Failure:
    """Return the first cause in a ChildFailedError; the text `checkpoint` is added if preempted."""
    failures = error.failures.items()
    causes = (_failure_of_rank(rank, failure, checkpoint) for rank, failure in failures)
    first = first_cause(causes)
    assert first is not None  # the error is of at least one rank
    return first


def _failure_of_rank(rank: int, failure: Any, checkpoint: str) -> Failure:
    data = failure.error_file_data
    code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    message = data.get("message")
    line = str(message.get("message", "")) if isinstance(message, dict) else ""
    if code == PREEMPTED:
        line = f"{line or 'preempted'}; {checkpoint}"
    elif not line:
        line = f"ended by {failure.signal_name()}" if failure.exitcode < 0 else f"exit code {code}"
    return Failure(
        exit_code=code,
        rank=rank,
        error=line,
        retryable=code >= 128 or bool(data.get("retryable")),
        time=float(data.get("time", failure.timestamp)),
        consequence=bool(data.get("consequence")) or code == PREEMPTED,
    )


def final_failure(files: Iterable[Path], checkpoint: str) -> Failure | None:
    """Return the first final failure in the ranks' error files; see `cause_in_error_files`."""
    failures = []
    for path in files:
        try:
            text = path.read_text()
            final = bool(from_json(text).get("final"))
        except (OSError, ValueError, AttributeError):
            continue
        if final and (failure := Failure.parse(text)):
            if failure.exit_code == PREEMPTED:
                failure = dataclasses.replace(failure, error=f"{failure.error}; {checkpoint}")
            failures.append(failure)
    return first_cause(failures)

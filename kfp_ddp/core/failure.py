"""Why a run did not end with 0: one line for who started it, and for Kubernetes.

A rank that ends writes it for its node's launcher (`write_record`), that one takes the first cause
of its ranks and leaves it for Kubernetes and the step (`report`), and the step takes the first
cause of all pods. Causes come before consequences, and the earliest comes first.
"""

import dataclasses
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from kfp_ddp.core.errors import PREEMPTED

TERMINATION_LOG = "/dev/termination-log"
"""Where Kubernetes reads a container's last words; at most 4,096 bytes."""
LONGEST = 700
"""Characters of an error that are told: each takes up to four bytes."""
RECORD = "TORCHELASTIC_ERROR_FILE"
"""The variable by which torch elastic tells a rank where to write its record."""
LOST_PEER = re.compile(
    "|".join(
        (
            # sockets, c10d's store and gloo
            "connection (was likely )?closed|connection reset|connection refused|broken pipe",
            "socket timeout|connect timeout|timed out (waiting [0-9]+ ?ms|connecting)",
            "rendezvous|got signal: 15|stopped by sig",
            # NCCL; not all of its errors: a GPU used twice is no lost peer
            "watchdog caught collective operation timeout|nccl timeout|ncclsystemerror",
            "ncclremoteerror|nccl communicator was aborted|remote process exit",
            # Open MPI
            "lost communication with a remote daemon",
        )
    ),
    re.IGNORECASE,
)
"""What a program says when another rank, its node or the link to it went away."""


def lost_peer(text: str) -> bool:
    """Whether an error only says that another rank went away: a consequence, worth a retry."""
    return LOST_PEER.search(text) is not None


@dataclasses.dataclass(frozen=True)
class Failure:
    """What ended a rank, a node's launcher or a pod that did not end with 0."""

    exit_code: int
    rank: int
    """-1 where it is no rank's."""
    error: str
    retryable: bool
    time: float = dataclasses.field(default_factory=time.time)
    """When, in seconds since 1970: of several nodes' failures the first is the cause."""
    consequence: bool = False
    """Whether it only says that another rank went away."""
    pod: str = ""
    """The pod whose log tells more; known to the step alone, so it is not written."""

    @property
    def words(self) -> str:
        """The error, and whose it is where it is a rank's."""
        return f"rank {self.rank}: {self.error}" if self.rank >= 0 else self.error

    def to_json(self) -> str:
        """One line, short enough for Kubernetes; `parse` reads it."""
        fields = {**dataclasses.asdict(self), "error": _shortened(self.error)}
        del fields["pod"]
        return json.dumps(fields, ensure_ascii=False)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The failure in the last line of `text`; None where it holds none.

        Only rank and error must be there: a time that is not told is 0, an exit code 1.
        """
        try:
            fields = json.loads(text.strip().splitlines()[-1])
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
    """The first failure that is no consequence of another one; None of none."""
    return min(failures, key=_order, default=None)


def _order(failure: Failure) -> tuple[bool, float]:
    return failure.consequence, failure.time


def report(failure: Failure, file: Path | None) -> int:
    """Write the failure where the caller and Kubernetes look for it; returns its exit code."""
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
    """The failure that a launcher wrote to its folder of logs; None if it wrote none."""
    try:
        return Failure.parse((folder / "failure.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_record(failure: Failure, final: bool) -> None:
    """Tell the launcher what ended this rank, in the form and the file of torch elastic.

    It is `final` if the rank itself gave it as why it ended, as for input that cannot be used.

    Raises:
        OSError: the file cannot be written.
    """
    path = os.environ.get(RECORD)
    if not path:
        return
    told = {"py_callstack": traceback.format_exc(), "timestamp": str(int(failure.time))}
    record = {
        **dataclasses.asdict(failure),
        "message": {"message": failure.error, "extraInfo": told},
        "final": final,
    }
    Path(path).write_text(json.dumps(record))


def root_cause(error: Any, kept: str) -> Failure:
    """The first failure of a node's ranks that is no consequence of another one.

    Args:
        error: torch elastic's ChildFailedError.
        kept: What to say of the checkpoint where the ranks were preempted.
    """
    found = [_of_rank(rank, failure, kept) for rank, failure in error.failures.items()]
    return min(found, key=_order)


def _of_rank(rank: int, failure: Any, kept: str) -> Failure:
    data = failure.error_file_data
    code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    message = data.get("message")
    line = str(message.get("message", "")) if isinstance(message, dict) else ""
    if code == PREEMPTED:
        line = f"{line or 'preempted'}; {kept}"
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


def told(files: Iterable[Path], kept: str) -> Failure | None:
    """The first failure that a rank itself gave as why it ended, by the ranks' error files.

    `kept` is what to say of the checkpoint where the ranks stopped in order.
    """
    found = []
    for path in files:
        try:
            text = path.read_text()
            final = bool(json.loads(text).get("final"))
        except (OSError, ValueError):
            continue
        if final and (failure := Failure.parse(text)):
            said = f"{failure.error}; {kept}" if failure.exit_code == PREEMPTED else failure.error
            found.append(dataclasses.replace(failure, error=said))
    return first_cause(found)


def _shortened(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST * 2 // 3]} ... {text[-LONGEST // 3 :]}"

"""Why a run did not end with 0: one line for who started it, and for Kubernetes."""

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TERMINATION_LOG = "/dev/termination-log"
"""Where Kubernetes reads a container's last words; at most 4,096 bytes."""
LONGEST = 700
"""Characters of an error that are told: each takes up to four bytes."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """The root cause of a run that did not end with 0."""

    exit_code: int
    rank: int
    error: str
    retryable: bool
    time: float = dataclasses.field(default_factory=time.time)
    """When, in seconds since 1970: of several nodes' failures the first is the cause."""
    consequence: bool = False
    """Whether it only says that another rank went away."""


def report(failure: Failure, file: Path | None) -> int:
    """Write the failure where the caller and Kubernetes look for it; returns its exit code."""
    fields = {**dataclasses.asdict(failure), "error": _shortened(failure.error)}
    line = json.dumps(fields, ensure_ascii=False)
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
        return Failure(**json.loads((folder / "failure.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def root_cause(error: Any, kept: str) -> Failure:
    """The first failure that is no consequence of another one.

    Args:
        error: torch elastic's ChildFailedError.
        kept: What to say of the checkpoint where the ranks were preempted.
    """

    def order(rank: int) -> tuple[bool, float]:
        failure = error.failures[rank]
        data = failure.error_file_data
        ended_as_told = failure.exitcode in (143, -signal.SIGTERM)
        return (
            bool(data.get("consequence")) or ended_as_told,
            float(data.get("exact_time", failure.timestamp)),
        )

    rank = min(error.failures, key=order)
    consequence, at = order(rank)
    failure = error.failures[rank]
    code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    line = _line(failure.error_file_data)
    if code == 143:
        line = f"{line or 'preempted'}; {kept}"
    elif not line:
        line = f"ended by {failure.signal_name()}" if failure.exitcode < 0 else f"exit code {code}"
    retryable = code >= 128 or bool(failure.error_file_data.get("retryable"))
    return Failure(code, rank, line, retryable, at, consequence)


def told(files: Iterable[Path], kept: str) -> Failure | None:
    """The first failure that a rank itself gave as why it ended, by the ranks' error files.

    `kept` is what to say of the checkpoint where the ranks stopped in order.
    """
    found = []
    for path in files:
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if data.get("final"):
            code, line = int(data["exit_code"]), _line(data)
            line = f"{line}; {kept}" if code == 143 else line
            found.append(
                Failure(
                    code,
                    data["rank"],
                    line,
                    data["retryable"],
                    data["exact_time"],
                    data["consequence"],
                )
            )
    return min(found, key=lambda failure: (failure.consequence, failure.time), default=None)


def _line(data: dict[str, Any]) -> str:
    message = data.get("message", {})
    return str(message.get("message", "")) if isinstance(message, dict) else ""


def _shortened(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST * 2 // 3]} ... {text[-LONGEST // 3 :]}"

"""Request a trace from one rank of a running training, and wait for it."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.core.files import newest_file
from kfp_ddp.core.folders import is_remote
from kfp_ddp.core.polling import poll
from kfp_ddp.core.run_folder import RunFolder, TraceRequest
from kfp_ddp.core.settings import mapping_in
from kfp_ddp.runs.workspace import fetch
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store

_METRICS = RunFolder.METRICS
_PATTERNS = (_METRICS, f"work/*/*/{_METRICS}")
"""Where a run's folder is: itself, or below the output of a local run."""
_TAIL = 1 << 20
"""Bytes at the end of the metrics that contain the last event."""
_POLL_SECONDS = 1.0


def trace(
    place: str, rank: int, steps: int, into: Path, minutes: float, log: Callable[[str], None]
) -> Path:
    """Trace the next steps of a rank, and return the file.

    `place` is the run's folder, its URI, or the output of a local run; from a URI the trace is
    downloaded to `into`. InputError: no such run or rank, or the training has ended. JobError: no
    trace in time.
    """
    uri = place.rstrip("/") if is_remote(place) else str(_run_folder(Path(place)))
    where = open_store(uri)
    _check(where, uri, rank)
    request = TraceRequest.new(rank, steps)
    where.write(RunFolder.TRACE_REQUEST, request.to_json())
    log(f"requested a trace of {steps} steps from rank {rank}, which polls every 10 seconds")
    for late in poll(minutes * 60, _POLL_SECONDS):
        names = (name for name, _ in where.list(f"{RunFolder.TRACES}/"))
        if name := next(filter(request.matches, names), ""):
            break
        if late:
            raise JobError(
                f"rank {rank} of {uri} wrote no trace within {minutes:g} minutes: check in its log "
                "that it still trains; for long steps give more --minutes"
            )
    if not is_remote(uri):
        return Path(uri, name)
    fetch(where, [name], into)
    return into / name


def _run_folder(path: Path) -> Path:
    newest = newest_file(path, _PATTERNS)
    if newest is None:
        raise InputError(
            f"{path} contains no training: name the folder with its metrics.jsonl, its URI such as "
            "gs://bucket/runs/RUN/train, or the output of run --local"
        )
    return newest.parent


def _check(where: Store, uri: str, rank: int) -> None:
    """Refuse a request that no rank would answer."""
    ranks = {name for name, _ in where.list(f"{RunFolder.RANKS}/")}
    with tempfile.TemporaryFile() as file:  # may be larger than the memory
        where.fetch(_METRICS, file, 1 << 40)
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        metrics = file.read()
    lines = metrics[: metrics.rfind(b"\n") + 1].splitlines()
    last = mapping_in(lines[-1]) if lines else {}
    if not ranks:
        raise InputError(f"no rank of {uri} has started: name the folder of a running training")
    if last.get("event") == "end":
        raise InputError(f"the training in {uri} has ended: there is nothing to trace")
    if f"{RunFolder.RANKS}/{rank}.json" not in ranks:
        raise InputError(f"{uri} has no rank {rank}: its ranks are 0 to {len(ranks) - 1}")

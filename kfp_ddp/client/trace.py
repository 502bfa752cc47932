"""A trace of one rank of a training that runs: asked for in its folder, and waited for."""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.core.folders import is_remote
from kfp_ddp.core.run_folder import RunFolder, TraceRequest
from kfp_ddp.core.settings import mapping_in
from kfp_ddp.runs.workspace.files import fetch
from kfp_ddp.storage.destination import Destination, open_destination

_METRICS = RunFolder.METRICS
_WHERE = (_METRICS, f"work/*/*/{_METRICS}")
"""Where a run's folder is: itself, or below the output of a run on this machine."""
_LARGEST = 1 << 40
_LAST = 1 << 20
"""Bytes at the end of the metrics, in which the last event is."""
_LOOK_SECONDS = 1.0


def trace(
    place: str, rank: int, steps: int, into: Path, minutes: float, say: Callable[[str], None]
) -> Path:
    """Let a rank trace its next steps; the file with the trace.

    Args:
        place: The run's folder, or its address, or the output of a run on this machine.
        rank: Who traces.
        steps: How many steps.
        into: Folder that the trace is brought to where the run lies at an address.
        minutes: How long it is waited for.
        say: Told what is waited for.

    Raises:
        InputError: no such run, or rank, or one that has ended.
        JobError: the rank wrote none in time.
    """
    place = place.rstrip("/") if is_remote(place) else str(_run_folder(Path(place)))
    where = open_destination(place)
    _check(where, place, rank)
    asked = TraceRequest.new(rank, steps)
    with tempfile.NamedTemporaryFile() as file:
        file.write(asked.to_json())
        file.flush()
        where.put(Path(file.name), RunFolder.TRACE_REQUEST)
    say(f"asked rank {rank} for a trace of {steps} steps; it looks each 10 seconds")
    deadline = time.monotonic() + minutes * 60
    while not (name := _made(where, asked)):
        if time.monotonic() > deadline:
            raise JobError(
                f"rank {rank} of {place} wrote no trace within {minutes:g} minutes: see its log, "
                "and whether its steps go on; give more --minutes where they take long"
            )
        time.sleep(_LOOK_SECONDS)
    if not is_remote(place):
        return Path(place, name)
    fetch(where, [name], into)
    return into / name


def _run_folder(path: Path) -> Path:
    """The folder of the run that wrote metrics last."""
    found = [file for pattern in _WHERE for file in path.glob(pattern)]
    if not found:
        raise InputError(
            f"{path} holds no training: name the folder with its metrics.jsonl, an address of it "
            "such as gs://bucket/runs/RUN/train, or the output of run --local"
        )
    return max(found, key=lambda file: file.stat().st_mtime).parent


def _check(where: Destination, place: str, rank: int) -> None:
    """Refuse what nobody would answer."""
    ranks = {name for name, _ in where.list(f"{RunFolder.RANKS}/")}
    last = _last_event(where)
    if not ranks:
        raise InputError(f"no rank of {place} has begun: name the folder of a training that runs")
    if last.get("event") == "end":
        raise InputError(f"the training in {place} has ended: nothing is left to trace")
    if f"{RunFolder.RANKS}/{rank}.json" not in ranks:
        raise InputError(f"{place} has no rank {rank}: its ranks are 0 to {len(ranks) - 1}")


def _last_event(where: Destination) -> dict[str, Any]:
    with tempfile.TemporaryFile() as file:  # of a long training, more than memory should hold
        where.fetch(_METRICS, file, _LARGEST)
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST))
        metrics = file.read()
    whole = metrics[: metrics.rfind(b"\n") + 1].splitlines()
    return mapping_in(whole[-1]) if whole else {}


def _made(where: Destination, asked: TraceRequest) -> str:
    """The name of the trace; '' while it is not there."""
    names = (name for name, _ in where.list(f"{RunFolder.TRACES}/"))
    return next(filter(asked.matches, names), "")

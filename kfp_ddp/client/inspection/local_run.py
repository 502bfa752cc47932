"""What a folder of `run --local` tells of its run."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kfp_ddp.client.steps import Step
from kfp_ddp.core.errors import InputError
from kfp_ddp.local.results import ENDED, LOG, STARTED

OVER = re.compile(r"Pipeline '[^']+' finished with status (\w+)")
STATES = {"SUCCESS": "SUCCEEDED", "FAILURE": "FAILED"}
HEAD, INDENT = "INFO - Streamed logs:", " " * 4
"""What kfp.local puts before the lines of a step."""
BEGAN = re.compile(r"\d{4}(-\d\d){5}-\d{6}$")


@dataclass(frozen=True)
class LocalRun:
    """One run of this machine."""

    id: str
    state: str
    start: datetime | None
    end: datetime | None
    steps: tuple[Step, ...]


def read(folder: Path) -> LocalRun:
    """The run whose output a folder holds.

    Raises:
        InputError: it holds none.
    """
    try:
        text = (folder / LOG).read_text(errors="replace")
        ended = datetime.fromtimestamp((folder / LOG).stat().st_mtime, UTC)
    except OSError:
        raise InputError(
            f"{folder} holds no run: name the folder that was given to run --local --output"
        ) from None
    states: dict[str, str] = {}
    for line in text.splitlines():
        if begun := STARTED.search(line):
            states[begun[1]] = "RUNNING"
        elif over := ENDED.search(line):
            states[over[1]] = STATES.get(over[2], over[2])
    whole = OVER.findall(text)[-1:]
    state = STATES.get(whole[0], whole[0]) if whole else "UNFINISHED"
    if "FAILED" in states.values():
        state = "FAILED"
    ids = sorted(path.name for path in (folder / "work").glob("[!.]*"))
    return LocalRun(
        id=ids[-1] if ids else "",
        state=state,
        start=_start(folder),
        end=None if state == "UNFINISHED" else ended,
        steps=tuple(Step(name, name, state) for name, state in states.items()),
    )


def log(folder: Path, step: str) -> Iterator[str]:
    """The lines that a step wrote."""
    inside = False
    with (folder / LOG).open(errors="replace") as file:
        for line in file:
            if begun := STARTED.search(line):
                inside = begun[1] == step
            elif ENDED.search(line):
                inside = False
            elif inside and not line.rstrip().endswith(HEAD):
                yield line.rstrip("\n").removeprefix(INDENT)


def _start(folder: Path) -> datetime | None:
    """When the run began, as KFP names the folder of its artifacts."""
    found = [BEGAN.search(path.name) for path in (folder / "artifacts").glob("*")]
    stamps = sorted(each[0] for each in found if each)
    return datetime.strptime(stamps[-1], "%Y-%m-%d-%H-%M-%S-%f").astimezone() if stamps else None

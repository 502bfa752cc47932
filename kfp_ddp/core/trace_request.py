"""A trace of one rank that is asked for while its training runs: a file in the run's folder."""

import json
import os
import re
from pathlib import Path
from typing import NamedTuple, Self

from kfp_ddp.core.files import open_below
from kfp_ddp.core.run_folder import RunFolder

MOST_STEPS = 1000
_LARGEST = 4096
_ID = re.compile(r"[0-9a-f]{16}")


class Request(NamedTuple):
    """Which rank traces how many steps; `id` tells one request from another."""

    rank: int
    steps: int
    id: str

    @classmethod
    def new(cls, rank: int, steps: int) -> Self:
        """One that nobody made before."""
        return cls(rank, steps, os.urandom(8).hex())

    @classmethod
    def read(cls, folder: RunFolder) -> Self | None:
        """The newest of a run; None where there is none, or something that is none."""
        try:
            with open_below(folder.path, folder.trace_request.name) as file:
                said = json.loads(file.read(_LARGEST))
            found = cls(int(said["rank"]), int(said["steps"]), str(said["id"]))
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None
        return found if 0 < found.steps <= MOST_STEPS and _ID.fullmatch(found.id) else None

    def written(self) -> bytes:
        """What its file holds."""
        return json.dumps(self._asdict()).encode()

    def name_of_trace(self, first: int) -> str:
        """The file's name of a trace that begins with step `first`, below `traces`."""
        return f"rank-{self.rank}-steps-{first}-{first + self.steps - 1}-{self.id}.json.gz"

    def made(self, name: str) -> bool:
        """Whether a file of this name, in whatever folder, is the trace that was asked for."""
        plain = Path(name).name
        return plain.endswith(f"-{self.id}.json.gz") and not plain.startswith(".")

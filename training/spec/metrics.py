"""The file metrics.jsonl: one JSON object a line, flushed at once; its writer and its reader."""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kfp_ddp.core.errors import StorageError, full, writing
from kfp_ddp.core.settings import mapping_in

Sink = Callable[[str, dict[str, Any]], None]
"""Gets the name and the fields of each event."""


class Metrics:
    """Appends events to `metrics.jsonl` and passes them to sinks; does nothing without path."""

    def __init__(self, path: Path | None, sinks: Sequence[Sink] = ()) -> None:
        self._file = None
        self._sinks = sinks
        if path is None:
            return
        with writing(path, "use a writable output folder"):
            self._file = path.open("ab", buffering=0)
            end = path.read_bytes().rfind(b"\n") + 1
            self._file.truncate(end)  # without an incomplete line of a killed process

    def write(self, event: str, **fields: Any) -> None:
        """Append an event with its time; NaN and infinity become null. Raise StorageError."""
        if self._file is None:
            return
        line = {"event": event, "time": time.time(), **fields}
        try:
            self._append(json.dumps({k: _plain(v) for k, v in line.items()}).encode() + b"\n")
        except OSError as error:
            raise StorageError(full(error, self._file.name)) from None
        for sink in self._sinks:
            sink(event, fields)

    def _append(self, line: bytes) -> None:
        """Write the complete line or, on a full volume, nothing."""
        assert self._file is not None
        before = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(before)
            raise

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the valid lines of a `metrics.jsonl`; none of a missing or unreadable file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    return list(filter(None, map(mapping_in, lines)))

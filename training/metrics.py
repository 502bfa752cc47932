"""What a run reports while it goes on: one JSON object a line, flushed at once, and more sinks."""

import contextlib
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kfp_ddp.core.errors import StorageError, full
from kfp_ddp.training.sinks import Sink


class Metrics:
    """Appends events to `metrics.jsonl` and hands them to sinks; without a path it does nothing."""

    def __init__(self, path: Path | None, sinks: Sequence[Sink] = ()) -> None:
        self._file = None
        self._sinks = sinks
        if path is None:
            return
        try:
            self._file = path.open("ab", buffering=0)
            whole = path.read_bytes().rfind(b"\n") + 1
            self._file.truncate(whole)  # the last line of a process that was killed
        except OSError as error:
            raise StorageError(
                f"cannot write {path}: {error.strerror}; give the run an output folder it may write"
            ) from None

    def write(self, event: str, **fields: Any) -> None:
        """Append one event with the time; numbers that JSON lacks become null.

        Raises:
            StorageError: the file can no longer be written.
        """
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
        """Write the whole line or, on a volume without room for it, nothing."""
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

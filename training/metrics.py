"""What a run reports while it goes on: one JSON object a line, flushed at once, and more sinks."""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kfp_ddp.training.errors import InputError
from kfp_ddp.training.sinks import Sink


class Metrics:
    """Appends events to `metrics.jsonl` and hands them to sinks; without a path it does nothing."""

    def __init__(self, path: Path | None, sinks: Sequence[Sink] = ()) -> None:
        self._file = None
        self._sinks = sinks
        if path is None:
            return
        try:
            torn = path.exists() and not path.read_bytes().endswith(b"\n")
            self._file = path.open("a", encoding="utf-8")
            if torn:  # the last line of a process that was killed
                self._file.write("\n")
        except OSError as error:
            raise InputError(
                f"cannot write {path}: {error.strerror}; give the run an output folder it may write"
            ) from None

    def write(self, event: str, **fields: Any) -> None:
        """Append one event with the time; numbers that JSON lacks become null.

        Raises:
            InputError: the file can no longer be written.
        """
        if self._file is None:
            return
        line = {"event": event, "time": time.time(), **fields}
        try:
            self._file.write(json.dumps({k: _plain(v) for k, v in line.items()}) + "\n")
            self._file.flush()
        except OSError as error:
            raise InputError(
                f"cannot write {self._file.name}: {error.strerror}; "
                "make room or repair the volume and start again to resume"
            ) from None
        for sink in self._sinks:
            sink(event, fields)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value

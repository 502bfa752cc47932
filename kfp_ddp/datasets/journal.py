"""Journal of downloaded files, from which an interrupted sync resumes."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kfp_ddp.core.files import folder_below, open_below

_BATCH = 64
_KINDS = [str, int, int, int, int]


class Arrived(NamedTuple):
    """A verified file in the journal; `trusted` if it was written since the last boot."""

    name: str
    size: int
    crc: int
    mtime_ns: int
    inode: int
    trusted: bool


class Journal:
    """A line per downloaded file, after a line with the boot id of the machine.

    Files of another boot may not have reached the disk.
    """

    def __init__(self, root: Path, name: Path) -> None:
        self._root, self._name = root, name
        self._descriptor, self._lines = -1, list[str]()
        self._lock = threading.Lock()

    def open(self) -> None:
        """Open the journal to append; raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        with folder_below(self._root, self._name.parent) as folder:
            self._descriptor = os.open(self._name.name, flags, 0o644, dir_fd=folder)
        # The line feed ends a line that a kill truncated.
        os.write(self._descriptor, f"\n{json.dumps({'boot': _boot()})}\n".encode())

    def close(self) -> None:
        """Flush and close it."""
        if self._descriptor >= 0:
            with self._lock:
                self._flush()
            os.close(self._descriptor)
            self._descriptor = -1

    def note(self, name: str, size: int, crc: int, mtime_ns: int, inode: int) -> None:
        """Add a downloaded file; safe to call from any thread."""
        line = f"[{json.dumps(name)}, {size}, {crc}, {mtime_ns}, {inode}]"
        with self._lock:
            self._lines.append(line)
            if len(self._lines) >= _BATCH:
                self._flush()

    def read(self) -> Iterator[Arrived]:
        """Yield the files in the journal; none if it is missing."""
        trusted = False
        for line in self._json_lines():
            if isinstance(line, dict):
                trusted = bool(_boot()) and line.get("boot") == _boot()
            elif isinstance(line, list) and [type(value) for value in line] == _KINDS:
                name, size, crc, mtime_ns, inode = line
                yield Arrived(name, size, crc, mtime_ns, inode, trusted)

    def _flush(self) -> None:
        if self._lines:
            text = "\n".join(self._lines) + "\n"
            self._lines.clear()
            os.write(self._descriptor, text.encode("utf-8", "surrogateescape"))

    def _json_lines(self) -> Iterator[Any]:
        try:
            file = open_below(self._root, self._name)
        except OSError:
            return
        with file:
            for line in file:
                try:
                    yield json.loads(line.decode("utf-8", "surrogateescape"))
                except (ValueError, RecursionError):
                    continue  # the kill came in the middle of the line


def _boot() -> str:
    """Return an id of the current boot of the machine; '' if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""

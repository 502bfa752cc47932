"""A stream of tar from a pod, taken apart by one who trusts nothing in it."""

import contextlib
import io
import os
import shutil
import tarfile
from collections.abc import Collection, Iterator
from pathlib import Path

from kfp_ddp.core.errors import StorageError


class Incoming(io.RawIOBase):
    """Blocks of bytes as a file that is read from its begin to its end."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest = blocks, b""

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill the buffer with what comes next; 0 at the end."""
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = block
        taken = self._rest[: len(buffer)]
        self._rest = self._rest[len(taken) :]
        buffer[: len(taken)] = taken
        return len(taken)


def unpack(blocks: Iterator[bytes], wanted: Collection[str], folder: Path) -> None:
    """Write the files that are wanted below a folder, each under its name only when it is whole.

    Raises:
        StorageError: the stream ended early, or is no tar.
        OSError: there is no room.
    """
    try:
        stream = io.BufferedReader(Incoming(blocks), 1 << 20)
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isreg() else None
                if content is None or member.name not in wanted:
                    continue
                path = folder / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                aside = path.with_name(f".{path.name}.incoming")
                with aside.open("wb") as into:
                    shutil.copyfileobj(content, into, 1 << 20)
                os.replace(aside, path)
        with contextlib.suppress(StopIteration):
            while True:
                next(blocks)  # how the program ended comes last
    except tarfile.TarError as error:
        raise StorageError(f"the files came cut short ({error}); try again") from None

"""Files that outlive a power cut."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def fsync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk.

    Raises:
        OSError: the disk is full, or failing.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def durable(path: Path) -> Iterator[BinaryIO]:
    """A file to write, whose content is on the disk when the block ends; raises OSError."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def atomic_write(path: Path, aside: Path | None = None) -> Iterator[BinaryIO]:
    """A file to write that gets its name when the block ends well, and else goes; raises OSError.

    Its content is on the disk by then; for the name to be, `fsync` its folder.

    Args:
        path: Its name.
        aside: Where it is written; `<path>.tmp` without a value.
    """
    aside = aside or path.with_name(f"{path.name}.tmp")
    try:
        with durable(aside) as file:
            yield file
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise

"""Files that outlive a power cut."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk.

    Raises:
        OSError: the disk is full, or failing.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

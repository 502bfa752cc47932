"""Which samples an evaluation is of: the digests that two of them are compared by."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from kfp_ddp.core.files import read_below
from kfp_ddp.storage import manifest

_MOST = 4096  # bytes that are read of the file that says the digest


def dataset_digest(dataset: Path) -> str:
    """The digest that data_sync wrote when the version was complete; '' if there is none."""
    try:
        text = read_below(dataset, manifest.SUCCESS, _MOST)
    except (OSError, ValueError):
        return ""
    found = re.search(r"\b[0-9a-f]{64}\b", text.decode(errors="replace"))
    return found[0] if found else ""


def samples_digest(samples: Iterable[tuple[str, str]]) -> str:
    """SHA-256 over the (path, class) pairs in sorted order: which samples, not their pixels."""
    total = hashlib.sha256()
    for path, name in sorted(samples):
        total.update(f"{path}\0{name}\n".encode())
    return total.hexdigest()


def split_digest(dataset: Path, paths: Iterable[str], folder: str = "") -> str:
    """SHA-256 over path, size and crc32c of samples, from the version's manifest.

    `paths` are those below a folder of the dataset. '' where there is no manifest, or one that
    lacks a sample.
    """
    wanted = sorted(paths)
    names = {str(PurePosixPath(folder, path)): path for path in wanted}
    rows = manifest.rows(dataset / manifest.NAME)
    content = {names[row.name]: (row.size, row.crc) for row in rows if row.name in names}
    total = hashlib.sha256()
    for path in wanted:
        if path not in content:
            return ""
        size, crc = content[path]
        total.update(f"{path}\0{size}\0{crc:08x}\n".encode())
    return total.hexdigest()

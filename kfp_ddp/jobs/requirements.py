"""Packages that a job installs: pins, alone or with the hashes of a lock."""

import re
from collections.abc import Sequence
from pathlib import Path

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.packed import MOST_BYTES

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_MARKER = r"""(?:\s*;(?:[\w\s.,<>=!~()'"|*+/]|-[\w.])+?)?"""
PACKAGE = (
    rf"^{_NAME}(?:\[[\w\s,.-]+\])?==[A-Za-z0-9][A-Za-z0-9.!+_-]*{_MARKER}"
    r"(?:\s+--hash=sha256:[0-9a-f]{64})*$"
)
INDEX = r"^(https?|file)://\S+$"
HASH = "--hash="


def locked(path: str | Path) -> list[str]:
    """Return the pins, with hashes, of a requirements file as uv or pip-tools write it.

    Raise InputError for no file, a line that is no pin, or more than a pipeline carries.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as a requirements file: {error}") from None
    joined = re.sub(r"\\\r?\n", " ", text)
    lines = map(_without_comment, joined.splitlines())
    pins = list(filter(None, lines))
    for line in pins:
        if not re.fullmatch(PACKAGE, line):
            raise InputError(
                f"{path}: {line[:80]!r} is not a pin such as name==1.0: write one per line"
            )
    check_packages(pins)
    size = sum(map(len, pins))
    if size > MOST_BYTES:
        raise InputError(
            f"{path} pins {size:,} bytes, and a pipeline carries {MOST_BYTES:,}: "
            "lock what the image lacks alone, or build an image with all of it"
        )
    return pins


def _without_comment(line: str) -> str:
    """Return a line of a requirements file with one space between its words."""
    return " ".join(re.sub(r"(^|\s)#.*", "", line).split())


def check_packages(packages: Sequence[str]) -> None:
    """Raise InputError if only some pins have hashes, which pip would not check."""
    without = [line for line in packages if HASH not in line]
    if 0 < len(without) < len(packages):
        raise InputError(
            f"packages_to_install: {without[0]!r} has no hash and others have: lock all or none"
        )

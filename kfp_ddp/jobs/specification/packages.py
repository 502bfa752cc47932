"""Packages that workers install before their code: pins, or a lock with hashes."""

import re
from collections.abc import Sequence
from pathlib import Path

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.specification.script import MOST_BYTES

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_MARKER = r"""(?:\s*;(?:[\w\s.,<>=!~()'"|*+/]|-[\w.])+?)?"""
PACKAGE = (
    rf"^{_NAME}(?:\[[\w\s,.-]+\])?==[A-Za-z0-9][A-Za-z0-9.!+_-]*{_MARKER}"
    r"(?:\s+--hash=sha256:[0-9a-f]{64})*$"
)
INDEX = r"^(https?|file)://\S+$"
HASH = "--hash="


def locked(path: str | Path) -> list[str]:
    """The packages that a requirements file pins, as uv or pip-tools write one, with their hashes.

    Raises:
        InputError: a line that is no pin, no file, or more than a pipeline carries.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as a requirements file: {error}") from None
    joined = re.sub(r"\\\r?\n", " ", text)
    lines = [" ".join(re.sub(r"(^|\s)#.*", "", line).split()) for line in joined.splitlines()]
    found = [line for line in lines if line]
    for line in found:
        if not re.fullmatch(PACKAGE, line):
            raise InputError(f"{path}: {line[:80]!r} is no pin such as name==1.0: write one a line")
    check(found)
    size = sum(map(len, found))
    if size > MOST_BYTES:
        raise InputError(
            f"{path} pins {size:,} bytes, and a pipeline carries {MOST_BYTES:,}: "
            "lock what the image lacks alone, or build an image with all of it"
        )
    return found


def check(packages: Sequence[str]) -> None:
    """Refuse pins of which some have hashes and some none; they would not be held to them.

    Raises:
        InputError: naming the first without.
    """
    without = [line for line in packages if HASH not in line]
    if without and len(without) < len(packages):
        raise InputError(
            f"packages_to_install: {without[0]!r} has no hash and others have: lock all or none"
        )

"""Seals that only this user's program can make: what lies in a folder cannot vouch for itself."""

import contextlib
import hmac
import os
import secrets
from pathlib import Path

from kfp_ddp.core.config import own_folder
from kfp_ddp.core.errors import InputError, writing
from kfp_ddp.core.files import open_below

KEY = "key"
"""The file of the key, beside the user's settings."""
MARK = ".kfp-ddp"
"""An empty file, whose time of change no copy of its folder has."""
_BYTES = 32


def mark(folder: Path) -> None:
    """Create the mark of a folder, unless it exists: seals without one would hold for a copy."""
    with contextlib.suppress(FileExistsError):
        (folder / MARK).open("x").close()


def seal(folder: Path, content: str) -> str:
    """Return the seal of a text for a folder; raise InputError if the key cannot be used.

    It is of the folder's path and the time of its mark, too. So it does not hold for a copy, also
    one in the same place, nor for a folder that a checkout or an archive has created.
    """
    changed = 0
    with contextlib.suppress(FileNotFoundError):
        changed = os.lstat(folder / MARK).st_ctime_ns
    text = "\0".join((os.path.realpath(folder), str(changed), content))
    return hmac.digest(_key(), text.encode("utf-8", "surrogateescape"), "sha256").hex()


def is_sealed(folder: Path, content: str, value: str) -> bool:
    """Return whether this user's program has made the seal of a text for a folder."""
    return hmac.compare_digest(value.encode(), seal(folder, content).encode())


def _key() -> bytes:
    """Return the user's key, which is created when it is first needed."""
    file = own_folder() / KEY
    if not os.path.lexists(file):
        _create(file)
    try:
        with open_below(file.parent, file.name) as opened:
            about = os.fstat(opened.fileno())
            key = opened.read(_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read the key {file}: {error.strerror}; delete it") from None
    is_own = about.st_uid == os.geteuid() and not about.st_mode & 0o077
    if not is_own or len(key) != _BYTES:
        raise InputError(
            f"the key {file} is not {_BYTES} bytes of this user that nobody else can read: delete "
            "it, then earlier local runs cannot be resumed, or set XDG_CONFIG_HOME"
        )
    return key


def _create(file: Path) -> None:
    """Create the key, unless another command has done so meanwhile."""
    aside = file.with_name(f".{secrets.token_hex(8)}.tmp")
    with writing(file, "set XDG_CONFIG_HOME to a folder of yours, for the key of local runs"):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with open(aside, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as new:
                new.write(secrets.token_bytes(_BYTES))
                new.flush()
                os.fsync(new.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(aside, file)
        finally:
            aside.unlink(missing_ok=True)

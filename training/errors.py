"""The one error type whose message is meant for the person who started the run."""

import errno
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of an OSError that says a volume has no room."""


class InputError(ValueError):
    """Input that cannot be used; the message is one line: what, why and what to do."""

    retryable = False
    """Whether another try may find it usable."""
    consequence = False
    """Whether it is another rank's, which all ranks stop for."""


def full(error: OSError, folder: Path | str) -> str:
    """The line for a volume without room: what could not be written, why, and what to do."""
    return (
        f"cannot write to {error.filename or folder}: {error.strerror}; "
        "make room or repair the volume and start again to resume"
    )

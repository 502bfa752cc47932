"""Errors with a message of one line: what, why and what to do; the type gives the exit code."""

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of an OSError for a full volume."""
UNIX_ONLY = "this needs Linux or macOS: on Windows, use it in WSL"
"""The error without modules of Python that Windows lacks."""
PREEMPTED = 143
"""Exit code of a process that stopped on request, as by SIGTERM, and can resume later."""


@dataclass(frozen=True)
class Problem:
    """What is wrong, and what to do; as text, the line that is printed."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


class KfpDdpError(Exception):
    """Base class; programs print the message and end with `exit_code`."""

    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False
    """Whether a retry may succeed."""

    @property
    def problem(self) -> Problem:
        """What is wrong and what to do; of an error with text, by its first semicolon."""
        if self.args and isinstance(self.args[0], Problem):
            return self.args[0]
        what, _, remedy = str(self).partition("; ")
        return Problem(what, remedy)


class InputError(KfpDdpError, ValueError):
    """The input is invalid."""

    exit_code = 2


class NoClusterError(InputError):
    """No Kubernetes cluster, nor an address of KFP, is configured."""


class RefusedError(InputError):
    """The KFP API server refuses the request or the user."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status, such as 404."""


class ServerError(KfpDdpError):
    """The KFP API server does not answer, or with an internal error."""

    retryable = True


class StorageError(KfpDdpError):
    """A volume or a bucket cannot be read or written, or another program changed it."""


class UnavailableError(StorageError):
    """A volume or a bucket does not respond, or reports an internal error."""

    retryable = True


class JobError(KfpDdpError):
    """A job or a training ended without success."""


class RunCancelledError(KfpDdpError):
    """The run was terminated; its job is deleted."""

    exit_code = PREEMPTED


class PeerLostError(KfpDdpError):
    """Another rank ended, and this one with it: never the cause."""

    retryable = True


MAKE_ROOM = "make room or repair the volume and start again"
_NO_RIGHT = "make it writable for this user, or name another path"
_REMEDIES = {
    errno.ENOENT: "create that folder first, or name another path",
    errno.ENOTDIR: "a file is in place of a folder: name another path",
    errno.EACCES: _NO_RIGHT,
    errno.EPERM: _NO_RIGHT,
    errno.EROFS: _NO_RIGHT,
}
"""What the user can correct, by the number of an OSError."""


def full(
    error: OSError, path: str | os.PathLike[str], advice: str = f"{MAKE_ROOM} to resume"
) -> str:
    """Return the message for a file or folder that cannot be written, such as on a full volume."""
    where = error.filename if os.path.isabs(str(error.filename)) else path
    return f"cannot write to {where}: {error.strerror or error}; {advice}"


@contextlib.contextmanager
def writing(path: str | os.PathLike[str], advice: str = "") -> Iterator[None]:
    """Raise StorageError, with `advice` or the remedy, for an OSError of a block that writes."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of what is printed has ended: no fault of `path`
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, MAKE_ROOM)
        raise StorageError(full(error, path, advice or remedy)) from None

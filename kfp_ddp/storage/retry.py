"""When and how often a request is sent again."""

from dataclasses import dataclass

from kfp_ddp.core.errors import UnavailableError


def is_temporary(status: int | None) -> bool:
    """Return whether an HTTP status reports a fault that a retry may not meet again."""
    return status in (408, 429) or (status is not None and status >= 500 and status != 501)


@dataclass
class Retry:
    """Number of attempts, and the first and the longest pause in seconds."""

    attempts: int = 8
    pause: float = 0.25
    longest: float = 20.0

    def delay(self, attempt: int) -> float:
        """Seconds to wait after this attempt: exponential back-off with full jitter."""
        import random  # most syncs wait for nothing

        return random.uniform(0, min(self.longest, self.pause * 2**attempt))

    def exhausted(self, what: str, problem: object) -> UnavailableError:
        """Return the error for the last attempt."""
        times = f"{self.attempts} times"
        return UnavailableError(f"cannot read {what}: {problem}, {times}; try again later")

"""How stubbornly a peer is asked."""

from dataclasses import dataclass

from kfp_ddp.core.errors import StorageError


@dataclass
class Retry:
    """How often an object is asked for, and the first and the longest pause in seconds."""

    attempts: int = 8
    pause: float = 0.25
    longest: float = 20.0

    def delay(self, attempt: int) -> float:
        """Seconds to wait after this attempt: exponential back-off with full jitter."""
        import random  # most syncs wait for nothing

        return random.uniform(0, min(self.longest, self.pause * 2**attempt))

    def exhausted(self, what: str, problem: object) -> StorageError:
        """The error after the last attempt."""
        times = f"{self.attempts} times"
        return StorageError(f"cannot read {what}: {problem}, {times}; try again later")

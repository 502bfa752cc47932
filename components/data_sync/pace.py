"""How a transfer is paced and counted: attempts, bandwidth, and what has arrived so far."""

import random
import threading
import time
from dataclasses import dataclass

from kfp_ddp.base.errors import InputError


@dataclass
class Retry:
    """How stubbornly an object is asked for: attempts, first and longest pause in seconds."""

    attempts: int = 8
    pause: float = 0.25
    longest: float = 20.0

    def delay(self, attempt: int) -> float:
        """Seconds to wait after this attempt: exponential back-off with full jitter."""
        return random.uniform(0, min(self.longest, self.pause * 2**attempt))

    def exhausted(self, what: str, problem: object) -> InputError:
        """The error after the last attempt."""
        return InputError(f"cannot read {what}: {problem}, {self.attempts} times; try again later")


class Throttle:
    """A bandwidth limit in bytes a second over all threads; 0 for none."""

    def __init__(self, rate: float) -> None:
        self.rate, self._lock, self._free_at = rate, threading.Lock(), 0.0

    def delay(self, count: int) -> float:
        """Seconds to wait before `count` more bytes may pass; they count as passed."""
        if not self.rate:
            return 0
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self.rate
            return self._free_at - now


class Meter:
    """What has arrived so far; each worker counts in a slot of its own."""

    def __init__(self, workers: int) -> None:
        self._files, self._bytes, self._retries = ([0] * workers for _ in range(3))

    def add(self, worker: int, size: int) -> None:
        """Bytes that arrived."""
        self._bytes[worker] += size

    def done(self, worker: int) -> None:
        """One more whole file."""
        self._files[worker] += 1

    def retried(self, worker: int) -> None:
        """One more attempt that failed."""
        self._retries[worker] += 1

    files = property(lambda self: sum(self._files))
    bytes = property(lambda self: sum(self._bytes))
    retries = property(lambda self: sum(self._retries))

"""What a transfer has brought so far, and how fast it may go on."""

import time
from dataclasses import dataclass


@dataclass
class Meter:
    """Files and bytes that have arrived, and attempts that failed; one thread writes them."""

    files: int = 0
    bytes: int = 0
    retries: int = 0


class Throttle:
    """A bandwidth limit in bytes a second over all connections; 0 for none."""

    def __init__(self, rate: float) -> None:
        self.rate, self._free_at = rate, 0.0

    def delay(self, count: int) -> float:
        """Seconds to wait before `count` more bytes may pass; they count as passed."""
        if not self.rate:
            return 0
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + count / self.rate
        return self._free_at - now

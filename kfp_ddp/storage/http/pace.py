"""How slow a peer may be before it is given up."""

LOWEST_SPEED = 1000
"""Bytes a second, over any stretch of waiting as long as the longest silence. A GB takes 12 days at
that; a modem brought five times as much, and what is slower only holds a sync up."""


class Pace:
    """Counts what arrives while it is waited for; our own pauses do not count.

    `period` is in seconds. It starts with an answer's first byte: how long a peer may think is the
    matter of the longest silence.
    """

    def __init__(self, period: float) -> None:
        self._period = period
        self.bytes = 0
        self._seconds = 0.0

    def restart(self) -> None:
        """Another answer is waited for."""
        self.bytes, self._seconds = 0, 0.0

    def waited(self, seconds: float) -> None:
        """The peer was waited for, and `bytes` have come by now.

        Raises:
            TimeoutError: too few for the period that ends.
        """
        if not self.bytes:
            return
        self._seconds += seconds
        if self._seconds >= self._period:
            if self.bytes < LOWEST_SPEED * self._seconds:
                raise TimeoutError(f"less than {LOWEST_SPEED} bytes a second")
            self.restart()

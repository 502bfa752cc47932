"""How many large bodies a transfer brings at once: as many as bring more."""

import asyncio
import math
import time
from collections.abc import Callable

STREAMS = 2
"""Connections to begin with: as many bring what two processors can decrypt and write."""
BUSY = 0.8
"""Processors in use from which on more connections may only wait for them."""
MORE = 1.2
"""What twice as many have to bring, where the processor is in use."""
_PERIOD = 0.1


class Growth:
    """Tells when twice as many large bodies at once are of use.

    They are while the processor is idle. They have threads of their own, which leave the
    interpreter's lock: where the processor is not idle, twice as many are tried, and again if they
    brought more. Too many keep taking the lock from one another:
    20 x 50 MB over TLS took 1.8 to 2.1 s with 2 to 4 of them at once on two cores, and 2.8 s
    with 20.
    """

    def __init__(self, arrived: Callable[[], int]) -> None:
        """A growth of the transfer that has brought `arrived()` bytes."""
        self._arrived, self._best = arrived, 0.0

    async def period(self) -> bool:
        """Look on for a while; whether more connections are of use by then."""
        began, used, before = time.perf_counter(), time.process_time(), self._arrived()
        await asyncio.sleep(_PERIOD)
        seconds = time.perf_counter() - began
        busy, rate = (time.process_time() - used) / seconds, (self._arrived() - before) / seconds
        return self.of_use(busy, rate)

    def of_use(self, busy: float, rate: float) -> bool:
        """Whether more large bodies at once are of use.

        Args:
            busy: How many processors were in use.
            rate: Bytes a second that arrived with those that there are.
        """
        if not rate:  # the first answers are on their way
            return False
        if busy < BUSY:
            return True
        more = rate > MORE * self._best
        self._best = rate if more else math.inf
        return more

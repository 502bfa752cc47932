"""Waiting for what other processes and threads do."""

import time
from collections.abc import Callable


def until(
    condition: Callable[[], object],
    state: Callable[[], str] = str,
    seconds: float = 240,
    pause: float = 0.01,
) -> None:
    """Return when the condition holds.

    Raises:
        AssertionError: with the state, if it does not within the seconds.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited in vain\n{state()}"
        time.sleep(pause)

"""Waiting for a state that nothing reports."""

import time
from collections.abc import Iterator


def poll(seconds: float, pause: float) -> Iterator[bool]:
    """Yield whether `seconds` have passed, at once and after each pause, without end."""
    deadline = time.monotonic() + seconds
    while True:
        yield time.monotonic() >= deadline
        time.sleep(pause)

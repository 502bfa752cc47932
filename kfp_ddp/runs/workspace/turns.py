"""Something done again and again beside a program, which goes on where a bucket is away."""

import threading
from collections.abc import Callable

from kfp_ddp.core.errors import KfpDdpError
from kfp_ddp.storage.destination import Destination, open_destination


class Turns:
    """A thread that calls `act` with a place each `seconds`, until it is stopped."""

    def __init__(self, address: str, act: Callable[[Destination], None], seconds: float) -> None:
        self._where, self._act, self._seconds = open_destination(address), act, seconds
        self._over, self._away = threading.Event(), False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End it, when the turn it is at is over."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._seconds):
            try:
                self._act(self._where)
            except (KfpDdpError, OSError) as error:
                if not self._away:
                    print(f"warning: {error}; trying again", flush=True)
                self._away = True
            else:
                if self._away:
                    print(f"{self._where.uri} can be reached again", flush=True)
                self._away = False

"""The event loop of all sources and transfers, in a thread, as a notebook has one already."""

import asyncio
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future, wait
from typing import Any, TypeVar

T = TypeVar("T")


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="data_sync", daemon=True).start()
    return loop


os.register_at_fork(after_in_child=_loop.cache_clear)  # a child has no such thread


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run it on the loop and wait for its end; an interrupt of the caller cancels it."""
    loop = _loop()
    done = Future[T]()
    tasks: list[asyncio.Task[T]] = []

    def start() -> None:
        tasks.append(loop.create_task(work))
        tasks[0].add_done_callback(end)

    def end(task: asyncio.Task[T]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(task.result())

    loop.call_soon_threadsafe(start)
    try:
        return done.result()
    except BaseException:
        if not done.done():
            loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            wait([done])
        raise


async def in_thread(
    threads: Executor | None,
    call: Callable[..., T],
    *arguments: object,
    interrupt: Callable[[], None] | None = None,
) -> T:
    """Call it in a thread; when we are cancelled, `interrupt` it, and wait for its end."""
    future = asyncio.get_running_loop().run_in_executor(threads, call, *arguments)
    try:
        await asyncio.wait({future})
    except asyncio.CancelledError:
        if interrupt is not None:
            with contextlib.suppress(OSError):
                interrupt()
        await asyncio.wait({future})
        future.exception()
        raise
    return future.result()

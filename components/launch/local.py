"""The backend `local`: the ranks as processes of this machine, none of which outlives the step."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from kfp_ddp.components.launch import processes
from kfp_ddp.components.launch.progress import METRICS_FILE, Progress, Tail

PROGRESS_SECONDS = 5.0
# torch elastic gives its workers 30 s to save and leave after a SIGTERM.
GRACE_SECONDS = 40.0


@dataclass
class Ended:
    """How the launcher of the ranks ended: its exit code and its last lines."""

    code: int
    stopped_by: int | None = None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=50))


def run_ranks(command: list[str], run_dir: Path, environment: dict[str, str]) -> Ended:
    """Run a launcher in `run_dir`, its output and progress on our stdout; return when it is over.

    SIGTERM and SIGINT are passed on to it, a second one kills. When this function is left, by
    whatever way, no process of the launcher's group runs any more.
    """
    tail = Tail(run_dir / METRICS_FILE)
    tail.skip()
    ended = Ended(code=0)
    with _forwarding(ended) as forward_to:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **environment},
            process_group=0,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
        try:
            forward_to(process)
            processes.record(run_dir, process.pid)
            reader = threading.Thread(target=_stream, args=(process, ended), daemon=True)
            reader.start()
            _follow(process, tail)
            processes.send(process.pid, signal.SIGKILL)
            reader.join(timeout=5)
        finally:
            processes.end(process.pid, GRACE_SECONDS if process.poll() is None else 0)
            ended.code = process.wait()
            processes.forget(run_dir)
    return ended


def _die_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent is killed (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _stream(process: "subprocess.Popen[str]", ended: Ended) -> None:
    """Copy the output line by line; when nobody reads it any more, stop the ranks and drain it."""
    assert process.stdout is not None
    read = True
    for line in process.stdout:
        ended.tail.append(line.rstrip())
        try:
            if read:
                print(line, end="", flush=True)
        except OSError:
            read = False
            process.terminate()


def _follow(process: "subprocess.Popen[str]", tail: Tail) -> None:
    """Wait for the process, with a progress line at most every few seconds and one at the end."""
    progress, printed, fresh = Progress(), 0.0, False
    while True:
        over = process.poll() is not None
        fresh = progress.update(tail.read()) or fresh
        if fresh and (over or time.monotonic() - printed >= PROGRESS_SECONDS):
            print(progress.line(), flush=True)
            printed, fresh = time.monotonic(), False
        if over:
            return
        time.sleep(0.1)


@contextmanager
def _forwarding(ended: Ended) -> Iterator[Callable[["subprocess.Popen[str]"], None]]:
    """Pass SIGTERM and SIGINT on to a launcher; the second one ends its whole group at once.

    Yields:
        A function that names the process; a signal that came before it is passed on then.
    """
    target: list[subprocess.Popen[str]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        first, ended.stopped_by = ended.stopped_by is None, number
        if target and first:
            # The launcher tells its ranks; SIGTERM is what they save a checkpoint for.
            target[0].terminate()
        elif target:
            processes.send(target[0].pid, signal.SIGKILL)

    def name(process: "subprocess.Popen[str]") -> None:
        target.append(process)
        if ended.stopped_by is not None:
            process.terminate()

    numbers = (signal.SIGTERM, signal.SIGINT)
    previous = [signal.signal(number, forward) for number in numbers]
    try:
        yield name
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)

"""The backend `local`: the ranks as processes of this machine, none of which outlives the step."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from kfp_ddp.core import failure
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.jobs import local_processes
from kfp_ddp.jobs.training_progress import ProgressTeller
from kfp_ddp.training.watch import PARENT

PROGRESS_SECONDS = 5.0
# The launcher gives its ranks 90 s to save and leave after a SIGTERM.
GRACE_SECONDS = 100.0


@dataclass
class Ended:
    """How the ranks ended: the launcher's exit code, our signal, its last line of output."""

    code: int = 0
    stopped_by: int | None = None
    last_line: str = ""

    def cause(self, run_dir: Path) -> str:
        """What the launcher found to have failed first; its last line where it could not say."""
        told = failure.read(RunFolder(run_dir).logs)
        if told is None:
            return f"exit code {self.code}: {self.last_line or 'no output'}"
        return told.words


def local_gpus() -> int:
    """How many ranks this machine has room for: one for each GPU, or one.

    Raises:
        InputError: this image has no torch.
    """
    try:
        import torch
    except ImportError as error:
        raise InputError(
            "backend local needs an image with torch: use backend=pytorchjob on a cluster, or "
            "set_container_image of the trainer on this task"
        ) from error
    return max(1, torch.cuda.device_count())


def run_ranks(
    flags: list[str], ranks: int, run_dir: Path, program: str = local_processes.NODE
) -> Ended:
    """Work with `ranks` processes, output and progress on our stdout; return when it is over.

    SIGTERM and SIGINT are passed on to the launcher, a second one kills. When this function is
    left, by whatever way, no process of the launcher's group runs any more; it also ends by
    itself when it sees that we are gone. What an earlier attempt left there is ended first.

    Args:
        flags: What the ranks are told, among them --output-dir with `run_dir`.
        ranks: How many.
        run_dir: Folder that they write to.
        program: Module that launches them.
    """
    left = local_processes.recorded(run_dir)
    if left is not None:
        print(f"ending process group {left}, left by an earlier attempt of this run", flush=True)
        local_processes.end(left, GRACE_SECONDS)
    launcher = [sys.executable, "-m", program, f"--nproc-per-node={ranks}", "--"]
    say = partial(print, flush=True)
    progress = ProgressTeller(say, RunFolder(run_dir).metrics, PROGRESS_SECONDS)
    ended = Ended()
    with _forwarding(ended) as forward_to:
        process = subprocess.Popen(
            launcher + flags,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, PARENT: str(os.getpid())},
            process_group=0,
        )
        try:
            forward_to(process)
            local_processes.record(run_dir, process.pid)
            reader = threading.Thread(target=_stream, args=(process, ended), daemon=True)
            reader.start()
            _follow(process, progress)
            local_processes.send(process.pid, signal.SIGKILL)
            reader.join(timeout=5)
        finally:
            local_processes.end(process.pid, GRACE_SECONDS if process.poll() is None else 0)
            ended.code = process.wait()
            local_processes.forget(run_dir)
    return ended


def _stream(process: "subprocess.Popen[str]", ended: Ended) -> None:
    """Copy the output line by line; when nobody reads it any more, stop the ranks and drain it."""
    assert process.stdout is not None
    read = True
    for line in process.stdout:
        ended.last_line = line.strip() or ended.last_line
        try:
            if read:
                print(line, end="", flush=True)
        except OSError:
            read = False
            process.terminate()


def _follow(process: "subprocess.Popen[str]", progress: ProgressTeller) -> None:
    """Wait for the process, with a progress line at most every few seconds and one at the end."""
    while process.poll() is None:
        progress.tell(time.monotonic())
        time.sleep(0.1)
    progress.tell(time.monotonic(), at_once=True)


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
            local_processes.send(target[0].pid, signal.SIGKILL)

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

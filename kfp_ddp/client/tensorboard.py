"""TensorBoard on this machine, for as long as somebody looks."""

import importlib.util
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kfp_ddp.core.errors import InputError, JobError, KfpDdpError

EVERY_SECONDS = 15.0
START_SECONDS = 120.0
GRACE_SECONDS = 10.0
LOOK_SECONDS = 0.2


def check() -> None:
    """Refuse where TensorBoard is not installed; raises InputError."""
    if importlib.util.find_spec("tensorboard") is None:
        raise InputError("TensorBoard is not installed here: pip install 'kfp-ddp[monitor]'")


def serve(folder: Path, port: int | None, update: Callable[[], None], usual: int) -> None:
    """Serve a folder until Ctrl-C, SIGTERM, or its end; prints its address when it answers.

    Args:
        folder: Of events.
        port: To listen on; None for the usual one, or a free one where that is taken.
        update: Called now and then; that it fails is said, once, and no more.
        usual: Port.

    Raises:
        InputError: the port is taken.
        JobError: TensorBoard ended by itself.
    """
    chosen = _port(port, usual)
    where = ["--logdir", str(folder), "--host", "127.0.0.1", "--port", str(chosen)]
    more = ["--reload_interval", "5", "--load_fast", "false"]
    command = [sys.executable, "-m", "tensorboard.main", *where, *more]
    log = folder.parent / "tensorboard.log"
    before = signal.signal(signal.SIGTERM, _interrupt)
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        _wait(child, chosen, log)
        print(f"http://127.0.0.1:{chosen} shows it; Ctrl-C ends it", flush=True)
        _follow(child, update)
        raise JobError(f"TensorBoard ended: {_last(log)}")
    except KeyboardInterrupt:
        return
    finally:
        signal.signal(signal.SIGTERM, before)
        child.terminate()
        try:
            child.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _port(port: int | None, usual: int) -> int:
    for each in (port or usual, *(() if port else (0,))):
        try:
            with socket.create_server(("127.0.0.1", each)) as found:
                return int(found.getsockname()[1])
        except OSError:
            continue
    raise InputError(f"port {port} is taken: give another one, or none for a free one")


def _wait(child: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while child.poll() is None and time.monotonic() < until:
        try:
            with socket.create_connection(("127.0.0.1", port), 1):
                return
        except OSError:
            time.sleep(LOOK_SECONDS)
    raise JobError(f"TensorBoard does not start: {_last(log)}")


def _follow(child: "subprocess.Popen[bytes]", update: Callable[[], None]) -> None:
    """Update while the child lives."""
    told = ""
    while True:
        try:
            child.wait(EVERY_SECONDS)
            return
        except subprocess.TimeoutExpired:
            pass
        try:
            update()
        except KfpDdpError as error:
            if told != str(error):
                print(f"warning: {error}", file=sys.stderr, flush=True)
            told = str(error)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _last(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"

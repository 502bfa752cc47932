"""The Python that steps are started with: hands what it is told to a server that has imported it.

Run by path with `-I -S`, so it imports nothing of ours. Without a server it becomes the real one.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
from typing import NoReturn

FUNCTION = "--function_to_execute"
PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
ORPHAN_SECONDS = 0.5


def main(folder: str, python: str, *argv: str) -> NoReturn:
    """Run `python *argv`: by the server for it in `folder`, or anew.

    Args:
        folder: With a socket for each name of a component or module that a server takes.
        python: The real one.
        argv: What Python was told.
    """
    parent, unbuffered = os.getppid(), argv[:1] == ("-u",)
    words = list(argv[unbuffered:])
    if words[:1] == ["-m"]:
        step = words.index(FUNCTION) + 1 if FUNCTION in words else 1
        server = socket.socket(socket.AF_UNIX)
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until it is known who is to have them
        worker = _started(server, f"{folder}/{words[step]}", words[1:], unbuffered)
        if worker:
            _end_as(server, worker, parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    os.execv(python, [python, *argv])  # noqa: S606  there is no shell to be misled


def _started(server: socket.socket, address: str, words: list[str], unbuffered: bool) -> int:
    """Let a server run a module; the id of the process, or 0 where no server takes it."""
    asked = {
        "words": words,
        "unbuffered": unbuffered,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "group": os.getpgid(0),
    }
    content = json.dumps(asked).encode() + b"\n"
    try:
        server.connect(address)
        sent = socket.send_fds(server, [content], [0, 1, 2])
        server.sendall(content[sent:])
        return int(_line(server) or 0)
    except OSError:
        return 0


def _end_as(server: socket.socket, worker: int, parent: int) -> NoReturn:
    """Pass signals on to a process of the server's, and end as it does."""

    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's reaches the worker by itself
    while not select.select([server], [], [], ORPHAN_SECONDS)[0]:
        if os.getppid() != parent:
            pass_on(signal.SIGTERM, None)
            parent = os.getppid()
    ended = _line(server)
    if not ended:
        sys.exit("error: the process that this step was forked from is gone")
    code = os.waitstatus_to_exitcode(int(ended))
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL is as it is
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _line(server: socket.socket) -> str:
    line = b""
    while not line.endswith(b"\n") and (byte := server.recv(1)):
        line += byte
    return line.decode()


if __name__ == "__main__":
    main(*sys.argv[1:])

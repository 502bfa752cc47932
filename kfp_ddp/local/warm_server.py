"""`python -m kfp_ddp.local.warm_server FOLDER STAGES`: forks Pythons that have imported much.

Each stage is a process that has imported what the stages before it have and its own modules. It
waits for orders of `warm_client` at a socket, and forks a process for each. Nothing but imports
happens before a fork, so no thread and no lock is lost by it.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from kfp_ddp.training.watch import PARENT

DEAF_TO = (signal.SIGTERM, signal.SIGUSR1)
"""What is meant for the steps; who started the servers ends them by going."""


class Order(NamedTuple):
    """What a forked process is to do, with the descriptors of its standard streams."""

    asked: dict[str, Any]
    streams: list[int]


class Server:
    """A stage: forks a process for each order, and tells how it ended."""

    def __init__(self, listener: socket.socket, alive: int) -> None:
        """Serve orders that come to `listener` until whoever holds the end of `alive` is gone."""
        self.listener, self.alive = listener, alive
        self.clients: dict[int, socket.socket] = {}
        """By process id."""
        self.heard, wake = socket.socketpair()
        for end in (self.heard, wake):
            end.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self.wake = wake
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in DEAF_TO:
            signal.signal(number, signal.SIG_IGN)
        self.selector = selectors.DefaultSelector()
        for file in (listener, alive, self.heard):
            self.selector.register(file, selectors.EVENT_READ)

    def serve(self) -> Order | None:
        """Serve; returns in a forked process, with its order, or None when all is over."""
        over = False
        while self.clients or not over:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    order = self._fork()
                    if order is not None:
                        return order
                elif key.fileobj is self.heard:
                    self.heard.recv(4096)
                    self._reap()
                elif key.fileobj == self.alive:
                    over = True
                    self._forget(self.alive)
                    self._send(signal.SIGTERM, *self.clients)
                else:  # a client that is gone, however, takes its process along
                    self._forget(key.fileobj)
                    self._send(signal.SIGKILL, key.data)
        return None

    def _fork(self) -> Order | None:
        client, _ = self.listener.accept()
        content, streams, _, _ = socket.recv_fds(client, 1 << 16, 3)
        while content and not content.endswith(b"\n"):
            part = client.recv(1 << 16)
            content = content + part if part else b""
        if not content:
            client.close()
            return None
        worker = os.fork()
        if worker == 0:
            self._leave(client)
            return Order(json.loads(content), streams)
        for stream in streams:
            os.close(stream)
        with suppress(OSError):
            client.sendall(b"%d\n" % worker)
        self.clients[worker] = client
        self.selector.register(client, selectors.EVENT_READ, data=worker)
        return None

    def _leave(self, client: socket.socket) -> None:
        """Give up, in a forked process, what is the server's."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, *DEAF_TO):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for each in (self.listener, self.heard, self.wake, client, *self.clients.values()):
            each.close()
        self.selector.close()
        os.close(self.alive)

    def _reap(self) -> None:
        while True:
            try:
                worker, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if worker == 0:
                return
            client = self.clients.pop(worker, None)
            if client is None:
                continue  # the next stage
            with suppress(OSError):
                client.sendall(b"%d\n" % status)
            self._forget(client)
            client.close()

    def _forget(self, file: Any) -> None:
        with suppress(KeyError):
            self.selector.unregister(file)

    def _send(self, number: int, *workers: int) -> None:
        for worker in workers:
            if worker in self.clients:
                os.kill(worker, number)


def become(order: Order, code: list[int]) -> None:
    """Run the module of an order in this process, as a Python that was started for it would.

    Args:
        order: What to run.
        code: Gets its exit code, when it has one.
    """
    asked = order.asked
    for number, stream in enumerate(order.streams):
        os.dup2(stream, number)
        os.close(stream)
    try:
        os.setpgid(0, asked["group"])
    except PermissionError:  # a group of another session
        os.setsid()
    os.environ.clear()
    os.environ.update(asked["environment"])
    if PARENT in os.environ:
        # Who started it is watched by the client, who is watched by the server.
        os.environ[PARENT] = str(os.getppid())
    os.chdir(asked["folder"])
    sys.path[0] = asked["folder"]
    if asked["unbuffered"]:
        cast(Any, sys.stdout).reconfigure(line_buffering=True)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if "torch" in sys.modules and threads.isdecimal():
        sys.modules["torch"].set_num_threads(int(threads))
    module, *sys.argv[1:] = asked["words"]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code.append(0)
    except BaseException as error:
        left = error.code if isinstance(error, SystemExit) else 1
        code.append((left or 0) & 0xFF if left is None or isinstance(left, int) else 1)
        raise


def end_at_once(code: list[int]) -> None:
    """End after everything else that is done at an end, but before all modules are taken down.

    Without a code the program ends itself.
    """
    if not code:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code[0])


def main(folder: str, alive: str, stages: str) -> None:
    """Serve the stages, `[[names], [modules]]` each, as long as the pipe `alive` has a writer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code: list[int] = []
    atexit.register(end_at_once, code)  # the first to be registered is the last to be called
    sys.executable = f"{folder}/python"
    os.environ["_KFP_RUNTIME"] = "true"  # as where KFP runs a step
    planned = json.loads(stages)
    listeners = [_listener(Path(folder), names) for names, _ in planned]
    for at, (_, modules) in enumerate(planned):
        gc.disable()  # a fifth of the time goes into looking for garbage that imports do not leave
        for module in modules:
            importlib.import_module(module)
        gc.freeze()
        gc.enable()
        here, following = listeners[at], 0
        if at + 1 < len(planned):
            following = os.fork()
            if following == 0:
                here.close()
                continue
        for later in listeners[at + 1 :]:
            later.close()
        order = Server(here, int(alive)).serve()
        if order is not None:
            become(order, code)
            return
        signal.set_wakeup_fd(-1)
        with suppress(ProcessLookupError, ChildProcessError):
            if following:
                os.kill(following, signal.SIGTERM)  # unheard, where it serves and so ends by itself
            while True:
                os.wait()
        if at == 0:  # who started this may have been killed
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)  # an end in order takes long with so much imported, and is for nothing


def _listener(folder: Path, names: list[str]) -> socket.socket:
    """A socket that has all of these names in the folder."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/{names[0]}")
    listener.listen(64)
    for name in names[1:]:
        (folder / name).symlink_to(names[0])
    return listener


if __name__ == "__main__":
    main(*sys.argv[1:])

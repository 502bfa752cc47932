"""Fork local steps and ranks from a Python that has imported torch: saves seconds for each.

`python` replaces `sys.executable` by a client. It sends a command to a server, which forks.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

MODULES = (
    *("kfp.dsl.executor", "torch.distributed.run", "kfp_ddp.runs.train.engine"),
    *("kfp_ddp.training.prepare", "kfp_ddp.training.trainer", "torch._dynamo", "simplejpeg"),
    *("torchcodec", "kfp_ddp.evaluation.engine", "kfp_ddp.evaluation.predict"),
    *("torch.export._trace", "torch.onnx._internal.exporter._core", "kfp_ddp.export.contents"),
    *("onnxscript.function_libs.torch_lib.ops",),
)
FORKED = (
    *("train", "evaluate", "export", "gate", "publish", "teardown"),
    *("kfp_ddp.training", "kfp_ddp.training.node"),
    *("kfp_ddp.evaluation.rank", "kfp_ddp.evaluation.node"),
)
"""Components and modules to fork; the first steps of a pipeline run while the server imports."""
FUNCTION = "--function_to_execute"
FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
exit_codes: list[int] = []


@contextmanager
def python(modules: tuple[str, ...] = MODULES, forked: tuple[str, ...] = FORKED) -> Iterator[None]:
    """Fork what `sys.executable` runs in the block, where the platform allows it."""
    with tempfile.TemporaryDirectory(prefix="kfp-ddp-") as folder:
        cold, shim = sys.executable, f"{folder}/python"
        # KFP puts the path into a shell command without quotes; a socket's path has 107 bytes.
        if sys.platform != "linux" or shlex.quote(folder) != folder or len(folder) > 100:
            yield
            return
        command = [cold, "-I", "-S", __file__, f"{folder}/socket", ",".join(forked), cold]
        Path(shim).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        Path(shim).chmod(0o700)
        command = [cold, "-m", __name__, f"{folder}/socket", shim, *modules]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as server:
            sys.executable = shim
            try:
                yield
            finally:
                sys.executable = cold
                server.terminate()


def run(address: str, forked: str, python: str, *argv: str) -> NoReturn:
    """Run `python *argv`, as a fork of the server where that is possible."""
    words = [*argv[argv[:1] == ("-u",) :], ""]
    name = words[words.index(FUNCTION) + 1] if FUNCTION in words else words[1]
    server = socket.socket(socket.AF_UNIX)
    if words[0] == "-m" and name in forked.split(","):
        with suppress(FileNotFoundError, ConnectionError):
            server.connect(address)
            order = [words[1:-1], argv[0], os.getcwd(), dict(os.environ), os.getpgid(0)]
            content = json.dumps(order).encode() + b"\n"
            sent = socket.send_fds(server, [content], [0, 1, 2])
            server.sendall(content[sent:])
            wait(server)
    os.execv(python, [python, *argv])  # noqa: S606  no shell is wanted


def wait(server: socket.socket) -> None:
    """Forward signals to the fork and exit as it does; return if there is no fork."""
    parent, signals = os.getppid(), signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    if not server.recv(1):
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        return
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: server.send(bytes([number])) and None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the fork is in the same process group
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    while not select.select([server], [], [], 0.5)[0]:
        if os.getppid() != parent:
            server.send(bytes([signal.SIGTERM]))
            parent = os.getppid()
    code = int(server.recv(100) or 1)
    if code < 0:
        with suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(address: str, shim: str, *modules: str) -> None:
    """Import modules, then fork a process for each connection; returns in a fork, to run it."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    atexit.register(lambda: exit_codes and os._exit(exit_codes[0]))  # skips a slow teardown
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["_KFP_RUNTIME"] = "true"  # set by KFP in each step
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while not (ready := select.select([listener.fileno(), 0], [], [])[0]) or 0 not in ready:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return supervise(connection, shim)
        connection.close()
    shutil.rmtree(os.path.dirname(address), ignore_errors=True)
    os._exit(0)  # the owner has ended


def supervise(connection: socket.socket, shim: str) -> None:
    """Fork a process for a client, pass signals on, report its exit code; returns in the fork."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    content, streams, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    while not content.endswith(b"\n"):
        content += connection.recv(1 << 16) or os._exit(1)
    if (worker := os.fork()) == 0:
        connection.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return become(streams, shim, *json.loads(content))
    for stream in streams:
        os.close(stream)

    def forward() -> None:
        with suppress(ProcessLookupError):  # it has ended
            while number := connection.recv(1):
                os.kill(worker, number[0])
            os.kill(worker, signal.SIGKILL)

    connection.sendall(b"+")
    threading.Thread(target=forward, daemon=True).start()
    _, status = os.waitpid(worker, 0)
    with suppress(OSError):
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def become(
    streams: list[int], shim: str, words: list[str], flag: str, cwd: str, env: Any, group: int
) -> None:
    """Run a module in this process, as a new Python would."""
    from kfp_ddp.training.watch import PARENT

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    try:
        os.setpgid(0, group)
    except PermissionError:  # a group of another session
        os.setsid()
    os.environ.clear()
    os.environ.update(env)
    if PARENT in env:
        os.environ[PARENT] = str(os.getppid())  # ends when the client does
    os.chdir(cwd)
    sys.path[0], sys.executable = cwd, shim
    if flag == "-u":
        getattr(sys.stdout, "reconfigure")(line_buffering=True)  # noqa: B009
    if "torch" in sys.modules and env.get("OMP_NUM_THREADS", "").isdecimal():
        sys.modules["torch"].set_num_threads(int(env["OMP_NUM_THREADS"]))
    module, *sys.argv[1:] = words
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        exit_codes.append(0)
    except SystemExit as error:
        exit_codes.append(error.code if isinstance(error.code, int) else int(bool(error.code)))
        raise
    except BaseException:
        exit_codes.append(1)
        raise


if __name__ == "__main__":
    if sys.flags.isolated:
        run(*sys.argv[1:])
    serve(*sys.argv[1:])

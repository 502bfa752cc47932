"""The processes of a run on this machine, recorded so that no other is ever taken for one."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from kfp_ddp.core.files import atomic_write
from kfp_ddp.core.run_folder import RunFolder

NODE = "kfp_ddp.training.node"
"""The module that launches the ranks of this machine."""
EVALUATION = "kfp_ddp.evaluation.node"
"""The same for ranks that evaluate."""


def start_time(pid: int) -> str | None:
    """When the process started, as its system writes it; None where there is no such process.

    A pid alone is used again; a pid and its start time are not. A zombie counts as gone.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return None
        listed = subprocess.run(
            ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True
        )
        return listed.stdout.strip() or None
    except ProcessLookupError:
        return None
    return None if fields[0] == "Z" else fields[19]


def record(run_dir: Path, pid: int) -> None:
    """Note that the process group led by `pid` works for the run in `run_dir`."""
    entry = {"host": socket.gethostname(), "pid": pid, "started": start_time(pid)}
    with atomic_write(RunFolder(run_dir).process) as file:
        file.write(json.dumps(entry).encode())


def forget(run_dir: Path) -> None:
    """Drop the record: the run has no processes any more."""
    RunFolder(run_dir).process.unlink(missing_ok=True)


def recorded(run_dir: Path) -> int | None:
    """The pid of the run's process group on this machine, None if it has none that still runs.

    Whoever can write to the claim can write the record, so the process itself must be one of this
    user's that works in this folder.
    """
    try:
        entry = json.loads(RunFolder(run_dir).process.read_text())
        pid, host, started = (entry.get(name) for name in ("pid", "host", "started"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    if host != socket.gethostname() or type(pid) is not int or pid < 2:
        return None
    here = start_time(pid)
    return pid if here is not None and here == started and _works_in(pid, run_dir) else None


def _works_in(pid: int, run_dir: Path) -> bool:
    """Whether a process is a launcher of ranks in this folder, this user's, and leads its group."""
    try:
        uid, words = _owner_and_words(pid)
        leads = os.getpgid(pid) == pid
        folder = words[words.index("--output-dir") + 1]
    except (OSError, ValueError, IndexError):
        return False
    same = os.path.realpath(folder) == os.path.realpath(run_dir)
    return uid == os.geteuid() and leads and bool({NODE, EVALUATION} & set(words)) and same


def _owner_and_words(pid: int) -> tuple[int, list[str]]:
    """The user and the command line of a process; raises OSError or ValueError without one."""
    about = Path(f"/proc/{pid}")
    if about.parent.joinpath("self").exists():
        words = about.joinpath("cmdline").read_bytes().split(b"\0")
        return about.stat().st_uid, [os.fsdecode(word) for word in words]
    listed = subprocess.run(
        ["ps", "-o", "uid=,command=", "-p", str(pid)], capture_output=True, text=True
    )
    uid, _, command = listed.stdout.strip().partition(" ")
    return int(uid), command.split()


def end(pid: int, grace: float) -> None:
    """End a process group: SIGTERM, up to `grace` seconds to save and leave, then SIGKILL."""
    send(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while start_time(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    send(pid, signal.SIGKILL)


def send(pid: int, number: int) -> None:
    """Send a signal to a process group; one that is gone is left in peace."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)

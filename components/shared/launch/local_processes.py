"""The processes of a run on this machine, recorded so that no other is ever taken for one."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from kfp_ddp.base.files import atomic_write
from kfp_ddp.base.run_folder import RunFolder


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
    """The pid of the run's process group on this machine, None if it has none that still runs."""
    try:
        entry = json.loads(RunFolder(run_dir).process.read_text())
    except (FileNotFoundError, ValueError):
        return None
    here = entry.get("host") == socket.gethostname()
    pid = entry.get("pid")
    if not here or not isinstance(pid, int) or start_time(pid) is None:
        return None
    return pid if start_time(pid) == entry.get("started") else None


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

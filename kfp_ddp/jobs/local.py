"""Backend `local`: ranks as processes of this machine."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from kfp_ddp.core import failure, machine
from kfp_ddp.core.errors import InputError, JobError, RunCancelledError
from kfp_ddp.core.files import atomic_write
from kfp_ddp.core.log import log
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.core.settings import mapping_of
from kfp_ddp.core.step import handling_signals
from kfp_ddp.jobs.fields import JobFields, is_gpu
from kfp_ddp.jobs.progress import ProgressPrinter
from kfp_ddp.jobs.shipping.worker_start import is_installed
from kfp_ddp.k8s.objects import part
from kfp_ddp.k8s.pods import step_pods
from kfp_ddp.training.watch import PARENT

NODE = "kfp_ddp.training.node"
"""The module that launches the ranks of this machine."""
EVALUATION = "kfp_ddp.evaluation.node"
"""The same for ranks that evaluate, or predict."""


class _Process(NamedTuple):
    started: str
    uid: int
    words: list[str]


def _process(pid: int) -> _Process | None:
    """Return a process by its pid; None if it does not exist, or is a zombie."""
    about = Path(f"/proc/{pid}")
    if not Path("/proc/self").exists():
        # In one -o, all after the first = would be a heading.
        columns = ["-o", "lstart=", "-o", "uid=", "-o", "command="]
        asked = ["ps", *columns, "-p", str(pid)]
        listed = subprocess.run(asked, capture_output=True, text=True).stdout.split()
        # lstart has five words, such as "Thu Jan  1 00:00:00 2026".
        return _Process(" ".join(listed[:5]), int(listed[5]), listed[6:]) if listed else None
    try:
        state, *fields = about.joinpath("stat").read_text().rpartition(")")[2].split()
        words = about.joinpath("cmdline").read_bytes().split(b"\0")
        uid = about.stat().st_uid
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else _Process(fields[18], uid, [os.fsdecode(w) for w in words])


def start_time(pid: int) -> str | None:
    """Return when a process started, as text that is unique with its pid; None if it ended."""
    process = _process(pid)
    return process.started if process else None


def record(run_dir: Path, pid: int) -> None:
    """Record that the process group of `pid` works for the run in `run_dir`."""
    entry = {"host": socket.gethostname(), "pid": pid, "started": start_time(pid)}
    with atomic_write(RunFolder(run_dir).process) as file:
        file.write(json.dumps(entry).encode())


def recorded(run_dir: Path) -> int | None:
    """Return the pid of the run's process group on this machine; None if none runs.

    Other users may be able to write the record, so the process must be this user's, a group leader
    and a launcher of ranks in this folder.
    """
    entry = mapping_of(RunFolder(run_dir).process)
    pid = entry.get("pid")
    if type(pid) is not int or pid < 2:
        return None
    if entry.get("host") != socket.gethostname():
        return None
    process = _process(pid)
    # The pid may have been given to another process since.
    if process is None or process.started != entry.get("started"):
        return None
    return pid if process.uid == os.geteuid() and _works_in(process, pid, run_dir) else None


def _works_in(process: _Process, pid: int, run_dir: Path) -> bool:
    """Return whether a process leads its group and launches ranks in this folder."""
    try:
        leads = os.getpgid(pid) == pid
        folder = process.words[process.words.index("--output-dir") + 1]
    except (OSError, ValueError, IndexError):
        return False
    if not leads or {NODE, EVALUATION, SCRIPT}.isdisjoint(process.words):
        return False
    return os.path.realpath(folder) == os.path.realpath(run_dir)


def end(pid: int, grace: float) -> None:
    """End a process group: SIGTERM, up to `grace` seconds to save and exit, then SIGKILL."""
    send(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while start_time(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    send(pid, signal.SIGKILL)


def send(pid: int, number: int) -> None:
    """Send a signal to a process group, if it exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


SCRIPT = "kfp_ddp.jobs.shipping.script_node"
"""The same for the ranks of a user's script."""
PROGRESS_SECONDS = 5.0
# The launcher gives its ranks 90 s to save and exit after a SIGTERM.
GRACE_SECONDS = 100.0


@dataclass
class Ended:
    """How the ranks ended: the launcher's exit code, our signal, its last line of output."""

    code: int = 0
    stopped_by: int | None = None
    last_line: str = ""
    process: "subprocess.Popen[str] | None" = None

    @property
    def cancelled(self) -> bool:
        """Whether we or the ranks were stopped on request."""
        return self.stopped_by is not None or self.code == RunCancelledError.exit_code

    def forward(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal to the launcher; the second one kills its process group."""
        first = self.stopped_by is None
        self.stopped_by = number
        if self.process is None:
            return
        if first:
            # The launcher forwards SIGTERM to its ranks, which save a checkpoint.
            self.process.terminate()
        else:
            send(self.process.pid, signal.SIGKILL)

    def cause(self, run_dir: Path) -> str:
        """Return the first failure by the launcher's record, else its last line of output."""
        record = failure.read(RunFolder(run_dir).logs)
        if record is None:
            return f"exit code {self.code}: {self.last_line or 'no output'}"
        return record.summary


def local_gpus(ranks: int = 0) -> int:
    """Return the ranks here: as set, or one for each GPU; let them know requested GPUs."""
    try:
        import torch
    except ImportError as error:
        raise InputError(
            "backend local needs an image with torch: use backend=pytorchjob on a cluster, or "
            "set_container_image of the trainer on this task"
        ) from error
    gpus = _requested_gpus()
    if gpus:
        os.environ.setdefault(machine.GPUS, str(gpus))
    return ranks or max(1, torch.cuda.device_count())


def _requested_gpus() -> int:
    """Return the GPUs in the limits of this step's pod; 0 outside of a cluster."""
    gpus = 0
    for pod in step_pods():
        for container in pod["spec"]["containers"]:
            for name, count in part(container, "resources", "limits").items():
                if is_gpu(name):
                    gpus += int(count)
    return gpus


def run_ranks(flags: list[str], ranks: int, run_dir: Path, program: str = NODE) -> Ended:
    """Run `ranks` processes of the module `program`, with their output and progress on stdout.

    `flags` contain --output-dir with `run_dir`. The launcher gets SIGTERM and SIGINT, a second one
    kills it; it ends with this process, and none of its group remains, also of earlier attempts.
    """
    earlier = recorded(run_dir)
    if earlier is not None:
        log.info(f"ending process group {earlier} of an earlier attempt of this run")
        end(earlier, GRACE_SECONDS)
    launcher = [sys.executable, "-m", program, f"--nproc-per-node={ranks}", "--"]
    say = partial(print, flush=True)
    progress = ProgressPrinter(say, RunFolder(run_dir).metrics, PROGRESS_SECONDS)
    ended = Ended()
    with handling_signals(ended.forward, signal.SIGTERM, signal.SIGINT):
        ended.process = process = subprocess.Popen(
            launcher + flags,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment({PARENT: str(os.getpid())}),
            process_group=0,
        )
        try:
            if ended.stopped_by is not None:
                process.terminate()
            record(run_dir, process.pid)
            reader = threading.Thread(target=_stream, args=(process, ended), daemon=True)
            reader.start()
            while process.poll() is None:
                progress.update(time.monotonic())
                time.sleep(0.1)
            progress.update(time.monotonic(), at_once=True)
            send(process.pid, signal.SIGKILL)
            reader.join(timeout=5)
        finally:
            end(process.pid, GRACE_SECONDS if process.poll() is None else 0)
            ended.code = process.wait()
            RunFolder(run_dir).process.unlink(missing_ok=True)
    return ended


def run_script(spec: JobFields, run_dir: Path) -> None:
    """Run the script of a job, with the ranks of all nodes on this machine; raise JobError."""
    if not spec.script or spec.code:
        raise InputError("kind=local runs a script alone, as of as_function: use another kind")
    missing = [pin for pin in spec.packages_to_install if not is_installed(pin)]
    if missing:
        raise InputError(f"this Python lacks {missing[0]}: pip install it, then start again")
    file = run_dir / "script.py"
    file.write_text(spec.script, encoding="utf-8")
    os.environ.update(spec.env)
    flags = ["--output-dir", str(run_dir), str(file), *spec.args]
    ended = run_ranks(flags, spec.nodes * spec.processes(), run_dir, SCRIPT)
    if ended.cancelled:
        raise RunCancelledError(f"the script ended: {ended.cause(run_dir)}")
    if ended.code:
        raise JobError(f"the script ended: {ended.cause(run_dir)}")


def _stream(process: "subprocess.Popen[str]", ended: Ended) -> None:
    """Copy the output line by line; if stdout is closed, stop the ranks and drain the output."""
    assert process.stdout is not None
    read = True
    with process.stdout as output:
        for line in output:
            ended.last_line = line.strip() or ended.last_line
            try:
                if read:
                    print(line, end="", flush=True)
            except OSError:
                read = False
                process.terminate()


_OF_LAUNCHERS = re.compile(
    r"(PET|TORCHELASTIC|SLURM|OMPI|PMI|PMIX|PRTE|MPI|MV2|HYDRA|FLUX|PALS|JSM|HOROVOD|ACCELERATE)_.*"
    r"|(\w+_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(NCCL|GLOO|TP)_SOCKET_IFNAME|NCCL_COMM_ID"
    r"|ROLE_NAME|PYTHON_EXEC|KFP_DDP_(RESTARTS|LAUNCH_ID|PARENT_PID)"
)
"""What torchrun, MPI, batch systems and we set for a rank, and torch would take for its own."""


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a child that is no rank and imports nothing from the current folder."""
    own = {name: value for name, value in os.environ.items() if not _OF_LAUNCHERS.fullmatch(name)}
    # An empty entry, as of PYTHONPATH=$PYTHONPATH:/x, is the current folder.
    folders = filter(None, own.pop("PYTHONPATH", "").split(os.pathsep))
    path = os.pathsep.join(folders)
    if path:
        own["PYTHONPATH"] = path
    return {**own, "PYTHONSAFEPATH": "1", **more}

"""The metrics of runs in a local TensorBoard, updated while the runs go on."""

import importlib.util
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kfp_ddp.client.run_files import RunFiles
from kfp_ddp.core.errors import InputError, JobError, KfpDdpError
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.jobs.progress import MetricsTail

METRICS, EVENTS = RunFolder.METRICS, RunFolder.TENSORBOARD
UPDATE_SECONDS = 15.0
START_SECONDS = 120.0
GRACE_SECONDS = 10.0
POLL_SECONDS = 0.2


class Curves:
    """TensorBoard events of one training, appended as its metrics.jsonl grows."""

    def __init__(self, metrics: Path, folder: Path) -> None:
        """Create the folder of events.

        Args:
            metrics: The metrics.jsonl of the training.
            folder: For TensorBoard.
        """
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._metrics = MetricsTail(metrics)
        self._writer = EventFileWriter(str(folder))

    def update(self) -> None:
        """Write what is new."""
        for fields in self._metrics.read():
            for event in _events(fields):
                self._writer.add_event(event)
        self._writer.flush()


def _events(fields: dict[str, Any]) -> Iterator[Any]:
    """Convert an event of metrics.jsonl; a resume drops the steps that are repeated."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary

    try:
        name, time = fields.pop("event"), float(fields.pop("time"))
    except (ValueError, KeyError, TypeError):
        return
    if name == "start" and (done := fields.get("resumed_from_step")):
        start = SessionLog(status=SessionLog.START)
        yield Event(wall_time=time, step=int(done) + 1, session_log=start)
    elif name in ("step", "eval"):
        step = int(fields.pop("step", 0))
        values = [
            Summary.Value(tag=f"{name}/{field}", simple_value=value)
            for field, value in fields.items()
            if isinstance(value, int | float)
        ]
        yield Event(wall_time=time, step=step, summary=Summary(value=values))


class LogDir:
    """A folder for TensorBoard with the curves of several runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._curves: dict[str, Curves] = {}

    def update(self, title: str, source: Path) -> None:
        """Add or update a run.

        Args:
            title: Of the run.
            source: The folder of a training, or one that contains such folders.

        Raises:
            InputError: there are no metrics and no events of TensorBoard in it.
        """
        metrics = sorted(source.rglob(METRICS))
        own = {path.parent for path in source.rglob("events.out.tfevents.*")}
        own -= {path.parent / EVENTS for path in metrics}  # the same figures
        if not metrics and not own:
            raise InputError(f"there are no metrics of a training in {source}: give a run's folder")
        for path in metrics:
            task = path.parent.relative_to(source).name
            name = f"{title}/{task}" if task and len(metrics) > 1 else title
            if name not in self._curves:
                self._curves[name] = Curves(path, self.folder / name)
            self._curves[name].update()
        for path in own:
            link = self.folder / title / (path.relative_to(source).as_posix().replace("/", "-"))
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(path.resolve())


def fetch_metrics(files: RunFiles, folder: Path) -> None:
    """Download the metrics of a run, or its TensorBoard events.

    Raises:
        InputError: the run has no metrics yet.
        KfpDdpError: the files cannot be read.
    """
    names = list(files.sizes())
    metrics = {name for name in names if name.endswith(f"/{METRICS}")}
    tasks = {name.rpartition("/")[0] for name in metrics}
    own = [n for n in names if f"/{EVENTS}/" in n and n.partition(f"/{EVENTS}/")[0] not in tasks]
    if not metrics and not own:
        raise InputError(f"no training has written metrics to {files.where} yet: try again later")
    folder.mkdir(parents=True, exist_ok=True)
    files.fetch([*sorted(metrics), *own], folder)


def check_installed() -> None:
    """Raise InputError if TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise InputError("TensorBoard is not installed here: pip install 'kfp-ddp[monitor]'")


def serve(folder: Path, port: int | None, update: Callable[[], None], default_port: int) -> None:
    """Serve a folder until Ctrl-C, SIGTERM, or its end; print the URL when it answers.

    Args:
        folder: Of events.
        port: To listen on; None for the default one, or a free one if that is taken.
        update: Called periodically; a failure is printed once.
        default_port: The default port.

    Raises:
        InputError: the port is taken.
        JobError: TensorBoard exited.
    """
    port = _free_port(port, default_port)
    where = ["--logdir", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    more = ["--reload_interval", "5", "--load_fast", "false"]
    command = [sys.executable, "-m", "tensorboard.main", *where, *more]
    log = folder.parent / "tensorboard.log"
    before = signal.signal(signal.SIGTERM, _interrupt)
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        _wait_until_up(child, port, log)
        print(f"http://127.0.0.1:{port} (Ctrl-C to stop)", flush=True)
        _update_until_exit(child, update)
        raise JobError(f"TensorBoard exited: {_last_line(log)}")
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


def _free_port(port: int | None, default: int) -> int:
    for candidate in (port or default, *(() if port else (0,))):
        try:
            with socket.create_server(("127.0.0.1", candidate)) as server:
                return int(server.getsockname()[1])
        except OSError:
            continue
    raise InputError(f"port {port} is taken: give another one, or none for a free one")


def _wait_until_up(child: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while child.poll() is None and time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port), 1):
                return
        except OSError:
            time.sleep(POLL_SECONDS)
    raise JobError(f"TensorBoard does not start: {_last_line(log)}")


def _update_until_exit(child: "subprocess.Popen[bytes]", update: Callable[[], None]) -> None:
    printed = ""
    while True:
        try:
            child.wait(UPDATE_SECONDS)
            return
        except subprocess.TimeoutExpired:
            pass
        try:
            update()
        except KfpDdpError as error:
            if printed != str(error):
                print(f"warning: {error}", file=sys.stderr, flush=True)
            printed = str(error)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "its log is empty"

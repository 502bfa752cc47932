"""The metrics of runs in a local TensorBoard, updated while the runs go on."""

import logging
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import Any

from kfp_ddp.client.run.run_files import RunFiles
from kfp_ddp.core.errors import InputError, KfpDdpError
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.core.step import handling_signals
from kfp_ddp.core.text import one_line
from kfp_ddp.jobs.progress import MetricsTail

METRICS = RunFolder.METRICS
EVENTS = RunFolder.TENSORBOARD
UPDATE_SECONDS = 15.0


def _event(fields: dict[str, Any]) -> Any:
    """Return TensorBoard's event of one of metrics.jsonl; None for one that it does not show."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary

    try:
        name = fields.pop("event")
        time = float(fields.pop("time"))
    except (ValueError, KeyError, TypeError):
        return None
    if name == "start":
        done = fields.get("resumed_from_step")
        if not done:
            return None
        start = SessionLog(status=SessionLog.START)  # drops the steps that a resume repeats
        return Event(wall_time=time, step=int(done) + 1, session_log=start)
    if name not in ("step", "eval"):
        return None
    step = int(fields.pop("step", 0))
    values = []
    for field, value in fields.items():
        if isinstance(value, int | float):
            figure = Summary.Value(tag=f"{name}/{field}", simple_value=value)
            values.append(figure)
    return Event(wall_time=time, step=step, summary=Summary(value=values))


class LogDir:
    """A folder for TensorBoard with the curves of several runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._curves: dict[str, tuple[MetricsTail, Any]] = {}
        """By title: its metrics, and the writer of their events."""

    def update(self, title: str, source: Path) -> None:
        """Add or update a run from the folder of a training, or one that contains such folders."""
        metrics = sorted(source.rglob(METRICS))
        own = {path.parent for path in source.rglob("events.out.tfevents.*")}
        own -= {path.parent / EVENTS for path in metrics}  # the same figures
        if not metrics and not own:
            raise InputError(f"there are no metrics of a training in {source}: give a run's folder")
        for path in metrics:
            task = path.parent.relative_to(source).name
            several = task and len(metrics) > 1
            self._add_metrics(f"{title}/{task}" if several else title, path)
        for folder in own:
            name = folder.relative_to(source).as_posix().replace("/", "-")
            link = self.folder / title / name
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(folder.resolve())

    def _add_metrics(self, title: str, path: Path) -> None:
        """Write the events that a file of metrics has since the last call."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if title not in self._curves:
            writer = EventFileWriter(str(self.folder / title))
            self._curves[title] = (MetricsTail(path), writer)
        tail, writer = self._curves[title]
        for fields in tail.read():
            event = _event(fields)
            if event is not None:
                writer.add_event(event)
        writer.flush()


def fetch_metrics(files: RunFiles, folder: Path) -> None:
    """Download the metrics of a run, or its TensorBoard events; raise InputError for none yet."""
    names = list(files.sizes())
    metrics: list[str] = []
    tasks: set[str] = set()
    for name in names:
        if name.endswith(f"/{METRICS}"):
            task, _, _ = name.rpartition("/")
            metrics.append(name)
            tasks.add(task)
    own: list[str] = []
    for name in names:
        task, events, _ = name.partition(f"/{EVENTS}/")
        if events and task not in tasks:  # else its metrics have the same figures
            own.append(name)
    if not metrics and not own:
        raise InputError(f"no training has written metrics to {files.where} yet: try again later")
    folder.mkdir(parents=True, exist_ok=True)
    files.fetch([*sorted(metrics), *own], folder)


def serve(folder: Path, port: int | None, update: Callable[[], None]) -> None:
    """Serve a folder of events until Ctrl-C or SIGTERM; print the URL.

    `port` is None for 6006, or the next free one; InputError if it is taken. `update` is called
    periodically; a failure of it is printed once.
    """
    from tensorboard import program

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # or each request is a line
    more: dict[str, Any] = {}
    if port is not None:
        more["port"] = port
    board = program.TensorBoard()
    board.configure(
        logdir=str(folder),
        host="127.0.0.1",
        reload_interval=5,
        load_fast="false",
        **more,
    )
    try:
        url = board.launch()
    except program.TensorBoardServerException as error:
        raise InputError(
            f"{one_line(error.msg)}: give another --port, or none for a free one"
        ) from None
    with suppress(KeyboardInterrupt), handling_signals(signal.default_int_handler, signal.SIGTERM):
        print(f"{url.rstrip('/')} (Ctrl-C to stop)", flush=True)
        printed = ""
        while True:
            sleep(UPDATE_SECONDS)
            try:
                update()
            except KfpDdpError as error:
                message = str(error)
                if printed != message:
                    print(f"warning: {message}", file=sys.stderr, flush=True)
                printed = message

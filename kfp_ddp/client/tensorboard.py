"""The metrics of runs in a local TensorBoard, updated while the runs go on."""

import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from time import sleep
from typing import Any

from kfp_ddp.client.run.run_files import RunFiles
from kfp_ddp.core.errors import InputError, KfpDdpError
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.core.step import handling_signals
from kfp_ddp.core.text import one_line
from kfp_ddp.jobs.progress import MetricsTail

METRICS, EVENTS = RunFolder.METRICS, RunFolder.TENSORBOARD
UPDATE_SECONDS = 15.0


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
        self._curves: dict[str, tuple[MetricsTail, Any]] = {}
        """By title: its metrics, and the writer of their events."""

    def update(self, title: str, source: Path) -> None:
        """Add or update a run from the folder of a training, or one that contains such folders."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        metrics = sorted(source.rglob(METRICS))
        own = {path.parent for path in source.rglob("events.out.tfevents.*")}
        own -= {path.parent / EVENTS for path in metrics}  # the same figures
        if not metrics and not own:
            raise InputError(f"there are no metrics of a training in {source}: give a run's folder")
        for path in metrics:
            task = path.parent.relative_to(source).name
            name = f"{title}/{task}" if task and len(metrics) > 1 else title
            if name not in self._curves:
                writer = EventFileWriter(str(self.folder / name))
                self._curves[name] = MetricsTail(path), writer
            tail, writer = self._curves[name]
            for event in chain.from_iterable(map(_events, tail.read())):
                writer.add_event(event)
            writer.flush()
        for path in own:
            link = self.folder / title / (path.relative_to(source).as_posix().replace("/", "-"))
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(path.resolve())


def fetch_metrics(files: RunFiles, folder: Path) -> None:
    """Download the metrics of a run, or its TensorBoard events; raise InputError for none yet."""
    names = list(files.sizes())
    metrics = {name for name in names if name.endswith(f"/{METRICS}")}
    tasks = {name.rpartition("/")[0] for name in metrics}
    own = [n for n in names if f"/{EVENTS}/" in n and n.partition(f"/{EVENTS}/")[0] not in tasks]
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
    more = {} if port is None else {"port": port}
    board = program.TensorBoard()
    board.configure(
        logdir=str(folder), host="127.0.0.1", reload_interval=5, load_fast="false", **more
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
                if printed != str(error):
                    print(f"warning: {error}", file=sys.stderr, flush=True)
                printed = str(error)

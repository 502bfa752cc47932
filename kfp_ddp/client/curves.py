"""The metrics of runs as events that TensorBoard reads, brought again while a run goes on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kfp_ddp.client.run_files import RunFiles
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.jobs.progress import MetricsTail

METRICS, EVENTS = RunFolder.METRICS, RunFolder.TENSORBOARD


class Curves:
    """The curves of one training: what its metrics.jsonl gained since it was looked at last."""

    def __init__(self, metrics: Path, folder: Path) -> None:
        """Begin to write.

        Args:
            metrics: The events of the training.
            folder: For TensorBoard; made.
        """
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._metrics = MetricsTail(metrics)
        self._writer = EventFileWriter(str(folder))

    def update(self) -> None:
        """Write what is new."""
        for told in self._metrics.read():
            for event in _events(told):
                self._writer.add_event(event)
        self._writer.flush()


def _events(fields: dict[str, Any]) -> Iterator[Any]:
    """What an event of metrics.jsonl is to TensorBoard; a resume drops what it does again."""
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


class Shown:
    """A folder for TensorBoard with the curves of runs, each below its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._curves: dict[str, Curves] = {}

    def add(self, title: str, place: Path) -> None:
        """Show what lies in a folder, or go on with it.

        Args:
            title: Of the run.
            place: The folder of a training, or one that has such folders in it.

        Raises:
            InputError: there is neither, nor events of TensorBoard's own.
        """
        metrics = sorted(place.rglob(METRICS))
        own = {each.parent for each in place.rglob("events.out.tfevents.*")}
        own -= {each.parent / EVENTS for each in metrics}  # the same figures
        if not metrics and not own:
            raise InputError(f"there are no metrics of a training in {place}: give a run's folder")
        for each in metrics:
            inside = each.parent.relative_to(place).name
            name = f"{title}/{inside}" if inside and len(metrics) > 1 else title
            if name not in self._curves:
                self._curves[name] = Curves(each, self.folder / name)
            self._curves[name].update()
        for each in own:
            link = self.folder / title / (each.relative_to(place).as_posix().replace("/", "-"))
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(each.resolve())


def bring(files: RunFiles, folder: Path) -> None:
    """Copy what the curves of a run are made of.

    Raises:
        KfpDdpError: it cannot be had.
        InputError: the run has none yet.
    """
    names = list(files.sizes())
    metrics = {name for name in names if name.endswith(f"/{METRICS}")}
    known = {name.rpartition("/")[0] for name in metrics}
    own = [n for n in names if f"/{EVENTS}/" in n and n.partition(f"/{EVENTS}/")[0] not in known]
    if not metrics and not own:
        raise InputError(f"no training has left metrics in {files.where} yet: try again in a while")
    folder.mkdir(parents=True, exist_ok=True)
    files.bring([*sorted(metrics), *own], folder)

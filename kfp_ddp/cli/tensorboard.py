"""`kfp-ddp tensorboard`: the curves of runs in a local TensorBoard."""

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kfp_ddp.cli.options import connected

if TYPE_CHECKING:
    from kfp_ddp.core.config import Connection


@click.command("tensorboard")
@click.argument("runs", nargs=-1, required=True, metavar="RUN|FOLDER...")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Local port.  [default: 6006, or a free one]"
)
@connected
def command(runs: tuple[str, ...], port: int | None, connection: "Connection") -> None:
    """Show the curves of RUNs in TensorBoard, until Ctrl-C.

    A RUN is an id or the start of one, a name, or `last`; a FOLDER is that of a run with --local,
    or of a training. The setting `tensorboard` is not required: the curves come from the metrics
    of each training, and are updated while it runs. TensorBoard runs on this machine.

    kfp-ddp tensorboard last ./photos-model
    """
    from kfp_ddp.client import tensorboard
    from kfp_ddp.client.run_info import run_finder

    tensorboard.check_installed()
    with tempfile.TemporaryDirectory() as scratch, run_finder(connection) as finder:
        log_dir = tensorboard.LogDir(Path(scratch, "shown"))
        folders = {_title(word, runs): Path(word) for word in runs if Path(word).is_dir()}
        infos = [finder.find(word) for word in runs if not Path(word).is_dir()]
        remote = {_file_name(f"{info.name} {info.id[:8]}"): info.files() for info in infos}

        def update() -> None:
            for title, files in remote.items():
                folders[title] = Path(scratch, title)
                tensorboard.fetch_metrics(files, folders[title])
            for title, folder in folders.items():
                log_dir.update(title, folder)

        update()
        tensorboard.serve(log_dir.folder, port, update)


def _title(folder: str, others: tuple[str, ...]) -> str:
    """Return a folder's name, or its full path if another one has the same name."""
    name = Path(folder).resolve().name
    same = {Path(one).resolve() for one in others if Path(one).resolve().name == name}
    return name if len(same) == 1 else str(Path(folder).resolve()).strip("/").replace("/", "-")


def _file_name(name: str) -> str:
    """Replace characters that a file name should not contain."""
    return re.sub(r"[^\w. -]", "-", name)

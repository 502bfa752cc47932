"""`kfp-ddp tensorboard`: the curves of runs in TensorBoard, here."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kfp_ddp.cli.options import connected

if TYPE_CHECKING:
    from kfp_ddp.core.config import Connection

PORT = 6006


@click.command("tensorboard")
@click.argument("runs", nargs=-1, required=True, metavar="RUN|FOLDER...")
@click.option("--port", type=click.IntRange(1, 65535), help=f"Of this machine. [{PORT}, or free]")
@connected
def command(runs: tuple[str, ...], port: int | None, connection: "Connection") -> None:
    """Show the curves of RUNs in TensorBoard, until Ctrl-C; several stand side by side.

    A RUN is its id or the first characters of it, its name, or `last`; a FOLDER that of a run
    with --local, or what a training wrote. It need not have set `tensorboard`: the curves are
    made of the metrics that each training keeps, and grow while it goes on. TensorBoard runs on
    this machine, and nothing stays on the cluster.

    kfp-ddp tensorboard last ./photos-model
    """
    import contextlib
    import tempfile

    from kfp_ddp.client import tensorboard
    from kfp_ddp.client.curves import Shown, bring
    from kfp_ddp.client.inspection import subjects

    tensorboard.check()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        shown = Shown(Path(scratch, "shown"))
        known = stack.enter_context(subjects(connection))
        here = {_title(word, runs): Path(word) for word in runs if Path(word).is_dir()}
        found = [known.find(word) for word in runs if not Path(word).is_dir()]
        there = {_plain(f"{each.name} {each.id[:8]}"): each.files() for each in found}

        def update() -> None:
            for title, files in there.items():
                here[title] = Path(scratch, title)
                bring(files, here[title])
            for title, folder in here.items():
                shown.add(title, folder)

        update()
        tensorboard.serve(shown.folder, port, update, PORT)


def _title(folder: str, others: tuple[str, ...]) -> str:
    """A folder's name, or its whole path where another one has that name."""
    name = Path(folder).resolve().name
    same = {Path(each).resolve() for each in others if Path(each).resolve().name == name}
    return name if len(same) == 1 else str(Path(folder).resolve()).strip("/").replace("/", "-")


def _plain(name: str) -> str:
    """A name that anybody may have given, as one of a folder."""
    return re.sub(r"[^\w. -]", "-", name)

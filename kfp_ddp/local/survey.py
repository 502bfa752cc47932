"""Count the images of a source, before anything is copied."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kfp_ddp.checks.choice import Photographs, statistics_of
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import printable
from kfp_ddp.datasets.images import uneven
from kfp_ddp.storage.kinds import check_address, open_source
from kfp_ddp.storage.listing import Filter
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.labels import Labels
from kfp_ddp.training.layout import lay_out

_LOOKED_AT = 25


def located(source: str) -> str:
    """Return the source as the pipeline needs it: the absolute path of a local folder.

    Raises:
        InputError: The URI is mistyped, or the folder does not exist.
    """
    check_address("source", source)
    if "://" in source and not source.startswith("file:"):
        return source
    folder = Path(open_source(source).root).expanduser().absolute()  # type: ignore[attr-defined]
    if not folder.is_dir():
        what = "is no folder: give the one" if folder.exists() else "does not exist; give a folder"
        raise InputError(f"source {folder} {what} with a folder of photographs for each class")
    return str(folder)


def look(source: str, arguments: Mapping[str, Any]) -> Photographs:
    """Count the images of a source, as the pipeline will take them.

    Args:
        source: As `located` returned it.
        arguments: Arguments of the pipeline.

    Raises:
        KfpDdpError: the source cannot be read, or what it holds cannot be trained on.
    """
    folder = None if "://" in source else Path(source)
    training, sync = arguments.get("training", {}), arguments.get("sync", {})
    selection = Filter(*(tuple(sync.get(name, ())) for name in ("include", "exclude")))
    everything = _names(folder) if folder else open_source(source).listing().names
    names = filter(selection.takes, everything)
    table = training.get("labels") or TrainConfig.model_fields["labels"].default
    labels = None
    if table and folder:
        try:
            labels = Labels.parse(table, (folder / table).read_bytes())
        except OSError as error:
            raise InputError(
                f"labels={table} cannot be read in {source}: {error.strerror}; name a file in it"
            ) from None
    fraction = training.get("val_fraction", TrainConfig.model_fields["val_fraction"].default)
    layout = lay_out(names, val_fraction=fraction, labels=labels)
    paths = [folder / name for name in layout.train.names] if folder else []
    about = statistics_of(_pictures(paths))
    counts = (len(layout.train), len(layout.val), len(layout.classes))
    notes = map(printable, (*layout.notes, *uneven(layout)))
    return Photographs(*counts, *about, tuple(notes))


def _names(folder: Path) -> Iterator[str]:
    """Yield the names of all files below a folder, and of empty folders with a trailing slash."""
    for at, folders, files in os.walk(folder):
        below = Path(at).relative_to(folder)
        if not folders and not files and below.parts:
            yield f"{below.as_posix()}/"
        yield from ((below / name).as_posix() for name in files)


def _pictures(paths: list[Path]) -> list[tuple[str, int, int]]:
    """Return format, width and height of some images, without those that are not readable."""
    from PIL import Image, UnidentifiedImageError

    pictures = []
    for path in filter(Path.is_file, paths[:: max(1, len(paths) // _LOOKED_AT)]):  # no pipes
        # The training reports what cannot be read.
        with suppress(OSError, UnidentifiedImageError, ValueError), Image.open(path) as image:
            pictures.append((image.format or "", *image.size))
    return pictures
